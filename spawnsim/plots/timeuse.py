"""Where the ranks' time goes: computing, or waiting and exchanging; and what load imbalance costs.

This room knows the column `compute_s` (seconds that a row's computing took) and the ranks' last `time_s`. A policy's
`wait_s` is not used: an asynchronous one counts time there in which its rank goes on computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spawnsim.plots import style
from spawnsim.plots.series import Floats, Table, column, per_rank_last, per_rank_sum
from spawnsim.plots.source import Recorded, label, setting

COLOURS = {"computing": "#0072B2", "waiting and exchanging": "#E69F00"}


class TimeUse(NamedTuple):
    """Seconds per rank, ordered by rank, each (ranks,) float64; the two add up to the rank's own time."""

    compute_s: Floats
    exchange_s: Floats


class Imbalance(NamedTuple):
    """Totals in seconds over iterations: `useful_s` sums the mean over ranks, `waiting_s` sums (max − mean)."""

    useful_s: float
    waiting_s: float


def time_use(table: Table) -> TimeUse | None:
    """Return each rank's seconds of computing and of all the rest; None where computing was not recorded."""
    if "compute_s" not in table:
        return None
    compute_s = per_rank_sum(table, "compute_s")
    return TimeUse(compute_s, np.maximum(per_rank_last(table, "time_s") - compute_s, 0.0))


def imbalance(table: Table, name: str = "compute_s") -> Imbalance | None:
    """Return what uneven ranks cost: per iteration the mean is useful, the slowest rank's excess is waiting."""
    if name not in table or "iteration" not in table:
        return None
    seconds = np.asarray(table[name], dtype=np.float64)
    known = np.isfinite(seconds) & np.isfinite(np.asarray(column(table, "iteration"), dtype=np.float64))
    _, step = np.unique(table["iteration"][known], return_inverse=True)
    mean_s = np.bincount(step, weights=seconds[known]) / np.maximum(np.bincount(step), 1)
    longest_s = np.zeros(len(mean_s))
    np.maximum.at(longest_s, step, seconds[known])
    return Imbalance(float(mean_s.sum()), float((longest_s - mean_s).sum()))


def draw(info: TimeUse, ax: Axes | None = None) -> Axes:
    """Draw stacked seconds of all ranks, the busiest rank first."""
    ax = style.axes_or_new(ax)
    order = np.argsort(-info.compute_s, kind="stable")
    layers = dict(zip(COLOURS, (part[order] for part in info), strict=True))
    x = np.arange(len(order) + 1)
    below = np.zeros(len(order))
    for name, seconds in layers.items():
        top = below + seconds
        ax.fill_between(
            x, np.append(below, below[-1]), np.append(top, top[-1]), step="post",
            color=COLOURS[name], linewidth=0, label=name,
        )  # fmt: skip
        below = top
    ax.set_xlim(0, len(order))
    ax.set_ylim(0, float(below.max()) * 1.02 if below.size and below.max() > 0 else 1)
    style.in_thousands(ax, "x")
    return ax


def _shares(info: TimeUse) -> str:
    total_s = float(info.compute_s.sum() + info.exchange_s.sum())
    return f"{float(info.compute_s.sum()) / total_s:.0%} computing" if total_s else "no time passed"


def figure(runs: Sequence[Recorded]) -> Figure | None:
    """Return one panel per run on a shared height; None where no run recorded durations."""
    known = [(run, info) for run in runs if (info := time_use(run.table)) is not None]
    if not known:
        return None
    with style.talk():
        drawn = Figure(figsize=(max(4.1 * len(known) + 1.6, 6.4), 5.2))
        panels = drawn.subplots(1, len(known), sharey=True, squeeze=False)[0]
        for ax, (run, info) in zip(panels, known, strict=True):
            draw(info, ax)
            ax.set_title(label(run), weight="bold", pad=24)
            ax.text(0, 1.02, _shares(info), transform=ax.transAxes, fontsize=11, color="#555555")
            ax.set_xlabel("rank, busiest first")
        panels[0].set_ylabel("time per rank (s)")
        drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
        style.frame(
            drawn, "What the ranks do with their time", f"{setting(runs)} · shares are means over ranks"
        )
    return drawn
