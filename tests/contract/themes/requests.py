"""Requests: waiting for calls in progress, one or many, and requests that are started again and again."""

from __future__ import annotations

from typing import Any

import numpy as np

from contract.cases import Skipped, claim, needs, poll, same


def exchange(comm: Any) -> tuple[list[Any], list[Any], Any]:
    """Begin to send one number to, and to receive one from, every rank; return requests and targets."""
    rank, size = comm.Get_rank(), comm.Get_size()
    targets = np.full((size, 1), -1)
    receiving = [comm.Irecv(targets[other], source=other, tag=rank) for other in range(size)]
    sending = [comm.Isend(np.array([rank]), dest=other, tag=other) for other in range(size)]
    return receiving, sending, targets


def all_together(MPI, comm, size):
    """Waitall fills the statuses in the order of the requests and makes these null; Testall is all or nothing."""
    receiving, sending, targets = exchange(comm)
    statuses = [MPI.Status() for _ in receiving]
    same(MPI.Request.Waitall(receiving, statuses), True)
    MPI.Request.Waitall(sending)
    same(targets.ravel(), np.arange(size))
    same([status.source for status in statuses], list(range(size)))
    claim(all(request == MPI.REQUEST_NULL for request in receiving + sending), "completed requests are null")
    receiving, sending, targets = exchange(comm)
    poll(lambda: MPI.Request.Testall(receiving))
    same(targets.ravel(), np.arange(size))
    poll(lambda: MPI.Request.Testall(sending))


def one_at_a_time(MPI, comm, size):
    """Waitany and Testany complete one request at a time; with none left they say UNDEFINED."""

    def tested(requests: list[Any], status: Any) -> int:
        return poll(lambda: (found := MPI.Request.Testany(requests, status))[1] and found)[0]

    for complete in (MPI.Request.Waitany, tested):
        receiving, sending, targets = exchange(comm)
        status, seen = MPI.Status(), []
        for _ in receiving:
            index = complete(receiving, status)
            same((status.source, int(targets[index, 0])), (index, index))
            seen.append(index)
        same(sorted(seen), list(range(size)))
        same(complete(receiving, status), MPI.UNDEFINED)
        MPI.Request.Waitall(sending)
    same(MPI.Request.Testany(receiving), (MPI.UNDEFINED, True))


def some_at_a_time(MPI, comm, size):
    """Waitsome completes at least one request, Testsome perhaps none; with none left they return None."""
    for complete, least in ((MPI.Request.Waitsome, 1), (MPI.Request.Testsome, 0)):
        receiving, sending, targets = exchange(comm)
        seen: list[int] = []

        def none_left() -> bool:
            # None, mpi4py's form of MPI_UNDEFINED as outcount, when no request of the list is active.
            indices = complete(receiving)  # noqa: B023  # called within this round
            claim(indices is None or len(indices) >= least, "Waitsome completes at least one")  # noqa: B023
            seen.extend(indices or [])  # noqa: B023
            return indices is None

        poll(none_left)
        same(sorted(seen), list(range(size)))
        same(targets.ravel(), np.arange(size))
        MPI.Request.Waitall(sending)


def nothing_is_done_at_once(MPI, comm):
    """There is nothing to wait for in an empty list, nor in a null request, which is false: its status is empty."""
    same((MPI.Request.Waitall([]), MPI.Request.Testall([])), (True, True))
    same((MPI.Request.Waitany([]), MPI.Request.Waitsome([])), (MPI.UNDEFINED, None))
    request, status = MPI.Request(), MPI.Status()
    claim(request == MPI.REQUEST_NULL and not request, "a fresh request is null")
    same((request.Wait(status), request.Test()), (True, True))
    same((status.source, status.tag, status.Get_count(MPI.BYTE)), (MPI.ANY_SOURCE, MPI.ANY_TAG, 0))


def test_becomes_true(MPI, comm, rank, left, right):
    """Test of a receive is False while nothing was sent, True once it is complete, and then again."""
    target, status = np.full(1, -1), MPI.Status()
    request = comm.Irecv(target, source=left)
    same(request.Test(), False)
    # Nobody sends before all have seen that their receive is incomplete.
    comm.Barrier()
    sending = comm.Isend(np.array([rank]), dest=right)
    poll(lambda: request.Test(status))
    sending.Wait()
    same((int(target[0]), status.source, request.Test(), bool(request)), (left, left, True, False))


