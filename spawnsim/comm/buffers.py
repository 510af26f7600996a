"""Buffer specifications, `array`, `[array, type]`, `[array, counts, displs, type]` and their like, as messages.

`as_buffer` is where every message comes in: it reads a specification by mpi4py's rules and returns a `Buffer` (which
bytes of the user's memory, of which datatype, readable or writable) or a `Vector` of them (the blocks of the `v` and
`w` collectives). A plain numpy array, phantom or CPU tensor takes a fast path, of a microsecond or two. Nothing is
copied before `pack`. Errors are also the TypeError, ValueError, KeyError or BufferError that mpi4py raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import index
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.constants import BOTTOM, is_in_place
from spawnsim.comm.datatypes import Datatype
from spawnsim.comm.failures import (
    ERR_TYPE,
    CallError,
    SpecBufferError,
    SpecTypeError,
    Truncated,
    UnknownTypeError,
)
from spawnsim.comm.memory import Unbounded, as_bytes, at_address, flat, of_tensor
from spawnsim.comm.messages import Buffer as Buffer
from spawnsim.comm.messages import UnpaddedPairs, nothing
from spawnsim.comm.predefined import BY_DTYPE, BYTE, DATATYPE_NULL
from spawnsim.errors import ParameterError
from spawnsim.phantoms import PhantomArray

Array = NDArray[Any]


def typed_array(spec: list[Any]) -> Buffer | None:
    """Return the buffer of [array, its own datatype or length], the most common lists; None for all others."""
    array, kind = spec if len(spec) == 2 else (None, None)
    if type(array) is not np.ndarray or not array.flags.c_contiguous:
        return None
    # All others need the checks of bounds and types below.
    datatype: Any = BY_DTYPE.get(array.dtype) if type(kind) is int and kind == array.size else kind
    plain = isinstance(datatype, Datatype) and datatype.dtype is array.dtype and datatype.is_predefined
    return Buffer(array, datatype, array.size) if plain else None


def simple_parts(spec: Any) -> tuple[Any, Any, Any, Any]:
    """Return (memory, count, displacement, type) of a specification; what is not given is None."""
    if not isinstance(spec, (list, tuple)):
        return spec, None, None, None
    memory, count, displacement, kind = split(spec)
    if isinstance(count, (list, tuple)):
        count, displacement = count
    return memory, count, displacement, kind


def split(spec: Any) -> tuple[Any, Any, Any, Any]:
    """Return (memory, count or counts, displacement or displacements, type) of a list or tuple."""
    if len(spec) == 2:
        named = isinstance(spec[1], (Datatype, str))
        return (spec[0], None, None, spec[1]) if named else (spec[0], spec[1], None, None)
    if len(spec) == 3:
        return spec[0], spec[1], None, spec[2]
    if len(spec) == 4:
        return spec[0], spec[1], spec[2], spec[3]
    raise ParameterError(
        f"a message of {len(spec)} items: expecting 2 to 4 (memory, count, displacement, type)"
    )


def datatype_of(memory: Array | None, kind: Any) -> Datatype:
    """Return the datatype that was named, or the one of the array's dtype; it must be committed."""
    if isinstance(kind, str):
        return Datatype.fromcode(kind)
    if kind is not None:
        if not isinstance(kind, Datatype):
            raise SpecTypeError(f"{kind!r} is no datatype: pass a Datatype or a typecode such as 'd'")
        # MPI: only committed types may communicate. Real libraries crash or send garbage without it.
        if kind and not kind.committed:
            raise CallError(ERR_TYPE, "the datatype has not been committed: call its Commit() first")
        return kind
    if memory is None:
        raise SpecTypeError("memory without a type: pass [memory, count, datatype]")
    found = BY_DTYPE.get(memory.dtype)
    if found is None:
        # Foreign byte order is told apart from an unknown type, since the remedy is another one.
        if not memory.dtype.isnative:
            raise SpecBufferError(f"dtype {memory.dtype} has a foreign byte order: convert the array first")
        raise UnknownTypeError(
            f"cannot map dtype {memory.dtype} to an MPI datatype: pass [array, count, datatype]"
        )
    return found


def general(obj: Any, count: Any, displacement: Any, kind: Any, *, blocks: int) -> Buffer:
    """Return the buffer of a specification that has been taken apart."""
    if obj is None or obj is BOTTOM:
        return _absolute(obj, 0 if count is None else _number(count), kind, blocks)
    memory = flat(obj)
    datatype = datatype_of(memory, kind)
    nbytes = memory.nbytes
    start = _start(displacement, datatype, nbytes)
    if count is None:
        number = infer(nbytes - start, datatype, max(blocks, 1))
    else:
        number = _number(count)
    return locate(memory, datatype, start, (number, max(blocks, 1)))


