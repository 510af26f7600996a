"""Grids and graphs of ranks, and collective calls among neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np

from contract.cases import claim, fails, needs, same


def grid(MPI: Any, comm: Any, periodic: bool = True) -> Any:
    """Return a two-dimensional grid of all ranks."""
    dims = MPI.Compute_dims(comm.Get_size(), 2)
    return comm.Create_cart(dims, [periodic, periodic])


def around(rank: int, size: int) -> list[int]:
    """Return both neighbours on a ring, left first."""
    return [(rank - 1) % size, (rank + 1) % size]


def dimensions_are_balanced(MPI, comm):
    """Compute_dims divides evenly, larger dimensions first, and keeps those that are given."""
    same(MPI.Compute_dims(6, 2), [3, 2])
    same(MPI.Compute_dims(12, 3), [3, 2, 2])
    same(MPI.Compute_dims(6, 3), [3, 2, 1])
    same(MPI.Compute_dims(20, 3), [5, 2, 2])
    same(MPI.Compute_dims(99, 4), [11, 3, 3, 1])
    same(MPI.Compute_dims(12, [0, 3]), [4, 3])
    same(MPI.Compute_dims(7, 2), [7, 1])
    same(MPI.Compute_dims(1, [0]), [1])
    fails(MPI, MPI.ERR_DIMS, MPI.Compute_dims, 7, [2, 0])


def coordinates_and_ranks(MPI, comm, own):
    """Coordinates run row by row, and lead back to their rank; a periodic grid begins anew beyond its edge."""
    cart = own(grid(MPI, comm))
    rows, columns = cart.dims
    for rank in range(cart.Get_size()):
        coords = cart.Get_coords(rank)
        same((coords, cart.Get_cart_rank(coords)), ([rank // columns, rank % columns], rank))
    same((cart.Get_dim(), cart.ndim, cart.coords), (2, 2, cart.Get_coords(cart.Get_rank())))
    same(cart.Get_topo(), (cart.dims, [1, 1], cart.coords))
    same((cart.Get_topology(), cart.is_topo), (MPI.CART, True))
    same(cart.Get_cart_rank([-1, columns]), (rows - 1) * columns)


def places_outside_of_a_grid(MPI, comm, own):
    """An open grid has no rank outside; one with more places than ranks is refused."""
    fails(MPI, MPI.ERR_ARG, own(grid(MPI, comm, periodic=False)).Get_cart_rank, [-1, 0])
    fails(MPI, MPI.ERR_ARG, MPI.COMM_SELF.Create_cart, [2, 2])


def shifts(MPI, comm, rank, size, left, right, own):
    """Shift names where to receive from and where to send to: on a ring around, at the ends of a line PROC_NULL."""
    cart = own(comm.Create_cart([size], [True]))
    same(cart.Shift(0, 1), (left, right))
    same(cart.Shift(0, -2), ((rank + 2) % size, (rank - 2) % size))
    line, target = own(comm.Create_cart([size])), np.full(1, -1)
    before, after = rank - 1 if rank else MPI.PROC_NULL, right if rank < size - 1 else MPI.PROC_NULL
    same(line.Shift(0, 1), (before, after))
    line.Sendrecv(np.full(1, rank), after, 0, target, before, 0)
    same(int(target[0]), rank - 1)


def rows_and_columns(MPI, comm):
    """Sub keeps some dimensions: rows and columns are grids of their own."""
    cart = grid(MPI, comm)
    row, column = cart.Sub([False, True]), cart.Sub([True, False])
    same((row.Get_size(), column.Get_size()), (cart.dims[1], cart.dims[0]))
    same([row.Get_rank(), column.Get_rank()], cart.coords[::-1])
    same(row.allreduce(cart.coords[0]), cart.coords[0] * cart.dims[1])
    for one in (row, column, cart):
        one.Free()


@needs(ranks=2)
def ranks_left_over(MPI, comm, size):
    """A grid smaller than the communicator leaves the last ranks with COMM_NULL."""
    cart = comm.Create_cart([size - 1])
    if comm.Get_rank() == size - 1:
        claim(cart == MPI.COMM_NULL, "a rank without a place in the grid gets COMM_NULL")
    else:
        same(cart.Get_size(), size - 1)
        cart.Free()


def a_graph(MPI, comm, rank, size):
    """A graph lists the neighbours of every rank; cumulated degrees may begin with a zero, as in sparse matrices."""
    edges = [other for each in range(size) for other in around(each, size)]
    index = [2 * (each + 1) for each in range(size)]
    for degrees in (index, [0, *index]):
        graph = comm.Create_graph(degrees, edges)
        same((graph.Get_topology(), graph.Get_dims()), (MPI.GRAPH, (size, 2 * size)))
        same((graph.Get_neighbors_count(rank), graph.Get_neighbors(rank)), (2, around(rank, size)))
        same((graph.nneighbors, graph.neighbors, graph.edges), (2, around(rank, size), edges))
        same(graph.Get_topo(), (index, edges))
        graph.Free()


def a_distributed_graph_of_adjacencies(MPI, comm, rank, left, right, own):
    """Every rank names its own sources and destinations, with weights; without them there are none to read."""
    graph = own(comm.Create_dist_graph_adjacent([left], [right], [10 + left], [10 + rank]))
    same((graph.Get_topology(), graph.Get_dist_neighbors_count()[:2]), (MPI.DIST_GRAPH, (1, 1)))
    same(graph.Get_dist_neighbors(), ([left], [right], ([10 + left], [10 + rank])))
    same((graph.indegree, graph.outdegree, graph.inedges, graph.outedges), (1, 1, [left], [right]))
    same(own(comm.Create_dist_graph_adjacent([rank], [left])).Get_dist_neighbors(), ([rank], [left], None))


def a_distributed_graph_told_by_one(MPI, comm, rank, size):
    """Any rank may name edges of all."""
    everyone = list(range(size))
    if rank == 0:
        graph = comm.Create_dist_graph(everyone, [1] * size, [(r + 1) % size for r in everyone])
    else:
        graph = comm.Create_dist_graph([], [], [])
    same(graph.Get_dist_neighbors()[:2], ([(rank - 1) % size], [(rank + 1) % size]))
    graph.Free()


def duplicates_keep_the_topology(MPI, comm, own):
    """A duplicate of a grid is a grid."""
    cart = own(grid(MPI, comm))
    twin = own(cart.Dup())
    same((twin.Get_topology(), twin.dims, twin.coords), (MPI.CART, cart.dims, cart.coords))
    claim(isinstance(twin, MPI.Cartcomm), "its class says so")


def maps(MPI, comm, size):
    """Cart_map and Graph_map name the rank that a topology would give."""
    edges = [other for rank in range(size) for other in around(rank, size)]
    same(comm.Cart_map([size]), comm.Get_rank())
    same(comm.Graph_map([2 * (rank + 1) for rank in range(size)], edges), comm.Get_rank())


def circle(comm: Any) -> Any:
    """Return a periodic line of all ranks; its neighbours are left, then right."""
    return comm.Create_cart([comm.Get_size()], [True])


def allgather_on_a_ring(MPI, comm, call, own):
    """Each rank gets the blocks of its left and right neighbours."""
    cart = own(circle(comm))
    rank, target = cart.Get_rank(), np.zeros((2, 3), np.int64)
    call(cart, "Neighbor_allgather", np.full(3, rank), target)
    same(target, [[other] * 3 for other in around(rank, cart.Get_size())])
    same(
        cart.neighbor_allgather(("object", rank)),
        [("object", other) for other in around(rank, cart.Get_size())],
    )


@needs(ranks=3)
def alltoall_on_a_ring(MPI, comm, call, rank, left, right, own):
    """Each rank sends to either neighbour, also blocks of several lengths and types; displacements count bytes."""
    cart, target = own(circle(comm)), np.zeros(2, np.int64)
    call(cart, "Neighbor_alltoall", np.array([10 * rank, 10 * rank + 1]), target)
    same(target, [10 * left + 1, 10 * right])
    same(cart.neighbor_alltoall([(rank, "left"), (rank, "right")]), [(left, "right"), (right, "left")])
    three = np.zeros(3, np.int64)
    sent = np.array([rank, 10 + rank, 10 + rank])
    call(cart, "Neighbor_alltoallv", [sent, [1, 2]], [three, [2, 1]])
    same(three, [10 + left, 10 + left, right])
    layout, types = ([1, 1], [0, 8]), [MPI.LONG, MPI.LONG]
    call(cart, "Neighbor_alltoallw", [np.array([rank, rank + 100]), layout, types], [target, layout, types])
    same(target, [left + 100, right])


def allgather_at_the_ends_of_a_line(MPI, comm, call, size, own):
    """Blocks of neighbours that do not exist stay untouched."""
    cart = own(comm.Create_cart([size]))
    rank, target = cart.Get_rank(), np.full(2, -1)
    call(cart, "Neighbor_allgather", np.full(1, rank), target)
    # MPI leaves the block of a PROC_NULL neighbour as it was; it is there all the same, so places do not shift.
    same(target, [rank - 1, rank + 1 if rank < size - 1 else -1])


def allgather_on_a_plane(MPI, comm, call, own):
    """On a two-dimensional grid neighbours come dimension by dimension, down before up."""
    cart = own(comm.Create_cart(MPI.Compute_dims(comm.Get_size(), 2), [True, True]))
    target = np.zeros(4, np.int64)
    call(cart, "Neighbor_allgather", np.full(1, cart.Get_rank()), target)
    same(target, [*cart.Shift(0, 1), *cart.Shift(1, 1)])


@needs(ranks=2)
def allgather_on_a_graph(MPI, comm, call, size, own):
    """Neighbours of a graph come in the order of its edges."""
    star = [list(range(1, size))] + [[0]] * (size - 1)
    index = np.cumsum([len(others) for others in star]).tolist()
    graph = own(comm.Create_graph(index, [other for others in star for other in others]))
    mine = star[graph.Get_rank()]
    target = np.full(len(mine), -1)
    call(graph, "Neighbor_allgather", np.full(1, graph.Get_rank()), target)
    same(target, mine)


def allgather_on_a_directed_ring(MPI, comm, call, rank, left, right, own):
    """In a distributed graph a rank receives from its sources only, blocks of one length or of their own."""
    graph, target = own(comm.Create_dist_graph_adjacent([left], [right])), np.full(2, -1)
    call(graph, "Neighbor_allgather", np.full(2, rank), target)
    same(target, [left, left])
    same(graph.neighbor_alltoall([rank]), [left])
    target = np.full(left + 2, -1)
    call(graph, "Neighbor_allgatherv", np.full(rank + 1, rank), [target, ([left + 1], [1])])
    same(target, [-1, *[left] * (left + 1)])


def ranks_without_neighbours(MPI, comm, call, own):
    """A rank without edges takes part and gets nothing."""
    graph = own(comm.Create_dist_graph_adjacent([], []))
    call(graph, "Neighbor_allgather", np.zeros(1), np.zeros(0))
    same((graph.neighbor_allgather("x"), graph.neighbor_alltoall([])), ([], []))


def persistent_forms(MPI, comm, own):
    """A persistent neighbourhood collective is started again with what the buffer holds then."""
    cart = own(circle(comm))
    rank = cart.Get_rank()
    source, target = np.zeros(1, np.int64), np.zeros(2, np.int64)
    request = own(cart.Neighbor_allgather_init(source, target))
    for round_ in range(2):
        source[0] = rank + 10 * round_
        request.Start()
        request.Wait()
        same(target, [other + 10 * round_ for other in around(rank, cart.Get_size())])


def a_stencil(MPI, comm, call, own):
    """Ten steps of a heat equation, halo by halo, equal the computation in one piece."""
    cart = own(circle(comm))
    rank, size = cart.Get_rank(), cart.Get_size()
    whole = np.sin(np.arange(4.0 * size))
    mine, halo = whole[4 * rank : 4 * rank + 4].copy(), np.zeros(2)
    for _ in range(10):
        call(cart, "Neighbor_alltoall", mine[[0, -1]], halo)
        # With two ranks both neighbours are the same rank, and the edges of a pair are ambiguous.
        if size < 3:
            halo[:] = whole[(4 * rank - 1) % len(whole)], whole[(4 * rank + 4) % len(whole)]
        padded = np.concatenate([halo[:1], mine, halo[1:]])
        mine = padded[1:-1] + 0.1 * (padded[2:] - 2 * padded[1:-1] + padded[:-2])
        whole = whole + 0.1 * (np.roll(whole, -1) - 2 * whole + np.roll(whole, 1))
    same(mine, whole[4 * rank : 4 * rank + 4])
