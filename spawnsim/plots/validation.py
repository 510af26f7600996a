"""Predicted over measured times: one group per measure, one bar per model of compute times.

This room knows relative errors by measure and model. It must not know how they came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from spawnsim.plots import style

COLOURS = {"replayed": "#0072B2", "fitted": "#009E73", "constant": "#E69F00"}
AIM = 0.1  # the band that a prediction should end in
SPREAD = 0.5  # share of a bar's width over which the runs' marks are spread

Errors = Mapping[str, Mapping[str, Sequence[float]]]
"""Measure -> model -> predicted over measured, less 1, of each run."""


def draw(errors: Errors, ax: Axes | None = None) -> Axes:
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


def figure(errors: Errors, caption: str) -> Figure:
    """Return the figure of a validation."""
    with style.talk():
        drawn = Figure(figsize=(9.6, 5.2))
        ax = drawn.subplots()
        draw(errors, ax)
        drawn.legend(*ax.get_legend_handles_labels(), loc="outside right upper", title="compute times")
        style.frame(drawn, "How far predictions are off", f"{caption} · grey: within {AIM:.0%}")
    return drawn
