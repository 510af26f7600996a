"""The models of all ranks, as a turn sees them; and numbers that stand for them: one a rank, how good its model is.

A researcher's own numbers are any object with the three methods of `Quality`. In the ordinary mode a model of one
parameter does the same, so that decisions can be compared. Models that train are in `training`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from spawnsim import random
from spawnsim.columnar.exchange import GlobalWeights
from spawnsim.columnar.rows import Members
from spawnsim.errors import ParameterError
from spawnsim.models.network.cost import Floats
from spawnsim.policies import AsyncSelectiveAveragingPolicy, AverageAllPolicy, OuterOptimizerPolicy
from spawnsim.policies.rules.donors import Decision
from spawnsim.record.recorder import document
from spawnsim.virtual.digest import checksum


class Models(ABC):
    """The models of all ranks of a run.

    Attributes:
        nbytes: of one as it travels; None: not known.
        whole_nbytes: of all that a rank takes over that begins; None: as much.
    """

    nbytes: int | None = None
    whole_nbytes: int | None = None

    @abstractmethod
    def train(self, first: int, count: int, members: Members) -> None:
        """Train those of some ranks for so many iterations, the first of which is given."""

    @abstractmethod
    def metrics(self, iteration: int) -> Floats:
        """Return what each rank reports, float64 (ranks,)."""

    @abstractmethod
    def are_equal(self, members: Members, policy: AverageAllPolicy) -> bool:
        """Return whether what a policy averages of some ranks is all the same."""

    @abstractmethod
    def average(self, members: Members, policy: AverageAllPolicy, *, equal: bool) -> None:
        """Give some ranks the mean of theirs, as a policy says; `equal` if these are the same."""

    @abstractmethod
    def replace(self, decision: Decision, policy: AsyncSelectiveAveragingPolicy) -> None:
        """Give replaced ranks what their donors had, as a policy says."""

    @abstractmethod
    def begin_together(self, members: Members, policy: OuterOptimizerPolicy) -> None:
        """Give some ranks the model of the lowest one: the global weights from now on."""

    @abstractmethod
    def step_together(self, members: Members, policy: OuterOptimizerPolicy, iteration: int) -> None:
        """Move the global weights by the mean movement of some ranks, which go on from there."""

    @abstractmethod
    def checksum(self) -> int:
        """Return a checksum of all models."""

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Return facts of the run that name them."""

    def columns(self) -> dict[str, Floats]:
        """Return what else is known of each rank as it reports: by name, float64 (ranks,)."""
        return {}


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


class Numbers(Models):
    """One number a rank in the place of its model.

    Args:
        quality: how numbers begin, move and are judged.
        ranks: how many.
        seed: of the run.
    """

    def __init__(self, quality: Quality, ranks: int, seed: int) -> None:
        self._quality = quality
        self.values: Floats = quality.begin(ranks, seed)

    def train(self, first: int, count: int, members: Members) -> None:
        self._quality.train(self.values, first, count)

    def metrics(self, iteration: int) -> Floats:
        return np.array(self._quality.metric(self.values, iteration), np.float64)

    def are_equal(self, members: Members, policy: AverageAllPolicy) -> bool:
        values = self.values[members]
        return bool((values == values[0]).all())

    def average(self, members: Members, policy: AverageAllPolicy, *, equal: bool) -> None:
        if equal:
            return
        values = self.values[members]
        counted = values[np.isfinite(values)] if policy.guard else values
        mean = counted.mean() if counted.size else np.nan
        self.values[members] = mean + policy.momentum * _finite(values - mean)

    def replace(self, decision: Decision, policy: AsyncSelectiveAveragingPolicy) -> None:
        mixed = np.add.reduceat(decision.weights * self.values[decision.donors], decision.begins)
        momentum, own = policy.replacement.momentum, self.values[decision.replaced]
        self.values[decision.replaced] = mixed + momentum * _finite(own - mixed) if momentum else mixed

    def begin_together(self, members: Members, policy: OuterOptimizerPolicy) -> None:
        self.values[members] = self.values[members][0]
        self._outer = GlobalWeights(torch.from_numpy(self.values[members][:1]))

    def step_together(self, members: Members, policy: OuterOptimizerPolicy, iteration: int) -> None:
        self._outer.step(torch.from_numpy(self.values[members]).unsqueeze(1), policy.rule, 1.0)
        self.values[members] = self._outer.weights.item()

    def checksum(self) -> int:
        return checksum(self.values)

    def described(self) -> dict[str, Any]:
        return {"quality": document(self._quality)}


def _finite(drift: Floats) -> Floats:
    """Return a drift from a mean, and 0 where it is not finite, as policies do."""
    return np.where(np.isfinite(drift), drift, 0.0)
