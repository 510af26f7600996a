"""Selection of the ranks to replace from their reports, and which reports may be compared.

Ranking is the same everywhere: non-finite metrics are worst, of equal metrics the lower rank is replaced first, counts
are relative to the given reports (the group), and at least one rank always remains as a donor. If ranks report
independently (`ReportTable`, `ReportRounds`), a rank is judged at one iteration, against the other ranks' reports of
the same or the nearest iteration. Metrics of all ranks rise or fall during training, so a rank that compared its
newest report with older reports would judge itself too good or too bad.

`Reports` holds a round's reports as columns, and is also a sequence of `Report` objects: with a million ranks, one
object per report would dominate the cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError, UsageError

Floats = NDArray[np.float64]
Ranks = NDArray[np.int64]
Mask = NDArray[np.bool_]
Mode = Literal["max", "min"]
NanPolicy = Literal["worst", "exclude", "raise"]
MODES: tuple[str, ...] = get_args(Mode)
NAN_POLICIES: tuple[str, ...] = get_args(NanPolicy)
REPLACEMENT_MODES: tuple[str, ...] = ("worst_ratio", "threshold", "age")


@dataclass(frozen=True, slots=True)
class Report:
    """The report of one rank: its metric, and whether its age has expired."""

    rank: int
    metric: float
    expired: bool = False


@dataclass(frozen=True, eq=False)
class Reports(Sequence[Report]):
    """The reports of a group, as columns by rank; iterate over it for `Report` objects.

    Attributes:
        ranks: the reporting ranks, ascending, int64 (reports,).
        metrics: metric of each rank, float64 (reports,).
        expired: whether each rank's age has expired, bool (reports,).
    """

    ranks: Ranks
    metrics: Floats
    expired: Mask

    @classmethod
    def of(cls, reports: Sequence[Report]) -> Reports:
        """Return reports in any order as columns.

        Args:
            reports: one report per rank.

        Returns:
            The same reports, sorted by rank; `Reports` are returned unchanged.
        """
        if isinstance(reports, cls):
            return reports
        rows = sorted((each.rank, each.metric, each.expired) for each in reports)
        ranks, metrics, expired = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(np.array(ranks, np.int64), np.array(metrics, np.float64), np.array(expired, np.bool_))

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [*self][place]
        return Report(int(self.ranks[place]), float(self.metrics[place]), bool(self.expired[place]))

    def __iter__(self) -> Iterator[Report]:
        return map(Report, self.ranks.tolist(), self.metrics.tolist(), self.expired.tolist())

    def where(self, chosen: Mask | Ranks) -> Reports:
        """Return some of the reports.

        Args:
            chosen: a mask, or indices.

        Returns:
            Their columns.
        """
        return Reports(self.ranks[chosen], self.metrics[chosen], self.expired[chosen])

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and highest finite metric; NaN if all are non-finite."""
        finite = np.isfinite(self.metrics)
        held = self.metrics if finite.all() else self.metrics[finite]
        return (float(held.min()), float(held.max())) if held.size else (math.nan, math.nan)


class Selection(Protocol):
    """Selects the ranks to replace; a plain function also works."""

    def __call__(self, reports: Sequence[Report], /) -> frozenset[int]:
        """Select ranks.

        Args:
            reports: reports of the participating ranks, by rank.

        Returns:
            The ranks to replace.
        """


class ColumnSelection(Selection):
    """A selection over columns, the base of all selections in this module."""

    __slots__ = ()

    def columns(self, metrics: Floats, expired: Mask) -> Mask:
        """Select ranks.

        Args:
            metrics: metrics of the participating ranks, by rank, float64 (ranks,).
            expired: whether each rank's age has expired, bool (ranks,).

        Returns:
            Whether to replace each rank, bool (ranks,).
        """
        raise NotImplementedError

    def __call__(self, reports: Sequence[Report]) -> frozenset[int]:
        given = Reports.of(reports)
        return frozenset(given.ranks[self.columns(given.metrics, given.expired)].tolist())


def goodness(metrics: Any, mode: Mode = "max") -> Any:
    """Return metrics with higher meaning better; minus infinity for non-finite metrics."""
    return np.where(np.isfinite(metrics), metrics if mode == "max" else np.negative(metrics), -np.inf)


def admitted(reports: Reports, nan_policy: NanPolicy) -> Reports:
    """Return the participating reports: `exclude` drops non-finite ones, `raise` raises `UsageError` for them."""
    if nan_policy == "worst" or (finite := np.isfinite(reports.metrics)).all():
        return reports
    if nan_policy == "raise":
        ranks = reports.ranks[~finite].tolist()
        raise UsageError(f"rank {ranks} reported a metric that is not finite, and nan_policy is 'raise'")
    return reports.where(finite)


