"""Communicators with a topology: Cartesian grids, graphs, distributed graphs, their constructors and their calls.

The shapes are pure arithmetic on ranks. The members agree on a communicator with a shape in a collective of its parent
communicator.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, ClassVar

from spawnsim.comm.constants import CART, DIST_GRAPH, GRAPH, PROC_NULL, UNDEFINED, WEIGHTS_EMPTY
from spawnsim.comm.failures import ERR_ARG, ERR_DIMS, ERR_RANK, CallError, SpecTypeError
from spawnsim.comm.handles import each_integer, integer
from spawnsim.errors import ParameterError
from spawnsim.virtual.mpi.comm import COMM_NULL
from spawnsim.virtual.mpi.communicators import Intracomm
from spawnsim.virtual.mpi.context import KINDS, Context
from spawnsim.virtual.mpi.neighbors import Edges, NeighborCollectives, occurrences


@dataclass(frozen=True)
class Cartesian:
    """A grid of `dims`, in which the last dimension varies fastest; a dimension may close into a ring."""

    kind: ClassVar[int] = CART
    dims: tuple[int, ...]
    periods: tuple[bool, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    def coords(self, rank: int) -> list[int]:
        """Return the coordinates of a rank."""
        rank = integer(rank)
        if not 0 <= rank < self.size:
            raise CallError(ERR_RANK, f"rank {rank} is not in a grid of {self.size} ranks")
        found = []
        for dim in reversed(self.dims):
            rank, place = divmod(rank, dim)
            found.append(place)
        return found[::-1]

    def rank(self, coords: Sequence[int]) -> int:
        """Return the rank at coordinates; raises an error beyond an open edge."""
        if len(coords) != len(self.dims):
            raise CallError(ERR_ARG, f"{len(coords)} coordinates for a grid of {len(self.dims)} dimensions")
        rank = 0
        for place, dim, period in zip(each_integer(coords), self.dims, self.periods, strict=True):
            if not period and not 0 <= place < dim:
                raise CallError(ERR_ARG, f"coordinate {place} is outside an open dimension of {dim}")
            # Periodic coordinates may be negative or beyond the end; MPI shifts them into the range.
            rank = rank * dim + place % dim
        return rank

    def shift(self, rank: int, direction: int, disp: int) -> tuple[int, int]:
        """Return (source, dest) for a shift along a dimension; PROC_NULL beyond an open edge."""
        direction, disp = integer(direction), integer(disp)
        if not 0 <= direction < len(self.dims):
            raise CallError(
                ERR_DIMS, f"direction {direction} is outside a grid of {len(self.dims)} dimensions"
            )
        # MPI returns the source first: the rank that would shift to this one, in the opposite direction.
        return self._step(rank, direction, -disp), self._step(rank, direction, disp)

    def _step(self, rank: int, direction: int, disp: int) -> int:
        coords = self.coords(rank)
        coords[direction] += disp
        # Checked before the call of `rank`: beyond an open edge MPI's shift gives PROC_NULL, while Cart_rank refuses.
        if not self.periods[direction] and not 0 <= coords[direction] < self.dims[direction]:
            return PROC_NULL
        return self.rank(coords)

    def sources(self, rank: int) -> list[int]:
        """Return the neighbours, dimension by dimension: below, above."""
        return [place for direction in range(len(self.dims)) for place in self.shift(rank, direction, 1)]

    # MPI: the neighbours of a grid are the same in both directions, in the order below, above for each dimension, and
    # PROC_NULL keeps its place.
    destinations = sources

    def neighborhood(self, rank: int) -> Edges:
        """Return the edges from and to the neighbours of a rank."""
        # MPI 4.1, 8.6: data sent below arrive from above. In a ring of one or two ranks, both neighbours are the same
        # rank, and only the direction distinguishes its two messages.
        places = self.sources(rank)
        incoming = [(place, number ^ 1) for number, place in enumerate(places)]
        return incoming, [(place, number) for number, place in enumerate(places)]


@dataclass(frozen=True)
class Graph:
    """MPI's graph: `index[i]` neighbours are listed in `edges` up to and including rank i's."""

    kind: ClassVar[int] = GRAPH
    index: tuple[int, ...]
    edges: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.index)

    def sources(self, rank: int) -> list[int]:
        """Return the neighbours of a rank."""
        rank = integer(rank)
        if not 0 <= rank < self.size:
            raise CallError(ERR_RANK, f"rank {rank} is not in a graph of {self.size} nodes")
        # `index` is cumulative, so rank 0 has no entry before it; index[-1] would be the last rank's.
        return list(self.edges[self.index[rank - 1] if rank else 0 : self.index[rank]])

    destinations = sources

    def neighborhood(self, rank: int) -> Edges:
        """Return the edges from and to the neighbours of a rank."""
        places = occurrences(self.sources(rank))
        return places, places


@dataclass(frozen=True)
class DistGraph:
    """A directed graph of which each rank knows its own part: by rank, (neighbours, weights or None)."""

    kind: ClassVar[int] = DIST_GRAPH
    incoming: dict[int, tuple[list[int], list[int] | None]]
    outgoing: dict[int, tuple[list[int], list[int] | None]]

    def sources(self, rank: int) -> list[int]:
        return self.incoming[rank][0]

    def destinations(self, rank: int) -> list[int]:
        return self.outgoing[rank][0]

    def neighborhood(self, rank: int) -> Edges:
        return occurrences(self.sources(rank)), occurrences(self.destinations(rank))


def compute_dims(nnodes: int, dims: int | Sequence[int]) -> list[int]:
    """Return dimensions as equal as possible, with the product `nnodes`; entries above 0 stay as they are.

    As in MPI_Dims_create, the computed dimensions are in descending order.
    """
    nnodes, wanted = integer(nnodes), [0] * index(dims) if hasattr(dims, "__index__") else each_integer(dims)
    if any(dim < 0 for dim in wanted) or nnodes < 1:
        raise CallError(ERR_DIMS, f"Compute_dims({nnodes}, {wanted}): give positive numbers")
    fixed = math.prod(dim for dim in wanted if dim > 0)
    free = [place for place, dim in enumerate(wanted) if dim == 0]
    if nnodes % fixed or (not free and fixed != nnodes):
        raise CallError(ERR_DIMS, f"Compute_dims: {nnodes} nodes do not divide into {wanted}")
    found = _descending(nnodes // fixed, len(free), nnodes) or []  # always exists: the number, and ones
    for place, dim in zip(free, found, strict=True):
        wanted[place] = dim
    return wanted


def _descending(count: int, parts: int, most: int) -> list[int] | None:
    """Return `parts` factors of `count`, descending, the largest as small as possible, and so on.

    No factor is larger than `most`; returns None if this is impossible.
    """
    if parts <= 1:
        return [count] * parts if count <= most else None
    # 1e-9 below the root: 3125 ** (1 / 5) is a little more than 5, and its ceiling would be 6.
    least = max(1, math.ceil(count ** (1 / parts) - 1e-9))
    for first in range(least, min(count, most) + 1):
        # The rest must not have a factor larger than the first: MPI requires dimensions in descending order.
        rest = _descending(count // first, parts - 1, first) if count % first == 0 else None
        if rest is not None:
            return [first, *rest]
    return None


class Topocomm(Intracomm, NeighborCollectives):
    """A communicator with a topology."""

    __slots__ = ()
    _shapes: ClassVar[tuple[type, ...]] = (Cartesian, Graph, DistGraph)

    @classmethod
    def _check_context(cls, context: Context) -> None:
        if not isinstance(context.topology, cls._shapes):
            raise SpecTypeError(f"{cls.__name__}(): the communicator has another topology, or none")

    @property
    def degrees(self) -> tuple[int, int]:
        return len(self.inedges), len(self.outedges)

    @property
    def indegree(self) -> int:
        return len(self.inedges)

    @property
    def outdegree(self) -> int:
        return len(self.outedges)

    @property
    def inoutedges(self) -> tuple[list[int], list[int]]:
        return self.inedges, self.outedges

    @property
    def inedges(self) -> list[int]:
        return list(self._context.topology.sources(self._me))

    @property
    def outedges(self) -> list[int]:
        return list(self._context.topology.destinations(self._me))


class Cartcomm(Topocomm):
    """A Cartesian grid of ranks."""

    __slots__ = ()
    _shapes = (Cartesian,)

    @classmethod
    def _create(cls, comm: Intracomm, dims: Sequence[int], periods: Sequence[bool] | None = None) -> Any:
        """Return a grid of the first ranks; the remaining ranks get COMM_NULL."""
        sizes = tuple(each_integer([dims] if isinstance(dims, int) else dims))
        rings = (
            [bool(periods)] * len(sizes) if periods is None or isinstance(periods, (bool, int)) else periods
        )
        shape = Cartesian(sizes, tuple(map(bool, each_integer(rings))))
        if len(shape.periods) != len(sizes):
            raise ParameterError(
                f"Create_cart({list(sizes)}, {list(rings)}): give one flag for each of {len(sizes)} lengths"
            )
        if any(dim < 1 for dim in sizes):
            raise CallError(ERR_DIMS, f"Create_cart({list(sizes)}): lengths must be positive")
        return _first_ranks(comm, cls, shape, "Create_cart")

    @classmethod
    def _map(cls, comm: Intracomm, dims: Sequence[int]) -> int:
        return _mapped_rank(comm, math.prod(each_integer(dims)))

    @property
    def _grid(self) -> Cartesian:
        self._need()
        return self._context.topology  # type: ignore[no-any-return]

    def Get_dim(self) -> int:
        return len(self._grid.dims)

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        return self.dims, self.periods, self.coords

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        return self._grid.rank(coords)

    def Get_coords(self, rank: int) -> list[int]:
        return self._grid.coords(rank)

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        return self._grid.shift(self._me, direction, disp)

    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        """Return the grid of the remaining dimensions through this rank."""
        grid = self._grid
        if len(remain_dims) != len(grid.dims):
            raise CallError(ERR_DIMS, f"{len(remain_dims)} flags for a grid of {len(grid.dims)} dimensions")
        coords = grid.coords(self._me)
        kept = [place for place, keep in enumerate(each_integer(remain_dims)) if keep]
        color = [place for where, place in enumerate(coords) if where not in kept]
        # The old rank is the key: row-major order of the kept dimensions equals the order of the old ranks.
        flat = self._split("Sub", tuple(color), self._me)
        shape = Cartesian(tuple(grid.dims[p] for p in kept), tuple(grid.periods[p] for p in kept))

        return with_topology(Cartcomm, flat, shape)

    dim = property(Get_dim)
    ndim = property(Get_dim)

    @property
    def dims(self) -> list[int]:
        return list(self._grid.dims)

    @property
    def periods(self) -> list[int]:
        return [int(period) for period in self._grid.periods]

    @property
    def coords(self) -> list[int]:
        return self._grid.coords(self._me)

    topo = property(Get_topo)


class Graphcomm(Topocomm):
    """A graph of ranks that every rank knows completely."""

    __slots__ = ()
    _shapes = (Graph,)

    @classmethod
    def _create(cls, comm: Intracomm, index: Sequence[int], edges: Sequence[int]) -> Any:
        """Return a graph of the first ranks; the remaining ranks get COMM_NULL."""
        ends, edges = _index_ends(index, edges), each_integer(edges)
        shape = Graph(ends, tuple(edges))
        if shape.index and shape.index[-1] > len(shape.edges):
            raise CallError(
                ERR_ARG, f"Create_graph: {len(shape.edges)} edges, but the index ends at {shape.index[-1]}"
            )
        return _first_ranks(comm, cls, shape, "Create_graph")

    @classmethod
    def _map(cls, comm: Intracomm, index: Sequence[int], edges: Sequence[int]) -> int:
        return _mapped_rank(comm, len(_index_ends(index, edges)))

    @property
    def _graph(self) -> Graph:
        self._need()
        return self._context.topology  # type: ignore[no-any-return]

    def Get_dims(self) -> tuple[int, int]:
        return len(self._graph.index), len(self._graph.edges)

    def Get_topo(self) -> tuple[list[int], list[int]]:
        return list(self._graph.index), list(self._graph.edges)

    def Get_neighbors_count(self, rank: int) -> int:
        return len(self._graph.sources(rank))

    def Get_neighbors(self, rank: int) -> list[int]:
        return self._graph.sources(rank)

    dims = property(Get_dims)

    @property
    def nnodes(self) -> int:
        return self.Get_dims()[0]

    @property
    def nedges(self) -> int:
        return self.Get_dims()[1]

    topo = property(Get_topo)

    @property
    def index(self) -> list[int]:
        """End of each node's neighbours in `edges`."""
        return list(self._graph.index)

    @property
    def edges(self) -> list[int]:
        return list(self._graph.edges)

    @property
    def nneighbors(self) -> int:
        return len(self.neighbors)

    @property
    def neighbors(self) -> list[int]:
        return self._graph.sources(self._me)


