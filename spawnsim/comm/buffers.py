"""Messages in memory: the bytes, datatype, count and writability of a buffer specification.

Every message passes through `as_buffer`. It reads `array`, `[array, type]`, `[array, counts, displs, type]` and so
on by mpi4py's rules, in one pass, and returns a `Buffer`, or a `Vector` of the blocks of the `v` and `w` collectives.
Nothing is copied before `pack`. Snapshots of predefined datatypes are typed arrays, of derived ones the bytes in the
order in which they travel; pairs of a value and a place (`DOUBLE_INT`) lie with C's padding, and travel without it.
Errors are also the TypeError, ValueError, KeyError or BufferError that mpi4py raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import index
from typing import Any, Final, Literal, overload

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.constants import BOTTOM, is_in_place
from spawnsim.comm.datatypes import BY_DTYPE, BY_NAME, BYTE, Datatype
from spawnsim.comm.failures import (
    ERR_TYPE,
    CallError,
    SpecBufferError,
    SpecTypeError,
    Truncated,
    UnknownTypeError,
)
from spawnsim.comm.memory import Unbounded, as_bytes, at_address, flat, of_tensor, start_of
from spawnsim.errors import ParameterError
from spawnsim.phantoms import PhantomArray, is_phantom

Array = NDArray[Any]
_PAIRS: Final = {
    datatype.dtype: datatype for datatype in BY_NAME.values() if datatype and datatype.family == "pair"
}
READ_ONLY = "the receiving buffer is read-only: pass writable memory"


class Buffer:
    """A message in a user's memory: `blocks` times `count` elements of `datatype`.

    `count` is per block, as mpi4py counts (one block unless `as_buffer` was asked for more). `nbytes` is the data of
    all blocks, gaps not counted.
    """

    __slots__ = ("_source", "blocks", "count", "datatype", "in_place", "nbytes", "origin")

    def __init__(self, source: Array, datatype: Datatype, count: int, blocks: int = 1) -> None:
        self._source, self.datatype, self.count, self.blocks = source, datatype, count, blocks
        self.nbytes = count * blocks * datatype.size
        self.origin = 0
        self.in_place = False

    @property
    def array(self) -> Array:
        """1-D view of the elements in the user's memory; for derived types, of the bytes that they span."""
        # Flattened on demand: most messages have one dimension, and each would pay for a reshape.
        source = self._source
        return source if source.ndim == 1 else source.reshape(-1)

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Dtype in numpy of one element; None for derived types."""
        return self.datatype.dtype

    @property
    def type_name(self) -> str:
        """MPI's name of the datatype, or "derived"; with "phantom" before it where there are no data."""
        name = self.datatype._name or "derived"
        return f"phantom {name}" if self.phantom else name

    @property
    def phantom(self) -> bool:
        """Whether the buffer has sizes but no data."""
        source: Any = self._source
        return type(source) is PhantomArray and self.nbytes > 0

    @property
    def writable(self) -> bool:
        """Whether `unpack` may write to the memory."""
        return bool(self._source.flags.writeable) or self.nbytes == 0

    @property
    def address(self) -> int:
        """Where the message starts in memory: two buffers with one address are the same argument."""
        return start_of(self._source) - self.origin

    def pack(self) -> Array:
        """Return an owned 1-D snapshot, all blocks in a row: typed for predefined datatypes, else bytes."""
        if self.datatype.dtype is not None and self.datatype.is_predefined:
            # `flatten` always copies, `ravel` only if necessary: a snapshot must not change with the program's memory.
            return self._source.flatten()
        return self.datatype.wire(self._source, self.count * self.blocks, self.origin)

    def unpack(self, data: Array) -> int:
        """Write a snapshot, perhaps a shorter one, to the user's memory; return its number of bytes.

        Raises `Truncated` when it does not fit, `SpecBufferError` when the memory is read-only.
        """
        source = self._source
        # `is` and not `==`: numpy's comparison of dtypes costs more than the rest of this path, and equal plain
        # dtypes are mostly one object.
        same = data.dtype is source.dtype and data.nbytes == self.nbytes
        if same and self.datatype.is_predefined and source.flags.writeable:
            self.array[...] = data  # not [:], which takes twice as long where little is copied
            return self.nbytes
        # Compared by bytes: MPI lets a shorter message arrive, and the two ends may name its elements differently.
        pair = _PAIRS.get(data.dtype) if data.dtype.names else None
        nbytes = data.nbytes if pair is None else data.size * pair.size
        if nbytes > self.nbytes:
            raise Truncated(
                message=f"a message of {nbytes} bytes does not fit a buffer of {self.nbytes} bytes"
            )
        # Before the check of read-only memory: an empty message may be received into memory that cannot be written.
        if not nbytes:
            return 0
        if not source.flags.writeable:
            raise SpecBufferError(READ_ONLY)
        if is_phantom(data) and not is_phantom(source):
            data = np.asarray(data)  # the data that it stores, if it does
        if self.datatype.is_predefined and data.dtype == source.dtype:
            self.array[: data.size] = data
        elif self.datatype.dense or not is_phantom(source):
            self.datatype.layout.scatter(as_bytes(self.array), _wire(data), self.origin)
        return nbytes

    def row(self) -> Array | None:
        """Return the elements of all blocks as one array of numbers that can be written to; None if they are not."""
        array, kind = self.array, self.datatype
        plain = kind.is_predefined and array.dtype is kind.dtype and array.dtype.names is None
        return array if plain and array.flags.writeable and not self.phantom else None

    def block(self, i: int) -> Buffer:
        return self.part(i * self.count, self.count)

    def part(self, start: int, count: int) -> Buffer:
        """Return `count` elements from element `start` on, counted over all blocks."""
        if self.datatype.is_predefined:
            return Buffer(self.array[start : start + count], self.datatype, count)
        new = Buffer(self._source, self.datatype, count)
        # Moved by the extent and not by the size: MPI counts displacements in extents, gaps included.
        new.origin = self.origin - start * self.datatype.layout.extent
        return new

    def __iter__(self) -> Iterator[Buffer]:
        return (self.block(i) for i in range(self.blocks))

    def __repr__(self) -> str:
        name = self.datatype.Get_name() or "derived" if self.datatype else "no type"
        return f"Buffer({self.blocks} x {self.count} of {name}, {self.nbytes} bytes)"


