"""Communicators with neighbours: `Cartcomm`, `Graphcomm`, `Distgraphcomm`, and their making.

This room knows MPI's topology calls. Who is whose neighbour is told in `grids`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from spawnsim.comm.constants import CART, DIST_GRAPH, GRAPH, UNDEFINED
from spawnsim.comm.failures import ERR_ARG, ERR_DIMS, CallError
from spawnsim.comm.info import INFO_NULL, Info
from spawnsim.virtual.comm.communicators import COMM_NULL, Intracomm
from spawnsim.virtual.comm.context import Context
from spawnsim.virtual.comm.grids import Cartesian, DistGraph, Graph
from spawnsim.virtual.comm.neighbours import Neighbours


class Topocomm(Intracomm, Neighbours):
    """A communicator with neighbours."""

    __slots__ = ()

    @property
    def degrees(self) -> tuple[int, int]:
        """Number of incoming and outgoing neighbours."""
        return len(self.inedges), len(self.outedges)

    @property
    def indegree(self) -> int:
        """Number of incoming neighbours."""
        return len(self.inedges)

    @property
    def outdegree(self) -> int:
        """Number of outgoing neighbours."""
        return len(self.outedges)

    @property
    def inoutedges(self) -> tuple[list[int], list[int]]:
        """Incoming and outgoing neighbours."""
        return self.inedges, self.outedges

    @property
    def inedges(self) -> list[int]:
        """From whom this rank receives."""
        return list(self._context.topology.sources(self._me))

    @property
    def outedges(self) -> list[int]:
        """To whom this rank sends."""
        return list(self._context.topology.destinations(self._me))


class Cartcomm(Topocomm):
    """A Cartesian grid of ranks."""

    __slots__ = ()

    @property
    def _grid(self) -> Cartesian:
        self._need()
        return self._context.topology  # type: ignore[no-any-return]

    def Get_dim(self) -> int:
        """Return the number of dimensions."""
        return len(self._grid.dims)

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        """Return dimensions, periods, and the coordinates of this rank."""
        return self.dims, self.periods, self.coords

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        """Return the rank at coordinates."""
        return self._grid.rank(coords)

    def Get_coords(self, rank: int) -> list[int]:
        """Return the coordinates of a rank."""
        return self._grid.coords(rank)

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """Return (source, dest) for a shift along a dimension."""
        return self._grid.shift(self._me, direction, disp)

    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        """Return the grid of the dimensions that remain, through this rank."""
        grid = self._grid
        if len(remain_dims) != len(grid.dims):
            raise CallError(ERR_DIMS, f"{len(remain_dims)} flags for a grid of {len(grid.dims)} dimensions")
        coords = grid.coords(self._me)
        kept = [place for place, keep in enumerate(remain_dims) if keep]
        color = [place for where, place in enumerate(coords) if where not in kept]
        flat = self._split("Sub", tuple(color), self._me)
        shape = Cartesian(tuple(grid.dims[p] for p in kept), tuple(grid.periods[p] for p in kept))
        return _shaped(Cartcomm, flat, shape)

    @property
    def dim(self) -> int:
        """The number of dimensions."""
        return self.Get_dim()

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.Get_dim()

    @property
    def dims(self) -> list[int]:
        """The length of each dimension."""
        return list(self._grid.dims)

    @property
    def periods(self) -> list[int]:
        """Whether each dimension closes into a ring."""
        return [int(period) for period in self._grid.periods]

    @property
    def coords(self) -> list[int]:
        """The coordinates of this rank."""
        return self._grid.coords(self._me)

    @property
    def topo(self) -> tuple[list[int], list[int], list[int]]:
        """Dimensions, periods, coordinates."""
        return self.Get_topo()


class Graphcomm(Topocomm):
    """A graph of ranks that every rank knows whole."""

    __slots__ = ()

    @property
    def _graph(self) -> Graph:
        self._need()
        return self._context.topology  # type: ignore[no-any-return]

    def Get_dims(self) -> tuple[int, int]:
        """Return the number of nodes and edges."""
        return len(self._graph.index), len(self._graph.edges)

    def Get_topo(self) -> tuple[list[int], list[int]]:
        """Return index and edges."""
        return list(self._graph.index), list(self._graph.edges)

    def Get_neighbors_count(self, rank: int) -> int:
        """Return the number of neighbours of a rank."""
        return len(self._graph.sources(rank))

    def Get_neighbors(self, rank: int) -> list[int]:
        """Return the neighbours of a rank."""
        return self._graph.sources(rank)

    @property
    def dims(self) -> tuple[int, int]:
        """The number of nodes and edges."""
        return self.Get_dims()

    @property
    def nnodes(self) -> int:
        """The number of nodes."""
        return self.Get_dims()[0]

    @property
    def nedges(self) -> int:
        """The number of edges."""
        return self.Get_dims()[1]

    @property
    def topo(self) -> tuple[list[int], list[int]]:
        """Index and edges."""
        return self.Get_topo()

    @property
    def index(self) -> list[int]:
        """Where each node's neighbours end in `edges`."""
        return list(self._graph.index)

    @property
    def edges(self) -> list[int]:
        """All neighbours, node by node."""
        return list(self._graph.edges)

    @property
    def nneighbors(self) -> int:
        """The number of neighbours of this rank."""
        return len(self.neighbors)

    @property
    def neighbors(self) -> list[int]:
        """The neighbours of this rank."""
        return self._graph.sources(self._me)


