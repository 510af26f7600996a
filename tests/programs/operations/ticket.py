"""Ranks draw tickets at times that differ tenfold. Two calls read and increase the number, where one should do both."""

import numpy as np

from spawnsim.comm import NO_OP, SUM


class Ticket:
    def __init__(self):
        self.next = 0

    def take(self):
        self.next += 1
        return self.next - 1


def main(comm, fixed=False):
    comm.check("ticket", linearizable=Ticket)
    window = comm.Win.Allocate(8, 8, comm=comm)
    window.tomemory()[:] = bytes(8)
    comm.Barrier()
    with comm.compute(0.001 * 10**comm.rank):
        pass
    one, number = np.ones(1, np.int64), np.zeros(1, np.int64)
    with comm.record.operation("ticket", "take") as call:
        window.Lock_all()
        window.Fetch_and_op(one, number, 0, 0, SUM if fixed else NO_OP)
        window.Flush(0)
        if not fixed:
            window.Accumulate(one, 0, op=SUM)
        window.Unlock_all()
        call.result = number[0]
    comm.Barrier()
    window.Free()
