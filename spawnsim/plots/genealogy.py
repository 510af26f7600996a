"""Descent of models: every rank begins as a founder, and a replaced rank takes over its donors' ancestry.

With one donor (population based training, "best_only") this is a family tree; with several it is a mixture, in which
each donor counts by its weight. Later training of a rank is ignored: this is descent, not similarity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator
from numpy.typing import NDArray

from spawnsim.plots import style
from spawnsim.plots.curves import events_since_start, median_end_s, since_first_row
from spawnsim.plots.experiments import Recorded, clock_of, donors_of, grouped, ranks_of
from spawnsim.plots.series import Floats
from spawnsim.random import WORLD, generator

Ints = NDArray[np.int64]
NEUTRAL_DRAWS = 10
# Up to this number of ranks a tree is drawn by default: more lines are indistinguishable.
MOST_RANKS = 512
NAMED_RANKS = 16  # up to this number of ranks, each line has its number
OTHERS = "#C8C8C8"


class Birth(NamedTuple):
    """One replacement: rank `replaced` takes `weights` (sum 1) of `donors`, and keeps `own` of itself."""

    time_s: float
    replaced: int
    donors: tuple[int, ...]
    weights: tuple[float, ...]
    own: float


class Genealogy(NamedTuple):
    """Descent over a run.

    `births` are ordered by time. `time_s` (births + 1,) begins with 0. `leading` (births + 1, ranks) is the founder
    with the largest share in each rank from then on. `founders` (births + 1,) is the effective number of founders,
    1/Σp² of their shares p in all ranks together; `neutral` is its mean when ranks and donors are drawn at random.
    """

    births: tuple[Birth, ...]
    time_s: Floats
    leading: Ints
    founders: Floats
    neutral: Floats
    end_s: float


def births_of(events: Sequence[Mapping[str, Any]], ranks: int) -> tuple[Birth, ...]:
    """Return the replacements that had donors, ordered by time; without weights, all donors count equally."""
    found = []
    for event in events:
        donors = donors_of(event, ranks) if event.get("kind") == "replacement" else []
        if not donors:  # new random weights, or no rank answered
            continue
        given = event.get("weights")
        # A program's own events may contain anything here, or nothing.
        if not (isinstance(given, (list, tuple)) and len(given) == len(donors)):
            given = [1.0] * len(donors)
        weights = np.clip(np.nan_to_num(np.asarray(given, float)), 0.0, None) + 1e-300
        own = event.get("momentum")
        own = float(np.clip(own, 0.0, 1.0)) if isinstance(own, (int, float)) else 0.0
        shares = tuple((weights / weights.sum()).tolist())
        found.append(Birth(float(event["time_s"]), int(event["rank"]), tuple(donors), shares, own))
    return tuple(sorted(found, key=lambda birth: birth.time_s))


def genealogy(births: Sequence[Birth], ranks: int, end_s: float = 0.0) -> Genealogy:
    """Return the descent that follows from replacements ordered by time; it has one row more than there are births."""
    leading, founders = _descent(births, ranks)
    stream = generator(0, WORLD, "genealogy")
    neutral = [_descent(_at_random(births, ranks, stream), ranks)[1] for _ in range(NEUTRAL_DRAWS)]
    time_s = np.asarray([0.0, *(birth.time_s for birth in births)])
    return Genealogy(
        births=tuple(births), time_s=time_s, leading=leading, founders=founders, neutral=np.mean(neutral, axis=0),
        end_s=max(end_s, float(time_s[-1])),
    )  # fmt: skip


def _descent(births: Sequence[Birth], ranks: int) -> tuple[Ints, Floats]:
    """Return the leading founder of each rank, (births + 1, ranks), and the effective number, (births + 1,)."""
    # The share of each founder in each rank, and in all ranks together.
    shares, total = np.eye(ranks, dtype=np.float32), np.ones(ranks)
    leading = np.empty((len(births) + 1, ranks), np.int64)
    founders = np.empty(len(births) + 1)
    leading[0], founders[0] = np.arange(ranks), ranks
    for place, birth in enumerate(births, 1):
        taken = np.asarray(birth.weights, np.float32) @ shares[list(birth.donors)]
        mixed = birth.own * shares[birth.replaced] + (1 - birth.own) * taken
        total += mixed - shares[birth.replaced]
        shares[birth.replaced] = mixed
        leading[place] = leading[place - 1]
        leading[place, birth.replaced] = mixed.argmax()
        founders[place] = ranks**2 / np.square(total).sum()
    return leading, founders


def _at_random(births: Sequence[Birth], ranks: int, stream: np.random.Generator) -> list[Birth]:
    """Return as many replacements with as many donors, with all ranks equally likely."""
    found = []
    for birth in births:
        replaced, *donors = stream.choice(ranks, min(1 + len(birth.donors), ranks), replace=False).tolist()
        weights = birth.weights[: len(donors)]
        found.append(birth._replace(replaced=replaced, donors=tuple(donors), weights=weights))
    return found


def of_run(run: Recorded) -> Genealogy:
    """Return the descent in a run with events "replacement", up to the end of its median rank."""
    ranks = ranks_of(run)
    return genealogy(births_of(events_since_start(run), ranks), ranks, median_end_s(run))


# ---------------------------------------------------------------------------------------------------------- drawing
def draw_tree(info: Genealogy, ax: Axes | None = None) -> Axes:
    """Draw a line for each rank, coloured by its leading founder, with families next to each other.

    The founders that lead in most ranks at the end have a colour, and their rank is written at the right edge; all
    other founders are grey. If all replacements have one donor, thin lines lead from the donor to the replaced rank.
    """
    ax = style.axes_or_new(ax)
    ranks = info.leading.shape[1]
    edges = np.append(info.time_s, max(info.end_s, info.time_s[-1]))
    # Most heirs at the end first; among founders without heirs, the longest total lead over ranks first.
    heirs = np.bincount(info.leading[-1], minlength=ranks)
    lasted_s = np.bincount(info.leading.ravel(), np.repeat(np.diff(edges), ranks), minlength=ranks)
    families = np.lexsort((-lasted_s, -heirs)).tolist()
    styles = dict(zip(families, style.LOOKS, strict=False))
    colours = {founder: look.colour for founder, look in styles.items()}
    # Families next to each other, the largest at the bottom: in rank order the lines would cross in a thicket.
    order = np.argsort([families.index(founder) for founder in info.leading[-1].tolist()], kind="stable")
    row = np.argsort(order)
    width = float(np.clip(150 / ranks, 0.6, 4))
    lines, inks = [], []
    for rank in range(ranks):
        led = info.leading[:, rank]
        changes = np.flatnonzero(np.diff(led, prepend=-1))
        for begin, end in zip(changes, [*changes[1:], len(led)], strict=True):
            lines.append([(edges[begin], row[rank]), (edges[end], row[rank])])
            inks.append(colours.get(int(led[begin]), OTHERS))
    # One collection: thousands of lines as separate objects take seconds.
    ax.add_collection(LineCollection(lines, colors=inks, linewidths=width, capstyle="butt"))
    if all(len(birth.donors) == 1 for birth in info.births):
        ways = [
            [(birth.time_s, row[birth.donors[0]]), (birth.time_s, row[birth.replaced])]
            for birth in info.births
        ]
        heads = [int(info.leading[place, birth.replaced]) for place, birth in enumerate(info.births, 1)]
        inks = [colours.get(founder, OTHERS) for founder in heads]
        ax.add_collection(LineCollection(ways, colors=inks, linewidths=min(width, 1.0), alpha=0.7))
    ax.set_xlim(0, info.end_s * style.PAST_END or 1)
    ax.set_ylim(-1, ranks)
    ax.set_yticks([])
    ax.grid(visible=False)
    ax.set_ylabel(f"{ranks:,} ranks, by family")
    if ranks <= NAMED_RANKS:
        ax.set_yticks(row, [f"{rank}" for rank in range(ranks)])
    ends = {founder: float(np.mean(row[info.leading[-1] == founder])) for founder in styles if heirs[founder]}
    style.label_ends(
        ax, {f"{rank}": at for rank, at in ends.items()}, {f"{rank}": look for rank, look in styles.items()}
    )
    return ax


def _is_wide(*found: Genealogy) -> bool:
    """Return whether the numbers of founders differ so much that a linear axis would hide the smallest."""
    every = np.concatenate([part for info in found for part in (info.founders, info.neutral)])
    return bool(every.max() >= 8 * every.min())


def draw_founders(info: Genealogy, ax: Axes | None = None, *, log: bool | None = None) -> Axes:
    """Draw the effective number of founders over time, with a curve for ranks and donors drawn at random.

    The axis is logarithmic if the number falls to an eighth or less, unless `log` decides.
    """
    ax = style.axes_or_new(ax)
    # Only the last of simultaneous replacements: the replacements of a round are one step, not a spike of many.
    last = np.append(np.diff(info.time_s) > 0, True)
    edges = np.append(info.time_s[last], max(info.end_s, info.time_s[-1]))
    for values, colour, dashes, name in (
        (info.founders, style.LOOKS[0].colour, "-", "this run"), (info.neutral, "#777777", "--", "at random"),
    ):  # fmt: skip
        heights = np.append(values[last], values[-1])
        ax.step(edges, heights, where="post", color=colour, linestyle=dashes, label=name)
    log = _is_wide(info) if log is None else log
    if log:
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_locator(LogLocator(2, numticks=6))
    else:
        ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.set_xlim(0, info.end_s * style.PAST_END or 1)
    # Two lines: the panel is not high enough for one long line.
    ax.set_ylabel(f"effective\nfounders{' (log)' if log else ''}")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.3g}")
    ax.legend(loc="best", frameon=False, fontsize=10)
    return ax


def figure(runs: Mapping[str, Recorded], title: str = "") -> Figure:
    """Return the trees of runs next to each other, with the number of founders below each; keys are above the trees."""
    found = {name: of_run(run) for name, run in runs.items()}
    sizes = {info.leading.shape[1] for info in found.values()}

    def panels(drawn: Figure) -> None:
        # A tree is as high as its run has ranks, so each has its own axis: next to 100 ranks, 4 would fill only a
        # corner.
        axes = drawn.subplots(2, len(runs), sharex="col", height_ratios=(2.2, 1), squeeze=False)
        for below in axes[1, 1:]:
            below.sharey(axes[1, 0])
            below.tick_params(labelleft=False)
        log = _is_wide(*found.values())  # one scale, as these panels share their axis
        for (above, below), (name, info) in zip(axes.T, found.items(), strict=True):
            draw_tree(info, above).set_title(style.in_lines(name, 70 if len(runs) == 1 else 38))
            draw_founders(info, below, log=log).set_xlabel(clock_of([*runs.values()]))
            style.plain_seconds(below)
        for ax in [*axes[1, 1:], *(axes[0, 1:] if len(sizes) == 1 else ())]:
            ax.set_ylabel("")

    looks = len(style.LOOKS)
    most = f", of the {looks} with most heirs; grey: others" if max(sizes) > looks else ""
    caption = (
        f"{grouped([*runs.values()]).caption()}\ncolour and number at the right: the founder (rank) of the first "
        f"model that a rank mostly descends from{most}\neffective number of founders: "
        f"1/Σp² of their shares; dashed: ranks and donors drawn at random{since_first_row([*runs.values()])}"
    )
    title = title or "Descent of the models after replacements"
    return style.compose(panels, title, caption, (max(4.6 * len(runs), 8), 7.2))
