"""Donors, their weights, and the decision that combines them with a selection.

A donor rule is any callable `rule(rank, candidates, rng) -> donors`; the candidates exclude the rank itself and all
ranks that are being replaced. Weights are computed from the donors' metrics, are non-negative and sum to 1. A decision
is a pure function of its arguments and the given generator. It has the same columns whether the coordinator of a group
decides, a rank about itself, or a run of a million ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError, UsageError
from spawnsim.policies.rules.selection import (
    NAN_POLICIES,
    Floats,
    Mode,
    NanPolicy,
    Ranks,
    Report,
    Reports,
    Selection,
    admitted,
    check_choice,
    check_mode,
    goodness,
    with_one_left,
    worst_of,
)

Weights = NDArray[np.float64]
Places = NDArray[np.int64]
Mixing = Callable[[Sequence[float]], Weights]  # donors' metrics → their weights
Strategy = Literal["mean", "weighted_mean", "best_only", "reset_weights"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)


def softmax(good: Weights) -> Weights:
    """Return weights that grow with goodness: softmax of (good - mean) / standard deviation, along the last axis.

    They are invariant under a shift or scaling of all values.

    >>> softmax(np.array([1.0, 2.0, 4.0])).round(2).tolist()
    [0.07, 0.16, 0.77]
    """
    # Standardised, so that one rule fits accuracies, losses and rewards alike. Scaled first, and shifted by the best
    # before the exponential, so that even the largest metrics do not overflow.
    most = np.maximum(np.abs(good).max(-1, keepdims=True), np.finfo(np.float64).tiny)  # no overflow below
    scaled = good / most
    spread = scaled.std(-1, keepdims=True)
    heat = (scaled - scaled.max(-1, keepdims=True)) / np.where(spread > 1e-12, spread, 1.0)
    raised = np.exp(heat)
    weights: Weights = raised / raised.sum(-1, keepdims=True)
    return weights


def only_best(good: Weights) -> Weights:
    """Return weight 1 for the best (the last of equals) and 0 for all others, along the last axis."""
    weights = np.zeros(good.shape)
    # The last of equals: lower ranks are replaced first, so donors are chosen from the other end.
    place = good.shape[-1] - 1 - good[..., ::-1].argmax(-1, keepdims=True)
    np.put_along_axis(weights, place, 1.0, -1)
    return weights


def weights_for(strategy: str, metrics: Weights, mode: Mode = "max") -> Weights:
    """Return the weights of donors under a named strategy.

    Args:
        strategy: "mean", "weighted_mean" or "best_only".
        metrics: metrics of at least one donor, all finite, float64 (donors,); (sets, donors) for many sets.
        mode: "max" if higher metrics are better, else "min".

    Returns:
        Weights of the same shape.
    """
    if strategy == "mean":
        return np.full(metrics.shape, 1 / metrics.shape[-1])
    return (softmax if strategy == "weighted_mean" else only_best)(goodness(metrics, mode))


def check_momentum(momentum: float) -> float:
    """Return the momentum, or raise `ParameterError` if it is outside [0, 1]."""
    if not 0 <= momentum <= 1:
        raise ParameterError(
            f"momentum={momentum!r}: give a number from 0 to 1 (the share of the rank's own weights that is kept)"
        )
    return float(momentum)


MOST_DONORS = 8  # default number of donors per replaced rank, except with "best_only": see `default_donors`

Count = int | float | None  # a number; a share of the candidates; all


class DonorRule(Protocol):
    """Chooses the donors of a replaced rank; a plain function also works."""

    def __call__(self, rank: int, candidates: Sequence[Report], rng: np.random.Generator, /) -> Sequence[int]:
        """Choose donors.

        Args:
            rank: the replaced rank.
            candidates: reports of the possible donors, at least one, by rank, with finite metrics.
            rng: generator for random choices.

        Returns:
            Ranks among the candidates, at least one.
        """


class ColumnDonorRule(DonorRule):
    """A donor rule over columns, for rules that are the same for all replaced ranks."""

    __slots__ = ()

    def columns(self, metrics: Weights, replaced: int, rng: np.random.Generator) -> Places:
        """Choose the donors of many replaced ranks, with the same draws as one call for each rank.

        Args:
            metrics: metrics of the candidates, by rank, all finite, float64 (candidates,).
            replaced: number of replaced ranks.
            rng: generator for random choices.

        Returns:
            Places among the candidates, ascending in each row, int64 (replaced, donors).
        """
        raise NotImplementedError

    def __call__(self, rank: int, candidates: Sequence[Report], rng: np.random.Generator) -> list[int]:
        given = Reports.of(candidates)
        ranks: list[int] = given.ranks[self.columns(given.metrics, 1, rng)[0]].tolist()
        return ranks


def how_many(count: Count, available: int) -> int:
    """Return the number of donors for a count (a number, a share or None): at least 1, at most `available`.

    >>> [how_many(count, 10) for count in (None, 3, 99, 0.5, 0.01)]
    [10, 3, 10, 5, 1]
    """
    if count is None:
        return available
    wanted = int(count * available) if isinstance(count, float) else count
    return min(max(1, wanted), available)


def check_count(count: Count) -> None:
    """Raise `ParameterError` if a count of donors is out of range."""
    share, number = isinstance(count, float), isinstance(count, (int, float)) and not isinstance(count, bool)
    if count is not None and (not number or count <= 0 or (share and count > 1)):
        raise ParameterError(
            f"count={count!r}: give a whole number above 0, a share in (0, 1] or None for all; donors may also be a "
            "rule, a function of (rank, candidates, rng)"
        )


@dataclass(frozen=True, slots=True)
class Uniform(ColumnDonorRule):
    """`count` candidates, all equally likely, without repetition.

    Args:
        count: a number of ranks, a share of the candidates (a float up to 1), or None for all.

    Raises:
        ParameterError: `count` is out of range.
    """

    count: Count = None

    def __post_init__(self) -> None:
        check_count(self.count)

    def columns(self, metrics: Weights, replaced: int, rng: np.random.Generator) -> Places:
        wanted = how_many(self.count, len(metrics))
        if wanted == len(metrics):
            return np.tile(np.arange(wanted), (replaced, 1))
        # `choice` over places makes the same draws as `choice` over ranks.
        drawn = [rng.choice(len(metrics), wanted, replace=False) for _ in range(replaced)]
        return np.sort(np.asarray(drawn, np.int64).reshape(replaced, wanted), axis=1)


@dataclass(frozen=True, slots=True)
class Best(ColumnDonorRule):
    """The `count` best candidates; ties go to the higher rank, as lower ranks are replaced first.

    Args:
        count: see `Uniform`.
        mode: "max" if higher metrics are better, else "min".

    Raises:
        ParameterError: an argument is out of range.
    """

    count: Count = 1
    mode: Mode = "max"

    def __post_init__(self) -> None:
        check_count(self.count)
        check_mode(self.mode)

    def columns(self, metrics: Weights, replaced: int, rng: np.random.Generator) -> Places:
        return np.tile(self.best(metrics), (replaced, 1))

    def best(self, metrics: Weights) -> Places:
        """Return the places of the best, ascending."""
        # The best are all except the worst, so that ties are broken as in the selection of replaced ranks.
        wanted = how_many(self.count, len(metrics))
        return np.flatnonzero(~worst_of(goodness(metrics, self.mode), len(metrics) - wanted))


@dataclass(frozen=True, slots=True)
class OneOfBest(Best):
    """One of the `count` best candidates, each equally likely: PBT's truncation selection. See `Best`."""

    count: Count = 0.25

    def columns(self, metrics: Weights, replaced: int, rng: np.random.Generator) -> Places:
        best = self.best(metrics)
        return np.array([rng.choice(best) for _ in range(replaced)], np.int64).reshape(replaced, 1)


