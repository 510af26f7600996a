"""Collective calls on blocks of unequal length and type, in place, and several at a time."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from contract.cases import needs, poll, refused, same


def starts(counts: list[int]) -> list[int]:
    """Return where blocks begin that lie one after the other."""
    return [0, *accumulate(counts)][: len(counts)]


def growing(size: int) -> list[int]:
    """Return the counts of blocks of growing length."""
    return list(range(1, size + 1))


def growing_rows(size: int) -> list[int]:
    """Return `other` repeated `other + 1` times for every rank: what a gather of growing blocks gives."""
    return [other for other in range(size) for _ in range(other + 1)]


def gatherv_with_counts(MPI, comm, call, rank, size):
    """Blocks of growing length come one after the other; the root's own may lie there already."""
    for root in range(size):
        for in_place in (False, True):
            target = np.full(sum(growing(size)), -1)
            mine, spec = np.full(rank + 1, rank), [target, growing(size)]
            if in_place and rank == root:
                target[starts(growing(size))[rank] :][: rank + 1] = rank
                mine = MPI.IN_PLACE
            call(comm, "Gatherv", mine, spec if rank == root else None, root=root)
            same(target, growing_rows(size) if rank == root else np.full(len(target), -1))


def gatherv_with_displacements(MPI, comm, call, rank, size):
    """Displacements place blocks anywhere, backwards too, and leave gaps untouched."""
    displacements = [2 * (size - 1 - other) for other in range(size)]
    target = np.full(2 * size, -1)
    # MPI allows any order and any gaps at the root, as long as no element is written twice.
    spec = [target, [1] * size, displacements, MPI.LONG]
    call(comm, "Gatherv", np.full(1, rank), spec if rank == 0 else None)
    if rank == 0:
        same(target, [value for other in reversed(range(size)) for value in (other, -1)])


def gatherv_of_nothing_from_some(MPI, comm, call, rank, size):
    """Some blocks may be empty."""
    counts = [other % 2 for other in range(size)]
    target = np.full(sum(counts), -1)
    call(comm, "Gatherv", np.full(counts[rank], rank), [target, (counts, starts(counts))])
    if rank == 0:
        same(target, [other for other in range(size) if other % 2])


def gatherv_with_spread_counts(MPI, comm, call, rank, size):
    """Without counts the root's memory is spread as evenly as it goes, the first blocks longer."""
    target = np.full(size + 1, -1)
    call(comm, "Gatherv", np.full(2 if rank == 0 else 1, rank), target if rank == 0 else None)
    if rank == 0:
        same(target, [0, *range(size)])


def scatterv(MPI, comm, call, rank, size):
    """Blocks of growing length are handed out, with and without displacements; the root's own may stay."""
    counts = growing(size)
    for root in range(size):
        for where in ((counts,), ((counts, starts(counts)), MPI.LONG)):
            for in_place in (False, True):
                source, target = np.array(growing_rows(size)), np.full(rank + 1, -1)
                stays = in_place and rank == root
                spec = [source, *where] if rank == root else None
                call(comm, "Scatterv", spec, MPI.IN_PLACE if stays else target, root=root)
                same(
                    (source.tolist(), target.tolist()),
                    (growing_rows(size), [-1 if stays else rank] * (rank + 1)),
                )


def scatterv_of_overlapping_blocks(MPI, comm, call, rank, size):
    """The root may send the same elements to several ranks."""
    # Reading twice is allowed, where writing twice is not.
    spec = [np.arange(3.0), ([3] * size, [0] * size), MPI.DOUBLE]
    target = np.zeros(3)
    call(comm, "Scatterv", spec if rank == 0 else None, target)
    same(target, [0, 1, 2])


