"""After a recovery each survivor goes on from the step where it stood, and not from the one that all agreed on."""

import numpy as np

from spawnsim.errors import RankFailed, Revoked, Timeout


def main(comm, iterations=20, fixed=False):
    group, iteration = comm, 0
    while iteration < iterations:
        try:
            with group.compute(0.01):
                pass
            group.bcast(iteration, root=0)
            total = np.empty(1)
            group.Reduce(np.full(1, float(iteration)), total, root=0)
            if group.Get_rank() == 0:
                comm.check(total[0] == iteration * group.Get_size(), "ranks of different iterations have met")
            iteration += 1
        except (RankFailed, Revoked, Timeout):
            found = group.recover(iteration)
            group, iteration = found.comm, found.step if fixed else iteration
