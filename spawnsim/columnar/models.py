"""The interface of a turn to the models of all ranks, and numbers in place of models: one quality per rank.

An object with the three methods of `Quality` defines its own numbers. In the ordinary mode a model of one parameter
does the same, so that decisions can be compared. Models that train are in `training`.
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
from spawnsim.columnar.shards import Shards
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.models.network.cost import Floats, Ints
from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    GossipPolicy,
    SpawnPolicy,
)
from spawnsim.policies.outer_optimizer import GlobalWeightsPolicy
from spawnsim.policies.rules.donors import Decision
from spawnsim.policies.state.difference_codecs import RandomMask
from spawnsim.record.recorder import document
from spawnsim.virtual.digest import checksum

Sizes = tuple[int | list[int] | None, int | None]


class Models(ABC):
    """The models of all ranks of a run.

    Attributes:
        replays: whether a resumed run has yet to reach its checkpoint.
    """

    replays = False

    def sizes(self, policy: SpawnPolicy) -> Sizes:
        """Return the bytes of a policy's messages: usual, and of the whole model; None: unknown, or as usual.

        If fragments of the model take turns, the first is a list with the bytes of each.

        The whole model is adopted at the beginning, or (by gossip) summed from time to time.
        """
        return None, None

    @abstractmethod
    def train(self, first: int, count: int, members: Members) -> None:
        """Train the models of some ranks for `count` iterations, from iteration `first` on."""

    @abstractmethod
    def metrics(self, iteration: int) -> Floats:
        """Return the metric of each rank, float64 (ranks,)."""

    @abstractmethod
    def are_equal(self, members: Members, policy: AverageAllPolicy, mask: RandomMask | None = None) -> bool:
        """Return whether the parts that a policy averages are equal on some ranks; for the mask see `average`."""

    @abstractmethod
    def average(
        self, members: Members, policy: AverageAllPolicy, *, equal: bool, mask: RandomMask | None = None
    ) -> None:
        """Set the models of some ranks to their mean, as a policy says; `equal` if they are equal already.

        With a mask, only the weights at its places change: places among all weights, in the order of the model.
        """

    @abstractmethod
    def replace(self, decision: Decision, policy: AsyncSelectiveAveragingPolicy) -> None:
        """Replace models by the mixtures of their donors' models, as a policy says."""

    @abstractmethod
    def mix(self, receivers: Ints, senders: Ints, weights: Floats, policy: GossipPolicy) -> None:
        """Add to some ranks' models the weighted differences of other ranks' models from them, all at once.

        `weights[e]` is the weight of rank `senders[e]` for rank `receivers[e]`; pairs are in the order of receivers.
        """

    @abstractmethod
    def begin_together(self, members: Members, policy: GlobalWeightsPolicy) -> None:
        """Give some ranks the model of the lowest one: the global weights from now on."""

    @abstractmethod
    def send_difference(self, members: Members, policy: GlobalWeightsPolicy, place: int = 0) -> None:
        """Take the mean difference of some ranks' models from the global weights, of one fragment."""

    @abstractmethod
    def step_together(
        self, members: Members, policy: GlobalWeightsPolicy, iteration: int, place: int = 0
    ) -> None:
        """Move the global weights by the oldest mean of a fragment, and some ranks' models to them, or towards them."""

    @abstractmethod
    def checksum(self) -> int:
        """Return a checksum of all models."""

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Return the entries of the run description about the models."""

    def of_mean(self) -> dict[str, float]:
        """Return numbers of the mean of all living ranks' models, by name."""
        return {}

    def columns(self) -> dict[str, Floats]:
        """Return further columns of the ranks' reports: by name, float64 (ranks,)."""
        return {}


