"""Which reports to compare, where each rank tells its metric at its own times and nobody waits for anybody.

A metric means little beside one of another iteration: while training goes on, metrics rise or fall for all, and a rank
that held its newest against the others' older ones would find itself too good, or too bad. So each rank's line keeps
some of its reports, and a rank is judged at an iteration of its own: beside what the others reported at the same one,
or, where they are further apart than their lines are long, nearest to it.

This room knows lines of reports; it knows no window and no communicator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spawnsim.policies.selection import Report

NEVER = -1
WAIT = 4  # reports by which a rank may be behind to be waited for
EXTREME = 1e300  # a metric that is better, or worse, than any


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of the ranks that have written one, by rank.

    `iterations` and `metrics`, shape (ranks, reports), newest first; iteration `NEVER` where there is none yet. `busy`:
    being replaced. `alive`: whether the line has changed of late.
    """

    ranks: NDArray[np.int64]
    iterations: NDArray[np.int64]
    metrics: NDArray[np.float64]
    busy: NDArray[np.bool_]
    alive: NDArray[np.bool_]

    def of(self, which: NDArray[np.bool_]) -> Lines:
        """Return some of the lines."""
        return Lines(
            self.ranks[which],
            self.iterations[which],
            self.metrics[which],
            self.busy[which],
            self.alive[which],
        )

    def of_alive(self) -> Lines:
        """Return the lines that have changed of late."""
        return self.of(self.alive)

    def near(self, iteration: int) -> list[Report]:
        """Return each rank's report that is nearest to an iteration, by rank; the newer of two."""
        away = np.where(self.iterations == NEVER, np.iinfo(np.int64).max, np.abs(self.iterations - iteration))
        metrics = np.take_along_axis(self.metrics, away.argmin(axis=1)[:, None], axis=1)[:, 0]
        pairs = zip(self.ranks.tolist(), metrics.tolist(), strict=True)
        return [Report(rank, metric) for rank, metric in pairs]

    def shared(self) -> int:
        """Return the iteration that the most lines hold, the newest of several; `NEVER` if there is none."""
        found, counts = np.unique(self.iterations[self.iterations != NEVER], return_counts=True)
        return int(found[counts == counts.max()].max()) if found.size else NEVER

    def awaited(self, iteration: int, floor: int) -> NDArray[np.bool_]:
        """Return which ranks have come to `floor`, but not to `iteration` yet."""
        newest = self.iterations[:, 0]
        return (newest < iteration) & (newest >= floor)


class Rounds:
    """When a rank judges its reports: each once, in order, when no report that is still to come can change the verdict.

    It looks at the board half a period after each report, once: a look costs a round trip, and the wait for the next
    poll of the board's holder. A report whose verdict hangs on others' stays open until the next look, for `WAIT`
    reports at most; who is further behind is not waited for.
    """

    def __init__(self, period: int) -> None:
        self._half = max(1, period // 2)
        self._open: deque[int] = deque()
        self._made: deque[int] = deque(maxlen=2 * WAIT + 2)
        self._looked = True

    def reported(self, iteration: int, *, judged: bool) -> None:
        """Note a report; `judged` unless the weights that it tells of are gone already."""
        self._made.append(iteration)
        self._looked = not judged
        if judged:
            self._open.append(iteration)

    def close(self) -> None:
        """Judge no report that was made so far."""
        self._open.clear()

    def due(self, iteration: int, *, last: bool) -> bool:
        """Return whether to look at the board now; `last` if the next report is about to be made."""
        if self._looked or not self._open or self._open[-1] == iteration:
            return False
        return last or iteration - self._open[-1] >= self._half

    def judge(self, lines: Lines, replaces: Callable[[list[Report]], bool]) -> tuple[int, bool] | None:
        """Return the oldest open iteration and whether this rank is replaced, which closes it; None if it is too early.

        `replaces` says whether this rank is, beside given reports.
        """
        self._looked = True
        if not self._open:
            return None
        iteration, alive = self._open[0], lines.of_alive()
        late = alive.awaited(iteration, self._floor(iteration))
        if len(self._open) > WAIT:
            late[:] = False
        known, ranks = alive.of(~late).near(iteration), alive.ranks[late].tolist()
        cases = (
            {replaces(_joined(known, ranks, metric)) for metric in (-EXTREME, EXTREME)}
            if ranks
            else {replaces(known)}
        )
        if len(cases) > 1:
            return None
        return self._open.popleft(), cases.pop()

    def _floor(self, iteration: int) -> int:
        """Return the iteration of the report that this rank made `WAIT` reports earlier."""
        made = list(self._made)
        at = made.index(iteration) - WAIT
        return made[at] if at >= 0 else NEVER


def _joined(known: list[Report], ranks: list[int], metric: float) -> list[Report]:
    return sorted([*known, *(Report(rank, metric) for rank in ranks)], key=lambda report: report.rank)
