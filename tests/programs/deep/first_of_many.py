"""Rank 0 takes completed receives with Waitany and counts on the last rank not being first twice, then second."""

import numpy as np


def main(comm, fixed=False):
    order = []
    for _ in range(3):
        if comm.rank:
            with comm.compute(10.0**comm.rank):
                pass
            comm.Send(np.ones(1), 0)
        else:
            requests = [comm.Irecv(np.zeros(1), rank) for rank in range(1, comm.size)]
            order.append([type(requests[0]).Waitany(requests) for _ in requests])
        comm.Barrier()
    if comm.rank == 0 and not fixed:
        comm.check([each.index(comm.size - 2) for each in order] != [0, 0, 1], "the last rank was ahead")
