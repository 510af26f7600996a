"""How fast a metric converges: median and quantile band over ranks, against virtual seconds and iterations.

`curve` is pure, `draw` is thin, `figure` composes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D

from spawnsim.errors import ParameterError
from spawnsim.plots import style
from spawnsim.plots.experiments import Group, Groups, Recorded, clock_of, grouped, is_real
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

BANDS = 6  # of more curves bands would be one brown area: each has a bar instead
POINTS = 2000  # of a curve whose axis is logarithmic: 240 would leave its beginning to a few
# Only what policies define themselves: what a program calls "loss" or "accuracy" is its own to say.
QUANTITIES = {"wait_s": "waiting time (s)"}


class Curve(NamedTuple):
    """A centre line with its band: `x`, `median`, `low`, `high`, each (points,) float64.

    Of several seeds, `seeds` are their curves, each as long as it is. `held`: each height is the last one known, and
    lasts until the next point; such a curve is drawn in steps.
    """

    x: Floats
    median: Floats
    low: Floats
    high: Floats
    seeds: tuple[Curve, ...] = ()
    held: bool = False

    @property
    def runs(self) -> int:
        """How many seeds it is made of."""
        return len(self.seeds) or 1

    @property
    def end(self) -> float:
        """The height at which it ends; where its seeds have no stretch in common, that of the longest one."""
        longest = max(self.seeds, key=lambda each: each.x[-1], default=self)
        return float((self if len(self.median) else longest).median[-1])


def curve(
    table: Table, name: str, *, over: str = "time_s", band: tuple[float, float] = BAND, points: int = 240
) -> Curve:
    """Return the median and band over ranks of one run, each rank's last value carried forward."""
    grid = carried_forward(table, name, over, points)
    low, median, high = quantiles(grid, (band[0], 0.5, band[1]))
    known = ~np.isnan(median)
    if not known.any():
        raise ParameterError(f"column {name!r}: fewer than half of the ranks have a number, at any time")
    return Curve(grid.x[known], median[known], low[known], high[known], held=is_clock(over))


def is_clock(over: str) -> bool:
    """Say whether curves against a column are drawn in steps: against time they are, against iterations they are not.

    At a time that lies between two of its rows a rank counts with the earlier one, in medians, bands and in
    `time_to:`; a slope to the next row would show it better before anything was measured, and a target reached before
    `time_to:` says so. Against iterations a line joins models that were all measured at the same ones, and is read as
    the way from one to the next.
    """
    return over == "time_s"


def told_once(table: Table, name: str) -> bool:
    """Say whether no rank has more than one number in a column."""
    rank = np.asarray(table["rank"])[~np.isnan(numbers(table, name))]
    return len(np.unique(rank)) == len(rank)


def of_mean_model(run: Recorded) -> Curve:
    """Return the accuracy of the mean of all ranks' models over time, from a run's events "consensus"."""
    try:
        return of_events(run, "consensus.accuracy")
    except ParameterError as error:
        raise ParameterError('no event "consensus" was recorded: see spawnsim.policies.Consensus') from error


def of_events(run: Recorded, name: str, over: str = "time_s") -> Curve:
    """Return a number that events tell, `KIND.FIELD`, in the order of time or of another of their fields.

    The time is that of "at_s", where an event has one: what it is about may be earlier than what it was told at. Of
    real ranks it counts from the first row.
    """
    kind, _, field = name.partition(".")
    told = [event for event in run.events if event.get("kind") == kind and field in event]
    if not told:
        kinds = ", ".join(sorted({str(event.get("kind")) for event in run.events})) or "none"
        raise ParameterError(f"no event {kind!r} with {field!r} was recorded; kinds of events: {kinds}")
    place = "at_s" if over == "time_s" and "at_s" in told[0] else over
    x, values = (
        np.array([event.get(each, np.nan) for event in told], dtype=float) for each in (place, field)
    )
    x = np.maximum(x - _first_row_s(run), 0.0) if over == "time_s" else x
    order = np.argsort(x, kind="stable")
    return Curve(x[order], values[order], values[order], values[order], held=is_clock(over))


def first_at(info: Curve, target: float) -> float:
    """Return where a curve first reaches a height; infinite if it never does."""
    reached = np.flatnonzero(info.median >= target)
    return float(info.x[reached[0]]) if len(reached) else float("inf")


def since_start(run: Recorded) -> Table:
    """Return a run's table; seconds of a real rank count from its first row, since virtual ones load no libraries."""
    if not is_real(run):
        return run.table
    # Rows are ordered by rank and time, so the first of each rank is where its training begins.
    _, first, rank = np.unique(run.table["rank"], return_index=True, return_inverse=True)
    time_s = run.table["time_s"]
    return dict(run.table) | {"time_s": time_s - time_s[first][rank]}