class UnpaddedPairs(Buffer):
    """Pairs in memory that ends before the last pair's padding, as numpy's packed dtypes of 12 bytes do."""

    __slots__ = ()

    @property
    def array(self) -> Array:
        """Copy of the pairs: numpy has no view of them."""
        return self.pack()

    def pack(self) -> Array:
        pairs = np.zeros(self.count * self.blocks, self.datatype.dtype)
        as_bytes(pairs)[: self._source.size] = self._source
        return pairs

    def unpack(self, data: Array) -> int:
        """Write a snapshot to the user's memory, as bytes: memory next to the pairs is unchanged."""
        memory = Buffer(self._source, self.datatype.Dup(), self.count, self.blocks)
        return memory.unpack(_wire(data))

    def part(self, start: int, count: int) -> Buffer:
        first, extent = start * self.datatype.layout.extent, self.datatype.layout.extent
        return UnpaddedPairs(self._source[first : first + count * extent], self.datatype, count)


def _wire(data: Array) -> NDArray[np.uint8]:
    """Return the bytes that travel: pairs travel without their padding."""
    pair = _PAIRS.get(data.dtype) if data.dtype.names else None
    return as_bytes(data) if pair is None or pair.dense else pair.wire(as_bytes(data), data.size)


class Vector:
    """Blocks of a user's memory: `counts[i]` elements of `datatypes[i]` at byte `starts[i]`.

    Without a memory (`BOTTOM`) the starts are addresses. `displs` are the displacements as they were given.
    """

    __slots__ = ("_memory", "counts", "datatype", "datatypes", "displs", "in_place", "nbytes", "starts")

    def __init__(
        self, memory: Array | None, blocks: tuple[list[int], list[int]], datatypes: list[Datatype]
    ) -> None:
        self._memory, self.datatypes = memory, datatypes
        self.counts, self.starts = blocks
        self.displs = self.starts
        self.datatype = datatypes[0] if datatypes else BYTE
        self.nbytes = sum(n * datatype.size for n, datatype in zip(self.counts, datatypes, strict=True))
        self.in_place = False

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def writable(self) -> bool:
        return self._memory is None or bool(self._memory.flags.writeable) or self.nbytes == 0

    @property
    def address(self) -> int:
        return 0 if self._memory is None else int(self._memory.ctypes.data)

    def row(self) -> Array | None:
        """Return the elements of all blocks as one array, if they lie one behind the other: see `Buffer.row`."""
        total, memory, kind = sum(self.counts), self._memory, self.datatype
        if not total or memory is None or self.datatypes.count(kind) < len(self.datatypes):
            return None
        if [*accumulate(self.counts, initial=self.displs[0])][:-1] != self.displs:
            return None
        start = self.starts[0]
        if start < 0 or start + total * kind.Get_extent()[1] > memory.nbytes:
            return None  # refused where the block is asked for
        return locate(memory, kind, start, total).row()

    def block(self, i: int) -> Buffer:
        return locate(self._memory, self.datatypes[i], self.starts[i], self.counts[i])

    def __iter__(self) -> Iterator[Buffer]:
        return (self.block(i) for i in range(len(self.counts)))

    def __len__(self) -> int:
        return len(self.counts)

    def pack(self) -> Array:
        """Return an owned snapshot of all blocks in a row: typed where all have one predefined type, else bytes."""
        parts = [block.pack() for block in self]
        if any(part.dtype != parts[0].dtype for part in parts):
            # Blocks of several types have no common element, and numpy would convert them to one.
            parts = [as_bytes(part) for part in parts]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint8)

    def unpack(self, data: Array) -> int:
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
    a type is a `Datatype` or a typecode. A vector has lists of counts and displacements: [memory, counts],
    [memory, (counts, displs)], with or without a type, or all four. None and `IN_PLACE` are empty; the latter has
    `in_place` set. Without a count it is what the memory holds, divided by `blocks`. `types` asks for the `w` form: one
    type per block, displacements in bytes. `writable` refuses read-only memory at once.

    Raises `SpecTypeError`, `SpecBufferError`, `UnknownTypeError` or `ParameterError`, which are also the TypeError,
    BufferError, KeyError and ValueError of mpi4py.
    """
    datatype: Any
    # `type() is` and not isinstance, to leave subclasses (matrices, masked arrays, `buffer`) to the general path,
    # which knows their memory.
    if blocks < 2 and not vector:
        array, kind = spec, None
        if type(spec) is list and len(spec) == 2 and type(spec[0]) is np.ndarray:
            array, kind = spec  # [array, its own type or length] are the most common lists
        elif type(spec) is not np.ndarray and type(spec) is not PhantomArray:
            array = of_tensor(spec)
        if array is not None and array.flags.c_contiguous and (not writable or array.flags.writeable):
            datatype = BY_DTYPE.get(array.dtype)
            if isinstance(kind, Datatype) and kind.is_predefined and kind.dtype is array.dtype:
                datatype = kind
            elif kind is not None and (type(kind) is not int or kind != array.size):
                datatype = None
            if datatype is not None:
                return Buffer(array, datatype, array.size)
    found: Buffer | Vector
    if spec is None or is_in_place(spec):
        none, zeros = np.zeros(0, np.uint8), [0] * blocks
        found = Vector(none, (zeros, zeros), [BYTE] * blocks) if vector else Buffer(none, BYTE, 0)
        found.in_place = spec is not None
        return found
    obj, count, displacement, kind = _parts(spec, vector, types)
    # The address space (`BOTTOM`) has no end, and no array.
    memory = None if obj is BOTTOM else np.zeros(0, np.uint8) if obj is None else flat(obj)
    if types:
        found = _each_typed(memory, (count, displacement), kind, blocks)
    else:
        datatype = BYTE if kind is None and (obj is None or obj is BOTTOM) else _datatype(memory, kind)
        if vector:
            found = _vector(memory, (count, displacement), datatype, blocks)
        else:
            found = _simple(memory, (count, displacement), datatype, max(blocks, 1))
    if writable and not found.writable:
        raise SpecBufferError(READ_ONLY)
    return found


def _parts(spec: Any, vector: bool, types: bool) -> tuple[Any, Any, Any, Any]:
    """Return (memory, count or counts, displacement or displacements, type or types); None is not given."""
    if not isinstance(spec, (list, tuple)):
        if types:
            raise SpecTypeError("expecting [memory, (counts, displacements), types]")
        return spec, None, None, None
    if len(spec) == 4:
        return spec[0], spec[1], spec[2], spec[3]
    if len(spec) not in (2, 3):
        raise ParameterError(
            f"a message of {len(spec)} items: expecting 2 to 4 (memory, count, displacement, type)"
        )
    memory, count, kind = spec[0], spec[1], spec[-1]
    if len(spec) == 2:
        typed = types or isinstance(kind, (Datatype, str))
        count, kind = (None, kind) if typed else (count, None)
    # A tuple holds counts and displacements; a list does only where it cannot be the counts of a vector.
    if isinstance(count, tuple) or (isinstance(count, list) and (types or not vector)):
        count, displacement = count
        return memory, count, displacement, kind
    return memory, count, None, kind


def _datatype(memory: Array | None, kind: Any) -> Datatype:
    """Return the datatype that was named, or the one of the array's dtype; it must be committed."""
    if isinstance(kind, str):
        return Datatype.fromcode(kind)
    if kind is not None:
        if not isinstance(kind, Datatype):
            raise SpecTypeError(f"{kind!r} is not a datatype: pass a Datatype or a typecode such as 'd'")
        # MPI: only committed types may communicate. Real libraries crash or send garbage without it.
        if kind and not kind.committed:
            raise CallError(ERR_TYPE, "the datatype has not been committed: call its Commit() first")
        return kind
    if memory is None:
        raise SpecTypeError("memory without a type: pass [memory, count, datatype]")
    found = BY_DTYPE.get(memory.dtype)
    if found is None:
        # Foreign byte order has a separate error, since its remedy differs from the remedy for an unknown type.
        if not memory.dtype.isnative:
            raise SpecBufferError(f"dtype {memory.dtype} has a foreign byte order: convert the array first")
        raise UnknownTypeError(
            f"cannot map dtype {memory.dtype} to an MPI datatype: pass [array, count, datatype]"
        )
    return found


