"""A counter in a window of rank 0: shared locks let two ranks read the same value, and one increment is lost."""

import numpy as np

from spawnsim.comm import LOCK_EXCLUSIVE, LOCK_SHARED


class Counter:
    def __init__(self):
        self.value = 0

    def add(self, number):
        self.value += number

    def read(self):
        return self.value


def main(comm, iterations=5, fixed=False):
    comm.check("counter", linearizable=Counter)
    window = comm.Win.Allocate(8 * (comm.rank == 0), 8, comm=comm)
    window.tomemory()[:] = bytes(8 * (comm.rank == 0))
    comm.Barrier()
    value = np.zeros(1, np.int64)
    for _ in range(iterations):
        with comm.compute(0.01):
            pass
        with comm.record.operation("counter", "add", comm.rank + 1):
            window.Lock(0, LOCK_EXCLUSIVE if fixed else LOCK_SHARED)
            window.Get(value, 0)
            window.Flush(0)
            window.Put(value + comm.rank + 1, 0)
            window.Unlock(0)
    comm.Barrier()
    with comm.record.operation("counter", "read") as call:
        window.Lock(0, LOCK_SHARED)
        window.Get(value, 0)
        window.Unlock(0)
        call.result = value[0]
    window.Free()
