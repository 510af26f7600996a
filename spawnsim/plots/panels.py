"""Small multiples of a sweep: one panel for each combination of facet values, one legend, one caption.

`Asked` describes a figure; `spawnsim.plots.sweeps` and `curves` draw its panels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from spawnsim.errors import ParameterError
from spawnsim.plots import curves, style, sweeps
from spawnsim.plots.curves import QUANTITIES, Curve
from spawnsim.plots.experiments import shown
from spawnsim.plots.measures import Measure
from spawnsim.plots.series import FEW, Floats, Table, numbers
from spawnsim.plots.sweeps import edges, texts

Kind = Literal["curves", "response", "paired", "front", "heat"]
ACROSS, MOST = 3, 12  # panels in a row, and in all
CLOCKS = {"time_s": "virtual time (s)", "iteration": "iteration"}
Panels = list[tuple[str, Table]]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The description of a figure.

    Attributes:
        kind: "curves" (over time), "response" (a measure over a varied column), "paired" (its differences to one
            hue), "front" (one measure against another) or "heat" (a measure by two columns).
        x: the x axis: a clock, a column or a measure.
        y: a measure; for curves, a recorded column.
        hue: the column that colours show; for a heat map, its rows.
        facet: the columns that panels show.
        by: all columns in which runs differ, except the seed.
        hues: all values of the hue, including values that this figure leaves out, so that a value has one look in all
            figures.
        against: for "paired", the hue with which the other hues are compared.
        band: for "curves", what the bands span: "seeds" or "ranks".
    """

    kind: Kind
    x: str
    y: str
    hue: str = ""
    facet: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    hues: tuple[str, ...] = ()
    against: str = ""
    band: str = "seeds"

    @property
    def label(self) -> str:
        """The label of the y axis."""
        if self.kind == "curves":
            return QUANTITIES.get(self.y, Measure.of(self.y).label.removesuffix(" at the end"))
        if self.kind == "front":
            return _better(self.y)
        # The title has the whole name.
        unit = Measure.of(self.y).unit
        less = (
            f"minus the value of {self.against}"
            if self.kind == "paired"
            else _better(self.y).partition("\n")[2]
        )
        return f"{unit}\n({less.strip('()')})"

    @property
    def stem(self) -> str:
        """The file name without its suffix."""
        what = {"paired": f"{self.y}-against-{self.against}", "heat": f"{self.y}-heat"}.get(self.kind, self.y)
        return f"{what}-over-{self.x}"

    def title(self) -> str:
        """The title: the figure's content in a line; axes, legend and panels show the rest."""
        measure = (Measure.of(self.y).label if self.kind != "curves" else self.label).replace(" (s)", "")
        text = measure[0].upper() + measure[1:]
        if self.kind == "paired":
            return f"{text}: difference to {self.against}"
        return (
            f"{text} against {Measure.of(self.x).label.replace(' (s)', '')}" if self.kind == "front" else text
        )


def _better(text: str) -> str:
    measure = Measure.of(text)
    return f"{measure.label}\n({'less' if measure.less_is_better else 'more'} is better)"


def panels(table: Table, facet: Sequence[str]) -> Panels:
    """Return a title and a table for each combination of values of the facet columns.

    Raises:
        ParameterError: there are more combinations than panels fit into a figure.
    """
    columns = [texts(table, name) for name in facet or ("",)]
    rows = list(zip(*columns, strict=True))
    settings = list(dict.fromkeys(rows))
    if len(settings) > MOST:
        raise ParameterError(
            f"{len(settings)} panels of {' and '.join(facet)}: choose some (--where NAME=VALUE), or another --hue"
        )
    found: Panels = []
    for setting in settings:
        chosen = np.array([row == setting for row in rows])
        title = ", ".join(shown(name, value) for name, value in zip(facet, setting, strict=False))
        found.append((title, {name: np.asarray(values)[chosen] for name, values in table.items()}))
    return found