def worst_count(size: int, ratio: float) -> int:
    """Return how many of `size` ranks a ratio replaces: at least 1 unless the ratio is 0, and never all of them.

    >>> [worst_count(n, 0.2) for n in (0, 1, 2, 5, 10, 1000)]
    [0, 0, 1, 1, 2, 200]
    """
    if size <= 1 or ratio <= 0:
        return 0
    # 1e-9 because a product such as 0.2 * 5 may be just below a whole number.
    return min(max(1, math.floor(size * ratio + 1e-9)), size - 1)


def worst_of(good: Floats, count: int) -> Mask:
    """Return a mask of the `count` places of least goodness; of equal ones the lowest places."""
    chosen = np.zeros(len(good), np.bool_)
    if count:
        # A partition and a scan for ties cost a tenth of a sort at a million ranks.
        last = np.partition(good, count - 1)[count - 1]
        chosen[:] = good < last
        chosen[np.flatnonzero(good == last)[: count - int(chosen.sum())]] = True
    return chosen


def with_one_left(chosen: Mask, metrics: Floats, mode: Mode) -> Mask:
    """Return `chosen` without the best place (the last of equals) if all places are chosen."""
    if chosen.size and chosen.all():
        chosen, good = chosen.copy(), goodness(metrics, mode)
        chosen[len(good) - 1 - int(good[::-1].argmax())] = False
    return chosen


def behind(metrics: Any, threshold: float, mode: Mode = "max") -> Any:
    """Return which metrics are worse than the threshold, as non-finite ones are; none if the threshold is infinite."""
    return (goodness(metrics, mode) < goodness(threshold, mode)) & math.isfinite(threshold)


@dataclass(frozen=True, slots=True)
class WorstRatio(ColumnSelection):
    """Replace the worst `ratio` of the ranks that reported.

    Args:
        ratio: share from 0 (replace none) to 1; above 0, at least one rank is replaced and one always remains.
        mode: "max" if higher metrics are better, else "min".
        threshold: if given, no rank is replaced unless some rank is worse than this.

    Raises:
        ParameterError: an argument is out of range.
    """

    ratio: float = 0.2
    mode: Mode = "max"
    threshold: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ParameterError(f"replacement_ratio={self.ratio!r}: give a number from 0 to 1")
        check_mode(self.mode)
        check_threshold(self.threshold)

    def columns(self, metrics: Floats, expired: Mask) -> Mask:
        if self.threshold is not None and not behind(metrics, self.threshold, self.mode).any():
            return np.zeros(len(metrics), np.bool_)
        return worst_of(goodness(metrics, self.mode), worst_count(len(metrics), self.ratio))


