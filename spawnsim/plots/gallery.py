"""All figures that a set of runs allows, made and saved together.

This room knows which figure needs which columns and events; it must not know how any of them is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from spawnsim.plots import convergence, diversity, lineage, raster, style, timeuse
from spawnsim.plots.source import REAL, Recorded, label

METRICS = ("accuracy", "modes_found", "loss")


def metrics_of(runs: Sequence[Recorded]) -> list[str]:
    """Return the usual metrics that all runs recorded; else the first column that is no bookkeeping."""
    shared = [name for name in METRICS if all(name in run.table for run in runs)]
    if shared or not runs:
        return shared
    bookkeeping = {"rank", "time_s", "iteration", "is_replaced"}
    return [
        name for name in runs[0].table if name not in bookkeeping and runs[0].table[name].dtype.kind in "fi"
    ][:1]


def figures(runs: Sequence[Recorded], columns: Sequence[str] = ()) -> Iterator[tuple[str, Figure]]:
    """Yield (file stem, figure): convergence, diversity, time use; raster and lineage of each run with replacements."""
    metrics = list(columns) or metrics_of(runs)
    for name in metrics:
        yield f"convergence-{name}", convergence.figure(runs, name)
    for name in metrics[:1]:
        yield f"diversity-{name}", diversity.figure(runs, name)
    if (used := timeuse.figure(runs)) is not None:
        yield "time-use", used
    yield from _replaced(runs)


def _replaced(runs: Sequence[Recorded]) -> Iterator[tuple[str, Figure]]:
    with_replacements = [
        run for run in runs if any(event.get("kind") == "replacement" for event in run.events)
    ]
    for number, run in enumerate(with_replacements, start=1):
        suffix = f"-{number}" if len(with_replacements) > 1 else ""
        name = label(run).replace(REAL, "-real").replace(" ", "-")
        yield f"replacement-raster-{name}{suffix}", raster.figure(run)
        yield f"replacement-lineage-{name}{suffix}", lineage.figure(run)


def save_all(
    runs: Sequence[Recorded],
    out: str | Path,
    columns: Sequence[str] = (),
    formats: Sequence[str] = style.FORMATS,
) -> list[Path]:
    """Write all figures into the folder `out`; returns the paths."""
    return [
        path
        for stem, drawn in figures(runs, columns)
        for path in style.save(drawn, Path(out) / stem, formats)
    ]
