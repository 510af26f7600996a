"""Curves over ranks and over seeds, shared by figures of recorded columns and of events.

A run's rows become a `Curve`; the curves of several seeds become one curve. This module also draws curves, assigns
the look of each group, and describes lines, markers and bands for captions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from spawnsim.errors import ParameterError
from spawnsim.plots import style
from spawnsim.plots.experiments import Groups, Recorded, is_real
from spawnsim.plots.series import (
    BAND,
    FEW,
    Floats,
    Table,
    bootstrap_medians,
    carried_forward,
    numbers,
    per_rank_last,
    quantiles,
    resampled,
)

BANDS = 6  # with more curves, bands would merge into one area: each curve has a bar instead
# Only quantities that policies define: the meaning of "loss" or "accuracy" is up to the program.
QUANTITIES = {"wait_s": "waiting time (s)"}


class Curve(NamedTuple):
    """A centre line with its band: `x`, `median`, `low`, `high`, each (points,) float64.

    `seeds`: the curves of several seeds, each with its own length. `held`: each height is the last known one, and
    holds until the next point; such a curve is drawn in steps.
    """

    x: Floats
    median: Floats
    low: Floats
    high: Floats
    seeds: tuple[Curve, ...] = ()
    held: bool = False

    @property
    def runs(self) -> int:
        return len(self.seeds) or 1

    @property
    def end(self) -> float:
        """The last height; if the seeds have no stretch in common, the last height of the longest seed."""
        longest = max(self.seeds, key=lambda each: each.x[-1], default=self)
        return float((self if len(self.median) else longest).median[-1])


def curve(
    table: Table, name: str, *, over: str = "time_s", band: tuple[float, float] = BAND, points: int = 240
) -> Curve:
    """Return the median and band over ranks of one run; each rank's last value is carried forward."""
    grid = carried_forward(table, name, over, points)
    low, median, high = quantiles(grid, (band[0], 0.5, band[1]))
    known = ~np.isnan(median)
    if not known.any():
        raise ParameterError(f"column {name!r}: at no time do half of the ranks have a number")
    return Curve(grid.x[known], median[known], low[known], high[known], held=is_clock(over))


def is_clock(over: str) -> bool:
    """Return whether curves against a column are drawn in steps: against time they are, against iterations not."""
    # Between two of its rows, a rank counts with the earlier one in medians, bands and `time_to:`. A slope to the
    # next row would show a target reached earlier than `time_to:` reports. Against iterations, all models of a point
    # were measured at the same iteration, and a line suggests the way from one point to the next.
    return over == "time_s"


def of_mean_model(run: Recorded) -> Curve:
    """Return the accuracy of the mean of all ranks' models over time, from a run's "consensus" events."""
    try:
        return of_events(run, "consensus.accuracy")
    except ParameterError as error:
        raise ParameterError('no event "consensus" was recorded: see spawnsim.policies.Consensus') from error


def of_events(run: Recorded, name: str, over: str = "time_s") -> Curve:
    """Return a number in events, `KIND.FIELD`, over time or over another of their fields.

    The time is an event's field "at_s" if it has one: the event may be recorded later than the moment that it
    describes. For real ranks, time counts from the first row.
    """
    kind, _, field = name.partition(".")
    chosen = [event for event in run.events if event.get("kind") == kind and field in event]
    if not chosen:
        kinds = ", ".join(sorted({str(event.get("kind")) for event in run.events})) or "none"
        raise ParameterError(f"no event {kind!r} with {field!r} was recorded; kinds of events: {kinds}")
    place = "at_s" if over == "time_s" and "at_s" in chosen[0] else over
    x, values = (
        np.array([event.get(each, np.nan) for event in chosen], dtype=float) for each in (place, field)
    )
    x = np.maximum(x - _first_row_s(run), 0.0) if over == "time_s" else x
    order = np.argsort(x, kind="stable")
    return Curve(x[order], values[order], values[order], values[order], held=is_clock(over))


def first_at(info: Curve, target: float) -> float:
    """Return the place where a curve first reaches a height; infinite if it never does."""
    reached = np.flatnonzero(info.median >= target)
    return float(info.x[reached[0]]) if len(reached) else float("inf")


def since_start(run: Recorded) -> Table:
    """Return a run's table; seconds of a real rank count from its first row, since virtual ranks load no libraries."""
    if not is_real(run):
        return run.table
    # Rows are ordered by rank and time, so a rank's first row is where its training begins.
    _, first, rank = np.unique(run.table["rank"], return_index=True, return_inverse=True)
    time_s = run.table["time_s"]
    return dict(run.table) | {"time_s": time_s - time_s[first][rank]}