def get_status_does_not_complete(MPI, comm, rank, size, left, right):
    """Get_status leaves the request, but the buffer is full, of a message or a collective; Wait stores nothing more."""
    target, status = np.zeros(3), MPI.Status()
    request, sending = comm.Irecv(target, left, 7), comm.Isend(np.full(2, rank + 1.0), right, 7)
    poll(request.Get_status)
    same(target, [left + 1.0, left + 1.0, 0.0])
    # The completing Wait must not store the message a second time.
    target[0] = -1.0
    claim(request != MPI.REQUEST_NULL and request, "the request is still there")
    for look in (request.Get_status, request.Wait):
        look(status)
        same((status.source, status.tag, status.Get_count(MPI.DOUBLE)), (left, 7, 2))
    same(target[0], -1.0)
    sending.Wait()
    mine = np.ones(1)
    request = comm.Iallreduce(mine, target[:1])
    poll(request.Get_status)
    same(target[0], size)
    request.Wait()
    same(target[0], size)


def a_receive_can_be_cancelled(MPI, comm, rank):
    """A cancelled receive completes, says so, and takes no later message; the one that does says that it was not."""
    target, other, status = np.full(1, -1), np.zeros(1, np.int64), MPI.Status()
    request = comm.Irecv(target, source=rank, tag=1)
    request.Cancel()
    request.Wait(status)
    same(status.Is_cancelled(), True)
    # MPI says that a cancelled receive is as if it had never been posted: the next one must get the message.
    comm.Sendrecv(np.array([5]), rank, 1, other, rank, 1, status)
    same((int(target[0]), int(other[0]), status.Is_cancelled()), (-1, 5, False))


@needs(ranks=2)
def a_freed_send_still_arrives(MPI, comm, rank):
    """Freeing the request of a send gives up the handle, not the message."""
    if rank == 0:
        source = np.arange(3.0)
        request = comm.Isend(source, dest=1)
        request.Free()
        same(bool(request), False)
    if rank == 1:
        target = np.zeros(3)
        comm.Recv(target, source=0)
        same(target, [0, 1, 2])
    # The program's array lives until the message has been received: a freed request no longer tells when it may go.
    comm.Barrier()


def copies_of_requests_are_equal(MPI, comm, rank):
    """Request(request) is the same request."""
    target = np.zeros(1)
    request = comm.Irecv(target, source=rank)
    claim(MPI.Request(request) == request, "a copy of a handle is equal")
    comm.Isend(np.ones(1), dest=rank).Wait()
    request.Wait()
    same(target, [1])


def a_failed_request_in_waitall(MPI, comm, rank):
    """When a request of many fails, Waitall raises ERR_IN_STATUS, and the statuses say which one."""
    targets = [np.zeros(1), np.zeros(4)]
    receiving = [comm.Irecv(targets[i], source=rank, tag=i) for i in range(2)]
    sending = [comm.Isend(np.ones(4), dest=rank, tag=i) for i in range(2)]
    statuses = [MPI.Status() for _ in receiving]
    try:
        MPI.Request.Waitall(receiving, statuses)
    except MPI.Exception as error:
        same(error.Get_error_class(), MPI.ERR_IN_STATUS)
    else:
        MPI.Request.Waitall(sending)
        raise Skipped("this MPI cuts messages to posted receives without a word")
    classes = [MPI.Get_error_class(status.Get_error()) for status in statuses]
    same(classes[0], MPI.ERR_TRUNCATE)
    # MPI leaves open whether the others are complete when one has failed, and marks those that are not ERR_PENDING.
    claim(
        classes[1] in (MPI.SUCCESS, MPI.ERR_PENDING),
        "the other request is complete, or waits to be completed",
    )
    MPI.Request.Waitall(receiving + sending)
    same(targets[1], np.ones(4))


@needs(ranks=2)
def freed_receives_go_on(MPI, comm, rank, left, right):
    """A request that is freed is null; its buffer is filled when the message comes."""
    before, after, waiting = np.zeros(2), np.zeros(2), np.zeros(2)
    comm.Send(np.full(2, rank + 1.0), right, 1) if rank % 2 else None
    requests = [comm.Irecv(before, left, 1), comm.Irecv(after, left, 2), comm.Recv_init(waiting, left, 3)]
    requests[2].Start()
    for request in requests:
        request.Free()
        same(request, MPI.REQUEST_NULL)
    None if rank % 2 else comm.Send(np.full(2, rank + 1.0), right, 1)
    comm.Send(np.full(2, rank + 2.0), right, 2)
    comm.Send(np.full(2, rank + 3.0), right, 3)
    # Sent last on the same channel: once it is here the three before it have been matched.
    comm.Send(np.zeros(0), right, 4)
    comm.Recv(np.zeros(0), left, 4)
    comm.Barrier()
    poll(lambda: comm.Iprobe() or waiting[0])
    same((before[1], after[1], waiting[1]), (left + 1.0, left + 2.0, left + 3.0))


