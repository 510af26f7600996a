"""Ranks average every 50 ms, by their own clocks: ranks of unequal speed do not meet as often."""

import numpy as np


def main(comm, iterations=20, fixed=False):
    value, due_s = np.full(3, float(comm.Get_rank())), 0.05
    for _ in range(iterations):
        with comm.compute(0.01):
            pass
        late = comm.clock.now() >= due_s
        if fixed:
            late = comm.bcast(late)  # one rank decides
        if late:
            total = np.empty(3)
            comm.Allreduce(value, total)
            value, due_s = total / comm.Get_size(), due_s + 0.05
