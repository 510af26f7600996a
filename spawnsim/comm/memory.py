"""The memory of users' arguments: numpy arrays, torch CPU tensors, bytes, memoryviews, array.array, DLPack.

An object becomes one flat numpy array over the same bytes, without a copy and without importing the object's
library. A DLPack capsule is only borrowed, as mpi4py does it, so the exporter and its capsule must live as long as
the memory is used (numpy's own reader takes it over, and knows fewer types). `buffer` is MPI's own memory object
(`Alloc_mem`, windows, user-defined operations).
"""

from __future__ import annotations

import ctypes
import math
import os
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.failures import SpecBufferError, SpecTypeError
from spawnsim.comm.layouts import BF16, Bytes
from spawnsim.phantoms import PhantomArray

DL_CPU: Final = 1
DL_HOST: Final = (DL_CPU, 3)  # kinds of devices whose memory is the host's: plain, and pinned
EVERY_STREAM: Final = -1  # requested from devices: they need not wait
READ_ONLY: Final = 1
FLOAT, BFLOAT = 2, 4
_KINDS: Final = {0: "i", 1: "u", FLOAT: "f", 5: "c", 6: "b"}


class DLTensor(ctypes.Structure):
    """`DLTensor`."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class DLManagedTensor(ctypes.Structure):
    """`DLManagedTensor`, as far as it is read."""

    _fields_ = (("tensor", DLTensor),)


class DLManagedTensorVersioned(ctypes.Structure):
    """`DLManagedTensorVersioned`."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", DLTensor),
    )  # fmt: skip


# The capsule is only read: consuming it, as DLPack's protocol has it, would make us responsible for its deleter.
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


def gpu_here() -> bool:
    """Return whether the machine has a GPU: without one, memory that claims to be on a GPU is the host's.

    Simulators of GPUs have such memory.
    """
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")))


def borrow(obj: Any, bf16: np.dtype[Any]) -> Borrowed:
    """Return the memory of an object with `__dlpack__`. Raises `SpecBufferError` for memory that cannot serve."""
    kind = int(obj.__dlpack_device__()[0])
    if kind not in DL_HOST and gpu_here():
        raise SpecBufferError(f"the memory is on a device of DLPack's kind {kind}: copy it to the host")
    # The host's memory needs no stream, and old exporters refuse the argument.
    wishes = {} if kind == DL_CPU else {"stream": EVERY_STREAM}
    try:
        capsule, name = obj.__dlpack__(max_version=(1, 0), copy=False, **wishes), b"dltensor_versioned"
    # Before version 1.0 `__dlpack__` knew no such arguments; a TypeError is the only way to learn that.
    except TypeError:  # it is older than versions
        capsule, name = obj.__dlpack__(**wishes), b"dltensor"
    try:
        place = _pointer(capsule, name)
    except ValueError:
        raise SpecBufferError(
            "the DLPack capsule has another version than requested, or was used before"
        ) from None
    # The capsule has to go before its exporter, since it may call back into it.
    held = (obj, capsule)  # a tuple releases its last item first
    if name == b"dltensor":
        return _described(DLManagedTensor.from_address(place).tensor, False, held, bf16=bf16)
    versioned = DLManagedTensorVersioned.from_address(place)
    if versioned.major < 1:
        raise SpecBufferError(f"DLPack version {versioned.major} in a capsule of versions since 1")
    return _described(versioned.tensor, bool(versioned.flags & READ_ONLY), held, bf16=bf16)