@dataclass(frozen=True, slots=True)
class Threshold(ColumnSelection):
    """Replace every rank that is worse than a threshold; if all are, the best rank stays.

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

    def columns(self, metrics: Floats, expired: Mask) -> Mask:
        return with_one_left(behind(metrics, self.threshold, self.mode), metrics, self.mode)


@dataclass(frozen=True, slots=True)
class Expired(ColumnSelection):
    """Replace the ranks whose age has expired.

    Args:
        mode: "max" if higher metrics are better, else "min": if all have expired, the best rank stays.
    """

    mode: Mode = "max"

    def columns(self, metrics: Floats, expired: Mask) -> Mask:
        return with_one_left(expired, metrics, self.mode)


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
    """Counts the calls of one rank since its last replacement; the rank expires when the count has reached `max_age`.

    So it is replaced every max_age + 1 calls. `max_age` is drawn uniformly from `age_range`, both ends included.
    """

    def __init__(self, age_range: tuple[int, int], rng: np.random.Generator) -> None:
        self.age_range, self._rng = check_age_range(age_range), rng
        self.reset()

    def reset(self) -> None:
        """Restart at 0, and draw the next `max_age`."""
        self.age = 0
        self.max_age = int(self._rng.integers(self.age_range[0], self.age_range[1] + 1))

    def tick(self) -> bool:
        """Count one call; return whether the rank is to be replaced in it (and in all later calls until `reset`)."""
        if self.age >= self.max_age:
            return True
        self.age += 1
        return False


def check_choice(name: str, value: str, choices: Sequence[str]) -> str:
    """Return the value of a parameter, or raise `ParameterError` if it is not among the choices."""
    if value not in choices:
        raise ParameterError(f"{name}={value!r}: choose one of {', '.join(choices)}")
    return value


def check_mode(mode: str) -> None:
    """Raise `ParameterError` if a mode is unknown."""
    if mode not in MODES:
        raise ParameterError(f"mode={mode!r}: choose 'max' (higher metrics are better) or 'min'")


def check_threshold(threshold: float | None) -> None:
    """Raise `ParameterError` if a threshold is not a number."""
    if threshold is not None and math.isnan(threshold):
        raise ParameterError("threshold is NaN: give a number, infinity (never) or None (always)")


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
MOST_REPORTS_BEHIND = 4  # ranks that are more reports behind are not awaited
EXTREME = 1e300  # a metric better, or its negative worse, than any other


@dataclass(frozen=True, slots=True)
class ReportTable:
    """The report lines that ranks have written, by rank.

    `iterations` and `metrics` have the shape (ranks, reports), newest first; empty places have the iteration `NEVER`.
    `busy`: whether the rank is being replaced. `alive`: whether its line has changed recently, or the rank has
    `finished`.
    """

    ranks: Ranks
    iterations: NDArray[np.int64]
    metrics: Floats
    busy: Mask
    alive: Mask
    finished: Mask

    def of(self, which: Mask) -> ReportTable:
        return ReportTable(*(getattr(self, each.name)[which] for each in fields(self)))

    def of_alive(self) -> ReportTable:
        return self.of(self.alive)

    def near(self, iteration: int) -> Reports:
        """Return each rank's report nearest to an iteration; of two, the newer one."""
        # Empty places are infinitely far away: their iteration −1 would be close to 0.
        away = np.where(self.iterations == NEVER, np.iinfo(np.int64).max, np.abs(self.iterations - iteration))
        metrics = np.take_along_axis(self.metrics, away.argmin(axis=1)[:, None], axis=1)[:, 0]
        return Reports(self.ranks, metrics, np.zeros(len(metrics), np.bool_))

    def shared(self) -> int:
        """Return the iteration that most lines contain, the newest of several; `NEVER` without reports."""
        found, counts = np.unique(self.iterations[self.iterations != NEVER], return_counts=True)
        return int(found[counts == counts.max()].max()) if found.size else NEVER

    def awaited(self, iteration: int, floor: int) -> Mask:
        """Return which ranks have reached `floor`, but not `iteration` yet, and still train."""
        newest = self.iterations[:, 0]
        return (newest < iteration) & (newest >= floor) & ~self.finished


class ReportRounds:
    """When a rank judges its reports: each once, in order, when no outstanding report can change the verdict.

    The rank reads the board once per report, half a period later: a read costs a round trip, and the wait for the next
    poll of the board's holder. A report whose verdict depends on outstanding reports stays open until the next read,
    for at most `MOST_REPORTS_BEHIND` reports: ranks that are further behind are not awaited.
    """

    def __init__(self, period: int) -> None:
        self._half = max(1, period // 2)
        self._open: tuple[int, ...] = ()
        self._made: tuple[int, ...] = ()
        self._was_read = True

    def reported(self, iteration: int, *, judged: bool) -> None:
        """Record a report; `judged`: whether it gets a verdict, not if the weights that it describes are replaced."""
        self._made = (*self._made[-(2 * MOST_REPORTS_BEHIND + 1) :], iteration)
        self._was_read = not judged
        if judged:
            self._open = (*self._open, iteration)

    @property
    def open(self) -> bool:
        return bool(self._open)

    def close(self) -> None:
        self._open = ()

    def due(self, iteration: int, *, last: bool) -> bool:
        """Return whether to read the board now; `last` if the next report is about to be made."""
        # One read per report: every read costs a round trip to the board's holder.
        if self._was_read or not self._open or self._open[-1] == iteration:
            return False
        return last or iteration - self._open[-1] >= self._half

    def judge(self, lines: ReportTable, replaces: Callable[[Reports], bool]) -> tuple[int, bool] | None:
        """Close the oldest open iteration, and return it and whether this rank is replaced; None if it is too early.

        `replaces` returns whether given reports lead to the replacement of this rank.
        """
        self._was_read = True
        if not self._open:
            return None
        iteration, alive = self._open[0], lines.of_alive()
        behind_by_most = self._made.index(iteration) - MOST_REPORTS_BEHIND
        late = alive.awaited(iteration, self._made[behind_by_most] if behind_by_most >= 0 else NEVER)
        # Beyond that limit the oldest report is judged without missing reports, or one slow rank would delay all.
        if len(self._open) > MOST_REPORTS_BEHIND:
            late[:] = False
        given = alive.near(iteration)
        # The verdict is known early if no outstanding report can change it. The two extremes suffice: for this rank, a
        # selection that compares metrics can only become stricter as the metrics of other ranks improve.
        cases = {
            replaces(Reports(given.ranks, np.where(late, metric, given.metrics), given.expired))
            for metric in ((-EXTREME, EXTREME) if late.any() else (0.0,))
        }
        if len(cases) > 1:
            return None
        self._open = self._open[1:]
        return iteration, cases.pop()
