"""Who: which ranks are to be replaced, from what they reported, and which reports may be compared.

Ranking is the same everywhere: non-finite metrics are worst, ties go to the lower rank first, counts come from the
reports given (the group), and at least one rank is always left to donate. Where ranks report at times of their own
(`ReportTable`, `ReportRounds`), a rank is judged at one iteration, beside what the others reported at the same one or
nearest to it: metrics rise or fall for all while training goes on, and a rank that compared its newest report with
older ones of the others would find itself too good, or too bad.

The named selections exist twice, side by side: of reports, and (`columns`) of all ranks' metrics as one array, for runs
of a million ranks in which an object a report would be the cost. Both choose the same ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError, UsageError

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Mode = Literal["max", "min"]
NanPolicy = Literal["worst", "exclude", "raise"]
MODES: tuple[str, ...] = get_args(Mode)
NAN_POLICIES: tuple[str, ...] = get_args(NanPolicy)
REPLACEMENT_MODES: tuple[str, ...] = ("worst_ratio", "threshold", "age")


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank says of itself: its metric, and whether its age has run out."""

    rank: int
    metric: float
    expired: bool = False


class Selection(Protocol):
    """Says which ranks are to be replaced; a function will do."""

    def __call__(self, reports: Sequence[Report], /) -> frozenset[int]:
        """Select ranks.

        Args:
            reports: of the ranks that take part, by rank.

        Returns:
            The ranks to replace.
        """


def goodness(metric: float, mode: Mode = "max") -> float:
    """Return the metric so that higher is better; minus infinity for anything not finite."""
    if not math.isfinite(metric):
        return -math.inf
    return metric if mode == "max" else -metric


def goodness_of(metrics: Floats, mode: Mode = "max") -> Floats:
    """Return `goodness` of each metric of an array."""
    return np.where(np.isfinite(metrics), metrics if mode == "max" else -metrics, -np.inf)


def worst_first(reports: Iterable[Report], mode: Mode = "max") -> list[Report]:
    """Return the reports from worst to best; equal ones by rank."""
    # The rank breaks ties, so that all who decide on the same reports decide alike.
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


def metric_range(reports: Iterable[Report]) -> tuple[float, float]:
    """Return the lowest and highest finite metric; NaN if there is none."""
    finite = [report.metric for report in reports if math.isfinite(report.metric)]
    return (min(finite), max(finite)) if finite else (math.nan, math.nan)


def worst_count(size: int, ratio: float) -> int:
    """Return how many of `size` ranks a ratio replaces: at least 1 unless the ratio is 0, and never all.

    >>> [worst_count(n, 0.2) for n in (0, 1, 2, 5, 10, 1000)]
    [0, 0, 1, 1, 2, 200]
    """
    if size <= 1 or ratio <= 0:
        return 0
    # 1e-9 because 0.2 * 5 and its like may be just below a whole number.
    return min(max(1, math.floor(size * ratio + 1e-9)), size - 1)


def compute_worst_ranks_by_ratio(metrics: Sequence[float], replacement_ratio: float) -> set[int]:
    """Return the ranks (positions in `metrics`) to replace; higher is better."""
    check_ratio(replacement_ratio)
    order = worst_first(Report(rank, float(metric)) for rank, metric in enumerate(metrics))
    return {report.rank for report in order[: worst_count(len(order), replacement_ratio)]}


def spare_the_best(replaced: Iterable[int], reports: Sequence[Report], mode: Mode = "max") -> frozenset[int]:
    """Return `replaced` without the best rank if it would leave no donor."""
    chosen = frozenset(replaced)
    if reports and chosen.issuperset(report.rank for report in reports):
        return chosen - {worst_first(reports, mode)[-1].rank}
    return chosen


