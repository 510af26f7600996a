"""The other forms of collective calls: blocks of unequal length and type, in place, and nonblocking.

Buffers of nonblocking calls have names here: mpi4py keeps no hold of a temporary array that is sent by one.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np

from contract.cases import needs, poll, refused, ring, same


def starts(counts: list[int]) -> list[int]:
    """Return where blocks begin that lie one after the other."""
    return [0, *accumulate(counts)][: len(counts)]


def growing_rows(size: int) -> list[int]:
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
        same(target, growing_rows(size) if rank == root else np.full(sum(counts), -1))


def gatherv_with_displacements(MPI: Any, comm: Any) -> None:
    """Displacements place blocks anywhere, backwards too, and leave gaps untouched."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [1] * size
    displacements = [2 * (size - 1 - other) for other in range(size)]
    target = np.full(2 * size, -1)
    # MPI allows any order and any gaps at the root, as long as no element is written twice.
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
            [np.array(growing_rows(size)), counts],
            [np.array(growing_rows(size)), (counts, starts(counts)), MPI.LONG],
        ):
            target = np.full(rank + 1, -1)
            comm.Scatterv(spec if rank == root else None, target, root=root)
            same(target, np.full(rank + 1, rank))


def scatterv_of_overlapping_blocks(MPI: Any, comm: Any) -> None:
    """The root may send the same elements to several ranks."""
    rank, size = comm.Get_rank(), comm.Get_size()
    # Reading twice is allowed, where writing twice is not.
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
    same(target, growing_rows(size))
    comm.Allgatherv([np.full(rank + 1, -rank), rank + 1], [target, (counts, starts(counts)), "l"])
    same(target, [-other for other in growing_rows(size)])


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
    # BOTTOM has no length to spread counts over, so they must be stated.
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


