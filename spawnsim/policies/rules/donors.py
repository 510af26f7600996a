"""From whom, and how much: donors, their weights, and the decision that puts them together with a selection.

A donor rule is any callable `rule(rank, candidates, rng) -> donors`; neither the rank itself nor any rank that is being
replaced is among the candidates. Weights come from the donors' metrics, are non-negative and sum to 1. A decision is a
pure function of its arguments and the generator given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError, UsageError
from spawnsim.policies.rules.selection import (
    NAN_POLICIES,
    Mode,
    NanPolicy,
    Report,
    Selection,
    admitted,
    check_choice,
    check_mode,
    goodness,
    goodness_of,
    metric_range,
    spare_the_best,
    worst_first,
    worst_of,
)

Weights = NDArray[np.float64]
Places = NDArray[np.int64]
Mixing = Callable[[Sequence[float]], Weights]  # donors' metrics → their weights
Strategy = Literal["mean", "weighted_mean", "best_only", "reset_weights"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)


def mean_weights(metrics: Sequence[float], mode: Mode = "max") -> Weights:
    """Return equal weights."""
    return np.full(len(metrics), 1 / max(len(metrics), 1))


def softmax_weights(metrics: Sequence[float], mode: Mode = "max") -> Weights:
    """Return weights that grow with goodness: softmax of (metric - mean) / standard deviation.

    Shifting or scaling all metrics changes nothing; non-finite metrics weigh nothing unless all are non-finite.

    >>> softmax_weights([1.0, 2.0, 4.0]).round(2).tolist()
    [0.07, 0.16, 0.77]
    """
    good = np.asarray([goodness(metric, mode) for metric in metrics], dtype=np.float64)
    finite = np.isfinite(good)
    if not finite.any():
        return mean_weights(metrics)
    weights = np.zeros(len(good))
    weights[finite] = _softmax(good[finite])
    return weights


def _softmax(good: Weights) -> Weights:
    """Return such weights along the last axis; all are finite."""
    # Standardised, so that one setting fits accuracies, losses and rewards alike; scaled first, and shifted by the best
    # before the exponential, so that no metric however large overflows.
    most = np.maximum(np.abs(good).max(-1, keepdims=True), np.finfo(np.float64).tiny)  # no overflow below
    scaled = good / most
    spread = scaled.std(-1, keepdims=True)
    heat = (scaled - scaled.max(-1, keepdims=True)) / np.where(spread > 1e-12, spread, 1.0)
    raised = np.exp(heat)
    weights: Weights = raised / raised.sum(-1, keepdims=True)
    return weights


def best_weights(metrics: Sequence[float], mode: Mode = "max") -> Weights:
    """Return weight 1 for the best donor (the last of equals), 0 for the others."""
    return _best(np.asarray([goodness(metric, mode) for metric in metrics], dtype=np.float64))


def _best(good: Weights) -> Weights:
    """Return such weights along the last axis."""
    weights = np.zeros(good.shape)
    if good.size:
        # The last of equals: the lower rank is the first to be replaced, so donors are taken from the other end.
        place = good.shape[-1] - 1 - good[..., ::-1].argmax(-1, keepdims=True)
        np.put_along_axis(weights, place, 1.0, -1)
    return weights


def weights_for(strategy: str, metrics: Sequence[float], mode: Mode = "max") -> Weights:
    """Return the donors' weights under a named strategy; `reset_weights` has no donors, hence no weights."""
    if strategy == "mean":
        return mean_weights(metrics, mode)
    if strategy == "weighted_mean":
        return softmax_weights(metrics, mode)
    if strategy == "best_only":
        return best_weights(metrics, mode)
    return np.empty(0)


def weights_in_rows(strategy: str, metrics: Weights, mode: Mode = "max") -> Weights:
    """Return `weights_for` of many sets of donors at once.

    Args:
        strategy: "mean", "weighted_mean" or "best_only".
        metrics: of the donors, all finite, float64 (sets, donors).
        mode: "max" if higher metrics are better, else "min".

    Returns:
        Weights of the same shape.
    """
    if strategy == "mean":
        return np.full(metrics.shape, 1 / max(metrics.shape[-1], 1))
    return (_softmax if strategy == "weighted_mean" else _best)(goodness_of(metrics, mode))


