"""Which message a receive gets: probes, matched messages, and what order and progress MPI promises."""

from __future__ import annotations

import numpy as np

from contract.cases import claim, needs, poll, same


def iprobe_sees_what_comes(MPI, comm, rank, left, right):
    """Iprobe is False until a message has arrived, for any source and tag, and does not take it."""
    same((comm.Iprobe(), comm.iprobe(source=rank, tag=3)), (False, False))
    comm.Barrier()
    request = comm.Isend(np.full(3, float(rank)), dest=right, tag=5)
    status, target = MPI.Status(), np.zeros(3)
    poll(lambda: comm.Iprobe(source=left, tag=5, status=status))
    same((status.source, status.tag, status.Get_count(MPI.DOUBLE)), (left, 5, 3))
    same(comm.Iprobe(source=left, tag=6), False)
    claim(comm.Iprobe(source=left, tag=5), "the message is still there")
    comm.Recv(target, source=left, tag=5)
    request.Wait()
    same(target, np.full(3, float(left)))
    same(comm.Iprobe(source=left, tag=5), False)


def probe_waits_and_tells_the_size(MPI, comm, rank, left, right):
    """Probe waits for a message of any source, so that a buffer of the right size can be made."""
    request = comm.Isend(np.full(rank + 1, rank), dest=right)
    status = MPI.Status()
    same(comm.Probe(MPI.ANY_SOURCE, MPI.ANY_TAG, status), True)
    target = np.zeros(status.Get_count(MPI.LONG), np.int64)
    # By the status's source and tag: with wildcards again another message could be taken.
    comm.Recv(target, source=status.source, tag=status.tag)
    request.Wait()
    same((status.source, target.tolist()), (left, [left] * (left + 1)))


def probe_of_objects(MPI, comm, left, right):
    """Objects are probed like buffers; a probe for a tag passes over messages of other tags."""
    requests, status = [comm.isend("x" * tag, dest=right, tag=tag) for tag in (1, 2)], MPI.Status()
    same(comm.probe(source=left, tag=2, status=status), True)
    claim(status.Get_count(MPI.BYTE) > 0, "a pickled object has bytes")
    same((status.tag, comm.recv(source=left, tag=1)), (2, "x"))
    same(comm.recv(source=status.source, tag=status.tag), "xx")
    MPI.Request.waitall(requests)


def a_matched_message_is_taken(MPI, comm, rank, left, right):
    """Mprobe takes the message out of the queue; only its Message can receive it."""
    request, status = comm.Isend(np.full(2, float(rank)), dest=right, tag=7), MPI.Status()
    message = comm.Mprobe(source=left, tag=7, status=status)
    # What Mprobe has matched no probe or receive can find, so a thread beside it cannot take it away.
    same((status.source, status.Get_count(MPI.DOUBLE), comm.Iprobe(source=left, tag=7)), (left, 2, False))
    target = np.zeros(2)
    message.Recv(target)
    request.Wait()
    same(target, np.full(2, float(left)))
    claim(message == MPI.MESSAGE_NULL, "a received message is null")


def a_matched_message_is_received_later(MPI, comm, rank, left, right):
    """Message.Irecv is a request like any other."""
    request, target = comm.Isend(np.full(2, float(rank)), dest=right), np.zeros(2)
    comm.Mprobe(source=left).Irecv(target).Wait()
    request.Wait()
    same(target, np.full(2, float(left)))


def improbe_may_find_nothing(MPI, comm, rank, left, right):
    """Improbe returns None, or the message."""
    same(comm.Improbe(source=left, tag=1), None)
    comm.Barrier()
    request, target = comm.Isend(np.full(1, rank), dest=right, tag=1), np.zeros(1, np.int64)
    message = poll(lambda: comm.Improbe(source=left, tag=1))
    message.Recv(target)
    request.Wait()
    same(int(target[0]), left)


def matched_objects(MPI, comm, rank, left, right):
    """Objects are matched by mprobe and improbe, of a communicator or of Message, and received by recv and irecv."""
    requests = [comm.isend((rank, tag), dest=right, tag=tag) for tag in (1, 2, 3)]
    sending, target = comm.Isend(np.full(1, rank), dest=right, tag=4), np.zeros(1, np.int64)
    same(comm.mprobe(source=left, tag=2).recv(), (left, 2))
    same(poll(lambda: comm.improbe(source=left, tag=1)).irecv().wait(), (left, 1))
    MPI.Message.Probe(comm, left, 4).Recv(target)
    same((MPI.Message.probe(comm, left, 3).recv(), int(target[0])), ((left, 3), left))
    MPI.Request.waitall(requests)
    sending.Wait()


def nowhere_has_a_message_always(MPI, comm):
    """A probe of PROC_NULL succeeds at once with an empty message."""
    status = MPI.Status()
    same(comm.Iprobe(source=MPI.PROC_NULL, status=status), True)
    same((status.source, status.tag, status.Get_count(MPI.BYTE)), (MPI.PROC_NULL, MPI.ANY_TAG, 0))
    message = comm.Mprobe(source=MPI.PROC_NULL)
    claim(message == MPI.MESSAGE_NO_PROC, "the message of nowhere is MESSAGE_NO_PROC")
    message.Recv(np.zeros(1))
    comm.Mprobe(source=MPI.PROC_NULL).Recv(None)
    comm.Mprobe(source=MPI.PROC_NULL).Irecv(None).Wait()


