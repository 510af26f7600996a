"""Allreduce on two levels: within the nodes to a leader, among the leaders, and back.

This room knows indices and which rank lives where. It must not know bytes, networks, clocks or the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from spawnsim.virtual.collectives.schedule import (
    Ints,
    Lane,
    Pattern,
    Round,
    Schedule,
    lane,
    masks,
    one_by_one,
)


def _inside(places: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield (child, parent) of a binomial tree in every node at once, from the leaves up."""
    order = np.argsort(places, kind="stable")
    begins = np.flatnonzero(np.diff(places[order], prepend=places[order[0]] - 1))
    lengths = np.diff(np.append(begins, len(places)))
    local = np.arange(len(places)) - np.repeat(begins, lengths)
    for mask in masks(int(lengths.max())):
        child = np.flatnonzero(local % (2 * mask) == mask)
        yield order[child], order[child - mask]


def _leaders(places: Ints) -> Ints:
    """Return the first rank of each node, rising."""
    return np.sort(np.unique(places, return_index=True)[1])


def _among(members: Ints, inner: Schedule, size: int) -> tuple[Round, ...]:
    """Return the rounds of a schedule among some of the ranks."""

    def moved(each: Lane) -> Lane:
        pattern = each.pattern
        return Lane(Pattern(members[pattern.source], members[pattern.dest], size), each.first, each.blocks)

    return tuple(Round(tuple(map(moved, each.lanes)), each.reduces) for each in inner.rounds)


def two_level_allreduce(places: Ints, inner: Schedule) -> Schedule:
    """Nodes of K ranks: 2⌈lg K⌉ steps inside, and the inner algorithm among one leader per node.

    Args:
        places: The node of each rank, int (P,).
        inner: An allreduce among as many ranks as there are nodes.
    """
    size = len(places)
    up = [lane(child, parent, size, blocks=inner.parts) for child, parent in _inside(places)]
    down = [lane(each.pattern.dest, each.pattern.source, size, blocks=inner.parts) for each in reversed(up)]
    rounds = one_by_one(up, reduces=True) + _among(_leaders(places), inner, size) + one_by_one(down)
    return Schedule(size, rounds, parts=inner.parts)


def neighbour_exchange(size: int, source: Ints, dest: Ints) -> Schedule:
    """Each rank sends along its edges and takes what comes: α + d nβ for d neighbours. Block i is that of edge i.

    The edges are dealt to lanes greedily, so that no rank is twice sender or twice receiver in one.
    """
    sending: list[set[int]] = [set() for _ in range(size)]
    taking: list[set[int]] = [set() for _ in range(size)]
    lanes: list[list[int]] = []
    for edge, (a, b) in enumerate(zip(source.tolist(), dest.tolist(), strict=True)):
        if a == b:
            continue
        number = next(i for i in range(len(lanes) + 1) if i not in sending[a] and i not in taking[b])
        if number == len(lanes):
            lanes.append([])
        lanes[number].append(edge)
        sending[a].add(number)
        taking[b].add(number)
    chosen = [np.array(edges) for edges in lanes]
    return Schedule(size, (Round(tuple(lane(source[e], dest[e], size, first=e) for e in chosen)),), "edges")