def events_since_start(run: Recorded) -> list[Mapping[str, Any]]:
    """Return a run's events; seconds of real ranks count from the first row of any rank."""
    if not is_real(run):
        return list(run.events)
    # One origin for all ranks: with an origin per rank, simultaneous events would be drawn apart, and in another
    # order.
    begin_s = _first_row_s(run)
    # Events before the first row count as events at the beginning.
    return [dict(each) | {"time_s": max(0.0, each["time_s"] - begin_s)} for each in run.events]


def median_end_s(run: Recorded) -> float:
    """Return the time at which half of the ranks have recorded their last row, on the clock of `events_since_start`."""
    ends_s = per_rank_last(run.table, "time_s")
    return float(np.median(ends_s)) - _first_row_s(run) if len(ends_s) else 0.0


def since_first_row(runs: Iterable[Recorded]) -> str:
    """Return a caption's words for the clock of `events_since_start`; empty for virtual ranks."""
    return "; real ranks: seconds since the first row" if any(map(is_real, runs)) else ""


def _first_row_s(run: Recorded) -> float:
    time_s = run.table["time_s"]
    return float(time_s.min()) if is_real(run) and len(time_s) else 0.0


def training_s(run: Recorded) -> float:
    """Return the seconds from the start of training to the last recorded row."""
    return float(since_start(run)["time_s"].max(initial=0.0))


def over_seeds(
    curves: Sequence[Curve], *, level: float = 0.9, seed: int = 0, points: int = 240, band: str = "seeds"
) -> Curve:
    """Return the median over seeds of the runs' medians, where all seeds have values; a single curve is unchanged.

    From five seeds on, `low` and `high` are a bootstrap interval; with fewer they equal the median. With
    `band="ranks"` they are medians over seeds of each run's quantiles over ranks.
    """
    if len(curves) == 1:
        return curves[0]
    first, last = max(c.x[0] for c in curves), min(c.x[-1] for c in curves)
    # All points of all seeds: on the grid of one seed, the steps of the other seeds would move.
    x = np.unique(np.concatenate([c.x for c in curves]))
    # Only where all seeds have values: a median over the longest seeds would jump where a seed ends.
    x = x[(x >= first) & (x <= last)]
    x = x[style.evenly(len(x), points)] if len(x) else x
    heights = np.stack([resampled(c.x, c.median, x) for c in curves])
    if band == "ranks":
        low, high = (
            np.median([resampled(c.x, getattr(c, end), x) for c in curves], axis=0) for end in ("low", "high")
        )
        median = np.median(heights, axis=0)
    # A bootstrap of two or three numbers contains no more than the numbers, and only looks as if it did.
    elif len(curves) < FEW:
        median = low = high = np.median(heights, axis=0)
    else:
        median, low, high = bootstrap_medians(heights, level, seed=seed)
    return Curve(x, median, low, high, tuple(curves), held=curves[0].held)


def of_run(run: Recorded, name: str, over: str) -> Curve:
    """Return the curve of a run over its ranks; a single point if no rank has more than one number."""
    info = curve(since_start(run), name, over=over)
    rank = np.asarray(run.table["rank"])[~np.isnan(numbers(run.table, name))]
    if len(np.unique(rank)) < len(rank):
        return info
    # The median changes as ranks reach their only number, not because a rank learns.
    return Curve(info.x[-1:], info.median[-1:], info.low[-1:], info.high[-1:], held=info.held)


