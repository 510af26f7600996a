"""How fast a metric converges: median and quantile band over ranks, against virtual seconds and iterations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D

from spawnsim.plots import style
from spawnsim.plots.curves import (
    BANDS,
    QUANTITIES,
    Curve,
    alike,
    curve,
    draw,
    draw_bar,
    draw_measured,
    drawn_as,
    lines_caption,
    looks_of,
    of_mean_model,
    of_run,
    over_seeds,
    since_start,
)
from spawnsim.plots.experiments import Group, Groups, Recorded, clock_of, grouped, setting
from spawnsim.plots.series import FEW

POINTS = 2000  # of a curve with a logarithmic axis: 240 would leave only a few for its beginning
OWN, MEAN = "each rank's own model, median over ranks", "the mean of all ranks' models"


def curves_of(found: Groups, name: str, over: str) -> dict[str, Curve]:
    """Return each group's curve by its label."""
    # Reduce each run to a median over its ranks first: its ranks are not independent, so only seeds make an
    # interval.
    return {group.label: over_seeds([of_run(run, name, over) for run in group.runs]) for group in found}


def draw_groups(found: Groups, curves: Mapping[str, Curve], over: str, ax: Axes) -> None:
    """Draw the curves of all groups against one axis: virtual ranks as lines, real ranks as markers."""
    styles, many = looks_of(found), len(found.groups) > BANDS
    for place, group in enumerate(found, 1):
        info, look = curves[group.label], styles[group.label]
        if group.real:
            draw_measured(info, ax, look=look)
        else:
            draw(info, ax, look=look, band=not many)
            if many:  # next to each other, over the second half
                draw_bar(info, ax, 0.5 + 0.5 * place / (len(found.groups) + 1), look=look)
    ax.set_xlabel(clock_of(found.runs) if over == "time_s" else over)


def figure(runs: Sequence[Recorded] | Groups, name: str = "accuracy", title: str = "") -> Figure:
    """Return the two-panel figure: against virtual seconds (left) and iterations (right), with a shared height."""
    found = grouped(runs)
    quantity = QUANTITIES.get(name, name.replace("_", " "))
    times, iterations = (curves_of(found, name, over) for over in ("time_s", "iteration"))

    def panels(drawn: Figure) -> None:
        left, right = drawn.subplots(1, 2, sharey=True)
        draw_groups(found, times, "time_s", left)
        draw_groups(found, iterations, "iteration", right)
        _scale(left, list(times.values()))
        left.set_ylabel(f"{quantity}, median over ranks")
        if any(group.real for group in found):
            left.set_xlabel("time, virtual or measured (s)")
        for ax in (left, right):
            ax.set_xlim(left=0)
        style.plain_seconds(left)
        # After all changes of the axes: the names are placed within the current limits.
        style.label_ends(right, _virtual_first(found, iterations), looks_of(found))
        if {group.real for group in found} == {False, True}:
            _explain_markers(left, {looks_of(found)[group.label].marker for group in found if group.real})

    band = f"; {'band' if len(found.groups) <= BANDS else 'bars'}: 10–90 % of ranks"
    # Real ranks are markers without a band; the end of the caption describes them.
    alone = [times[group.label] for group in found if not group.real and len(group.runs) == 1]
    lines = lines_caption(
        found, list(times.values()), f"{drawn_as(alone)}: median over ranks{band}" if alone else "",
        of_ranks=", median, seconds since each rank's first row",
    )  # fmt: skip
    title = title or f"{quantity[0].upper()}{quantity[1:]}{found.by}"
    return style.compose(panels, title, f"{found.caption()}\n{lines}")


def race(settings: Mapping[str, Sequence[Recorded]], target: float, title: str) -> Figure:
    """Return a figure of accuracy over time: a row per setting, the ranks' own models next to their mean.

    Args:
        settings: runs by the name of their setting; within a setting, runs differ only in policy and seed.
        target: an accuracy; a line marks it.
        title: the title of the figure.
    """
    rows = {name: grouped(runs) for name, runs in settings.items()}
    looks = style.looks(group.name for found in rows.values() for group in found)
    everything = grouped([run for found in rows.values() for run in found.runs])
    curves = {
        (name, what): {group.label: _against_the_clock(group, what) for group in found}
        for name, found in rows.items()
        for what in (OWN, MEAN)
    }
    every = [info for some in curves.values() for info in some.values()]

    def panels(drawn: Figure) -> None:
        axes = drawn.subplots(len(rows), 2, sharex=True, sharey=True, squeeze=False)
        for ax, ((name, what), some) in zip(axes.flat, curves.items(), strict=True):
            for group in rows[name]:
                info = some[group.label]
                draw(info, ax, look=looks[group.name], band=info.runs >= FEW)
            ax.axhline(target, color="#777777", linewidth=1.0, linestyle=":")
            ax.set_title(f"{name}:\n{what}", fontsize=12)
            if what == OWN:
                ax.set_ylabel("accuracy")
            else:
                style.label_ends(ax, {label: info.end for label, info in some.items()}, looks)
        axes[0, 0].set(xscale="log", xlim=(0.1, max(info.x[-1] for info in every)), ylim=(0, 1))
        for ax in axes[-1]:
            ax.set_xlabel(clock_of(everything.runs))
            style.plain_seconds(ax)

    lines = lines_caption(everything, every, "line: one seed")
    where = setting(everything.runs).replace(" · ", ", ")
    caption = f"{len(looks)} policies on {where}. {lines[0].upper()}{lines[1:]}; dotted: accuracy {target:g}."
    return style.compose(panels, title, f"{caption}\n{everything.endings()}", (10.8, 1.5 + 2.4 * len(rows)))


def _against_the_clock(group: Group, what: str) -> Curve:
    each = [
        of_mean_model(run) if what == MEAN else curve(since_start(run), "accuracy", points=POINTS)
        for run in group.runs
    ]
    return over_seeds(each, points=POINTS)


def _virtual_first(found: Groups, curves: Mapping[str, Curve]) -> dict[str, float]:
    """Return one label for groups that look alike, with its height: the line's if there is one, else the markers'."""
    chosen: dict[str, Group] = {}
    for group, name in zip(found, alike(found).values(), strict=True):
        if name not in chosen or chosen[name].real:
            chosen[name] = group
    return {group.label: curves[group.label].end for group in chosen.values()}


def _explain_markers(ax: Axes, markers: set[str]) -> None:
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
    """Use a log axis for a loss that falls by more than a factor of thirty; limit an accuracy's axis to one."""
    drawn = [each for info in curves for each in (info.seeds or (info,))]
    values = np.concatenate([each.median for each in drawn])
    # A log axis has no place below 0: the band of some ranks would end at its edge.
    if min(each.low.min() for each in drawn) >= 0 and 0 < 30 * values.min() < values.max():
        ax.set_yscale("log")
    elif values.min() >= 0 and max(info.high.max(initial=0) for info in curves) <= 1:
        ax.set_ylim(top=min(1.0, ax.get_ylim()[1]))
