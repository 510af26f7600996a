"""Windows over the wire, seen from the rank whose memory it is: every access is a request that its wire thread serves.

So accesses are served while the program computes. One thread serves all accesses to a part, each as a whole, so none
sees half of another; a part counts its versions. Knows parcels and memory; knows no communicator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition

import numpy as np

from spawnsim.comm.constants import LOCK_EXCLUSIVE
from spawnsim.comm.datatypes import Datatype
from spawnsim.comm.memory import as_bytes
from spawnsim.comm.ops import BY_NAME as OPS
from spawnsim.comm.ops import Op
from spawnsim.comm.predefined import BY_NAME as TYPES
from spawnsim.errors import UnsupportedError
from spawnsim.real.dist.wire import Bytes, Parcel, Wire

REQUEST, REPLY = 5, 6
GET, PUT, ACCUMULATE, SWAP, LOCK, UNLOCK, CANCEL = range(7)
OP_NAMES, TYPE_NAMES = list(OPS), list(TYPES)


@dataclass
class Part:
    """One rank's memory of a window, and who has locked it."""

    memory: Bytes
    version: int = 0
    writer: bool = False
    readers: int = 0
    queue: deque[tuple[Parcel, bool]] = field(default_factory=deque)


@dataclass
class Wanted:
    """An access that waits for its answer."""

    into: Bytes | None = None
    complete: bool = False
    version: int = 0
    then: Callable[[], object] | None = None


class Server:
    """Serves this rank's parts of all windows, and takes the answers to its own accesses."""

    def __init__(self, wire: Wire, condition: Condition) -> None:
        self._wire, self._condition = wire, condition
        self.parts: dict[int, Part] = {}
        self.wanted: dict[int, Wanted] = {}
        self._wire.receivers[REQUEST] = self
        self._wire.receivers[REPLY] = Replies(self, condition)

    def begin(self, parcel: Parcel) -> Bytes | None:
        """Use new memory: a Put shows as a whole."""
        return None

    def done(self, parcel: Parcel, payload: Bytes) -> None:
        """Serve one request."""
        part = self.parts[parcel.context]
        answer: Bytes | None = None
        with self._condition:
            if parcel.first == LOCK:
                part.queue.append((parcel, parcel.second == LOCK_EXCLUSIVE))
            elif parcel.first == UNLOCK:
                self._unlock(part, parcel.second == LOCK_EXCLUSIVE)
            elif parcel.first == CANCEL:
                part.queue = deque(entry for entry in part.queue if entry[0].ident != parcel.second)
            else:
                answer = self._access(part, parcel, payload)
        if parcel.first != LOCK:
            self._answer(parcel, part, answer)
        self._grant(part)

    def _access(self, part: Part, parcel: Parcel, payload: Bytes) -> Bytes | None:
        kind, start = parcel.first, parcel.tag
        if kind == GET:
            return part.memory[start : start + parcel.second].copy()
        if kind == SWAP:  # compare value, then new value
            half = payload.size // 2
            place = part.memory[start : start + half]
            before = place.copy()
            if (place == payload[:half]).all():
                place[:] = payload[half:]
                part.version += 1
            return before
        room = part.memory[start : start + payload.size]
        old = room.copy() if parcel.third else None
        part.version += 1
        if kind == PUT:
            room[:] = payload
        else:
            _combine(parcel.second, payload, room)
        return old

    def _answer(self, parcel: Parcel, part: Part, answer: Bytes | None = None) -> None:
        self._wire.send(parcel.source, Parcel(REPLY, ident=parcel.ident, first=part.version), answer)

    def _unlock(self, part: Part, exclusive: bool) -> None:
        if exclusive:
            part.writer, part.version = False, part.version + 1
        else:
            part.readers -= 1

    def _grant(self, part: Part) -> None:
        """Give the part to those who wait for it, in their order."""
        granted: list[Parcel] = []
        with self._condition:
            while part.queue and not part.writer:
                parcel, exclusive = part.queue[0]
                if exclusive and part.readers:
                    break
                part.queue.popleft()
                part.writer, part.readers = exclusive, part.readers + (not exclusive)
                granted.append(parcel)
        for parcel in granted:
            self._answer(parcel, part)


def accumulation(op: Op, datatype: Datatype) -> int:
    """Return the number under which an op on a predefined type travels."""
    named = next((name for name, known in TYPES.items() if known is datatype), None)
    if named is None or op.name not in OPS:
        raise UnsupportedError("windows over torch combine predefined types by predefined ops: or use --backend mpi")
    return OP_NAMES.index(op.name) * len(TYPE_NAMES) + TYPE_NAMES.index(named)


def _combine(code: int, payload: Bytes, room: Bytes) -> None:
    """Combine bytes of elements into a part: `room = room op payload`, as MPI's Accumulate."""
    number, kind = divmod(code, len(TYPE_NAMES))
    op, dtype = OPS[OP_NAMES[number]], np.dtype(TYPES[TYPE_NAMES[kind]].dtype)
    if op.name == "REPLACE":
        room[:] = payload
    elif op.name != "NO_OP":
        room[:] = as_bytes(op.reduce(room.copy().view(dtype), payload.copy().view(dtype)))


class Replies:
    """Receiver of the answers."""

    def __init__(self, server: Server, condition: Condition) -> None:
        self._server, self._condition = server, condition

    def begin(self, parcel: Parcel) -> Bytes | None:
        """A Get goes straight to the caller's memory."""
        wanted = self._server.wanted.get(parcel.ident)
        return wanted.into if wanted is not None and wanted.into is not None and parcel.nbytes else None

    def done(self, parcel: Parcel, payload: Bytes) -> None:
        """Complete the access."""
        with self._condition:
            wanted = self._server.wanted.pop(parcel.ident, None)
            if wanted is not None:
                wanted.version, wanted.complete = parcel.first, True
                if wanted.then is not None:
                    wanted.then()
            self._condition.notify_all()
