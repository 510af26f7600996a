"""Figures of a sweep: a measure over a varied column, paired differences, Pareto fronts, heat maps.

All figures use a tidy table: one row per run, with columns for varied parameters, the seed and measures. If a run
never reached a target, its measure is infinite, and is drawn at the edge of the axes as "never".
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from spawnsim.errors import ParameterError
from spawnsim.plots import style
from spawnsim.plots.experiments import shown
from spawnsim.plots.measures import Measure
from spawnsim.plots.series import FEW, Floats, Interval, Table, column, numbers, over_seeds

DODGE = 0.7  # share of the distance between two categories that their marks take
MOST_NAMES = 12  # settings with names in a plane; if there are more, only the best are named
SEED = "seed"


class Line(NamedTuple):
    """One curve: positions `x`, an interval over seeds at each, and each seed's value there."""

    x: Floats
    intervals: tuple[Interval, ...]
    seeds: tuple[Floats, ...]


class Response(NamedTuple):
    """A measure over a varied column: a line for each hue; `ticks`: names of the positions of a text column."""

    lines: Mapping[str, Line]
    ticks: tuple[str, ...]


class Point(NamedTuple):
    """One setting in a plane of two measures: for each measure an interval over seeds, and the name of the setting."""

    hue: str
    name: str
    x: Interval
    y: Interval


class Front(NamedTuple):
    """Settings in a plane of two measures; `best`: indices of the Pareto-optimal settings, ordered by x."""

    points: tuple[Point, ...]
    best: tuple[int, ...]


