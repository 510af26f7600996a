"""Buffers from rank to rank: specifications, sizes, tags, truncation, and the four send modes."""

from __future__ import annotations

import array
from typing import Any

import numpy as np

from contract.cases import claim, fails, needs, refused, ring, same


def shifted(comm: Any, source: Any, target: Any, tag: int = 0) -> None:
    """Send to the right and receive from the left."""
    _, _, left, right = ring(comm)
    comm.Sendrecv(source, right, tag, target, left, tag)


def buffers_go_round_a_ring(MPI, comm, rank, left, right):
    """Each rank receives the array of its left neighbour."""
    target = np.empty(5)
    request = comm.Isend(np.full(5, float(rank)), dest=right)
    comm.Recv(target, source=left)
    request.Wait()
    same(target, np.full(5, float(left)))


def every_dtype(MPI, comm, rank, left):
    """Arrays of every dtype that has an MPI type arrive bit for bit."""
    for code in "?bhilqBHILQfdFD":
        target = np.zeros(4, code)
        shifted(comm, np.arange(rank, rank + 4).astype(code), target)
        same(target, np.arange(left, left + 4).astype(code))


def specifications_of_part_of_an_array(MPI, comm, rank, left):
    """Count, displacement and type choose a part of the array, on both sides."""
    for begin, spec in (
        (0, lambda a: [a, 2]),
        (0, lambda a: [a, 2, MPI.DOUBLE]),
        (0, lambda a: (a, 2, "d")),
        (0, lambda a: [a, (2, 0)]),
        (1, lambda a: [a, (2, 1)]),
        (1, lambda a: [a, 2, 1, MPI.DOUBLE]),
        (1, lambda a: [a, (2, 1), "d"]),
    ):
        target, wanted = np.full(4, -1.0), np.full(4, -1.0)
        wanted[begin : begin + 2] = [left + begin, left + begin + 1.0]
        shifted(comm, spec(np.arange(4.0) + rank), spec(target))
        same(target, wanted)


def specifications_of_a_whole_array(MPI, comm, rank, left):
    """A type alone, as object or code, takes as many elements as the memory holds."""
    for kind in ((MPI.DOUBLE,), ("f8",), (None, "d"), (None,)):
        target = np.zeros(3)
        shifted(comm, [np.full(3, rank + 0.5), *kind], [target, *kind])
        same(target, np.full(3, left + 0.5))


def memory_of_many_kinds(MPI, comm, rank, left):
    """Bytes, bytearrays, memoryviews and arrays of the standard library are buffers."""
    sent = bytes([rank % 256] * 8)
    target = bytearray(8)
    for source in (sent, bytearray(sent), memoryview(sent)):
        shifted(comm, source, target)
        same(bytes(target), bytes([left % 256] * 8))
    numbers = array.array("d", [0.0] * 3)
    shifted(comm, array.array("d", [rank] * 3), numbers)
    same(list(numbers), [left] * 3)


def several_dimensions(MPI, comm, rank, left):
    """Arrays of several dimensions go by memory, C and Fortran order alike; a scalar is one element."""
    grid = np.arange(6.0).reshape(2, 3) + rank
    target = np.zeros((2, 3))
    shifted(comm, grid, target)
    same(target, np.arange(6.0).reshape(2, 3) + left)
    shifted(comm, np.asfortranarray(grid), target)
    same(target.ravel(), (np.arange(6.0).reshape(2, 3) + left).ravel(order="F"))
    point = np.array(0.0)
    shifted(comm, np.array(float(rank)), point)
    same(float(point), float(left))


def memory_that_cannot_be_used(MPI, comm, rank):
    """A slice with a step is no buffer, and nothing is sent; nothing is received into bytes or a frozen array."""
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    refused((BufferError, ValueError), comm.Isend, np.zeros(8)[::2], dest=rank)
    for target in (np.zeros((4, 4))[:, 1], frozen, b"abc"):
        refused((BufferError, ValueError), comm.Irecv, target, source=rank)


def a_foreign_byte_order_is_refused(MPI, comm, rank):
    """An array in another byte order than the machine's has no datatype: sent as it is, it would be other numbers."""
    native, foreign = np.zeros(3, "i4"), np.arange(3).astype(np.dtype("i4").newbyteorder())
    refused(BufferError, comm.Isend, foreign, dest=rank)
    refused(BufferError, comm.Irecv, foreign, source=rank)
    refused(BufferError, comm.Allreduce, native, foreign)
    shifted(comm, foreign.astype("i4"), native)
    same(native.tolist(), [0, 1, 2])


def things_that_are_no_buffers(MPI, comm, rank):
    """Numbers, text and lists of the wrong length are refused with the type of error that mpi4py raises."""
    for thing in (3, "text", None, object()):
        refused(TypeError, comm.Isend, thing, dest=rank)
    refused(ValueError, comm.Isend, [np.zeros(2)], dest=rank)
    refused(ValueError, comm.Isend, [np.zeros(2), -1], dest=rank)
    refused(KeyError, comm.Isend, [np.zeros(2), "no such type"], dest=rank)


