"""Who: which ranks are to be replaced, from what they reported, and which reports may be compared.

Ranking is the same everywhere: non-finite metrics are worst, ties go to the lower rank first, counts come from the
reports given (the group), and at least one rank is always left to donate. Where ranks report at times of their own
(`ReportTable`, `ReportRounds`), a rank is judged at one iteration, beside the others' reports of the same one or of the
nearest: metrics rise or fall for all while training goes on, and a rank that compared its newest report with older ones
of the others would find itself too good, or too bad.

`Reports` holds a round's reports as columns, and is a sequence of `Report` for those who want objects: of a million
ranks, an object a report would be the cost.
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
    """What one rank says of itself: its metric, and whether its age has run out."""

    rank: int
    metric: float
    expired: bool = False


@dataclass(frozen=True, eq=False)
class Reports(Sequence[Report]):
    """The reports of a group, as columns by rank; iterate over it for `Report` objects.

    Attributes:
        ranks: rising, int64 (reports,).
        metrics: how good each rank is, float64 (reports,).
        expired: whose age has run out, bool (reports,).
    """

    ranks: Ranks
    metrics: Floats
    expired: Mask

    @classmethod
    def of(cls, reports: Sequence[Report]) -> Reports:
        """Return reports in any order as columns.

        Args:
            reports: one of each rank.

        Returns:
            The same by rank; columns as they are.
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
            chosen: a mask, or places.

        Returns:
            Their columns.
        """
        return Reports(self.ranks[chosen], self.metrics[chosen], self.expired[chosen])

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and highest finite metric; NaN if there is none."""
        finite = np.isfinite(self.metrics)
        held = self.metrics if finite.all() else self.metrics[finite]
        return (float(held.min()), float(held.max())) if held.size else (math.nan, math.nan)


class Selection(Protocol):
    """Says which ranks are to be replaced; a function will do."""

    def __call__(self, reports: Sequence[Report], /) -> frozenset[int]:
        """Select ranks.

        Args:
            reports: of the ranks that take part, by rank.

        Returns:
            The ranks to replace.
        """


class ColumnSelection(Selection):
    """A selection over columns; those of this module are."""

    __slots__ = ()

    def columns(self, metrics: Floats, expired: Mask) -> Mask:
        """Select ranks.

        Args:
            metrics: of the ranks that take part, by rank, float64 (ranks,).
            expired: whose age has run out, bool (ranks,).

        Returns:
            Which of them to replace, bool (ranks,).
        """
        raise NotImplementedError

    def __call__(self, reports: Sequence[Report]) -> frozenset[int]:
        given = Reports.of(reports)
        return frozenset(given.ranks[self.columns(given.metrics, given.expired)].tolist())


def goodness(metrics: Any, mode: Mode = "max") -> Any:
    """Return metrics so that higher is better; minus infinity for anything not finite."""
    return np.where(np.isfinite(metrics), metrics if mode == "max" else np.negative(metrics), -np.inf)


def admitted(reports: Reports, nan_policy: NanPolicy) -> Reports:
    """Return the reports that take part: `exclude` leaves non-finite ones out, `raise` refuses them."""
    if nan_policy == "worst" or (finite := np.isfinite(reports.metrics)).all():
        return reports
    if nan_policy == "raise":
        ranks = reports.ranks[~finite].tolist()
        raise UsageError(f"rank {ranks} reported a metric that is not finite, and nan_policy is 'raise'")
    return reports.where(finite)


def worst_count(size: int, ratio: float) -> int:
    """Return how many of `size` ranks a ratio replaces: at least 1 unless the ratio is 0, and never all.

    >>> [worst_count(n, 0.2) for n in (0, 1, 2, 5, 10, 1000)]
    [0, 0, 1, 1, 2, 200]
    """
    if size <= 1 or ratio <= 0:
        return 0
    # 1e-9 because 0.2 * 5 and its like may be just below a whole number.
    return min(max(1, math.floor(size * ratio + 1e-9)), size - 1)


def worst_of(good: Floats, count: int) -> Mask:
    """Return which `count` places hold the least goodness; of equal ones the lowest places."""
    chosen = np.zeros(len(good), np.bool_)
    if count:
        # One partition and a look at the ties, not a sort: a tenth of its price at a million.
        last = np.partition(good, count - 1)[count - 1]
        chosen[:] = good < last
        chosen[np.flatnonzero(good == last)[: count - int(chosen.sum())]] = True
    return chosen


