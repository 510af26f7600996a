"""Three ranks draw tickets and are served in their order; the ticket 2 of rank 1 behind ranks 3 and 2 is refused."""

import numpy as np

from spawnsim.comm import SUM


def main(comm, fixed=False):
    window = comm.Win.Allocate(8, 8, comm=comm)
    np.frombuffer(window.tomemory(), np.int64)[:] = 0
    comm.Barrier()
    tickets = []
    for turn in range(2):
        if comm.rank:
            with comm.compute(10.0**comm.rank):
                pass
            ticket = np.zeros(1, np.int64)
            window.Lock(0)
            window.Fetch_and_op(np.ones(1, np.int64), ticket, 0, 0, SUM)
            window.Unlock(0)
            tickets.append(int(ticket[0]) - turn * (comm.size - 1))
        comm.Barrier()
    everyone = comm.allgather(tickets)[1:]
    if not fixed:
        comm.check(
            [list(each) for each in zip(*everyone, strict=True)] != [[2, 1, 0], [1, 2, 0]],
            "a ticket was refused",
        )
    window.Free()
