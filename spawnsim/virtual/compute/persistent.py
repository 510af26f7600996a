"""Persistent differences: a factor that a rank keeps for the whole run.

This room knows ranks by number and streams by key. Adding ranks changes no rank's factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from spawnsim.errors import ParameterError
from spawnsim.virtual.compute.straggler import Straggler, StreamKey, Stretch, number, probability


def _times(factor: float) -> Stretch:
    return lambda duration_s, _now_s: duration_s * factor


@dataclass(frozen=True)
class Constant(Straggler):
    """All blocks of all ranks are `factor` times as long."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        number("factor", self.factor, above=0.0)

    @property
    def mean(self) -> float:
        """Mean factor: the factor."""
        return self.factor

    def open(self, key: StreamKey) -> Stretch:
        """Return the stretch of one rank."""
        return _times(self.factor)

    def __str__(self) -> str:
        return "constant" if self.factor == 1.0 else f"constant:{self.factor:g}"


@dataclass(frozen=True)
class Speed(Straggler):
    """Unequal machines: a lognormal factor over ranks with mean 1 and shape `sigma`, the same for all blocks."""

    sigma: float

    def __post_init__(self) -> None:
        number("sigma", self.sigma, above=0.0)

    @property
    def mean(self) -> float:
        """Mean factor over ranks: 1."""
        return 1.0

    def open(self, key: StreamKey) -> Stretch:
        """Return the stretch of one rank."""
        return _times(float(key.generator().lognormal(-0.5 * self.sigma**2, self.sigma)))

    def __str__(self) -> str:
        return f"speed:{self.sigma:g}"


@dataclass(frozen=True)
class Slow(Straggler):
    """Persistent stragglers: a `share` of the ranks is `slowdown` times slower, always.

    Ranks are taken in strata of 1/share neighbours, one slow rank at a random place in each. So P ranks hold P · share
    slow ones (give or take one), not a binomial number of them, and which they are does not depend on P.
    """

    share: float
    slowdown: float

    def __post_init__(self) -> None:
        probability("share", self.share)
        number("slowdown", self.slowdown, above=0.0)

    @property
    def mean(self) -> float:
        """Mean factor over ranks: 1 + share · (slowdown - 1)."""
        return 1.0 + self.share * (self.slowdown - 1.0)

    def open(self, key: StreamKey) -> Stretch:
        """Return the stretch of one rank."""
        return _times(self.slowdown if self._chosen(key) else 1.0)

    def _chosen(self, key: StreamKey) -> bool:
        if self.share < 1e-6:
            return False
        share = Fraction(self.share).limit_denominator(
            1_000_000
        )  # exact: floats misplace ranks at stratum edges
        stratum = math.floor(key.rank * share)
        first, end = (math.ceil(edge / share) for edge in (stratum, stratum + 1))
        return first + math.floor(key.world(str(stratum)).random() * (end - first)) == key.rank

    def __str__(self) -> str:
        return f"slow:{self.share:g},{self.slowdown:g}"


@dataclass(frozen=True)
class SlowRank(Straggler):
    """One given rank is `slowdown` times slower, always."""

    rank: int
    slowdown: float

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ParameterError(f"rank={self.rank}: give a rank of at least 0")
        number("slowdown", self.slowdown, above=0.0)

    @property
    def mean(self) -> float:
        """Mean factor over very many ranks: 1."""
        return 1.0

    def open(self, key: StreamKey) -> Stretch:
        """Return the stretch of one rank."""
        return _times(self.slowdown if key.rank == self.rank else 1.0)

    def __str__(self) -> str:
        return f"rank:{self.rank},{self.slowdown:g}"