def allgatherv(MPI, comm, call, rank, size):
    """Everybody gets all blocks of growing length; each rank's own may lie there already."""
    counts = growing(size)
    mine, target = np.full(rank + 1, rank), np.full(sum(counts), -1)
    call(comm, "Allgatherv", mine, [target, counts])
    same(target, growing_rows(size))
    call(comm, "Allgatherv", [-mine, rank + 1], [target, (counts, starts(counts)), "l"])
    same(target, [-other for other in growing_rows(size)])
    target[starts(counts)[rank] :][: rank + 1] = rank
    call(comm, "Allgatherv", MPI.IN_PLACE, [target, counts])
    same(target, growing_rows(size))


def allgatherv_with_gaps(MPI, comm, call, rank, size):
    """What lies between the blocks stays."""
    target = np.full(3 * size, -1.0)
    call(comm, "Allgatherv", np.full(2, float(rank)), [target, (2, 3), MPI.DOUBLE])
    same(target.reshape(size, 3), [[other, other, -1] for other in range(size)])


def alltoallv(MPI, comm, call, rank, size):
    """Rank i sends i + j + 1 elements to rank j, also within one buffer."""
    counts = [rank + other + 1 for other in range(size)]
    sent = np.concatenate([np.full(counts[other], 10 * rank + other) for other in range(size)])
    wanted = np.concatenate([np.full(counts[other], 10 * other + rank) for other in range(size)])
    target = np.full(sum(counts), -1)
    call(comm, "Alltoallv", [sent, counts], [target, (counts, starts(counts))])
    same(target, wanted)
    call(comm, "Alltoallv", MPI.IN_PLACE, [sent, counts])
    same(sent, wanted)


def alltoallv_of_nothing_to_some(MPI, comm, call, rank, size, left, right):
    """Each rank sends to its right neighbour only."""
    out, into = ([2 if other == peer else 0 for other in range(size)] for peer in (right, left))
    target = np.full(2, -1.0)
    call(comm, "Alltoallv", [np.full(2, float(rank)), out], [target, into])
    same(target, np.full(2, float(left)))


def alltoallw(MPI, comm, call, rank, size):
    """Each pair of ranks has a datatype of its own, and displacements count bytes."""
    sent = np.array([10 * rank + other for other in range(size)], np.int32)
    target = np.full(size, -1, np.int32)
    places = [4 * other for other in range(size)]
    integers, octets = [([1] * size, places), [MPI.INT] * size], [([4] * size, places), [MPI.BYTE] * size]
    call(comm, "Alltoallw", [sent, *integers], [target, *octets])
    same(target, [10 * other + rank for other in range(size)])


def alltoallw_of_boxes(MPI, comm, call, rank, size, own):
    """Columns become rows: the transposition of a distributed matrix in one call."""
    mine = np.arange(size * 2.0).reshape(2, size) + 100 * rank
    boxes = MPI.DOUBLE.Create_subarray
    columns = [own(boxes([2, size], [2, 1], [0, other]).Commit()) for other in range(size)]
    rowtypes = [own(boxes([size, 2], [1, 2], [other, 0]).Commit()) for other in range(size)]
    target = np.zeros((size, 2))
    call(comm, "Alltoallw", [mine, columns], [target, rowtypes])
    same(target, [[100 * other + rank, 100 * other + size + rank] for other in range(size)])


def alltoallw_of_addresses(MPI, comm, call, rank, size, own):
    """With BOTTOM, displacements and those of the types are addresses: nobody needs one block of memory."""
    sent = [np.array([10 * rank + other], np.int32) for other in range(size)]
    found = [np.full(1, -1, np.int32) for _ in range(size)]
    places = [MPI.Get_address(each) for each in found]
    types = [own(MPI.INT.Create_hindexed([1], [MPI.Get_address(each)]).Commit()) for each in sent]
    target = [MPI.BOTTOM, ([1] * size, places), [MPI.INT] * size]
    call(comm, "Alltoallw", [MPI.BOTTOM, ([1] * size, [0] * size), types], target)
    # BOTTOM has no length to spread counts over, so they must be stated.
    refused(ValueError, call, comm, "Alltoallw", [MPI.BOTTOM, types], target)
    same([int(each[0]) for each in found], [10 * other + rank for other in range(size)])