def events_since_start(run: Recorded) -> list[Mapping[str, Any]]:
    """Return a run's events; seconds of real ranks count from the first row of any of them.

    From one moment for all: with each rank's own, what happened together would be drawn apart, and in another order.
    """
    if not is_real(run):
        return list(run.events)
    begin_s = _first_row_s(run)
    # Those before the first row have happened at the beginning, too.
    return [dict(each) | {"time_s": max(0.0, each["time_s"] - begin_s)} for each in run.events]


def median_end_s(run: Recorded) -> float:
    """Return when half of the ranks have recorded their last row, on the clock of `events_since_start`."""
    ends_s = per_rank_last(run.table, "time_s")
    return float(np.median(ends_s)) - _first_row_s(run) if len(ends_s) else 0.0


def since_first_row(runs: Iterable[Recorded]) -> str:
    """Return what a caption says of times on the clock of `events_since_start`; nothing of virtual ranks'."""
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
    """Return the median over seeds of the runs' medians, where all of them have values; one curve as it is.

    From five seeds on low and high are those of a bootstrap interval; of fewer they are the median's. With
    `band="ranks"` they are medians over seeds of the runs' own, which are quantiles over ranks.
    """
    if len(curves) == 1:
        return curves[0]
    first, last = max(c.x[0] for c in curves), min(c.x[-1] for c in curves)
    # All points of all seeds: on the grid of one of them steps of the others would move.
    x = np.unique(np.concatenate([c.x for c in curves]))
    # Only where all seeds have values: a median over those that go on longest bends where one of them ends.
    x = x[(x >= first) & (x <= last)]
    x = x[style.evenly(len(x), points)] if len(x) else x
    heights = np.stack([resampled(c.x, c.median, x) for c in curves])
    if band == "ranks":
        low, high = (
            np.median([resampled(c.x, getattr(c, end), x) for c in curves], axis=0) for end in ("low", "high")
        )
        median = np.median(heights, axis=0)
    # A bootstrap of two or three numbers has no more to say than the numbers, and looks as if it had.
    elif len(curves) < FEW:
        median = low = high = np.median(heights, axis=0)
    else:
        median, low, high = bootstrap_medians(heights, level, seed=seed)
    return Curve(x, median, low, high, tuple(curves), held=curves[0].held)


def draw(
    info: Curve, ax: Axes | None = None, *, look: style.Look = style.LOOKS[0], band: bool = True
) -> Axes:
    """Draw a curve as a line in its band, in steps if it is held; as a marker if it has one point; seeds are thin."""
    ax = style.axes_or_new(ax)
    _draw_seeds(info, ax, look)
    alone = len(info.x) == 1
    # Of two to four seeds each is drawn as a line of its own, so a band would only repeat the outer ones.
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
    """Draw what would be a curve's band as a bar at one place of it, from 0 to 1: of many curves, bands would merge."""
    if len(info.x) and not 1 < info.runs < FEW:
        at = min(int(place * len(info.x)), len(info.x) - 1)
        low, middle, high = info.low[at], info.median[at], info.high[at]
        ax.errorbar(
            info.x[at],
            middle,
            [[middle - low], [high - middle]],
            color=look.colour,
            capsize=4,
            elinewidth=1.4,
        )


def draw_measured(info: Curve, ax: Axes | None = None, *, look: style.Look = style.LOOKS[0]) -> Axes:
    """Draw a curve's median as a dozen markers: the way real runs lie over virtual ones."""
    ax = style.axes_or_new(ax)
    _draw_seeds(info, ax, look)
    at = style.evenly(len(info.x), 14)[: len(info.x)]
    ax.plot(
        info.x[at], info.median[at], marker=look.marker, color=look.colour, linestyle="", markersize=7.5,
        markerfacecolor="white", markeredgewidth=1.8, zorder=5, clip_on=False,
    )  # fmt: skip
    return ax


def _draw_seeds(info: Curve, ax: Axes, look: style.Look) -> None:
    """Draw each of few seeds; of more, the stretches that not all of them reach."""
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
    """Return how matplotlib joins the points of a curve whose heights are held, or are not."""
    return "steps-post" if held else "default"


def looks_of(found: Groups) -> dict[str, style.Look]:
    """Return each group's look by its label: real runs wear the colour of the virtual ones of their name."""
    names = _looking_alike(found)
    styles = style.looks(names.values())
    return {label: styles[name] for label, name in names.items()}


def _looking_alike(found: Groups) -> dict[str, str]:
    """Return, by each group's label, what groups that look alike share: a name; a second real backend has its own."""
    first: dict[str, str] = {}
    for group in found:
        if group.real:
            first.setdefault(group.name, group.label)
    return {
        group.label: group.label if group.real and first[group.name] != group.label else group.name
        for group in found
    }


