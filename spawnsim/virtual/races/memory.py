"""Memory in which races are found: the parts of windows, and the buffers of one-sided calls that are pending.

A local store is found as a change of the bytes between two calls of its rank. Changes by one-sided calls themselves are
applied to the copy as well, so that they are not mistaken for stores.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from spawnsim.comm.memory import start_of
from spawnsim.virtual.races.accesses import Access, Runs, conflict, exclude, merged, overlap

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
        self.low = start_of(self.memory)
        self.high = self.low + self.memory.nbytes
        self.before = self.memory.copy()
        self.copy = start_of(self.before)

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
            if low < self.high and self.low < high:
                low, high = max(low, self.low) - self.low, min(high, self.high) - self.low
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
class Group:
    """The accesses of one rank that are alike, and the groups that can race with them, with the bytes."""

    rank: int
    kind: Access  # the first of them
    held: list[Access] = field(default_factory=list)
    rivals: list[tuple[Group, tuple[int, int]]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Part(Watched):
    """One rank's part of a window, and the accesses to it that may still race with later ones."""

    label: str = ""
    rank: int = -1  # the owner, in the world
    target: Any = None  # its lock, `rma_service.Target`
    shared: bool = False
    groups: dict[Any, Group] = field(default_factory=dict)
    count: int = 0
    full: int = FULL
    released: dict[int, Any] = field(default_factory=dict)  # by address: stamp of the atomic writes there

    def races(self, new: Access) -> list[tuple[Access, tuple[int, int]]]:
        """Return the earlier accesses that race with a new one, with the bytes; keep the new one."""
        rank, known = new.begin.rank, new.begin.knows[1]
        key = rank, new.runs, new.writes, new.atomic, new.lock, new.remote, new.origin
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = self._group(new)
        # What its own rank has ended comes before it, also if a store was noticed late.
        found = [
            (old, common)
            for rival, common in group.rivals
            for old in rival.held
            if (old.end is None or (rival.rank != rank and old.end > known[rival.rank]))
            and not exclude(old, new)
        ]
        # An access that races with one that happened before an equal one races with that one, too.
        held = group.held
        if len(held) == 1 and held[0].end is not None:
            held[0] = new
        else:
            group.held = [*(old for old in held if old.end is None), new]
            self.count += len(group.held) - len(held)
        return found

    def _group(self, kind: Access) -> Group:
        """Return a new group."""
        new = Group(kind.begin.rank, kind)
        for other in self.groups.values():
            if (common := conflict(other.kind, kind)) is not None:
                new.rivals.append((other, common))
                other.rivals.append((new, common))
        if (common := conflict(kind, kind)) is not None:
            new.rivals.append((new, common))
        return new

    def prune(self, known_to_all: Any) -> None:
        """Drop the accesses that happen before all that any rank does from now on."""
        if self.count < self.full:
            return
        for group in self.groups.values():
            known = known_to_all(group.rank)
            group.held = [each for each in group.held if each.end is None or each.end > known]
        self.groups = {key: group for key, group in self.groups.items() if group.held}
        for group in self.groups.values():
            group.rivals = [each for each in group.rivals if each[0].held]
        self.count = sum(len(group.held) for group in self.groups.values())
        self.full = max(FULL, 2 * self.count)

    def named(self, low: int, high: int) -> str:
        """Return some of its bytes in words."""
        of = "shared memory" if self.shared else "the part"
        return f"bytes {low - self.low} to {high - self.low - 1} of {of} of rank {self.rank} in {self.label}"


@dataclass(eq=False, slots=True)
class Private(Watched):
    """The buffer of a pending one-sided call, in memory that no window exposes."""

    access: Any = None


W = TypeVar("W", bound=Watched)


def touching(parts: list[W], runs: Runs) -> list[W]:
    """Return the memories of which some bytes are among these."""
    if not parts or not runs:
        return []
    low, high = runs[0][0], runs[-1][1]
    near = [part for part in parts if part.low < high and low < part.high]
    return near if len(runs) == 1 else [part for part in near if overlap(((part.low, part.high),), runs)]


def runs_of_array(array: Any) -> Runs:
    """Return the bytes of an array's elements, without gaps."""
    return () if not array.size else _runs(start_of(array), array.shape, array.strides, array.itemsize)


def runs_of_tensor(tensor: Any) -> Runs:
    """Return the bytes of a strided tensor's elements in main memory, without gaps."""
    if not tensor.numel():
        return ()
    try:
        first, strides = tensor.data_ptr(), tensor.stride()
    except RuntimeError:  # a nested one, or a function's argument in torch.func, has no memory of its own
        return ()
    size = tensor.element_size()
    return _runs(first, tensor.shape, [stride * size for stride in strides], size)


def _runs(first: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Runs:
    dense = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != dense:
            break
        dense *= size
    else:
        return ((first, first + dense),)
    lows = np.unique(places_of(shape, strides)) + first
    return merged((low, low + itemsize) for low in lows.tolist())


def places_of(shape: Sequence[int], strides: Sequence[int]) -> Any:
    """Return an array of that shape with the distance in bytes of each element from the first."""
    places = np.zeros((), np.int64)
    for size, stride in zip(shape, strides, strict=True):
        places = np.add.outer(places, np.arange(size) * stride)
    return places
