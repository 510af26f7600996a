"""Looking at messages before receiving them."""

from __future__ import annotations

from typing import Any

import numpy as np

from spawnsim.testing.claims import claim, needs, poll, ring, same


def iprobe_sees_nothing_where_nothing_is(MPI: Any, comm: Any) -> None:
    """Without a message Iprobe is False, for any source and tag."""
    same(comm.Iprobe(), False)
    same(comm.iprobe(source=comm.Get_rank(), tag=3), False)


def iprobe_sees_what_comes(MPI: Any, comm: Any) -> None:
    """Iprobe becomes true when a message has arrived, and does not take it."""
    rank, _, left, right = ring(comm)
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


def probe_waits_and_tells_the_size(MPI: Any, comm: Any) -> None:
    """Probe waits for a message of any source, so that a buffer of the right size can be made."""
    rank, _, left, right = ring(comm)
    request = comm.Isend(np.full(rank + 1, rank), dest=right)
    status = MPI.Status()
    same(comm.Probe(MPI.ANY_SOURCE, MPI.ANY_TAG, status), True)
    target = np.zeros(status.Get_count(MPI.LONG), np.int64)
    comm.Recv(target, source=status.source, tag=status.tag)
    request.Wait()
    same((status.source, target.tolist()), (left, [left] * (left + 1)))


def probe_of_objects(MPI: Any, comm: Any) -> None:
    """Objects are probed like buffers."""
    _, _, left, right = ring(comm)
    request, status = comm.isend("object", dest=right, tag=2), MPI.Status()
    same(comm.probe(source=left, tag=2, status=status), True)
    claim(status.Get_count(MPI.BYTE) > 0, "a pickled object has bytes")
    same(comm.recv(source=status.source, tag=status.tag), "object")
    request.wait()


def probe_chooses_by_tag(MPI: Any, comm: Any) -> None:
    """A probe for a tag passes over messages of other tags."""
    _, _, left, right = ring(comm)
    requests = [comm.isend(tag, dest=right, tag=tag) for tag in (1, 2)]
    status = MPI.Status()
    comm.probe(source=left, tag=2, status=status)
    same(status.tag, 2)
    same((comm.recv(source=left, tag=1), comm.recv(source=left, tag=2)), (1, 2))
    MPI.Request.waitall(requests)


def a_matched_message_is_taken(MPI: Any, comm: Any) -> None:
    """Mprobe takes the message out of the queue; only its Message can receive it."""
    rank, _, left, right = ring(comm)
    request, status = comm.Isend(np.full(2, float(rank)), dest=right, tag=7), MPI.Status()
    message = comm.Mprobe(source=left, tag=7, status=status)
    same((status.source, status.Get_count(MPI.DOUBLE), comm.Iprobe(source=left, tag=7)), (left, 2, False))
    target = np.zeros(2)
    message.Recv(target)
    request.Wait()
    same(target, np.full(2, float(left)))
    claim(message == MPI.MESSAGE_NULL, "a received message is null")


def a_matched_message_is_received_later(MPI: Any, comm: Any) -> None:
    """Message.Irecv is a request like any other."""
    rank, _, left, right = ring(comm)
    request, target = comm.Isend(np.full(2, float(rank)), dest=right), np.zeros(2)
    comm.Mprobe(source=left).Irecv(target).Wait()
    request.Wait()
    same(target, np.full(2, float(left)))


def improbe_may_find_nothing(MPI: Any, comm: Any) -> None:
    """Improbe returns None, or the message."""
    rank, _, left, right = ring(comm)
    same(comm.Improbe(source=left, tag=1), None)
    comm.Barrier()
    request, target = comm.Isend(np.full(1, rank), dest=right, tag=1), np.zeros(1, np.int64)
    message = poll(lambda: comm.Improbe(source=left, tag=1))
    message.Recv(target)
    request.Wait()
    same(int(target[0]), left)


def matched_objects(MPI: Any, comm: Any) -> None:
    """Objects are matched by mprobe and improbe, and received by recv and irecv."""
    rank, _, left, right = ring(comm)
    requests = [comm.isend((rank, tag), dest=right, tag=tag) for tag in (1, 2)]
    same(comm.mprobe(source=left, tag=2).recv(), (left, 2))
    same(poll(lambda: comm.improbe(source=left, tag=1)).irecv().wait(), (left, 1))
    MPI.Request.waitall(requests)


def messages_are_matched_by_the_class_too(MPI: Any, comm: Any) -> None:
    """Message.Probe and Message.probe are Mprobe and mprobe of a communicator."""
    rank, _, left, right = ring(comm)
    requests = [comm.isend(rank, dest=right, tag=1), comm.Isend(np.full(1, rank), dest=right, tag=2)]
    target = np.zeros(1, np.int64)
    MPI.Message.Probe(comm, left, 2).Recv(target)
    same((MPI.Message.probe(comm, left, 1).recv(), int(target[0])), (left, left))
    requests[0].wait()
    requests[1].Wait()


def nowhere_has_a_message_always(MPI: Any, comm: Any) -> None:
    """A probe of PROC_NULL succeeds at once with an empty message."""
    status = MPI.Status()
    same(comm.Iprobe(source=MPI.PROC_NULL, status=status), True)
    same((status.source, status.tag, status.Get_count(MPI.BYTE)), (MPI.PROC_NULL, MPI.ANY_TAG, 0))
    message = comm.Mprobe(source=MPI.PROC_NULL)
    claim(message == MPI.MESSAGE_NO_PROC, "the message of nowhere is MESSAGE_NO_PROC")
    message.Recv(np.zeros(1))


@needs(ranks=2)
def probes_of_any_source_find_each_sender_once(MPI: Any, comm: Any) -> None:
    """Rank 0 meets every other rank exactly once by probing."""
    rank, size = comm.Get_rank(), comm.Get_size()
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
