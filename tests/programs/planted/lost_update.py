"""A counter in a window of rank 0 is read, increased and written back: two ranks that do so at once count one."""

import numpy as np

from spawnsim.comm import SUM


def main(comm, iterations=20, fixed=False):
    window = comm.Win.Allocate(8, comm=comm)
    np.frombuffer(window.tomemory(), np.int64)[:] = 0
    comm.Barrier()
    window.Lock_all()
    for _ in range(iterations):
        with comm.compute(0.01):
            pass
        counter, one = np.zeros(1, np.int64), np.ones(1, np.int64)
        if fixed:
            window.Fetch_and_op(one, counter, 0, 0, SUM)
            window.Flush(0)
        else:
            window.Get(counter, 0)
            window.Flush(0)
            window.Put(counter + 1, 0)
            window.Flush(0)
    comm.Barrier()
    counter = np.zeros(1, np.int64)
    window.Get(counter, 0)
    window.Flush(0)
    comm.check(
        counter[0] == iterations * comm.Get_size(),
        f"{counter[0]} of {iterations * comm.Get_size()} were counted",
    )
    window.Unlock_all()
    window.Free()