def worst_of(good: Floats, count: int) -> Mask:
    """Return which `count` places hold the least goodness; of equal ones the lowest places."""
    chosen = np.zeros(len(good), np.bool_)
    if count:
        # One partition and a look at the ties, not a sort: a tenth of its price at a million.
        last = np.partition(good, count - 1)[count - 1]
        chosen[:] = good < last
        chosen[np.flatnonzero(good == last)[: count - int(chosen.sum())]] = True
    return chosen


def with_one_left(chosen: Mask, good: Floats) -> Mask:
    """Return `chosen` without the best place (the last of equals) if it would leave none."""
    if chosen.size and chosen.all():
        chosen = chosen.copy()
        chosen[len(good) - 1 - int(good[::-1].argmax())] = False
    return chosen


@dataclass(frozen=True, slots=True)
class WorstRatio(Selection):
    """Replace the worst `ratio` of the ranks that reported.

    Args:
        ratio: share from 0 (replace none) to 1; at least one rank is replaced if it is above 0, and one is always left.
        mode: "max" if higher metrics are better, else "min".
        threshold: if given, no rank is replaced unless one of them is worse than this.

    Raises:
        ParameterError: an argument is out of range.
    """

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

    def columns(self, metrics: Floats, expired: Mask) -> Mask:
        """Select by columns.

        Args:
            metrics: of the ranks that take part, by rank, float64 (ranks,).
            expired: whose age has run out, bool (ranks,).

        Returns:
            Which of them to replace, bool (ranks,).
        """
        good = goodness_of(metrics, self.mode)
        if self.threshold is not None and not _behind(good, self.threshold, self.mode).any():
            return np.zeros(len(good), np.bool_)
        return worst_of(good, worst_count(len(good), self.ratio))


@dataclass(frozen=True, slots=True)
class Threshold(Selection):
    """Replace every rank that is behind a threshold; but the best rank stays if all are.

    Args:
        threshold: a metric; infinity replaces none.
        mode: "max" if higher metrics are better, else "min".

    Raises:
        ParameterError: `threshold` is NaN, or `mode` is unknown.
    """

    threshold: float
    mode: Mode = "max"

    def __post_init__(self) -> None:
        check_mode(self.mode)
        check_threshold(self.threshold)

    def __call__(self, reports: Sequence[Report]) -> frozenset[int]:
        chosen = {report.rank for report in reports if behind(report.metric, self.threshold, self.mode)}
        return spare_the_best(chosen, reports, self.mode)

    def columns(self, metrics: Floats, expired: Mask) -> Mask:
        """Select by columns: see `WorstRatio.columns`.

        Args:
            metrics: of the ranks that take part, by rank, float64 (ranks,).
            expired: whose age has run out, bool (ranks,).

        Returns:
            Which of them to replace, bool (ranks,).
        """
        good = goodness_of(metrics, self.mode)
        return with_one_left(_behind(good, self.threshold, self.mode), good)


@dataclass(frozen=True, slots=True)
class Expired(Selection):
    """Replace the ranks whose age has run out.

    Args:
        mode: "max" if higher metrics are better, else "min": if all have run out, the best rank stays.
    """

    mode: Mode = "max"

    def __call__(self, reports: Sequence[Report]) -> frozenset[int]:
        return spare_the_best({report.rank for report in reports if report.expired}, reports, self.mode)

    def columns(self, metrics: Floats, expired: Mask) -> Mask:
        """Select by columns: see `WorstRatio.columns`.

        Args:
            metrics: of the ranks that take part, by rank, float64 (ranks,).
            expired: whose age has run out, bool (ranks,).

        Returns:
            Which of them to replace, bool (ranks,).
        """
        return with_one_left(expired, goodness_of(metrics, self.mode))


def selection_for(replacement_mode: str, *, ratio: float, threshold: float | None, mode: Mode) -> Selection:
    """Return the selection that a replacement mode names."""
    check_choice("replacement_mode", replacement_mode, REPLACEMENT_MODES)
    if replacement_mode == "age":
        return Expired(mode)
    if replacement_mode == "worst_ratio":
        return WorstRatio(ratio, mode, threshold)
    if threshold is None:
        raise ParameterError("replacement_mode='threshold' needs a threshold")
    return Threshold(threshold, mode)


