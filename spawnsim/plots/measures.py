"""One number of a run: what it has come to, or how long it took to get somewhere.

| measure | what it is |
|---|---|
| `accuracy`, `final:accuracy` | each rank's last value of a recorded column; its median over ranks |
| `highest:accuracy`, `lowest:loss` | the highest, or lowest, that this median over ranks was at any time |
| `time_to:accuracy>0.8` | (virtual) seconds until half of the ranks stand above 0.8; infinite if never |
| `iterations_to:loss<0.1` | likewise, the iteration |
| `virtual_seconds` (of real ranks `run_seconds`), `bytes`, `messages`, `replacements`, … | a total of the run |

`KIND.FIELD` in the place of a column is a number that events of a kind tell: `final:consensus.accuracy`, of the mean of
all ranks' models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.plots.curves import Curve, curve, of_events, since_start
from spawnsim.plots.experiments import Recorded
from spawnsim.plots.series import Floats, column, numbers, spread_at_end
from spawnsim.run.result import SECONDS, TOTALS, end_s

KINDS = ("final", "highest", "lowest", "time_to", "iterations_to")
LESS = re.compile(r"loss|error|wait|distance|_s$|seconds|bytes|messages|lowest")  # of these, less is better
UNITS = {
    "virtual_seconds": "virtual time (s)",
    "run_seconds": "time (s)",
    "wall_seconds": "seconds on this machine",
    "bytes": "bytes sent",
}
TAKEN = {"time_to": "time (s)", "iterations_to": "iterations"}
WORDS = {"final": "{} at the end", "highest": "highest {}", "lowest": "lowest {}"}
_TARGET = re.compile(r"(.+?)\s*(>=|<=|>|<)\s*([-+.\deE]+)")


@dataclass(frozen=True)
class Measure:
    """A measure as it was written, and what it means.

    Attributes:
        text: as it was written.
        kind: one of `KINDS`, or "total".
        name: the column, the kind and field of events, or the total.
        above: whether a target is reached from below.
        target: of "time_to" and "iterations_to".
    """

    text: str
    kind: str
    name: str
    above: bool = True
    target: float = float("nan")

    @classmethod
    def of(cls, text: str) -> Measure:
        """Read a measure.

        Raises:
            ParameterError: it is none.
        """
        kind, colon, rest = text.partition(":")
        if not colon:
            if re.search("[<>]", text):
                raise ParameterError(f"{text!r}: what of it? Write time_to:{text} or iterations_to:{text}")
            return cls(text, "total" if text in (*TOTALS, *SECONDS) else "final", text)
        if kind not in KINDS:
            raise ParameterError(f"{text!r} is no measure: it begins with one of {', '.join(KINDS)}")
        if not kind.endswith("_to"):
            return cls(text, kind, rest)
        found = _TARGET.fullmatch(rest)
        try:
            name, sign, target = found.groups() if found else ("", "", "")
            return cls(text, kind, name, sign.startswith(">"), float(target))
        except ValueError:
            # An unquoted > makes a shell write to a file, and leaves the rest.
            raise ParameterError(
                f"{text!r} has no target: write '{kind}:accuracy>0.8', in quotes, or the shell takes the > for its own"
            ) from None

    @property
    def needs_rows(self) -> bool:
        """Whether a run's rows or events must be read."""
        return self.kind != "total"

    @property
    def less_is_better(self) -> bool:
        """Whether less of it is better, by its name: times, losses and what is sent."""
        return self.kind.endswith("_to") or bool(LESS.search(self.text))

    @property
    def unit(self) -> str:
        """What an axis says below a title that is `label`: of how long something takes, what it is counted in."""
        return TAKEN.get(self.kind) or self.label

    @property
    def label(self) -> str:
        """What a title or an axis says."""
        name = self.name.replace("_", " ")
        if "." in name:
            kind, _, name = name.partition(".")
            name = f"{name} of the mean model" if kind == "consensus" else f"{name} of {kind}"
        if self.kind == "total":
            return UNITS.get(self.name, name)
        if not self.kind.endswith("_to"):
            return WORDS[self.kind].format(name)
        return f"{TAKEN[self.kind]} until {name} is {'above' if self.above else 'below'} {self.target:g}"

    def value(self, run: Recorded | None, totals: Mapping[str, Any]) -> float:
        """Work it out.

        Args:
            run: the run; None where `needs_rows` is false.
            totals: the run's.

        Returns:
            The number; infinite where a target is never reached, NaN where a total is not known.

        Raises:
            ParameterError: the run has no such column or event.
        """
        if run is None or self.kind == "total":
            # Virtual and real ranks may share a figure.
            told = end_s(totals) if self.name in SECONDS else totals.get(self.name)
            return float("nan") if told is None else float(told)
        if "." in self.name and self.name not in run.table:
            told = of_events(run, self.name, "iteration" if self.kind == "iterations_to" else "time_s")
            return self._of_one(told)
        if self.kind == "final":
            return spread_at_end(run.table, self.name)[1]
        if self.kind in ("highest", "lowest"):
            median = curve(run.table, self.name).median
            return float(median.max() if self.kind == "highest" else median.min())
        return self._reached(run)

    def _passes(self, values: Floats) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return values >= self.target if self.above else values <= self.target

    def _reached(self, run: Recorded) -> float:
        """Return when half of the ranks stand at the target: exact, not on the points of a curve."""
        table = since_start(run)
        values, rank = numbers(table, self.name), np.asarray(column(table, "rank"))
        at = numbers(table, "time_s" if self.kind == "time_to" else "iteration")
        known = np.isfinite(at) & ~np.isnan(values)
        values, rank, at = values[known], rank[known], at[known]
        if not len(values):
            raise ParameterError(f"column {self.name!r} holds no number at all")
        order = np.lexsort((at, rank))
        rank, at, stands = rank[order], at[order], self._passes(values[order]).astype(int)
        # A rank enters when its value passes, and leaves when it falls back.
        first = np.r_[True, rank[1:] != rank[:-1]]
        change = np.where(first, stands, stands - np.r_[0, stands[:-1]])
        when = np.argsort(at, kind="stable")
        reached = np.flatnonzero(2 * np.cumsum(change[when]) >= first.sum())
        return float(at[when][reached[0]]) if len(reached) else float("inf")

    def _of_one(self, told: Curve) -> float:
        """Return the measure of one series, such as that of the mean model."""
        if self.kind in ("highest", "lowest"):
            return float(told.median.max() if self.kind == "highest" else told.median.min())
        if self.kind == "final":
            return float(told.median[-1])
        reached = np.flatnonzero(self._passes(told.median))
        return float(told.x[reached[0]]) if len(reached) else float("inf")