class Distgraphcomm(Topocomm):
    """A directed graph of which each rank knows its own part."""

    __slots__ = ()
    _shapes = (DistGraph,)

    @classmethod
    def _create_adjacent(
        cls, comm: Intracomm, sources: Sequence[int], destinations: Sequence[int],
        weights: tuple[Sequence[int] | None, Sequence[int] | None],
    ) -> Any:  # fmt: skip
        """Return a graph for which each rank gives its own edges."""
        edges = each_integer(sources or ()), each_integer(destinations or ())
        given = _weights(weights[0]), _weights(weights[1])
        for ends, weighed in zip(edges, given, strict=True):
            if weighed is not None and len(weighed) != len(ends):
                raise ParameterError(
                    f"Create_dist_graph_adjacent: {len(weighed)} weights for {len(ends)} neighbours"
                )
        part = (edges[0], given[0], edges[1], given[1])

        def make(parts: list[Any]) -> Context:
            incoming = {rank: (each[0], each[1]) for rank, each in enumerate(parts)}
            outgoing = {rank: (each[2], each[3]) for rank, each in enumerate(parts)}
            return comm._context.derive(*comm._context.groups, topology=DistGraph(incoming, outgoing))

        return comm._entered(comm._agree("Create_dist_graph_adjacent", part, make), cls)

    @classmethod
    def _create(
        cls,
        comm: Intracomm,
        listed: tuple[Sequence[int], Sequence[int], Sequence[int]],
        weights: Sequence[int] | None,
    ) -> Any:
        """Return a graph for which each rank gives arbitrary edges, as (sources, degrees, destinations).

        `degrees[i]` edges leave `sources[i]`; their ends follow each other in the destinations.
        """
        given = _weights(weights)
        sources, degrees, destinations = map(each_integer, listed)
        ends = iter(zip(destinations, given or [0] * len(destinations), strict=True))
        edges = [
            (source, *next(ends))
            for source, degree in zip(sources, degrees, strict=True)
            for _ in range(degree)
        ]

        def make(parts: list[Any]) -> Context:
            # MPI: weights are given by all ranks or by no rank; a mixture is undefined, and counts as unweighted.
            weighted = all(flag for _, flag in parts)
            incoming: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
            outgoing: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
            for source, dest, weight in (edge for own, _ in parts for edge in own):
                incoming[dest].append((source, weight))
                outgoing[source].append((dest, weight))
            size = len(parts)
            graph = DistGraph(_by_rank(incoming, size, weighted), _by_rank(outgoing, size, weighted))
            return comm._context.derive(*comm._context.groups, topology=graph)

        return comm._entered(comm._agree("Create_dist_graph", (edges, given is not None), make), cls)

    def Get_dist_neighbors_count(self) -> tuple[int, int, bool]:
        self._need()
        (sources, weights), (destinations, _) = self._sides()
        return len(sources), len(destinations), weights is not None

    def Get_dist_neighbors(self) -> tuple[list[int], list[int], tuple[list[int], list[int]] | None]:
        self._need()
        (sources, inweights), (destinations, outweights) = self._sides()
        weights = None if inweights is None or outweights is None else (list(inweights), list(outweights))
        return list(sources), list(destinations), weights

    def _sides(self) -> tuple[Any, Any]:
        graph: DistGraph = self._context.topology
        return graph.incoming[self._me], graph.outgoing[self._me]


