"""The memory behind what users pass: numpy arrays, torch CPU tensors, bytes, memoryviews, array.array.

This room turns an object into one flat numpy array over the same bytes, without importing the object's library. It
copies nothing. `buffer` is MPI's own memory object (`Alloc_mem`, windows, user-defined operations).
"""

from __future__ import annotations

import ctypes
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.datatypes import BF16
from spawnsim.comm.dlpack import borrow
from spawnsim.comm.failures import SpecBufferError, SpecTypeError
from spawnsim.comm.layouts import Bytes


class buffer(np.ndarray[Any, np.dtype[np.uint8]]):  # noqa: N801  # mpi4py's name
    """Raw memory: len, item and slice access as integers and buffers, and the buffer protocol."""

    place: int | None = None  # where it starts, if it was made of an address

    def __new__(cls, buf: Any = None, /) -> Self:
        """Return a view of an object's memory; of nothing, an empty one."""
        return cls.frombuffer(buf) if buf is not None else cls.allocate(0)

    @classmethod
    def allocate(cls, nbytes: int, clear: bool = False) -> Self:
        """Return fresh memory of `nbytes` bytes; zeroed always, so that a simulation never reads chance."""
        return np.zeros(nbytes, np.uint8).view(cls)

    @classmethod
    def frombuffer(cls, obj: Any, readonly: bool = False) -> Self:
        """Return a view of an object's memory."""
        view = as_bytes(flat(obj)).view(cls)
        return view.toreadonly() if readonly else view

    @classmethod
    def fromaddress(cls, address: int, nbytes: int, readonly: bool = False) -> Self:
        """Return a view of memory at an address; it must stay valid while the view is used.

        A count and a datatype may reach beyond `nbytes`, as with mpi4py: the address is the caller's word.
        """
        view = at_address(address, nbytes).view(cls)
        view.place = address
        return view.toreadonly() if readonly else view

    def __getitem__(self, item: Any, /) -> Any:
        found = super().__getitem__(item)
        return found if isinstance(found, buffer) else int(found)

    def __setitem__(self, item: Any, value: Any, /) -> None:
        whole = isinstance(value, (int, np.integer))
        super().__setitem__(item, value if whole else as_bytes(flat(value)))

    def __bool__(self) -> bool:
        return len(self) > 0

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = object.__hash__  # type: ignore[assignment]  # arrays have none

    def __repr__(self) -> str:
        return f"buffer({len(self)} bytes)"

    __str__ = __repr__

    def cast(self, format: str, shape: list[int] | tuple[int, ...] | None = None) -> memoryview:  # noqa: A002
        """Return the bytes as a memoryview of another format."""
        view: Any = self.data
        found: memoryview = view.cast(format) if shape is None else view.cast(format, shape)
        return found

    def toreadonly(self) -> Self:
        """Return a view that cannot be written."""
        view = self.view()
        view.flags.writeable = False
        view.place = self.place
        return view

    def release(self) -> None:
        """Do nothing: the memory goes with its last view."""

    @property
    def address(self) -> int:
        """Where the memory starts."""
        return int(self.ctypes.data) if len(self) else 0

    @property
    def obj(self) -> Any:
        """The object whose memory this is."""
        return self.base

    @property
    def readonly(self) -> bool:
        """Whether the memory cannot be written."""
        return not self.flags.writeable

    @property
    def format(self) -> str:
        """The format of an item: a byte."""
        return "B"


class _Foreign:
    """Memory of another library, in the form in which numpy takes it; keeps its owner alive."""

    def __init__(self, owner: Any, address: int, nbytes: int, readonly: bool = False) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, readonly), "strides": None,
        }  # fmt: skip


def at_address(address: int, nbytes: int, owner: Any = None) -> Bytes:
    """Return the bytes at an address as an array that keeps `owner` alive."""
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    return np.asarray(_Foreign(owner, address, nbytes))


class Unbounded(np.ndarray[Any, np.dtype[Any]]):
    """Memory of which only the start is known for sure."""

    place: int

    def reaching(self, low: int, high: int) -> Bytes:
        """Return the bytes from `low` to `high`, relative to the start."""
        found = at_address(self.place + low, high - low)
        if not self.flags.writeable:
            found.flags.writeable = False
        return found


def flat(obj: Any) -> NDArray[Any]:
    """Return a 1-D array over an object's memory, in memory order.

    numpy arrays (C or Fortran order), torch CPU tensors (bfloat16 as `BF16`), anything with the buffer protocol or
    DLPack. Raises `SpecBufferError` when the memory is not contiguous, of foreign byte order or on another device.
    """
    if isinstance(obj, np.ndarray):
        if type(obj) is buffer and obj.place is not None:
            return _unbounded(obj)
        return _flatten(np.asarray(obj))
    if hasattr(obj, "data_ptr"):
        return _torch(obj)
    try:
        return _flatten(np.asarray(memoryview(obj)))
    except TypeError:
        if not hasattr(obj, "__dlpack__"):
            raise SpecTypeError(
                f"{type(obj).__name__} is no buffer: pass an array, a tensor or bytes"
            ) from None
        return _dlpack(obj)
    except ValueError:
        return _flatten(np.asarray(memoryview(obj).cast("B")))


def _unbounded(given: buffer) -> Unbounded:
    found = np.asarray(given).view(Unbounded)
    assert given.place is not None
    found.place = given.place
    return found


def _flatten(array: NDArray[Any]) -> NDArray[Any]:
    if array.flags.c_contiguous:
        return array.reshape(-1)
    if array.flags.f_contiguous:
        return array.reshape(-1, order="F")
    raise SpecBufferError(
        f"the buffer is not contiguous (shape {array.shape}, strides {array.strides}): "
        "pass a contiguous copy, or a derived datatype over the base array"
    )


def _torch(tensor: Any) -> NDArray[Any]:
    """Return the memory of a torch tensor, known by its methods only."""
    if tensor.requires_grad:
        raise SpecBufferError("the tensor requires grad: pass tensor.detach()")
    if tensor.device.type != "cpu":
        raise SpecBufferError(f"the tensor is on {tensor.device}: pass tensor.cpu()")
    if not tensor.is_contiguous():
        raise SpecBufferError(
            f"the tensor is not contiguous (strides {tensor.stride()}): pass tensor.contiguous()"
        )
    if str(tensor.dtype) != "torch.bfloat16":
        array: NDArray[Any] = tensor.numpy().reshape(-1)
        return array
    return at_address(tensor.data_ptr(), 2 * tensor.numel(), tensor).view(BF16)


def _dlpack(obj: Any) -> NDArray[Any]:
    """Return the memory behind `__dlpack__`. The array keeps the capsule alive, and its exporter even longer."""
    lent = borrow(obj, BF16)
    found = at_address(lent.place, lent.count * lent.dtype.itemsize, lent.owner)
    if lent.readonly:
        found.flags.writeable = False
    return found.view(lent.dtype)


def as_bytes(array: NDArray[Any]) -> Bytes:
    """Return a flat array as bytes."""
    return array.view(np.uint8) if array.size else np.zeros(0, np.uint8)


def address(obj: Any) -> int:
    """Return where an object's memory starts (`MPI.Get_address`); an `int` is an address already."""
    if isinstance(obj, int) or obj is None:
        return int(obj or 0)
    return int(flat(obj).ctypes.data)


POINTER_NBYTES = ctypes.sizeof(ctypes.c_void_p)