def _simple(memory: Array | None, given: tuple[Any, Any], datatype: Datatype, blocks: int) -> Buffer:
    """Return the buffer of (count, displacement in elements), each of which may be None."""
    elements = 0 if given[1] is None else index(given[1])
    if elements < 0:
        raise ParameterError(f"negative displacement {elements}")
    # The extent is asked for only with a displacement: a null type, which lacks one, is allowed in an empty message.
    start = elements * datatype.Get_extent()[1] if elements else 0
    nbytes = 0 if memory is None else memory.nbytes
    if memory is not None and start > nbytes and datatype.size:
        raise ParameterError(f"displacement {elements} is out of bounds: the buffer has {nbytes} bytes")
    number = _inferred(nbytes - start, datatype, blocks) if given[0] is None else index(given[0])
    if number < 0:
        raise ParameterError(f"negative count {number}")
    return locate(memory, datatype, start, number, blocks=blocks)


def _vector(memory: Array | None, given: tuple[Any, Any], datatype: Datatype, blocks: int) -> Vector:
    """Return the blocks of (counts, displacements in elements), each of which may be None."""
    counts, displs = given
    if counts is not None:
        numbers = _per_block(counts, blocks, "counts")
        if min(numbers, default=0) < 0:
            raise ParameterError(f"negative count {min(numbers)}")
    elif memory is None:
        raise ParameterError("BOTTOM requires counts: the address space has no length to spread among ranks")
    else:
        # mpi4py: what does not divide evenly goes to the first blocks.
        share, rest = divmod(_inferred(memory.nbytes, datatype, 1), max(blocks, 1))
        numbers = [share + (i < rest) for i in range(blocks)]
    extent = datatype.Get_extent()[1] if datatype else 0
    if displs is None:
        places = [0, *accumulate(numbers)][:blocks]
    elif not isinstance(displs, Sequence) and np.ndim(displs) == 0:  # a stride
        places = [i * index(displs) for i in range(blocks)]
    else:
        places = _per_block(displs, blocks, "displacements")
    new = Vector(memory, (numbers, [place * extent for place in places]), [datatype] * blocks)
    new.displs = places
    return new