@dataclass(frozen=True, slots=True)
class ByMetric(Best):
    """`count` candidates drawn without repetition, with probabilities that grow with the metric (see `softmax`).

    See `Best` for the arguments.
    """

    def columns(self, metrics: Weights, replaced: int, rng: np.random.Generator) -> Places:
        chances, wanted = softmax(goodness(metrics, self.mode)), how_many(self.count, len(metrics))
        drawn = [rng.choice(len(metrics), wanted, replace=False, p=chances) for _ in range(replaced)]
        return np.sort(np.asarray(drawn, np.int64).reshape(replaced, wanted), axis=1)


@dataclass(frozen=True, slots=True)
class Neighbours(DonorRule):
    """At most `count` of the rank's neighbours in a topology, drawn uniformly.

    If no neighbour is a candidate, the best candidate of all is the donor: every replaced rank has a donor.

    Args:
        topology: map from a rank to its neighbours.
        count: see `Uniform`; relative to the neighbours that are candidates.
        mode: "max" if higher metrics are better, else "min".

    Raises:
        ParameterError: `count` or `mode` is out of range.
    """

    topology: Mapping[int, Sequence[int]]
    count: Count = None
    mode: Mode = "max"

    def __post_init__(self) -> None:
        Best(self.count, self.mode)

    def __call__(self, rank: int, candidates: Sequence[Report], rng: np.random.Generator) -> list[int]:
        given = Reports.of(candidates)
        close = np.isin(given.ranks, self.topology.get(rank, ()))
        rule = Uniform(self.count) if close.any() else Best(1, self.mode)
        return rule(rank, given.where(close) if close.any() else given, rng)


