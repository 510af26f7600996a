"""Who: which ranks are to be replaced, from what they reported.

This room knows ranks, metrics and ages; it knows no communicator, no model and no clock. Ranking is the same
everywhere: non-finite metrics are worst, ties go to the lower rank first, counts come from the reports given
(the group), and at least one rank is always left to donate. A selection is any callable
`selection(reports) -> set of ranks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from spawnsim.errors import ParameterError, UsageError

Mode = Literal["max", "min"]
NanPolicy = Literal["worst", "exclude", "raise"]
MODES: tuple[str, ...] = ("max", "min")
NAN_POLICIES: tuple[str, ...] = ("worst", "exclude", "raise")


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank says of itself: its metric, and whether its age has run out."""

    rank: int
    metric: float
    expired: bool = False


Selection = Callable[[Sequence[Report]], "frozenset[int]"]


def goodness(metric: float, mode: Mode = "max") -> float:
    """Return the metric so that higher is better; minus infinity for anything not finite."""
    if not math.isfinite(metric):
        return -math.inf
    return metric if mode == "max" else -metric


def worst_first(reports: Iterable[Report], mode: Mode = "max") -> list[Report]:
    """Return the reports from worst to best; equal ones by rank."""
    return sorted(reports, key=lambda report: (goodness(report.metric, mode), report.rank))


def admitted(reports: Iterable[Report], nan_policy: NanPolicy) -> list[Report]:
    """Return the reports that take part, by rank: `exclude` leaves non-finite ones out, `raise` refuses them."""
    ordered = sorted(reports, key=lambda report: report.rank)
    if nan_policy == "worst":
        return ordered
    finite = [report for report in ordered if math.isfinite(report.metric)]
    if nan_policy == "raise" and len(finite) < len(ordered):
        ranks = sorted({report.rank for report in ordered} - {report.rank for report in finite})
        raise UsageError(f"rank {ranks} reported a metric that is not finite, and nan_policy is 'raise'")
    return finite


def worst_count(size: int, ratio: float) -> int:
    """Return how many of `size` ranks a ratio replaces: at least 1 unless the ratio is 0, and never all.

    >>> [worst_count(n, 0.2) for n in (0, 1, 2, 5, 10, 1000)]
    [0, 0, 1, 1, 2, 200]
    """
    if size <= 1 or ratio <= 0:
        return 0
    return min(max(1, math.floor(size * ratio + 1e-9)), size - 1)


def compute_worst_ranks_by_ratio(metrics: Sequence[float], replacement_ratio: float) -> set[int]:
    """Return the ranks (positions in `metrics`) to replace; higher is better."""
    check_ratio(replacement_ratio)
    order = worst_first(Report(rank, float(metric)) for rank, metric in enumerate(metrics))
    return {report.rank for report in order[: worst_count(len(order), replacement_ratio)]}


def spare_the_best(replaced: Iterable[int], reports: Sequence[Report], mode: Mode = "max") -> frozenset[int]:
    """Return `replaced` without the best rank if it would leave nobody to donate."""
    chosen = frozenset(replaced)
    if reports and chosen.issuperset(report.rank for report in reports):
        return chosen - {worst_first(reports, mode)[-1].rank}
    return chosen


@dataclass(frozen=True, slots=True)
class WorstRatio:
    """Replace the worst `ratio` of those that reported; with a threshold, only once somebody falls behind it."""

    ratio: float = 0.2
    mode: Mode = "max"
    threshold: float | None = None

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_mode(self.mode)
        check_threshold(self.threshold)

    def __call__(self, reports: Sequence[Report]) -> frozenset[int]:
        if self.threshold is not None and not any(
            behind(r.metric, self.threshold, self.mode) for r in reports
        ):
            return frozenset()
        order = worst_first(reports, self.mode)
        return frozenset(report.rank for report in order[: worst_count(len(order), self.ratio)])


@dataclass(frozen=True, slots=True)
class Threshold:
    """Replace every rank that is behind `threshold`; an infinite threshold replaces none."""

    threshold: float
    mode: Mode = "max"

    def __post_init__(self) -> None:
        check_mode(self.mode)
        check_threshold(self.threshold)

    def __call__(self, reports: Sequence[Report]) -> frozenset[int]:
        chosen = {report.rank for report in reports if behind(report.metric, self.threshold, self.mode)}
        return spare_the_best(chosen, reports, self.mode)


@dataclass(frozen=True, slots=True)
class Expired:
    """Replace the ranks whose age has run out."""

    mode: Mode = "max"

    def __call__(self, reports: Sequence[Report]) -> frozenset[int]:
        return spare_the_best({report.rank for report in reports if report.expired}, reports, self.mode)


class Age:
    """One rank's life: it ends in the call at which its age has reached `max_age`, so it lasts max_age + 1 calls.

    `max_age` is drawn uniformly from `age_range`, both ends included, from the generator given.
    """

    def __init__(self, age_range: tuple[int, int], rng: np.random.Generator) -> None:
        self.age_range, self._rng = check_age_range(age_range), rng
        self.reset()

    def reset(self) -> None:
        """Begin a new life."""
        self.age = 0
        self.max_age = int(self._rng.integers(self.age_range[0], self.age_range[1] + 1))

    def tick(self) -> bool:
        """Count one call; return whether this life ends in it (it then stays ended until `reset`)."""
        if self.age >= self.max_age:
            return True
        self.age += 1
        return False


def behind(metric: float, threshold: float, mode: Mode = "max") -> bool:
    """Return whether a metric is worse than the threshold; non-finite is, unless the threshold switches all off."""
    if not math.isfinite(threshold):
        return False
    return goodness(metric, mode) < goodness(threshold, mode)


def check_ratio(ratio: float) -> float:
    """Return the ratio, or raise `ParameterError` if it is outside [0, 1]."""
    if not 0 <= ratio <= 1:
        raise ParameterError(f"replacement_ratio={ratio!r}: give a number from 0 to 1")
    return float(ratio)


def check_mode(mode: str) -> str:
    """Return the mode, or raise `ParameterError`."""
    if mode not in MODES:
        raise ParameterError(f"mode={mode!r}: choose 'max' (higher metrics are better) or 'min'")
    return mode


def check_nan_policy(nan_policy: str) -> str:
    """Return the policy, or raise `ParameterError`."""
    if nan_policy not in NAN_POLICIES:
        raise ParameterError(f"nan_policy={nan_policy!r}: choose one of {', '.join(NAN_POLICIES)}")
    return nan_policy


def check_threshold(threshold: float | None) -> float | None:
    """Return the threshold, or raise `ParameterError` if it is not a number."""
    if threshold is not None and math.isnan(threshold):
        raise ParameterError("threshold is NaN: give a number, infinity (never) or None (always)")
    return threshold


def check_age_range(age_range: tuple[int, int]) -> tuple[int, int]:
    """Return the range as two integers, or raise `ParameterError`."""
    low, high = (int(end) for end in age_range)
    if not 0 <= low <= high:
        raise ParameterError(f"age_range={age_range!r}: give (lowest, highest) with 0 <= lowest <= highest")
    return low, high
