"""Memory in which races are found: the parts of windows, and the buffers of one-sided calls that are pending.

A local store is found as a change of the bytes between two calls of its rank. Changes by one-sided calls themselves are
applied to the copy as well, so that they are not mistaken for stores.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spawnsim.comm.memory import address
from spawnsim.virtual.races.accesses import Access, Runs, conflict, merged, overlap

FULL = 256  # accesses to a part; then accesses that happen before everything are dropped
_differ = ctypes.CDLL(None).memcmp  # without a copy: a window may have many megabytes
_differ.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
LONGEST = 1000  # changed runs of one interval that are kept


@dataclass(eq=False, slots=True)
class Watched:
    """Some memory and a copy of it."""

    memory: Any  # flat uint8 array
    low: int = field(init=False)
    high: int = field(init=False)
    before: Any = field(init=False)
    copy: int = field(init=False)  # the address of `before`

    def __post_init__(self) -> None:
        self.low = address(self.memory)
        self.high = self.low + self.memory.nbytes
        self.before = self.memory.copy()
        self.copy = address(self.before)

    def changes(self) -> Runs:
        """Return the bytes that have changed since the last look, as addresses; update the copy."""
        if not _differ(self.low, self.copy, self.high - self.low):
            return ()
        places = np.flatnonzero(self.memory != self.before)
        self.before[:] = self.memory
        breaks = np.flatnonzero(np.diff(places) > 1)
        lows = places[np.concatenate(([0], breaks + 1))] + self.low
        highs = places[np.concatenate((breaks, [len(places) - 1]))] + self.low + 1
        return tuple(zip(lows.tolist()[:LONGEST], highs.tolist()[:LONGEST], strict=True))

    def accept(self, runs: Runs) -> None:
        """Copy bytes that a one-sided call, or a store that was seen, has changed."""
        for low, high in runs:
            low, high = max(low, self.low) - self.low, min(high, self.high) - self.low
            if low < high:
                self.before[low:high] = self.memory[low:high]

    def changes_in(self, runs: Runs) -> Runs:
        """Return which of these bytes have changed since the last look; update the copy of these."""
        found: list[tuple[int, int]] = []
        for low, high in runs:
            low, high = max(low, self.low) - self.low, min(high, self.high) - self.low
            if low < high and _differ(self.low + low, self.copy + low, high - low):
                places = np.flatnonzero(self.memory[low:high] != self.before[low:high]) + self.low + low
                found += [(place, place + 1) for place in places.tolist()[:LONGEST]]
                self.before[low:high] = self.memory[low:high]
        return merged(found)


@dataclass(eq=False, slots=True)
class Part(Watched):
    """One rank's part of a window, and the accesses to it that may still race with later ones."""

    label: str = ""
    rank: int = -1  # the owner, in the world
    target: Any = None  # its lock, `rma_service.Target`
    shared: bool = False
    accesses: dict[Any, list[Access]] = field(default_factory=dict)
    count: int = 0
    full: int = FULL
    released: dict[int, Any] = field(default_factory=dict)  # by address: stamp of the atomic writes there

    def races(self, new: Access) -> Iterator[tuple[Access, tuple[int, int]]]:
        """Yield the earlier accesses that race with a new one, with the bytes; keep the new one."""
        known = new.stamp.tolist()
        for each in self.accesses.values():
            for old in each:
                if (old.writes or new.writes) and (old.end is None or known[old.rank] < old.end):
                    found = conflict(old, new)
                    if found is not None:
                        yield old, found
        held = self.accesses.setdefault(new.key(), [])
        # What races with an access that happened before an equal one races with that one, too.
        kept = [old for old in held if not old.ended_before(new)]
        self.count += 1 + len(kept) - len(held)
        held[:] = [*kept, new]

    def prune(self, known_to_all: Any) -> None:
        """Drop the accesses that happen before all that any rank does from now on."""
        if self.count < self.full:
            return
        for key, held in [*self.accesses.items()]:
            held[:] = [each for each in held if each.end is None or each.end > known_to_all(each.rank)]
            if not held:
                del self.accesses[key]
        self.count = sum(map(len, self.accesses.values()))
        self.full = max(FULL, 2 * self.count)

    def named(self, low: int, high: int) -> str:
        """Return some of its bytes in words."""
        of = "shared memory" if self.shared else "the part"
        return f"bytes {low - self.low} to {high - self.low - 1} of {of} of rank {self.rank} in {self.label}"


@dataclass(eq=False, slots=True)
class Private(Watched):
    """The buffer of a pending one-sided call, in memory that no window exposes."""

    access: Any = None


def touching(parts: list[Part], runs: Runs) -> list[Part]:
    """Return the parts of which some bytes are among these."""
    return [part for part in parts if overlap(((part.low, part.high),), runs)] if runs else []


def runs_of_array(array: Any) -> Runs:
    """Return the bytes of an array's elements, without gaps."""
    first = int(array.__array_interface__["data"][0])
    if not array.size:
        return ()
    if array.flags.c_contiguous:
        return ((first, first + array.nbytes),)
    places = np.zeros((), np.int64)
    for size, stride in zip(array.shape, array.strides, strict=True):
        places = np.add.outer(places, np.arange(size) * stride)
    lows = np.unique(places) + first
    return merged((low, low + array.itemsize) for low in lows.tolist())
