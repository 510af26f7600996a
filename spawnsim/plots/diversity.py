"""How much the ranks differ: standard deviation, coefficient of variation and range over ranks, over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spawnsim.plots import style
from spawnsim.plots.curves import (
    QUANTITIES,
    Curve,
    draw_measured,
    is_clock,
    joined,
    lines_caption,
    looks_of,
    over_seeds,
)
from spawnsim.plots.curves import draw as draw_line
from spawnsim.plots.experiments import Groups, Recorded, clock_of, grouped
from spawnsim.plots.series import Floats, Table, carried_forward

MEASURES = {"std": "standard deviation", "cv": "coefficient of variation (%)", "range": "range (max − min)"}


class Diversity(NamedTuple):
    """Spreads over ranks, each (points,) float64: `x`, `std`, `cv` (in percent), `range`."""

    x: Floats
    std: Floats
    cv: Floats
    range: Floats
    held: bool = False


def diversity(table: Table, name: str, *, over: str = "iteration") -> Diversity:
    """Return the spreads over ranks of a column, from the point where half of the ranks have a value."""
    grid = carried_forward(table, name, over)
    enough = np.mean(~np.isnan(grid.values), axis=0) >= 0.5
    values = grid.values[:, enough]
    std, mean = np.nanstd(values, axis=0), np.nanmean(values, axis=0)
    # Where the mean crosses zero the coefficient is meaningless; NaN leaves a gap.
    cv = np.divide(100 * std, np.abs(mean), out=np.full_like(std, np.nan), where=mean != 0)
    spread = np.nanmax(values, axis=0) - np.nanmin(values, axis=0)
    return Diversity(grid.x[enough], std, cv, spread, held=is_clock(over))


def draw(
    info: Diversity, ax: Axes | None = None, *, measure: str = "std", look: style.Look = style.LOOKS[0]
) -> Axes:
    """Draw one measure ("std", "cv" or "range") as a line."""
    ax = style.axes_or_new(ax)
    steps = joined(info.held)
    ax.plot(info.x, getattr(info, measure), color=look.colour, linestyle=look.dashes, drawstyle=steps)
    ax.set_title(MEASURES[measure])
    return ax


def figure(runs: Sequence[Recorded] | Groups, name: str = "accuracy", over: str = "iteration") -> Figure:
    """Return three panels, one per measure, with a curve per group."""
    found = grouped(runs)
    quantity, styles = QUANTITIES.get(name, name.replace("_", " ")), looks_of(found)
    spreads = {group.label: [diversity(run.table, name, over=over) for run in group.runs] for group in found}
    curves = {
        measure: {which: _of_seeds(each, measure) for which, each in spreads.items()} for measure in MEASURES
    }

    def panels(drawn: Figure) -> None:
        axes = drawn.subplots(1, 3)
        for ax, (measure, some) in zip(axes, curves.items(), strict=True):
            for group in found:
                # Real runs have the colour of virtual runs, so their curves need another form.
                draw_one = draw_measured if group.real else draw_line
                draw_one(some[group.label], ax, look=styles[group.label])
            ax.set_title(MEASURES[measure])
            ax.set_xlabel(clock_of(found.runs) if over == "time_s" else over)
            ax.set_ylim(bottom=0)
        axes[0].set_ylabel(f"{quantity}, spread over ranks")
        style.label_ends(axes[-1], {which: info.end for which, info in curves["range"].items()}, styles)

    lines = lines_caption(found, list(curves["range"].values()), "")
    title = f"Diversity of the ranks{found.by}: {quantity}"
    return style.compose(panels, title, f"{found.caption()}\n{lines}", (12.4, 5.0))


def _of_seeds(spreads: Sequence[Diversity], measure: str) -> Curve:
    heights = [getattr(each, measure) for each in spreads]
    return over_seeds(
        [
            Curve(each.x, height, height, height, held=each.held)
            for each, height in zip(spreads, heights, strict=True)
        ]
    )