def with_one_left(chosen: Mask, metrics: Floats, mode: Mode) -> Mask:
    """Return `chosen` without the best place (the last of equals) if it would leave none."""
    if chosen.size and chosen.all():
        chosen, good = chosen.copy(), goodness(metrics, mode)
        chosen[len(good) - 1 - int(good[::-1].argmax())] = False
    return chosen


def behind(metrics: Any, threshold: float, mode: Mode = "max") -> Any:
    """Return which metrics are worse than the threshold; non-finite are, unless the threshold switches all off."""
    return (goodness(metrics, mode) < goodness(threshold, mode)) & math.isfinite(threshold)


@dataclass(frozen=True, slots=True)
class WorstRatio(ColumnSelection):
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

    def columns(self, metrics: Floats, expired: Mask) -> Mask:
        return with_one_left(behind(metrics, self.threshold, self.mode), metrics, self.mode)


@dataclass(frozen=True, slots=True)
class Expired(ColumnSelection):
    """Replace the ranks whose age has run out.

    Args:
        mode: "max" if higher metrics are better, else "min": if all have run out, the best rank stays.
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
MOST_REPORTS_BEHIND = 4  # reports by which a rank may be behind to be waited for
EXTREME = 1e300  # a metric that is better, or worse, than any


@dataclass(frozen=True, slots=True)
class ReportTable:
    """The lines of the ranks that have written one, by rank.

    `iterations` and `metrics`, shape (ranks, reports), newest first; iteration `NEVER` where there is none yet. `busy`:
    being replaced. `alive`: whether the line has changed of late, or will not any more since the rank has `finished`.
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
        """Return each rank's report that is nearest to an iteration; the newer of two."""
        # Empty places are infinitely far, not at iteration −1, which lies near to 0.
        away = np.where(self.iterations == NEVER, np.iinfo(np.int64).max, np.abs(self.iterations - iteration))
        metrics = np.take_along_axis(self.metrics, away.argmin(axis=1)[:, None], axis=1)[:, 0]
        return Reports(self.ranks, metrics, np.zeros(len(metrics), np.bool_))

    def shared(self) -> int:
        """Return the iteration that the most lines hold, the newest of several; `NEVER` if there is none."""
        found, counts = np.unique(self.iterations[self.iterations != NEVER], return_counts=True)
        return int(found[counts == counts.max()].max()) if found.size else NEVER

    def awaited(self, iteration: int, floor: int) -> Mask:
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
        """Note a report; `judged` unless the weights that it describes are gone already."""
        self._made = (*self._made[-(2 * MOST_REPORTS_BEHIND + 1) :], iteration)
        self._looked = not judged
        if judged:
            self._open = (*self._open, iteration)

    @property
    def open(self) -> bool:
        return bool(self._open)

    def close(self) -> None:
        self._open = ()

    def due(self, iteration: int, *, last: bool) -> bool:
        """Return whether to look at the board now; `last` if the next report is about to be made."""
        # One look for each report: every look costs a round trip to the board's holder.
        if self._looked or not self._open or self._open[-1] == iteration:
            return False
        return last or iteration - self._open[-1] >= self._half

    def judge(self, lines: ReportTable, replaces: Callable[[Reports], bool]) -> tuple[int, bool] | None:
        """Return the oldest open iteration and whether this rank is replaced, which closes it; None if it is too early.

        `replaces` says whether this rank is, beside given reports.
        """
        self._looked = True
        if not self._open:
            return None
        iteration, alive = self._open[0], lines.of_alive()
        behind_by_most = self._made.index(iteration) - MOST_REPORTS_BEHIND
        late = alive.awaited(iteration, self._made[behind_by_most] if behind_by_most >= 0 else NEVER)
        # Beyond that the oldest report is judged with those that are there, or one slow rank would hold all up.
        if len(self._open) > MOST_REPORTS_BEHIND:
            late[:] = False
        given = alive.near(iteration)
        # The verdict is known early where it is the same however the reports that are still to come turn out. The two
        # extremes are enough: for this rank a selection that compares metrics only gets stricter as others improve.
        cases = {
            replaces(Reports(given.ranks, np.where(late, metric, given.metrics), given.expired))
            for metric in ((-EXTREME, EXTREME) if late.any() else (0.0,))
        }
        if len(cases) > 1:
            return None
        self._open = self._open[1:]
        return iteration, cases.pop()
