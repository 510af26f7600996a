"""From a sweep's folder to a figure: its columns on the x axis, in colours and in panels, and its missing runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.options import listed, nearest, unquoted
from spawnsim.plots import curves, gallery, panels, style, sweeps
from spawnsim.plots.experiments import shown
from spawnsim.plots.measures import Measure
from spawnsim.plots.panels import CLOCKS, Asked
from spawnsim.record import Table
from spawnsim.study.results import DONE, MISSING, Planned, Sweep, column_of
from spawnsim.study.store import FAILED, STOPPED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The short names of the command line.
ALIASES = {"straggler": "stragglers", "deadline": "deadline_s", "time": "time_s"}
MOST_HUES = 8
NAMED = 3  # missing runs that a caption names


@dataclass(frozen=True)
class Drawn:
    """A figure with its data, which `save` writes next to it; `blank` names finished runs without a number to show."""

    stem: str
    figure: Figure
    data: Table
    blank: str = ""


def where(sweep: Sweep, conditions: Sequence[str]) -> Sweep:
    """Return the cells that meet all conditions.

    Raises:
        ParameterError: a condition names no column, or no cell meets it.
    """
    cells = list(sweep.cells)
    for condition in conditions:
        name, sign, texts = condition.partition("=")
        name = _known(sweep, name, "--where")
        wanted = [unquoted(each) for each in listed(texts)] if sign else []
        kept = [cell for cell in cells if _plain(cell.values.get(name)) in wanted]
        if not kept:
            there = ", ".join(dict.fromkeys(_plain(cell.values.get(name)) for cell in cells))
            raise ParameterError(f"--where {condition}: {name} is one of {there}")
        cells = kept
    return sweep.keep(cells)


def _plain(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _known(sweep: Sweep, name: str, option: str) -> str:
    """Return the column that a name refers to."""
    name = ALIASES.get(name, name)
    names = list(dict.fromkeys(key for cell in sweep.cells for key in cell.values))
    if name not in names:
        hint = nearest(name, names) or f"it varies {', '.join(sweep.varied) or 'nothing'}"
        raise ParameterError(f"{option} {name}: the sweep has no such column; {hint}")
    return name


def ask(
    sweep: Sweep, y: str, *, x: str = "", hue: str = "", facet: Sequence[str] = (), against: str = "",
    heat: bool = False, band: str = "seeds",
) -> Asked:  # fmt: skip
    """Return the description of a figure; what the arguments leave open follows from the columns that the sweep varies.

    Args:
        sweep: the sweep, without the cells to leave out.
        y: a measure (see `spawnsim.plots.measures`); over a clock, a recorded column.
        x: a column, a clock ("time_s", "iteration") or a measure; "": the first varied column that is not the hue.
        hue: the column that colours show; "": the policy, or the first suitable varied column other than x.
        facet: the columns that panels show; empty: all remaining varied columns.
        against: a value of the hue: show by how much the other values exceed it.
        heat: a heat map of two columns, x and the hue.
        band: what the bands of curves over a clock span: "seeds" or "ranks".

    Returns:
        The description of the figure.

    Raises:
        ParameterError: a name is not known, or a varied column is shown nowhere in the figure.
    """
    x, varied = ALIASES.get(x, x), sweep.varied
    hue = _known(sweep, hue, "--hue") if hue else ""
    facet = tuple(_known(sweep, name, "--facet") for name in facet)
    columns = {name for cell in sweep.cells for name in cell.values}
    left = [name for name in varied if name not in (x, hue, *facet)]
    if not hue:
        # Colours show the policy, unless the policy is on the x axis. A hue with many values needs the fewest
        # panels.
        fit = [name for name in left if len(_values(sweep, name)) <= MOST_HUES]
        hue = "policy" if "policy" in fit else next(iter(fit), "")
        left = [name for name in left if name != hue]
    if not x:
        x = next(iter(left), hue)
        left = [name for name in left if name != x]
        if not x:
            raise ParameterError("the sweep varies only the seed: choose the x-axis, such as --x time_s")
    hue = hue or (x if x in columns else "")
    kind: panels.Kind = "response"
    if x in CLOCKS:
        kind = "curves"
    elif x not in columns:
        Measure.of(x)  # raises unless x is a measure
        kind = "front"
    if kind != "response" and (heat or against):
        raise ParameterError(f"--x {x} with {'--heat' if heat else '--against'}: give a column that varies")
    if heat and hue == x:
        raise ParameterError("a heat map needs two columns that vary: give --x and --hue")
    kind = "heat" if heat else "paired" if against else kind
    # A front shows settings as points, and the remaining columns are their names, unless panels are asked for.
    facet = facet if facet or kind == "front" else tuple(left)
    pooled = [name for name in left if name not in facet and kind != "front"]
    if pooled:
        raise ParameterError(
            f"{' and '.join(pooled)} also vary, and would be pooled: add --facet {pooled[0]}, or choose one value: "
            f"--where {pooled[0]}={_values(sweep, pooled[0])[0]}"
        )
    if kind != "curves":
        Measure.of(y)
    hues = tuple(_values(sweep, hue)) if hue else ()
    return Asked(
        kind=kind, x=x, y=y, hue=hue, facet=facet, by=tuple(varied), hues=hues, against=against, band=band
    )


def _values(sweep: Sweep, name: str) -> list[str]:
    return list(dict.fromkeys(_plain(cell.values.get(name)) for cell in sweep.cells))


def draw(sweep: Sweep, asked: Asked) -> Drawn:
    """Draw a figure of the finished runs; its caption names the missing runs.

    Raises:
        ParameterError: no run is done, or no finished run has the column or measure.
    """
    done = sweep.keep(sweep.of_state(DONE))
    if not done.cells:
        raise ParameterError(f"{sweep.folder}: no run has finished yet ({sweep.says()})")
    stem = gallery.stem_of(asked.stem)

    def caption(blank: str) -> str:
        return "\n".join(filter(None, [_setting(sweep), missing(sweep), blank]))

    if asked.kind == "curves":
        found, without = _curves(done, asked)
        blank = _line(without, sweep, f"have no number of {asked.y}")
        rows = list(panels.rows_of(found, asked))
        data = Table({name: column_of([row[name] for row in rows]) for name in rows[0]})
        return Drawn(stem, panels.curves_figure(found, asked, caption(blank)), data, blank)
    measures = list(dict.fromkeys([asked.y, *([asked.x] if asked.kind == "front" else [])]))
    data = done.table(*measures)
    nothing = {name: compress(done.cells, np.isnan(data[name])) for name in measures}
    lines = [_line(cells, sweep, f"have no number of {name}") for name, cells in nothing.items()]
    blank = "\n".join(filter(None, lines))
    table: Mapping[str, Any] = data
    if asked.kind == "paired":
        table = sweeps.differences(data, asked.y, hue=asked.hue, against=asked.against, by=asked.by)
    figure = panels.figure(panels.panels(table, asked.facet), asked, caption(blank))
    return Drawn(stem, figure, data, blank)


def _curves(
    done: Sweep, asked: Asked
) -> tuple[list[tuple[str, dict[str, list[curves.Curve]]]], list[Planned]]:
    """Return panels of curves, by hue, one curve for each seed; and the runs without a curve."""
    found: dict[str, dict[str, list[curves.Curve]]] = {}
    lacking: list[tuple[Planned, ParameterError]] = []
    for cell, run in done.runs():
        title = ", ".join(shown(name, cell.values.get(name)) for name in asked.facet)
        hue = _plain(cell.values.get(asked.hue)) if asked.hue else ""
        try:
            if "." in asked.y and asked.y not in run.table:
                info = curves.of_events(run, asked.y, asked.x)
            else:
                info = curves.of_run(run, asked.y, asked.x)
        # One policy may not record what another records: draw the curves that exist.
        except ParameterError as error:
            lacking.append((cell, error))
            continue
        found.setdefault(title, {}).setdefault(hue, []).append(info)
    if not found:
        raise lacking[0][1]
    return list(found.items()), [cell for cell, _ in lacking]


def _setting(sweep: Sweep) -> str:
    first, varied = sweep.cells[0].values, {*sweep.varied, "seed", "backend"}
    same = {name: value for name, value in first.items() if name not in varied}
    return " · ".join(shown(name, value) for name, value in same.items() if value not in (None, [], ""))


def missing(sweep: Sweep) -> str:
    """Return one line for each reason for missing runs, such as "failed"; empty for a finished sweep."""
    states = ((MISSING, "not done yet"), (STOPPED, "stopped"), (FAILED, "failed"))
    return "\n".join(filter(None, (_line(sweep.of_state(state), sweep, word) for state, word in states)))


def _line(some: Iterable[Planned], sweep: Sweep, word: str) -> str:
    """Describe a set of runs, with the names of the first few; empty for an empty set."""
    cells = list(some)
    names = "; ".join(cell.label for cell in cells[:NAMED]) + " …" * (len(cells) > NAMED)
    return f"{len(cells)} of {len(sweep.cells)} runs {word}: {names}" if cells else ""


def defaults(sweep: Sweep) -> list[Asked]:
    """Return the default figures of a sweep: the metric over time, and the final metric over the varied columns.

    Raises:
        ParameterError: no run is done, or no column of numbers was recorded.
    """
    metric = metric_of(sweep)
    found = [ask(sweep, metric, x="time_s")]
    return found + ([ask(sweep, f"final:{metric}")] if sweep.varied else [])


def metric_of(sweep: Sweep) -> str:
    """Return the column that figures show by default.

    Raises:
        ParameterError: no run is done, or no column of numbers was recorded.
    """
    run = next(iter(sweep.runs()), None)
    if run is None:
        raise ParameterError(f"{sweep.folder}: no run has finished yet ({sweep.says()})")
    metrics = gallery.metrics_of([run[1]])
    if not metrics:
        raise ParameterError(
            f"{sweep.folder}: no column of numbers was recorded, so there is nothing to draw"
        )
    return metrics[0]


def save(drawn: Drawn, out: Path, formats: Sequence[str], commands: Sequence[str]) -> list[Path]:
    """Write a figure, its data as CSV, and the commands that make both again."""
    paths = style.save(drawn.figure, out / drawn.stem, formats)
    data, script = (out / f"{drawn.stem}.{ending}" for ending in ("csv", "sh"))
    drawn.data.to_csv(data)
    script.write_text("".join(f"{line}\n" for line in filter(None, commands)), encoding="utf-8")
    return [*paths, data, script]