def _each_typed(memory: Array | None, given: tuple[Any, Any], kinds: Sequence[Any], blocks: int) -> Vector:
    """Return the blocks of (counts, displacements in bytes), with a type for each."""
    datatypes = [_datatype(None, each) for each in kinds]
    if len(datatypes) != blocks:
        raise ParameterError(f"expecting {blocks} datatypes, got {len(datatypes)}")
    if given[0] is None and memory is None:
        raise ParameterError("BOTTOM requires counts: pass [BOTTOM, (counts, displacements), types]")
    # mpi4py's short form: one element of each type, for types that hold their own addresses.
    counts, displs = (1, 0) if given[0] is None else given
    places = _per_block(counts, blocks, "counts"), _per_block(displs, blocks, "displacements")
    return Vector(memory, places, datatypes)


def _per_block(values: Any, blocks: int, what: str) -> list[int]:
    """Return one number per block; a single number stands for all."""
    if not isinstance(values, Sequence) and np.ndim(values) == 0:
        return [index(values)] * blocks
    numbers = [index(value) for value in values]
    if len(numbers) != blocks:
        raise ParameterError(f"expecting {blocks} {what}, got {len(numbers)}")
    return numbers


def _inferred(nbytes: int, datatype: Datatype, blocks: int) -> int:
    """Return the number of elements per block that a buffer of `nbytes` holds."""
    if nbytes == 0:
        return 0
    extent = datatype.Get_extent()[1] if datatype else 0
    if extent <= 0:
        raise ParameterError("cannot infer a count: the datatype is null or has no extent; pass the count")
    if nbytes % extent:
        raise ParameterError(
            f"cannot infer a count: {nbytes} bytes are not a multiple of the extent, {extent}"
        )
    if nbytes // extent % blocks:
        raise ParameterError(
            f"cannot infer a count: {nbytes // extent} elements do not divide into {blocks} blocks"
        )
    return nbytes // extent // blocks


