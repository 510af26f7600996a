"""Where the bytes of a datatype lie: blocks of memory in type-map order, and how to copy them out and in.

This room knows byte offsets only: no names, no communicators, no meaning of the bytes. A layout describes one element;
`count` of them follow each other at multiples of the extent. Copies go through cached index arrays whose unit is the
largest that divides all offsets (8 bytes for columns of doubles, whole rows for row blocks).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
CACHED_INDICES: Final = 4


def integers(values: Any) -> Ints:
    """Return a flat array of 64-bit integers."""
    numbers: Ints = np.asarray(values, np.int64).reshape(-1)
    return numbers


def _merge(offsets: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Join blocks that touch and are neighbours in the type map; drop empty ones."""
    keep = lengths > 0
    offsets, lengths = offsets[keep], lengths[keep]
    if len(offsets) < 2:
        return offsets, lengths
    starts = np.flatnonzero(np.concatenate(([True], offsets[1:] != offsets[:-1] + lengths[:-1])))
    return offsets[starts], np.add.reduceat(lengths, starts)


def spread(starts: Ints, lengths: Ints) -> Ints:
    """Return start, start + 1, … of every block, one after the other."""
    if not len(starts):
        return starts
    before = np.cumsum(lengths) - lengths
    every: Ints = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return every


