"""How many bytes the messages of a schedule carry.

Sizes as callers give them, in bytes:

* bcast, reduce, allreduce, scan, exscan: the vector, one int;
* gather, scatter, allgather, reduce_scatter: the block of one rank, an int, or one per rank, an array (P,);
* alltoall: the block of one pair, an int, or an array (P, P) with [source, dest];
* barrier: anything; it sends empty messages.

This room knows bytes and schedules. It must not know networks or times.
"""

from __future__ import annotations

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.virtual.collectives.schedule import Floats, Ints, Lane, Schedule

Sizes = int | Ints
Lengths = float | Ints | Floats
"""Bytes of messages. Parts of a vector may be fractions of a byte: so every cut is even, and closed forms are exact."""


def _equal(sizes: Sizes) -> int | None:
    """Return the one size that all have, or None."""
    if not isinstance(sizes, np.ndarray):
        return int(sizes)
    first = int(sizes.flat[0]) if sizes.size else 0
    return first if bool((sizes == first).all()) else None


class Amounts:
    """The sizes of one call, for a given schedule: `of(lane)` is one number where all messages are equally long.

    Raises:
        ParameterError: Sizes that do not fit the schedule.
    """

    def __init__(self, schedule: Schedule, sizes: Sizes) -> None:
        self.each: float | None
        self._ends: Ints | None = None
        self._pairs: Ints | None = None
        self._count = schedule.parts if schedule.cut == "vector" else schedule.size
        if schedule.cut == "vector":
            self._vector(sizes, schedule.parts)
        else:
            self._blocks(schedule, sizes)

    def _vector(self, sizes: Sizes, parts: int) -> None:
        nbytes = _equal(sizes)
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
        self.each = _equal(sizes)
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

    def share(self, block: int, place: float) -> float:
        """Return where in the whole, from 0 to 1, a place in a block lies. The blocks are of one size, or of any."""
        if self._ends is None:
            return (block + place) / self._count
        begin, end, count = self._ends[block], self._ends[block + 1], (len(self._ends) - 1) // 2
        return float((begin + place * (end - begin)) / max(self._ends[count], 1))
