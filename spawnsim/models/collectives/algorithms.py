"""The algorithms of collectives, each a function that returns the schedule for P ranks, with its cost as a formula.

* Trees: binomial, linear (a star) and the pipelined chain. The root is rank 0.
* P-1 steps: rings, and exchanges with every other rank in turn.
* About lg P steps whose distance doubles or halves, for any number of ranks. If P is not a power of two, the first
  2(P - P') ranks fold, where P' is the greatest power of two below P: in each pair one rank hands its data to the
  other, sits out the core phase, and receives the result. This follows MPICH; the even rank hands over.
* Two levels: within the nodes to a leader, among the leaders, and back. Also the exchange with neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spawnsim.models.collectives.schedule import Lane, Pattern, Round, Schedule, lane, masks, one_by_one
from spawnsim.models.network.cost import Ints


# One binomial tree serves scatter, gather, bcast and reduce: only the direction, the order of its levels and the
# contents of a message differ. The subtree sizes, which are easily wrong if P is not a power of two, are therefore
# computed here once.
def _down(size: int, mask: int) -> Lane:
    """Return the sends of a binomial tree over the distance `mask`: each carries the receiver's whole subtree."""
    parent = np.arange(0, size - mask, 2 * mask)
    child = parent + mask
    return lane(parent, child, size, first=child, blocks=np.minimum(mask, size - child))


def _up(size: int, mask: int) -> Lane:
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
    # P-1 lanes of one message each would make P-1 rounds of array operations on single numbers. A single lane of all
    # messages lets the dataflow evaluate them at once (`Evaluation.fan_out`, `fan_in`).

    def spokes(ends: Ints) -> Lane:
        hub = np.zeros_like(ends)
        source, dest = (ends, hub) if inward else (hub, ends)
        return lane(source, dest, size, first=0 if whole else ends)

    ranks = np.arange(size)
    if size < 2:
        return ()
    return (Round(tuple(spokes(ranks[r : r + 1]) for r in range(1, size)), reduces, star=spokes(ranks[1:])),)


def linear_scatter(size: int) -> Schedule:
    """α + (P-1)mβ, blocks of m bytes: one NIC sends them all."""
    return Schedule(size, _star(size, inward=False, whole=False), "blocks")


def linear_gather(size: int) -> Schedule:
    """α + (P-1)mβ, blocks of m bytes: one NIC receives them all."""
    return Schedule(size, _star(size, inward=True, whole=False), "blocks")


def linear_bcast(size: int) -> Schedule:
    """α + (P-1)nβ."""
    return Schedule(size, _star(size, inward=False, whole=True))


def linear_reduce(size: int) -> Schedule:
    """α + (P-1)nβ in parallel with the arithmetic (P-1)nγ; the slower of the two counts."""
    return Schedule(size, _star(size, inward=True, whole=True, reduces=True))


def chain_bcast(size: int, segments: int) -> Schedule:
    """(P-1)(α + sβ) + (S-1)sβ with S segments of s bytes, each forwarded as soon as it arrives."""
    # In each round the chain is a diagonal: rank r forwards segment step - r, so all links with a segment to carry are
    # busy at once, and a round is one lane.
    ranks = np.arange(size)
    rounds = []
    for step in range(size - 1 + segments - 1):
        source = ranks[max(0, step - segments + 1) : min(step, size - 2) + 1]
        rounds.append(Round((lane(source, source + 1, size, first=step - source),)))
    return Schedule(size, tuple(rounds), parts=segments)


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
        """Return the pattern in which each rank sends to the rank `by` places further."""
        return Pattern(self.ranks, self.turned(by), self.size, self.turned(-by))


def _around(size: int, lag: int, *, reduces: bool = False) -> tuple[Round, ...]:
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


def segmented_ring_allreduce(size: int, segments: int) -> Schedule:
    """A ring whose blocks travel in S segments: while one is combined, the next one travels.

    2(P-1)α + (P-1)/P n(2β + γ/S) if the link is slower than the arithmetic.
    """
    # One lane per segment: a rank sends all segments of its block, and combines each as it arrives.
    circle = _Circle(size)
    onward = circle.rotation(1)

    def rounds(lag: int, *, reduces: bool) -> tuple[Round, ...]:
        blocks = (circle.turned(-lag - step) * segments for step in range(size - 1))
        return tuple(
            Round(tuple(Lane(onward, first + part) for part in range(segments)), reduces) for first in blocks
        )

    return Schedule(size, rounds(1, reduces=True) + rounds(0, reduces=False), parts=size * segments)


