"""Collective calls in progress.

Buffers have names here: mpi4py keeps no hold of a temporary array that is sent by a nonblocking collective.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spawnsim.testing.claims import needs, poll, ring, same


@needs(ranks=2)
def a_barrier_waits_for_the_last(MPI: Any, comm: Any) -> None:
    """Ibarrier is incomplete until every rank has entered it."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if rank:
        comm.recv(source=0)
        comm.Ibarrier().Wait()
        return
    request = comm.Ibarrier()
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