def check_strategy(strategy: str) -> str:
    """Return the strategy, or raise `ParameterError`."""
    return check_choice("averaging_strategy", strategy, STRATEGIES)


def check_momentum(momentum: float) -> float:
    """Return the momentum, or raise `ParameterError` if it is outside [0, 1]."""
    if not 0 <= momentum <= 1:
        raise ParameterError(
            f"momentum={momentum!r}: give a number from 0 to 1 (the share of the rank's own weights that is kept)"
        )
    return float(momentum)


MOST_DONORS = 8  # donors of one replaced rank by default, where averaging takes several: see `default_donors`

Count = int | float | None  # so many; that share of the candidates; all


class DonorRule(Protocol):
    """Says which ranks give to a replaced rank; a function will do."""

    def __call__(self, rank: int, candidates: Sequence[Report], rng: np.random.Generator, /) -> Sequence[int]:
        """Choose donors.

        Args:
            rank: the replaced rank.
            candidates: reports of the ranks that may give, at least one, by rank, with finite metrics.
            rng: for what is drawn.

        Returns:
            Ranks among the candidates, at least one.
        """


def how_many(count: Count, available: int) -> int:
    """Return a count of donors: a whole number, or a share of those available; at least 1 and at most all.

    >>> [how_many(count, 10) for count in (None, 3, 99, 0.5, 0.01)]
    [10, 3, 10, 5, 1]
    """
    if count is None:
        return available
    wanted = int(count * available) if isinstance(count, float) else count
    return min(max(1, wanted), available)


def check_count(count: Count) -> Count:
    """Return the count, or raise `ParameterError`."""
    share, number = isinstance(count, float), isinstance(count, (int, float)) and not isinstance(count, bool)
    if count is not None and (not number or count <= 0 or (share and count > 1)):
        raise ParameterError(
            f"count={count!r}: give a whole number above 0, a share in (0, 1] or None for all; donors may also be a "
            "rule, a function of (rank, candidates, rng)"
        )
    return count


@dataclass(frozen=True, slots=True)
class Uniform(DonorRule):
    """`count` of the candidates, all equally likely, without repetition.

    Args:
        count: a number of ranks, a share of the candidates (a float up to 1), or None for all.

    Raises:
        ParameterError: `count` is out of range.
    """

    count: Count = None

    def __post_init__(self) -> None:
        check_count(self.count)

    def __call__(self, rank: int, candidates: Sequence[Report], rng: np.random.Generator) -> list[int]:
        ranks, wanted = [report.rank for report in candidates], how_many(self.count, len(candidates))
        if wanted == len(ranks):
            return ranks
        return sorted(int(chosen) for chosen in rng.choice(ranks, wanted, replace=False))

    def columns(self, metrics: Weights, replaced: int, rng: np.random.Generator) -> Places:
        """Choose the donors of many replaced ranks, with the draws that as many calls would make.

        Args:
            metrics: of the candidates, by rank, all finite, float64 (candidates,).
            replaced: how many ranks are replaced.
            rng: for what is drawn.

        Returns:
            Places among the candidates, rising in each row, int64 (replaced, donors).
        """
        wanted = how_many(self.count, len(metrics))
        if wanted == len(metrics):
            return np.tile(np.arange(wanted), (replaced, 1))
        # `choice` draws places, whatever it is given to choose from.
        drawn = [rng.choice(len(metrics), wanted, replace=False) for _ in range(replaced)]
        return np.sort(np.asarray(drawn, np.int64).reshape(replaced, wanted), axis=1)