def messages_of_other_lengths(MPI, comm, rank, left, right):
    """A shorter message leaves the rest of the buffer; the status says its length. A longer one is ERR_TRUNCATE."""
    target, status = np.full(6, -1.0), MPI.Status()
    request = comm.Isend(np.full(2, float(rank)), dest=right)
    comm.Recv(target, source=left, status=status)
    request.Wait()
    same(target, [left, left, -1, -1, -1, -1])
    same((status.Get_count(MPI.DOUBLE), status.Get_elements(MPI.DOUBLE), status.count), (2, 2, 16))
    same(status.Get_count(MPI.INT), 4)
    request = comm.Isend(np.zeros(3, np.int32), dest=rank)
    comm.Recv(np.zeros(8, np.int32), source=rank, status=status)
    request.Wait()
    # Twelve bytes are no whole number of doubles.
    same((status.Get_count(MPI.INT), status.Get_count(MPI.DOUBLE)), (3, MPI.UNDEFINED))
    # To oneself, so that no other rank is left in a call when the receive fails.
    request = comm.Isend(np.zeros(4), dest=rank)
    fails(MPI, MPI.ERR_TRUNCATE, comm.Recv, np.zeros(2), source=rank)
    request.Wait()


def empty_messages(MPI, comm, left, right):
    """A message without data is a message: it matches, completes and counts zero."""
    status = MPI.Status()
    request = comm.Isend(np.zeros(0), dest=right, tag=8)
    comm.Recv(np.zeros(0), source=left, tag=8, status=status)
    request.Wait()
    same((status.source, status.tag, status.Get_count(MPI.DOUBLE)), (left, 8, 0))
    request = comm.Isend([None, 0, MPI.INT], dest=right, tag=9)
    comm.Recv([None, 0, MPI.INT], source=left, tag=9)
    request.Wait()


def buffers_to_and_from_nowhere(MPI, comm):
    """PROC_NULL takes anything and leaves receiving buffers untouched."""
    target, status = np.full(3, -1.0), MPI.Status()
    comm.Send(np.zeros(3), dest=MPI.PROC_NULL)
    # Even a synchronous send: it has no receiver to wait for.
    comm.Ssend(np.zeros(3), dest=MPI.PROC_NULL)
    comm.Isend(np.zeros(3), dest=MPI.PROC_NULL).Wait()
    comm.Recv(target, source=MPI.PROC_NULL, status=status)
    same((status.source, status.tag, status.Get_count(MPI.DOUBLE)), (MPI.PROC_NULL, MPI.ANY_TAG, 0))
    comm.Irecv(target, source=MPI.PROC_NULL).Wait()
    same(target, np.full(3, -1.0))


def a_shift_along_an_open_line(MPI, comm, rank, size, left, right):
    """Sendrecv with PROC_NULL at the ends shifts along a line."""
    left = left if rank > 0 else MPI.PROC_NULL
    right = right if rank < size - 1 else MPI.PROC_NULL
    target = np.full(1, -1.0)
    comm.Sendrecv(np.full(1, float(rank)), right, 0, target, left, 0)
    same(float(target[0]), rank - 1.0)


def sendrecv_of_different_shapes(MPI, comm, rank, size, left, right):
    """The two halves of Sendrecv have counts, types and tags of their own."""
    target, status = np.full(size, -1, np.int32), MPI.Status()
    comm.Sendrecv(np.full(rank + 1, rank, np.int32), right, rank, target, left, left, status)
    same((status.Get_count(MPI.INT), status.tag), (left + 1, left))
    same(target[: left + 1], np.full(left + 1, left))


def sendrecv_replace(MPI, comm, rank, left, right):
    """One buffer is sent and then holds what was received."""
    buf, status = np.full(4, rank), MPI.Status()
    comm.Sendrecv_replace(buf, right, 1, left, 1, status)
    same((buf.tolist(), status.source, status.tag), ([left] * 4, left, 1))


def isendrecv(MPI, comm, rank, left, right):
    """The nonblocking pair and its replacing form complete like the blocking ones."""
    target = np.zeros(2, np.int64)
    comm.Isendrecv(np.full(2, rank), right, 1, target, left, 1).Wait()
    same(target, np.full(2, left))
    buf = np.full(2, rank)
    comm.Isendrecv_replace(buf, right, 2, left, 2).Wait()
    same(buf, np.full(2, left))


def tags_choose_among_buffers(MPI, comm, rank, left, right):
    """Buffers are taken by tag, out of the order of sending."""
    requests = [comm.Isend(np.array([rank, tag]), dest=right, tag=tag) for tag in (2, 1)]
    target = np.zeros(2, np.int64)
    for tag in (1, 2):
        comm.Recv(target, source=left, tag=tag)
        same(target, [left, tag])
    MPI.Request.Waitall(requests)