def _number(count: Any) -> int:
    number = index(count)
    if number < 0:
        raise ParameterError(f"negative count {number}")
    return number


def _start(displacement: Any, datatype: Datatype, nbytes: int) -> int:
    """Return the byte at which a message with a displacement (in elements) starts."""
    elements = 0 if displacement is None else index(displacement)
    if elements < 0:
        raise ParameterError(f"negative displacement {elements}")
    # The extent is asked for only with a displacement: a null type is allowed in an empty message, and has none.
    start = elements * datatype.Get_extent()[1] if elements else 0
    if start > nbytes and datatype.size:
        raise ParameterError(f"displacement {elements} is out of bounds: the buffer has {nbytes} bytes")
    return start


def infer(nbytes: int, datatype: Datatype, blocks: int) -> int:
    """Return how many elements per block a buffer of `nbytes` holds."""
    if nbytes == 0:
        return 0
    extent = datatype.Get_extent()[1] if datatype else 0
    if extent <= 0:
        raise ParameterError("cannot infer a count: the datatype is null or has no extent; pass the count")
    if nbytes % extent:
        raise ParameterError(f"cannot infer a count: {nbytes} bytes are no multiple of the extent, {extent}")
    if nbytes // extent % blocks:
        raise ParameterError(
            f"cannot infer a count: {nbytes // extent} elements do not divide into {blocks} blocks"
        )
    return nbytes // extent // blocks


def locate(memory: Array, datatype: Datatype, start: int, shape: tuple[int, int]) -> Buffer:
    """Return the buffer of (count, blocks) elements from byte `start` of a flat array, within its bounds."""
    count, blocks = shape
    total = count * blocks
    if not total:
        # Nothing to place, so neither bounds nor the type's alignment are looked at: mpi4py allows a count of 0
        # anywhere.
        return Buffer(memory[:0] if datatype.dtype == memory.dtype else _empty(datatype), datatype, 0, blocks)
    layout = datatype.live()
    if not layout.size:  # it touches nothing, wherever it lies
        return Buffer(_empty(datatype), datatype, count, blocks)
    low, high = layout.span(total)
    # The address is the caller's word (mpi4py): the memory reaches as far as the count and type say, also before
    # the start.
    if isinstance(memory, Unbounded):
        memory, start = memory.reaching(start + low, start + high), -low
    if start + low < 0 or start + high > memory.nbytes:
        raise ParameterError(
            f"{total} elements of {datatype.Get_name() or 'a derived type'} span bytes {start + low} to "
            f"{start + high}, but the buffer has {memory.nbytes}: pass a longer buffer or a smaller count"
        )
    if datatype.dtype is None or not datatype.is_predefined:
        new = Buffer(as_bytes(memory), datatype, count, blocks)
        new.origin = -start
        return new
    whole = total * layout.extent
    if start + whole > memory.nbytes:  # pair types end in padding
        return UnpaddedPairs(as_bytes(memory)[start : start + high], datatype, count, blocks)
    # Typed slices where they fall on whole elements, since only these let reductions work without a copy.
    if memory.dtype == datatype.dtype and start % memory.itemsize == 0:
        first = start // memory.itemsize
        return Buffer(memory[first : first + total], datatype, count, blocks)
    return Buffer(as_bytes(memory)[start : start + whole].view(datatype.dtype), datatype, count, blocks)


def _empty(datatype: Datatype) -> Array:
    predefined = datatype.is_predefined and datatype.dtype is not None
    return np.zeros(0, datatype.dtype if predefined else np.uint8)


def _absolute(obj: Any, count: int, kind: Any, blocks: int) -> Buffer:
    """Return the buffer of a datatype whose displacements are addresses (`BOTTOM`)."""
    if count and obj is None:
        raise ParameterError(f"the buffer is None but the count is {count}")
    datatype = datatype_of(None, kind) if kind is not None else BYTE
    return at(0, datatype, count, max(blocks, 1))