def persistent_messages(MPI, comm, rank, left, right, own):
    """A pair of persistent requests carries what the buffer holds at each start, also if Startall starts both."""
    source, target = np.zeros(3), np.zeros(3)
    sending, receiving = comm.Send_init(source, dest=right, tag=3), comm.Recv_init(target, source=left, tag=3)
    for round_ in range(4):
        source[:] = 10 * round_ + rank
        if round_ % 2:
            MPI.Prequest.Startall([receiving, sending])
            MPI.Request.Waitall([receiving, sending])
        else:
            receiving.Start()
            sending.Start()
            receiving.Wait()
            sending.Wait()
        same(target, np.full(3, 10.0 * round_ + left))
        claim(sending and receiving, "persistent requests outlive their completion")
    sending.Free()
    receiving.Free()
    claim(not sending and not receiving, "freed requests are null")


def an_inactive_request_is_done(MPI, comm, left):
    """A persistent request that was not started completes at once with an empty status."""
    request, status = comm.Recv_init(np.zeros(1), source=left), MPI.Status()
    same((request.Test(status), request.Wait(status)), (True, True))
    same((status.source, status.tag, status.Get_count(MPI.BYTE)), (MPI.ANY_SOURCE, MPI.ANY_TAG, 0))
    request.Free()


def persistent_send_modes(MPI, comm, rank, left, right):
    """All send modes have a persistent form."""
    MPI.Attach_buffer(bytearray(1 << 12))
    source, target = np.full(1, rank), np.full(1, -1)
    for name in ("Send_init", "Bsend_init", "Ssend_init", "Rsend_init"):
        receiving = comm.Recv_init(target, source=left, tag=2)
        receiving.Start()
        # A ready send is an error unless its receive has been posted.
        comm.Barrier()
        sending = getattr(comm, name)(source, dest=right, tag=2)
        sending.Start()
        MPI.Request.Waitall([sending, receiving])
        same(int(target[0]), left)
        sending.Free()
        receiving.Free()
    MPI.Detach_buffer()


def persistent_and_plain_ends_meet(MPI, comm, rank, left, right, own):
    """A persistent send is received by a plain receive, and the other way round."""
    source, target = np.full(1, rank), np.full(1, -1)
    sending = own(comm.Send_init(source, dest=right))
    sending.Start()
    comm.Recv(target, source=left)
    sending.Wait()
    same(int(target[0]), left)
    receiving = own(comm.Recv_init(target, source=right))
    receiving.Start()
    comm.Isend(source, dest=left).Wait()
    receiving.Wait()
    same(int(target[0]), right)


def persistent_collectives(MPI, comm, rank, size):
    """Persistent Bcast, Allreduce and Barrier do at each start what the plain calls do."""
    value, total = np.zeros(2), np.zeros(2)
    requests = [
        comm.Bcast_init(value, root=0),
        comm.Allreduce_init(value, total, MPI.SUM),
        comm.Barrier_init(),
    ]
    for round_ in range(3):
        value[:] = round_ if rank == 0 else -1
        for request in requests:
            request.Start()
            request.Wait()
        same((value.tolist(), total.tolist()), ([round_] * 2, [float(round_ * size)] * 2))
    for request in requests:
        request.Free()


@needs(ranks=2)
def partitioned_messages(MPI, comm):
    """A partitioned message is complete when all of its parts were marked ready."""
    rank, parts = comm.Get_rank(), 4
    if rank == 0:
        source = np.arange(8.0)
        request = comm.Psend_init(source, parts, 1, 0)
        request.Start()
        # Out of order, as threads that fill the parts would be done.
        for part in (2, 0, 3, 1):
            request.Pready(part)
        request.Wait()
        request.Free()
    elif rank == 1:
        target = np.zeros(8)
        request = comm.Precv_init(target, parts, 0, 0)
        request.Start()
        request.Wait()
        same(target, np.arange(8.0))
        request.Free()