@dataclass(frozen=True, slots=True)
class Best(DonorRule):
    """The `count` best candidates; ties go to the higher rank, as the lower one is the first to be replaced.

    Args:
        count: as for `Uniform`.
        mode: "max" if higher metrics are better, else "min".

    Raises:
        ParameterError: an argument is out of range.
    """

    count: Count = 1
    mode: Mode = "max"

    def __post_init__(self) -> None:
        check_count(self.count)
        check_mode(self.mode)

    def __call__(self, rank: int, candidates: Sequence[Report], rng: np.random.Generator) -> list[int]:
        order = worst_first(candidates, self.mode)
        return sorted(report.rank for report in order[len(order) - how_many(self.count, len(order)) :])

    def columns(self, metrics: Weights, replaced: int, rng: np.random.Generator) -> Places:
        """Choose the donors of many replaced ranks: see `Uniform.columns`.

        Args:
            metrics: of the candidates, by rank, all finite, float64 (candidates,).
            replaced: how many ranks are replaced.
            rng: for what is drawn: nothing.

        Returns:
            Places among the candidates, rising in each row, int64 (replaced, donors).
        """
        # All but the worst ones are the best: so ties fall as in `worst_first`.
        wanted = how_many(self.count, len(metrics))
        best = np.flatnonzero(~worst_of(goodness_of(metrics, self.mode), len(metrics) - wanted))
        return np.tile(best, (replaced, 1))


@dataclass(frozen=True, slots=True)
class OneOfBest(DonorRule):
    """One of the `count` best candidates, all of these equally likely: PBT's truncation selection.

    Args:
        count: as for `Uniform`.
        mode: "max" if higher metrics are better, else "min".

    Raises:
        ParameterError: an argument is out of range.
    """

    count: Count = 0.25
    mode: Mode = "max"

    def __post_init__(self) -> None:
        Best(self.count, self.mode)

    def __call__(self, rank: int, candidates: Sequence[Report], rng: np.random.Generator) -> list[int]:
        return [int(rng.choice(Best(self.count, self.mode)(rank, candidates, rng)))]

    def columns(self, metrics: Weights, replaced: int, rng: np.random.Generator) -> Places:
        """Choose the donor of each of many replaced ranks: see `Uniform.columns`."""
        [best] = Best(self.count, self.mode).columns(metrics, 1, rng)
        return np.array([rng.choice(best) for _ in range(replaced)], np.int64).reshape(replaced, 1)


@dataclass(frozen=True, slots=True)
class ByMetric(DonorRule):
    """`count` candidates drawn without repetition, the better the likelier (softmax of the standardised metric).

    Args:
        count: as for `Uniform`.
        mode: "max" if higher metrics are better, else "min".

    Raises:
        ParameterError: an argument is out of range.
    """

    count: Count = 1
    mode: Mode = "max"

    def __post_init__(self) -> None:
        check_count(self.count)
        check_mode(self.mode)

    def __call__(self, rank: int, candidates: Sequence[Report], rng: np.random.Generator) -> list[int]:
        chances = softmax_weights([report.metric for report in candidates], self.mode)
        wanted = how_many(self.count, len(candidates))
        ranks = [report.rank for report in candidates]
        return sorted(int(chosen) for chosen in rng.choice(ranks, wanted, replace=False, p=chances))


@dataclass(frozen=True, slots=True)
class Neighbours(DonorRule):
    """At most `count` of the rank's neighbours in a topology, drawn uniformly.

    Where no neighbour may give, the best candidate of all does: a replaced rank never ends up with nothing.

    Args:
        topology: rank → its neighbours.
        count: as for `Uniform`, of the neighbours that may give.
        mode: "max" if higher metrics are better, else "min".

    Raises:
        ParameterError: `count` or `mode` is out of range.
    """

    topology: Mapping[int, Sequence[int]]
    count: Count = None
    mode: Mode = "max"

    def __post_init__(self) -> None:
        check_count(self.count)
        check_mode(self.mode)

    def __call__(self, rank: int, candidates: Sequence[Report], rng: np.random.Generator) -> list[int]:
        near = set(self.topology.get(rank, ()))
        close = [report for report in candidates if report.rank in near]
        if not close:
            return Best(1, self.mode)(rank, candidates, rng)
        return Uniform(self.count)(rank, close, rng)


def default_donors(strategy: str, mode: Mode, most: int | None) -> DonorRule:
    """Return the donors that a strategy has where none are named: for "best_only" the best alone, else `most`.

    "best_only" means the best of all, so one rank gives to all that are replaced in a round: it packs its model once,
    and its network card sends it as often as there are replaced ranks. A number of donors with "best_only" takes the
    best of so many drawn at random, which spreads that load. `most` drawn at random (None: all candidates) keeps the
    traffic of a round, and the memory of a replaced rank, from growing with the square of the group.
    """
    return Best(1, mode) if strategy == "best_only" else Uniform(most)


