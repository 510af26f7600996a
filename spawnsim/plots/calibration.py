"""Measured against fitted times of messages and collectives, over sizes.

This room knows sizes and seconds. It must not know how they were measured or fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from spawnsim.plots import style
from spawnsim.plots.series import Floats

MEASURED, FITTED = "#D55E00", "#0072B2"
COLUMNS = 3


class Curve(NamedTuple):
    """One operation by rising size, each (sizes,): bytes, measured and fitted seconds, what the fit has not seen."""

    nbytes: Floats
    measured_s: Floats
    fitted_s: Floats
    held_out: np.ndarray[Any, np.dtype[np.bool_]]


def curve(points: Iterable[tuple[int, float, float, bool]]) -> Curve:
    """Return the curve of (nbytes, measured_s, fitted_s, held_out) points."""
    columns = [np.array(column) for column in zip(*sorted(points), strict=True)]
    return Curve(columns[0].astype(np.float64), columns[1], columns[2], columns[3].astype(np.bool_))


def draw(info: Curve, ax: Axes | None = None) -> Axes:
    """Draw measured points (open where the fit has not seen them) on the fitted line."""
    ax = style.axes_or_new(ax)
    ax.plot(info.nbytes, info.fitted_s, color=FITTED, label="fitted")
    for unseen, face, name in (
        (False, MEASURED, "measured"),
        (True, "white", "measured, held out of the fit"),
    ):
        chosen = info.held_out == unseen
        ax.plot(
            info.nbytes[chosen],
            info.measured_s[chosen],
            "o",
            ms=5,
            mec=MEASURED,
            mfc=face,
            linestyle="none",
            label=name,
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter(style.bytes_formatter())
    ax.yaxis.set_major_formatter(EngFormatter(unit="s"))
    return ax


def figure(curves: Mapping[str, Curve], caption: str) -> Figure:
    """Return one panel per operation on shared axes."""
    rows = -(-len(curves) // COLUMNS)
    with style.talk():
        drawn = Figure(figsize=(11.6, 2.7 * rows + 1.3))
        panels = drawn.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
        for ax, (name, info) in zip(panels, curves.items(), strict=False):
            draw(info, ax)
            error = float(np.median(np.abs(info.fitted_s / info.measured_s - 1.0)))
            ax.set_title(name, weight="bold")
            ax.text(
                1, 1.03, f"{error:.0%} off", transform=ax.transAxes, ha="right", fontsize=11, color="#555555"
            )
        for ax in panels[len(curves) :]:
            ax.set_visible(False)
        for ax in panels[::COLUMNS]:
            ax.set_ylabel("time")
        for ax in panels[max(len(curves) - COLUMNS, 0) : len(curves)]:
            ax.set_xlabel("message or block")
            ax.tick_params(labelbottom=True)
        drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside lower right", ncols=3)
        style.frame(drawn, "Measured times, and what the fitted platform predicts", caption)
    return drawn
