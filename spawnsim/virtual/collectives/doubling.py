"""Algorithms in about lg P steps whose distance doubles or halves, for any number of ranks.

Where P is no power of two, the first 2(P - P') ranks, P' the greatest power of two in P, fold: of each pair one hands
its data to the other, sits the core out, and is told the result. MPICH's way; the even rank hands over.

This room knows indices. It must not know bytes, networks, clocks or the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True, eq=False)
class Core:
    """A power of two of ranks among `size`: `ranks` (P',) in the core, `out` those who sit out, `mates` theirs."""

    size: int
    ranks: Ints
    out: Ints
    mates: Ints

    @classmethod
    def of(cls, size: int, *, keep_even: bool = False) -> Core:
        """Fold `size` ranks. With `keep_even` the odd rank of a pair sits out, so that rank 0 (a root) stays in."""
        extra = size - (1 << (size.bit_length() - 1))
        even = np.arange(0, 2 * extra, 2)
        stay, out = (even, even + 1) if keep_even else (even + 1, even)
        return cls(size, np.concatenate([stay, np.arange(2 * extra, size)]), out, stay)

    @property
    def masks(self) -> list[int]:
        """The powers of two below P', rising."""
        return masks(len(self.ranks))

    @property
    def edges(self) -> Ints:
        """Return (P'+1,): core rank c stands for the blocks of ranks edges[c] to edges[c+1] (pairs are neighbours)."""
        extra = len(self.out)
        core = np.arange(len(self.ranks) + 1)
        return np.minimum(2 * core, core + extra)

    def fold(
        self, *, reduces: bool = True, first: Ints | int = 0, blocks: Ints | int = 1
    ) -> tuple[Round, ...]:
        """Return the round in which those who sit out hand over."""
        return one_by_one(
            [lane(self.out, self.mates, self.size, first=first, blocks=blocks)], reduces=reduces
        )

    def unfold(self, first: Ints | int = 0, blocks: Ints | int = 1) -> tuple[Round, ...]:
        """Return the round in which they are told the result."""
        return one_by_one([lane(self.mates, self.out, self.size, first=first, blocks=blocks)])

    def partners(self, mask: int) -> Pattern:
        """Return the exchange of all core ranks with those `mask` away."""
        return Pattern(self.ranks, self.ranks[np.arange(len(self.ranks)) ^ mask], self.size)


def recursive_doubling_allreduce(size: int) -> Schedule:
    """⌊lg P⌋(α + nβ + nγ), and 2(α + nβ) + nγ more where P is no power of two."""
    core = Core.of(size)
    exchanges = one_by_one((Lane(core.partners(mask)) for mask in core.masks), reduces=True)
    return Schedule(size, core.fold() + exchanges + core.unfold())


def _halving(core: Core) -> Iterator[Lane]:
    """Yield the exchanges of a vector halving: partners 1, 2, 4, … away, and each keeps half of what it has.

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
    """2lg P α + 2(P-1)/P nβ + (P-1)/P nγ; with P' for P and a fold, 2(α + nβ) + nγ, where P is no power of two.

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
    """2lg P α + 2(P-1)/P nβ + (P-1)/P nγ; with P' for P and α + nβ + nγ more where P is no power of two."""
    core = Core.of(size, keep_even=True)
    kept, parts = _kept(core), len(core.ranks)
    down = one_by_one(_halving(core), reduces=True)
    lanes = []
    for mask in reversed(core.masks):
        give = np.arange(mask, 2 * mask)  # those with a higher bit have given already
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
    """⌈lg P⌉α: in step k each rank tells the one 2^k on (D. Hensgen, R. Finkel, U. Manber, IJPP 17 (1988) 1-17)."""
    return Schedule(size, one_by_one(Lane(_shift(size, mask)) for mask in masks(size)))


def bruck_allgather(size: int) -> Schedule:
    """⌈lg P⌉α + (P-1)/P nβ for any P (J. Bruck et al., IEEE TPDS 8 (1997) 1143-1156)."""
    ranks = np.arange(size)
    lanes = (Lane(_shift(size, -mask), ranks, min(mask, size - mask)) for mask in masks(size))
    return Schedule(size, one_by_one(lanes), "blocks")


def bruck_alltoall(size: int) -> Schedule:
    """⌈lg P⌉α and about lg P n/2 β: in step k all blocks travel whose distance has bit k set. Equal blocks only."""
    distance = np.arange(size)
    lanes = (Lane(_shift(size, mask), 0, int(np.count_nonzero(distance & mask))) for mask in masks(size))
    return Schedule(size, one_by_one(lanes), "pairs")


def doubling_scan(size: int) -> Schedule:
    """⌈lg P⌉(α + nβ + nγ): partners exchange their partial results; those with no partner pass."""
    ranks = np.arange(size)
    lanes = []
    for mask in masks(size):
        source = ranks[ranks ^ mask < size]
        lanes.append(lane(source, source ^ mask, size))
    return Schedule(size, one_by_one(lanes, reduces=True))


def doubling_after_scatter(size: int, scatter: Schedule) -> Schedule:
    """Broadcast, P a power of two: 2lg P α + 2(P-1)/P nβ."""
    return Schedule(size, scatter.rounds + doubling_allgather(size).rounds, parts=size)
