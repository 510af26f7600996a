"""Buffered sends and the buffer that a program attaches for them.

The simulation needs no such buffer; it is kept because programs ask for it, and a send without one is an error in MPI.
"""

from __future__ import annotations

import math
from typing import Any

from spawnsim.comm.constants import BSEND_OVERHEAD, BUFFER_AUTOMATIC
from spawnsim.comm.failures import ERR_BUFFER, CallError, SpecBufferError
from spawnsim.comm.memory import flat
from spawnsim.virtual.comm.payload import dumps, pack
from spawnsim.virtual.comm.transport import Transport
from spawnsim.virtual.engine.wire import LOCAL
from spawnsim.virtual.requests import Request


class BufferedSends(Transport):
    """Bsend and its kin. A communicator's own buffer comes first, then the one attached to the program."""

    __slots__ = ()

    def Attach_buffer(self, buf: Any) -> None:
        """Attach a buffer to this communicator."""
        attach(self._rank.attachments, self._context, buf)

    def Detach_buffer(self) -> Any:
        """Take the buffer back."""
        return detach(self._rank.attachments, self._context)

    def Flush_buffer(self) -> None:
        """Return when all buffered messages have left: they have."""

    def Iflush_buffer(self) -> Request:
        """Start Flush_buffer."""
        return Request.over(self._world)

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer from the attached one: returns at once."""
        self._deliver(self._room_for(pack(buf, dest)), dest, tag, LOCAL, operation="Bsend")

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send a buffer from the attached one."""
        return self._isend(self._room_for(pack(buf, dest)), dest, tag, LOCAL, operation="Ibsend")

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object from the attached buffer: returns at once."""
        self._deliver(self._room_for(dumps(obj)), dest, tag, LOCAL, operation="bsend")

    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an object from the attached buffer."""
        return self._isend(self._room_for(dumps(obj)), dest, tag, LOCAL, operation="ibsend")

    def _room_for(self, payload: Any) -> Any:
        held: dict[Any, Any] = self._rank.attachments
        attached = held.get(("buffer", self._context), held.get(("buffer", None)))
        nbytes = len(payload) if type(payload) is bytes else payload.nbytes
        if attached is None:
            raise CallError(ERR_BUFFER, "a buffered send without a buffer: call MPI.Attach_buffer first")
        have = math.inf if attached is BUFFER_AUTOMATIC else flat(attached).nbytes
        if nbytes + BSEND_OVERHEAD > have:
            raise CallError(
                ERR_BUFFER, f"the attached buffer of {have} bytes is too short: {nbytes} + {BSEND_OVERHEAD}"
            )
        return payload


def attach(held: dict[Any, Any], owner: Any, buf: Any) -> None:
    """Attach a buffer for an owner: a context, or None for the program."""
    if ("buffer", owner) in held:
        raise CallError(ERR_BUFFER, "a buffer is attached already: detach it first")
    if buf is not None and buf is not BUFFER_AUTOMATIC and not flat(buf).flags.writeable:
        raise SpecBufferError("the buffer to be attached is read-only: pass memory that can be written")
    held["buffer", owner] = BUFFER_AUTOMATIC if buf is None else buf


def detach(held: dict[Any, Any], owner: Any) -> Any:
    """Take the buffer of an owner back; None if there is none."""
    return held.pop(("buffer", owner), None)
