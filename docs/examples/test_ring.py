"""A test on virtual ranks: `pytest test_ring.py`. Each case runs under five seeds, with delayed messages."""

import numpy as np

from spawnsim.testing import virtual


@virtual(ranks=[2, 9], seeds=5, faults="delay")
def test_a_ring_turns(comm):
    """After one step each rank has its left neighbour's number."""
    mine, theirs = np.full(1, comm.rank), np.empty(1, int)
    comm.Sendrecv(mine, dest=(comm.rank + 1) % comm.size, recvbuf=theirs, source=(comm.rank - 1) % comm.size)
    assert theirs[0] == (comm.rank - 1) % comm.size
