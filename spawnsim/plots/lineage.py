"""Who replaced whom: the donor × replaced matrix, how often each rank was replaced, who was never replaced.

This room knows how to draw `Replacements`; the arrays come from `replacement.py`. Dashed grey always means
"what picking ranks at random would give".
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from spawnsim.plots import style
from spawnsim.plots.raster import of
from spawnsim.plots.replacement import (
    Replacements,
    by_chance,
    gifts,
    matrix,
    never_replaced,
    per_rank,
    top_share,
)
from spawnsim.plots.source import Recorded, clock_of, grouped

INK, CHANCE = "#0072B2", "#777777"
FEW_RANKS = 16


def draw_matrix(info: Replacements, ax: Axes | None = None) -> Axes:
    """Draw donor (down) against replaced (across) as a density; up to 16 ranks the numbers are written in."""
    ax = style.axes_or_new(ax)
    counts, edges = matrix(info)
    mesh = ax.pcolormesh(edges - 0.5, edges - 0.5, counts, cmap="Blues", vmin=0, rasterized=True)
    ax.grid(visible=False)
    ax.set_aspect("equal")
    ax.set(xlabel="replaced rank", ylabel="donor rank", title="who replaced whom")
    if info.ranks <= FEW_RANKS:
        _write_numbers(counts, ax)
    else:
        name = f"pairs per cell of {edges[1]:.0f} × {edges[1]:.0f} ranks"
        ax.figure.colorbar(mesh, ax=ax, orientation="horizontal", shrink=0.5, aspect=24, pad=0.02, label=name)
        ax.set(xlim=(-0.5, info.ranks - 0.5), ylim=(-0.5, info.ranks - 0.5))
        for which in "xy":
            style.in_thousands(ax, which)
    return ax


def _write_numbers(counts: np.ndarray[tuple[int, ...], np.dtype[np.float64]], ax: Axes) -> None:
    for (donor, replaced), count in np.ndenumerate(counts):
        dark = count > 0.6 * counts.max()
        ax.text(
            replaced, donor, f"{count:.0f}", ha="center", va="center", color="white" if dark else "#333333"
        )
    ax.set_xticks(range(len(counts)))
    ax.set_yticks(range(len(counts)))


def draw_counts(info: Replacements, ax: Axes | None = None) -> Axes:
    """Draw the share of ranks replaced 0, 1, 2 … times, beside what chance alone would give."""
    ax = style.axes_or_new(ax)
    counts = np.bincount(per_rank(info)) / info.ranks
    expected = by_chance(info).counts
    ax.bar(np.arange(len(counts)), 100 * counts, color=INK, width=0.85, label="this run")
    last = max(len(counts), int(np.searchsorted(np.cumsum(expected), 0.999)) + 1)
    expected = expected[:last]
    ax.plot(
        np.arange(len(expected)), 100 * expected, color=CHANCE, linestyle="--", marker=".", label="at random"
    )
    ax.set(xlabel="times replaced", ylabel="share of ranks (%)", title="replacements per rank")
    ax.set_xlim(-0.7, last - 0.3)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(loc="upper right")
    return ax


def draw_never(info: Replacements, ax: Axes | None = None) -> Axes:
    """Draw the share of ranks that still carry the model they began with, beside what chance would give."""
    ax = style.axes_or_new(ax)
    time_s, share = never_replaced(info)
    chance = by_chance(info)
    ax.step(time_s, 100 * share, where="post", color=INK, label="this run")
    ax.step(
        np.concatenate([[0.0], chance.time_s, [info.end_s]]),
        100 * np.concatenate([[1.0], chance.never, chance.never[-1:] if len(chance.never) else [1.0]]),
        where="post", color=CHANCE, linestyle="--", linewidth=1.8, label="at random",
    )  # fmt: skip
    ax.set(xlabel="virtual time (s)", ylabel="share of ranks (%)", title="never replaced so far")
    ax.set_xlim(0, info.end_s or 1)
    ax.set_ylim(0, 103)
    return ax


def _caption(run: Recorded, info: Replacements) -> str:
    replaced, pairs = len(info.rank), len(info.donor)
    facts = f"{style.counted(replaced, 'replacement')}, {style.counted(pairs, 'donor → replaced pair')}"
    top = (
        f"the busiest tenth of donors gave {top_share(gifts(info)):.0%}"
        if len(info.donor)
        else "no donors recorded"
    )
    return f"{grouped([run]).caption()}\n{facts}; {top}; dashed: ranks picked at random in the same rounds"


def figure(run: Recorded, title: str = "", *, name: str = "") -> Figure:
    """Return the matrix (left) and the two distributions (right) of one run."""
    info = of(run)
    with style.talk():
        drawn = Figure(figsize=(11.4, 6.4))
        left, right = list(drawn.subfigures(1, 2, width_ratios=(1.2, 1), squeeze=False)[0])
        draw_matrix(info, left.subplots())
        below = _right_side(info, right)
        below.set_xlabel(clock_of([run]))
        style.plain_seconds(below)
        default = f"Who replaced whom, and how evenly{f': {name}' if name else ''}"
        style.frame(drawn, title or default, _caption(run, info))
    return drawn


def _right_side(info: Replacements, side: SubFigure) -> Axes:
    above, below = side.subplots(2, 1)
    draw_counts(info, above)
    return draw_never(info, below)