class Age:
    """Calls of one rank since it was last replaced: it is replaced in the call at which they have reached `max_age`.

    So it is replaced every max_age + 1 calls. `max_age` is drawn uniformly from `age_range`, both ends included.
    """

    def __init__(self, age_range: tuple[int, int], rng: np.random.Generator) -> None:
        self.age_range, self._rng = check_age_range(age_range), rng
        self.reset()

    def reset(self) -> None:
        """Start at 0 again, and draw the next `max_age`."""
        self.age = 0
        self.max_age = int(self._rng.integers(self.age_range[0], self.age_range[1] + 1))

    def tick(self) -> bool:
        """Count one call; return whether the rank is to be replaced in it (and in all later ones until `reset`)."""
        if self.age >= self.max_age:
            return True
        self.age += 1
        return False


def behind(metric: float, threshold: float, mode: Mode = "max") -> bool:
    """Return whether a metric is worse than the threshold; non-finite is, unless the threshold switches all off."""
    if not math.isfinite(threshold):
        return False
    return goodness(metric, mode) < goodness(threshold, mode)


def _behind(good: Floats, threshold: float, mode: Mode) -> Mask:
    """Return `behind` of each goodness."""
    if not math.isfinite(threshold):
        return np.zeros(len(good), np.bool_)
    return good < goodness(threshold, mode)


def check_ratio(ratio: float) -> float:
    """Return the ratio, or raise `ParameterError` if it is outside [0, 1]."""
    if not 0 <= ratio <= 1:
        raise ParameterError(f"replacement_ratio={ratio!r}: give a number from 0 to 1")
    return float(ratio)


def check_choice(name: str, value: str, choices: Sequence[str]) -> str:
    """Return the value of a parameter, or raise `ParameterError` if it is not among the choices."""
    if value not in choices:
        raise ParameterError(f"{name}={value!r}: choose one of {', '.join(choices)}")
    return value


def check_mode(mode: str) -> str:
    """Return the mode, or raise `ParameterError`."""
    if mode not in MODES:
        raise ParameterError(f"mode={mode!r}: choose 'max' (higher metrics are better) or 'min'")
    return mode


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


def check_cooldown(cooldown: int) -> int:
    """Return the cooldown, or raise `ParameterError`."""
    if not cooldown >= 0:
        raise ParameterError(f"cooldown={cooldown!r}: give a number of iterations of at least 0")
    return int(cooldown)


NEVER = -1
MOST_REPORTS_BEHIND = 4  # reports by which a rank may be behind to be waited for
EXTREME = 1e300  # a metric that is better, or worse, than any


@dataclass(frozen=True, slots=True)
class ReportTable:
    """The lines of the ranks that have written one, by rank.

    `iterations` and `metrics`, shape (ranks, reports), newest first; iteration `NEVER` where there is none yet. `busy`:
    being replaced. `alive`: whether the line has changed of late, or will not any more since the rank has `finished`.
    """

    ranks: NDArray[np.int64]
    iterations: NDArray[np.int64]
    metrics: NDArray[np.float64]
    busy: NDArray[np.bool_]
    alive: NDArray[np.bool_]
    finished: NDArray[np.bool_]

    def of(self, which: NDArray[np.bool_]) -> ReportTable:
        """Return some of the lines."""
        return ReportTable(
            self.ranks[which],
            self.iterations[which],
            self.metrics[which],
            self.busy[which],
            self.alive[which],
            self.finished[which],
        )

    def of_alive(self) -> ReportTable:
        """Return the lines of the ranks that are alive."""
        return self.of(self.alive)

    def near(self, iteration: int) -> list[Report]:
        """Return each rank's report that is nearest to an iteration, by rank; the newer of two."""
        # Empty places are infinitely far, not at iteration −1, which lies near to 0.
        away = np.where(self.iterations == NEVER, np.iinfo(np.int64).max, np.abs(self.iterations - iteration))
        metrics = np.take_along_axis(self.metrics, away.argmin(axis=1)[:, None], axis=1)[:, 0]
        pairs = zip(self.ranks.tolist(), metrics.tolist(), strict=True)
        return [Report(rank, metric) for rank, metric in pairs]

    def shared(self) -> int:
        """Return the iteration that the most lines hold, the newest of several; `NEVER` if there is none."""
        found, counts = np.unique(self.iterations[self.iterations != NEVER], return_counts=True)
        return int(found[counts == counts.max()].max()) if found.size else NEVER

    def awaited(self, iteration: int, floor: int) -> NDArray[np.bool_]:
        """Return which ranks have come to `floor`, but not to `iteration` yet, and still train."""
        newest = self.iterations[:, 0]
        return (newest < iteration) & (newest >= floor) & ~self.finished


