"""Stragglers: causes that stretch the durations of a rank's compute blocks.

* Noise: a factor drawn anew for each block of each rank. Continuous noise has **mean 1**: the stated duration stays
  the mean, so two kinds of noise differ in spread and not in work. `Bimodal` adds events to the stated duration, and
  so increases the mean to 1 + p (s - 1).
* Persistent differences: a factor that a rank keeps for the whole run. Adding ranks changes no rank's factor.
* Slow episodes: a rank alternates between fast and slow, according to its clock.

A straggler is opened once per rank and then is a plain function of duration and clock; it draws from streams
named by (seed, rank, purpose).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, count
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from spawnsim import random
from spawnsim.errors import ParameterError

FloatArray = NDArray[np.float64]

Stretch = Callable[[float, float], float]
"""`stretch(duration_s, now_s) -> duration_s`: the time of a block that starts at `now_s` on the rank's clock."""


@dataclass(frozen=True)
class StreamKey:
    """Names one random stream: the seed of the run, the rank, and the purpose of the draws."""

    seed: int
    rank: int
    purpose: str

    def generator(self) -> np.random.Generator:
        return random.generator(self.seed, self.rank, self.purpose)

    def world(self, part: str) -> np.random.Generator:
        """Return a fresh generator that all ranks share, for decisions among several ranks."""
        return random.generator(self.seed, -1, f"{self.purpose}.{part}")


class Straggler(ABC):
    """One cause of uneven compute times. Causes multiply; causes that follow the clock are applied last.

    The text form (`str(straggler)`) is what `parse_stragglers` reads.
    """

    follows_clock: ClassVar[bool] = False
    """Whether the stretch depends on when the block starts, and so must be applied to the final duration."""

    @abstractmethod
    def open(self, key: StreamKey) -> Stretch:
        """Return the stretch of one rank, at the start of its stream."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """Mean factor on the duration of a block, over blocks and ranks."""


def number(what: str, value: float, *, above: float = -math.inf, below: float = math.inf) -> None:
    """Raise ParameterError unless `value` is a finite number in the open interval (above, below)."""
    if not (math.isfinite(value) and above < value < below):
        bounds = [f"above {above:g}"] * (above > -math.inf) + [f"below {below:g}"] * (below < math.inf)
        raise ParameterError(f"{what}={value}: give a finite number {' and '.join(bounds)}".rstrip())


def probability(what: str, value: float) -> None:
    """Raise ParameterError unless `value` lies in [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ParameterError(f"{what}={value}: give a probability from 0 to 1")


# Factors drawn at a time: few at first, for a thousand ranks that compute little; many later, since a call to numpy
# costs more than the factors that it draws.
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 256


class Noise(Straggler):
    """Noise of one distribution. Equal keys give equal factors, regardless of the number drawn at a time."""

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

    FedScale and FLGo give clients this form (with median 1 there). The expected worst of P is integrated; the
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
        return _times(float(key.generator().lognormal(-0.5 * self.sigma**2, self.sigma)))

    def __str__(self) -> str:
        return f"speed:{self.sigma:g}"


@dataclass(frozen=True)
class Slow(Straggler):
    """Persistent stragglers: a `share` of the ranks is `slowdown` times slower, always.

    Ranks form strata of 1/share neighbours, with one slow rank at a random place in each. So P ranks contain P · share
    slow ones (give or take one), not a binomial number, and the choice does not depend on P.
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
        return _times(self.slowdown if self._chosen(key) else 1.0)

    def _chosen(self, key: StreamKey) -> bool:
        if self.share < 1e-6:
            return False
        # Exact: rank * 0.1 and its inverse, rounded, put a rank at the edge of two strata into both or into neither
        # stratum.
        share = Fraction(self.share).limit_denominator(1_000_000)
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
        """Mean factor in the limit of many ranks: 1."""
        return 1.0

    def open(self, key: StreamKey) -> Stretch:
        return _times(self.slowdown if key.rank == self.rank else 1.0)

    def __str__(self) -> str:
        return f"rank:{self.rank},{self.slowdown:g}"


@dataclass(frozen=True)
class Markov(Straggler):
    """On/off slow episodes of exponential lengths: `fast_s` and `slow_s` seconds on average.

    Within an episode work takes `slowdown` times longer; a block that outlasts an episode continues at the next
    speed. A rank starts in the stationary state. (FALCON, arXiv:2410.12588, saw such fail-slow episodes last from
    tens of seconds to hours.)
    """

    fast_s: float
    slow_s: float
    slowdown: float

    follows_clock: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number("fast_s", self.fast_s, above=0.0)
        number("slow_s", self.slow_s, above=0.0)
        number("slowdown", self.slowdown, above=0.0)

    @property
    def mean(self) -> float:
        """Mean factor in the long run: time over work done, (fast + slow) / (fast + slow / slowdown)."""
        return (self.fast_s + self.slow_s) / (self.fast_s + self.slow_s / self.slowdown)

    def open(self, key: StreamKey) -> Stretch:
        return Episodes(self, key.generator()).stretch

    def __str__(self) -> str:
        return f"markov:{self.fast_s:g}s,{self.slow_s:g}s,{self.slowdown:g}"


class Episodes:
    """The episodes of one rank, drawn in order on demand."""

    def __init__(self, model: Markov, stream: np.random.Generator) -> None:
        self.model, self.stream = model, stream
        share_slow = model.slow_s / (model.fast_s + model.slow_s)
        self.starts_slow = bool(stream.random() < share_slow)
        self.ends_s: list[float] = []

    def slow(self, episode: int) -> bool:
        return self.starts_slow ^ bool(episode % 2)

    def end_s(self, episode: int) -> float:
        """Return when the episode ends."""
        while len(self.ends_s) <= episode:
            mean_s = self.model.slow_s if self.slow(len(self.ends_s)) else self.model.fast_s
            start_s = self.ends_s[-1] if self.ends_s else 0.0
            self.ends_s.append(start_s + mean_s * float(self.stream.standard_exponential()))
        return self.ends_s[episode]

    def at(self, now_s: float) -> int:
        """Return the number of the episode that holds `now_s`."""
        while not self.ends_s or self.ends_s[-1] <= now_s:
            self.end_s(len(self.ends_s))
        return bisect_right(self.ends_s, now_s)

    def stretch(self, duration_s: float, now_s: float) -> float:
        """Return the duration of work of `duration_s` that starts at `now_s`."""
        at_s, work_s = now_s, duration_s
        for episode in count(self.at(now_s)):
            factor = self.model.slowdown if self.slow(episode) else 1.0
            end_s = self.end_s(episode)
            if at_s + work_s * factor <= end_s:
                # The common case, a block inside one episode, must not gain rounding errors from now_s.
                return duration_s * factor if at_s == now_s else at_s + work_s * factor - now_s
            work_s -= (end_s - at_s) / factor
            at_s = end_s
        raise AssertionError("unreachable")