class Distgraphcomm(Topocomm):
    """A directed graph of which each rank knows its own part."""

    __slots__ = ()

    def Get_dist_neighbors_count(self) -> tuple[int, int, bool]:
        """Return the number of incoming and outgoing neighbours, and whether edges have weights."""
        self._need()
        (sources, weights), (destinations, _) = self._sides()
        return len(sources), len(destinations), weights is not None

    def Get_dist_neighbors(self) -> tuple[list[int], list[int], tuple[list[int], list[int]] | None]:
        """Return incoming and outgoing neighbours, and their weights."""
        self._need()
        (sources, inweights), (destinations, outweights) = self._sides()
        weights = None if inweights is None or outweights is None else (list(inweights), list(outweights))
        return list(sources), list(destinations), weights

    def _sides(self) -> tuple[Any, Any]:
        graph: DistGraph = self._context.topology
        return graph.incoming[self._me], graph.outgoing[self._me]


def _shaped(kind: Any, comm: Any, shape: Any) -> Any:
    """Return a communicator as one with neighbours; its members all bring the same shape."""
    if comm is COMM_NULL:
        return COMM_NULL
    comm._context.topology = shape
    new = kind.enter(comm._context, comm._rank.id)
    new._own = comm._own
    return new


# -- making: methods of Intracomm --------------------------------------------------------------------------


def create_cart(
    self: Intracomm, dims: Sequence[int], periods: Sequence[bool] | None = None, reorder: bool = False
) -> Any:
    """Return a grid of the first ranks; those left over get COMM_NULL."""
    sizes = tuple(int(dim) for dim in ([dims] if isinstance(dims, int) else dims))
    rings = [bool(periods)] * len(sizes) if periods is None or isinstance(periods, (bool, int)) else periods
    shape = Cartesian(sizes, tuple(bool(ring) for ring in rings))
    if len(shape.periods) != len(sizes) or any(dim < 1 for dim in sizes):
        raise CallError(
            ERR_DIMS,
            f"Create_cart({list(sizes)}, {list(rings)}): one positive length and flag each",
        )
    return _first_ranks(self, Cartcomm, shape, "Create_cart")


def create_graph(self: Intracomm, index: Sequence[int], edges: Sequence[int], reorder: bool = False) -> Any:
    """Return a graph of the first ranks; those left over get COMM_NULL."""
    ends = tuple(index)
    if len(ends) > 1 and ends[0] == 0 and ends[-1] == len(edges):  # mpi4py takes an adjacency array, too
        ends = ends[1:]
    shape = Graph(ends, tuple(edges))
    if shape.index and shape.index[-1] > len(shape.edges):
        raise CallError(
            ERR_ARG, f"Create_graph: {len(shape.edges)} edges, but the index ends at {shape.index[-1]}"
        )
    return _first_ranks(self, Graphcomm, shape, "Create_graph")


