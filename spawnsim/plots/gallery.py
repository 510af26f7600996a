"""All figures that a set of runs allows, made and saved together: the columns and events that each figure needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from spawnsim.plots import convergence, diversity, genealogy, replacement, style, timeuse
from spawnsim.plots.experiments import Groups, Recorded, grouped, ranks_of

METRICS = ("accuracy", "modes_found", "loss")
MOST_ALONE = 8  # runs with separate figures; if there are more, only the first run of each curve


def metrics_of(runs: Sequence[Recorded]) -> list[str]:
    """Return the usual metrics that all runs recorded; else the first column that is not bookkeeping."""
    shared = [name for name in METRICS if all(_holds_numbers(run, name) for run in runs)]
    if shared or not runs:
        return shared
    bookkeeping = {"rank", "time_s", "iteration", "is_replaced"}
    return [name for name in runs[0].table if name not in bookkeeping and _holds_numbers(runs[0], name)][:1]


def _holds_numbers(run: Recorded, name: str) -> bool:
    return name in run.table and run.table[name].dtype.kind in "biuf"


def with_rows(runs: Sequence[Recorded] | Groups, column: str = "rank") -> Groups:
    """Return the groups and runs whose rows have a number in a column: other runs have no curve."""
    found = grouped(runs)
    kept = [
        replace(group, runs=tuple(run for run in group.runs if not np.isnan(run.table[column]).all()))
        for group in found
    ]
    return replace(found, groups=tuple(group for group in kept if group.runs))


def figures(runs: Sequence[Recorded] | Groups, columns: Sequence[str] = ()) -> Iterator[tuple[str, Figure]]:
    """Yield (file stem, figure) for all available data: convergence, diversity, time use, replacements.

    Replacements are drawn for each run; with more than eight runs, for the first run of each curve. `columns`: the
    metrics to draw; empty: the usual metrics that the runs recorded.

    Raises:
        ParameterError: no run has one of the columns.
    """
    # Grouped before runs without rows are left out: names reflect the differences between all runs of the command.
    found = with_rows(runs)
    if not found.groups:
        return
    # A run that diverged at once must not cost the other runs their curves; for requested columns it is an error.
    by_metric = {
        name: found if columns else with_rows(found, name) for name in columns or metrics_of(found.runs)
    }
    metrics = [name for name, those in by_metric.items() if those.groups]
    for name in metrics:
        yield f"convergence-{stem_of(name)}", convergence.figure(by_metric[name], name)
    # Only one: the spreads of several metrics mostly show the same, and a page has room for few figures.
    for name in metrics[:1]:
        yield f"diversity-{stem_of(name)}", diversity.figure(by_metric[name], name)
    if (used := timeuse.figure(found)) is not None:
        yield "time-use", used
    # A run has three figures, and nobody would look at the figures of a sweep's hundreds of runs.
    for name, run in found.alone(_has_replacements, MOST_ALONE):
        stem, ranks = stem_of(name), ranks_of(run)
        yield f"replacement-raster-{stem}", replacement.raster_figure(run, name=name)
        yield f"replacement-lineage-{stem}", replacement.lineage_figure(run, name=name)
        if ranks <= genealogy.MOST_RANKS and genealogy.births_of(run.events, ranks):
            yield f"genealogy-{stem}", genealogy.figure({name: run})


def stem_of(name: str) -> str:
    """Return a name as part of a file name: letters, digits, dots and dashes, at most 80 characters."""
    # Names of columns and curves are free text: a slash in a name must not make a folder.
    return re.sub(r"[^\w.]+", "-", name).strip("-.")[:80]


def _has_replacements(run: Recorded) -> bool:
    return any(event.get("kind") == "replacement" for event in run.events)


def save_all(
    runs: Sequence[Recorded] | Groups,
    out: str | Path,
    columns: Sequence[str] = (),
    formats: Sequence[str] = style.FORMATS,
) -> list[Path]:
    """Write all figures of `figures` into a folder.

    Raises:
        ParameterError: an unknown format, or no run has one of the columns.
    """
    found: list[Path] = []
    for stem, drawn in figures(runs, columns):
        found += style.save(drawn, Path(out) / stem, formats)
    return found