def locate(memory: Array | None, datatype: Datatype, start: int, count: int, *, blocks: int = 1) -> Buffer:
    """Return the buffer of `blocks` times `count` elements from byte `start` of a flat array, within its bounds.

    Args:
        memory: A flat array; None: the address space, of which `start` is an address.
        datatype: Type of an element; it may be null if the count is 0.
        start: The byte at which displacement 0 lies.
        count: Elements of each block.
        blocks: Number of blocks.

    Raises:
        ParameterError: the elements reach beyond the memory.
    """
    total = count * blocks
    dtype: Any = datatype.dtype
    predefined = datatype.is_predefined and dtype is not None
    if not total or not datatype.live().size:
        # Nothing to place, so neither bounds nor the type's alignment count: mpi4py allows a count of 0 anywhere.
        return Buffer(np.zeros(0, dtype if predefined else np.uint8), datatype, count, blocks)
    layout = datatype.layout
    low, high = layout.span(total)
    if memory is None:
        new = Buffer(at_address(start + low, high - low), datatype, count, blocks)
        new.origin = low
        return new
    # The address is the caller's word (mpi4py): the memory reaches as far as the count and type say, also before
    # the start.
    if isinstance(memory, Unbounded):
        memory, start = memory.reaching(start + low, start + high), -low
    if start + low < 0 or start + high > memory.nbytes:
        raise ParameterError(
            f"{total} elements of {datatype.Get_name() or 'a derived type'} span bytes {start + low} to "
            f"{start + high}, but the buffer has {memory.nbytes}: pass a longer buffer or a smaller count"
        )
    if not predefined:
        new = Buffer(as_bytes(memory), datatype, count, blocks)
        new.origin = -start
        return new
    whole = total * layout.extent
    if start + whole > memory.nbytes:  # pair types end in padding
        return UnpaddedPairs(as_bytes(memory)[start : start + high], datatype, count, blocks)
    # Typed slices where they fall on whole elements, since only these let reductions work without a copy.
    if memory.dtype == dtype and start % memory.itemsize == 0:
        first = start // memory.itemsize
        return Buffer(memory[first : first + total], datatype, count, blocks)
    return Buffer(as_bytes(memory)[start : start + whole].view(dtype), datatype, count, blocks)


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
    return displacement, count, _datatype(None, parts[2]) if len(parts) > 2 else origin.datatype
