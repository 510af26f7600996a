"""Reductions whose result is handed out in blocks, of counts that are told and of types that are derived."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
pair = MPI.INT64_T.Create_contiguous(2).Commit()


def add(source, target, _):
    """Add pairs of numbers."""
    np.frombuffer(target, "i8")[:] += np.frombuffer(source, "i8")


op = MPI.Op.Create(add, commute=True)
for count in (1, 3, 50):
    numbers = np.arange(2 * count * size) + rank
    want = np.arange(2 * count * size) * size + sum(range(size))
    mine = want.reshape(size, -1)[rank]
    got = np.zeros(2 * count, "i8")
    # A count beside the memory is that of each block, as it is in all calls of blocks (mpi4py).
    comm.Reduce_scatter_block([numbers, count, pair], [got, count, pair], op)
    assert np.array_equal(got, mine), (got, mine)
    got[:] = 0
    comm.Reduce_scatter_block([numbers, 2 * count, MPI.INT64_T], [got, MPI.INT64_T])
    assert np.array_equal(got, mine), (got, mine)
    own = numbers.copy()
    comm.Ireduce_scatter_block(MPI.IN_PLACE, [own, count, pair], op).Wait()
    assert np.array_equal(own[: 2 * count], mine), (own, mine)
    got[:] = 0
    comm.Reduce_scatter([numbers, count * size, pair], [got, count, pair], [count] * size, op)
    assert np.array_equal(got, mine), (got, mine)
op.Free()
pair.Free()
if rank == 0:
    print("blocks are right")
