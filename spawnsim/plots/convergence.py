"""How fast a metric converges: median and quantile band over ranks, against virtual seconds and iterations.

This room knows curves; it must not know policies' insides. `curve` is pure, `draw` is thin, `figure` composes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spawnsim.plots import style
from spawnsim.plots.series import (
    BAND,
    Floats,
    Table,
    bootstrap_medians,
    carried_forward,
    quantiles,
    resampled,
)
from spawnsim.plots.source import REAL, Recorded, clock_of, is_real, label, setting

QUANTITIES = {"loss": "training loss", "accuracy": "test accuracy", "wait_s": "waiting time (s)"}


class Curve(NamedTuple):
    """A centre line with its band: `x`, `median`, `low`, `high`, each (points,) float64; `runs` is how many seeds."""

    x: Floats
    median: Floats
    low: Floats
    high: Floats
    runs: int = 1


def curve(table: Table, name: str, *, over: str = "time_s", band: tuple[float, float] = BAND) -> Curve:
    """Return the median and band over ranks of one run, each rank's last value carried forward."""
    grid = carried_forward(table, name, over)
    low, median, high = quantiles(grid, (band[0], 0.5, band[1]))
    known = ~np.isnan(median)
    return Curve(grid.x[known], median[known], low[known], high[known])


def since_start(run: Recorded) -> Table:
    """Return a run's table; seconds of a real rank count from its first row, since virtual ones load no libraries."""
    if not is_real(run):
        return run.table
    _, first, rank = np.unique(run.table["rank"], return_index=True, return_inverse=True)
    time_s = run.table["time_s"]
    return dict(run.table) | {"time_s": time_s - time_s[first][rank]}


def training_s(run: Recorded) -> float:
    """Return the seconds from the start of training to the last recorded row."""
    return float(since_start(run)["time_s"].max(initial=0.0))


def over_seeds(curves: Sequence[Curve], *, level: float = 0.9, seed: int = 0) -> Curve:
    """Return the median over seeds of the runs' medians, with a bootstrap interval; one curve is returned as it is."""
    if len(curves) == 1:
        return curves[0]
    first, last = max(c.x[0] for c in curves), min(c.x[-1] for c in curves)
    x = np.unique(np.concatenate([c.x for c in curves]))
    x = x[(x >= first) & (x <= last)]
    x = x[style.evenly(len(x), 240)]
    median, low, high = bootstrap_medians(
        np.stack([resampled(c.x, c.median, x) for c in curves]), level, seed=seed
    )
    return Curve(x, median, low, high, len(curves))


def draw(info: Curve, ax: Axes | None = None, *, look: style.Look = style.LOOKS[0]) -> Axes:
    """Draw one curve as a line in its band."""
    ax = style.axes_or_new(ax)
    ax.fill_between(info.x, info.low, info.high, color=look.colour, alpha=0.16, linewidth=0)
    ax.plot(info.x, info.median, color=look.colour, linestyle=look.dashes)
    return ax


def draw_measured(info: Curve, ax: Axes | None = None, *, look: style.Look = style.LOOKS[0]) -> Axes:
    """Draw a curve's median as a dozen markers: the way real runs lie over virtual ones."""
    ax = style.axes_or_new(ax)
    at = style.evenly(len(info.x), 14)
    ax.plot(
        info.x[at], info.median[at], marker=look.marker, color=look.colour, linestyle="", markersize=7.5,
        markerfacecolor="white", markeredgewidth=1.8, zorder=5, clip_on=False,
    )  # fmt: skip
    return ax


def grouped(runs: Sequence[Recorded]) -> Mapping[str, list[Recorded]]:
    """Return runs by label, in order of first appearance: runs that differ in their seed only share a curve."""
    groups: dict[str, list[Recorded]] = {}
    for run in runs:
        groups.setdefault(label(run), []).append(run)
    return groups


def _looks(groups: Mapping[str, Sequence[Recorded]]) -> Mapping[str, style.Look]:
    """A real run wears the colour of the virtual one that it lies over."""
    base = style.looks(name.removesuffix(REAL) for name in groups)
    return base | {name: base[name.removesuffix(REAL)] for name in groups}


def panel(runs: Sequence[Recorded], name: str, over: str, ax: Axes) -> dict[str, float]:
    """Draw all runs against one axis; returns the height at which each line ends."""
    groups, ends = grouped(runs), {}
    styles = _looks(groups)
    for group, members in groups.items():
        info = over_seeds([curve(since_start(run), name, over=over) for run in members])
        painter = draw_measured if is_real(members[0]) else draw
        painter(info, ax, look=styles[group])
        ends[group] = float(info.median[-1])
    ax.set_xlabel(clock_of(runs) if over == "time_s" else over)
    return ends


def _caption(runs: Sequence[Recorded]) -> str:
    seeds = max(len(members) for members in grouped(runs).values())
    band = "band: 10–90 % of ranks" if seeds == 1 else f"band: 90 % bootstrap interval over {seeds} seeds"
    real = (
        "; markers: real MPI, median, seconds since each rank's first row" if any(map(is_real, runs)) else ""
    )
    return f"{setting(runs)}\nline: median over ranks; {band}{real}"


def figure(runs: Sequence[Recorded], name: str = "accuracy", title: str = "") -> Figure:
    """Return the two-panel figure: against virtual seconds (left) and iterations (right), one shared height."""
    quantity = QUANTITIES.get(name, name.replace("_", " "))
    with style.talk():
        drawn = Figure()
        left, right = drawn.subplots(1, 2, sharey=True)
        panel(runs, name, "time_s", left)
        ends = panel(runs, name, "iteration", right)
        _scale(left, runs, name)
        left.set_ylabel(f"{quantity}, median over ranks")
        if any(map(is_real, runs)):
            left.set_xlabel("time, virtual or measured (s)")
        for ax in (left, right):
            ax.set_xlim(left=0)
        style.plain_seconds(left)
        style.frame(drawn, title or f"{quantity[0].upper()}{quantity[1:]} by policy", _caption(runs))
        style.label_ends(right, _virtual_first(ends), _looks(grouped(runs)))
        if any(map(is_real, runs)) and not all(map(is_real, runs)):
            _explain_markers(left)
    return drawn


def _virtual_first(ends: Mapping[str, float]) -> dict[str, float]:
    """One name per policy: the line's where there is one, the markers' otherwise."""
    names = {name.removesuffix(REAL): end for name, end in ends.items() if name.endswith(REAL)}
    return names | {name: end for name, end in ends.items() if not name.endswith(REAL)}


def _explain_markers(ax: Axes) -> None:
    ax.plot([], [], color="#333333", label="virtual ranks")
    ax.plot(
        [], [], color="#333333", linestyle="", marker="o", markerfacecolor="white", label="real MPI ranks"
    )
    handles, names = ax.get_legend_handles_labels()
    ax.legend(handles[:2], names[:2], loc="best")


def _scale(ax: Axes, runs: Sequence[Recorded], name: str) -> None:
    """Show a loss that falls by more than a factor of thirty on a log axis; an accuracy never above one."""
    values = np.concatenate([curve(run.table, name).median for run in runs])
    if values.min() > 0 and values.max() / values.min() > 30:
        ax.set_yscale("log")
    elif values.min() >= 0 and values.max() <= 1:
        ax.set_ylim(top=min(1.0, ax.get_ylim()[1]))
