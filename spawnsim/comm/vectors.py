"""Messages in unequal blocks: the specifications of the `v` and `w` collectives, and of one-sided targets.

This room knows counts and displacements per block; each block is a `Buffer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.constants import BOTTOM, IN_PLACE
from spawnsim.comm.datatypes import Datatype
from spawnsim.comm.failures import SpecBufferError, SpecTypeError, Truncated
from spawnsim.comm.memory import as_bytes, flat
from spawnsim.comm.predefined import BYTE
from spawnsim.comm.regions import Buffer
from spawnsim.comm.specs import at, datatype_of, infer, locate, split
from spawnsim.errors import ParameterError


class Vector:
    """Blocks of a user's memory: `counts[i]` elements of `datatypes[i]` at byte `starts[i]`.

    Without a memory (`BOTTOM`) the starts are addresses.
    """

    __slots__ = ("_memory", "counts", "datatype", "datatypes", "displs", "in_place", "nbytes", "starts")

    def __init__(
        self, memory: NDArray[Any] | None, blocks: tuple[list[int], list[int]], datatypes: list[Datatype]
    ) -> None:
        self._memory, self.datatypes = memory, datatypes
        self.counts, self.starts = blocks
        self.displs = self.starts
        self.datatype = datatypes[0] if datatypes else BYTE
        self.nbytes = sum(n * datatype.size for n, datatype in zip(self.counts, datatypes, strict=True))
        self.in_place = False

    @property
    def count(self) -> int:
        """Elements in all blocks."""
        return sum(self.counts)

    @property
    def writable(self) -> bool:
        """Whether blocks can be unpacked to."""
        return self._memory is None or bool(self._memory.flags.writeable) or self.nbytes == 0

    @property
    def address(self) -> int:
        """Where the memory starts."""
        return 0 if self._memory is None else int(self._memory.ctypes.data)

    def block(self, i: int) -> Buffer:
        """Return the i-th block."""
        if self._memory is None:
            return at(self.starts[i], self.datatypes[i], self.counts[i])
        return locate(self._memory, self.datatypes[i], self.starts[i], (self.counts[i], 1))

    def __iter__(self) -> Iterator[Buffer]:
        return (self.block(i) for i in range(len(self.counts)))

    def __len__(self) -> int:
        return len(self.counts)

    def pack(self) -> NDArray[Any]:
        """Return an owned snapshot of all blocks in a row: typed where all have one predefined type, else bytes."""
        parts = [block.pack() for block in self]
        if any(part.dtype != parts[0].dtype for part in parts):
            parts = [as_bytes(part) for part in parts]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint8)

    def unpack(self, data: NDArray[Any]) -> int:
        """Write a snapshot of all blocks in a row; return its number of bytes."""
        done = 0
        for block in self:
            step = block.count if data.dtype == block.dtype and block.datatype.is_predefined else block.nbytes
            block.unpack(data[done : done + step])
            done += step
        if done < len(data):
            raise Truncated(message=f"{len(data)} elements do not fit blocks of {self.counts}")
        return data.nbytes


def as_vector(spec: Any, blocks: int, *, types: bool = False, writable: bool = False) -> Vector:
    """Return the blocks of a `v` or, with `types`, a `w` specification.

    `v`: memory, [memory, counts], [memory, (counts, displs)], with or without a type, or all four. `w`:
    [memory, types], [memory, (counts, displs), types] or all four, with displacements in bytes.
    """
    if spec is None or spec is IN_PLACE:
        empty = Vector(np.zeros(0, np.uint8), ([0] * blocks, [0] * blocks), [BYTE] * blocks)
        empty.in_place = spec is IN_PLACE
        return empty
    new = _typed(spec, blocks) if types else _plain(spec, blocks)
    if writable and not new.writable:
        raise SpecBufferError("the receiving buffer is read-only: pass memory that can be written")
    return new


def _plain(spec: Any, blocks: int) -> Vector:
    parts = split(spec) if isinstance(spec, (list, tuple)) else (spec, None, None, None)
    obj, counts, displs, kind = parts
    if isinstance(counts, tuple) and len(spec) < 4:
        counts, displs = counts
    memory = _memory(obj)
    _require_counts(obj, counts)
    datatype = datatype_of(None if obj is None else memory, kind)
    numbers = _counts(counts, datatype, 0 if memory is None else memory.nbytes, blocks)
    extent = datatype.Get_extent()[1] if datatype else 0
    places = _displs(displs, numbers)
    new = Vector(memory, (numbers, [place * extent for place in places]), [datatype] * blocks)
    new.displs = places
    return new


def _require_counts(obj: Any, counts: Any) -> None:
    if obj is BOTTOM and counts is None:
        raise ParameterError(
            "BOTTOM requires counts: the address space has no length to spread among the ranks"
        )


def _memory(obj: Any) -> NDArray[Any] | None:
    """Return the flat memory of an object; None for `BOTTOM`, the whole address space."""
    if obj is BOTTOM:
        return None
    return np.zeros(0, np.uint8) if obj is None else flat(obj)


def _counts(counts: Any, datatype: Datatype, nbytes: int, blocks: int) -> list[int]:
    """Return the elements per block; not given, they are spread as evenly as it goes, the first blocks longer."""
    if counts is None:
        share, rest = divmod(infer(nbytes, datatype, 1), max(blocks, 1))
        return [share + (i < rest) for i in range(blocks)]
    numbers = _per_block(counts, blocks, "counts")
    if numbers and min(numbers) < 0:
        raise ParameterError(f"negative count {min(numbers)}")
    return numbers


def _displs(displs: Any, counts: list[int]) -> list[int]:
    """Return where blocks start, in elements; not given, one after the other; a number is a stride."""
    if displs is None:
        return [0, *accumulate(counts)][: len(counts)]
    if not isinstance(displs, Sequence) and np.ndim(displs) == 0:
        return [i * index(displs) for i in range(len(counts))]
    return _per_block(displs, len(counts), "displacements")


def _per_block(values: Any, blocks: int, what: str) -> list[int]:
    """Return one number per block; a single number stands for all."""
    if not isinstance(values, Sequence) and np.ndim(values) == 0:
        return [index(values)] * blocks
    numbers = [index(value) for value in values]
    if len(numbers) != blocks:
        raise ParameterError(f"expecting {blocks} {what}, got {len(numbers)}")
    return numbers


def _typed(spec: Any, blocks: int) -> Vector:
    if not isinstance(spec, (list, tuple)):
        raise SpecTypeError("expecting [memory, (counts, displacements), types]")
    if len(spec) == 2:
        obj, counts, displs, kinds = spec[0], [1] * blocks, [0] * blocks, spec[1]
        _require_counts(obj, None)
    elif len(spec) == 3:
        obj, (counts, displs), kinds = spec
    elif len(spec) == 4:
        obj, counts, displs, kinds = spec
    else:
        raise ParameterError(f"a message of {len(spec)} items: expecting 2 to 4")
    numbers, starts = _per_block(counts, blocks, "counts"), _per_block(displs, blocks, "displacements")
    datatypes = [datatype_of(None, kind) for kind in kinds]
    if len(datatypes) != blocks:
        raise ParameterError(f"expecting {blocks} datatypes, got {len(datatypes)}")
    return Vector(_memory(obj), (numbers, starts), datatypes)


def as_target(target: Any, origin: Buffer) -> tuple[int, int, Datatype]:
    """Return (displacement, count, datatype) of a one-sided target: None, a displacement, or a list of up to three."""
    parts = [] if target is None else list(target) if isinstance(target, (list, tuple)) else [target]
    if len(parts) > 3:
        raise ParameterError("target: expecting 3 items at most (displacement, count, type)")
    displacement = index(parts[0]) if parts else 0
    count = index(parts[1]) if len(parts) > 1 else origin.count
    return displacement, count, datatype_of(None, parts[2]) if len(parts) > 2 else origin.datatype
