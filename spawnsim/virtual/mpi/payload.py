"""Payloads: the bytes of a buffer, or a pickled object. Always a snapshot: no payload shares two ranks' memory.

Also two mistakes about buffers that MPI leaves undefined: writing to a buffer during its send, and receiving into a
buffer of another type than the message. Neither raises an error, as on real ranks: each line of a program gets one
warning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from io import BytesIO
from operator import index
from typing import Any

import numpy as np
from numpy import ndarray

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import PROC_NULL
from spawnsim.comm.failures import SpecBufferError, SpecTypeError, Truncated
from spawnsim.comm.memory import as_bytes, flat, of_tensor
from spawnsim.comm.packing import Pickle
from spawnsim.comm.status import Status
from spawnsim.phantoms import PhantomArray, is_phantom
from spawnsim.virtual.engine.completion import Message
from spawnsim.virtual.engine.diagnosis import place
from spawnsim.virtual.engine.world import World

# Dtypes without padding (not long double) in the machine's byte order.
PLAIN = frozenset(map(np.dtype, "?bBhHiIlLqQefdFD"))
OPTIONS = "mpi4py.rc"  # key among the attachments of an unmodified program's ranks
pickler = Pickle()  # MPI.pickle: a program may replace its functions, as in mpi4py


def dumps(obj: Any) -> bytes:
    """Return an object as bytes."""
    return pickler.dumps(obj)


def loads(data: Any) -> Any:
    """Return the object in some bytes; None for no bytes, as in mpi4py."""
    return pickler.loads(data) if len(data) else None


class Room:
    """The space that limits a received object, as in mpi4py: a number of bytes, or a buffer of the program."""

    __slots__ = ("_memory", "_nbytes")

    def __init__(self, buf: Any) -> None:
        """Accept a number of bytes, or a buffer."""
        try:
            self._memory, self._nbytes = None, index(buf)
        except TypeError:
            self._memory = as_bytes(flat(buf))
            self._nbytes = len(self._memory)
            if not self._memory.flags.writeable:
                raise SpecBufferError(
                    "cannot receive an object into read-only memory: pass a bytearray"
                ) from None

    def load(self, message: Message) -> Any:
        """Return the object of a message, which must fit the space."""
        if message.nbytes > self._nbytes:
            raise Truncated(
                message=f"a pickled object of {message.nbytes} bytes does not fit the {self._nbytes} bytes that mpi4py "
                "provides (irecv: mpi4py.rc.irecv_bufsz): give irecv(buf=number of bytes), or use recv() without buf"
            )
        if self._memory is not None:
            self._memory[: message.nbytes] = np.frombuffer(message.payload, np.uint8)
        return loads(message.payload)


def pack(spec: Any, dest: int = 0) -> tuple[Any, Any]:
    """Return a snapshot of a buffer (`bytes`, or an array for types that need one) and the buffer itself.

    For a CPU tensor, the latter is the array over its memory, which is faster to access.
    """
    array = spec if type(spec) is ndarray else of_tensor(spec)
    if array is not None and array.flags.c_contiguous and array.dtype in PLAIN:
        base: Any = array.base
        if type(base) is bytes and len(base) == array.nbytes:  # immutable bytes are a snapshot already
            return base, array
        return array.tobytes(), array
    if type(spec) is PhantomArray and spec.dtype in PLAIN:
        return spec.copy(), spec
    _check_given(spec, dest)
    return as_buffer(spec).pack(), spec


def target(spec: Any, source: int = 0) -> Any:
    """Return the object to which `unpack` writes: a plain array, a phantom, or the `Buffer` of a specification.

    It is kept until the message arrives, since the program may free a datatype meanwhile. An unsuitable buffer is
    refused before anything is received.
    """
    array = spec if type(spec) is ndarray else of_tensor(spec)
    if array is not None and array.flags.carray and array.dtype in PLAIN:
        return array
    if type(spec) is PhantomArray and spec.dtype in PLAIN:
        return spec
    _check_given(spec, source)
    return as_buffer(spec, writable=True)


def _check_given(spec: Any, peer: int) -> None:
    """Refuse None as a buffer, except where nothing is sent or received."""
    if spec is None and peer != PROC_NULL:
        raise SpecTypeError("None is not a buffer: pass an array, a tensor or bytes ([None, 0] for nothing)")


def unpack(into: Any, payload: Any) -> None:
    """Write a payload to a `target`. A payload longer than the target is an error that changes nothing."""
    if type(into) is ndarray:
        if type(payload) is bytes and len(payload) <= into.nbytes:
            try:
                BytesIO(payload).readinto(into)  # type: ignore[arg-type]  # half the time of a memoryview
            except TypeError:
                pass  # it is no longer writable: reported below
            else:
                return
        into = as_buffer(into)
    elif type(into) is PhantomArray:
        if type(payload) is PhantomArray and payload.nbytes == into.nbytes:
            into[...] = payload
            return
        into = as_buffer(into)
    into.unpack(np.frombuffer(payload, np.uint8) if type(payload) is bytes else payload)


SHORT_NBYTES = 1 << 16
SAMPLES = 32  # bytes of a buffer that are compared; an odd step, so that they cover all positions in a number


def check_type(world: World, label: str, buf: Any, message: Message) -> None:
    """Warn if a message of one numeric type, or an object, is received as another. Bytes may become any type."""
    sent, received = message.dtype, buf.dtype
    if sent is None and received is not None and received.itemsize > 1 and _is_pickle(message.payload):
        warn(
            world,
            f"received an object from rank {message.source} with tag {message.tag} on {label} into {received}: the "
            "numbers are bytes of its pickle; lower-case calls such as send go with recv, upper-case ones with Recv",
        )
    if message.nbytes and differ(sent, received):
        warn(
            world,
            f"received {sent} from rank {message.source} with tag {message.tag} on {label} into {received}: MPI "
            "copies the bytes and does not convert them",
        )


def differ(sent: Any, received: Any) -> bool:
    """Whether elements are received as another numeric type; bytes may become any type."""
    if sent is None or received is None or sent == received or 1 in (sent.itemsize, received.itemsize):
        return False
    return bool((sent.kind, sent.itemsize) != (received.kind, received.itemsize))


def _is_pickle(payload: Any) -> bool:
    return type(payload) is bytes and payload[:1] == b"\x80" and payload[-1:] == b"."


def watched(world: World, buf: Any, payload: Any, call: str) -> Callable[[Status], None] | None:
    """Return a function that, when a send is collected, warns if the buffer differs from its payload.

    `call` is the call's name, and its destination. Returns None if the buffer is empty, or has gaps.
    """
    if type(payload) is bytes:
        if not payload or type(buf) is not ndarray:
            return None
        before = payload if len(payload) <= SHORT_NBYTES else _samples(payload)
        return partial(_compare, world, buf, (before, call))
    if not payload.nbytes or is_phantom(payload):
        return None
    if type(buf) is type(payload) is ndarray:  # a tensor's memory
        return partial(_compare, world, buf, (_content(payload), call))
    buf = as_buffer(buf)
    if not buf.datatype.is_predefined:
        return None
    return partial(_compare, world, buf, (_samples(as_bytes(payload).data), call))


def _samples(memory: Any) -> bytes:
    """Return the bytes of some memory that are compared: all of them for short memory."""
    step = 1 if len(memory) <= SHORT_NBYTES else len(memory) // SAMPLES | 1
    return bytes(memory[::step])


def _content(array: Any) -> bytes:
    """Return the bytes of a contiguous array that are compared."""
    return array.tobytes() if array.nbytes <= SHORT_NBYTES else _samples(memoryview(array.data).cast("B"))


def _compare(world: World, buf: Any, sent: tuple[bytes, str], _status: Status) -> None:
    before, call = sent
    now = _content(buf) if type(buf) is ndarray else _samples(as_bytes(buf.array).data)
    if now != before:
        warn(
            world,
            f"changed the buffer of its {call} before its Wait or Test: real ranks may send the old values, the new "
            "ones, or a mixture",
        )


def warn(world: World, what: str) -> None:
    """Warn once for each line of the program and kind of mistake: `what` continues a sentence about the rank."""
    task = world.kernel.current
    where = place(sys._getframe())
    kind = what.partition(" ")[0]
    if (kind, where) not in world.mistakes:
        line = f" ({where})" if where else ""
        world.mistakes[kind, where] = f"rank {task.rank} at {task.clock:.6g} s{line} {what}"