def panel(found: Groups, name: str, over: str, ax: Axes) -> dict[str, Curve]:
    """Draw all groups against one axis; returns their curves by label."""
    curves, styles = {}, looks_of(found)
    many = len(found.groups) > BANDS
    for place, group in enumerate(found, 1):
        # Each run is first a median over its ranks: ranks of one run are not independent, so only seeds make an
        # interval.
        info = over_seeds([of_run(run, name, over) for run in group.runs])
        if group.real:
            draw_measured(info, ax, look=styles[group.label])
        else:
            draw(info, ax, look=styles[group.label], band=not many)
            if many:  # side by side, over the second half
                draw_bar(info, ax, 0.5 + 0.5 * place / (len(found.groups) + 1), look=styles[group.label])
        curves[group.label] = info
    ax.set_xlabel(clock_of(found.runs) if over == "time_s" else over)
    return curves


def of_run(run: Recorded, name: str, over: str) -> Curve:
    """Return the curve of a run over its ranks; where none of them has more than one number it is one point."""
    info = curve(since_start(run), name, over=over)
    # The median then moves as ranks come to their only number, not because any of them learns.
    if not told_once(run.table, name):
        return info
    return Curve(info.x[-1:], info.median[-1:], info.low[-1:], info.high[-1:], held=info.held)


def lines_caption(found: Groups, curves: Sequence[Curve], one: str, *, of_ranks: str = "") -> str:
    """Return what the lines, markers and bands of a figure are.

    Args:
        found: the groups that are drawn.
        curves: theirs, of one panel or of several.
        one: what is said of a single run; empty: nothing is.
        of_ranks: what is said of the markers of real ranks.

    Returns:
        Parts of a sentence with semicolons between them.
    """
    counts = sorted({info.runs for info in curves})
    parts = [f"{'one run: ' * (len(counts) > 1)}{one}"] if one and counts[0] == 1 else []
    few, many = [n for n in counts if 1 < n < FEW], [n for n in counts if n >= FEW]
    if few:
        dots = drawn_as([info for info in curves if 1 < info.runs < FEW]) == "marker"
        small, large = ("small", "large") if dots else ("thin", "thick")
        parts.append(f"{small}: each of {_range(few)} seeds; {large}: their median, while all go on")
    if many:
        what = drawn_as([info for info in curves if info.runs >= FEW])
        what += " and bar" if len(found.groups) > BANDS else " and band"
        parts.append(
            f"{what}: median and its 90 % bootstrap interval over {_range(many)} seeds, while all go on"
        )
        if any(
            each.x[-1] > info.x[-1]
            for info in curves
            if info.runs >= FEW and len(info.x)
            for each in info.seeds
        ):
            parts.append("thin: single seeds that go on longer")
    virtual = [group for group in found if not group.real]
    if len(virtual) < len(found.groups):
        made = [run.what.get("made") for group in found if group.real for run in group.runs]
        machines = {str(each["machine"]) for each in made if isinstance(each, Mapping) and "machine" in each}
        where = f" on {machines.pop()}" if len(machines) == 1 else ""
        parts.append(f"markers: real ranks{where}{of_ranks}")
    return "; ".join(parts)


def drawn_as(curves: Sequence[Curve]) -> str:
    """Return what curves are drawn as: a "line", a "marker" if each has one point, or both."""
    dots = {max(len(each.x) for each in (info, *info.seeds)) == 1 for info in curves}
    return {(True,): "marker", (False, True): "line or marker"}.get(tuple(sorted(dots)), "line")


