"""A message in a user's memory: which bytes, of which datatype; copies out and in.

Snapshots of predefined datatypes are typed arrays, of derived ones the bytes in the order in which they travel. Pairs
of a value and a place (`DOUBLE_INT`) lie with C's padding, and travel without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.datatypes import Datatype
from spawnsim.comm.failures import SpecBufferError, Truncated
from spawnsim.comm.memory import as_bytes
from spawnsim.comm.predefined import BY_NAME, BYTE
from spawnsim.phantoms import is_phantom

Array = NDArray[Any]
_PAIRS: Final = {
    datatype.dtype: datatype for datatype in BY_NAME.values() if datatype and datatype.family == "pair"
}


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
        # Flattened only when asked for: most messages are arrays of one dimension, and a reshape would cost each of
        # them.
        source = self._source
        return source if source.ndim == 1 else source.reshape(-1)

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Dtype in numpy of one element; None for derived types."""
        return self.datatype.dtype

    @property
    def type_name(self) -> str:
        """MPI's name of the datatype, or "derived" where the program has given it none."""
        return self.datatype._name or "derived"

    @property
    def writable(self) -> bool:
        """Whether `unpack` can work."""
        return bool(self._source.flags.writeable) or self.nbytes == 0

    @property
    def address(self) -> int:
        """Where the message starts in memory: two buffers with one address are the same argument."""
        return int(self._source.ctypes.data) - self.origin

    def pack(self) -> Array:
        """Return an owned 1-D snapshot, all blocks in a row: typed for predefined datatypes, else bytes."""
        if self.datatype.dtype is not None and self.datatype.is_predefined:
            # `flatten` copies always, `ravel` only where it must: a snapshot must not change with the program's memory.
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
        # Told by bytes, because MPI lets a shorter message arrive, and sender and receiver may name its elements
        # differently.
        nbytes = _wire_nbytes(data)
        if nbytes > self.nbytes:
            raise Truncated(
                message=f"a message of {nbytes} bytes does not fit a buffer of {self.nbytes} bytes"
            )
        # Before the check of read-only memory: an empty message may be received into memory that cannot be written.
        if not nbytes:
            return 0
        if not self._source.flags.writeable:
            raise SpecBufferError("the receiving buffer is read-only: pass memory that can be written")
        if is_phantom(data) and not is_phantom(source):
            data = np.asarray(data)  # what was stored; refused where nothing was
        if self.datatype.is_predefined and data.dtype == self._source.dtype:
            self.array[: data.size] = data
        elif self.datatype.dense or not is_phantom(source):
            self.datatype.layout.scatter(as_bytes(self.array), _wire(data), self.origin)
        return nbytes

    def row(self) -> Array | None:
        """Return the elements of all blocks as one array of numbers that can be written to; None if they are not."""
        array, kind = self.array, self.datatype
        plain = kind.is_predefined and array.dtype is kind.dtype and array.dtype.names is None
        return array if plain and array.flags.writeable and not is_phantom(array) else None

    def block(self, i: int) -> Buffer:
        """Return the i-th block as a buffer of its own."""
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
        """Return an owned snapshot."""
        pairs = np.zeros(self.count * self.blocks, self.datatype.dtype)
        as_bytes(pairs)[: self._source.size] = self._source
        return pairs

    def unpack(self, data: Array) -> int:
        """Write a snapshot to the user's memory, as bytes: neighbours of the pairs stay as they are."""
        memory = Buffer(self._source, self.datatype.Dup(), self.count, self.blocks)
        return memory.unpack(_wire(data))

    def part(self, start: int, count: int) -> Buffer:
        """Return some pairs."""
        first, extent = start * self.datatype.layout.extent, self.datatype.layout.extent
        return UnpaddedPairs(self._source[first : first + count * extent], self.datatype, count)


def _wire_nbytes(data: Array) -> int:
    """Return the bytes that travel: pairs travel without their padding."""
    pair = _PAIRS.get(data.dtype) if data.dtype.names else None
    return data.nbytes if pair is None else data.size * pair.size


def _wire(data: Array) -> NDArray[np.uint8]:
    pair = _PAIRS.get(data.dtype) if data.dtype.names else None
    return as_bytes(data) if pair is None or pair.dense else pair.wire(as_bytes(data), data.size)


def nothing(in_place: bool = False) -> Buffer:
    """Return the buffer that holds nothing: of None and, marked as such, of `IN_PLACE`."""
    new = Buffer(np.zeros(0, np.uint8), BYTE, 0)
    new.in_place = in_place
    return new
