"""The memory layout of a datatype, and the constructor calls that created it.

A `Layout` is one element's type map, run-length coded, with numpy gather and scatter over it. A `Recipe` is the
constructor's name and arguments: it answers `Get_envelope`, `Get_contents` and `decode`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm import constants as c
from spawnsim.comm.failures import ERR_ARG, CallError

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
CACHED_INDICES: Final = 4
LONG: Final = 1 << 16
"""From this average size on, blocks are copied one by one. An index of their cells can take more memory than the blocks
themselves, and numpy has no cells of 2 GiB."""
BF16 = np.dtype([("bfloat16", np.uint16)])
"""Storage of one bfloat16. No other type has this dtype, so arithmetic never treats it as an unsigned integer."""


def integers(values: Any) -> Ints:
    """Return a flat array of 64-bit integers."""
    numbers: Ints = np.asarray(values, np.int64).reshape(-1)
    return numbers


def _merge(offsets: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Join blocks that touch and are neighbours in the type map; drop empty ones."""
    keep = lengths > 0
    # Empty blocks would break the test of touching neighbours: they touch everything.
    offsets, lengths = offsets[keep], lengths[keep]
    if len(offsets) < 2:
        return offsets, lengths
    # Blocks are never sorted: MPI sends data in type-map order, even where blocks lie backwards in memory.
    starts = np.flatnonzero(np.concatenate(([True], offsets[1:] != offsets[:-1] + lengths[:-1])))
    return offsets[starts], np.add.reduceat(lengths, starts)


