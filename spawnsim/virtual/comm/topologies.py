"""Communicators with neighbours: `Cartcomm`, `Graphcomm`, `Distgraphcomm`, and their making.

This room knows MPI's topology calls. Who is whose neighbour is told in `grids`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spawnsim.comm.failures import ERR_DIMS, CallError
from spawnsim.comm.integers import each_integer
from spawnsim.virtual.comm.communicators import Intracomm
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
        kept = [place for place, keep in enumerate(each_integer(remain_dims)) if keep]
        color = [place for where, place in enumerate(coords) if where not in kept]
        flat = self._split("Sub", tuple(color), self._me)
        shape = Cartesian(tuple(grid.dims[p] for p in kept), tuple(grid.periods[p] for p in kept))
        from spawnsim.virtual.comm.shaping import shaped

        return shaped(Cartcomm, flat, shape)

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