def _tree_in_order(size: int) -> tuple[Ints, Ints]:
    """Return the parents and depths of all ranks but 0, the root of a binary tree whose inner ranks are even.

    A rank whose lowest bit is b is a child of the one of rank ± b that 2b divides and 4b does not; without such a
    rank, of rank - b.
    """
    ranks = np.arange(1, size)
    low = ranks & -ranks
    above = ranks - low | 2 * low
    parent = np.where(above < size, above, ranks - low)
    depth, at = np.zeros(size - 1, np.int64), ranks
    while at.any():
        depth += at > 0
        at = np.where(at > 0, parent[at - 1], 0)
    return parent, depth


def _partners(ends: Ints) -> Ints:
    """Return for each edge the other edge with the same end, of which there is at most one; -1 without one."""
    order, found = np.argsort(ends, kind="stable"), np.full(len(ends), -1)
    one, other = order[:-1], order[1:]
    same = ends[one] == ends[other]
    found[one[same]], found[other[same]] = other[same], one[same]
    return found


def _two_colours(source: Ints, dest: Ints) -> Ints:
    """Colour edges with 0 and 1 so that no two of a colour have the same source or the same dest."""
    beside = np.stack([_partners(source), _partners(dest)], axis=1).tolist()
    colours = [-1] * len(source)
    for first in range(len(source)):
        reached = [(first, 0)]
        while reached:
            edge, colour = reached.pop()
            if colours[edge] < 0:
                colours[edge] = colour
                reached += [(other, 1 - colour) for other in beside[edge] if other >= 0]
    return np.array(colours, np.int64)


def double_tree_allreduce(size: int, segments: int) -> Schedule:
    """NCCL's double binary tree: the ranks that are inner in one tree are leaves in the other; each has half the bytes.

    Each half travels up its tree in S segments, and then down: 2(D + S - 1) rounds for trees of depth D, in each of
    which a rank sends and receives at most two segments: at most 2(D + S - 1)(α + nβ/S) in all, without arithmetic
    (Sanders, Speck, Träff, Parallel Computing 35 (2009) 581-594).
    """
    parent, depth = _tree_in_order(size)
    ranks, deepest = np.arange(size), int(depth.max(initial=0))
    trees = (ranks, (ranks + 1) % size if size % 2 else ranks[::-1])
    source = np.concatenate([rank_at[1:] for rank_at in trees])
    dest = np.concatenate([rank_at[parent] for rank_at in trees])
    colours, late = _two_colours(source, dest), deepest - np.tile(depth, 2)
    half = np.repeat([0, segments], size - 1)
    patterns: dict[tuple[int, bytes], Pattern] = {}
    up = []
    for step in range(deepest + segments - 1 if size > 1 else 0):
        segment, lanes = step - late, []
        for colour in (0, 1):
            who = (segment >= 0) & (segment < segments) & (colours == colour)
            pattern = patterns.setdefault((colour, who.tobytes()), Pattern(source[who], dest[who], size))
            lanes.append(Lane(pattern, (half + segment)[who]))
        up.append(Round(tuple(each for each in lanes if len(each.pattern.source)), True))
    back = {id(each): Pattern(each.dest, each.source, size) for each in patterns.values()}
    down = (tuple(Lane(back[id(each.pattern)], each.first) for each in one.lanes) for one in reversed(up))
    return Schedule(size, (*up, *map(Round, down)), parts=2 * segments)


def pairwise_reduce_scatter(size: int) -> Schedule:
    """(P-1)α + (P-1)/P n(β + γ): in step k each rank sends block r+k to its owner."""
    circle = _Circle(size)
    lanes = (Lane(circle.rotation(step), circle.turned(step)) for step in range(1, size))
    return Schedule(size, one_by_one(lanes, reduces=True), "blocks")


def _exchange(size: int, step: int, circle: _Circle) -> Lane:
    """Return step `step` of an exchange among all: partners by exclusive or if possible."""
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


