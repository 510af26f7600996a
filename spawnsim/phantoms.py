"""Arrays without memory: sizes represent data if only the timing of a run matters.

torch has such tensors (its "meta" device), numpy does not. This module needs only numpy: every layer may use it.
"""

from __future__ import annotations

from operator import index
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from spawnsim.errors import ParameterError, UsageError

NO_DATA = (
    "a phantom (a PhantomArray, or a tensor on the meta device) has no data: "
    "it can only be received into a phantom, on virtual ranks"
)
MIXED = "a phantom and data cannot be combined: all ranks must pass phantoms, or none"


class PhantomError(UsageError, BufferError):
    """A call needs the data of a phantom, which has no data."""


class PhantomArray(NDArrayOperatorsMixin):
    """An array that has only a length and a dtype: virtual ranks accept it wherever they accept a buffer.

    Sending it takes as long, and counts as many bytes, as data would. Nothing is copied or computed, so the timing of
    a 1 GB model costs no memory. Results computed from phantoms are phantoms. Tensors on torch's "meta" device are
    treated as phantoms, too. Real data that are written or received into a phantom (a header) are kept, and can be
    read again. Other reads raise an error, as do sums of phantoms and data, and phantoms on real ranks.

    Args:
        count: Number of elements.
        dtype: Their dtype in numpy.

    Attributes:
        nbytes: Bytes that data would take.
    """

    # Views share the stored bytes: first byte in the whole → real bytes. Nearly always empty, or one header.
    __slots__ = ("_start", "_stored", "dtype", "nbytes", "size")
    ndim = 1
    flags = np.zeros(1, np.uint8).flags

    def __init__(self, count: int, dtype: Any = np.float32) -> None:
        self.size, self.dtype = index(count), np.dtype(dtype)
        self._start, self._stored = 0, dict[int, bytes]()
        if self.size < 0 or self.dtype.hasobject:
            raise ParameterError(
                f"PhantomArray({count}, {dtype}): give a count of at least 0, and a plain dtype"
            )
        self.nbytes = self.size * self.dtype.itemsize

    @property
    def shape(self) -> tuple[int]:
        """The shape, as in numpy."""
        return (self.size,)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(self.dtype.itemsize)

    @property
    def ctypes(self) -> Any:
        """The object with the address: an address without memory, the same for equal places of one phantom."""
        return SimpleNamespace(data=id(self._stored) + self._start)

    def __len__(self) -> int:
        return self.size

    def _piece(self, first: int, size: int, dtype: np.dtype[Any]) -> PhantomArray:
        new = PhantomArray.__new__(PhantomArray)
        new.size, new.dtype, new.nbytes = size, dtype, size * dtype.itemsize
        new._start, new._stored = first, self._stored
        return new

    def __getitem__(self, item: Any) -> PhantomArray:
        item = slice(None) if item is Ellipsis else item
        start, stop, step = item.indices(self.size) if isinstance(item, slice) else (0, 0, 0)
        if step != 1:
            raise PhantomError("a phantom array has no elements: take contiguous slices of it")
        return self._piece(self._start + start * self.itemsize, max(stop - start, 0), self.dtype)

    def __setitem__(self, item: Any, value: Any) -> None:
        part = self if item is Ellipsis else self[item]
        if (
            type(value) is PhantomArray
            and value.nbytes == part.nbytes
            and not (part._stored or value._stored)
        ):
            return  # most messages
        if isinstance(value, PhantomArray) and value.nbytes <= part.nbytes:
            held, shift = value.stored(), part._start - value._start
        elif not isinstance(value, PhantomArray) and value.nbytes <= part.nbytes:
            base: Any = getattr(value, "base", None)
            if (
                type(base) is not bytes or len(base) != value.nbytes
            ):  # otherwise it cannot change, and needs no copy
                base = np.asarray(value).tobytes()
            held, shift = {0: base}, part._start
        else:
            raise PhantomError(f"{value.nbytes} bytes do not fit {part.nbytes} bytes of a phantom array")
        end = part._start + value.nbytes
        for first in [
            each for each, data in self._stored.items() if each < end and each + len(data) > part._start
        ]:
            self._forget(first, part._start, end)
        self._stored.update({first + shift: data for first, data in held.items()})

    def _forget(self, first: int, start: int, end: int) -> None:
        """Of the bytes stored at `first`, keep only those before `start` or from `end` on."""
        data = self._stored.pop(first)
        if first < start:
            self._stored[first] = data[: start - first]
        if first + len(data) > end:
            self._stored[end] = data[end - first :]

    def stored(self) -> dict[int, bytes]:
        """Return the real data here: first byte, counted in the whole array, → bytes."""
        end, found = self._start + self.nbytes, dict[int, bytes]()
        for first, data in sorted(self._stored.items()):
            low, high = max(first, self._start), min(first + len(data), end)
            if low < high:
                found[low] = data[low - first : high - first]
        return found

    @property
    def data(self) -> memoryview:
        """The real data at its beginning."""
        found, at = b"", self._start
        for first, data in self.stored().items():
            if first != at:
                break
            found, at = found + data, at + len(data)
        return memoryview(found)

    def tobytes(self) -> bytes:
        """Return the data, all of which must have been stored."""
        found = bytes(self.data)
        if len(found) < self.nbytes:
            raise PhantomError(NO_DATA)
        return found

    def copy(self) -> PhantomArray:
        """Return an independent phantom with the stored data."""
        new = PhantomArray.__new__(PhantomArray)
        new.size, new.dtype, new.nbytes, new._start = self.size, self.dtype, self.nbytes, 0
        new._stored = (
            {first - self._start: data for first, data in self.stored().items()} if self._stored else {}
        )
        return new

    flatten = copy

    def reshape(self, *shape: Any, order: str = "C") -> PhantomArray:
        """Return the phantom itself: phantoms have one dimension."""
        return self

    def view(self, dtype: Any) -> PhantomArray:
        """Return the same bytes as elements of another dtype."""
        found = np.dtype(dtype)
        return self._piece(self._start, self.nbytes // int(found.itemsize), found)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the stored data as an array, if all of them are stored."""
        found = self.data
        if len(found) < self.nbytes:
            raise PhantomError(NO_DATA)
        return np.frombuffer(bytearray(found), self.dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **how: Any) -> Any:
        """Compute nothing; the result is another phantom."""
        whole = [each for each in (*given, *how.get("out", ())) if getattr(each, "size", 1) != 1]
        if method != "__call__" or not all(isinstance(each, PhantomArray) for each in whole):
            raise PhantomError(MIXED)
        if "out" in how:
            return how["out"][0]
        # On arrays of one element each, since only numpy knows the dtype of a result.
        one = [np.ones(1, each.dtype) if isinstance(each, PhantomArray) else each for each in given]
        return PhantomArray(max((each.size for each in whole), default=1), ufunc(*one).dtype)

    def all(self) -> bool:
        """Return True: phantoms count as finite."""
        return True

    def astype(self, dtype: Any, copy: bool = True) -> PhantomArray:
        """Return a phantom of another dtype."""
        return self if not copy and dtype == self.dtype else PhantomArray(self.size, dtype)

    def __array_function__(self, function: Any, types: Any, given: Any, how: Any) -> Any:
        """Return phantoms for functions in which numpy makes new arrays."""
        if function in (np.zeros_like, np.empty_like, np.nan_to_num):
            return PhantomArray(self.size, self.dtype)
        if function is not np.concatenate:
            raise PhantomError(NO_DATA)
        parts = given[0]
        whole, at = PhantomArray(sum(part.size for part in parts), self.dtype), 0
        for part in parts:
            whole[at : at + part.size] = part
            at += part.size
        return whole

    def __dlpack_device__(self) -> Any:
        """Refuse: only real ranks call this."""
        raise PhantomError(NO_DATA)

    __dlpack__ = __dlpack_device__

    def __repr__(self) -> str:
        return f"PhantomArray({self.size}, {self.dtype})"


def is_phantom(*arrays: Any) -> bool:
    """Return whether the arrays are phantoms.

    Raises:
        PhantomError: some are phantoms, and some hold data.
    """
    if PhantomArray not in map(type, arrays):
        return False
    kinds = {type(array) is PhantomArray for array in arrays if array.nbytes}
    if len(kinds) > 1:
        raise PhantomError(MIXED)
    return True in kinds