def figure(found: Panels, asked: Asked, caption: str = "") -> Figure:
    """Return the figure of a measure, with a panel for each table; the caption ends with a description of the marks.

    Raises:
        ParameterError: no row has a value of the measure.
    """
    # A panel without any value of the measure is left out.
    found = [(title, table) for title, table in found if not np.isnan(numbers(table, asked.y)).all()]
    if not found:
        raise ParameterError(f"{asked.y}: no finished run has this value")
    whole = {name: np.concatenate([np.asarray(table[name]) for _, table in found]) for name in found[0][1]}
    looks = _looks(asked, map(str, sweeps.distinct(texts(whole, asked.hue))))
    heights = numbers(whole, asked.y)
    edge, finite = edges(heights), heights[np.isfinite(heights)]
    shades = (float(finite.min()), float(finite.max())) if len(finite) and len(found) > 1 else None
    fronts = [
        sweeps.front(table, asked.x, asked.y, hue=asked.hue, by=_named(asked))
        if asked.kind == "front"
        else None
        for _, table in found
    ]

    def draw(drawn: Figure) -> None:
        axes = _grid(drawn, len(found), shared=asked.kind != "heat")
        for ax, (title, table), front in zip(axes, found, fronts, strict=False):
            if front is not None:
                sweeps.draw_front(front, ax, looks=looks)
            elif asked.kind == "heat":
                sweeps.draw_heat(sweeps.heat(table, asked.x, asked.y, asked.hue), ax, limits=shades)
            else:
                info = sweeps.response(table, asked.x, asked.y, asked.hue)
                sweeps.draw(info, ax, looks=looks, edge=edge)
                _edges_and_zero(ax, heights, edge, asked)
            ax.set_title(_title(title, len(found)), fontsize=13)
        _label(axes, asked, rows=asked.hue.replace("_", " ") if asked.kind == "heat" else asked.label)
        if asked.kind != "heat" and asked.hue and asked.hue != asked.x:
            joined = asked.kind != "front" and whole[asked.x].dtype.kind in "if"
            _legend(drawn, asked.hue, looks, joined=joined)

    lines = any(front is not None and len(front.best) > 1 for front in fronts)
    marks = _marks(found, asked, lines)
    size = _size(len(found), tall=asked.kind == "front")
    return style.compose(draw, asked.title(), "\n".join(filter(None, [caption, marks])), size)


def _looks(asked: Asked, drawn: Iterable[str]) -> dict[str, style.Look]:
    names = list(dict.fromkeys(drawn))
    every = style.looks([*asked.hues, *names])
    return {name: every[name] for name in names}


def _named(asked: Asked) -> list[str]:
    return [name for name in asked.by if name not in asked.facet]


def _edges_and_zero(ax: Axes, heights: Floats, edge: sweeps.Edges, asked: Asked) -> None:
    paired = asked.kind == "paired"
    sweeps.mark_edges(
        ax, heights, edge, (f"only {asked.against}", f"not {asked.against}") if paired else ("never", "")
    )
    if paired:
        ax.axhline(0.0, color="#444444", linewidth=1.1)


def _marks(found: Panels, asked: Asked, lines: bool) -> str:
    """Describe the marks, bars and lines of a figure."""
    counts = [
        len(rows)
        for _, table in found
        for rows in _places(table, [asked.x if asked.kind != "front" else "", *_named(asked), asked.hue])
    ]
    seeds = curves.counts_of(sorted({min(counts), max(counts)}))
    if asked.kind == "heat":
        return f"median over {seeds} seeds" if max(counts) > 1 else ""
    if max(counts) < 2:
        return "one seed each"
    pairs = ", pairs of equal seed" * (asked.kind == "paired")
    many = "90 % bootstrap interval of the median" if min(counts) >= FEW else "least to largest"
    several = " (of fewer than five: least to largest)" if min(counts) < FEW <= max(counts) else ""
    single = (
        "marks: medians; bars: "
        if asked.kind == "front"
        else "small: single seeds; large: median; bar or band: "
    )
    line = "; line: settings that no other beats in both" if lines else ""
    what = "90 % bootstrap interval of the median" + several if max(counts) >= FEW else many
    return f"{single}{what}, {seeds} seeds{pairs}{line}"


def _places(table: Table, names: Sequence[str]) -> list[list[int]]:
    """Return the rows of each setting; the rows of one setting differ only in their seed."""
    keys = zip(*(texts(table, name).tolist() for name in dict.fromkeys(filter(None, names))), strict=True)
    found: dict[tuple[str, ...], list[int]] = {}
    for row, key in enumerate(list(keys) or [()] * len(texts(table, ""))):
        found.setdefault(key, []).append(row)
    return list(found.values())


Lines = Mapping[str, Sequence[Curve]]


