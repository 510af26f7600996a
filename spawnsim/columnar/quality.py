"""What stands for the models of all ranks: one number each, how good it is, which a replacement hands on.

A researcher's own is any object with these three methods. In the ordinary mode a model of one parameter does the same,
so that decisions can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from spawnsim import random
from spawnsim.errors import ParameterError
from spawnsim.virtual.network.cost import Floats


class Quality(Protocol):
    """How models begin, train, and are judged: functions of arrays over all ranks."""

    def begin(self, ranks: int, seed: int) -> Floats:
        """Return each rank's model, as one number.

        Args:
            ranks: how many.
            seed: of the run.

        Returns:
            float64 (ranks,); the run changes it when ranks are replaced or averaged.
        """

    def train(self, quality: Floats, first: int, count: int) -> None:
        """Train all ranks, in place.

        Args:
            quality: of each rank's model, float64 (ranks,).
            first: the first iteration that is trained.
            count: how many iterations.
        """

    def metric(self, quality: Floats, iteration: int) -> Floats:
        """Return the metric that each rank reports.

        Args:
            quality: of each rank's model, float64 (ranks,).
            iteration: at which it reports.

        Returns:
            float64 (ranks,); which way is better, the policy's `mode` says.
        """


@dataclass
class RandomWalk(Quality):
    """Qualities that begin apart and walk: N(0, spread²) at first, then N(gain, drift²) more in each iteration.

    The metric is the quality itself: higher is better.

    Args:
        spread: standard deviation over ranks at the beginning, at least 0.
        gain: mean step of an iteration.
        drift: standard deviation of a step, at least 0.

    Raises:
        ParameterError: `spread` or `drift` is below 0.
    """

    spread: float = 1.0
    gain: float = 0.01
    drift: float = 0.05
    _stream: np.random.Generator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("spread", "drift"):
            if not getattr(self, name) >= 0:
                raise ParameterError(f"{name}={getattr(self, name)!r}: give a number of at least 0")

    def begin(self, ranks: int, seed: int) -> Floats:
        self._stream = random.generator(seed, random.WORLD, "columnar.quality")
        return self.spread * self._stream.standard_normal(ranks)

    def train(self, quality: Floats, first: int, count: int) -> None:
        # One draw for all the steps since the last look: their sum is what anybody sees.
        quality += count * self.gain
        if self.drift:
            quality += self.drift * np.sqrt(count) * self._stream.standard_normal(len(quality))

    def metric(self, quality: Floats, iteration: int) -> Floats:
        return quality
