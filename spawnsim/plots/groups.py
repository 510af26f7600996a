"""Averaging in groups: the sizes of the groups, and how fast the ranks agreed.

From columns with round, group size and a value of each rank; this module does not know how groups form.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from spawnsim.plots import style
from spawnsim.plots.experiments import Recorded, setting
from spawnsim.plots.series import Floats, Table, numbers

GONE = 1e-24  # variances below this are rounding errors


class Sizes(NamedTuple):
    """The number of ranks in groups of each size: `size` (sizes,), `ranks` (sizes,); size 0: in no group."""

    size: NDArray[np.int64]
    ranks: NDArray[np.int64]


class Contraction(NamedTuple):
    """By round, each (rounds,): the variance over ranks, and its ratio to the previous round's variance.

    `expected`: (N/M − 1)/(N − 1), the ratio for equal random groups of the mean size M among N ranks.
    """

    round: Floats
    variance: Floats
    ratio: Floats
    expected: Floats


def sizes(table: Table) -> Sizes:
    """Return the histogram of group sizes over ranks and rounds."""
    given = numbers(table, "group_size")
    found, counts = np.unique(given[~np.isnan(given)].astype(np.int64), return_counts=True)
    return Sizes(found, counts.astype(np.int64))


def contraction(table: Table, name: str = "value") -> Contraction:
    """Return the decrease from round to round of a column's variance over ranks."""
    values = numbers(table, name)
    rounds = numbers(table, "round")
    members = numbers(table, "group_size")
    steps = np.unique(rounds[~np.isnan(values)])
    variance, expected = np.empty(len(steps)), np.empty(len(steps))
    for index, step in enumerate(steps):
        here = (rounds == step) & ~np.isnan(values)
        variance[index] = np.var(values[here])
        # The ranks that recorded this round: dead ranks no longer belong to N.
        count, size = here.sum(), max(float(np.mean(members[here])), 1.0)
        expected[index] = (count / size - 1) / max(count - 1, 1)
    ratio = np.full(len(steps), np.nan)
    # Once all ranks agree, ratios of rounding errors would scatter over decades.
    np.divide(variance[1:], variance[:-1], out=ratio[1:], where=variance[:-1] > GONE)
    return Contraction(steps, variance, ratio, expected)


def draw_sizes(info: Sizes, ax: Axes | None = None, *, look: style.Look = style.LOOKS[0]) -> Axes:
    """Draw the histogram as bars."""
    ax = style.axes_or_new(ax)
    ax.bar(info.size, info.ranks, color=look.colour, width=0.8)
    ax.set_xlabel("members of the group (0: none found)")
    ax.set_ylabel("ranks × rounds")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax


def draw_contraction(info: Contraction, ax: Axes | None = None, *, look: style.Look = style.LOOKS[0]) -> Axes:
    """Draw each round's ratio as points, and the ratio of random groups as a dashed line."""
    ax = style.axes_or_new(ax)
    ax.plot(info.round, info.ratio, color=look.colour, marker=look.marker, linestyle="none", label="measured")
    ax.plot(info.round, info.expected, color="#333333", linestyle="--", label="equal random groups")
    ax.set_yscale("symlog", linthresh=1e-4)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("round")
    ax.set_ylabel("variance ÷ variance before")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend()
    return ax


def figure(run: Recorded, title: str) -> Figure:
    """Return two panels: group sizes and contraction."""
    histogram, shrinking = sizes(run.table), contraction(run.table)

    def panels(drawn: Figure) -> None:
        left, right = drawn.subplots(1, 2)
        draw_sizes(histogram, left)
        draw_contraction(shrinking, right)

    return style.compose(panels, f"Averaging in groups: {title}", setting([run]), (12.4, 5.0))
