"""What MPI leaves undefined and a program does nevertheless, where it can be seen: two sorts of mistakes about buffers.

Nothing is refused, for real ranks refuse neither: each line of a program gets one warning. This room knows buffers and
their types, and the program's lines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.memory import as_bytes
from spawnsim.comm.status import Status
from spawnsim.virtual.diagnosis import place
from spawnsim.virtual.engine.completion import Message
from spawnsim.virtual.engine.world import World

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
