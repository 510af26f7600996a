"""Odd-even transposition sort."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
n = 5
mine = np.sort(np.random.RandomState(rank).randint(0, 1000, n))
other = np.empty(n, mine.dtype)
for phase in range(size):
    partner = rank + 1 if (rank + phase) % 2 == 0 else rank - 1
    if not 0 <= partner < size:
        partner = MPI.PROC_NULL
    comm.Sendrecv(mine, partner, phase, other, partner, phase)
    if partner == MPI.PROC_NULL:
        continue
    both = np.sort(np.concatenate([mine, other]))
    mine = both[:n].copy() if rank < partner else both[n:].copy()
everything = comm.gather(mine, root=0)
if rank == 0:
    flat = np.concatenate(everything)
    expected = np.sort(np.concatenate([np.random.RandomState(r).randint(0, 1000, n) for r in range(size)]))
    assert (flat == expected).all()
    print("sorted:", flat[:5], "...", flat[-5:])
