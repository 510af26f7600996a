"""The shapes that a communicator may carry: Cartesian grid, graph, distributed graph. Pure arithmetic on ranks.

This room knows who is whose neighbour. It must not know communicators or messages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

from spawnsim.comm.constants import PROC_NULL
from spawnsim.comm.failures import ERR_ARG, ERR_DIMS, ERR_RANK, CallError
from spawnsim.comm.integers import each_integer, integer


@dataclass(frozen=True)
class Cartesian:
    """A grid of `dims`, the last dimension running fastest; a dimension may close into a ring."""

    dims: tuple[int, ...]
    periods: tuple[bool, ...]

    @property
    def size(self) -> int:
        """Number of places."""
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
        """Return the rank at coordinates; beyond an open edge there is none."""
        if len(coords) != len(self.dims):
            raise CallError(ERR_ARG, f"{len(coords)} coordinates for a grid of {len(self.dims)} dimensions")
        rank = 0
        for place, dim, period in zip(each_integer(coords), self.dims, self.periods, strict=True):
            if not period and not 0 <= place < dim:
                raise CallError(ERR_ARG, f"coordinate {place} is outside an open dimension of {dim}")
            rank = rank * dim + place % dim
        return rank

    def shift(self, rank: int, direction: int, disp: int) -> tuple[int, int]:
        """Return (source, dest) for a shift along a dimension; PROC_NULL beyond an open edge."""
        direction, disp = integer(direction), integer(disp)
        if not 0 <= direction < len(self.dims):
            raise CallError(ERR_DIMS, f"direction {direction} of a grid of {len(self.dims)} dimensions")
        return self._step(rank, direction, -disp), self._step(rank, direction, disp)

    def _step(self, rank: int, direction: int, disp: int) -> int:
        coords = self.coords(rank)
        coords[direction] += disp
        if not self.periods[direction] and not 0 <= coords[direction] < self.dims[direction]:
            return PROC_NULL
        return self.rank(coords)

    def sources(self, rank: int) -> list[int]:
        """Return the neighbours, dimension by dimension: below, above."""
        return [place for direction in range(len(self.dims)) for place in self.shift(rank, direction, 1)]

    destinations = sources


@dataclass(frozen=True)
class Graph:
    """MPI's graph: `index[i]` neighbours are listed in `edges` up to and including rank i's."""

    index: tuple[int, ...]
    edges: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.index)

    def sources(self, rank: int) -> list[int]:
        """Return the neighbours of a rank."""
        rank = integer(rank)
        if not 0 <= rank < self.size:
            raise CallError(ERR_RANK, f"rank {rank} is not in a graph of {self.size} nodes")
        return list(self.edges[self.index[rank - 1] if rank else 0 : self.index[rank]])

    destinations = sources


@dataclass(frozen=True)
class DistGraph:
    """A directed graph that each rank knows its own part of: by rank, (neighbours, weights or None)."""

    incoming: dict[int, tuple[list[int], list[int] | None]]
    outgoing: dict[int, tuple[list[int], list[int] | None]]

    def sources(self, rank: int) -> list[int]:
        """Return from whom a rank receives."""
        return self.incoming[rank][0]

    def destinations(self, rank: int) -> list[int]:
        """Return to whom a rank sends."""
        return self.outgoing[rank][0]


def compute_dims(nnodes: int, dims: int | Sequence[int]) -> list[int]:
    """Return dimensions as equal as they can be, whose product is `nnodes`; entries above 0 stay as they are.

    As MPI_Dims_create: those set freely come in descending order.
    """
    nnodes, wanted = integer(nnodes), [0] * index(dims) if hasattr(dims, "__index__") else each_integer(dims)
    if any(dim < 0 for dim in wanted) or nnodes < 1:
        raise CallError(ERR_DIMS, f"Compute_dims({nnodes}, {wanted}): give positive numbers")
    fixed = math.prod(dim for dim in wanted if dim > 0)
    free = [place for place, dim in enumerate(wanted) if dim == 0]
    if nnodes % fixed or (not free and fixed != nnodes):
        raise CallError(ERR_DIMS, f"Compute_dims: {nnodes} nodes do not divide into {wanted}")
    for place, dim in zip(free, _balanced(nnodes // fixed, len(free)), strict=True):
        wanted[place] = dim
    return wanted


def _balanced(count: int, parts: int) -> list[int]:
    """Return `parts` factors of `count`, descending, the largest as small as possible, and so on."""
    if parts <= 1:
        return [count] * parts
    root = count ** (1 / parts)
    first = next(d for d in range(max(1, math.ceil(root - 1e-9)), count + 1) if count % d == 0)
    return [first, *_balanced(count // first, parts - 1)]
