"""Algorithms in P-1 steps: rings, and exchanges with every other rank in turn.

This room knows indices. It must not know bytes, networks, clocks or the kernel.
"""

from __future__ import annotations

import numpy as np

from spawnsim.virtual.collectives.schedule import Ints, Lane, Pattern, Round, Schedule, lane, one_by_one


class _Circle:
    """All ranks in a circle: views of one array serve for every rotation, which saves P² indices."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = np.arange(size)
        self.twice = np.concatenate([self.ranks, self.ranks])

    def turned(self, by: int) -> Ints:
        """Return (rank + by) mod P for all ranks."""
        start = by % self.size
        return self.twice[start : start + self.size]

    def rotation(self, by: int) -> Pattern:
        """Return the pattern in which each rank sends to the one `by` places on."""
        return Pattern(self.ranks, self.turned(by), self.size, self.turned(-by))


def _around(size: int, lag: int, *, reduces: bool = False) -> tuple[Round, ...]:
    """Return the P-1 steps of a ring in which rank r passes on block r - lag - step."""
    circle = _Circle(size)
    onward = circle.rotation(1)
    lanes = (Lane(onward, circle.turned(-lag - step)) for step in range(size - 1))
    return one_by_one(lanes, reduces=reduces)


def ring_allgather(size: int) -> Schedule:
    """(P-1)α + (P-1)/P nβ, n bytes in the end."""
    return Schedule(size, _around(size, 0), "blocks")


def ring_reduce_scatter(size: int) -> Schedule:
    """(P-1)α + (P-1)/P n(β + γ)."""
    return Schedule(size, _around(size, 1, reduces=True), "blocks")


def ring_allreduce(size: int) -> Schedule:
    """2(P-1)α + 2(P-1)/P nβ + (P-1)/P nγ (Patarasuk and Yuan, JPDC 69 (2009) 117-124)."""
    return Schedule(size, _around(size, 1, reduces=True) + _around(size, 0), parts=size)


def pairwise_reduce_scatter(size: int) -> Schedule:
    """(P-1)α + (P-1)/P n(β + γ): in step k each rank sends block r+k to its owner."""
    circle = _Circle(size)
    lanes = (Lane(circle.rotation(step), circle.turned(step)) for step in range(1, size))
    return Schedule(size, one_by_one(lanes, reduces=True), "blocks")


def _exchange(size: int, step: int, circle: _Circle) -> Lane:
    """Return step `step` of an exchange among all: partners by exclusive or where that works."""
    if size & (size - 1):
        return Lane(circle.rotation(step))
    return lane(circle.ranks, circle.ranks ^ step, size)


def pairwise_alltoall(size: int) -> Schedule:
    """(P-1)(α + mβ), m bytes for each pair."""
    circle = _Circle(size)
    return Schedule(size, one_by_one(_exchange(size, step, circle) for step in range(1, size)), "pairs")


def linear_alltoall(size: int) -> Schedule:
    """α + (P-1)mβ: all sends at once, each rank beginning with its neighbour."""
    circle = _Circle(size)
    return Schedule(size, (Round(tuple(Lane(circle.rotation(step)) for step in range(1, size))),), "pairs")


def linear_scan(size: int) -> Schedule:
    """(P-1)(α + nβ + nγ) for the last rank: a chain."""
    ranks = np.arange(size)
    lanes = (lane(ranks[r : r + 1], ranks[r + 1 : r + 2], size) for r in range(size - 1))
    return Schedule(size, one_by_one(lanes, reduces=True))


def ring_after_scatter(size: int, scatter: Schedule) -> Schedule:
    """Broadcast: (⌈lg P⌉ + P-1)α + 2(P-1)/P nβ."""
    return Schedule(size, scatter.rounds + _around(size, 0), parts=size)