def _first_ranks(comm: Intracomm, kind: Any, shape: Any, name: str) -> Any:
    if shape.size > comm.Get_size():
        raise CallError(ERR_ARG, f"{name}: {shape.size} places for {comm.Get_size()} ranks")
    flat = comm._split(name, 0 if comm._me < shape.size else UNDEFINED, comm._me)
    return with_topology(kind, flat, shape)


def with_topology(kind: Any, comm: Any, shape: Any) -> Any:
    """Return a communicator as one with a topology; all its members pass the same shape."""
    if comm is COMM_NULL:
        return COMM_NULL
    comm._context.topology = shape
    return comm._entered(comm._context, kind)


# -- helpers ----------------------------------------------------------------------------------------------


def _by_rank(edges: dict[int, list[tuple[int, int]]], size: int, weighted: bool) -> dict[int, Any]:
    return {
        rank: (
            [other for other, _ in edges.get(rank, ())],
            [w for _, w in edges.get(rank, ())] if weighted else None,
        )
        # All ranks, including ranks without edges: a look-up must not fail for an isolated rank.
        for rank in range(size)
    }


def _weights(weights: Any) -> list[int] | None:
    """Return weights as a list; None for None or UNWEIGHTED. WEIGHTS_EMPTY: the list of a rank without edges."""
    if weights is None or isinstance(weights, int):
        # WEIGHTS_EMPTY differs from UNWEIGHTED: a rank without edges in a weighted graph must pass it, or the graph
        # counts as unweighted.
        return [] if weights == WEIGHTS_EMPTY else None
    return each_integer(weights)


def _index_ends(index: Sequence[int], edges: Sequence[int]) -> tuple[int, ...]:
    """Return the end of each node's edges; like mpi4py, also accepts an index array that begins with 0."""
    ends = tuple(each_integer(index))
    return ends[1:] if len(ends) > 1 and ends[0] == 0 and ends[-1] == len(edges) else ends


def _mapped_rank(comm: Intracomm, size: int) -> int:
    if size > comm.Get_size():
        raise CallError(ERR_DIMS, f"{size} places for {comm.Get_size()} ranks")
    # No reordering: ranks keep their places, so that real and virtual runs of a program agree.
    return comm._me if comm._me < size else UNDEFINED


KINDS.update(Cartcomm=Cartcomm, Graphcomm=Graphcomm, Distgraphcomm=Distgraphcomm)