@needs(ranks=2)
def probes_of_any_source_find_each_sender_once(MPI, comm, rank, size):
    """Rank 0 meets every other rank exactly once by probing."""
    if rank:
        comm.Send(np.full(rank, rank), dest=0)
        return
    seen, status = [], MPI.Status()
    for _ in range(size - 1):
        comm.Probe(status=status)
        target = np.zeros(status.Get_count(MPI.LONG), np.int64)
        comm.Recv(target, source=status.source)
        seen.append((status.source, len(target)))
    same(sorted(seen), [(other, other) for other in range(1, size)])


def many_messages_under_way(MPI, comm, rank, size):
    """Hundreds of messages to everybody are received in any order of tags."""
    sending = [comm.isend((rank, i), dest=other, tag=i) for i in range(50) for other in range(size)]
    # Against the order of sending, so that most messages lie in the queue of unexpected ones.
    for i in reversed(range(50)):
        for other in reversed(range(size)):
            same(comm.recv(source=other, tag=i), (other, i))
    MPI.Request.waitall(sending)


def receives_posted_first_match_in_order(MPI, comm, left, right):
    """Posted receives are filled in the order of posting, those with wildcards as those with names."""
    targets = np.zeros((6, 1), np.int64)
    receiving = [comm.Irecv(targets[i], source=left, tag=1) for i in range(4)]
    receiving += [comm.Irecv(targets[4], source=MPI.ANY_SOURCE), comm.Irecv(targets[5], source=left, tag=1)]
    sending = [comm.Isend(np.full(1, i), dest=right, tag=1) for i in range(6)]
    MPI.Request.Waitall(receiving + sending)
    same(targets.ravel(), [0, 1, 2, 3, 4, 5])


@needs(ranks=2)
def each_sender_is_in_order_under_wildcards(MPI, comm, rank, size):
    """Messages of different senders mix, those of one do not overtake each other."""
    if rank:
        for i in range(10):
            comm.send((rank, i), dest=0)
        return
    # MPI orders messages of one pair of ranks in one context; among senders it promises nothing.
    seen: dict[int, list[int]] = {other: [] for other in range(1, size)}
    for _ in range(10 * (size - 1)):
        sender, i = comm.recv(source=MPI.ANY_SOURCE)
        seen[sender].append(i)
    same(seen, {other: list(range(10)) for other in range(1, size)})


@needs(ranks=2)
def a_message_can_cause_another(MPI, comm, rank, size, left, right):
    """A token passes twice round the ring, growing."""
    token: list[int] = []
    for turn in range(2):
        if rank or turn:
            token = comm.recv(source=left)
        comm.send([*token, rank], dest=right)
    if rank == 0:
        same(comm.recv(source=left), list(range(size)) * 2)


@needs(ranks=2)
def polling_makes_progress(MPI, comm, rank, size):
    """A rank that only polls still receives."""
    if rank == 0:
        for other in range(1, size):
            comm.send(other, dest=other)
        return
    poll(lambda: comm.Iprobe(source=0))
    same(comm.recv(source=0), rank)


@needs(ranks=2)
def a_master_and_its_workers(MPI, comm, rank, size):
    """Work is handed to whoever asks, until none is left."""
    if rank:
        done = 0
        while (item := comm.sendrecv(done, dest=0, source=0)) is not None:
            done = item * item
        return
    work, results, status = list(range(20)), [], MPI.Status()
    busy = size - 1
    while busy:
        results.append(comm.recv(source=MPI.ANY_SOURCE, status=status))
        comm.send(work.pop() if work else None, dest=status.source)
        busy -= not work and results[-1] is None
        if len(results) == 20 + size - 1:
            break
    same(sorted(results), sorted([n * n for n in range(20)] + [0] * (size - 1)))


def a_wavefront(MPI, comm, rank, size):
    """A pipeline of many small messages passes through all ranks."""
    total = 0
    for i in range(30):
        value = i if rank == 0 else comm.recv(source=rank - 1)
        total += value
        if rank < size - 1:
            comm.send(value + 1, dest=rank + 1)
    same(total, sum(range(30)) + 30 * rank)


def neighbours_exchange_many_times(MPI, comm, rank, size, left, right):
    """A hundred rounds of exchange with both neighbours stay in step."""
    value = float(rank)
    for _ in range(100):
        targets = np.zeros((2, 1))
        requests = [comm.Irecv(targets[0], source=left, tag=1), comm.Irecv(targets[1], source=right, tag=2)]
        requests += [
            comm.Isend(np.full(1, value), dest=right, tag=1),
            comm.Isend(np.full(1, value), dest=left, tag=2),
        ]
        MPI.Request.Waitall(requests)
        value = (value + targets.sum()) / 3
    mean = comm.allreduce(value) / size
    same(abs(mean - (size - 1) / 2) < 1e-9, True)
