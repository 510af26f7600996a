"""Collective calls whose one buffer is also the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from spawnsim.testing.claims import same


def allreduce(MPI: Any, comm: Any) -> None:
    """The buffer holds the operand, then the result."""
    rank, size = comm.Get_rank(), comm.Get_size()
    buf = np.array([rank, 1])
    comm.Allreduce(MPI.IN_PLACE, buf, op=MPI.SUM)
    same(buf, [size * (size - 1) // 2, size])


def reduce(MPI: Any, comm: Any) -> None:
    """At the root the receiving buffer is its operand; the others' operands stay."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for root in range(size):
        buf = np.full(2, rank + 1)
        comm.Reduce(MPI.IN_PLACE if rank == root else buf, buf if rank == root else None, root=root)
        same(buf, np.full(2, size * (size + 1) // 2 if rank == root else rank + 1))


def the_same_array_twice(MPI: Any, comm: Any) -> None:
    """One array as both buffers of a reduction is ERR_BUFFER (or, in later versions, means IN_PLACE)."""
    rank, size = comm.Get_rank(), comm.Get_size()
    buf = np.full(2, rank)
    try:
        comm.Allreduce(buf, buf)
    except MPI.Exception as error:
        same((error.Get_error_class(), buf.tolist()), (MPI.ERR_BUFFER, [rank, rank]))
    else:
        same(buf, np.full(2, size * (size - 1) // 2))


def gather(MPI: Any, comm: Any) -> None:
    """The root's own block lies in its table already."""
    rank, size = comm.Get_rank(), comm.Get_size()
    table = np.full((size, 2), -1)
    table[rank] = rank
    comm.Gather(MPI.IN_PLACE if rank == 0 else table[rank], table if rank == 0 else None)
    if rank == 0:
        same(table, [[other] * 2 for other in range(size)])


def scatter(MPI: Any, comm: Any) -> None:
    """The root's own block stays in its table."""
    rank, size = comm.Get_rank(), comm.Get_size()
    table, row = np.repeat(np.arange(size), 2).reshape(size, 2), np.full(2, -1)
    comm.Scatter(table if rank == 0 else None, MPI.IN_PLACE if rank == 0 else row)
    same(table[0] if rank == 0 else row, [rank, rank])


def allgather(MPI: Any, comm: Any) -> None:
    """Each rank's own block lies in its table already."""
    rank, size = comm.Get_rank(), comm.Get_size()
    table = np.full((size, 2), -1)
    table[rank] = rank
    comm.Allgather(MPI.IN_PLACE, table)
    same(table, [[other] * 2 for other in range(size)])


def alltoall(MPI: Any, comm: Any) -> None:
    """Blocks are exchanged within one table."""
    rank, size = comm.Get_rank(), comm.Get_size()
    table = np.array([[10 * rank + other] * 2 for other in range(size)])
    comm.Alltoall(MPI.IN_PLACE, table)
    same(table, [[10 * other + rank] * 2 for other in range(size)])


def scans(MPI: Any, comm: Any) -> None:
    """Prefix sums replace their operands; rank 0 of Exscan keeps its own."""
    rank = comm.Get_rank()
    upto, before = np.full(1, rank + 1), np.full(1, rank + 1)
    comm.Scan(MPI.IN_PLACE, upto)
    comm.Exscan(MPI.IN_PLACE, before)
    same(
        (int(upto[0]), int(before[0])), ((rank + 1) * (rank + 2) // 2, rank * (rank + 1) // 2 if rank else 1)
    )


def reduce_scatter_block(MPI: Any, comm: Any) -> None:
    """The rank's block of the sum lies at the start of the buffer."""
    rank, size = comm.Get_rank(), comm.Get_size()
    buf = np.arange(size) + rank
    comm.Reduce_scatter_block(MPI.IN_PLACE, buf)
    same(int(buf[0]), size * rank + size * (size - 1) // 2)


def reduce_scatter(MPI: Any, comm: Any) -> None:
    """With lengths given, the rank's part of the sum lies at the start of the buffer."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [1] * size
    buf = np.arange(size) + rank
    comm.Reduce_scatter(MPI.IN_PLACE, buf, counts)
    same(int(buf[0]), size * rank + size * (size - 1) // 2)


def gatherv_and_scatterv(MPI: Any, comm: Any) -> None:
    """The root's block of unequal ones stays where it is."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [other + 1 for other in range(size)]
    whole = [other for other in range(size) for _ in range(other + 1)]
    table, mine = np.full(sum(counts), -1), np.full(rank + 1, rank)
    table[0] = 0
    comm.Gatherv(MPI.IN_PLACE if rank == 0 else mine, [table, counts] if rank == 0 else None)
    same(table, whole if rank == 0 else [0, *[-1] * (sum(counts) - 1)])
    mine[:] = -1
    comm.Scatterv([np.array(whole), counts] if rank == 0 else None, MPI.IN_PLACE if rank == 0 else mine)
    same(mine, np.full(rank + 1, rank) if rank else [-1])


def allgatherv(MPI: Any, comm: Any) -> None:
    """Each rank's block of unequal ones lies in its table already."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [other + 1 for other in range(size)]
    table = np.full(sum(counts), -1)
    start = sum(counts[:rank])
    table[start : start + rank + 1] = rank
    comm.Allgatherv(MPI.IN_PLACE, [table, counts])
    same(table, [other for other in range(size) for _ in range(other + 1)])


def alltoallv(MPI: Any, comm: Any) -> None:
    """Blocks of pairwise equal length are exchanged within one buffer."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [1 + (rank + other) % 2 for other in range(size)]
    buf = np.concatenate([np.full(counts[other], 10 * rank + other) for other in range(size)])
    comm.Alltoallv(MPI.IN_PLACE, [buf, counts])
    same(buf, np.concatenate([np.full(counts[other], 10 * other + rank) for other in range(size)]))


def nonblocking(MPI: Any, comm: Any) -> None:
    """IN_PLACE works in nonblocking calls too."""
    rank, size = comm.Get_rank(), comm.Get_size()
    total, row = np.full(2, rank), np.full(size, -1)
    row[rank] = rank
    MPI.Request.Waitall([comm.Iallreduce(MPI.IN_PLACE, total), comm.Iallgather(MPI.IN_PLACE, row)])
    same((total.tolist(), row.tolist()), ([size * (size - 1) // 2] * 2, list(range(size))))
