"""Two ranks lock two parts of a window in opposite orders, 100 s apart; each may hold one and wait for the other."""

import numpy as np


def main(comm, fixed=False):
    window = comm.Win.Allocate(8, comm=comm)
    comm.Barrier()
    parts = (0, 1) if comm.rank == 1 or fixed else (1, 0)
    if comm.rank:
        with comm.compute(100.0 * (comm.rank - 1)):
            pass
        for part in parts:
            window.Lock(part)
        window.Put(np.ones(1), parts[0])
        for part in parts:
            window.Unlock(part)
    comm.Barrier()
    window.Free()
