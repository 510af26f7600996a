"""A token round a ring, blocking; then Sendrecv."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
right, left = (rank + 1) % size, (rank - 1) % size

token = np.zeros(1, dtype="i")
if size > 1:
    if rank == 0:
        token[0] = 100
        comm.Send([token, MPI.INT], dest=right, tag=7)
        comm.Recv([token, MPI.INT], source=left, tag=7)
        print("token is back:", token[0])
    else:
        comm.Recv([token, MPI.INT], source=left, tag=7)
        token[0] += rank
        comm.Send([token, MPI.INT], dest=right, tag=7)

got = np.empty(3, "d")
for _ in range(3):
    comm.Sendrecv(np.full(3, float(rank)), right, 1, got, left, 1)
    assert (got == left).all()
buf = np.array([rank], "i")
for _ in range(size):
    comm.Sendrecv_replace(buf, right, source=left)
assert buf[0] == rank
total = comm.reduce(int(got[0]), op=MPI.SUM, root=0)
if rank == 0:
    print("sum of what came:", total)
