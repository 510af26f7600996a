"""How ranks use their time: computing, or waiting and exchanging; and the cost of load imbalance in lockstep.

From the column `compute_s` (a row's seconds of computing) and the ranks' last `time_s`. A policy's `wait_s` is not
used: for an asynchronous policy it includes time in which the rank computes. For real ranks, the time before the
computing of their first row is left out: they start processes and load libraries then, which virtual ranks do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spawnsim.plots import style
from spawnsim.plots.curves import since_start
from spawnsim.plots.experiments import Groups, Recorded, grouped, is_real
from spawnsim.plots.series import Floats, Table, numbers, per_rank_last, per_rank_sum

PANELS, COLUMNS = 8, 4
COLOURS = {"computing": "#0072B2", "waiting and exchanging": "#E69F00"}


class TimeUse(NamedTuple):
    """Seconds per rank, ordered by rank, each (ranks,) float64; the two add up to the rank's time."""

    compute_s: Floats
    exchange_s: Floats


class Imbalance(NamedTuple):
    """The cost of uneven ranks if they ended each iteration together, in seconds over all iterations.

    `useful_s` sums the mean over ranks, `waiting_s` sums (max − mean).
    """

    useful_s: float
    waiting_s: float


def time_use(table: Table) -> TimeUse | None:
    """Return each rank's seconds of computing and of the rest; None if computing was not recorded."""
    if "compute_s" not in table or table["compute_s"].dtype.kind not in "biuf":
        return None
    compute_s = per_rank_sum(table, "compute_s")
    # Computing in background tasks overlaps, so a rank may have computed for longer than it ran.
    return TimeUse(compute_s, np.maximum(per_rank_last(table, "time_s") - compute_s, 0.0))


def of_run(run: Recorded) -> TimeUse | None:
    """Return each rank's seconds as `time_use` does; for real ranks they begin with the first row's computing."""
    used = time_use(run.table)
    if used is None or not is_real(run):
        return used
    table = since_start(run)
    _, first, rank = np.unique(table["rank"], return_index=True, return_inverse=True)
    # A row is recorded after its computing, which is part of training already.
    computed_s = np.nan_to_num(numbers(table, "compute_s"))[first][rank]
    return time_use(dict(table) | {"time_s": table["time_s"] + computed_s})


def imbalance(table: Table, name: str = "compute_s") -> Imbalance | None:
    """Return the cost of uneven ranks in lockstep: the mean is useful, the slowest rank's excess is waiting."""
    if any(each not in table or table[each].dtype.kind not in "biuf" for each in (name, "iteration")):
        return None
    seconds = numbers(table, name)
    # Other rows, such as rows of an evaluation, have neither.
    known = np.isfinite(seconds) & np.isfinite(numbers(table, "iteration"))
    _, step = np.unique(table["iteration"][known], return_inverse=True)
    mean_s = np.bincount(step, weights=seconds[known]) / np.maximum(np.bincount(step), 1)
    longest_s = np.zeros(len(mean_s))
    # Unbuffered: `longest_s[step] = ...` would keep the last row of an iteration, not the largest.
    np.maximum.at(longest_s, step, seconds[known])
    return Imbalance(float(mean_s.sum()), float((longest_s - mean_s).sum()))


def draw(info: TimeUse, ax: Axes | None = None) -> Axes:
    """Draw stacked seconds of all ranks, the busiest rank first."""
    ax = style.axes_or_new(ax)
    # Ordered by computing: ordered by number, a thousand thin columns would have no shape.
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


def computing_share(info: TimeUse) -> float | None:
    """Return the share of all ranks' time that was computing; None if no time passed."""
    total_s = float(info.compute_s.sum() + info.exchange_s.sum())
    return float(info.compute_s.sum()) / total_s if total_s else None


def figure(runs: Sequence[Recorded] | Groups) -> Figure | None:
    """Return one panel per run (with many runs, per group), at one height; None if no run recorded durations."""
    found = grouped(runs)
    # With more than two rows, panels are too small to read; one run of each curve represents it.
    used = {id(run): info for run in found.runs if (info := of_run(run)) is not None}
    known = [(name, used[id(run)]) for name, run in found.alone(lambda run: id(run) in used, PANELS)]
    if not known:
        return None
    rows, columns = -(-len(known) // COLUMNS), min(len(known), COLUMNS)
    real = any(map(is_real, found.runs))
    highest_s = max(float((info.compute_s + info.exchange_s).max(initial=0.0)) for _, info in known)

    def panels(drawn: Figure) -> None:
        axes = drawn.subplots(rows, columns, sharey=True, squeeze=False)
        for ax, (name, info) in zip(axes.ravel(), known, strict=False):
            draw(info, ax)
            ax.set_title(style.in_lines(name), weight="bold", pad=24)
            share = computing_share(info)
            words = "no time passed" if share is None else f"{share:.0%} computing"
            ax.text(0, 1.02, words, transform=ax.transAxes, fontsize=11, color="#555555")
            ax.set_xlabel("ranks, busiest first")
        # The panels share their limit: the last panel's own limit would cut off other panels.
        axes[0, 0].set_ylim(0, 1.02 * highest_s or 1)
        for ax in axes.ravel()[len(known) :]:
            ax.set_visible(False)
        for ax in axes[:, 0]:
            ax.set_ylabel("training time per rank (s)" if real else "time per rank (s)")
        # At the top it would touch the title.
        drawn.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")

    alone = " · first run of each curve" if len(known) < len(used) else ""
    since = "; real ranks: since the computation of each rank's first row began" if real else ""
    caption = f"{found.caption()}\nshares are of the time of all ranks shown{alone}{since}"
    size = max(4.1 * columns + 1.6, 6.4), 4.0 * rows + 1.2
    return style.compose(panels, "Time use of the ranks", caption, size)
