"""Ranks, tags and counts of other types than Python's own: whatever C can be given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from spawnsim.testing.claims import claim, needs, refused, ring, same


def whole() -> Iterator[Callable[[int], Any]]:
    """Yield types that are integers: they serve as ranks and tags, and in lists. Torch's if it is loaded already."""
    yield from (np.int64, np.int32, np.uint8, np.array)
    if "torch" in sys.modules:
        yield sys.modules["torch"].tensor


def numbers() -> Iterator[Callable[[int], Any]]:
    """Yield types that C takes for a rank or a tag: floats are cut off."""
    yield from whole()
    yield from (float, np.float64, Fraction, lambda value: value + 0.75)


def messages(MPI: Any, comm: Any) -> None:
    """Sends, receives and probes take them for ranks and tags, and match those of any other type."""
    rank, _, left, right = ring(comm)
    for made in numbers():
        target, status = np.zeros(1), MPI.Status()
        request = comm.Irecv(target, made(left), made(3))
        comm.Send(np.full(1, float(rank)), made(right), made(3))
        request.Wait(status)
        same((target[0], status.source, status.tag), (left, left, 3))
        sent = comm.isend("x", made(right), made(4))
        claim(comm.Probe(made(left), made(4)), "a probe finds the message")
        claim(comm.Iprobe(made(left), made(4)), "a probe finds the message again")
        same(comm.recv(source=made(left), tag=made(4)), "x")
        sent.wait()
        same(comm.sendrecv(rank, made(right), made(5), None, made(left), made(5)), left)
        comm.Sendrecv(np.full(1, float(rank)), made(right), made(6), target, made(left), made(6))
        same(target[0], left)


def persistent_messages(MPI: Any, comm: Any) -> None:
    """Persistent requests take them when they are prepared."""
    rank, _, left, right = ring(comm)
    for made in numbers():
        target = np.zeros(1)
        requests = [
            comm.Recv_init(target, made(left), made(7)),
            comm.Send_init(np.full(1, float(rank)), made(right), made(7)),
        ]
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        same(target[0], left)


def roots(MPI: Any, comm: Any) -> None:
    """Collectives take them for the root."""
    rank, size, _, _ = ring(comm)
    root = size - 1
    for made in numbers():
        same(comm.bcast(rank, made(root)), root)
        same(comm.gather(rank, made(root)), list(range(size)) if rank == root else None)
        same(comm.scatter([*range(size)] if rank == root else None, made(root)), rank)
        same(comm.reduce(1, root=made(root)), size if rank == root else None)
        target = np.full(1, float(rank))
        comm.Bcast(target, made(root))
        same(target[0], root)
        comm.Ibcast(target, made(0)).Wait()
        comm.Reduce(np.ones(1), np.zeros(1), root=made(root))


def colors_and_keys(MPI: Any, comm: Any) -> None:
    """Split takes them; the order follows their values."""
    rank, size, _, _ = ring(comm)
    for made in numbers():
        sub = comm.Split(made(rank % 2), made(size - rank))
        same(sub.Get_size(), len(range(rank % 2, size, 2)))
        same(sub.Get_rank(), len(range(rank + 2, size, 2)))
        sub.Free()


def grids(MPI: Any, comm: Any) -> None:
    """Dimensions, directions, displacements and coordinates of a grid."""
    rank, size, left, right = ring(comm)
    for made in whole():
        grid = comm.Create_cart([made(size)], [made(1)])
        same(grid.Shift(made(0), made(1)), (left, right))
        same(grid.Get_coords(made(rank)), [rank])
        same(grid.Get_cart_rank([made(rank)]), rank)
        grid.Free()
        same(MPI.Compute_dims(made(6), [made(3), made(0)]), [3, 2])


def lists(MPI: Any, comm: Any) -> None:
    """Lists of ranks, counts and displacements: of integers only."""
    rank, size, _, _ = ring(comm)
    group = comm.Get_group()
    for made in whole():
        same(group.Incl([made(size - 1)]).Get_size(), 1)
        same(group.Translate_ranks([made(rank)]), [rank])
        datatype = MPI.INT.Create_indexed([made(1), made(2)], [made(0), made(2)])
        same(datatype.Get_size(), 12)
        same({type(each) for part in datatype.Get_contents()[:3] for each in part}, {int})
        datatype.Free()
        sums = np.zeros(1)
        comm.Reduce_scatter(np.ones(size), sums, [made(1)] * size)
        same(sums[0], size)
    for value in (0.0, np.float64(0), Fraction(0), "0", None):
        with refused(TypeError):
            group.Incl([value])


@needs(2)
def one_sided(MPI: Any, comm: Any) -> None:
    """Windows take them for sizes, targets and displacements."""
    rank, _, left, right = ring(comm)
    for made in whole():
        window = MPI.Win.Allocate(made(16), made(8), comm=comm)
        found = np.zeros(1)
        window.Lock(made(right))
        window.Put(np.full(1, float(rank)), made(right), made(1))
        window.Flush(made(right))
        window.Fetch_and_op(np.ones(1), found, made(right), made(1))
        window.Unlock(made(right))
        comm.Barrier()
        same(found[0], rank)
        same(np.frombuffer(window.tomemory(), "d")[1], left + 1.0)
        window.Free()


def what_is_no_number(MPI: Any, comm: Any) -> None:
    """Text, None and lists are a TypeError, in whatever place."""
    rank = comm.Get_rank()
    for value in ("0", None, [0], 1j):
        with refused(TypeError):
            comm.send("x", value)
        with refused(TypeError):
            comm.isend("x", rank, value)
        with refused(TypeError):
            comm.Irecv(np.zeros(1), value)
        with refused(TypeError):
            comm.Iprobe(rank, value)
        with refused(TypeError):
            comm.Send_init(np.zeros(1), value)
        with refused(TypeError):
            comm.bcast(1, value)
        with refused(TypeError):
            comm.Split(value)
    with refused(OverflowError):
        comm.Split(1 << 40)