def vectors_of_derived_types(MPI, comm, call, rank, size, own):
    """Displacements count extents of the type."""
    every_other = own(MPI.INT.Create_resized(0, 8).Commit())
    target = np.full(2 * size, -1, np.int32)
    spec = [target, ([1] * size, list(range(size))), every_other]
    call(comm, "Allgatherv", np.array([rank], np.int32), spec)
    same(target.reshape(size, 2), [[other, -1] for other in range(size)])


def a_wrong_number_of_counts(MPI, comm, call, size):
    """There must be a count for each rank."""
    refused(ValueError, call, comm, "Allgatherv", np.zeros(1), [np.zeros(size + 1), [1] * (size + 1)])


def the_same_array_twice(MPI, comm, rank, size):
    """One array as both buffers of a reduction is ERR_BUFFER (or, in later versions, means IN_PLACE)."""
    buf = np.full(2, rank)
    try:
        comm.Allreduce(buf, buf)
    # MPI forbids aliasing, and leaves to the library whether it notices.
    except MPI.Exception as error:
        same((error.Get_error_class(), buf.tolist()), (MPI.ERR_BUFFER, [rank, rank]))
    else:
        same(buf, np.full(2, size * (size - 1) // 2))


@needs(ranks=2)
def a_barrier_waits_for_the_last(MPI, comm, rank, size):
    """Ibarrier is incomplete until every rank has entered it."""
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


def barrier_by_polling(MPI, comm):
    """A barrier completes under Test alone."""
    request = comm.Ibarrier()
    poll(request.Test)
    same(bool(request), False)


def several_at_a_time(MPI, comm, rank, size):
    """Several broadcasts from several roots, and other calls, may be under way together."""
    bufs, total, row = np.full((size, 3), -1), np.full(2, rank), np.full(size, -1)
    bufs[rank] = row[rank] = rank
    requests = [comm.Ibcast(bufs[root], root=root) for root in range(size)]
    requests += [comm.Iallreduce(MPI.IN_PLACE, total), comm.Iallgather(MPI.IN_PLACE, row)]
    MPI.Request.Waitall(requests)
    same(bufs, [[root] * 3 for root in range(size)])
    same((total.tolist(), row.tolist()), ([size * (size - 1) // 2] * 2, list(range(size))))


def collectives_are_matched_in_order(MPI, comm, size):
    """Calls in progress on one communicator match in the order of starting, whatever the order of waiting."""
    mine, totals = np.arange(5).reshape(5, 1), np.zeros((5, 1), np.int64)
    requests = [comm.Iallreduce(mine[i], totals[i]) for i in range(5)]
    # MPI matches by the order of starting on each communicator; waiting in another order must not change the pairs.
    for request in reversed(requests):
        request.Wait()
    same(totals.ravel(), size * np.arange(5))


def collectives_and_messages_mix(MPI, comm, rank, size, left, right):
    """Messages pass while a collective is under way, and both are waited for together."""
    mine, total, target = np.full(1, rank), np.zeros(1, np.int64), np.zeros(1, np.int64)
    requests = [comm.Iallreduce(mine, total), comm.Irecv(target, source=left), comm.Isend(mine, dest=right)]
    MPI.Request.Waitall(requests)
    same((int(total[0]), int(target[0])), (size * (size - 1) // 2, left))


@needs(ranks=2)
def a_blocking_call_does_not_complete_another(MPI, comm, rank, size):
    """A message needed to enter a collective can pass while the others wait in it."""
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


def waitany_among_collectives(MPI, comm, size):
    """Collective requests can be waited for one by one."""
    mine, totals = np.arange(1, 4).reshape(3, 1), np.zeros((3, 1), np.int64)
    requests = [comm.Iallreduce(mine[i], totals[i]) for i in range(3)]
    seen = sorted(MPI.Request.Waitany(requests) for _ in range(3))
    same((seen, totals.ravel().tolist()), ([0, 1, 2], [size, 2 * size, 3 * size]))
