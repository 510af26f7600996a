"""Who holds which samples: pure functions from (labels, number of ranks, seed) to indices.

Knows labels and random streams; must not know images, models or communicators. Ranks agree without talking,
since each computes the same answer from the same seed.

The label skew is that of Hsu, Qi and Brown (2019), arXiv:1909.06335: every rank draws its own mixture of classes
from a symmetric Dirichlet(alpha), and its samples from that mixture.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError
from spawnsim.random import generator

WORLD = -1  # the rank whose streams belong to everyone

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]


def check(rank: int, size: int, minimum: int, alpha: float | None) -> None:
    """Raise `ParameterError` unless these describe a rank's shard."""
    if not 0 <= rank < size:
        raise ParameterError(f"rank={rank}, size={size}: rank must be in 0..size-1")
    if minimum < 1:
        raise ParameterError(f"minimum={minimum}: give at least 1 sample for each rank")
    if alpha is not None and not 0 < alpha < np.inf:
        raise ParameterError(f"alpha={alpha}: give a positive number, or None for an even split")


def mixture(labels: Indices, seed: int, rank: int, alpha: float | None) -> Floats:
    """Return the rank's class probabilities, (classes,) float64; those of the data when alpha is None.

    They depend on (seed, rank) alone: the same rank has the same taste in a larger world.
    """
    counts = np.bincount(labels)
    if alpha is None:
        return np.asarray(counts / counts.sum(), np.float64)
    return generator(seed, rank, "shards.mixture").dirichlet(np.full(len(counts), alpha))


def partition(labels: Indices, size: int, seed: int, alpha: float | None) -> list[Indices]:
    """Deal samples to ranks, each at most once: `len(labels) // size` for every rank, the rest to nobody.

    Under a Dirichlet split a class may run out; ranks served later then draw from their other classes.
    """
    rng = generator(seed, WORLD, "shards.partition")
    order, share = rng.permutation(len(labels)), len(labels) // size
    if alpha is None:
        return [order[r * share : (r + 1) * share] for r in range(size)]
    pools = [list(order[labels[order] == c]) for c in range(labels.max() + 1)]
    return [_deal(pools, mixture(labels, seed, r, alpha), share, rng) for r in range(size)]


def _deal(pools: list[list[int]], taste: Floats, share: int, rng: np.random.Generator) -> Indices:
    taken: list[int] = []
    while len(taken) < share:
        stocked = np.array([bool(pool) for pool in pools])
        wanted = taste * stocked
        # A rank that wants only what is gone takes whatever there is.
        chances = wanted / wanted.sum() if wanted.sum() > 0 else stocked / stocked.sum()
        taken.append(pools[rng.choice(len(pools), p=chances)].pop())
    return np.array(taken, np.int64)


def bootstrap(labels: Indices, seed: int, rank: int, *, count: int, alpha: float | None) -> Indices:
    """Draw the rank's samples from its mixture, with replacement: classes first, then evenly within each."""
    chances = (mixture(labels, seed, rank, alpha) / np.bincount(labels))[labels]
    return generator(seed, rank, "shards.bootstrap").choice(len(labels), count, p=chances / chances.sum())