def curves_figure(found: Sequence[tuple[str, Lines]], asked: Asked, caption: str = "") -> Figure:
    """Return the figure of a recorded column over a clock, a panel for each setting."""
    looks = _looks(asked, (name for _, lines in found for name in lines))

    def draw(drawn: Figure) -> None:
        axes = _grid(drawn, len(found), shared=True)
        for ax, (title, lines) in zip(axes, found, strict=False):
            for name, seeds in lines.items():
                info = curves.over_seeds(list(seeds), band=asked.band)
                if asked.band == "ranks" and len(info.x):
                    info = info._replace(seeds=())  # a thin line for each seed would hide the band
                curves.draw(info, ax, look=looks[name], band=True)
            ax.set_title(_title(title, len(found)), fontsize=13)
        axes[0].set_xlim(left=0)
        # Numbers in events have no rank.
        _label(axes, asked, rows=asked.label if "." in asked.y else f"{asked.label}, median over ranks")
        for ax in axes if asked.x == "time_s" else ():
            style.plain_seconds(ax)
        if asked.hue:
            _legend(drawn, asked.hue, looks, joined=True, marked=False)

    bands = _bands(asked, [seeds for _, lines in found for seeds in lines.values()])
    text = "\n".join(filter(None, [caption, bands]))
    return style.compose(draw, asked.title(), text, _size(len(found)))


def _bands(asked: Asked, each: Sequence[Sequence[Curve]]) -> str:
    """Describe thick and thin lines and bands; `each` has, for each line, the curves of its seeds."""
    counts = sorted(len(seeds) for seeds in each)
    lines = curves.drawn_as([info for seeds in each for info in seeds])
    small, large = ("small", "large") if lines == "marker" else ("thin", "thick")
    most = counts[-1]
    seeds = f"{curves.counts_of(sorted({counts[0], most}))} seeds"
    if asked.band == "ranks":
        return "band: 10–90 % of ranks" + (f"; {lines} and band: medians over {seeds}" if most > 1 else "")
    if most == 1:
        return "band: 10–90 % of ranks; one seed each"
    few = f"{small}: single seeds" + ", if fewer than five, or if some have ended" * (most >= FEW)
    band = "; band: its 90 % bootstrap interval" * (most >= FEW)
    return f"{large}: median over {seeds}{band}; {few}"


# ---------------------------------------------------------------------------------------------------------- panels
def _size(count: int, *, tall: bool = False) -> tuple[float, float]:
    rows = -(-count // _across(count))
    return 10.8, 5.6 if count == 1 else 1.9 + (3.4 if tall else 3.1) * rows


def _grid(drawn: Figure, count: int, *, shared: bool) -> list[Axes]:
    columns = _across(count)
    axes = list(
        drawn.subplots(-(-count // columns), columns, squeeze=False, sharex=shared, sharey=shared).ravel()
    )
    for ax in axes[count:]:
        ax.set_visible(False)
    return axes


def _across(count: int) -> int:
    return 2 if count in (2, 4) else min(count, ACROSS)


def _title(text: str, count: int) -> str:
    return style.in_lines(text, {1: 80, 2: 44}.get(_across(count), 28))


def _label(axes: Sequence[Axes], asked: Asked, *, rows: str) -> None:
    """Label the axes at the edge of the figure."""
    x = CLOCKS.get(asked.x) or (
        _better(asked.x).replace("\n", " ") if asked.kind == "front" else asked.x.replace("_", " ")
    )
    visible = [ax for ax in axes if ax.get_visible()]
    columns = _across(len(visible))
    for at, ax in enumerate(visible):
        if at % columns == 0:
            if asked.y == "bytes" and asked.kind != "heat":
                ax.yaxis.set_major_formatter(style.bytes_formatter())
            ax.set_ylabel(
                "\n".join(style.in_lines(line, 42 if len(visible) == 1 else 34) for line in rows.split("\n"))
            )
        if at + columns >= len(visible):
            ax.set_xlabel(x)
            if asked.x == "bytes":
                ax.xaxis.set_major_formatter(style.bytes_formatter())
            ax.tick_params(labelbottom=True)


def _legend(
    drawn: Figure, hue: str, looks: Mapping[str, style.Look], *, joined: bool, marked: bool = True
) -> None:
    handles = [
        Line2D(
            [],
            [],
            color=look.colour,
            linestyle=look.dashes if joined else "",
            label=style.in_lines(shown(hue, name)),
            marker=look.marker if marked or look.marked else "",
            markerfacecolor="white" if look.marked else look.colour,
            markersize=7,
        )
        for name, look in looks.items()
    ]
    drawn.legend(handles=handles, loc="outside right center", handlelength=3.2)


def rows_of(found: Sequence[tuple[str, Lines]], asked: Asked) -> Iterator[dict[str, Any]]:
    """Yield the data of `curves_figure`, a row for each point: panel, hue, the clock, median, low, high, seeds."""
    for title, lines in found:
        for name, seeds in lines.items():
            info = curves.over_seeds(list(seeds), band=asked.band)
            for x, median, low, high in zip(info.x, info.median, info.low, info.high, strict=True):
                values = {asked.x: float(x), "median": float(median), "low": float(low), "high": float(high)}
                yield {"panel": title, asked.hue or "curve": name, **values, "seeds": len(seeds)}