class Quality(Protocol):
    """Initial values, training and metric of models: functions of arrays over all ranks."""

    def begin(self, ranks: int, seed: int) -> Floats:
        """Return each rank's model, as one number.

        Args:
            ranks: number of ranks.
            seed: seed of the run.

        Returns:
            float64 (ranks,); the run changes it in place when it replaces or averages ranks.
        """

    def train(self, quality: Floats, first: int, count: int) -> None:
        """Train all ranks, in place.

        Args:
            quality: quality of each rank's model, float64 (ranks,).
            first: the first iteration to train.
            count: number of iterations.
        """

    def metric(self, quality: Floats, iteration: int) -> Floats:
        """Return the metric that each rank reports.

        Args:
            quality: quality of each rank's model, float64 (ranks,).
            iteration: iteration of the reports.

        Returns:
            float64 (ranks,); the policy's `mode` defines whether higher or lower is better.
        """


@dataclass
class RandomWalk(Quality):
    """Qualities that walk at random: N(0, spread²) at the beginning, plus N(gain, drift²) in each iteration.

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
        # One draw for all steps since the last call: only their sum is visible.
        quality += count * self.gain
        if self.drift:
            quality += self.drift * np.sqrt(count) * self._stream.standard_normal(len(quality))

    def metric(self, quality: Floats, iteration: int) -> Floats:
        return quality


class Numbers(Models):
    """One number per rank in place of its model.

    Args:
        quality: initial values, training and metric of the numbers.
        ranks: number of ranks.
        seed: seed of the run.
    """

    def __init__(self, quality: Quality, ranks: int, seed: int) -> None:
        self._quality = quality
        self._outer: dict[SpawnPolicy, GlobalWeights] = {}
        self.values: Floats = quality.begin(ranks, seed)
        self._shards = Shards(ranks, ranks)

    def train(self, first: int, count: int, members: Members) -> None:
        self._quality.train(self.values, first, count)

    def metrics(self, iteration: int) -> Floats:
        return np.array(self._quality.metric(self.values, iteration), np.float64)

    def are_equal(self, members: Members, policy: AverageAllPolicy, mask: RandomMask | None = None) -> bool:
        values = self.values[members]
        return bool((values == values[0]).all())

    def average(
        self, members: Members, policy: AverageAllPolicy, *, equal: bool, mask: RandomMask | None = None
    ) -> None:
        if equal:
            return
        values = self.values[members]
        counted = values[np.isfinite(values)] if policy.guard else values
        mean = counted.mean() if counted.size else np.nan
        # A model that averages a share of its weights moves by this share of the way.
        kept = policy.momentum if mask is None else 1 - mask.share
        self.values[members] = mean + kept * _finite(values - mean)

    def replace(self, decision: Decision, policy: AsyncSelectiveAveragingPolicy) -> None:
        mixed = np.add.reduceat(decision.weights * self.values[decision.donors], decision.begins)
        momentum, own = policy.replacement.momentum, self.values[decision.replaced]
        self.values[decision.replaced] = mixed + momentum * _finite(own - mixed) if momentum else mixed

    def mix(self, receivers: Ints, senders: Ints, weights: Floats, policy: GossipPolicy) -> None:
        drift = weights * (self.values[senders] - self.values[receivers])
        self.values += np.bincount(receivers, drift, len(self.values))

    def begin_together(self, members: Members, policy: GlobalWeightsPolicy) -> None:
        self.values[members] = self.values[members][0]
        self._outer[policy] = GlobalWeights(torch.from_numpy(self.values[members][:1]))

    def send_difference(self, members: Members, policy: GlobalWeightsPolicy, place: int = 0) -> None:
        if policy.fragments != 1:
            raise UnsupportedError(
                f"columnar: {type(policy).__name__} needs models that train (--train): numbers have no fragments"
            )
        self._outer[policy].send(torch.from_numpy(self.values).unsqueeze(1), members, self._shards)

    def step_together(
        self, members: Members, policy: GlobalWeightsPolicy, iteration: int, place: int = 0
    ) -> None:
        rows = torch.from_numpy(self.values).unsqueeze(1)
        self._outer[policy].step(rows, members, policy, shards=self._shards)

    def checksum(self) -> int:
        return checksum(self.values)

    def described(self) -> dict[str, Any]:
        return {"quality": document(self._quality)}


def _finite(drift: Floats) -> Floats:
    """Return a drift from a mean, with 0 for non-finite values, as policies do."""
    return np.where(np.isfinite(drift), drift, 0.0)
