"""Each rank keeps a copy of a value. Rank 0 writes one copy after the other: a later reader may see the older value."""

import numpy as np

from spawnsim.comm import LOCK_SHARED


class Register:
    def __init__(self):
        self.value = 0

    def write(self, value):
        self.value = value

    def read(self):
        return self.value


def main(comm, iterations=4, fixed=False):
    comm.check("value", linearizable=Register)
    window = comm.Win.Allocate(8, 8, comm=comm)
    window.tomemory()[:] = bytes(8)
    comm.Barrier()
    value = np.zeros(1, np.int64)
    for iteration in range(1, iterations + 1):
        with comm.compute(0.01):
            pass
        if comm.rank == 0:
            with comm.record.operation("value", "write", iteration):
                for copy in [0] if fixed else range(comm.size):
                    window.Lock(copy)
                    window.Put(np.array([iteration]), copy)
                    window.Unlock(copy)
            continue
        for _ in range(3):
            with comm.record.operation("value", "read") as call:
                copy = 0 if fixed else comm.rank
                window.Lock(copy, LOCK_SHARED)
                window.Get(value, copy)
                window.Unlock(copy)
                call.result = value[0]
    comm.Barrier()
    window.Free()
