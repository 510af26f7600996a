"""What travels: bytes of a buffer, or a pickled object. Always a snapshot: one payload is never two ranks' memory.

This room knows buffer specifications and pickles; it must not know ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import PROC_NULL
from spawnsim.comm.failures import SpecTypeError
from spawnsim.comm.serial import Pickle

PLAIN = "?bBhHiIlLqQefdFD"  # dtypes without padding: not long double
pickler = Pickle()  # MPI.pickle: a program may give it other functions, as in mpi4py


def dumps(obj: Any) -> bytes:
    """Return an object as bytes."""
    return pickler.dumps(obj)


def loads(data: Any) -> Any:
    """Return the object of bytes; of none, None, as mpi4py does."""
    return pickler.loads(data) if len(data) else None


def pack(spec: Any, dest: int = 0) -> Any:
    """Return a snapshot of a buffer: `bytes`, or an array for the types that need one."""
    if type(spec) is np.ndarray and spec.flags.c_contiguous and spec.dtype.char in PLAIN:
        return spec.tobytes()
    _check_given(spec, dest)
    return as_buffer(spec).pack()


def check_target(spec: Any, source: int = 0) -> None:
    """Refuse memory that cannot be received into, before anything is received."""
    if type(spec) is np.ndarray and spec.flags.carray and spec.dtype.kind in "fiucb":
        return
    _check_given(spec, source)
    as_buffer(spec, writable=True)


def _check_given(spec: Any, peer: int) -> None:
    """None stands for a buffer only where nothing is sent or received."""
    if spec is None and peer != PROC_NULL:
        raise SpecTypeError("None is no buffer: pass an array, a tensor or bytes ([None, 0] for nothing)")


def unpack(spec: Any, payload: Any) -> None:
    """Write a payload into a buffer. A payload longer than the buffer is an error that changes nothing."""
    if type(spec) is np.ndarray and type(payload) is bytes:
        try:
            memoryview(spec).cast("B")[: len(payload)] = payload  # type: ignore[arg-type]
        except (TypeError, ValueError):  # empty, strided, read-only, too short, or of a type that needs care
            as_buffer(spec).unpack(np.frombuffer(payload, np.uint8))
        return
    _write(as_buffer(spec), payload)


def receiver(spec: Any) -> Callable[[Any], None]:
    """Return what writes a later payload into what `kept` has returned."""
    return partial(unpack if type(spec) is np.ndarray else _write, spec)


def kept(spec: Any) -> Any:
    """Return what is kept of a buffer until a later call: the program may free the datatype meanwhile."""
    return spec if type(spec) is np.ndarray else as_buffer(spec)


def _write(target: Any, payload: Any) -> None:
    target.unpack(np.frombuffer(payload, np.uint8) if type(payload) is bytes else payload)
