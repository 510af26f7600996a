"""Groups that need no protocol: who averages with whom is a function of rank, size and round.

Pure and frozen; each rule partitions the ranks in every round, the same on every rank. A rule is any object with
`members(rank, size, round)`, which returns the sorted ranks of the group, the own one included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.random import generator


class Matchmaking(Protocol):
    """Says who averages with whom in a round."""

    def members(self, rank: int, size: int, round_: int) -> tuple[int, ...]:
        """Return the sorted ranks of this rank's group, itself included."""


def _check_group_size(size: int) -> None:
    if int(size) != size or size < 2:
        raise ParameterError(f"group size {size!r}: give a whole number of at least 2")


@dataclass(frozen=True, slots=True)
class Everyone:
    """All ranks, in every round."""

    def members(self, rank: int, size: int, round_: int) -> tuple[int, ...]:
        return tuple(range(size))


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranks are coordinates; round t averages along axis t mod d. N = M₁·…·M_d ranks agree exactly after d rounds.

    `shape` names the sides; None takes the most nearly square pair. Where the ranks do not fill the grid, its last
    lines are short.
    """

    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.shape is not None and (not self.shape or min(self.shape) < 1):
            raise ParameterError(f"shape={self.shape!r}: give at least one side, each of at least 1")

    def sides(self, size: int) -> tuple[int, ...]:
        """Return the sides for so many ranks."""
        if self.shape is None:
            side = math.isqrt(size - 1) + 1 if size > 1 else 1
            return (-(-size // side), side)
        if math.prod(self.shape) < size:
            raise ParameterError(
                f"a grid of {self.shape} has {math.prod(self.shape)} places for {size} ranks"
            )
        return self.shape

    def members(self, rank: int, size: int, round_: int) -> tuple[int, ...]:
        sides = self.sides(size)
        axis = len(sides) - 1 - round_ % len(sides)
        stride = math.prod(sides[axis + 1 :])
        first = rank - (rank // stride % sides[axis]) * stride
        line = range(first, first + stride * sides[axis], stride)
        return tuple(member for member in line if member < size)


@dataclass(frozen=True, slots=True)
class RandomGroups:
    """Fresh random groups of `size` in each round; the ranks left over form a smaller one.

    Variance contracts by (N/M − 1)/(N − 1) a round in expectation.
    """

    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check_group_size(self.size)

    def members(self, rank: int, size: int, round_: int) -> tuple[int, ...]:
        order = generator(self.seed, -1, f"groups.{round_}.{size}").permutation(size)
        place = int(np.flatnonzero(order == rank)[0]) // self.size * self.size
        return tuple(sorted(int(member) for member in order[place : place + self.size]))


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs by distance: round t pairs the ranks of the lower half with those of the upper, shifted by t.

    With an odd number of ranks another one sits out each round.
    """

    def members(self, rank: int, size: int, round_: int) -> tuple[int, ...]:
        skipped = round_ % size if size % 2 else None
        if rank == skipped or size < 2:
            return (rank,)
        half = size // 2
        place = rank - (skipped is not None and rank > skipped)
        other = (place + round_) % half + half if place < half else (place - half - round_) % half
        peer = other + (skipped is not None and other >= skipped)
        return tuple(sorted((rank, peer)))


@dataclass(frozen=True, slots=True)
class Exponential:
    """Round t pairs ranks whose numbers differ in bit t mod k. N = 2ᵏ ranks agree exactly after k rounds.

    Ranks without a partner (N no power of two) sit out.
    """

    def members(self, rank: int, size: int, round_: int) -> tuple[int, ...]:
        bits = max((size - 1).bit_length(), 1)
        peer = rank ^ (1 << round_ % bits)
        return tuple(sorted((rank, peer))) if peer < size else (rank,)