def allreduce_in_place(MPI: Any, comm: Any) -> None:
    """The buffer holds the operand, then the result."""
    rank, size = comm.Get_rank(), comm.Get_size()
    buf = np.array([rank, 1])
    comm.Allreduce(MPI.IN_PLACE, buf, op=MPI.SUM)
    same(buf, [size * (size - 1) // 2, size])


def reduce_in_place(MPI: Any, comm: Any) -> None:
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
    # MPI forbids aliasing, and leaves to the library whether it notices.
    except MPI.Exception as error:
        same((error.Get_error_class(), buf.tolist()), (MPI.ERR_BUFFER, [rank, rank]))
    else:
        same(buf, np.full(2, size * (size - 1) // 2))


def gather_in_place(MPI: Any, comm: Any) -> None:
    """The root's own block lies in its table already."""
    rank, size = comm.Get_rank(), comm.Get_size()
    table = np.full((size, 2), -1)
    table[rank] = rank
    comm.Gather(MPI.IN_PLACE if rank == 0 else table[rank], table if rank == 0 else None)
    if rank == 0:
        same(table, [[other] * 2 for other in range(size)])


def scatter_in_place(MPI: Any, comm: Any) -> None:
    """The root's own block stays in its table."""
    rank, size = comm.Get_rank(), comm.Get_size()
    table, row = np.repeat(np.arange(size), 2).reshape(size, 2), np.full(2, -1)
    comm.Scatter(table if rank == 0 else None, MPI.IN_PLACE if rank == 0 else row)
    same(table[0] if rank == 0 else row, [rank, rank])


def allgather_in_place(MPI: Any, comm: Any) -> None:
    """Each rank's own block lies in its table already."""
    rank, size = comm.Get_rank(), comm.Get_size()
    table = np.full((size, 2), -1)
    table[rank] = rank
    comm.Allgather(MPI.IN_PLACE, table)
    same(table, [[other] * 2 for other in range(size)])


def alltoall_in_place(MPI: Any, comm: Any) -> None:
    """Blocks are exchanged within one table."""
    rank, size = comm.Get_rank(), comm.Get_size()
    table = np.array([[10 * rank + other] * 2 for other in range(size)])
    comm.Alltoall(MPI.IN_PLACE, table)
    same(table, [[10 * other + rank] * 2 for other in range(size)])


def scans_in_place(MPI: Any, comm: Any) -> None:
    """Prefix sums replace their operands; rank 0 of Exscan keeps its own."""
    rank = comm.Get_rank()
    upto, before = np.full(1, rank + 1), np.full(1, rank + 1)
    comm.Scan(MPI.IN_PLACE, upto)
    comm.Exscan(MPI.IN_PLACE, before)
    same(
        (int(upto[0]), int(before[0])), ((rank + 1) * (rank + 2) // 2, rank * (rank + 1) // 2 if rank else 1)
    )


def reduce_scatter_block_in_place(MPI: Any, comm: Any) -> None:
    """The rank's block of the sum lies at the start of the buffer."""
    rank, size = comm.Get_rank(), comm.Get_size()
    buf = np.arange(size) + rank
    comm.Reduce_scatter_block(MPI.IN_PLACE, buf)
    same(int(buf[0]), size * rank + size * (size - 1) // 2)


def reduce_scatter_in_place(MPI: Any, comm: Any) -> None:
    """With lengths given, the rank's part of the sum lies at the start of the buffer."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [1] * size
    buf = np.arange(size) + rank
    comm.Reduce_scatter(MPI.IN_PLACE, buf, counts)
    same(int(buf[0]), size * rank + size * (size - 1) // 2)


def gatherv_and_scatterv_in_place(MPI: Any, comm: Any) -> None:
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


def allgatherv_in_place(MPI: Any, comm: Any) -> None:
    """Each rank's block of unequal ones lies in its table already."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [other + 1 for other in range(size)]
    table = np.full(sum(counts), -1)
    start = sum(counts[:rank])
    table[start : start + rank + 1] = rank
    comm.Allgatherv(MPI.IN_PLACE, [table, counts])
    same(table, [other for other in range(size) for _ in range(other + 1)])


def alltoallv_in_place(MPI: Any, comm: Any) -> None:
    """Blocks of pairwise equal length are exchanged within one buffer."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [1 + (rank + other) % 2 for other in range(size)]
    buf = np.concatenate([np.full(counts[other], 10 * rank + other) for other in range(size)])
    comm.Alltoallv(MPI.IN_PLACE, [buf, counts])
    same(buf, np.concatenate([np.full(counts[other], 10 * other + rank) for other in range(size)]))


def nonblocking_in_place(MPI: Any, comm: Any) -> None:
    """IN_PLACE works in nonblocking calls too."""
    rank, size = comm.Get_rank(), comm.Get_size()
    total, row = np.full(2, rank), np.full(size, -1)
    row[rank] = rank
    MPI.Request.Waitall([comm.Iallreduce(MPI.IN_PLACE, total), comm.Iallgather(MPI.IN_PLACE, row)])
    same((total.tolist(), row.tolist()), ([size * (size - 1) // 2] * 2, list(range(size))))


@needs(ranks=2)
def a_barrier_waits_for_the_last(MPI: Any, comm: Any) -> None:
    """Ibarrier is incomplete until every rank has entered it."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if rank:
        comm.recv(source=0)
        comm.Ibarrier().Wait()
        return
    request = comm.Ibarrier()
    # The others wait for a message that has not been sent yet.
    same(request.Test(), False)
    for other in range(1, size):
        comm.send("enter", dest=other)
    request.Wait()


def barrier_by_polling(MPI: Any, comm: Any) -> None:
    """A barrier completes under Test alone."""
    request = comm.Ibarrier()
    poll(request.Test)
    same(bool(request), False)


def ibcast(MPI: Any, comm: Any) -> None:
    """Several broadcasts from several roots may be under way together."""
    rank, size = comm.Get_rank(), comm.Get_size()
    bufs = np.full((size, 3), -1)
    bufs[rank] = rank
    MPI.Request.Waitall([comm.Ibcast(bufs[root], root=root) for root in range(size)])
    same(bufs, [[root] * 3 for root in range(size)])


def igather_and_iscatter(MPI: Any, comm: Any) -> None:
    """Blocks go to the root and back."""
    rank, size = comm.Get_rank(), comm.Get_size()
    table, row = np.full((size, 2), -1) if rank == 0 else None, np.full(2, -1)
    mine = np.full(2, rank)
    comm.Igather(mine, table).Wait()
    comm.Iscatter(table, row).Wait()
    same(row, [rank, rank])


def igatherv_and_iscatterv(MPI: Any, comm: Any) -> None:
    """Unequal blocks go to the root and back."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [other + 1 for other in range(size)]
    table, mine, back = np.full(sum(counts), -1), np.full(rank + 1, rank), np.full(rank + 1, -1)
    spec = [table, counts] if rank == 0 else None
    comm.Igatherv(mine, spec).Wait()
    comm.Iscatterv(spec, back).Wait()
    same(back, mine)


def iallgather_and_iallgatherv(MPI: Any, comm: Any) -> None:
    """Everybody gets all blocks, equal and unequal ones."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [other + 1 for other in range(size)]
    mine, row, rows = np.full(rank + 1, rank), np.full(size, -1), np.full(sum(counts), -1)
    first = comm.Iallgather([mine, 1], row)
    second = comm.Iallgatherv(mine, [rows, counts])
    MPI.Request.Waitall([first, second])
    same(row, np.arange(size))
    same(rows, np.repeat(np.arange(size), counts))


def ialltoall_and_its_forms(MPI: Any, comm: Any) -> None:
    """All three forms of the exchange of everyone with everyone."""
    rank, size = comm.Get_rank(), comm.Get_size()
    sent, wanted = np.arange(size) + 10 * rank, 10 * np.arange(size) + rank
    targets = np.full((3, size), -1)
    ones, places = [1] * size, list(range(size))
    wide = [8 * place for place in places]
    types = [MPI.LONG] * size
    requests = [comm.Ialltoall(sent, targets[0]), comm.Ialltoallv([sent, ones], [targets[1], (ones, places)])]
    requests.append(comm.Ialltoallw([sent, (ones, wide), types], [targets[2], (ones, wide), types]))
    MPI.Request.Waitall(requests)
    same(targets, [wanted] * 3)


def ireduce_and_iallreduce(MPI: Any, comm: Any) -> None:
    """Sums at the root and at all."""
    rank, size = comm.Get_rank(), comm.Get_size()
    mine, total, everywhere = np.full(2, rank), np.zeros(2, np.int64), np.zeros(2, np.int64)
    root = size - 1
    first = comm.Ireduce(mine, total if rank == root else None, root=root)
    second = comm.Iallreduce(mine, everywhere, op=MPI.MAX)
    MPI.Request.Waitall([first, second])
    same(total, np.full(2, size * (size - 1) // 2 if rank == root else 0))
    same(everywhere, np.full(2, size - 1))


def ireduce_scatter_and_its_block_form(MPI: Any, comm: Any) -> None:
    """Sums spread over the ranks."""
    rank, size = comm.Get_rank(), comm.Get_size()
    mine, parts = np.arange(size) + rank, np.zeros((2, 1), np.int64)
    first = comm.Ireduce_scatter_block(mine, parts[0])
    second = comm.Ireduce_scatter(mine, parts[1], [1] * size)
    MPI.Request.Waitall([first, second])
    same(parts.ravel(), [size * rank + size * (size - 1) // 2] * 2)


def iscan_and_iexscan(MPI: Any, comm: Any) -> None:
    """Prefix sums under way."""
    rank = comm.Get_rank()
    mine, upto, before = np.full(1, rank), np.zeros(1, np.int64), np.full(1, -1)
    MPI.Request.Waitall([comm.Iscan(mine, upto), comm.Iexscan(mine, before)])
    same((int(upto[0]), int(before[0])), (rank * (rank + 1) // 2, rank * (rank - 1) // 2 if rank else -1))


def collectives_are_matched_in_order(MPI: Any, comm: Any) -> None:
    """Calls in progress on one communicator match in the order of starting, whatever the order of waiting."""
    size = comm.Get_size()
    mine, totals = np.arange(5).reshape(5, 1), np.zeros((5, 1), np.int64)
    requests = [comm.Iallreduce(mine[i], totals[i]) for i in range(5)]
    # MPI matches by the order of starting on each communicator; waiting in another order must not change the pairs.
    for request in reversed(requests):
        request.Wait()
    same(totals.ravel(), size * np.arange(5))


def collectives_and_messages_mix(MPI: Any, comm: Any) -> None:
    """Messages pass while a collective is under way, and both are waited for together."""
    rank, size, left, right = ring(comm)
    mine, total, target = np.full(1, rank), np.zeros(1, np.int64), np.zeros(1, np.int64)
    requests = [comm.Iallreduce(mine, total), comm.Irecv(target, source=left), comm.Isend(mine, dest=right)]
    MPI.Request.Waitall(requests)
    same((int(total[0]), int(target[0])), (size * (size - 1) // 2, left))


@needs(ranks=2)
def a_blocking_call_does_not_complete_another(MPI: Any, comm: Any) -> None:
    """A message needed to enter a collective can pass while the others wait in it."""
    rank, size = comm.Get_rank(), comm.Get_size()
    mine, total = np.full(1, 1), np.zeros(1, np.int64)
    if rank == size - 1:
        same(comm.recv(source=0), "enter")
        comm.Iallreduce(mine, total).Wait()
    else:
        request = comm.Iallreduce(mine, total)
        # Point-to-point messages must go on while a nonblocking collective is incomplete.
        if rank == 0:
            comm.send("enter", dest=size - 1)
        request.Wait()
    same(int(total[0]), size)


def waitany_among_collectives(MPI: Any, comm: Any) -> None:
    """Collective requests can be waited for one by one."""
    size = comm.Get_size()
    mine, totals = np.arange(1, 4).reshape(3, 1), np.zeros((3, 1), np.int64)
    requests = [comm.Iallreduce(mine[i], totals[i]) for i in range(3)]
    seen = sorted(MPI.Request.Waitany(requests) for _ in range(3))
    same((seen, totals.ravel().tolist()), ([0, 1, 2], [size, 2 * size, 3 * size]))