def default_donors(strategy: str, mode: Mode, most: int | None) -> DonorRule:
    """Return the default donor rule of a strategy: for "best_only" the best candidate, else `most` random candidates.

    "best_only" means the best of all candidates, so one rank is the donor of all replaced ranks of a round: it packs
    its model once, and its network card sends it once for each replaced rank. A number of donors with "best_only" uses
    the best of that many drawn at random, which spreads the load. With `most` random donors, the traffic of a round
    does not grow with the square of the group, and the memory of a replaced rank does not grow with the group; with
    None, all candidates are donors.
    """
    return Best(1, mode) if strategy == "best_only" else Uniform(most)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a decision: selection, donors, and their weights (strategy, or `mixing` in its place)."""

    selection: Selection
    donors: DonorRule
    strategy: str = "mean"
    mixing: Mixing | None = None
    mode: Mode = "max"
    nan_policy: NanPolicy = "worst"

    def __post_init__(self) -> None:
        check_choice("averaging_strategy", self.strategy, STRATEGIES)
        check_mode(self.mode)
        check_choice("nan_policy", self.nan_policy, NAN_POLICIES)

    def selected(self, taking: Reports) -> NDArray[np.bool_]:
        """Return a mask of the participating reports whose ranks are to be replaced; one rank always remains."""
        if hasattr(self.selection, "columns"):
            chosen = self.selection.columns(taking.metrics, taking.expired)
        else:  # a user's function returns ranks
            chosen = np.isin(taking.ranks, [*self.selection(taking)])
        return with_one_left(chosen, taking.metrics, self.mode)

    def weights(self, metrics: Weights) -> Weights:
        """Return the weights of donors with these metrics, (donors,), or of many sets of donors, (sets, donors)."""
        if self.mixing is None:
            return weights_for(self.strategy, metrics, self.mode)
        if metrics.ndim > 1:
            return np.array([self.weights(each) for each in metrics])
        weights = np.asarray(self.mixing(metrics.tolist()), dtype=np.float64)
        if weights.shape != metrics.shape or not (weights >= 0).all() or not math.isclose(weights.sum(), 1):
            raise UsageError(
                f"mixing gave {weights.tolist()} for {len(metrics)} donors: weights are >= 0 and sum to 1"
            )
        return weights


@dataclass(frozen=True, slots=True)
class Assignment:
    """Donors of a replaced rank and their weights, non-negative with sum 1; without donors it resets its weights."""

    round: int
    donors: tuple[int, ...]
    weights: tuple[float, ...]
    low: float = math.nan
    high: float = math.nan


MOST_EDGES = 50_000_000  # maximum number of donors of all replaced ranks of a round


@dataclass(frozen=True, eq=False)
class Decision:
    """The decision of a round: the replaced ranks and their donors.

    Attributes:
        round: the iteration of the metrics.
        reported: number of reports.
        low, high: range of the finite metrics; NaN if all are non-finite.
        replaced: the replaced ranks, ascending, int64 (replaced,).
        counts: number of donors of each replaced rank, int64 (replaced,).
        donors: donors, grouped by replaced rank, int64 (edges,).
        weights: weights of the donors, float64 (edges,); they sum to 1 for each replaced rank.
    """

    round: int
    reported: int
    low: float = math.nan
    high: float = math.nan
    replaced: Ranks = field(default_factory=lambda: np.empty(0, np.int64))
    counts: Places = field(default_factory=lambda: np.empty(0, np.int64))
    donors: Ranks = field(default_factory=lambda: np.empty(0, np.int64))
    weights: Floats = field(default_factory=lambda: np.empty(0))

    @property
    def receivers(self) -> Ranks:
        """The replaced rank of each edge, int64 (edges,)."""
        return np.repeat(self.replaced, self.counts)

    @property
    def begins(self) -> Places:
        """The first edge of each replaced rank, int64 (replaced,)."""
        begins: Places = np.cumsum(self.counts) - self.counts
        return begins

    @cached_property
    def assignments(self) -> dict[int, Assignment]:
        """The decision as objects, by replaced rank."""
        found, begins = {}, self.begins.tolist()
        for rank, begin, count in zip(self.replaced.tolist(), begins, self.counts.tolist(), strict=True):
            donors, weights = (each[begin : begin + count].tolist() for each in (self.donors, self.weights))
            found[rank] = Assignment(self.round, tuple(donors), tuple(weights), self.low, self.high)
        return found


def decide(
    round_: int,
    reports: Sequence[Report],
    rules: Rules,
    rng: np.random.Generator,
    *,
    busy: Collection[int] = (),
    bulk: bool = False,
) -> Decision:
    """Return the decision of one round.

    Donors have finite metrics and are not replaced in this round. Without possible donors, no rank is replaced, except
    under "reset_weights", which needs no donors.

    Args:
        round_: the iteration of the metrics.
        reports: reports of all ranks of the group.
        rules: selection, donors and weights.
        rng: generator for random choices.
        busy: ranks whose replacement from an earlier round is unfinished. They are neither replaced nor donors, but
            count in the selection, so that no other rank is replaced in their place.
        bulk: whether `Uniform` draws for all replaced ranks at once: different draws from the same distribution.

    Returns:
        The replaced ranks and their donors.

    Raises:
        UsageError: a metric is not finite, and the rules' `nan_policy` is "raise"; a user's rule returns ranks that are
            not candidates, or weights that do not sum to 1; there are too many donors in total.
    """
    given = Reports.of(reports)
    low, high = given.range  # of all finite reports, excluded ones too: it describes the round
    taking = admitted(given, rules.nan_policy)
    selected = rules.selected(taking)
    giving, replaced = taking.where(~selected & np.isfinite(taking.metrics)), taking.ranks[selected]
    if busy:
        giving = giving.where(~np.isin(giving.ranks, [*busy]))
        replaced = replaced[~np.isin(replaced, [*busy])]
    if not len(replaced) or not (len(giving) or rules.strategy == "reset_weights"):
        return Decision(round_, len(given), low, high)
    return Decision(
        round_, len(given), low, high, replaced, *donors_of(replaced, giving, rules, rng, bulk=bulk)
    )


def donors_of(
    replaced: Ranks, giving: Reports, rules: Rules, rng: np.random.Generator, *, bulk: bool = False
) -> tuple[Places, Ranks, Weights]:
    """Return `counts`, `donors` and `weights` of a `Decision`."""
    if rules.strategy == "reset_weights":
        return np.zeros(len(replaced), np.int64), np.empty(0, np.int64), np.empty(0)
    rule: Any = rules.donors
    # Checked before the choice; the number of donors of a custom rule is known only afterwards.
    wanted = how_many(rule.count, len(giving)) if type(rule) in (Uniform, Best) else 0
    _require_few(len(replaced), wanted)
    if not hasattr(rule, "columns"):  # may depend on the rank: called for each, in ascending order
        rows = []
        for rank in replaced.tolist():
            own = _places_among(giving, rank, rule, rng)
            weights = rules.weights(giving.metrics[own])
            rows.append((own[weights > 0], weights[weights > 0]))
        places, weights = (np.concatenate(each) for each in zip(*rows, strict=True))
        return np.array([len(own) for own, _ in rows]), giving.ranks[places], weights
    if bulk and isinstance(rule, Uniform):
        places = subsets(rng, len(giving), wanted, len(replaced))
    else:
        places = rule.columns(giving.metrics, len(replaced), rng)
        _require_few(*places.shape)
    weights = rules.weights(giving.metrics[places])
    gives = weights > 0  # the model of a donor of weight 0 would be sent without effect
    return gives.sum(1), giving.ranks[places[gives]], weights[gives]


def _places_among(giving: Reports, rank: int, rule: DonorRule, rng: np.random.Generator) -> Places:
    """Return the places of the donors that a rule chooses for a replaced rank, by rank."""
    chosen = np.unique(
        [*rule(rank, giving, rng)]
    )  # a rule may return a donor twice; its weight would count twice
    places = np.flatnonzero(np.isin(giving.ranks, chosen))
    if not len(chosen) or len(places) < len(chosen):
        raise UsageError(
            f"the donor rule gave {chosen.tolist()} for rank {rank}: choose among {giving.ranks.tolist()}, at least one"
        )
    return places


def _require_few(replaced: int, wanted: int) -> None:
    if replaced * wanted > MOST_EDGES:
        raise UsageError(
            f"{replaced:,} replaced ranks with {wanted:,} donors each are {replaced * wanted:,} models in one round: "
            "give a number of donors, such as donors=8"
        )


def subsets(rng: np.random.Generator, size: int, wanted: int, count: int) -> Places:
    """Return random subsets, all equally likely.

    Args:
        rng: generator for random choices.
        size: elements are the numbers from 0 to size - 1.
        wanted: size of each subset, at most `size`.
        count: number of subsets.

    Returns:
        One subset per row, ascending, int64 (count, wanted).
    """
    # R. Floyd's algorithm (CACM 30 (1987) 754), for all subsets at once: a number already in the subset is replaced by
    # the largest number that this step may draw, which cannot be in it yet.
    chosen = np.empty((count, wanted), np.int64)
    for step in range(wanted):
        largest = size - wanted + step
        drawn = rng.integers(0, largest + 1, count)
        known = (chosen[:, :step] == drawn[:, None]).any(1)
        chosen[:, step] = np.where(known, largest, drawn)
    return np.sort(chosen, axis=1)
