"""Noise: a factor drawn anew for each compute block of each rank.

Continuous noise has **mean 1**: the stated duration stays the mean, so that two kinds of noise differ in spread
and not in work. `Bimodal` is an event on top of the stated duration, and so lengthens the mean to 1 + p (s - 1).

This room knows distributions. It must not know what the durations are of, nor any clock.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from spawnsim.virtual.compute.straggler import FloatArray, Straggler, StreamKey, Stretch, number, probability

SMALLEST_BLOCK, LARGEST_BLOCK = 16, 256


class Noise(Straggler):
    """Noise of one distribution. Equal keys give equal factors, however many are drawn at a time."""

    @abstractmethod
    def draw(self, stream: np.random.Generator, count: int) -> FloatArray:
        """Return the next `count` factors of a stream: float64, shape (count,), positive."""

    @property
    def mean(self) -> float:
        """Mean factor: 1, the stated duration is the mean."""
        return 1.0

    def open(self, key: StreamKey) -> Stretch:
        """Return the stretch of one rank."""
        factors = chain.from_iterable(self._blocks(key.generator()))
        return lambda duration_s, _now_s: duration_s * next(factors)

    def _blocks(self, stream: np.random.Generator) -> Iterator[list[float]]:
        """Yield blocks of factors: short ones first, so that a short run of many ranks draws little."""
        count = SMALLEST_BLOCK
        while True:
            yield self.draw(stream, count).tolist()
            count = min(2 * count, LARGEST_BLOCK)


@dataclass(frozen=True)
class Lognormal(Noise):
    """exp(N(-sigma²/2, sigma²)): mean 1, median exp(-sigma²/2).

    FedScale and FLGo give clients this form (with median 1 there). Expected worst of P by integration; the
    textbook sqrt(2 ln P) form overshoots by a third at P = 64.
    """

    sigma: float

    def __post_init__(self) -> None:
        number("sigma", self.sigma, above=0.0)

    def draw(self, stream: np.random.Generator, count: int) -> FloatArray:
        return stream.lognormal(-0.5 * self.sigma**2, self.sigma, count)

    def __str__(self) -> str:
        return f"lognormal:{self.sigma:g}"


@dataclass(frozen=True)
class Exponential(Noise):
    """Shifted exponential: (1 - share) + share · Exp(1), where `share` of the mean time is random.

    Expected worst of P: 1 - share + share · H_P (Lee et al., arXiv:1512.02673, with D and mu so that the mean is 1).
    """

    share: float

    def __post_init__(self) -> None:
        number("share", self.share, above=0.0, below=1.0 + 1e-12)

    def draw(self, stream: np.random.Generator, count: int) -> FloatArray:
        return (1.0 - self.share) + self.share * stream.standard_exponential(count)

    def __str__(self) -> str:
        return f"exponential:{self.share:g}"


@dataclass(frozen=True)
class Pareto(Noise):
    """x_m U^(-1/tail) with x_m = (tail - 1) / tail, so that the mean is 1; the variance is infinite for tail <= 2.

    Expected worst of P: x_m Γ(1 - 1/tail) Γ(P + 1) / Γ(P + 1 - 1/tail) (Wang, Joshi, Wornell, arXiv:1404.1328).
    """

    tail: float

    def __post_init__(self) -> None:
        number("tail", self.tail, above=1.0)

    @property
    def least(self) -> float:
        """The smallest factor, x_m."""
        return (self.tail - 1.0) / self.tail

    def draw(self, stream: np.random.Generator, count: int) -> FloatArray:
        return self.least * (1.0 + stream.pareto(self.tail, count))

    def __str__(self) -> str:
        return f"pareto:{self.tail:g}"


@dataclass(frozen=True)
class Gamma(Noise):
    """Gamma with mean 1 and coefficient of variation `variation`.

    With variation 1/sqrt(k) it is the mean of k exponential steps (Erlang): k local steps between averages, as in
    Wang and Joshi, AdaComm.
    """

    variation: float

    def __post_init__(self) -> None:
        number("variation", self.variation, above=0.0)

    def draw(self, stream: np.random.Generator, count: int) -> FloatArray:
        shape = self.variation**-2
        return stream.standard_gamma(shape, count) / shape

    def __str__(self) -> str:
        return f"gamma:{self.variation:g}"


@dataclass(frozen=True)
class Bimodal(Noise):
    """Transient stragglers: each block is `slowdown` times longer with probability `share`.

    Some rank of P is hit in a step with probability 1 - (1 - share)^P ("Attack of the Clones" saw 8 times slower).
    """

    share: float
    slowdown: float

    def __post_init__(self) -> None:
        probability("share", self.share)
        number("slowdown", self.slowdown, above=0.0)

    @property
    def mean(self) -> float:
        """Mean factor: 1 + share · (slowdown - 1)."""
        return 1.0 + self.share * (self.slowdown - 1.0)

    def draw(self, stream: np.random.Generator, count: int) -> FloatArray:
        return np.where(stream.random(count) < self.share, self.slowdown, 1.0)

    def __str__(self) -> str:
        return f"bimodal:{self.share:g},{self.slowdown:g}"