def _range(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def figure(runs: Sequence[Recorded] | Groups, name: str = "accuracy", title: str = "") -> Figure:
    """Return the two-panel figure: against virtual seconds (left) and iterations (right), one shared height."""
    found = grouped(runs)
    quantity = QUANTITIES.get(name, name.replace("_", " "))
    with style.talk():
        drawn = Figure()
        left, right = drawn.subplots(1, 2, sharey=True)
        curves = panel(found, name, "time_s", left)
        ends = {label: info.end for label, info in panel(found, name, "iteration", right).items()}
        _scale(left, list(curves.values()))
        left.set_ylabel(f"{quantity}, median over ranks")
        if any(group.real for group in found):
            left.set_xlabel("time, virtual or measured (s)")
        for ax in (left, right):
            ax.set_xlim(left=0)
        style.plain_seconds(left)
        band = f"; {'band' if len(found.groups) <= BANDS else 'bars'}: 10–90 % of ranks"
        # Real ranks are markers without a band, of which more is said behind.
        alone = [curves[group.label] for group in found if not group.real and len(group.runs) == 1]
        lines = lines_caption(
            found, list(curves.values()),
            f"{drawn_as(alone)}: median over ranks{band}" if alone else "",
            of_ranks=", median, seconds since each rank's first row",
        )  # fmt: skip
        style.frame(
            drawn, title or f"{quantity[0].upper()}{quantity[1:]}{found.by}", f"{found.caption()}\n{lines}"
        )
        # After everything that changes the axes: the names are placed by the limits as they are now.
        style.label_ends(right, _virtual_first(found, ends), looks_of(found))
        if {group.real for group in found} == {False, True}:
            _explain_markers(left, {looks_of(found)[group.label].marker for group in found if group.real})
    return drawn


def race(settings: Mapping[str, Sequence[Recorded]], target: float, title: str) -> Figure:
    """Return a figure of accuracy against the clock: a row for each setting, the ranks' own models beside their mean.

    Args:
        settings: runs by what is said of them; within one, runs differ in their policy and seed alone.
        target: an accuracy at which a line is drawn.
        title: of the figure.
    """
    rows = {name: grouped(runs) for name, runs in settings.items()}
    looks = style.looks(group.name for found in rows.values() for group in found)
    own, mean = "each rank's own model, median over ranks", "the mean of all ranks' models"
    with style.talk():
        drawn = Figure(figsize=(10.8, 1.8 + 3.1 * len(rows)))
        panels = drawn.subplots(len(rows), 2, sharex=True, sharey=True, squeeze=False)
        curves: list[Curve] = []
        for (name, found), (left, right) in zip(rows.items(), panels, strict=True):
            for ax, what in ((left, own), (right, mean)):
                ends = _run_against_the_clock(found, ax, looks, curves, whole=ax is right)
                ax.axhline(target, color="#777777", linewidth=1.0, linestyle=":")
                ax.set_title(f"{name}:\n{what}", fontsize=12)
            left.set_ylabel("accuracy")
            style.label_ends(right, ends, looks)
        panels[0, 0].set(xscale="log", xlim=(0.1, max(info.x[-1] for info in curves)), ylim=(0, 1))
        for ax in panels[-1]:
            ax.set_xlabel(clock_of([run for found in rows.values() for run in found.runs]))
            style.plain_seconds(ax)
        everything = grouped([run for found in rows.values() for run in found.runs])
        lines = lines_caption(everything, curves, "line: one seed")
        style.frame(drawn, title, f"{everything.caption()}\n{lines}; dotted: accuracy {target:g}")
    return drawn


def _run_against_the_clock(
    found: Groups, ax: Axes, looks: Mapping[str, style.Look], curves: list[Curve], *, whole: bool
) -> dict[str, float]:
    """Draw each group's curve, `whole`: of the mean model; return the heights at which they end, by label."""
    ends = {}
    for group in found:
        each = [
            of_mean_model(run) if whole else curve(since_start(run), "accuracy", points=POINTS)
            for run in group.runs
        ]
        info = over_seeds(each, points=POINTS)
        draw(info, ax, look=looks[group.name], band=info.runs >= FEW)
        curves.append(info)
        ends[group.label] = info.end
    return ends


def _virtual_first(found: Groups, ends: dict[str, float]) -> dict[str, float]:
    """One label for all that look alike: the line's where there is one, the markers' otherwise."""
    chosen: dict[str, Group] = {}
    for group, name in zip(found, _looking_alike(found).values(), strict=True):
        if name not in chosen or chosen[name].real:
            chosen[name] = group
    return {group.label: ends[group.label] for group in chosen.values()}


def _explain_markers(ax: Axes, markers: Iterable[str]) -> None:
    line = Line2D([], [], color="#333333")
    real = tuple(
        Line2D([], [], color="#333333", linestyle="", marker=each, markerfacecolor="white")
        for each in sorted(markers)
    )
    ax.legend(
        [line, real], ["virtual ranks", "real ranks"], loc="best",
        handler_map={tuple: HandlerTuple(ndivide=None)}, handlelength=max(2.0, 0.8 * len(real)),
    )  # fmt: skip


def _scale(ax: Axes, curves: Sequence[Curve]) -> None:
    """Show a loss that falls by more than a factor of thirty on a log axis; an accuracy never above one."""
    drawn = [each for info in curves for each in (info.seeds or (info,))]
    values = np.concatenate([each.median for each in drawn])
    # What is below 0 for some ranks has no place on a log axis: their band would end where the axis does.
    if min(each.low.min() for each in drawn) >= 0 and 0 < 30 * values.min() < values.max():
        ax.set_yscale("log")
    elif values.min() >= 0 and max(info.high.max(initial=0) for info in curves) <= 1:
        ax.set_ylim(top=min(1.0, ax.get_ylim()[1]))