class ReportRounds:
    """When a rank judges its reports: each once, in order, when no report that is still to come can change the verdict.

    It looks at the board half a period after each report, once: a look costs a round trip, and the wait for the next
    poll of the board's holder. A report whose verdict hangs on others' stays open until the next look, for
    `MOST_REPORTS_BEHIND` reports at most: ranks that are further behind are not waited for.
    """

    def __init__(self, period: int) -> None:
        self._half = max(1, period // 2)
        self._open: tuple[int, ...] = ()
        self._made: tuple[int, ...] = ()
        self._looked = True

    def reported(self, iteration: int, *, judged: bool) -> None:
        """Note a report; `judged` unless the weights that it tells of are gone already."""
        self._made = (*self._made[-(2 * MOST_REPORTS_BEHIND + 1) :], iteration)
        self._looked = not judged
        if judged:
            self._open = (*self._open, iteration)

    @property
    def open(self) -> bool:
        """Whether a report is still to be judged."""
        return bool(self._open)

    def close(self) -> None:
        """Judge no report that was made so far."""
        self._open = ()

    def due(self, iteration: int, *, last: bool) -> bool:
        """Return whether to look at the board now; `last` if the next report is about to be made."""
        # One look for each report: every look costs a round trip to the board's holder.
        if self._looked or not self._open or self._open[-1] == iteration:
            return False
        return last or iteration - self._open[-1] >= self._half

    def judge(self, lines: ReportTable, replaces: Callable[[list[Report]], bool]) -> tuple[int, bool] | None:
        """Return the oldest open iteration and whether this rank is replaced, which closes it; None if it is too early.

        `replaces` says whether this rank is, beside given reports.
        """
        self._looked = True
        if not self._open:
            return None
        iteration, alive = self._open[0], lines.of_alive()
        late = alive.awaited(iteration, self._floor(iteration))
        # Beyond that the oldest report is judged with what is there, or one slow rank would hold up all judgements.
        if len(self._open) > MOST_REPORTS_BEHIND:
            late[:] = False
        known, ranks = alive.of(~late).near(iteration), alive.ranks[late].tolist()
        # The verdict is known early where it is the same however the reports that are still to come turn out. The two
        # extremes are enough: for this rank a selection that compares metrics only gets stricter as others improve.
        extremes = (-EXTREME, EXTREME) if ranks else (0.0,)
        cases = {replaces(_with_reports(known, ranks, metric)) for metric in extremes}
        if len(cases) > 1:
            return None
        self._open = self._open[1:]
        return iteration, cases.pop()

    def _floor(self, iteration: int) -> int:
        """Return the iteration of the report that this rank made `MOST_REPORTS_BEHIND` reports earlier."""
        at = self._made.index(iteration) - MOST_REPORTS_BEHIND
        return self._made[at] if at >= 0 else NEVER


def _with_reports(known: list[Report], ranks: list[int], metric: float) -> list[Report]:
    return sorted([*known, *(Report(rank, metric) for rank in ranks)], key=lambda report: report.rank)