class Heat(NamedTuple):
    """Medians over seeds, shape (rows, columns), NaN without a run; and the names of rows and columns."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    values: Floats


class Edges(NamedTuple):
    """Where infinite values are drawn: above and below all finite values."""

    high: float
    low: float
    log: bool


# ---------------------------------------------------------------------------------------------------------- arrays
def texts(table: Table, name: str) -> NDArray[Any]:
    """Return a column as text for people, or one empty text per row without a column name."""
    if not name:
        return np.full(len(next(iter(table.values()))), "")
    values = column(table, name)
    return np.array([f"{each:g}" if isinstance(each, float) else str(each) for each in values.tolist()])


def distinct(values: NDArray[Any]) -> list[Any]:
    """Return distinct values in order of first appearance; numbers by size."""
    found = list(dict.fromkeys(values.tolist()))
    return sorted(found) if values.dtype.kind in "if" else found


def of_values(values: Floats) -> Interval:
    """Return a median over seeds with its interval; infinite values count as the largest."""
    return over_seeds(list(values))


def response(table: Table, x: str, y: str, hue: str = "") -> Response:
    """Return a measure over a column, with a line for each hue; rows at one place are seeds."""
    hues, heights, places = texts(table, hue), numbers(table, y), column(table, x)
    known = ~np.isnan(heights)
    numeric = places.dtype.kind in "if"
    positions = distinct(places)
    lines = {}
    for name in distinct(hues):
        at, intervals, seeds = [], [], []
        for index, position in enumerate(positions):
            values = heights[known & (hues == name) & (places == position)]
            if len(values):
                at.append(float(position) if numeric else float(index))
                intervals.append(of_values(values))
                seeds.append(values)
        if at:
            lines[str(name)] = Line(np.array(at), tuple(intervals), tuple(seeds))
    if not lines:
        raise ParameterError(f"{y}: no finished run has this value")
    return Response(lines, () if numeric else tuple(map(str, positions)))


def differences(table: Table, y: str, *, hue: str, against: str, by: Sequence[str]) -> Table:
    """Return the rows of the other hues; `y` becomes its difference to its partner, the run with the hue `against`.

    Partners are equal in the seed and in the columns `by`, in which runs differ besides the hue. The difference is
    NaN without a partner, or if both are infinite.

    Raises:
        ParameterError: no row has the value `against`.
    """
    hues, heights = texts(table, hue), numbers(table, y)
    keys = list(zip(*(texts(table, name) for name in (*by, SEED) if name != hue), strict=True))
    if against not in hues:
        raise ParameterError(f"--against {against}: {hue} is one of {', '.join(map(str, distinct(hues)))}")
    base = {keys[row]: heights[row] for row in np.flatnonzero(hues == against)}
    rows = np.flatnonzero(hues != against)
    with np.errstate(invalid="ignore"):  # infinite less infinite: neither reaches the target
        change = np.array([heights[row] - base.get(keys[row], np.nan) for row in rows])
    return {name: np.asarray(values)[rows] for name, values in table.items()} | {y: change}


def front(table: Table, x: str, y: str, *, hue: str = "", by: Sequence[str] = ()) -> Front:
    """Return settings (values of the columns `by`) in the plane of two measures, with the Pareto-optimal ones."""
    hues, across, up = texts(table, hue), numbers(table, x), numbers(table, y)
    others = [name for name in by if name != hue]
    rows = zip(*(texts(table, each).tolist() for each in others), strict=True)
    names = [", ".join(shown(name, value) for name, value in zip(others, row, strict=True)) for row in rows]
    settings: dict[tuple[str, str], list[int]] = {}
    for at in np.flatnonzero(~np.isnan(across) & ~np.isnan(up)):
        settings.setdefault((str(hues[at]), names[at] if names else ""), []).append(int(at))
    points = tuple(
        Point(*setting, of_values(across[some]), of_values(up[some])) for setting, some in settings.items()
    )
    # Signs, so that less is better for both.
    signs = [1.0 if Measure.of(name).less_is_better else -1.0 for name in (x, y)]
    costs = np.array([[signs[0] * each.x.median, signs[1] * each.y.median] for each in points]).reshape(-1, 2)
    beaten = [bool(((costs <= cost).all(axis=1) & (costs < cost).any(axis=1)).any()) for cost in costs]
    best = [at for at, lost in enumerate(beaten) if not lost and np.isfinite(costs[at]).all()]
    return Front(points, tuple(sorted(best, key=lambda at: points[at].x.median)))


def heat(table: Table, x: str, y: str, rows: str) -> Heat:
    """Return the median over seeds of a measure, by two columns."""
    across, down, heights = column(table, x), column(table, rows), numbers(table, y)
    names = (distinct(across), distinct(down))
    found = np.full((len(names[1]), len(names[0])), np.nan)
    for row, below in enumerate(names[1]):
        for at, column_name in enumerate(names[0]):
            values = heights[(across == column_name) & (down == below) & ~np.isnan(heights)]
            found[row, at] = np.median(values) if len(values) else np.nan
    labels = [
        tuple(f"{each:g}" if isinstance(each, float) else str(each) for each in group) for group in names
    ]
    # Numbers increase upwards, as on an axis; names keep their order, from the top.
    upwards = down.dtype.kind in "if"
    return Heat(labels[0], labels[1][::-1], found[::-1]) if upwards else Heat(labels[0], labels[1], found)


def edges(values: Floats) -> Edges:
    """Return where to draw infinite values next to finite ones, and whether the axis is logarithmic."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return Edges(1.0, 0.0, False)
    low, high = float(finite.min()), float(finite.max())
    if low > 0 and high / low > 30:
        step = (high / low) ** 0.15
        return Edges(high * step, low / step, True)
    step = 0.15 * (high - low) or 0.15 * abs(high) or 1.0
    return Edges(high + step, low - step, False)


# --------------------------------------------------------------------------------------------------------- drawing
def draw(
    info: Response,
    ax: Axes | None = None,
    *,
    looks: Mapping[str, style.Look] | None = None,
    edge: Edges | None = None,
) -> Axes:
    """Draw lines with bands over numbers, or marks with bars over names; each seed is a small mark."""
    ax = style.axes_or_new(ax)
    looks = looks or style.looks(info.lines)
    every = np.concatenate([values for line in info.lines.values() for values in line.seeds])
    edge = edge or edges(every)
    for name, line in _side_by_side(info, ax).items():
        _draw_line(line, ax, looks[name], edge=edge, joined=not info.ticks, label=name)
    if info.ticks:
        ax.set_xticks(range(len(info.ticks)), [style.in_lines(each) for each in info.ticks])
        ax.set_xlim(-0.6, len(info.ticks) - 0.4)
        ax.grid(visible=False, axis="x")
    else:
        places = _places(info)
        if _is_log(places):
            ax.set_xscale("log", base=2 if np.all(np.log2(places) % 1 == 0) else 10)
        ax.set_xticks(places, [style.short(each) for each in places])
        ax.minorticks_off()
    return ax


def _places(info: Response) -> Floats:
    return np.unique(np.concatenate([line.x for line in info.lines.values()]))


def _is_log(places: Floats) -> bool:
    return bool(len(places) > 2 and places[0] > 0 and places[-1] / places[0] >= 16)


