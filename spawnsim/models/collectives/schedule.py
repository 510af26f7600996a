"""The shape of a collective algorithm: rounds of messages, free of networks and of times; and the sizes of one call.

A rank executes the rounds in order. In each round it first does all its sends, lane by lane, and then receives all its
messages, lane by lane. In one lane a rank sends at most one message and receives at most one. Ranks are relative to
the root, which is 0. The contents of a message are given in blocks: a number of blocks, cyclically, from a first one.
A schedule holds indices alone; `MessageSizes` gives the bytes of its messages in one call. Sizes as callers give them,
in bytes:

* bcast, reduce, allreduce, scan, exscan: the vector, one int;
* gather, scatter, allgather, reduce_scatter: the block of one rank, an int, or one per rank, an array (P,);
* alltoall: the block of one pair, an int, or an array (P, P) with [source, dest];
* barrier: anything; it sends empty messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError
from spawnsim.models.network.cost import Floats, Ints

Cut = Literal["vector", "blocks", "pairs", "edges"]
"""The kinds of blocks: equal parts of one vector, one block per rank, one block per pair of ranks, or one per edge."""


class Pattern:
    """The senders and receivers of one lane: `source` and `dest`, int arrays (M,), no rank twice in either."""

    def __init__(self, source: Ints, dest: Ints, size: int, turn: Ints | None = None) -> None:
        self._turn = turn
        self.whole = len(source) == size and bool((source == np.arange(size)).all())
        self.source, self.dest, self.size = source, dest, size

    @cached_property
    def senders(self) -> Ints | slice:
        return slice(None) if self.whole else _evenly(self.source)

    @cached_property
    def takers(self) -> Ints | slice:
        """Index of the receivers, in the order of `turn`."""
        return slice(None) if self.whole else _evenly(self.dest)

    @cached_property
    def turn(self) -> Ints | None:
        """Index that reorders messages from the order of senders into the order of `takers`; None if it is the same."""
        return np.argsort(self.dest) if self.whole and self._turn is None else self._turn

    @cached_property
    def among_senders(self) -> Ints | None:
        """Index that reorders messages from senders to receivers, if these are the same ranks.

        None if they are not the same, not in rising order, or all ranks, which `turn` serves.
        """
        if self.whole or len(self.source) < 2:
            return None
        turn = np.argsort(self.dest)
        return turn if np.array_equal(self.dest[turn], self.source) else None

    @cached_property
    def message_to(self) -> dict[int, int]:
        return {int(rank): i for i, rank in enumerate(self.dest)}

    @cached_property
    def message_from(self) -> dict[int, int]:
        return {int(rank): i for i, rank in enumerate(self.source)}


def _evenly(ranks: Ints) -> Ints | slice:
    """Return evenly spaced ranks, as in binomial trees, as a slice: no gathering, a third of the time."""
    if len(ranks) < 2:
        return ranks
    first, step = int(ranks[0]), int(ranks[1] - ranks[0])
    even = step > 0 and bool((np.diff(ranks) == step).all())
    return slice(first, first + (len(ranks) - 1) * step + 1, step) if even else ranks


class Lane(NamedTuple):
    """Messages, at most one from each rank and one to each: message i carries `blocks` blocks from `first` on."""

    pattern: Pattern
    first: Ints | int = 0
    blocks: Ints | int = 1


class Round(NamedTuple):
    """All sends of these lanes, then all their receives; `reduces` if each receiver combines the data.

    If all messages leave from one rank, or all go to one, `star` holds them again, in order, as if in one lane.
    """

    lanes: tuple[Lane, ...]
    reduces: bool = False
    star: Lane | None = None


@dataclass(frozen=True, eq=False)
class Schedule:
    """An algorithm for a given number of ranks.

    Attributes:
        size: Number of ranks.
        rounds: The rounds in order.
        cut: The kind of blocks.
        parts: Number of blocks of the vector, if `cut` is "vector".
    """

    size: int
    rounds: tuple[Round, ...]
    cut: Cut = "vector"
    parts: int = 1

    def depends(self, rank: int) -> frozenset[int] | None:
        """Return the ranks on whose arrival the departure of `rank` depends, directly or not; None stands for all."""
        known = np.zeros(self.size, bool)
        known[rank] = True
        for each in reversed(self.rounds):  # the ranks on which a sender depended before the round
            before = [lane.pattern.source[known[lane.pattern.dest]] for lane in each.lanes]
            for sources in before:
                known[sources] = True
        return None if known.all() else frozenset(np.flatnonzero(known).tolist())

    def free_to_leave(self, here: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the ranks whose departure depends only on ranks that are `here`, bool (P,)."""
        # One vector for all ranks: the earlier table of dependencies took 10 GB at 100,000 ranks.
        free = here.copy()
        for each in self.rounds:
            # One lane for each of its messages would make a gather of P ranks quadratic.
            if each.star is not None:
                pattern = each.star.pattern
                if pattern.source[0] == pattern.source[-1]:
                    free[pattern.dest] &= free[pattern.source[0]]
                else:
                    free[pattern.dest[0]] &= free[pattern.source].all()
                continue
            sent = [free[lane.pattern.source] for lane in each.lanes]
            for lane, fine in zip(each.lanes, sent, strict=True):
                free[lane.pattern.dest] &= fine
        return free


