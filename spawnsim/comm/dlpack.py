"""Memory behind `__dlpack__`, read from the capsule that an exporter hands out.

The capsule is only borrowed, as mpi4py does it: nobody takes the tensor over, so that the exporter and its capsule must
live as long as the memory is used. numpy's own reader takes it over, and knows fewer types. This room knows the layout
of DLPack's structures, before version 1 and since.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from spawnsim.comm.failures import SpecBufferError

CPU: Final = 1
HOST: Final = (CPU, 3)  # kinds of devices whose memory is the host's: plain, and pinned
EVERY_STREAM: Final = -1  # what others ask of devices: need not wait
READ_ONLY: Final = 1
FLOAT, BFLOAT = 2, 4
_KINDS: Final = {0: "i", 1: "u", FLOAT: "f", 5: "c", 6: "b"}


class Tensor(ctypes.Structure):
    """`DLTensor`."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class Managed(ctypes.Structure):
    """`DLManagedTensor`, as far as it is read."""

    _fields_ = (("tensor", Tensor),)


class Versioned(ctypes.Structure):
    """`DLManagedTensorVersioned`."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", Tensor),
    )  # fmt: skip


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True)
class Borrowed:
    """Contiguous memory of the host; `owner` must be kept as long as it is used."""

    place: int
    count: int
    dtype: np.dtype[Any]
    readonly: bool
    owner: Any


def borrow(obj: Any, bf16: np.dtype[Any]) -> Borrowed:
    """Return the memory of an object with `__dlpack__`. Raises `SpecBufferError` for memory that cannot serve."""
    kind = int(obj.__dlpack_device__()[0])
    if kind not in HOST:
        raise SpecBufferError(f"the memory is on a device of DLPack's kind {kind}: copy it to the host")
    wishes = {} if kind == CPU else {"stream": EVERY_STREAM}
    try:
        capsule, name = obj.__dlpack__(max_version=(1, 0), copy=False, **wishes), b"dltensor_versioned"
    except TypeError:  # it is older than versions
        capsule, name = obj.__dlpack__(**wishes), b"dltensor"
    try:
        place = _pointer(capsule, name)
    except ValueError:
        raise SpecBufferError(
            "the DLPack capsule is of another version than asked for, or was used before"
        ) from None
    held = (obj, capsule)  # a tuple lets go of its last item first
    if name == b"dltensor":
        return _described(Managed.from_address(place).tensor, False, held, bf16=bf16)
    versioned = Versioned.from_address(place)
    if versioned.major < 1:
        raise SpecBufferError(f"DLPack version {versioned.major} in a capsule of versions since 1")
    return _described(versioned.tensor, bool(versioned.flags & READ_ONLY), held, bf16=bf16)


def _described(tensor: Tensor, readonly: bool, owner: Any, *, bf16: np.dtype[Any]) -> Borrowed:
    if tensor.ndim < 0 or (tensor.ndim and not tensor.shape):
        raise SpecBufferError(f"the DLPack tensor has no shape, and {tensor.ndim} dimensions")
    shape = [tensor.shape[axis] for axis in range(tensor.ndim)]
    strides = [tensor.strides[axis] for axis in range(tensor.ndim)] if tensor.strides else None
    if min([*shape, *(strides or ())], default=0) < 0:
        raise SpecBufferError(
            f"the DLPack tensor has a negative length or stride: shape {shape}, strides {strides}"
        )
    if strides is not None and not _dense(shape, strides) and not _dense(shape[::-1], strides[::-1]):
        raise SpecBufferError(f"the buffer is not contiguous (shape {shape}, strides {strides}): pass a copy")
    dtype = _dtype(tensor, bf16)
    nbytes = int(np.prod(shape, dtype=np.int64)) * ((tensor.bits * tensor.lanes + 7) // 8)
    return Borrowed((tensor.data or 0) + tensor.byte_offset, nbytes // dtype.itemsize, dtype, readonly, owner)


def _dense(shape: list[int], strides: list[int]) -> bool:
    """Return whether elements lie side by side, the last dimension running fastest. Dimensions of 1 do not count."""
    size = 1
    for length, stride in zip(shape[::-1], strides[::-1], strict=True):
        if length > 1 and stride != size:
            return False
        size *= length
    return True


def _dtype(tensor: Tensor, bf16: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of elements; what numpy does not know is bytes, as for mpi4py."""
    code, nbytes = tensor.code, tensor.bits // 8
    if code == FLOAT and tensor.lanes == 2:  # an old way to say complex
        code, nbytes = 5, 2 * nbytes
    elif tensor.lanes != 1:
        return np.dtype(np.uint8)
    if code == BFLOAT and nbytes == 2:
        return bf16
    try:
        return np.dtype(f"{_KINDS.get(code, '?')}{nbytes}")
    except TypeError:
        return np.dtype(np.uint8)