def at(address: int, datatype: Datatype, count: int, blocks: int = 1) -> Buffer:
    """Return the buffer of a datatype whose displacements count from an address."""
    if not count * blocks:
        return Buffer(_empty(datatype if datatype else BYTE), datatype or DATATYPE_NULL, 0, blocks)
    # BOTTOM's displacements are absolute: the memory begins at the first byte that the type touches.
    low, high = datatype.live().span(count * blocks)
    new = Buffer(at_address(address + low, high - low), datatype, count, blocks)
    new.origin = low
    return new


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

    def row(self) -> NDArray[Any] | None:
        """Return the elements of all blocks as one array, if they lie one behind the other: see `Buffer.row`."""
        total, memory, kind = sum(self.counts), self._memory, self.datatype
        if not total or memory is None or self.datatypes.count(kind) < len(self.datatypes):
            return None
        if [*accumulate(self.counts, initial=self.displs[0])][:-1] != self.displs:
            return None
        start = self.starts[0]
        if start < 0 or start + total * kind.Get_extent()[1] > memory.nbytes:
            return None  # refused where the block is asked for
        return locate(memory, kind, start, (total, 1)).row()

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
            # Blocks of several types have no common element, and numpy would convert them to one.
            parts = [as_bytes(part) for part in parts]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint8)

    def unpack(self, data: NDArray[Any]) -> int:
        """Write a snapshot of all blocks in a row; return its number of bytes."""
        done = 0
        for block in self:
            # Counted in the unit of `data`: elements if it is typed, else bytes.
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
    if spec is None or is_in_place(spec):
        empty = Vector(np.zeros(0, np.uint8), ([0] * blocks, [0] * blocks), [BYTE] * blocks)
        empty.in_place = spec is not None
        return empty
    new = _typed(spec, blocks) if types else _plain(spec, blocks)
    if writable and not new.writable:
        raise SpecBufferError("the receiving buffer is read-only: pass memory that can be written")
    return new


def _plain(spec: Any, blocks: int) -> Vector:
    obj, counts, displs, kind = split(spec) if isinstance(spec, (list, tuple)) else (spec, None, None, None)
    # mpi4py's [memory, (counts, displs)] and the form with four items both hold tuples; in the latter a tuple is
    # counts alone.
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
    # The address space has no length, so nothing could be inferred.
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
        # mpi4py: what does not divide evenly goes to the first blocks.
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
        # mpi4py's short form of `w`: one element of each type at displacement 0, for types that hold their own
        # addresses.
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
    if target is None or type(target) is int:
        return target or 0, origin.count, origin.datatype
    parts = list(target) if isinstance(target, (list, tuple)) else [target]
    if len(parts) > 3:
        raise ParameterError("target: expecting 3 items at most (displacement, count, type)")
    displacement = index(parts[0]) if parts else 0
    # Without a count the origin's is taken, and below its type as well: mpi4py's defaults for a target.
    count = index(parts[1]) if len(parts) > 1 else origin.count
    return displacement, count, datatype_of(None, parts[2]) if len(parts) > 2 else origin.datatype


@overload
def as_buffer(
    spec: Any, *, vector: Literal[False] = False, blocks: int = 1, types: bool = False, writable: bool = False
) -> Buffer: ...


@overload
def as_buffer(
    spec: Any, *, vector: Literal[True], blocks: int = 1, types: bool = False, writable: bool = False
) -> Vector: ...


@overload
def as_buffer(
    spec: Any, *, vector: bool, blocks: int = 1, types: bool = False, writable: bool = False
) -> Buffer | Vector: ...


def as_buffer(
    spec: Any, *, vector: bool = False, blocks: int = 1, types: bool = False, writable: bool = False
) -> Buffer | Vector:
    """Return the `Buffer` of a specification, or with `vector` the `Vector` of `blocks` blocks.

    A specification is memory (numpy array, torch CPU tensor, bytes, memoryview, array.array), or [memory, count],
    [memory, type], [memory, count, type], [memory, (count, displacement), type], [memory, count, displacement, type];
    a type is a `Datatype` or a typecode. None and `IN_PLACE` are empty buffers; the latter has `in_place` set.
    Without a count it is what the memory holds, divided by `blocks`. `types` asks for the `w` form: one type per block,
    displacements in bytes. `writable` refuses read-only memory at once.

    Raises `SpecTypeError`, `SpecBufferError`, `UnknownTypeError` or `ParameterError`, which are also the TypeError,
    BufferError, KeyError and ValueError of mpi4py.
    """
    # `type() is` and not isinstance, to leave subclasses (matrices, masked arrays, `buffer`) to the general path,
    # which knows their memory.
    if blocks < 2 and not vector:
        array = spec if type(spec) in (np.ndarray, PhantomArray) else of_tensor(spec)
        if array is not None and array.flags.c_contiguous and (not writable or array.flags.writeable):
            datatype = BY_DTYPE.get(array.dtype)
            if datatype is not None:
                return Buffer(array, datatype, array.size)
    if vector:
        return as_vector(spec, blocks, types=types, writable=writable)
    if spec is None or is_in_place(spec):
        return nothing(spec is not None)
    buffer = typed_array(spec) if blocks < 2 and type(spec) is list else None
    if buffer is None:
        buffer = general(*simple_parts(spec), blocks=blocks)
    if writable and not buffer.writable:
        raise SpecBufferError("the receiving buffer is read-only: pass memory that can be written")
    return buffer
