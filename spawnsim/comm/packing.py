"""Objects as bytes: `MPI.Pickle`, and the instance that every object call uses."""

from __future__ import annotations

import copyreg
import io
import pickle as _pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from spawnsim.comm.memory import buffer

LARGE = 1024**2 // 4  # bytes from which on a buffer is left out of a pickle


def _dumps(obj: Any, protocol: int | None = None, **how: Any) -> bytes:
    """Return an object as bytes, as `pickle.dumps`. Equal tensors have equal bytes, wherever in memory they lie."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "UntypedStorage"):  # absent, or half imported
        return _pickle.dumps(obj, protocol, **how)
    file = io.BytesIO()
    pickler = _pickle.Pickler(file, protocol, **how)
    own: Any = dict.fromkeys((torch.UntypedStorage, torch.storage.TypedStorage), _reduced)
    pickler.dispatch_table = ChainMap[Any, Any](own, copyreg.dispatch_table)
    pickler.dump(obj)
    return file.getvalue()


def _reduced(storage: Any) -> tuple[Any, tuple[bytes]]:
    """Return what torch makes of a storage. It names it by its address, of 14 digits or 15; here all have one name."""
    rebuild, (data,) = storage.__reduce__()
    address = getattr(storage, "_untyped_storage", storage)._cdata
    return rebuild, (data.replace(_text(str(address)), _text("0" * 15)),)


def _text(words: str) -> bytes:
    return b"X" + len(words).to_bytes(4, "little") + words.encode()


class Frame(NamedTuple):
    """The bytes that pickle writes around an array's data: the same for all arrays of one dtype and shape."""

    head: bytes
    tail: bytes
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


# Pickle takes 9 µs to write and read an array of 4 KiB, nearly all of it for the dtype and shape. For a known dtype and
# shape, the same bytes are written and read without pickle. For long arrays this gains nothing.
_frames: dict[tuple[Any, ...], Frame | None] = {}
_by_length: dict[int, list[Frame]] = {}  # of the whole pickle
_FRAMES = 1024
_PLAIN = "?bBhHiIlLqQefdFD"


def _framed(array: np.ndarray[Any, Any]) -> bytes | None:
    """Return the pickle of an array; None if it has no frame."""
    key = array.dtype, array.shape
    frame = _frames[key] if key in _frames else _frame(array)
    return None if frame is None else b"".join((frame.head, array.data, frame.tail))


def _frame(array: np.ndarray[Any, Any]) -> Frame | None:
    """Find the frame by pickling an array of bytes that occur nowhere else; remember it."""
    marks = (np.arange(array.nbytes, dtype=np.int64) * 167 % 251).astype(np.uint8).tobytes()
    like = np.frombuffer(bytearray(marks), array.dtype).reshape(array.shape)
    whole = _dumps(like, _pickle.HIGHEST_PROTOCOL)
    frame = None
    if marks and whole.count(marks) == 1:
        head, _, tail = whole.partition(marks)
        frame = Frame(head, tail, like.dtype, like.shape)
    if len(_frames) >= _FRAMES:
        _frames.clear()
        _by_length.clear()
    _frames[array.dtype, array.shape] = frame
    if frame is not None:
        _by_length.setdefault(len(whole), []).append(frame)
    return frame


def _loads(data: Any) -> Any:
    """Return the object of bytes, as `pickle.loads`."""
    for head, tail, dtype, shape in _by_length.get(len(data), ()):
        if type(data) is bytes and data.startswith(head) and data.endswith(tail):
            return np.ndarray(shape, dtype, data, len(head)).copy()
    return _pickle.loads(data)


class Pickle:
    """A pair of functions and a protocol; programs may put in others (`MPI.pickle.__init__(dumps, loads)`)."""

    def __init__(
        self,
        dumps: Callable[..., bytes] | None = None,
        loads: Callable[..., Any] | None = None,
        protocol: int | None = None,
        threshold: int | None = None,
    ) -> None:
        self._dumps, self._loads = dumps or _dumps, loads or _pickle.loads
        self._own = dumps is None, loads is None
        own = dumps is None
        self.PROTOCOL: int | None = _pickle.HIGHEST_PROTOCOL if own and protocol is None else protocol
        self.THRESHOLD = threshold

    @property
    def THRESHOLD(self) -> int:
        """The size in bytes from which on a buffer is left out of a pickle; None sets the default."""
        return self._threshold

    @THRESHOLD.setter
    def THRESHOLD(self, value: int | None) -> None:
        self._threshold = LARGE if value is None else value

    def dumps(self, obj: Any) -> bytes:
        """Return an object as bytes."""
        if type(obj) is np.ndarray and self._own[0] and self.PROTOCOL == _pickle.HIGHEST_PROTOCOL:
            plain = obj.nbytes < LARGE and obj.flags.carray and obj.dtype.char in _PLAIN
            framed = _framed(obj) if plain else None
            if framed is not None:
                return framed
        return self._dumps(obj) if self.PROTOCOL is None else self._dumps(obj, self.PROTOCOL)

    def loads(self, data: Any) -> Any:
        """Return the object of bytes."""
        return _loads(data) if self._own[1] else self._loads(data)

    def dumps_oob(self, obj: Any) -> tuple[bytes, list[buffer]]:
        """Return an object as bytes and the large buffers that were left out of them."""
        held: list[buffer] = []

        def keep(piece: Any) -> bool:
            view = buffer.frombuffer(piece.raw())
            small = view.nbytes < self.THRESHOLD
            if not small:
                held.append(view)
            return small

        return self._dumps(obj, max(self.PROTOCOL or 0, 5), buffer_callback=keep), held

    def loads_oob(self, data: Any, buffers: Iterable[Any]) -> Any:
        """Return the object of bytes and the buffers that were left out of them."""
        return self._loads(data, buffers=buffers)


def copied(obj: Any, pickle: Pickle | None = None) -> Any:
    """Return what the receiver of an object gets: immutable plain values as they are, all others through pickle."""
    if type(obj) in (int, float, str, bytes, bool, type(None)):
        return obj
    using = pickle or _default
    return using.loads(using.dumps(obj))


_default = Pickle()