@dataclass(frozen=True, slots=True)
class Rules:
    """The composition: who (selection), from whom (donors), how much (strategy, or `mixing` in its place)."""

    selection: Selection
    donors: DonorRule
    strategy: str = "mean"
    mixing: Mixing | None = None
    mode: Mode = "max"
    nan_policy: NanPolicy = "worst"

    def __post_init__(self) -> None:
        check_strategy(self.strategy)
        check_mode(self.mode)
        check_choice("nan_policy", self.nan_policy, NAN_POLICIES)

    def weights(self, metrics: Sequence[float]) -> list[float]:
        """Return the weights of donors with these metrics."""
        given = self.mixing(metrics) if self.mixing else weights_for(self.strategy, metrics, self.mode)
        weights = np.asarray(given, dtype=np.float64)
        if weights.shape != (len(metrics),) or not (weights >= 0).all() or not math.isclose(weights.sum(), 1):
            raise UsageError(
                f"mixing gave {weights.tolist()} for {len(metrics)} donors: weights are >= 0 and sum to 1"
            )
        return [float(weight) for weight in weights]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who gives to a replaced rank, and how much: `weights` are non-negative and sum to 1 (no donors: start afresh)."""

    round: int
    donors: tuple[int, ...]
    weights: tuple[float, ...]
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True, slots=True)
class Decision:
    """What a round decided: each replaced rank's assignment, and the range of the metrics that it saw."""

    round: int
    reported: int
    low: float = math.nan
    high: float = math.nan
    assignments: dict[int, Assignment] = field(default_factory=dict)


def decide(
    round_: int,
    reports: Sequence[Report],
    rules: Rules,
    rng: np.random.Generator,
    *,
    busy: Collection[int] = (),
) -> Decision:
    """Return the decision of one round.

    `busy` ranks (still being replaced from an earlier round) are neither replaced nor donors, but they count: no other
    rank is replaced in their place. Donors have finite metrics and are not replaced in this round; where there is none,
    no rank is replaced.
    """
    taking = admitted(reports, rules.nan_policy)
    # The range is of all finite reports, those that do not take part included: it describes the round.
    low, high = metric_range(reports)
    decision = Decision(round_, len(reports), low, high)
    # Selections are users' objects: what they name is held to the ranks that reported, and one is always left.
    known = {report.rank for report in taking}
    selected = spare_the_best(known.intersection(rules.selection(taking)), taking, rules.mode)
    givers = [r for r in taking if r.rank not in selected and r.rank not in busy and math.isfinite(r.metric)]
    if givers or rules.strategy == "reset_weights":
        # Sorted, since donors are drawn one replaced rank after the other, and a set has no order to rely on.
        for rank in sorted(selected.difference(busy)):
            donors, weights = choose_donors(rank, givers, rules, rng)
            decision.assignments[rank] = Assignment(round_, donors, weights, low, high)
    return decision


def choose_donors(
    rank: int, givers: Sequence[Report], rules: Rules, rng: np.random.Generator
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the donors of one replaced rank, by rank, and their weights; donors of no weight are left out."""
    if rules.strategy == "reset_weights":
        return (), ()
    # Users' rules may name a donor twice; its weight would count twice.
    chosen = sorted(set(rules.donors(rank, givers, rng)))
    metrics = {report.rank: report.metric for report in givers}
    if not chosen or not metrics.keys() >= set(chosen):
        raise UsageError(
            f"the donor rule gave {chosen} for rank {rank}: choose among {sorted(metrics)}, at least one"
        )
    weights = rules.weights([metrics[donor] for donor in chosen])
    # A donor of no weight would be asked for its whole model for nothing.
    pairs = [(donor, weight) for donor, weight in zip(chosen, weights, strict=True) if weight > 0]
    return tuple(donor for donor, _ in pairs), tuple(weight for _, weight in pairs)
