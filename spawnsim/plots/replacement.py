"""Which ranks were replaced, when, by which donors, how often: "replacement" events as arrays and figures.

Two figures: the rank × time raster with its margins (`raster_figure`), and the donor × replaced matrix with the
number of replacements per rank and the share never replaced (`lineage_figure`). Dashed grey always shows the result
of picking ranks at random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from spawnsim.plots import style
from spawnsim.plots.curves import events_since_start, median_end_s, since_first_row
from spawnsim.plots.experiments import Recorded, clock_of, donors_of, grouped, label, ranks_of
from spawnsim.plots.series import Floats
from spawnsim.units import counted

Ints = NDArray[np.int64]


class Replacements(NamedTuple):
    """Replacements ordered by time.

    `rank`, `time_s`, `round` are (events,); `donor` and `receiver` are (pairs,), one pair for each donor of each
    event; `ranks` is the number of ranks, `end_s` the end of the run.
    """

    rank: Ints
    time_s: Floats
    round: Ints
    donor: Ints
    receiver: Ints
    ranks: int
    end_s: float


class Chance(NamedTuple):
    """The expectation for ranks drawn at random: `counts` (k,) share of ranks replaced k times, `never` (rounds,)."""

    counts: Floats
    time_s: Floats
    never: Floats


def replacements(events: Sequence[Mapping[str, Any]], ranks: int, end_s: float = 0.0) -> Replacements:
    """Return the arrays of a run's replacement events; an event without a round counts as a separate round."""
    # Sorted again: a user's own events, and events of runs put together, need not be in order.
    chosen = sorted((e for e in events if e.get("kind") == "replacement"), key=lambda e: float(e["time_s"]))
    donors = [np.asarray(donors_of(event, ranks), dtype=np.int64) for event in chosen]
    rank = np.asarray([event["rank"] for event in chosen], dtype=np.int64)
    time_s = np.asarray([event["time_s"] for event in chosen], dtype=np.float64)
    # Numbered 0, 1, … by first appearance. As texts, since a program may identify its rounds by lists, which cannot
    # be dict keys.
    seen: dict[object, int] = {}
    keys = [str(event["round"]) if "round" in event else at for at, event in enumerate(chosen)]
    return Replacements(
        rank=rank,
        time_s=time_s,
        round=np.asarray([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64),
        donor=np.concatenate([*donors, np.empty(0, dtype=np.int64)]),
        receiver=np.repeat(rank, np.array([len(each) for each in donors], dtype=np.int64)),
        ranks=ranks,
        end_s=max(end_s, float(time_s[-1]) if len(time_s) else 0.0),
    )


def per_rank(info: Replacements) -> Ints:
    """Return the number of times that each rank was replaced, (ranks,)."""
    return np.bincount(info.rank, minlength=info.ranks)


def donations(info: Replacements) -> Ints:
    """Return the number of times that each rank was a donor, (ranks,)."""
    return np.bincount(info.donor, minlength=info.ranks)


def never_replaced(info: Replacements) -> tuple[Floats, Floats]:
    """Return times, and the share of ranks not yet replaced at each: a step curve from (0, 1)."""
    _, first = np.unique(info.rank, return_index=True)
    # The first replacement of each rank: events are ordered by time, so `unique` finds the earliest.
    time_s = np.sort(info.time_s[first])
    share = 1 - np.arange(1, len(time_s) + 1) / info.ranks
    share = np.concatenate([[1.0], share])
    return np.concatenate([[0.0], time_s, [info.end_s]]), np.append(share, share[-1])


def by_chance(info: Replacements) -> Chance:
    """Return the expectation for the same rounds if each picked its ranks at random, all equally likely.

    The number of times that a rank is picked is then Poisson-binomial over the rounds (a plain convolution).
    """
    sizes = np.bincount(info.round)
    share = sizes / info.ranks
    counts = np.ones(1)
    for chance in share:
        # Cut off above the observed counts: the full distribution of thousands of rounds is quadratic work for
        # zeros.
        counts = np.convolve(counts, [1 - chance, chance])[: int(per_rank(info).max(initial=0)) + 16]
    # Ranks learn of one round at different times; its median represents it on the axis.
    middle_s = np.asarray([np.median(info.time_s[info.round == index]) for index in range(len(sizes))])
    order = np.argsort(middle_s, kind="stable")
    return Chance(counts, middle_s[order], np.cumprod(1.0 - share[order], dtype=np.float64))


def matrix(info: Replacements, bins: int = 0) -> tuple[NDArray[np.float64], Floats]:
    """Return (donor bins, receiver bins) counts and the bin edges; by default about four pairs per cell, at most 50."""
    bins = bins or int(np.clip(np.sqrt(len(info.donor) / 4), 10, 50))
    edges = rank_edges(info.ranks, bins)
    counts, _, _ = np.histogram2d(info.donor, info.receiver, bins=(edges, edges))
    return counts, edges


def rank_edges(ranks: int, at_most: int) -> Floats:
    """Return the edges of bins of ranks, all with one integer width; the last bin may reach beyond the last rank.

    A width that divides the number of ranks is preferred if there is one within a factor of two.
    """
    # Integer widths: bins with 3 ranks here and 4 there draw stripes that are not in the data.
    least = -(-ranks // max(at_most, 1))
    width = next((step for step in range(least, 2 * least) if ranks % step == 0), least)
    return np.arange(0, ranks + width, width, dtype=np.float64)


def top_share(counts: Ints, part: float = 0.1) -> float:
    """Return the share of all counts that belongs to the top `part` of ranks."""
    if not counts.sum():
        return 0.0
    top = max(1, round(part * len(counts)))
    return float(np.sort(counts)[-top:].sum() / counts.sum())


def replacements_of(run: Recorded) -> Replacements:
    """Return the replacements of a run, until half of its ranks have recorded their last row.

    Stragglers that continue alone would leave most of the axis empty. Later replacements still count, and extend it.
    """
    return replacements(events_since_start(run), ranks_of(run), median_end_s(run))


def draw_raster(info: Replacements, ax: Axes | None = None, *, colour: str = style.LOOKS[1].colour) -> Axes:
    """Draw one mark per replacement at (time, rank); marks shrink and fade as they grow in number."""
    ax = style.axes_or_new(ax)
    events = max(len(info.rank), 1)
    # Overlapping marks would turn 100,000 events into one even area.
    size = float(np.clip(40_000 / (events + 400), 1.2, 40))
    alpha = float(np.clip(25_000 / events, 0.3, 0.9))
    # Rasterized: vector marks make a PDF of many megabytes that viewers draw for minutes.
    ax.scatter(info.time_s, info.rank, s=size, color=colour, alpha=alpha, linewidths=0, rasterized=True)
    ax.set_xlim(0, info.end_s * style.PAST_END or 1)
    ax.set_ylim(-0.5 - 0.005 * info.ranks, info.ranks - 0.5 + 0.005 * info.ranks)
    ax.set(xlabel="virtual time (s)", ylabel="rank")
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))  # no ticks between two ranks
    style.in_thousands(ax, "y")
    return ax


