"""Who was replaced, when, by whom, how often: the events of kind "replacement" as arrays.

This room knows replacement events and the number of ranks; it draws nothing (`lineage.py` and `raster.py` do).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spawnsim.plots.series import Floats
from spawnsim.plots.source import donors_of

Ints = NDArray[np.int64]


class Replacements(NamedTuple):
    """Replacements in order of time.

    `rank`, `time_s`, `iteration`, `round` are (events,); `donor` and `receiver` are (pairs,), one pair for each
    donor of each event; `ranks` is the number of ranks, `end_s` the end of the run.
    """

    rank: Ints
    time_s: Floats
    iteration: Floats
    round: Ints
    donor: Ints
    receiver: Ints
    ranks: int
    end_s: float


class Chance(NamedTuple):
    """What ranks drawn at random would give: `counts` (k,) share of ranks replaced k times, `never` (rounds,)."""

    counts: Floats
    time_s: Floats
    never: Floats


def replacements(events: Sequence[Mapping[str, Any]], ranks: int, end_s: float = 0.0) -> Replacements:
    """Return the arrays of a run's replacement events; an event without a round is a round of its own."""
    chosen = sorted((e for e in events if e.get("kind") == "replacement"), key=lambda e: float(e["time_s"]))
    donors = [np.asarray(donors_of(event, ranks), dtype=np.int64) for event in chosen]
    rank = np.asarray([event["rank"] for event in chosen], dtype=np.int64)
    time_s = np.asarray([event["time_s"] for event in chosen], dtype=np.float64)
    return Replacements(
        rank=rank,
        time_s=time_s,
        iteration=np.asarray([_number(event.get("iteration")) for event in chosen], dtype=np.float64),
        round=_rounds(chosen),
        donor=np.concatenate(donors) if donors else np.empty(0, dtype=np.int64),
        receiver=np.repeat(rank, [len(each) for each in donors]) if donors else np.empty(0, dtype=np.int64),
        ranks=ranks,
        end_s=max(end_s, float(time_s[-1]) if len(time_s) else 0.0),
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and abs(value) < 2**63 else np.nan


def _rounds(events: Sequence[Mapping[str, Any]]) -> Ints:
    """Number the rounds 0, 1, … by first appearance."""
    seen: dict[object, int] = {}
    keys = (
        ("round", str(event["round"])) if "round" in event else ("event", at)
        for at, event in enumerate(events)
    )
    return np.asarray([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


def per_rank(info: Replacements) -> Ints:
    """Return how often each rank was replaced, (ranks,)."""
    return np.bincount(info.rank, minlength=info.ranks)


def gifts(info: Replacements) -> Ints:
    """Return how often each rank was a donor, (ranks,)."""
    return np.bincount(info.donor, minlength=info.ranks)


def never_replaced(info: Replacements) -> tuple[Floats, Floats]:
    """Return times and the share of ranks not yet replaced at each: a step curve from (0, 1)."""
    _, first = np.unique(info.rank, return_index=True)
    time_s = np.sort(info.time_s[first])
    share = 1 - np.arange(1, len(time_s) + 1) / info.ranks
    share = np.concatenate([[1.0], share])
    return np.concatenate([[0.0], time_s, [info.end_s]]), np.append(share, share[-1])


def by_chance(info: Replacements) -> Chance:
    """Return what the same rounds would give if each picked its ranks at random, all equally likely.

    The number of times a rank is picked is then Poisson-binomial over the rounds (a plain convolution).
    """
    sizes = np.bincount(info.round)
    share = sizes / info.ranks
    counts = np.ones(1)
    for chance in share:
        counts = np.convolve(counts, [1 - chance, chance])[: int(per_rank(info).max(initial=0)) + 16]
    middle_s = np.asarray([np.median(info.time_s[info.round == index]) for index in range(len(sizes))])
    order = np.argsort(middle_s, kind="stable")
    return Chance(counts, middle_s[order], np.cumprod(1.0 - share[order], dtype=np.float64))


def matrix(info: Replacements, bins: int = 0) -> tuple[NDArray[np.float64], Floats]:
    """Return (donor bins, receiver bins) counts and the bin edges; by default about four pairs a cell, 50 at most."""
    bins = bins or int(np.clip(np.sqrt(len(info.donor) / 4), 10, 50))
    edges = rank_edges(info.ranks, bins)
    counts, _, _ = np.histogram2d(info.donor, info.receiver, bins=(edges, edges))
    return counts, edges


def rank_edges(ranks: int, at_most: int) -> Floats:
    """Return the edges of bins of ranks, all of one whole width; the last bin may reach beyond the last rank.

    A width that divides the number of ranks is taken when there is one within a factor of two.
    """
    least = -(-ranks // max(at_most, 1))
    width = next((step for step in range(least, 2 * least) if ranks % step == 0), least)
    return np.arange(0, ranks + width, width, dtype=np.float64)


def top_share(counts: Ints, part: float = 0.1) -> float:
    """Return the share of all counts that the top `part` of ranks hold."""
    if not counts.sum():
        return 0.0
    top = max(1, round(part * len(counts)))
    return float(np.sort(counts)[-top:].sum() / counts.sum())
