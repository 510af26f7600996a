"""One message in a user's memory: which bytes, of which datatype, to be read out and written in.

This room knows memory and layouts. It never copies before `pack`, and keeps the user's object alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.datatypes import Datatype
from spawnsim.comm.failures import SpecBufferError, Truncated
from spawnsim.comm.memory import as_bytes
from spawnsim.comm.predefined import BY_NAME

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
        source = self._source
        return source if source.ndim == 1 else source.reshape(-1)

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Dtype in numpy of one element; None for derived types."""
        return self.datatype.dtype

    @property
    def writable(self) -> bool:
        """Whether `unpack` can work."""
        return bool(self._source.flags.writeable) or self.nbytes == 0

    @property
    def address(self) -> int:
        """Where the message starts in memory: two buffers with one address are the same argument."""
        return int(self._source.ctypes.data) - self.origin

    def element(self, dtype: Any) -> Array:
        """Return the user's memory as a 1-D array of another dtype."""
        return as_bytes(self.array).view(dtype)

    def pack(self) -> Array:
        """Return an owned 1-D snapshot, all blocks in a row: typed for predefined datatypes, else bytes."""
        if self.datatype.dtype is not None and self.datatype.is_predefined:
            return self._source.flatten()
        return self.datatype.wire(self._source, self.count * self.blocks, self.origin)

    def unpack(self, data: Array) -> int:
        """Write a snapshot, perhaps a shorter one, to the user's memory; return its number of bytes.

        Raises `Truncated` when it does not fit, `SpecBufferError` when the memory is read-only.
        """
        source = self._source
        same = data.dtype is source.dtype and data.nbytes == self.nbytes
        if same and self.datatype.is_predefined and source.flags.writeable:
            self.array[:] = data
            return self.nbytes
        nbytes = _wire_nbytes(data)
        if nbytes > self.nbytes:
            raise Truncated(
                message=f"a message of {nbytes} bytes does not fit a buffer of {self.nbytes} bytes"
            )
        if not nbytes:
            return 0
        if not self._source.flags.writeable:
            raise SpecBufferError("the receiving buffer is read-only: pass memory that can be written")
        if self.datatype.is_predefined and data.dtype == self._source.dtype:
            self.array[: data.size] = data
        elif self.datatype.dense:
            as_bytes(self.array)[-self.origin : nbytes - self.origin] = _wire(data)
        else:
            self.datatype.layout.scatter(as_bytes(self.array), _wire(data), self.origin)
        return nbytes

    def block(self, i: int) -> Buffer:
        """Return the i-th block as a buffer of its own."""
        return self.part(i * self.count, self.count)

    def part(self, start: int, count: int) -> Buffer:
        """Return `count` elements from element `start` on, counted over all blocks."""
        if self.datatype.is_predefined:
            return Buffer(self.array[start : start + count], self.datatype, count)
        new = Buffer(self._source, self.datatype, count)
        new.origin = self.origin - start * self.datatype.layout.extent
        return new

    def __iter__(self) -> Iterator[Buffer]:
        return (self.block(i) for i in range(self.blocks))

    def __repr__(self) -> str:
        name = self.datatype.Get_name() or "derived" if self.datatype else "no type"
        return f"Buffer({self.blocks} x {self.count} of {name}, {self.nbytes} bytes)"


def _wire_nbytes(data: Array) -> int:
    """Return the bytes that travel: pairs travel without their padding."""
    pair = _PAIRS.get(data.dtype) if data.dtype.names else None
    return data.nbytes if pair is None else data.size * pair.size


def _wire(data: Array) -> NDArray[np.uint8]:
    pair = _PAIRS.get(data.dtype) if data.dtype.names else None
    return as_bytes(data) if pair is None or pair.dense else pair.wire(as_bytes(data), data.size)
