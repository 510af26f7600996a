"""Synchronous, ready and buffered sends, of buffers and objects."""

from __future__ import annotations

from typing import Any

import numpy as np

from spawnsim.testing.claims import claim, needs, refused, ring, same


@needs(ranks=2)
def synchronous_and_ready_sends(MPI: Any, comm: Any) -> None:
    """Ssend, Rsend and their nonblocking forms deliver like Send."""
    rank = comm.Get_rank()
    if rank == 0:
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


def buffered_sends(MPI: Any, comm: Any) -> None:
    """With a buffer attached, all may Bsend before any receives; detaching waits and gives it back."""
    rank, _, left, right = ring(comm)
    MPI.Attach_buffer(bytearray(1 << 14))
    source, targets = np.full(3, float(rank)), np.zeros((2, 3))
    comm.Bsend(source, dest=right, tag=1)
    request = comm.Ibsend(source, dest=right, tag=2)
    comm.Recv(targets[0], source=left, tag=1)
    comm.Recv(targets[1], source=left, tag=2)
    request.Wait()
    same(targets, np.full((2, 3), float(left)))
    claim(MPI.Detach_buffer() is not None, "the attached buffer comes back")


def a_buffered_send_without_room(MPI: Any, comm: Any) -> None:
    """A buffered send without enough buffer is ERR_BUFFER or ERR_OTHER, not a wait."""
    rank = comm.Get_rank()
    MPI.Attach_buffer(bytearray(MPI.BSEND_OVERHEAD + 64))
    try:
        with refused(MPI.Exception):
            comm.Bsend(np.zeros(1000), dest=rank)
    finally:
        MPI.Detach_buffer()


@needs(ranks=2)
def a_synchronous_send_waits_for_its_receiver(MPI: Any, comm: Any) -> None:
    """An issend is incomplete until the receive has begun."""
    rank = comm.Get_rank()
    if rank == 0:
        request = comm.issend("hello", dest=1, tag=1)
        same(request.test(), (False, None))
        comm.send("now", dest=1, tag=2)
        request.wait()
    elif rank == 1:
        same(comm.recv(source=0, tag=2), "now")
        same(comm.recv(source=0, tag=1), "hello")


@needs(ranks=2)
def ssend_of_objects(MPI: Any, comm: Any) -> None:
    """A synchronous send completes when its receiver takes the message."""
    rank = comm.Get_rank()
    if rank == 0:
        comm.ssend({"a": 1}, dest=1)
    elif rank == 1:
        same(comm.recv(source=0), {"a": 1})


def bsend_of_objects(MPI: Any, comm: Any) -> None:
    """With a buffer attached, all ranks may send before any receives."""
    rank, _, left, right = ring(comm)
    MPI.Attach_buffer(bytearray(1 << 16))
    comm.bsend([rank] * 10, dest=right)
    request = comm.ibsend(rank, dest=right, tag=1)
    same((comm.recv(source=left, tag=0), comm.recv(source=left, tag=1)), ([left] * 10, left))
    request.wait()
    MPI.Detach_buffer()
