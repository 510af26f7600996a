"""What travels: bytes of a buffer, or a pickled object. Always a snapshot: one payload is never two ranks' memory.

Also two mistakes about buffers that MPI leaves undefined: a buffer written while its send is under way, and one of
another type than the message. Neither is refused, for real ranks refuse neither: each line of a program gets one
warning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import PROC_NULL
from spawnsim.comm.deferred import WAITING, settle
from spawnsim.comm.failures import SpecTypeError
from spawnsim.comm.memory import as_bytes
from spawnsim.comm.packing import Pickle
from spawnsim.comm.status import Status
from spawnsim.virtual.diagnosis import place
from spawnsim.virtual.engine.completion import Message
from spawnsim.virtual.engine.world import World

PLAIN = "?bBhHiIlLqQefdFD"  # dtypes without padding: not long double
pickler = Pickle()  # MPI.pickle: a program may give it other functions, as in mpi4py


def dumps(obj: Any) -> bytes:
    """Return an object as bytes."""
    if WAITING:
        settle()
    return pickler.dumps(obj)


def loads(data: Any) -> Any:
    """Return the object of bytes; of none, None, as mpi4py does."""
    return pickler.loads(data) if len(data) else None


def pack(spec: Any, dest: int = 0) -> Any:
    """Return a snapshot of a buffer: `bytes`, or an array for the types that need one."""
    if WAITING:
        settle()
    if type(spec) is np.ndarray and spec.flags.c_contiguous and spec.dtype.char in PLAIN:
        return spec.tobytes()
    _check_given(spec, dest)
    return as_buffer(spec).pack()


def check_target(spec: Any, source: int = 0) -> None:
    """Refuse memory that cannot be received into, before anything is received."""
    if WAITING:
        settle()
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
    if WAITING:
        settle(wait=False)
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


SAMPLES = 32  # bytes of a buffer that are compared; their distance is odd, so that they are of all places in a number


def check_type(world: World, label: str, buf: Any, message: Message) -> None:
    """Warn if a message of numbers of one type is received as numbers of another. Bytes may be received as anything."""
    sent, received = message.dtype, buf.dtype
    if sent is None or received is None or sent == received or 1 in (sent.itemsize, received.itemsize):
        return
    if message.nbytes and (sent.kind, sent.itemsize) != (received.kind, received.itemsize):
        _warn(
            world,
            f"received {sent} of rank {message.source} with tag {message.tag} on {label} into {received}: MPI copies "
            "the bytes and converts nothing",
        )


def watched(world: World, buf: Any, payload: Any, call: tuple[str, int]) -> Callable[[Status], None] | None:
    """Return what warns, when a send is collected, if the buffer differs from the payload that was made of it.

    `call` is its name and its destination. None if there is nothing in the buffer, or it has gaps.
    """
    if type(payload) is bytes:
        if not payload or type(buf) is not np.ndarray:
            return None
        step = len(payload) // SAMPLES | 1
        return partial(_compare, world, buf, (step, payload[::step], *call))
    buf = as_buffer(buf)
    if not payload.nbytes or not buf.datatype.is_predefined:
        return None
    step = payload.nbytes // SAMPLES | 1
    return partial(_compare, world, buf, (step, as_bytes(payload)[::step].tobytes(), *call))


def _compare(world: World, buf: Any, sent: tuple[int, bytes, str, int], _status: Status) -> None:
    step, before, operation, dest = sent
    memory: Any = memoryview(buf.data) if type(buf) is np.ndarray else as_bytes(buf.array).data
    if memory.cast("B")[::step].tobytes() != before:
        _warn(
            world,
            f"changed the buffer of its {operation} to rank {dest} before its Wait or Test: real ranks may send the "
            "new values, or a mixture; here the old ones were sent",
        )


def _warn(world: World, what: str) -> None:
    task = world.kernel.current
    where = place(sys._getframe())
    kind = what.partition(" ")[0]
    if (kind, where) not in world.mistakes:
        line = f" ({where})" if where else ""
        world.mistakes[kind, where] = f"rank {task.rank} at {task.clock:.6g} s{line} {what}"
