"""Collective calls on blocks of unequal length and type."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np

from spawnsim.testing.claims import refused, same


def starts(counts: list[int]) -> list[int]:
    """Return where blocks begin that lie one after the other."""
    return [0, *accumulate(counts)][: len(counts)]


def rows(size: int) -> list[int]:
    """Return `other` repeated `other + 1` times for every rank: what a gather of growing blocks gives."""
    return [other for other in range(size) for _ in range(other + 1)]


def gatherv_with_counts(MPI: Any, comm: Any) -> None:
    """Blocks of growing length come one after the other."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [other + 1 for other in range(size)]
    for root in range(size):
        target = np.full(sum(counts), -1)
        spec = [target, counts] if rank == root else None
        comm.Gatherv(np.full(rank + 1, rank), spec, root=root)
        same(target, rows(size) if rank == root else np.full(sum(counts), -1))


def gatherv_with_displacements(MPI: Any, comm: Any) -> None:
    """Displacements place blocks anywhere, backwards too, and leave gaps untouched."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [1] * size
    displacements = [2 * (size - 1 - other) for other in range(size)]
    target = np.full(2 * size, -1)
    comm.Gatherv(np.full(1, rank), [target, counts, displacements, MPI.LONG] if rank == 0 else None)
    if rank == 0:
        same(target, [value for other in reversed(range(size)) for value in (other, -1)])


def gatherv_of_nothing_from_some(MPI: Any, comm: Any) -> None:
    """Some blocks may be empty."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [other % 2 for other in range(size)]
    target = np.full(sum(counts), -1)
    comm.Gatherv(np.full(counts[rank], rank), [target, (counts, starts(counts))])
    if rank == 0:
        same(target, [other for other in range(size) if other % 2])


def gatherv_with_spread_counts(MPI: Any, comm: Any) -> None:
    """Without counts the root's memory is spread as evenly as it goes, the first blocks longer."""
    rank, size = comm.Get_rank(), comm.Get_size()
    target = np.full(size + 1, -1)
    comm.Gatherv(np.full(2 if rank == 0 else 1, rank), target if rank == 0 else None)
    if rank == 0:
        same(target, [0, *range(size)])


def scatterv(MPI: Any, comm: Any) -> None:
    """Blocks of growing length are handed out, with and without displacements."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [other + 1 for other in range(size)]
    for root in range(size):
        for spec in (
            [np.array(rows(size)), counts],
            [np.array(rows(size)), (counts, starts(counts)), MPI.LONG],
        ):
            target = np.full(rank + 1, -1)
            comm.Scatterv(spec if rank == root else None, target, root=root)
            same(target, np.full(rank + 1, rank))


def scatterv_of_overlapping_blocks(MPI: Any, comm: Any) -> None:
    """The root may send the same elements to several ranks."""
    rank, size = comm.Get_rank(), comm.Get_size()
    spec = [np.arange(3.0), ([3] * size, [0] * size), MPI.DOUBLE]
    target = np.zeros(3)
    comm.Scatterv(spec if rank == 0 else None, target)
    same(target, [0, 1, 2])


def allgatherv(MPI: Any, comm: Any) -> None:
    """Everybody gets all blocks of growing length."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [other + 1 for other in range(size)]
    target = np.full(sum(counts), -1)
    comm.Allgatherv(np.full(rank + 1, rank), [target, counts])
    same(target, rows(size))
    comm.Allgatherv([np.full(rank + 1, -rank), rank + 1], [target, (counts, starts(counts)), "l"])
    same(target, [-other for other in rows(size)])


def allgatherv_with_gaps(MPI: Any, comm: Any) -> None:
    """What lies between the blocks stays."""
    rank, size = comm.Get_rank(), comm.Get_size()
    target = np.full(3 * size, -1.0)
    comm.Allgatherv(np.full(2, float(rank)), [target, (2, 3), MPI.DOUBLE])
    same(target.reshape(size, 3), [[other, other, -1] for other in range(size)])


