"""Measures of a run: a number such as a final value, or the time until a target.

| measure | meaning |
|---|---|
| `accuracy`, `final:accuracy` | each rank's last value of a recorded column; its median over ranks |
| `highest:accuracy`, `lowest:loss` | the highest, or lowest, value of this median over ranks at any time |
| `time_to:accuracy>0.8` | (virtual) seconds until half of the ranks are above 0.8; infinite if never |
| `iterations_to:loss<0.1` | the iteration at which half of the ranks are below 0.1; infinite if never |
| `virtual_seconds` (real ranks: `run_seconds`), `bytes`, `messages`, `replacements`, … | a total of the run |

Instead of a column, `KIND.FIELD` is a number in events of a kind: `final:consensus.accuracy` is the final accuracy of
the mean of all ranks' models.
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
LESS = re.compile(r"loss|error|wait|distance|_s$|seconds|bytes|messages|lowest")  # less is better
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
    """A measure as text, and its meaning.

    Attributes:
        text: the measure as the user wrote it.
        kind: one of `KINDS`, or "total".
        name: the column, the kind and field of events, or the total.
        above: whether the target is reached from below.
        target: the target of "time_to" and "iterations_to".
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
            ParameterError: the text is not a measure.
        """
        kind, colon, rest = text.partition(":")
        if not colon:
            if re.search("[<>]", text):
                raise ParameterError(
                    f"{text!r} needs a quantity: write time_to:{text} or iterations_to:{text}"
                )
            return cls(text, "total" if text in (*TOTALS, *SECONDS) else "final", text)
        if kind not in KINDS:
            raise ParameterError(f"{text!r} is not a measure: it begins with one of {', '.join(KINDS)}")
        if not kind.endswith("_to"):
            return cls(text, kind, rest)
        found = _TARGET.fullmatch(rest)
        try:
            name, sign, target = found.groups() if found else ("", "", "")
            return cls(text, kind, name, sign.startswith(">"), float(target))
        except ValueError:
            # In a shell, an unquoted > redirects to a file, and only the text before it arrives.
            raise ParameterError(
                f"{text!r} has no target: write '{kind}:accuracy>0.8', in quotes, or the shell interprets the >"
            ) from None

    @property
    def needs_rows(self) -> bool:
        """Whether a run's rows or events must be read."""
        return self.kind != "total"

    @property
    def less_is_better(self) -> bool:
        """Whether less is better, judging by the name: for times, losses and traffic."""
        return self.kind.endswith("_to") or bool(LESS.search(self.text))

    @property
    def unit(self) -> str:
        """The label of an axis below the title `label`: the unit of a duration, else the label again."""
        return TAKEN.get(self.kind) or self.label

    @property
    def label(self) -> str:
        """The label of a title or an axis."""
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
        """Compute the measure.

        Args:
            run: the run; None is allowed if `needs_rows` is false.
            totals: the totals of the run.

        Returns:
            The number; infinite if a target is never reached, NaN if a total is not known.

        Raises:
            ParameterError: the run has no such column or event.
        """
        if run is None or self.kind == "total":
            # Virtual and real ranks may share a figure.
            total = end_s(totals) if self.name in SECONDS else totals.get(self.name)
            return float("nan") if total is None else float(total)
        if "." in self.name and self.name not in run.table:
            series = of_events(run, self.name, "iteration" if self.kind == "iterations_to" else "time_s")
            return self._of_one(series)
        if self.kind == "final":
            return spread_at_end(run.table, self.name)[1]
        if self.kind in ("highest", "lowest"):
            median = curve(run.table, self.name).median
            return float(median.max() if self.kind == "highest" else median.min())
        return self._reached(run)

    def _passes(self, values: Floats) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return values >= self.target if self.above else values <= self.target

    def _reached(self, run: Recorded) -> float:
        """Return the exact time or iteration at which half of the ranks meet the target, not a point of a curve."""
        table = since_start(run)
        values, rank = numbers(table, self.name), np.asarray(column(table, "rank"))
        at = numbers(table, "time_s" if self.kind == "time_to" else "iteration")
        known = np.isfinite(at) & ~np.isnan(values)
        values, rank, at = values[known], rank[known], at[known]
        if not len(values):
            raise ParameterError(f"column {self.name!r} holds no numbers")
        order = np.lexsort((at, rank))
        rank, at, stands = rank[order], at[order], self._passes(values[order]).astype(int)
        # A rank counts from a row that meets the target until a row that does not.
        first = np.r_[True, rank[1:] != rank[:-1]]
        change = np.where(first, stands, stands - np.r_[0, stands[:-1]])
        when = np.argsort(at, kind="stable")
        reached = np.flatnonzero(2 * np.cumsum(change[when]) >= first.sum())
        return float(at[when][reached[0]]) if len(reached) else float("inf")

    def _of_one(self, series: Curve) -> float:
        """Return the measure of one series, for example the series of the mean model."""
        if self.kind in ("highest", "lowest"):
            return float(series.median.max() if self.kind == "highest" else series.median.min())
        if self.kind == "final":
            return float(series.median[-1])
        reached = np.flatnonzero(self._passes(series.median))
        return float(series.x[reached[0]]) if len(reached) else float("inf")