def spread(starts: Ints, lengths: Ints) -> Ints:
    """Return start, start + 1, … for every block, concatenated."""
    if not len(starts):
        return starts
    # Ranges by one cumulative sum: a Python loop over blocks took most of the time for types with many short blocks.
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
        return int(self.offsets.min()) if len(self.offsets) else 0

    @cached_property
    def true_ub(self) -> int:
        return int((self.offsets + self.lengths).max()) if len(self.offsets) else 0

    @cached_property
    def dense(self) -> bool:
        """Whether elements lie in memory in their packed form: no gaps, in order, from the start."""
        if not len(self.offsets):
            return True
        # One block is not enough: with another bound or extent the second element would not follow the first directly.
        return len(self.offsets) == 1 and self.offsets[0] == 0 == self.lb and self.extent == self.size

    @cached_property
    def unit(self) -> int:
        """The largest number of bytes that divides all offsets, lengths and the extent."""
        # The extent counts as well, because element i starts after i extents, which must be a whole number of units.
        blocks = np.gcd.reduce(np.concatenate((self.offsets, self.lengths, [self.extent])))
        return int(blocks) or 1

    @cached_property
    def long(self) -> bool:
        """Whether the blocks are few and long (`LONG`, on average), or elements touch and all of them are one block."""
        return self.dense or self.size >= LONG * len(self.offsets)

    def resized(self, lb: int, extent: int) -> Layout:
        return Layout(self.offsets, self.lengths, self.atoms, self.repeats, lb, extent, self.align)

    def span(self, count: int) -> tuple[int, int]:
        """Return the first byte and one past the last byte of `count` elements, relative to the start."""
        # Types of size 0 use no memory, whatever their bounds are.
        if count == 0 or not self.size:
            return 0, 0
        last = (count - 1) * self.extent
        # A negative extent is legal in MPI, and then the last element lies lowest.
        return self.true_lb + min(0, last), self.true_ub + max(0, last)

    def index(self, count: int, unit: int) -> Ints:
        """Return the position of each unit of `count` elements, in units from the buffer's start (cached)."""
        found = self._indices.get((count, unit))
        if found is None:
            one = spread(self.offsets // unit, self.lengths // unit)
            found = (np.arange(count)[:, None] * (self.extent // unit) + one).reshape(-1)
            # Only a few are cached: an index takes eight bytes per unit, and programs use a type with few counts.
            if len(self._indices) >= CACHED_INDICES:
                self._indices.pop(next(iter(self._indices)))
            self._indices[count, unit] = found
        return found

    def gather(self, memory: Bytes, count: int, origin: int = 0) -> Bytes:
        """Return the bytes of `count` elements in packed order; `memory[0]` is byte `origin`."""
        if self.long:
            data = np.empty(count * self.size, np.uint8)
            for travelling, lying in self._blocks(len(data), origin):
                data[travelling] = memory[lying]
            return data
        # Wide cells move several bytes with one index. They need an origin on a unit's boundary.
        unit = self.unit if origin % self.unit == 0 else 1
        cells, index = _cells(memory, unit), self.index(count, unit)
        taken: Bytes = np.take(cells, index - origin // unit if origin else index).view(np.uint8)
        return taken

    def scatter(self, memory: Bytes, data: Bytes, origin: int = 0) -> None:
        """Write packed bytes, possibly fewer than whole elements, to their positions in memory."""
        if not len(data):
            return
        if self.long:
            for travelling, lying in self._blocks(len(data), origin):
                memory[lying] = data[travelling]
            return
        # A message may end inside an element, and then perhaps inside a cell.
        unit = self.unit if origin % self.unit == 0 and len(data) % self.unit == 0 else 1
        index = self.index(-(-len(data) // self.size), unit)[: len(data) // unit]
        cells = _cells(memory, unit)
        cells[index - origin // unit if origin else index] = data.view(cells.dtype)

    def _blocks(self, nbytes: int, origin: int) -> Iterator[tuple[slice, slice]]:
        """Yield, for each block of `nbytes` packed bytes, its position among them and in memory from `origin` on."""
        if self.dense:
            yield slice(0, nbytes), slice(-origin, nbytes - origin)
            return
        blocks, at, element = list(zip(self.offsets.tolist(), self.lengths.tolist(), strict=True)), 0, -origin
        while at < nbytes:
            for offset, length in blocks:
                # The last block is shorter if the message ends inside it; blocks behind it are empty.
                length = min(length, nbytes - at)
                yield slice(at, at + length), slice(element + offset, element + offset + length)
                at += length
            element += self.extent

    def elements(self, nbytes: int) -> int:
        """Return how many basic elements `nbytes` hold; -1 when they end inside one."""
        if not self.size:
            return 0
        whole, rest = divmod(nbytes, self.size)
        found = whole * int(self.repeats.sum())
        if not rest:
            return found
        # Expanded only for a partial element: most counts come out of the division above.
        ends = np.cumsum(np.repeat(self.atoms, self.repeats))
        at = int(np.searchsorted(ends, rest))
        return found + at + 1 if ends[at] == rest else -1


def _cells(memory: Bytes, unit: int) -> NDArray[Any]:
    """View bytes as cells of `unit` bytes; an incomplete last cell is never addressed."""
    if unit == 1:
        return memory
    dtype = np.dtype(f"u{unit}") if unit in (2, 4, 8) else np.dtype((np.void, unit))
    return memory[: len(memory) // unit * unit].view(dtype)


def atom(nbytes: int, align: int | None = None) -> Layout:
    """Return the layout of one basic element."""
    size = integers([nbytes])
    return Layout(integers([0]), size, size, integers([1]), 0, nbytes, align or min(nbytes, 16))


def place(parts: list[tuple[Layout, int, int]]) -> Layout:
    """Return the layout of blocks: (layout, count, byte displacement), in type-map order."""
    used = [part for part in parts if part[1] > 0]
    if not used:
        # MPI: a type without elements has bounds of 0.
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
    # Dense elements merge without an index for each: a contiguous type of a million elements is one block.
    if layout.dense:
        offsets, lengths = integers([displacement]), integers([count * layout.size])
    else:
        offsets = (displacement + np.arange(count)[:, None] * layout.extent + layout.offsets).reshape(-1)
        lengths = np.tile(layout.lengths, count)
    if len(layout.atoms) == 1:
        return offsets, lengths, layout.atoms, layout.repeats * count, lb, ub
    return offsets, lengths, np.tile(layout.atoms, count), np.tile(layout.repeats, count), lb, ub


def _runs(atoms: Ints, repeats: Ints) -> tuple[Ints, Ints]:
    if not len(atoms):
        return atoms, repeats
    starts = np.flatnonzero(np.concatenate(([True], atoms[1:] != atoms[:-1])))
    return atoms[starts], np.add.reduceat(repeats, starts)


def repeat(layout: Layout, blocklengths: Ints, displacements: Ints) -> Layout:
    """Return the layout of blocks of one layout at byte displacements, without a Python loop where all are alike."""
    # Few or unequal blocks: building arrays costs more than the loop.
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


_LISTS_WITH_LENGTH: Final = ("INDEXED", "HINDEXED", "STRUCT", "INDEXED_BLOCK", "HINDEXED_BLOCK")


@dataclass(frozen=True)
class Recipe:
    """The constructor's name, the type that it was called on (None for none), and its arguments by name.

    It keeps its own handles of the types and returns copies, which the caller may free.
    """

    name: str
    base: Any  # a datatype, which refers to its layout and recipe, but not the other way round; or None
    parameters: dict[str, Any]

    def __post_init__(self) -> None:
        # Through object.__setattr__, because the dataclass is frozen. Copies, so that the program may free its own
        # handles.
        for name, value in self.copied().items():
            object.__setattr__(self, name, value)

    def copied(self) -> dict[str, Any]:
        """Return base and parameters, with new handles of types."""
        parameters = dict(self.parameters)
        if "datatypes" in parameters:
            parameters["datatypes"] = [_copy(each) for each in parameters["datatypes"]]
        return {"base": None if self.base is None else _copy(self.base), "parameters": parameters}

    def contents(self) -> tuple[list[int], list[int], list[int], list[Any]]:
        """Return (integers, addresses, large counts, datatypes)."""
        own = self.copied()
        types = own["parameters"].get("datatypes", [own["base"]] if self.base is not None else [])
        numbers = {key: value for key, value in self.parameters.items() if key != "datatypes"}
        if self.name in _LISTS_WITH_LENGTH:
            # MPI's contents begin with the number of blocks, which the constructors here take from the list's length.
            numbers = {"count": len(numbers["displacements"])} | numbers
        # All numbers are large counts, but for the number of dimensions and the order (MPI 4.1, table 5.1).
        plain = [len(numbers["sizes"]), numbers.pop("order")] if self.name == "SUBARRAY" else []
        counts = [value if isinstance(value, list) else [value] for value in numbers.values()]
        return plain, [], list(itertools.chain.from_iterable(counts)), types

    @cached_property
    def envelope(self) -> tuple[int, int, int, int, int]:
        """The numbers of (integers, addresses, large counts, datatypes, combiner)."""
        integers, addresses, counts, types = self.contents()
        combiner = getattr(c, f"COMBINER_{self.name}")
        return len(integers), len(addresses), len(counts), len(types), combiner


def _copy(datatype: Any) -> Any:
    # Predefined types are compared by identity and cannot be freed, so they are shared.
    return datatype if datatype.is_predefined else type(datatype)(datatype)


def subarray_layout(
    base: Layout, box: tuple[Sequence[int], Sequence[int], Sequence[int]], order: int
) -> Layout:
    """Return the layout of a box (sizes, subsizes, starts) of an array of `base` elements."""
    sizes, subsizes, starts = ([int(n) for n in part] for part in box)
    if not len(sizes) == len(subsizes) == len(starts) > 0:
        raise CallError(
            ERR_ARG, f"sizes, subsizes and starts differ in length: {sizes}, {subsizes}, {starts}"
        )
    for size, subsize, start in zip(sizes, subsizes, starts, strict=True):
        if subsize < 1 or start < 0 or start + subsize > size:
            raise CallError(ERR_ARG, f"box {start}:{start + subsize} does not fit an axis of {size}")
    picked = [np.arange(a, a + n) for a, n in zip(starts, subsizes, strict=True)]
    axes = list(zip(sizes, picked, strict=True))
    at, stride = np.zeros(1, np.int64), 1
    for size, indices in axes[::-1] if order == c.ORDER_C else axes:  # the one that runs fastest comes first
        at = (indices[:, None] * stride + at).reshape(-1)
        stride *= size
    layout = repeat(base, np.ones(len(at), np.int64), at * base.extent)
    return layout.resized(0, int(np.prod(sizes)) * base.extent)