# --------------------------------------------------------------------------------------------------------- drawing
def draw(
    info: Curve, ax: Axes | None = None, *, look: style.Look = style.LOOKS[0], band: bool = True
) -> Axes:
    """Draw a curve as a line with its band, in steps if it is held; as a marker if it has one point; seeds are thin."""
    ax = style.axes_or_new(ax)
    _draw_seeds(info, ax, look)
    alone = len(info.x) == 1
    # Each of two to four seeds has its own line, so a band would only repeat the outer lines.
    if band and not 1 < info.runs < FEW:
        if alone:  # an area over one point has no width
            ax.vlines(info.x, info.low, info.high, color=look.colour, alpha=0.16, linewidth=9)
        else:
            ax.fill_between(
                info.x, info.low, info.high, color=look.colour, alpha=0.16, linewidth=0,
                step="post" if info.held else None,
            )  # fmt: skip
    ax.plot(
        info.x, info.median, color=look.colour, linestyle=look.dashes, drawstyle=joined(info.held),
        marker=look.marker if look.marked or alone else "", markevery=max(len(info.x) // 8, 1), markersize=6,
    )  # fmt: skip
    return ax


def draw_bar(info: Curve, ax: Axes, place: float, *, look: style.Look) -> None:
    """Draw a curve's band as a bar at one place along it, from 0 to 1: the bands of many curves would merge."""
    if len(info.x) and not 1 < info.runs < FEW:
        at = min(int(place * len(info.x)), len(info.x) - 1)
        middle = info.median[at]
        sides = [[middle - info.low[at]], [info.high[at] - middle]]
        ax.errorbar(info.x[at], middle, sides, color=look.colour, capsize=4, elinewidth=1.4)


def draw_measured(info: Curve, ax: Axes | None = None, *, look: style.Look = style.LOOKS[0]) -> Axes:
    """Draw a curve's median as a dozen markers, for real runs on top of virtual ones."""
    ax = style.axes_or_new(ax)
    _draw_seeds(info, ax, look)
    at = style.evenly(len(info.x), 14)[: len(info.x)]
    ax.plot(
        info.x[at], info.median[at], marker=look.marker, color=look.colour, linestyle="", markersize=7.5,
        markerfacecolor="white", markeredgewidth=1.8, zorder=5, clip_on=False,
    )  # fmt: skip
    return ax


def _draw_seeds(info: Curve, ax: Axes, look: style.Look) -> None:
    """Draw each seed if there are few; with more seeds, only the stretches that some seeds do not reach."""
    for each in info.seeds:
        outside = np.ones(len(each.x), dtype=bool)
        if info.runs >= FEW and len(info.x):
            # One point on either side of the common stretch joins the lines.
            outside = (each.x >= info.x[-1]) | (each.x <= info.x[0])
        heights = np.where(outside, each.median, np.nan)
        marker = look.marker if len(each.x) == 1 else ""
        ax.plot(
            each.x, heights, color=look.colour, linewidth=1.0, alpha=0.6, marker=marker, markersize=4,
            drawstyle=joined(each.held),
        )  # fmt: skip


def joined(held: bool) -> Literal["steps-post", "default"]:
    """Return matplotlib's `drawstyle` for a curve with held heights, or without."""
    return "steps-post" if held else "default"


def looks_of(found: Groups) -> dict[str, style.Look]:
    """Return each group's look by its label: real runs have the colour of the virtual runs with their name."""
    names = alike(found)
    styles = style.looks(names.values())
    return {label: styles[name] for label, name in names.items()}


def alike(found: Groups) -> dict[str, str]:
    """Return, by group label, the name that groups with one look share; a second real backend has its own name."""
    first: dict[str, str] = {}
    for group in found:
        if group.real:
            first.setdefault(group.name, group.label)
    return {
        group.label: group.label if group.real and first[group.name] != group.label else group.name
        for group in found
    }


def lines_caption(found: Groups, curves: Sequence[Curve], one: str, *, of_ranks: str = "") -> str:
    """Describe the lines, markers and bands of a figure: `one` for single runs, `of_ranks` for real ranks' markers."""
    counts = sorted({info.runs for info in curves})
    parts = [f"{'one run: ' * (len(counts) > 1)}{one}"] if one and counts[0] == 1 else []
    few, many = [n for n in counts if 1 < n < FEW], [n for n in counts if n >= FEW]
    if few:
        dots = drawn_as([info for info in curves if 1 < info.runs < FEW]) == "marker"
        small, large = ("small", "large") if dots else ("thin", "thick")
        parts.append(f"{small}: each of {counts_of(few)} seeds; {large}: their median, while all run")
    if many:
        what = drawn_as([info for info in curves if info.runs >= FEW])
        what += " and bar" if len(found.groups) > BANDS else " and band"
        over = f"over {counts_of(many)} seeds, while all run"
        parts.append(f"{what}: median and its 90 % bootstrap interval {over}")
        whole = [info for info in curves if info.runs >= FEW and len(info.x)]
        if any(each.x[-1] > info.x[-1] for info in whole for each in info.seeds):
            parts.append("thin: single seeds that run longer")
    virtual = [group for group in found if not group.real]
    if len(virtual) < len(found.groups):
        made = [run.what.get("made") for group in found if group.real for run in group.runs]
        machines = {str(each["machine"]) for each in made if isinstance(each, Mapping) and "machine" in each}
        where = f" on {machines.pop()}" if len(machines) == 1 else ""
        parts.append(f"markers: real ranks{where}{of_ranks}")
    return "; ".join(parts)


def drawn_as(curves: Sequence[Curve]) -> str:
    """Return how curves are drawn: as a "line", as a "marker" if each has one point, or both."""
    dots = {max(len(each.x) for each in (info, *info.seeds)) == 1 for info in curves}
    return {(True,): "marker", (False, True): "line or marker"}.get(tuple(sorted(dots)), "line")


def counts_of(counts: Sequence[int]) -> str:
    """Return numbers in increasing order as "3", or "3 to 5"."""
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
