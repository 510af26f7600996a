"""Making communicators with a shape: what `Create_cart`, `Create_graph` and their kin do.

This room knows how members agree on a shape. The calls of a shaped communicator are in `topologies`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from spawnsim.comm.constants import CART, DIST_GRAPH, GRAPH, UNDEFINED, WEIGHTS_EMPTY
from spawnsim.comm.failures import ERR_ARG, ERR_DIMS, CallError
from spawnsim.comm.integers import each_integer
from spawnsim.errors import ParameterError
from spawnsim.virtual.comm.communicators import COMM_NULL, Intracomm
from spawnsim.virtual.comm.context import Context
from spawnsim.virtual.comm.grids import Cartesian, DistGraph, Graph
from spawnsim.virtual.comm.topologies import Cartcomm, Distgraphcomm, Graphcomm


def shaped(kind: Any, comm: Any, shape: Any) -> Any:
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
    sizes = tuple(each_integer([dims] if isinstance(dims, int) else dims))
    rings = [bool(periods)] * len(sizes) if periods is None or isinstance(periods, (bool, int)) else periods
    shape = Cartesian(sizes, tuple(map(bool, each_integer(rings))))
    if len(shape.periods) != len(sizes):
        raise ParameterError(
            f"Create_cart({list(sizes)}, {list(rings)}): one flag for each of {len(sizes)} lengths"
        )
    if any(dim < 1 for dim in sizes):
        raise CallError(ERR_DIMS, f"Create_cart({list(sizes)}): lengths must be positive")
    return _first_ranks(self, Cartcomm, shape, "Create_cart")


def create_graph(self: Intracomm, index: Sequence[int], edges: Sequence[int], reorder: bool = False) -> Any:
    """Return a graph of the first ranks; those left over get COMM_NULL."""
    ends, edges = ends_of(index, edges), each_integer(edges)
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
    return shaped(kind, flat, shape)


def create_dist_graph_adjacent(
    self: Intracomm, sources: Sequence[int], destinations: Sequence[int],
    weights: tuple[Sequence[int] | None, Sequence[int] | None],
) -> Distgraphcomm:  # fmt: skip
    """Return a graph of which each rank tells its own edges."""
    edges = each_integer(sources or ()), each_integer(destinations or ())
    part = (edges[0], _weights(weights[0]), edges[1], _weights(weights[1]))

    def make(parts: list[Any]) -> Context:
        incoming = {rank: (each[0], each[1]) for rank, each in enumerate(parts)}
        outgoing = {rank: (each[2], each[3]) for rank, each in enumerate(parts)}
        return self._context.derive(*self._context.sides, topology=DistGraph(incoming, outgoing))

    return self_enter(self, self._agree("Create_dist_graph_adjacent", part, make))


def create_dist_graph(
    self: Intracomm, sources: Sequence[int], degrees: Sequence[int], destinations: Sequence[int],
    *, weights: Sequence[int] | None = None,
) -> Distgraphcomm:  # fmt: skip
    """Return a graph of which each rank tells any edges: `degrees[i]` of them leave `sources[i]`."""
    given = _weights(weights)
    sources, degrees, destinations = each_integer(sources), each_integer(degrees), each_integer(destinations)
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
        return self._context.derive(*self._context.sides, topology=graph)

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
    """Return weights as a list; None, or MPI's UNWEIGHTED, is none. WEIGHTS_EMPTY are those of no edges."""
    if weights is None or isinstance(weights, int):
        return [] if weights == WEIGHTS_EMPTY else None
    return each_integer(weights)


def ends_of(index: Sequence[int], edges: Sequence[int]) -> tuple[int, ...]:
    """Return where each place's edges end; mpi4py takes an adjacency array, which begins with 0, too."""
    ends = tuple(each_integer(index))
    return ends[1:] if len(ends) > 1 and ends[0] == 0 and ends[-1] == len(edges) else ends


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
    size = Cartesian(tuple(each_integer(dims)), (False,) * len(dims)).size
    if size > comm.Get_size():
        raise CallError(ERR_DIMS, f"{size} places for {comm.Get_size()} ranks")
    return int(comm._me) if comm._me < size else UNDEFINED
