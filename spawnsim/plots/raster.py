"""The rank × time raster of replacements, with its margins.

This room knows how to draw `Replacements`; the arrays come from `replacement.py`.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spawnsim.plots import style
from spawnsim.plots.replacement import Replacements, per_rank, rank_edges, replacements
from spawnsim.plots.series import per_rank_last
from spawnsim.plots.source import Recorded, clock_of, grouped, label, ranks_of


def of(run: Recorded) -> Replacements:
    """Return the replacements of a run, until half of its ranks have recorded their last row.

    Stragglers that go on alone would leave most of an axis empty. Replacements that come later count, and end it.
    """
    ends_s = per_rank_last(run.table, "time_s")
    return replacements(run.events, ranks_of(run), float(np.median(ends_s)) if len(ends_s) else 0.0)


def draw(info: Replacements, ax: Axes | None = None, *, colour: str = style.LOOKS[1].colour) -> Axes:
    """Draw one mark per replacement at (time, rank); marks shrink and fade as they grow in number."""
    ax = style.axes_or_new(ax)
    events = max(len(info.rank), 1)
    size = float(np.clip(40_000 / (events + 400), 1.2, 40))
    alpha = float(np.clip(25_000 / events, 0.3, 0.9))
    ax.scatter(info.time_s, info.rank, s=size, color=colour, alpha=alpha, linewidths=0, rasterized=True)
    ax.set_xlim(0, info.end_s * 1.01 or 1)
    ax.set_ylim(-0.5 - 0.005 * info.ranks, info.ranks - 0.5 + 0.005 * info.ranks)
    ax.set(xlabel="virtual time (s)", ylabel="rank")
    style.in_thousands(ax, "y")
    return ax


def _draw_rate(info: Replacements, ax: Axes, colour: str) -> None:
    counts, edges = np.histogram(info.time_s, bins=120, range=(0, info.end_s or 1))
    ax.stairs(counts / max(np.diff(edges)[0], 1e-12), edges, fill=True, color=colour, alpha=0.75)
    ax.set_ylabel("replaced\nper second", fontsize=11)
    ax.locator_params(axis="y", nbins=3)
    ax.tick_params(labelbottom=False)
    style.in_thousands(ax, "y")


def _draw_margin(info: Replacements, ax: Axes, colour: str) -> None:
    """Replacements per rank, averaged over bins of neighbouring ranks."""
    edges = rank_edges(info.ranks, 100)
    total, _ = np.histogram(np.arange(info.ranks), bins=edges, weights=per_rank(info))
    held, _ = np.histogram(np.arange(info.ranks), bins=edges)
    ax.stairs(
        total / np.maximum(held, 1),
        edges - 0.5,
        orientation="horizontal",
        fill=True,
        color=colour,
        alpha=0.75,
    )
    mean = f",\nmean of {most}" if (most := int(held.max(initial=1))) > 1 else ""
    ax.set_xlabel(f"times\nreplaced{mean}", fontsize=11)
    ax.set_xlim(left=0)
    ax.tick_params(labelleft=False)


def figure(run: Recorded, title: str = "", *, name: str = "") -> Figure:
    """Return the raster with the rate of replacements above it and the count per rank beside it."""
    found = grouped([run], labels=[name] if name else [])
    info, colour = of(run), style.looks([label(run)])[label(run)].colour
    colour = style.LOOKS[1].colour if colour == style.KNOWN["none"].colour else colour
    with style.talk():
        drawn = Figure(figsize=(10.8, 6.2))
        grid = drawn.subplots(
            2, 2, sharex="col", sharey="row", width_ratios=(8, 1.1), height_ratios=(1, 5), squeeze=False
        )
        grid[0, 1].remove()
        draw(info, grid[1, 0], colour=colour).set_xlabel(clock_of([run]))
        _draw_rate(info, grid[0, 0], colour)
        _draw_margin(info, grid[1, 1], colour)
        style.plain_seconds(grid[1, 0])
        caption = f"{found.caption()}\n{style.counted(len(info.rank), 'replacement')}"
        default = f"Which rank was replaced, and when{f': {name}' if name else ''}"
        style.frame(drawn, title or default, caption)
    return drawn