@dataclass(frozen=True, eq=False)
class Core:
    """A power of two of ranks among `size`: `ranks` (P',) in the core, `out` sit out, `mates` are their partners."""

    size: int
    ranks: Ints
    out: Ints
    mates: Ints

    @classmethod
    def of(cls, size: int, *, keep_even: bool = False) -> Core:
        """Fold `size` ranks. With `keep_even` the odd rank of a pair sits out, so that rank 0 (a root) stays in."""
        # MPICH lets the odd rank of a pair stay in the core. A reduce to rank 0 must keep the even ranks. Otherwise
        # the root would sit out and its result would need one more message.
        extra = size - (1 << (size.bit_length() - 1))
        even = np.arange(0, 2 * extra, 2)
        stay, out = (even, even + 1) if keep_even else (even + 1, even)
        return cls(size, np.concatenate([stay, np.arange(2 * extra, size)]), out, stay)

    @property
    def masks(self) -> list[int]:
        return masks(len(self.ranks))

    @property
    def edges(self) -> Ints:
        """Return (P'+1,): core rank c represents the blocks of ranks edges[c] to edges[c+1] (pairs are neighbours)."""
        extra = len(self.out)
        core = np.arange(len(self.ranks) + 1)
        return np.minimum(2 * core, core + extra)

    def fold(
        self, *, reduces: bool = True, first: Ints | int = 0, blocks: Ints | int = 1
    ) -> tuple[Round, ...]:
        """Return the round in which the ranks that sit out hand over their data."""
        return one_by_one(
            [lane(self.out, self.mates, self.size, first=first, blocks=blocks)], reduces=reduces
        )

    def unfold(self, first: Ints | int = 0, blocks: Ints | int = 1) -> tuple[Round, ...]:
        return one_by_one([lane(self.mates, self.out, self.size, first=first, blocks=blocks)])

    def partners(self, mask: int) -> Pattern:
        """Return the exchange of all core ranks with the ranks `mask` away."""
        return Pattern(self.ranks, self.ranks[np.arange(len(self.ranks)) ^ mask], self.size)


def recursive_doubling_allreduce(size: int) -> Schedule:
    """⌊lg P⌋(α + nβ + nγ), and 2(α + nβ) + nγ more if P is not a power of two."""
    core = Core.of(size)
    exchanges = one_by_one((Lane(core.partners(mask)) for mask in core.masks), reduces=True)
    return Schedule(size, core.fold() + exchanges + core.unfold())


def _halving(core: Core) -> Iterator[Lane]:
    """Yield the exchanges of a vector halving: partners 1, 2, 4, … away, and each keeps half of its data.

    The lower half stays with the core rank whose bit is clear. Blocks are P' equal parts of the vector.
    """
    own = np.arange(len(core.ranks))
    start, width = np.zeros_like(own), len(own)
    for mask in core.masks:
        width //= 2
        mine = np.where(own & mask, start + width, start)
        theirs = np.where(own & mask, start, start + width)
        yield Lane(core.partners(mask), theirs, width)
        start = mine


def _kept(core: Core) -> dict[int, Ints]:
    """Return mask -> where each core rank's part begins just after the exchange over that distance."""
    own = np.arange(len(core.ranks))
    start, width, kept = np.zeros_like(own), len(own), {}
    for mask in core.masks:
        width //= 2
        start = kept[mask] = np.where(own & mask, start + width, start)
    return kept


