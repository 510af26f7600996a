"""Who reduces how much: the minimax partition of a vector over peers of unequal bandwidth.

Pure arithmetic. In a butterfly of n peers, peer i sends and receives V·(1 + (n − 2)·w_i) when it reduces the fraction
w_i, in time V·(1 + (n − 2)·w_i)/b_i. The fractions minimise the slowest peer's time, and among all such choices the
next slowest, and so on. They are found by filling water, exactly, where others solve a linear programme: with
S = {i : w_i > 0} and a level x, w_i = (x·b_i − 1)/(n − 2) on S, and Σ w_i = 1 gives x = (n − 2 + |S|)/Σ_S b_i. S is a
set of fastest peers (a peer with x·b_i ≤ 1 spends 1/b_i ≥ x although it reduces nothing), so at most n levels are
tried. The sum of the fractions rises with x, hence there is one level, and no choice of fractions does better: below
it the fractions that keep within the level sum to less than 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError

Floats = NDArray[np.float64]


def fractions(bandwidths: Sequence[float] | Floats) -> Floats:
    """Return each peer's fraction of the vector, shape (n,), sum 1; peers of bandwidth 0 get 0."""
    given = np.asarray(bandwidths, dtype=np.float64)
    if not given.size or not (np.isfinite(given) & (given >= 0)).all() or not given.any():
        raise ParameterError(f"bandwidths {given.tolist()}: give numbers of at least 0, at least one above")
    peers = given.size
    if peers <= 2:  # every partition takes equally long: n − 2 is 0
        return np.asarray(given / given.sum())
    order = np.argsort(-given, kind="stable")
    fastest = given[order]
    levels = (peers - 2 + np.arange(1, peers + 1)) / np.cumsum(fastest)
    filled = (
        int(np.flatnonzero(levels * fastest > 1)[-1]) + 1
    )  # the largest set whose slowest peer still gets some
    found = np.zeros(peers)
    found[order[:filled]] = (levels[filled - 1] * fastest[:filled] - 1) / (peers - 2)
    return np.asarray(found / found.sum())


def slowest(parts: Sequence[float] | Floats, bandwidths: Sequence[float] | Floats) -> float:
    """Return the time of the slowest peer with bandwidth, for a vector of length 1: max (1 + (n − 2)·w_i)/b_i."""
    rates = np.asarray(bandwidths, dtype=np.float64)
    load = 1 + (rates.size - 2) * np.asarray(parts, dtype=np.float64)
    return float(np.max(load[rates > 0] / rates[rates > 0]))


def whole(length: int, scores: Floats) -> list[int]:
    """Return whole numbers that sum to `length`, in proportion to scores (the Hagenbach-Bischoff method)."""
    quota = np.floor(length * scores / scores.sum() * (1 - 1e-12)).astype(np.int64)
    for _ in range(length - int(quota.sum())):
        quota[int(np.argmax(scores / (quota + 1)))] += 1
    return [int(count) for count in quota]


def counts(length: int, bandwidths: Sequence[float | None], min_size: int = 0) -> list[int]:
    """Return how many of `length` elements each peer reduces.

    Unknown bandwidths (None) count as the mean of the known ones above 0; 0 leaves all work to others. Peers that
    would get fewer than `min_size` elements get none, as long as someone has that many.
    """
    known = [rate for rate in bandwidths if rate]
    mean = sum(known) / len(known) if known else 1.0
    rates = np.asarray([mean if rate is None else rate for rate in bandwidths], dtype=np.float64)
    scores = fractions(rates)
    least = min_size / max(length, 1)
    if scores.max() >= least:
        scores[scores < least] = 0.0
    return whole(length, scores)