def _first_ranks(comm: Intracomm, kind: Any, shape: Any, name: str) -> Any:
    if shape.size > comm.Get_size():
        raise CallError(ERR_ARG, f"{name}: {shape.size} places for {comm.Get_size()} ranks")
    flat = comm._split(name, 0 if comm._me < shape.size else UNDEFINED, comm._me)
    return _shaped(kind, flat, shape)


def create_dist_graph_adjacent(
    self: Intracomm, sources: Sequence[int], destinations: Sequence[int], sourceweights: Sequence[int] | None = None,
    destweights: Sequence[int] | None = None, info: Info = INFO_NULL, reorder: bool = False,
) -> Distgraphcomm:  # fmt: skip
    """Return a graph of which each rank tells its own edges."""
    part = (list(sources), _weights(sourceweights), list(destinations), _weights(destweights))

    def make(parts: list[Any]) -> Context:
        incoming = {rank: (each[0], each[1]) for rank, each in enumerate(parts)}
        outgoing = {rank: (each[2], each[3]) for rank, each in enumerate(parts)}
        return Context(self._world, self._context.sides, DistGraph(incoming, outgoing))

    return self_enter(self, self._agree("Create_dist_graph_adjacent", part, make))


def create_dist_graph(
    self: Intracomm, sources: Sequence[int], degrees: Sequence[int], destinations: Sequence[int],
    weights: Sequence[int] | None = None, info: Info = INFO_NULL, reorder: bool = False,
) -> Distgraphcomm:  # fmt: skip
    """Return a graph of which each rank tells any edges: `degrees[i]` of them leave `sources[i]`."""
    given = _weights(weights)
    ends = iter(zip(destinations, given or [0] * len(destinations), strict=True))
    edges = [
        (source, *next(ends)) for source, degree in zip(sources, degrees, strict=True) for _ in range(degree)
    ]

    def make(parts: list[Any]) -> Context:
        weighted = all(flag for _, flag in parts)
        incoming: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        outgoing: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for source, dest, weight in (edge for own, _ in parts for edge in own):
            incoming[dest].append((source, weight))
            outgoing[source].append((dest, weight))
        size = len(parts)
        graph = DistGraph(_by_rank(incoming, size, weighted), _by_rank(outgoing, size, weighted))
        return Context(self._world, self._context.sides, graph)

    return self_enter(self, self._agree("Create_dist_graph", (edges, given is not None), make))


def _by_rank(edges: dict[int, list[tuple[int, int]]], size: int, weighted: bool) -> dict[int, Any]:
    return {
        rank: (
            [other for other, _ in edges.get(rank, ())],
            [w for _, w in edges.get(rank, ())] if weighted else None,
        )
        for rank in range(size)
    }


def _weights(weights: Any) -> list[int] | None:
    """Return weights as a list; None, or MPI's UNWEIGHTED, is none."""
    return None if weights is None or isinstance(weights, int) else list(weights)


def self_enter(comm: Intracomm, context: Context) -> Distgraphcomm:
    """Return this rank's handle of a distributed graph."""
    new = Distgraphcomm.enter(context, comm._rank.id)
    new._own = comm._own
    return new


def topology(comm: Intracomm) -> int:
    """Return the kind of a communicator's shape."""
    kinds = {Cartesian: CART, Graph: GRAPH, DistGraph: DIST_GRAPH}
    return kinds.get(type(comm._context.topology), UNDEFINED)


def mapped(comm: Any, dims: Sequence[int]) -> int:
    """Return the rank that a communicator's rank would have among `dims` places, or UNDEFINED."""
    size = Cartesian(tuple(dims), (False,) * len(dims)).size
    if size > comm.Get_size():
        raise CallError(ERR_DIMS, f"{size} places for {comm.Get_size()} ranks")
    return int(comm._me) if comm._me < size else UNDEFINED
