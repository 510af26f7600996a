"""Trees: binomial, linear (a star) and the pipelined chain. The root is rank 0.

This room knows indices. It must not know bytes, networks, clocks or the kernel.
"""

from __future__ import annotations

import numpy as np

from spawnsim.virtual.collectives.schedule import Ints, Lane, Round, Schedule, lane, masks, one_by_one


def _down(size: int, mask: int) -> Lane:
    """Return the sends of a binomial tree over the distance `mask`: each carries the receiver's whole subtree."""
    parent = np.arange(0, size - mask, 2 * mask)
    child = parent + mask
    return lane(parent, child, size, first=child, blocks=np.minimum(mask, size - child))


def _up(size: int, mask: int) -> Lane:
    """Return the same sends the other way round."""
    down = _down(size, mask)
    return lane(down.pattern.dest, down.pattern.source, size, first=down.first, blocks=down.blocks)


def binomial_scatter(size: int) -> Schedule:
    """⌈lg P⌉α + (P-1)/P nβ, n bytes at the root."""
    return Schedule(size, one_by_one(_down(size, mask) for mask in reversed(masks(size))), "blocks")


def binomial_gather(size: int) -> Schedule:
    """⌈lg P⌉α + (P-1)/P nβ, n bytes at the root."""
    return Schedule(size, one_by_one(_up(size, mask) for mask in masks(size)), "blocks")


def _whole(each: Lane) -> Lane:
    return Lane(each.pattern)


def binomial_bcast(size: int) -> Schedule:
    """⌈lg P⌉(α + nβ)."""
    return Schedule(size, one_by_one(_whole(_down(size, mask)) for mask in reversed(masks(size))))


def binomial_reduce(size: int) -> Schedule:
    """⌈lg P⌉(α + nβ + nγ)."""
    return Schedule(size, one_by_one((_whole(_up(size, mask)) for mask in masks(size)), reduces=True))


def tree_barrier(size: int) -> Schedule:
    """2⌈lg P⌉α: up and down a binomial tree."""
    return Schedule(size, binomial_reduce(size).rounds + binomial_bcast(size).rounds)


def reduce_then_bcast(size: int) -> Schedule:
    """2⌈lg P⌉(α + nβ) + ⌈lg P⌉nγ."""
    return tree_barrier(size)


def _star(size: int, *, inward: bool, whole: bool, reduces: bool = False) -> tuple[Round, ...]:
    """Return the one round of a star: the hub's messages in the order of the other ranks."""

    def spokes(ends: Ints) -> Lane:
        hub = np.zeros_like(ends)
        source, dest = (ends, hub) if inward else (hub, ends)
        return lane(source, dest, size, first=0 if whole else ends)

    ranks = np.arange(size)
    if size < 2:
        return ()
    return (Round(tuple(spokes(ranks[r : r + 1]) for r in range(1, size)), reduces, star=spokes(ranks[1:])),)


def linear_scatter(size: int) -> Schedule:
    """α + (P-1)mβ, blocks of m bytes: one card feeds them all."""
    return Schedule(size, _star(size, inward=False, whole=False), "blocks")


def linear_gather(size: int) -> Schedule:
    """α + (P-1)mβ, blocks of m bytes: one card takes them all."""
    return Schedule(size, _star(size, inward=True, whole=False), "blocks")


def linear_bcast(size: int) -> Schedule:
    """α + (P-1)nβ."""
    return Schedule(size, _star(size, inward=False, whole=True))


def linear_reduce(size: int) -> Schedule:
    """α + (P-1)nβ with the arithmetic (P-1)nγ beside it, the slower of the two counting."""
    return Schedule(size, _star(size, inward=True, whole=True, reduces=True))


def chain_bcast(size: int, segments: int) -> Schedule:
    """(P-1)(α + sβ) + (S-1)sβ with S segments of s bytes, each passed on as soon as it has come."""
    ranks = np.arange(size)
    rounds = []
    for step in range(size - 1 + segments - 1):
        source = ranks[max(0, step - segments + 1) : min(step, size - 2) + 1]
        rounds.append(Round((lane(source, source + 1, size, first=step - source),)))
    return Schedule(size, tuple(rounds), parts=segments)
