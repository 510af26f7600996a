"""Collective calls among neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np

from spawnsim.testing.claims import needs, same
from spawnsim.testing.contract.topologies import around


def circle(comm: Any) -> Any:
    """Return a periodic line of all ranks; its neighbours are left, then right."""
    return comm.Create_cart([comm.Get_size()], [True])


def allgather_on_a_ring(MPI: Any, comm: Any) -> None:
    """Each rank gets the blocks of its left and right neighbours."""
    cart = circle(comm)
    rank, target = cart.Get_rank(), np.zeros((2, 3), np.int64)
    cart.Neighbor_allgather(np.full(3, rank), target)
    same(target, [[other] * 3 for other in around(rank, cart.Get_size())])
    same(
        cart.neighbor_allgather(("object", rank)),
        [("object", other) for other in around(rank, cart.Get_size())],
    )
    cart.Free()


@needs(ranks=3)
def alltoall_on_a_ring(MPI: Any, comm: Any) -> None:
    """Each rank sends a block of its own to either neighbour."""
    cart = circle(comm)
    rank, size, target = cart.Get_rank(), cart.Get_size(), np.zeros(2, np.int64)
    left, right = around(rank, size)
    cart.Neighbor_alltoall(np.array([10 * rank, 10 * rank + 1]), target)
    same(target, [10 * left + 1, 10 * right])
    same(cart.neighbor_alltoall([(rank, "left"), (rank, "right")]), [(left, "right"), (right, "left")])
    cart.Free()


def allgather_at_the_ends_of_a_line(MPI: Any, comm: Any) -> None:
    """Blocks of neighbours that do not exist stay untouched."""
    size = comm.Get_size()
    cart = comm.Create_cart([size])
    rank, target = cart.Get_rank(), np.full(2, -1)
    cart.Neighbor_allgather(np.full(1, rank), target)
    same(target, [rank - 1, rank + 1 if rank < size - 1 else -1])
    cart.Free()


def allgather_on_a_plane(MPI: Any, comm: Any) -> None:
    """On a two-dimensional grid neighbours come dimension by dimension, down before up."""
    cart = comm.Create_cart(MPI.Compute_dims(comm.Get_size(), 2), [True, True])
    target = np.zeros(4, np.int64)
    cart.Neighbor_allgather(np.full(1, cart.Get_rank()), target)
    same(target, [*cart.Shift(0, 1), *cart.Shift(1, 1)])
    cart.Free()


@needs(ranks=2)
def allgather_on_a_graph(MPI: Any, comm: Any) -> None:
    """Neighbours of a graph come in the order of its edges."""
    size = comm.Get_size()
    star = [list(range(1, size))] + [[0]] * (size - 1)
    index = np.cumsum([len(others) for others in star]).tolist()
    graph = comm.Create_graph(index, [other for others in star for other in others])
    mine = star[graph.Get_rank()]
    target = np.full(len(mine), -1)
    graph.Neighbor_allgather(np.full(1, graph.Get_rank()), target)
    same(target, mine)
    graph.Free()


def allgather_on_a_directed_ring(MPI: Any, comm: Any) -> None:
    """In a distributed graph a rank receives from its sources only."""
    rank, size = comm.Get_rank(), comm.Get_size()
    left, right = around(rank, size)
    graph = comm.Create_dist_graph_adjacent([left], [right])
    target = np.full(2, -1)
    graph.Neighbor_allgather(np.full(2, rank), target)
    same(target, [left, left])
    same(graph.neighbor_alltoall([rank]), [left])
    graph.Free()


def ranks_without_neighbours(MPI: Any, comm: Any) -> None:
    """A rank without edges takes part and gets nothing."""
    graph = comm.Create_dist_graph_adjacent([], [])
    graph.Neighbor_allgather(np.zeros(1), np.zeros(0))
    same((graph.neighbor_allgather("x"), graph.neighbor_alltoall([])), ([], []))
    graph.Free()


def allgatherv_on_a_directed_ring(MPI: Any, comm: Any) -> None:
    """Blocks of unequal length from each source."""
    rank, size = comm.Get_rank(), comm.Get_size()
    left, right = around(rank, size)
    graph = comm.Create_dist_graph_adjacent([left], [right])
    target = np.full(left + 2, -1)
    graph.Neighbor_allgatherv(np.full(rank + 1, rank), [target, ([left + 1], [1])])
    same(target, [-1, *[left] * (left + 1)])
    graph.Free()


@needs(ranks=3)
def alltoallv_on_a_ring(MPI: Any, comm: Any) -> None:
    """Each rank sends one element to the left and two to the right."""
    cart = circle(comm)
    rank = cart.Get_rank()
    left, right = around(rank, cart.Get_size())
    target = np.zeros(3, np.int64)
    cart.Neighbor_alltoallv([np.array([rank, 10 + rank, 10 + rank]), [1, 2]], [target, [2, 1]])
    same(target, [10 + left, 10 + left, right])
    cart.Free()


@needs(ranks=3)
def alltoallw_on_a_ring(MPI: Any, comm: Any) -> None:
    """Each edge has a datatype of its own; displacements count bytes."""
    cart = circle(comm)
    rank = cart.Get_rank()
    left, right = around(rank, cart.Get_size())
    sent, target = np.array([rank, rank + 100]), np.zeros(2, np.int64)
    layout, types = ([1, 1], [0, 8]), [MPI.LONG, MPI.LONG]
    cart.Neighbor_alltoallw([sent, layout, types], [target, layout, types])
    same(target, [left + 100, right])
    cart.Free()


@needs(ranks=3)
def nonblocking_forms(MPI: Any, comm: Any) -> None:
    """All of them may be under way together."""
    cart = circle(comm)
    rank = cart.Get_rank()
    left, right = around(rank, cart.Get_size())
    targets = np.zeros((5, 2), np.int64)
    pair, one = np.array([rank, rank + 100]), np.full(1, rank)
    layout, types = ([1, 1], [0, 8]), [MPI.LONG, MPI.LONG]
    requests = [
        cart.Ineighbor_allgather(one, targets[0]),
        cart.Ineighbor_allgatherv(one, [targets[1], [1, 1]]),
        cart.Ineighbor_alltoall(pair, targets[2]),
        cart.Ineighbor_alltoallv([pair, [1, 1]], [targets[3], [1, 1]]),
        cart.Ineighbor_alltoallw([pair, layout, types], [targets[4], layout, types]),
    ]
    MPI.Request.Waitall(requests)
    same(targets, [[left, right], [left, right], *[[left + 100, right]] * 3])
    cart.Free()


def persistent_forms(MPI: Any, comm: Any) -> None:
    """A persistent neighbourhood collective is started again with what the buffer holds then."""
    cart = circle(comm)
    rank = cart.Get_rank()
    source, target = np.zeros(1, np.int64), np.zeros(2, np.int64)
    request = cart.Neighbor_allgather_init(source, target)
    for round_ in range(2):
        source[0] = rank + 10 * round_
        request.Start()
        request.Wait()
        same(target, [other + 10 * round_ for other in around(rank, cart.Get_size())])
    request.Free()
    cart.Free()


def a_stencil(MPI: Any, comm: Any) -> None:
    """Ten steps of a heat equation, halo by halo, equal the computation in one piece."""
    cart = circle(comm)
    rank, size = cart.Get_rank(), cart.Get_size()
    whole = np.sin(np.arange(4.0 * size))
    mine, halo = whole[4 * rank : 4 * rank + 4].copy(), np.zeros(2)
    for _ in range(10):
        cart.Neighbor_alltoall(mine[[0, -1]], halo)
        if (
            size < 3
        ):  # with two ranks both neighbours are the same rank, and the edges of a pair are ambiguous
            halo[:] = whole[(4 * rank - 1) % len(whole)], whole[(4 * rank + 4) % len(whole)]
        padded = np.concatenate([halo[:1], mine, halo[1:]])
        mine = padded[1:-1] + 0.1 * (padded[2:] - 2 * padded[1:-1] + padded[:-2])
        whole = whole + 0.1 * (np.roll(whole, -1) - 2 * whole + np.roll(whole, 1))
    same(mine, whole[4 * rank : 4 * rank + 4])
    cart.Free()