def lane(source: Ints, dest: Ints, size: int, *, first: Ints | int = 0, blocks: Ints | int = 1) -> Lane:
    """Return the lane of these messages."""
    return Lane(Pattern(source, dest, size), first, blocks)


def one_by_one(lanes: Iterable[Lane], *, reduces: bool = False) -> tuple[Round, ...]:
    """Return a round for each nonempty lane."""
    return tuple(Round((each,), reduces) for each in lanes if len(each.pattern.source))


def masks(size: int) -> list[int]:
    """Return the powers of two below `size`, rising."""
    return [1 << k for k in range((size - 1).bit_length())]


Sizes = int | Ints
Lengths = float | Ints | Floats
"""Bytes of messages. Parts of a vector may be fractions of a byte: this keeps cuts even and closed forms exact."""


def _common_size(sizes: Sizes) -> int | None:
    """Return the common size, or None if sizes differ."""
    if not isinstance(sizes, np.ndarray):
        return int(sizes)
    first = int(sizes.flat[0]) if sizes.size else 0
    return first if bool((sizes == first).all()) else None


class MessageSizes:
    """The sizes of one call, for a given schedule: `of(lane)` is one number if all messages have equal lengths.

    `dtype` names the elements, which determines the speed of reductions; "": not known.

    Raises:
        ParameterError: Sizes that do not fit the schedule.
    """

    def __init__(self, schedule: Schedule, sizes: Sizes, dtype: str = "") -> None:
        self.each: float | None
        self.dtype = dtype
        self._ends: Ints | None = None
        self._pairs: Ints | None = None
        self._count = schedule.parts if schedule.cut == "vector" else schedule.size
        if schedule.cut == "vector":
            self._vector(sizes, schedule.parts)
        else:
            self._blocks(schedule, sizes)

    def _vector(self, sizes: Sizes, parts: int) -> None:
        nbytes = _common_size(sizes)
        if nbytes is None or nbytes < 0:
            raise ParameterError(
                f"sizes={sizes}: give the length of the vector in bytes, one int of at least 0"
            )
        self.each = nbytes / parts if nbytes % parts else nbytes // parts

    def _blocks(self, schedule: Schedule, sizes: Sizes) -> None:
        wanted = (schedule.size,) * (2 if schedule.cut == "pairs" else 1)
        if isinstance(sizes, np.ndarray) and schedule.cut != "edges" and sizes.shape != wanted:
            raise ParameterError(f"sizes of shape {sizes.shape}: give one int, or an array of shape {wanted}")
        if np.any(np.asarray(sizes) < 0):
            raise ParameterError(f"sizes={sizes}: give bytes of at least 0")
        self.each = _common_size(sizes)
        if self.each is None and isinstance(sizes, np.ndarray):
            if schedule.cut == "pairs":
                self._pairs = sizes
            else:
                self._cumulate(sizes)

    def _cumulate(self, blocks: Ints) -> None:
        self._ends = np.concatenate([[0], np.cumsum(np.concatenate([blocks, blocks]))])

    def of(self, lane: Lane) -> Lengths:
        """Return the bytes of the lane's messages: one number for all, or an array (M,)."""
        if self.each is not None:
            blocks = lane.blocks
            return blocks * np.float64(self.each) if isinstance(blocks, np.ndarray) else blocks * self.each
        if self._ends is not None:
            begin = np.asarray(lane.first)
            nbytes: Ints = self._ends[begin + lane.blocks] - self._ends[begin]
            return nbytes if nbytes.ndim else int(nbytes)
        assert self._pairs is not None
        if not np.all(np.asarray(lane.blocks) == 1):
            raise ParameterError(
                "this alltoall needs blocks of one size (Bruck's does): choose pairwise or linear"
            )
        unequal: Ints = self._pairs[lane.pattern.source, lane.pattern.dest]
        return unequal

    def own(self, root: int | None) -> Lengths:
        """Return the bytes of the block of each rank that stays with it; only the root's, if there is a root."""
        blocks: Lengths = self.each or 0.0
        if self._pairs is not None:
            blocks = np.diagonal(self._pairs)
        elif self._ends is not None:
            blocks = np.diff(self._ends)[: self._count]
        return blocks if root is None else np.where(np.arange(self._count) == root, blocks, 0.0)

    def share(self, block: int, place: float) -> float:
        """Return the position in the whole, from 0 to 1, of a place in a block. Blocks need not have equal sizes."""
        if self._ends is None:
            return (block + place) / self._count
        begin, end, count = self._ends[block], self._ends[block + 1], (len(self._ends) - 1) // 2
        return float((begin + place * (end - begin)) / max(self._ends[count], 1))
