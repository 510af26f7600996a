"""Figures of the simulator's fidelity (calibration, validation), and of its advice: goodput against cadence.

Sizes, seconds and relative errors are computed by `spawnsim.fidelity`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from spawnsim.plots import style
from spawnsim.plots.series import Floats

MEASURED, FITTED = "#D55E00", "#0072B2"
COLUMNS = 3


class Curve(NamedTuple):
    """One operation by increasing size, each (sizes,): bytes, measured and fitted seconds, `held_out` of the fit."""

    nbytes: Floats
    measured_s: Floats
    fitted_s: Floats
    held_out: np.ndarray[Any, np.dtype[np.bool_]]


def curve(points: Iterable[tuple[int, float, float, bool]]) -> Curve:
    """Return the curve of (nbytes, measured_s, fitted_s, held_out) points."""
    columns = [np.array(column) for column in zip(*sorted(points), strict=True)]
    return Curve(columns[0].astype(np.float64), columns[1], columns[2], columns[3].astype(np.bool_))


def draw_calibration(info: Curve, ax: Axes | None = None) -> Axes:
    """Draw measured points (open if held out of the fit) on the fitted line."""
    ax = style.axes_or_new(ax)
    ax.plot(info.nbytes, info.fitted_s, color=FITTED, label="fitted")
    faces = ((False, MEASURED, "measured"), (True, "white", "measured, held out of the fit"))
    for unseen, face, name in faces:
        chosen = info.held_out == unseen
        x, y = info.nbytes[chosen], info.measured_s[chosen]
        ax.plot(x, y, "o", ms=5, mec=MEASURED, mfc=face, linestyle="none", label=name)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter(style.bytes_formatter())
    ax.yaxis.set_major_formatter(EngFormatter(unit="s"))
    return ax


def calibration_figure(curves: Mapping[str, Curve], caption: str) -> Figure:
    """Return one panel per operation on shared axes."""
    rows = -(-len(curves) // COLUMNS)

    def panels(drawn: Figure) -> None:
        axes = drawn.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
        for ax, (name, info) in zip(axes, curves.items(), strict=False):
            draw_calibration(info, ax)
            # The median over all points, fitted ones included, since the figure shows both; scores separate them.
            error = f"{float(np.median(np.abs(info.fitted_s / info.measured_s - 1.0))):.0%} off"
            ax.set_title(name, weight="bold")
            ax.text(1, 1.03, error, transform=ax.transAxes, ha="right", fontsize=11, color="#555555")
        for ax in axes[len(curves) :]:
            ax.set_visible(False)
        for ax in axes[::COLUMNS]:
            ax.set_ylabel("time")
        for ax in axes[max(len(curves) - COLUMNS, 0) : len(curves)]:
            ax.set_xlabel("message or block")
            ax.tick_params(labelbottom=True)
        drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower right", ncols=3)

    title = "Measured times, and predictions of the fitted platform"
    return style.compose(panels, title, caption, (11.6, 2.7 * rows + 1.3))


COLOURS = {"replayed": "#0072B2", "fitted": "#009E73", "constant": "#E69F00"}
AIM = 0.1  # the band in which a prediction should be
SPREAD = 0.5  # share of a bar's width over which the runs' marks are spread

Errors = Mapping[str, Mapping[str, Sequence[float]]]
"""Measure -> model -> predicted over measured, less 1, for each run."""


def draw_validation(errors: Errors, ax: Axes | None = None) -> Axes:
    """Draw the median error of each model as a bar, and each run's as a mark."""
    ax = style.axes_or_new(ax)
    models = list(next(iter(errors.values())))
    width = 0.8 / len(models)
    ax.axhspan(-AIM, AIM, color="#eeeeee", zorder=0)
    ax.axhline(0.0, color="#444444", lw=1.0)
    for index, model in enumerate(models):
        places = np.arange(len(errors)) + (index - (len(models) - 1) / 2) * width
        colour = COLOURS.get(model, "#56B4E9")
        medians = [float(np.median(found[model])) for found in errors.values()]
        ax.bar(places, medians, 0.92 * width, color=colour, label=model)
        for place, found in zip(places, errors.values(), strict=True):
            across = place + SPREAD * width * np.linspace(-0.5, 0.5, len(found[model]) + 2)[1:-1]
            ax.plot(across, found[model], "o", ms=4, mfc="white", mec="#444444", linestyle="none")
    ax.set_xticks(range(len(errors)), list(errors))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_ylabel("predicted against measured")
    ax.grid(visible=False, axis="x")
    return ax


def validation_figure(errors: Errors, caption: str) -> Figure:
    """Return the figure of a validation."""

    def panels(drawn: Figure) -> None:
        ax = draw_validation(errors, drawn.subplots())
        drawn.legend(*ax.get_legend_handles_labels(), loc="outside right upper", title="compute times")

    caption = f"{caption} · grey: within {AIM:.0%}"
    return style.compose(panels, "Prediction errors", caption, (9.6, 5.2))


Cadences = Mapping[str, Sequence[tuple[float, float, float, float]]]
"""Policy -> (actual steps between exchanges, goodput, least and largest goodput) for each of its choices."""


def draw_advice(curves: Cadences, asked: Sequence[int], target: float, ax: Axes | None = None) -> Axes:
    """Draw a line for each policy, with bars from least to largest goodput; the ticks are the requested cadences."""
    ax = style.axes_or_new(ax)
    looks = style.looks(list(curves))
    steps = style.aside(ax, np.unique(np.asarray(asked, dtype=float)), len(curves), log=True)
    for (name, points), step in zip(curves.items(), steps, strict=True):
        places, middle, low, high = map(np.array, zip(*sorted(points), strict=True))
        x, bars, colour = places * 10**step, np.stack([middle - low, high - middle]), looks[name].colour
        ax.errorbar(x, middle, bars, color=colour, marker="o", ms=5, capsize=4, label=name)
    ax.axhline(target, color="#444444", lw=1.0, ls=":")
    ax.set_xscale("log")
    ax.set_xticks(asked, [f"{each}" for each in asked], minor=False)
    ax.minorticks_off()
    ax.set_ylim(0.0, 1.05)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_xlabel("effective steps between exchanges")
    ax.set_ylabel("goodput")
    return ax


def advice_figure(curves: Cadences, asked: Sequence[int], target: float, caption: str) -> Figure:
    """Return the figure of `spawnsim advise`."""

    def panels(drawn: Figure) -> None:
        ax = draw_advice(curves, asked, target, drawn.subplots())
        drawn.legend(*ax.get_legend_handles_labels(), loc="outside right upper")

    caption = f"{caption} · dotted: target of {target:.0%}"
    return style.compose(panels, "Goodput: share of perfect training", caption, (9.6, 5.2))
