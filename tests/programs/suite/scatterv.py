"""Scatterv, Gatherv, Allgatherv, Reduce_scatter, Scan and Exscan with uneven parts."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
counts = [r + 1 for r in range(size)]
displs = [sum(counts[:r]) for r in range(size)]
whole = np.arange(sum(counts), dtype="f8") if rank == 0 else None
mine = np.empty(rank + 1)
comm.Scatterv([whole, counts, displs, MPI.DOUBLE], mine, root=0)
assert mine[0] == displs[rank]
mine *= 2
back = np.zeros(sum(counts)) if rank == 0 else None
comm.Gatherv(mine, [back, counts, displs, MPI.DOUBLE], root=0)
if rank == 0:
    assert (back == 2 * whole).all()
every = np.empty(sum(counts))
comm.Allgatherv(mine, [every, (counts, displs)])
assert every[-1] == 2 * (sum(counts) - 1)
own = np.empty(rank + 1)
comm.Reduce_scatter(every, own, counts)
assert (own == size * mine).all()
one = np.empty(2)
comm.Reduce_scatter_block(np.arange(2.0 * size), one)
assert one[0] == size * 2 * rank
running = np.empty(1, "i")
comm.Scan(np.array([rank + 1], "i"), running)
assert running[0] == sum(range(rank + 2))
before = comm.exscan(rank + 1)
assert before == (None if rank == 0 else sum(range(rank + 1)))
inplace = np.full(3, float(rank))
comm.Allreduce(MPI.IN_PLACE, inplace, op=MPI.MAX)
assert (inplace == size - 1).all()
loc = np.zeros(1, np.dtype([("value", "d"), ("index", "i")], align=True))
loc["value"], loc["index"] = -abs(rank - size // 2), rank
found = np.zeros_like(loc)
comm.Allreduce([loc, MPI.DOUBLE_INT], [found, MPI.DOUBLE_INT], op=MPI.MAXLOC)
assert found["index"][0] == size // 2
assert comm.allreduce((rank % 3, rank), op=MPI.MINLOC) == (0, 0)
if rank == 0:
    print("uneven parts:", back.sum(), every.sum())