def alltoallv(MPI: Any, comm: Any) -> None:
    """Rank i sends i + j + 1 elements to rank j."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [rank + other + 1 for other in range(size)]
    sent = np.concatenate([np.full(counts[other], 10 * rank + other) for other in range(size)])
    target = np.full(sum(counts), -1)
    comm.Alltoallv([sent, counts], [target, (counts, starts(counts))])
    same(target, np.concatenate([np.full(counts[other], 10 * other + rank) for other in range(size)]))


def alltoallv_of_nothing_to_some(MPI: Any, comm: Any) -> None:
    """Each rank sends to its right neighbour only."""
    rank, size = comm.Get_rank(), comm.Get_size()
    out = [2 if other == (rank + 1) % size else 0 for other in range(size)]
    into = [2 if other == (rank - 1) % size else 0 for other in range(size)]
    target = np.full(2, -1.0)
    comm.Alltoallv([np.full(2, float(rank)), out], [target, into])
    same(target, np.full(2, float((rank - 1) % size)))


def alltoallw(MPI: Any, comm: Any) -> None:
    """Each pair of ranks has a datatype of its own, and displacements count bytes."""
    rank, size = comm.Get_rank(), comm.Get_size()
    sent = np.array([10 * rank + other for other in range(size)], np.int32)
    target = np.full(size, -1, np.int32)
    places = [4 * other for other in range(size)]
    comm.Alltoallw(
        [sent, ([1] * size, places), [MPI.INT] * size], [target, ([4] * size, places), [MPI.BYTE] * size]
    )
    same(target, [10 * other + rank for other in range(size)])


def alltoallw_of_boxes(MPI: Any, comm: Any) -> None:
    """Columns become rows: the transposition of a distributed matrix in one call."""
    rank, size = comm.Get_rank(), comm.Get_size()
    mine = np.arange(size * 2.0).reshape(2, size) + 100 * rank
    columns = [MPI.DOUBLE.Create_subarray([2, size], [2, 1], [0, other]).Commit() for other in range(size)]
    rowtypes = [MPI.DOUBLE.Create_subarray([size, 2], [1, 2], [other, 0]).Commit() for other in range(size)]
    target = np.zeros((size, 2))
    comm.Alltoallw([mine, columns], [target, rowtypes])
    same(target, [[100 * other + rank, 100 * other + size + rank] for other in range(size)])
    for datatype in columns + rowtypes:
        datatype.Free()


def alltoallw_of_addresses(MPI: Any, comm: Any) -> None:
    """With BOTTOM, displacements and those of the types are addresses: nobody needs one block of memory."""
    rank, size = comm.Get_rank(), comm.Get_size()
    sent = [np.array([10 * rank + other], np.int32) for other in range(size)]
    found = [np.full(1, -1, np.int32) for _ in range(size)]
    places = [MPI.Get_address(each) for each in found]
    own = [MPI.INT.Create_hindexed([1], [MPI.Get_address(each)]).Commit() for each in sent]
    ones, none = [1] * size, [0] * size
    comm.Alltoallw([MPI.BOTTOM, (ones, none), own], [MPI.BOTTOM, (ones, places), [MPI.INT] * size])
    with refused(ValueError):
        comm.Alltoallw([MPI.BOTTOM, own], [MPI.BOTTOM, (ones, places), [MPI.INT] * size])
    same([int(each[0]) for each in found], [10 * other + rank for other in range(size)])
    for datatype in own:
        datatype.Free()


def vectors_of_derived_types(MPI: Any, comm: Any) -> None:
    """Displacements count extents of the type."""
    rank, size = comm.Get_rank(), comm.Get_size()
    every_other = MPI.INT.Create_resized(0, 8).Commit()
    target = np.full(2 * size, -1, np.int32)
    comm.Allgatherv(np.array([rank], np.int32), [target, ([1] * size, list(range(size))), every_other])
    same(target.reshape(size, 2), [[other, -1] for other in range(size)])
    every_other.Free()


def a_wrong_number_of_counts(MPI: Any, comm: Any) -> None:
    """There must be a count for each rank."""
    size = comm.Get_size()
    with refused(ValueError):
        comm.Allgatherv(np.zeros(1), [np.zeros(size + 1), [1] * (size + 1)])
