"""A consumer finds no item, registers as a waiter and sleeps; an item that comes in between wakes nobody."""

import numpy as np

from spawnsim.comm import SUM

ITEM, WAITING = 1, 2


def add(window, number):
    """Add to rank 0's word; return what it was."""
    before = np.zeros(1, np.int64)
    window.Fetch_and_op(np.array([number]), before, 0, 0, SUM)
    window.Flush(0)
    return int(before[0])


def main(comm, fixed=False):
    window = comm.Win.Allocate(8, 8, comm=comm)
    np.frombuffer(window.tomemory(), np.int64)[:] = 0
    comm.Barrier()
    window.Lock_all()
    if comm.rank == 1:
        found = add(window, WAITING if fixed else 0)
        if not found & ITEM:
            if not fixed:
                add(window, WAITING)
            comm.recv(source=2)
    elif comm.rank == 2:
        with comm.compute(100.0):
            pass
        if add(window, ITEM) & WAITING:
            comm.send(None, 1)
    window.Unlock_all()
    window.Free()