def _draw_rate(info: Replacements, ax: Axes, colour: str) -> None:
    # Counts, not counts per second: a single replacement in a bin of 10 ms does not mean 100 per second.
    bins = int(np.clip(len(info.rank), 12, 120))
    counts, edges = np.histogram(info.time_s, bins=bins, range=(0, info.end_s or 1))
    ax.stairs(counts, edges, fill=True, color=colour, alpha=0.75)
    # Above the panel: two lines at its side would be taller than the panel.
    ax.set_title(f"replacements in each {style.three_digits(1000 * edges[1])} ms", fontsize=11)
    ax.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    ax.set_ylim(bottom=0)
    ax.tick_params(labelbottom=False)
    style.in_thousands(ax, "y")


def _draw_margin(info: Replacements, ax: Axes, colour: str) -> None:
    """Draw replacements per rank, averaged over bins of neighbouring ranks."""
    edges = rank_edges(info.ranks, 100)
    # Divided by the ranks in each bin, as the last bin may be only partly filled.
    total, _ = np.histogram(np.arange(info.ranks), bins=edges, weights=per_rank(info))
    held, _ = np.histogram(np.arange(info.ranks), bins=edges)
    width = float(edges[1])
    # Bars with gaps while gaps are visible: equal counts would form one block.
    height = 0.8 * width if len(held) <= 50 else width
    ax.barh(edges[:-1] + (width - 1) / 2, total / np.maximum(held, 1), height, color=colour, alpha=0.75)
    mean = f",\nmean of {most}" if (most := int(held.max(initial=1))) > 1 else ""
    ax.set_xlabel(f"times\nreplaced{mean}", fontsize=11)
    ax.xaxis.set_major_locator(MaxNLocator(2, integer=not mean))
    ax.set_xlim(left=0)
    ax.tick_params(labelleft=False)


def raster_figure(run: Recorded, title: str = "", *, name: str = "") -> Figure:
    """Return the raster, with the rate of replacements above it and the count per rank at its side."""
    found = grouped([run], labels=[name] if name else [])
    info, colour = replacements_of(run), style.looks([label(run)])[label(run)].colour
    # Axes and text also have the dark grey of "none".
    colour = style.LOOKS[1].colour if colour == style.KNOWN["none"].colour else colour

    def panels(drawn: Figure) -> None:
        grid = drawn.subplots(
            2, 2, sharex="col", sharey="row", width_ratios=(8, 1.1), height_ratios=(1, 5), squeeze=False
        )
        # Removed, not hidden: a hidden panel still shares its axis and sets limits.
        grid[0, 1].remove()
        draw_raster(info, grid[1, 0], colour=colour).set_xlabel(clock_of([run]))
        _draw_rate(info, grid[0, 0], colour)
        _draw_margin(info, grid[1, 1], colour)
        style.plain_seconds(grid[1, 0])

    title = title or f"Which rank was replaced, and when{f': {name}' if name else ''}"
    caption = f"{found.caption()}\n{counted(len(info.rank), 'replacement')}{since_first_row([run])}"
    return style.compose(panels, title, caption, (10.8, 6.2))