def rabenseifner_allreduce(size: int) -> Schedule:
    """2lg P α + 2(P-1)/P nβ + (P-1)/P nγ; with P' for P and a fold, 2(α + nβ) + nγ, if P is not a power of two.

    R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19 (2005) 49-66.
    """
    core = Core.of(size)
    kept, parts = _kept(core), len(core.ranks)
    down = one_by_one(_halving(core), reduces=True)
    up = one_by_one(
        Lane(core.partners(mask), kept[mask], parts // (2 * mask)) for mask in reversed(core.masks)
    )
    whole = core.fold(blocks=parts), core.unfold(blocks=parts)
    return Schedule(size, whole[0] + down + up + whole[1], parts=parts)


def rabenseifner_reduce(size: int) -> Schedule:
    """2lg P α + 2(P-1)/P nβ + (P-1)/P nγ; with P' for P and α + nβ + nγ more if P is not a power of two."""
    core = Core.of(size, keep_even=True)
    kept, parts = _kept(core), len(core.ranks)
    down = one_by_one(_halving(core), reduces=True)
    lanes = []
    for mask in reversed(core.masks):
        give = np.arange(mask, 2 * mask)  # ranks with a higher bit have given already
        to = core.ranks[give - mask]
        lanes.append(lane(core.ranks[give], to, size, first=kept[mask][give], blocks=parts // (2 * mask)))
    return Schedule(size, core.fold(blocks=parts) + down + one_by_one(lanes), parts=parts)


def _owned(core: Core, mask: int) -> tuple[Ints, Ints]:
    """Return the blocks (first, count) of each core rank's group of `mask` neighbours."""
    own = np.arange(len(core.ranks)) & -mask
    edges = core.edges
    return edges[own], edges[own + mask] - edges[own]


def halving_reduce_scatter(size: int) -> Schedule:
    """For P = 2^k: lg P α + (P-1)/P n(β + γ); else folded with the whole vector, unfolded with a block."""
    core = Core.of(size)
    lanes = []
    for mask in reversed(core.masks):
        first, count = _owned(core, mask)
        away = np.arange(len(core.ranks)) ^ mask
        lanes.append(Lane(core.partners(mask), first[away], count[away]))
    rounds = core.fold(blocks=size) + one_by_one(lanes, reduces=True) + core.unfold(first=core.out)
    return Schedule(size, rounds, "blocks")


def doubling_allgather(size: int) -> Schedule:
    """For P = 2^k: lg P α + (P-1)/P nβ; else α + mβ to fold and α + nβ to unfold."""
    core = Core.of(size)
    lanes = [Lane(core.partners(mask), *_owned(core, mask)) for mask in core.masks]
    fold = core.fold(reduces=False, first=core.out)
    return Schedule(size, fold + one_by_one(lanes) + core.unfold(blocks=size), "blocks")


def _shift(size: int, by: int) -> Pattern:
    ranks = np.arange(size)
    return Pattern(ranks, (ranks + by) % size, size)


def dissemination_barrier(size: int) -> Schedule:
    """⌈lg P⌉α: in step k each rank notifies rank + 2^k (D. Hensgen, R. Finkel, U. Manber, IJPP 17 (1988) 1-17)."""
    return Schedule(size, one_by_one(Lane(_shift(size, mask)) for mask in masks(size)))


def bruck_allgather(size: int) -> Schedule:
    """⌈lg P⌉α + (P-1)/P nβ for any P (J. Bruck et al., IEEE TPDS 8 (1997) 1143-1156)."""
    ranks = np.arange(size)
    lanes = (Lane(_shift(size, -mask), ranks, min(mask, size - mask)) for mask in masks(size))
    return Schedule(size, one_by_one(lanes), "blocks")


def bruck_alltoall(size: int) -> Schedule:
    """⌈lg P⌉α and about lg P n/2 β: step k moves all blocks whose distance has bit k set. Equal blocks only."""
    distance = np.arange(size)
    lanes = (Lane(_shift(size, mask), 0, int(np.count_nonzero(distance & mask))) for mask in masks(size))
    return Schedule(size, one_by_one(lanes), "pairs")


def doubling_scan(size: int) -> Schedule:
    """⌈lg P⌉(α + nβ + nγ): partners exchange their partial results; ranks without a partner skip the step."""
    ranks = np.arange(size)
    lanes = []
    for mask in masks(size):
        source = ranks[ranks ^ mask < size]
        lanes.append(lane(source, source ^ mask, size))
    return Schedule(size, one_by_one(lanes, reduces=True))


def doubling_after_scatter(size: int, scatter: Schedule) -> Schedule:
    """Broadcast, P a power of two: 2lg P α + 2(P-1)/P nβ."""
    return Schedule(size, scatter.rounds + doubling_allgather(size).rounds, parts=size)


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
    return np.sort(np.unique(places, return_index=True)[1])


def _among(members: Ints, inner: Schedule, size: int) -> tuple[Round, ...]:
    """Return the rounds of a schedule restricted to some of the ranks."""

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
    """Each rank sends along its edges and receives its messages: α + d nβ for d neighbours. Block i belongs to edge i.

    The edges are assigned to lanes greedily, so that no rank sends twice or receives twice in one lane.
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
