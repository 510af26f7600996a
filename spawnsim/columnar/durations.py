"""Compute times of all ranks as columns: the durations of one block of every rank at a time.

There are two ways to draw them. `"ranks"`: each rank's own streams, with the draws of an ordinary run to the bit; a
rank takes 9 µs for 100 blocks, and all factors are stored in advance, 8 bytes per rank and block. `"bulk"`: one stream
for all ranks, with the same distributions, 25 ns per block and no storage; the draws of the two modes differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Literal, get_args

import numpy as np

from spawnsim import random
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.models.compute import (
    ComputeModel,
    Constant,
    Fixed,
    Noise,
    Slow,
    SlowRank,
    Speed,
    Straggler,
    StreamKey,
)
from spawnsim.models.faults import FaultPlan
from spawnsim.models.network.cost import Floats

Streams = Literal["ranks", "bulk"]
STREAMS: tuple[str, ...] = get_args(Streams)
KEPT_B = 4e9  # maximum size of stored factors
SOME = 1024  # ranks whose factors are drawn before they are copied to columns

Stretch = Callable[[Floats, Floats], Floats]
"""`stretch(durations_s, begins_s) -> durations_s`, of one block of every rank."""


class Durations:
    """How long the next compute block of every rank takes.

    Args:
        model: durations of blocks, and the stragglers that stretch them.
        plan: fault plan; its pauses and slow-downs stretch blocks, too.
        ranks: number of ranks.
        blocks: maximum number of blocks.
        seed: seed of the run.
        streams: "ranks" or "bulk".

    Raises:
        ParameterError: too many factors would be stored.
        UnsupportedError: the model has no fixed duration, or a straggler has no form over columns.
    """

    def __init__(
        self, model: ComputeModel, plan: FaultPlan, ranks: int, *, blocks: int, seed: int, streams: Streams
    ) -> None:
        if not isinstance(model.base, Fixed):
            what = "states no duration" if model.base is None else "replays a trace"
            raise UnsupportedError(
                f'columnar: the compute model {what}: give a fixed one (compute="10 ms", --compute 10ms), or run the '
                "program itself on virtual ranks"
            )
        noises = sum(isinstance(straggler, Noise) for straggler, _ in model.causes())
        if streams == "ranks" and 8.0 * noises * ranks * blocks > KEPT_B:
            raise ParameterError(
                f"{ranks:,} ranks with their own streams keep {8e-9 * noises * ranks * blocks:,.0f} GB for "
                f'{blocks:,} blocks: draw for all of them at once (streams="bulk", --set streams=bulk)'
            )
        self._base = np.full(ranks, model.base.duration_s)
        self._plan, self._blocks, self._seed = plan, blocks, seed
        opened = self._own if streams == "ranks" else self._bulk
        self._stretches = [opened(straggler, purpose) for straggler, purpose in model.causes()]

    def ends(self, begins_s: Floats) -> Floats:
        """Return when the next block of each rank ends.

        Args:
            begins_s: the beginning of each block, float64 (ranks,), seconds.

        Returns:
            A new array of the same shape.
        """
        seconds = self._base
        for stretch in self._stretches:
            seconds = stretch(seconds, begins_s)
        ends_s: Floats = begins_s + seconds
        for rank in sorted(self._plan.disturbed):
            ends_s[rank] = self._plan.stretch(rank, float(begins_s[rank]), float(seconds[rank]))
        return ends_s

    # ---------------------------------------------------------------------------------------------- streams of ranks
    def _own(self, straggler: Straggler, purpose: str) -> Stretch:
        if isinstance(straggler, Slow):
            shared = StreamKey(self._seed, 0, purpose)
            return _times(_strata(straggler, len(self._base), lambda k: shared.world(str(k)).random()))
        if isinstance(straggler, Noise):
            return _next(self._own_factors(straggler, purpose))
        stretches = [straggler.open(StreamKey(self._seed, rank, purpose)) for rank in range(len(self._base))]
        if not straggler.follows_clock:
            # A straggler that does not follow the clock has one factor for the whole run.
            return _times(np.asarray([stretch(1.0, 0.0) for stretch in stretches]))

        def stretched(seconds: Floats, begins_s: Floats) -> Floats:
            pairs = zip(stretches, seconds.tolist(), begins_s.tolist(), strict=True)
            return np.asarray([stretch(duration_s, at_s) for stretch, duration_s, at_s in pairs])

        return stretched

    def _own_factors(self, noise: Noise, purpose: str) -> Iterator[Floats]:
        # One call draws all factors of a rank: the number of factors per call does not change them, and a generator
        # that is used once need not be stored.
        ranks = len(self._base)
        factors, some = np.empty((self._blocks, ranks)), np.empty((SOME, self._blocks))
        streams = random.generators(self._seed, ranks, purpose)
        for first in range(0, ranks, SOME):
            end = min(first + SOME, ranks)
            for row in range(end - first):
                some[row] = noise.draw(next(streams), self._blocks)
            # Written rank by rank, each factor would touch a different page.
            factors[:, first:end] = some[: end - first].T
        return iter(factors)

    # -------------------------------------------------------------------------------------------------- bulk streams
    def _bulk(self, straggler: Straggler, purpose: str) -> Stretch:
        ranks, stream = len(self._base), random.generator(self._seed, random.WORLD, f"columnar.{purpose}")
        if isinstance(straggler, Noise):
            return _next(straggler.draw(stream, ranks) for _ in range(self._blocks))
        if isinstance(straggler, Constant):
            return _times(np.full(ranks, straggler.factor))
        if isinstance(straggler, Speed):
            return _times(stream.lognormal(-0.5 * straggler.sigma**2, straggler.sigma, ranks))
        if isinstance(straggler, SlowRank):
            factors = np.ones(ranks)
            factors[straggler.rank : straggler.rank + 1] = straggler.slowdown
            return _times(factors)
        if isinstance(straggler, Slow):
            return _times(_strata(straggler, ranks, lambda _stratum: stream.random()))
        raise UnsupportedError(
            f"columnar: {straggler} has no draws for all ranks at once: give each rank its own streams "
            '(streams="ranks", --set streams=ranks)'
        )


def _next(columns: Iterator[Floats]) -> Stretch:
    return lambda seconds, _begins_s: seconds * next(columns)


def _times(factors: Floats) -> Stretch:
    return lambda seconds, _begins_s: seconds * factors


def _strata(slow: Slow, ranks: int, drawn: Callable[[int], float]) -> Floats:
    """Return the factors of `Slow` for all ranks: one slow rank in each stratum of neighbours.

    `drawn` returns a stratum's uniform number. `Slow.open` for each rank takes 50 µs per rank instead.
    """
    factors = np.ones(ranks)
    if slow.share >= 1e-6:
        share = Fraction(slow.share).limit_denominator(1_000_000)
        strata = np.arange(int(ranks * share) + 1)
        first, end = (-(-edge * share.denominator // share.numerator) for edge in (strata, strata + 1))
        places = first + np.floor(np.asarray([drawn(k) for k in strata.tolist()]) * (end - first)).astype(
            np.int64
        )
        factors[places[places < ranks]] = slow.slowdown
    return factors