def _described(tensor: DLTensor, readonly: bool, owner: Any, *, bf16: np.dtype[Any]) -> Borrowed:
    if tensor.ndim < 0 or (tensor.ndim and not tensor.shape):
        raise SpecBufferError(f"the DLPack tensor has no shape, and {tensor.ndim} dimensions")
    shape = [tensor.shape[axis] for axis in range(tensor.ndim)]
    strides = [tensor.strides[axis] for axis in range(tensor.ndim)] if tensor.strides else None
    # With a negative stride the data would begin before the address, and MPI has no notion of that.
    if min([*shape, *(strides or ())], default=0) < 0:
        raise SpecBufferError(
            f"the DLPack tensor has a negative length or stride: shape {shape}, strides {strides}"
        )
    # Column order is accepted too: the bytes are contiguous, and MPI sends bytes in memory order.
    if strides is not None and not _dense(shape, strides) and not _dense(shape[::-1], strides[::-1]):
        raise SpecBufferError(f"the buffer is not contiguous (shape {shape}, strides {strides}): pass a copy")
    dtype = _dtype(tensor, bf16)
    nbytes = math.prod(shape) * ((tensor.bits * tensor.lanes + 7) // 8)
    return Borrowed((tensor.data or 0) + tensor.byte_offset, nbytes // dtype.itemsize, dtype, readonly, owner)


def _dense(shape: list[int], strides: list[int]) -> bool:
    """Return whether elements lie side by side, the last dimension running fastest. Dimensions of 1 do not count."""
    size = 1
    for length, stride in zip(shape[::-1], strides[::-1], strict=True):
        if length > 1 and stride != size:
            return False
        size *= length
    return True


def _dtype(tensor: DLTensor, bf16: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of elements; types that numpy lacks become bytes, as in mpi4py."""
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


class buffer(np.ndarray[Any, np.dtype[np.uint8]]):  # noqa: N801  # mpi4py's name
    """Raw memory: len, item and slice access as integers and buffers, and the buffer protocol."""

    place: int | None = None  # the start, if the buffer was created from an address

    def __new__(cls, buf: Any = None, /) -> Self:
        """Return a view of an object's memory; of nothing, an empty one."""
        return cls.frombuffer(buf) if buf is not None else cls.allocate(0)

    @classmethod
    def allocate(cls, nbytes: int, clear: bool = False) -> Self:
        """Return fresh memory of `nbytes` bytes; always zeroed, so that a simulation never reads random bytes."""
        # Zeroed: bytes that are never written may be sent, and would make the digest non-deterministic.
        return np.zeros(nbytes, np.uint8).view(cls)

    @classmethod
    def frombuffer(cls, obj: Any, readonly: bool = False) -> Self:
        view = as_bytes(flat(obj)).view(cls)
        return view.toreadonly() if readonly else view

    @classmethod
    def fromaddress(cls, address: int, nbytes: int, readonly: bool = False) -> Self:
        """Return a view of memory at an address; it must stay valid while the view is used.

        A count and a datatype may extend beyond `nbytes`, as in mpi4py: the caller vouches for the address.
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
        # By identity: numpy's elementwise comparison gives an array, which has no truth value.
        return self is other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = object.__hash__  # type: ignore[assignment]  # arrays are not hashable

    def __repr__(self) -> str:
        return f"buffer({len(self)} bytes)"

    __str__ = __repr__

    def cast(self, format: str, shape: list[int] | tuple[int, ...] | None = None) -> memoryview:  # noqa: A002
        """Return the bytes as a memoryview of another format."""
        view: Any = self.data
        found: memoryview = view.cast(format) if shape is None else view.cast(format, shape)
        return found

    def tobytes(self, order: Any = None) -> bytes:
        """Return a copy; memory of one dimension has one order."""
        return bytes(self.data)

    def toreadonly(self) -> Self:
        view = self.view()
        view.flags.writeable = False
        view.place = self.place
        return view

    def release(self) -> None:
        """Do nothing: the memory goes with its last view."""

    @property
    def address(self) -> int:
        # numpy gives an empty array some address; mpi4py returns 0.
        return int(self.ctypes.data) if len(self) else 0

    @property
    def obj(self) -> Any:
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

    def __init__(
        self, owner: Any, address: int, nbytes: int, readonly: bool = False, interface: Any = None
    ) -> None:
        self.owner = owner
        self.__array_interface__ = interface or {
            "version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, readonly), "strides": None,
        }  # fmt: skip


def at_address(address: int, nbytes: int, owner: Any = None) -> Bytes:
    """Return the bytes at an address as an array that keeps `owner` alive."""
    # There is nothing to read, and the address of an empty piece may be null.
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    return np.asarray(_Foreign(owner, address, nbytes))


class Unbounded(np.ndarray[Any, np.dtype[Any]]):
    """Memory with a known start but an unknown end."""

    place: int

    def reaching(self, low: int, high: int) -> Bytes:
        """Return the bytes from `low` to `high`, relative to the start."""
        # Made anew for each message, since only its count and type say how far the memory reaches.
        found = at_address(self.place + low, high - low)
        if not self.flags.writeable:
            found.flags.writeable = False
        return found


def of_tensor(obj: Any) -> NDArray[Any] | None:
    """Return the array that shares a torch CPU tensor's memory; None of anything else, for `flat` to judge."""
    if not getattr(obj, "is_cpu", False):  # by name, as in `flat`
        return None
    try:
        array: NDArray[Any] = obj.numpy()
    except (RuntimeError, TypeError):  # it requires a gradient, or is of a dtype that numpy lacks
        return None
    return array


def flat(obj: Any) -> NDArray[Any]:
    """Return a 1-D array over an object's memory, in memory order.

    numpy arrays and torch CPU tensors in C or Fortran order (bfloat16 as `BF16`), anything with the buffer protocol or
    DLPack. Raises `SpecBufferError` when the memory is not contiguous, of foreign byte order or on another device.
    """
    if isinstance(obj, PhantomArray):
        return obj  # type: ignore[return-value]  # it implements all array methods that are used here
    if isinstance(obj, np.ndarray):
        if type(obj) is buffer and obj.place is not None:
            return _unbounded(obj)
        return _flatten(np.asarray(obj))
    # By the method's name, so that torch need not be imported: it takes seconds, and most programs never use it.
    if hasattr(obj, "data_ptr"):
        return _torch(obj)
    try:
        # The buffer protocol before DLPack: it tells read-only memory, which DLPack before version 1.0 cannot.
        return _flatten(np.asarray(memoryview(obj)))
    except TypeError:
        if hasattr(obj, "__cuda_array_interface__"):
            return _of_gpu(obj)
        if not hasattr(obj, "__dlpack__"):
            raise SpecTypeError(
                f"{type(obj).__name__} is not a buffer: pass an array, a tensor or bytes"
            ) from None
        return _dlpack(obj)
    except ValueError:
        return _flatten(np.asarray(memoryview(obj).cast("B")))


def _of_gpu(obj: Any) -> NDArray[Any]:
    if gpu_here():
        raise SpecBufferError(f"the memory of {type(obj).__name__} is on a GPU: copy it to the host")
    told = obj.__cuda_array_interface__
    if not isinstance(told, dict) or None in (told["shape"], told["typestr"]):
        raise SpecTypeError(f"{type(obj).__name__} does not describe its memory by __cuda_array_interface__")
    if told.get("mask") is not None:
        raise SpecBufferError(f"the memory of {type(obj).__name__} has a mask: pass a plain array")
    return _flatten(np.asarray(_Foreign(obj, told["data"][0], 0, interface={**told, "version": 3})))


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
    if tensor.device.type == "meta":  # torch's own way to have no memory
        name = str(tensor.dtype)[6:]
        dtype = BF16 if name == "bfloat16" else np.dtype(name)
        return PhantomArray(tensor.numel(), dtype)  # type: ignore[return-value]
    if tensor.device.type != "cpu":
        raise SpecBufferError(f"the tensor is on {tensor.device}: pass tensor.cpu()")
    if str(tensor.layout) != "torch.strided":
        raise SpecBufferError(f"the tensor's layout is {tensor.layout}: pass tensor.to_dense()")
    if not tensor.is_contiguous():
        turned = tensor.permute(
            *reversed(range(tensor.ndim))
        )  # contiguous in Fortran order, as `_flatten` takes it
        if turned.is_contiguous():
            return _torch(turned)
        raise SpecBufferError(
            f"the tensor is not contiguous (strides {tensor.stride()}): pass tensor.contiguous()"
        )
    # By the dtype's text, again without importing torch.
    if str(tensor.dtype) != "torch.bfloat16":
        try:
            array: NDArray[Any] = tensor.numpy()
        except (RuntimeError, TypeError) as why:  # quantized, or a conjugate that is not computed
            raise SpecBufferError(
                f"the tensor of {tensor.dtype} cannot be sent as it is ({why}): pass a plain copy, or its bytes"
            ) from None
        return array.reshape(-1)
    # numpy has no bfloat16, so torch refuses `numpy()`; the bytes are taken by address, and the view keeps the tensor.
    return at_address(tensor.data_ptr(), 2 * tensor.numel(), tensor).view(BF16)


def _dlpack(obj: Any) -> NDArray[Any]:
    """Return the memory behind `__dlpack__`. The array keeps the capsule alive, and its exporter even longer."""
    borrowed = borrow(obj, BF16)
    found = at_address(borrowed.place, borrowed.count * borrowed.dtype.itemsize, borrowed.owner)
    if borrowed.readonly:
        found.flags.writeable = False
    return found.view(borrowed.dtype)


def as_bytes(array: NDArray[Any]) -> Bytes:
    """Return a flat array as bytes."""
    return array.view(np.uint8) if array.size else np.zeros(0, np.uint8)


def start_of(array: Any) -> int:
    """Return the address of an array's first element."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # numpy's own ways take four times as long
    except (TypeError, ValueError, BufferError):  # it is read-only, empty, a phantom, or has gaps
        return int(array.ctypes.data)


def address(obj: Any) -> int:
    """Return where an object's memory starts (`MPI.Get_address`); an `int` is an address already."""
    if isinstance(obj, int) or obj is None:
        return int(obj or 0)
    memory = flat(obj)
    return start_of(memory) if memory.nbytes else 0  # numpy gives an empty array some address
