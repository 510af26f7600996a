"""After a recovery the survivors go on dividing by the number of ranks that the job began with."""

import numpy as np

from spawnsim.errors import RankFailed, Revoked, Timeout


def main(comm, iterations=20, fixed=False):
    group, iteration, parts = comm, 0, comm.Get_size()
    while iteration < iterations:
        try:
            with group.compute(0.01):
                pass
            total = np.empty(2)
            group.Allreduce(np.ones(2), total)
            parts = group.Get_size() if fixed else parts
            comm.check(total[0] / parts == 1.0, f"the mean of ones is {total[0] / parts}")
            iteration += 1
        except (RankFailed, Revoked, Timeout):
            found = group.recover(iteration)
            group, iteration = found.comm, found.step