def _side_by_side(info: Response, ax: Axes) -> dict[str, Line]:
    """Return the lines; lines with bars are moved apart slightly: bars at one place would hide each other."""
    count = len(info.lines)
    # Each name has its own colour, or there are no bars: nothing can overlap.
    if set(info.lines) == set(info.ticks) or not (info.ticks or any(map(_has_bars, info.lines.values()))):
        return dict(info.lines)
    places = _places(info)
    log = not info.ticks and _is_log(places)
    steps = DODGE * ((np.arange(count) + 0.5) / count - 0.5)
    if not info.ticks:
        steps = style.aside(ax, places, count, log=log)
    pairs = zip(info.lines.items(), steps, strict=True)
    return {
        name: line._replace(x=line.x * 10**step if log else line.x + step) for (name, line), step in pairs
    }


def _has_bars(line: Line) -> bool:
    """Return whether a line over numbers has bars: with many seeds at each place it has a band, with one neither."""
    counts = [len(values) for values in line.seeds]
    return max(counts) > 1 and min(counts) < FEW


def _draw_line(line: Line, ax: Axes, look: style.Look, *, edge: Edges, joined: bool, label: str) -> None:
    low, middle, high = (
        np.clip([getattr(each, name) for each in line.intervals], edge.low, edge.high)
        for name in ("low", "median", "high")
    )
    for at, values in zip(line.x, line.seeds, strict=True):
        if len(values) > 1:
            # At the side of the bar, or they would hide it.
            ax.plot(
                np.full(len(values), at + (0.0 if joined else 0.09)), np.clip(values, edge.low, edge.high),
                linestyle="", marker=look.marker, markersize=3.5, color=look.colour, alpha=0.45, clip_on=False,
            )  # fmt: skip
    if joined and all(len(values) >= FEW for values in line.seeds):
        ax.fill_between(line.x, low, high, color=look.colour, alpha=0.16, linewidth=0)
    else:
        ax.vlines(line.x, low, high, color=look.colour, linewidth=1.4 if joined else 2.2)
    ax.plot(
        line.x, middle, color=look.colour, linestyle=look.dashes if joined else "", marker=look.marker, markersize=8,
        markerfacecolor="white" if look.marked else look.colour, label=label, clip_on=False, zorder=4,
    )  # fmt: skip


def mark_edges(ax: Axes, values: Floats, edge: Edges, never: tuple[str, str] = ("never", "never")) -> None:
    """Set the scale of a y axis, and label the heights of infinite values."""
    if edge.log:
        ax.set_yscale("log")
    ends = ((-np.inf, edge.low, never[1]), (np.inf, edge.high, never[0]))
    found = [(height, name) for infinite, height, name in ends if np.any(values == infinite)]
    if not found:
        return
    low, high = ax.get_ylim()
    inside = (max(low, edge.low), min(high, edge.high))
    ticks = [
        float(tick)
        for tick in ax.get_yticks()
        if inside[0] < tick < inside[1] and all(_apart(ax, tick, height) for height, _ in found)
    ]
    labels = [style.short(tick) for tick in ticks]
    ax.set_yticks([*ticks, *(height for height, _ in found)], [*labels, *(name for _, name in found)])
    ax.set_ylim(low, high)
    for height, _ in found:
        ax.axhline(height, color="#777777", linewidth=1.0, linestyle=":")


def _apart(ax: Axes, tick: float, height: float) -> bool:
    """Return whether the labels of two ticks do not touch, on the current scale of the axis."""
    low, high = ax.transScale.transform([(1.0, tick), (1.0, height)])[:, 1]
    bottom, top = ax.transScale.transform([(1.0, edge) for edge in ax.get_ylim()])[:, 1]
    return bool(abs(high - low) > 0.06 * abs(top - bottom))


