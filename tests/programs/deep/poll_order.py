"""Rank 0 polls its requests with Testany; the last rank's first, then nothing, then rank 1's is taken for a restart."""

import numpy as np


def main(comm, fixed=False):
    if comm.rank:
        with comm.compute(10.0**comm.rank):
            pass
        comm.Send(np.ones(1), 0)
        return
    requests = [comm.Irecv(np.zeros(1), rank) for rank in range(1, comm.size)]
    found = []
    for _ in range(3):
        index, flag = type(requests[0]).Testany(requests)
        found.append(index if flag else None)
    type(requests[0]).Waitall(requests)
    comm.check(fixed or found != [comm.size - 2, None, 0], "the ranks have restarted")