@dataclass(frozen=True, eq=False)
class Layout:
    """One element of a datatype.

    `offsets`, `lengths`: byte blocks in type-map order. `atoms`, `repeats`: the sizes of the basic elements in the same
    order, run-length coded. `lb`, `extent`: where the next element starts. `align`: the strictest alignment inside.
    """

    offsets: Ints
    lengths: Ints
    atoms: Ints
    repeats: Ints
    lb: int
    extent: int
    align: int = 1
    _indices: dict[tuple[int, int], Ints] = field(default_factory=dict, repr=False)

    @cached_property
    def size(self) -> int:
        """Bytes of data in one element."""
        return int(self.lengths.sum())

    @cached_property
    def true_lb(self) -> int:
        """First byte of data, relative to the buffer's start."""
        return int(self.offsets.min()) if len(self.offsets) else 0

    @cached_property
    def true_ub(self) -> int:
        """One past the last byte of data."""
        return int((self.offsets + self.lengths).max()) if len(self.offsets) else 0

    @cached_property
    def dense(self) -> bool:
        """Whether elements lie in memory just as they travel: no gaps, in order, from the start."""
        if not len(self.offsets):
            return True
        return len(self.offsets) == 1 and self.offsets[0] == 0 == self.lb and self.extent == self.size

    @cached_property
    def unit(self) -> int:
        """The largest number of bytes that divides all offsets, lengths and the extent."""
        blocks = np.gcd.reduce(np.concatenate((self.offsets, self.lengths, [self.extent])))
        return int(blocks) or 1

    def resized(self, lb: int, extent: int) -> Layout:
        """Return the same data with other bounds."""
        return Layout(self.offsets, self.lengths, self.atoms, self.repeats, lb, extent, self.align)

    def span(self, count: int) -> tuple[int, int]:
        """Return the first and one past the last byte that `count` elements touch, relative to the start."""
        if count == 0 or not self.size:
            return 0, 0
        last = (count - 1) * self.extent
        return self.true_lb + min(0, last), self.true_ub + max(0, last)

    def index(self, count: int, unit: int) -> Ints:
        """Return where each unit of `count` elements lies, in units from the buffer's start (cached)."""
        found = self._indices.get((count, unit))
        if found is None:
            one = spread(self.offsets // unit, self.lengths // unit)
            found = (np.arange(count)[:, None] * (self.extent // unit) + one).reshape(-1)
            if len(self._indices) >= CACHED_INDICES:
                self._indices.pop(next(iter(self._indices)))
            self._indices[count, unit] = found
        return found

    def gather(self, memory: Bytes, count: int, origin: int = 0) -> Bytes:
        """Return the bytes of `count` elements in the order in which they travel; `memory[0]` is byte `origin`."""
        unit = self.unit if origin % self.unit == 0 else 1
        cells, index = _cells(memory, unit), self.index(count, unit)
        data: Bytes = np.take(cells, index - origin // unit if origin else index).view(np.uint8)
        return data

    def scatter(self, memory: Bytes, data: Bytes, origin: int = 0) -> None:
        """Write travelling bytes, perhaps fewer than whole elements, to where they belong."""
        if not len(data):
            return
        unit = self.unit if origin % self.unit == 0 and len(data) % self.unit == 0 else 1
        index = self.index(-(-len(data) // self.size), unit)[: len(data) // unit]
        cells = _cells(memory, unit)
        cells[index - origin // unit if origin else index] = data.view(cells.dtype)

    def elements(self, nbytes: int) -> int:
        """Return how many basic elements `nbytes` hold; -1 when they end inside one."""
        if not self.size:
            return 0
        whole, rest = divmod(nbytes, self.size)
        found = whole * int(self.repeats.sum())
        if not rest:
            return found
        ends = np.cumsum(np.repeat(self.atoms, self.repeats))
        at = int(np.searchsorted(ends, rest))
        return found + at + 1 if ends[at] == rest else -1


def _cells(memory: Bytes, unit: int) -> NDArray[Any]:
    """View bytes as cells of `unit` bytes; a rest that fills no cell is never addressed."""
    if unit == 1:
        return memory
    dtype = np.dtype(f"u{unit}") if unit in (2, 4, 8) else np.dtype((np.void, unit))
    return memory[: len(memory) // unit * unit].view(dtype)


def atom(nbytes: int, align: int | None = None) -> Layout:
    """Return the layout of one basic element."""
    size = integers([nbytes])
    return Layout(integers([0]), size, size, integers([1]), 0, nbytes, align or min(nbytes, 16))


def place(parts: list[tuple[Layout, int, int]]) -> Layout:
    """Return the layout of blocks: (layout, how many of them, byte displacement), in type-map order."""
    used = [part for part in parts if part[1] > 0]
    if not used:
        return Layout(integers([]), integers([]), integers([]), integers([]), 0, 0)
    blocks = [_block(*part) for part in used]
    offsets, lengths = _merge(np.concatenate([b[0] for b in blocks]), np.concatenate([b[1] for b in blocks]))
    atoms, repeats = _runs(np.concatenate([b[2] for b in blocks]), np.concatenate([b[3] for b in blocks]))
    lb, ub = min(b[4] for b in blocks), max(b[5] for b in blocks)
    return Layout(offsets, lengths, atoms, repeats, lb, ub - lb, max(part[0].align for part in used))


def _block(layout: Layout, count: int, displacement: int) -> tuple[Ints, Ints, Ints, Ints, int, int]:
    """Return offsets, lengths, atoms, repeats, lower and upper bound of `count` elements at a displacement."""
    last = (count - 1) * layout.extent
    lb = displacement + layout.lb + min(0, last)
    ub = displacement + layout.lb + layout.extent + max(0, last)
    if layout.dense:
        offsets, lengths = integers([displacement]), integers([count * layout.size])
    else:
        offsets = (displacement + np.arange(count)[:, None] * layout.extent + layout.offsets).reshape(-1)
        lengths = np.tile(layout.lengths, count)
    if len(layout.atoms) == 1:
        return offsets, lengths, layout.atoms, layout.repeats * count, lb, ub
    return offsets, lengths, np.tile(layout.atoms, count), np.tile(layout.repeats, count), lb, ub


def _runs(atoms: Ints, repeats: Ints) -> tuple[Ints, Ints]:
    """Join neighbouring runs of basic elements of one size."""
    if not len(atoms):
        return atoms, repeats
    starts = np.flatnonzero(np.concatenate(([True], atoms[1:] != atoms[:-1])))
    return atoms[starts], np.add.reduceat(repeats, starts)


def repeat(layout: Layout, blocklengths: Ints, displacements: Ints) -> Layout:
    """Return the layout of blocks of one layout at byte displacements, without a Python loop where all are alike."""
    if len(blocklengths) < 8 or not (blocklengths == blocklengths[0]).all() or not blocklengths[0]:
        pairs = zip(blocklengths.tolist(), displacements.tolist(), strict=True)
        return place([(layout, length, at) for length, at in pairs])
    block = place([(layout, int(blocklengths[0]), 0)])
    count = len(displacements)
    offsets, lengths = _merge(
        (displacements[:, None] + block.offsets).reshape(-1), np.tile(block.lengths, count)
    )
    atoms, repeats = _runs(np.tile(block.atoms, count), np.tile(block.repeats, count))
    lb = int(displacements.min()) + block.lb
    ub = int(displacements.max()) + block.lb + block.extent
    return Layout(offsets, lengths, atoms, repeats, lb, ub - lb, layout.align)