def draw_front(info: Front, ax: Axes | None = None, *, looks: Mapping[str, style.Look] | None = None) -> Axes:
    """Draw settings as marks with bars over seeds, and a step line through the Pareto-optimal ones."""
    ax = style.axes_or_new(ax)
    looks = looks or style.looks(point.hue for point in info.points)
    limits = [
        edges(np.array([(each.low, each.high) for each in along]))
        for along in ([point.x for point in info.points], [point.y for point in info.points])
    ]
    labelled: set[str] = set()
    names: dict[tuple[float, float], list[str]] = {}  # by the place of a mark; some marks have no name
    for at, point in enumerate(info.points):
        (x, left, right), (y, low, high) = (
            np.clip([each.median, each.low, each.high], edge.low, edge.high)
            for each, edge in zip((point.x, point.y), limits, strict=True)
        )
        look = looks[point.hue]
        ax.plot([left, right], [y, y], color=look.colour, linewidth=1.4, alpha=0.7)
        ax.plot([x, x], [low, high], color=look.colour, linewidth=1.4, alpha=0.7)
        label = None if point.hue in labelled else point.hue
        ax.plot(x, y, marker=look.marker, color=look.colour, markersize=9, linestyle="", label=label)
        labelled.add(point.hue)
        written = names.setdefault((float(x), float(y)), [])
        if point.name and (len(info.points) <= MOST_NAMES or at in info.best):
            written.append(point.name)
    best = [info.points[at] for at in info.best]
    ax.step(
        [each.x.median for each in best], [each.y.median for each in best], where="post",
        color="#777777", linewidth=1.2, zorder=1,
    )  # fmt: skip
    for axis, edge in zip("xy", limits, strict=True):
        if edge.log:
            ax.set(**{f"{axis}scale": "log"})
    _write_names(ax, names, limits[0])
    return ax


def _write_names(ax: Axes, names: Mapping[tuple[float, float], Sequence[str]], across: Edges) -> None:
    """Write names next to marks, towards the middle: at the right, names would run beyond the axes.

    The names of one mark are in lines; the names of different marks move up or down, off each other and off marks.
    """
    middle = (across.low * across.high) ** 0.5 if across.log else (across.low + across.high) / 2
    ax.autoscale_view()
    # In points: a mark is 9 wide; with a font of 10, a line is 12 high and a letter 5.6 wide on average.
    marks = {place: ax.transData.transform(place) * 72 / ax.figure.dpi for place in names}
    taken = [(x - 4.5, x + 4.5, y - 4.5, y + 4.5) for x, y in marks.values()]
    named = [(place, lines) for place, lines in names.items() if lines]
    for place, texts_ in sorted(named, key=lambda each: (-each[0][1], each[0][0])):
        side = -1 if place[0] > middle else 1
        x, y = marks[place]
        wide, high = 5.6 * max(map(len, texts_)), 12.0 * len(texts_)
        ends = sorted((x + 7 * side, x + (7 + wide) * side))
        up = next(
            each
            for step in itertools.count()
            for each in (6.0 + 6 * step, 6.0 - 6 * step)
            if not any(
                ends[0] < right and ends[1] > left and y + each < top and y + each + high > bottom
                for left, right, bottom, top in taken
            )
        )
        taken.append((ends[0], ends[1], y + up, y + up + high))
        ax.annotate(
            "\n".join(texts_), place, xytext=(7 * side, up), textcoords="offset points", fontsize=10,
            ha="left" if side > 0 else "right", color="#333333",
        )  # fmt: skip


def draw_heat(info: Heat, ax: Axes | None = None, *, limits: tuple[float, float] | None = None) -> Axes:
    """Draw a table of medians as shades with their numbers; infinite ones are labelled "never"."""
    ax = style.axes_or_new(ax)
    finite = info.values[np.isfinite(info.values)]
    low, high = limits or ((float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0))
    shades = np.where(np.isfinite(info.values), info.values, np.nan)
    image = ax.imshow(shades, vmin=low, vmax=high, aspect="auto", origin="lower")
    ax.set_xticks(range(len(info.columns)), [style.in_lines(each) for each in info.columns])
    ax.set_yticks(range(len(info.rows)), info.rows)
    ax.grid(visible=False)
    for side, count in (("x", len(info.columns)), ("y", len(info.rows))):
        getattr(ax, f"{side}axis").set_ticks(np.arange(count - 1) + 0.5, minor=True)
    ax.grid(which="minor", color="white", linewidth=2.5)
    ax.tick_params(which="both", length=0)
    for (row, at), value in np.ndenumerate(info.values):
        shade = 0.0 if high == low or not np.isfinite(value) else (value - low) / (high - low)
        text = "–" if np.isnan(value) else "never" if np.isinf(value) else style.three_digits(value)
        ink = "white" if shade > 0.55 else "#222222"
        ax.text(at, row, text, ha="center", va="center", color=ink, fontsize=12)
    ax.figure.colorbar(image, ax=ax, shrink=0.8) if limits is None else None
    return ax