INK, CHANCE = "#0072B2", "#777777"
FEW_RANKS = 16


def draw_matrix(info: Replacements, ax: Axes | None = None) -> Axes:
    """Draw donor (down) against replaced (across) as a density; up to 16 ranks, cells contain their numbers."""
    ax = style.axes_or_new(ax)
    few = info.ranks <= FEW_RANKS
    counts, edges = matrix(info, info.ranks if few else 0)  # with numbers, a cell is one pair of ranks
    mesh = ax.pcolormesh(edges - 0.5, edges - 0.5, counts, cmap="Blues", vmin=0, rasterized=True)
    ax.grid(visible=False)
    ax.set_aspect("equal")
    ax.set(xlabel="replaced rank", ylabel="donor rank", title="who replaced whom")
    if few:
        _write_numbers(counts, ax)
    else:
        name = f"pairs per cell of {edges[1]:.0f} × {edges[1]:.0f} ranks"
        ax.figure.colorbar(mesh, ax=ax, orientation="horizontal", shrink=0.5, aspect=24, pad=0.02, label=name)
        ax.set(xlim=(-0.5, info.ranks - 0.5), ylim=(-0.5, info.ranks - 0.5))
        for which in "xy":
            style.in_thousands(ax, which)
    return ax


def _write_numbers(counts: np.ndarray[tuple[int, ...], np.dtype[np.float64]], ax: Axes) -> None:
    for donor, replaced in np.argwhere(counts):  # zeros would hide the rest: most pairs never meet
        count = counts[donor, replaced]
        dark = count > 0.6 * counts.max()
        ax.text(
            replaced, donor, f"{count:.0f}", ha="center", va="center", color="white" if dark else "#333333"
        )
    ax.set_xticks(range(len(counts)))
    ax.set_yticks(range(len(counts)))


def draw_counts(info: Replacements, ax: Axes | None = None) -> Axes:
    """Draw the share of ranks replaced 0, 1, 2 … times, with the expectation from chance alone."""
    ax = style.axes_or_new(ax)
    counts = np.bincount(per_rank(info)) / info.ranks
    expected = by_chance(info).counts
    ax.bar(np.arange(len(counts)), 100 * counts, color=INK, width=0.85, label="this run")
    # Up to 99.9 % of the chance distribution: show its tail even if this run does not reach it.
    last = max(len(counts), int(np.searchsorted(np.cumsum(expected), 0.999)) + 1)
    expected = expected[:last]
    ax.plot(
        np.arange(len(expected)), 100 * expected, color=CHANCE, linestyle="--", marker=".", label="at random"
    )
    ax.set(xlabel="times replaced", ylabel="share of ranks (%)", title="replacements per rank")
    ax.set_xlim(-0.7, last - 0.3)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(loc="best")
    return ax


def draw_never(info: Replacements, ax: Axes | None = None) -> Axes:
    """Draw the share of ranks that were never replaced so far, with the expectation from chance alone."""
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
    ax.set_xlim(0, info.end_s * style.PAST_END or 1)
    ax.set_ylim(0, 103)
    return ax


def lineage_figure(run: Recorded, title: str = "", *, name: str = "") -> Figure:
    """Return the matrix (left) and the two distributions (right) of one run."""
    info = replacements_of(run)

    def panels(drawn: Figure) -> None:
        left, right = list(drawn.subfigures(1, 2, width_ratios=(1.2, 1), squeeze=False)[0])
        draw_matrix(info, left.subplots())
        above, below = right.subplots(2, 1)
        draw_counts(info, above)
        draw_never(info, below).set_xlabel(clock_of([run]))
        style.plain_seconds(below)

    facts = f"{counted(len(info.rank), 'replacement')}, {counted(len(info.donor), 'donor → replaced pair')}"
    share = f"the busiest tenth of donors gave {top_share(donations(info)):.0%}"
    top = share if len(info.donor) else "no donors recorded"
    dashed = f"dashed: ranks picked at random in the same rounds{since_first_row([run])}"
    title = title or f"Who replaced whom, and how evenly{f': {name}' if name else ''}"
    return style.compose(panels, title, f"{grouped([run]).caption()}\n{facts}; {top}; {dashed}", (11.4, 6.4))