def messages_do_not_overtake(MPI, comm, left, right):
    """Small and large messages of one tag arrive in the order of sending."""
    # Eager and rendezvous mixed: a small message is complete before a large one that was sent earlier, and must not
    # be matched before it.
    sizes = (100_000, 1, 20_000, 3)
    requests = [comm.Isend(np.full(size, float(size)), dest=right) for size in sizes]
    for size in sizes:
        target, status = np.zeros(100_000), MPI.Status()
        comm.Recv(target, source=left, status=status)
        same((status.Get_count(MPI.DOUBLE), float(target[size - 1])), (size, float(size)))
    MPI.Request.Waitall(requests)


def large_buffers(MPI, comm, rank, left, right):
    """Megabytes arrive whole when the receive is posted first, also of blocking sends towards each other."""
    target = np.zeros(500_000)
    for send in (comm.Isend, comm.Send):
        # Beyond the eager limit a blocking send waits for its receive: without this line all ranks would wait.
        receiving = comm.Irecv(target, source=left)
        source = np.full(500_000, float(rank))
        sending = send(source, dest=right)
        receiving.Wait()
        if sending is not None:
            sending.Wait()
        same(target, np.full(500_000, float(left)))
        target[:] = 0


def the_largest_tag(MPI, comm, rank):
    """Tags go up to TAG_UB, at least 32767, and not beyond."""
    highest = comm.Get_attr(MPI.TAG_UB)
    claim(highest >= 32767, "MPI promises tags up to 32767")
    target = np.zeros(1)
    comm.Sendrecv(np.ones(1), rank, highest, target, rank, highest)
    same(target, [1])
    if highest < 2**31 - 1:
        fails(MPI, MPI.ERR_TAG, comm.Isend, np.ones(1), dest=rank, tag=highest + 1)


@needs(ranks=2)
def synchronous_and_ready_sends(MPI, comm, rank):
    """Ssend, Rsend and their nonblocking forms deliver like Send."""
    if rank == 0:
        # Rank 1 has posted all receives when it comes here, which the ready sends need.
        comm.Barrier()
        comm.Ssend(np.array([1.0]), dest=1, tag=1)
        comm.Rsend(np.array([2.0]), dest=1, tag=2)
        comm.Issend(np.array([3.0]), dest=1, tag=3).Wait()
        comm.Irsend(np.array([4.0]), dest=1, tag=4).Wait()
        return
    targets = np.zeros((4, 1))
    receiving = [comm.Irecv(targets[i], source=0, tag=i + 1) for i in range(4)] if rank == 1 else []
    comm.Barrier()
    MPI.Request.Waitall(receiving)
    if rank == 1:
        same(targets.ravel(), [1, 2, 3, 4])


def buffered_sends(MPI, comm, rank, left, right):
    """With a buffer attached, all may send before any receives, objects too; detaching waits and gives it back."""
    # Without it MPI has no place for the messages of a ring in which all send first.
    MPI.Attach_buffer(bytearray(1 << 16))
    source, targets = np.full(3, float(rank)), np.zeros((2, 3))
    comm.Bsend(source, dest=right, tag=1)
    request = comm.Ibsend(source, dest=right, tag=2)
    comm.Recv(targets[0], source=left, tag=1)
    comm.Recv(targets[1], source=left, tag=2)
    request.Wait()
    same(targets, np.full((2, 3), float(left)))
    comm.bsend([rank] * 10, dest=right)
    request = comm.ibsend(rank, dest=right, tag=1)
    same((comm.recv(source=left, tag=0), comm.recv(source=left, tag=1)), ([left] * 10, left))
    request.wait()
    claim(MPI.Detach_buffer() is not None, "the attached buffer comes back")


def a_buffered_send_without_room(MPI, comm, rank):
    """A buffered send without enough buffer is ERR_BUFFER or ERR_OTHER, not a wait."""
    MPI.Attach_buffer(bytearray(MPI.BSEND_OVERHEAD + 64))
    try:
        # To wait for room would be a standard send: MPI asks for an error.
        refused(MPI.Exception, comm.Bsend, np.zeros(1000), dest=rank)
    finally:
        MPI.Detach_buffer()


@needs(ranks=2)
def a_synchronous_send_waits_for_its_receiver(MPI, comm, rank):
    """An issend is incomplete until the receive has begun; an ssend completes then."""
    if rank == 0:
        request = comm.issend("hello", dest=1, tag=1)
        # Rank 1 posts this receive only after "now", which has not been sent yet.
        same(request.test(), (False, None))
        comm.send("now", dest=1, tag=2)
        request.wait()
        comm.ssend({"a": 1}, dest=1)
    elif rank == 1:
        same(comm.recv(source=0, tag=2), "now")
        same(comm.recv(source=0, tag=1), "hello")
        same(comm.recv(source=0), {"a": 1})
