"""Windows over the wire, seen from the rank whose memory it is: every access is a request that its wire thread serves.

So accesses are served while the program computes. Each is served as a whole, so none sees half of another; a part
counts its versions. A large Get leaves straight from the part, without a copy: accesses that would change what is
leaving wait until it has left. Knows parcels and memory; knows no communicator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Condition

import numpy as np

from spawnsim.comm.constants import LOCK_EXCLUSIVE
from spawnsim.comm.datatypes import Datatype
from spawnsim.comm.memory import as_bytes
from spawnsim.comm.ops import BY_NAME as OPS
from spawnsim.comm.ops import Op
from spawnsim.comm.predefined import BY_NAME as TYPES
from spawnsim.errors import UnsupportedError
from spawnsim.real.torch.wire import INLINE_NBYTES, Bytes, Parcel, Wire

REQUEST, REPLY = 5, 6
GET, PUT, ACCUMULATE, SWAP, LOCK, UNLOCK, CANCEL, TOKEN = range(8)
CHANGES = (PUT, ACCUMULATE, SWAP)
OP_NAMES, TYPE_NAMES = list(OPS), list(TYPES)


@dataclass
class Part:
    """One rank's memory of a window, and who has locked it."""

    memory: Bytes
    version: int = 0
    writer: bool = False
    readers: int = 0
    queue: deque[tuple[Parcel, bool]] = field(default_factory=deque)
    told: Callable[[int, int], None] | None = None  # takes the sender and the token of an epoch
    leaving: list[slice] = field(default_factory=list)  # what is being sent right now
    later: deque[tuple[Parcel, Bytes]] = field(default_factory=deque)  # accesses that wait for it

    def must_wait(self, parcel: Parcel, payload: Bytes) -> bool:
        """Whether an access would change what is leaving, or comes behind one to the same bytes that waits."""
        busy = [span(*waiting) for waiting in self.later]
        if parcel.first in CHANGES:
            busy += self.leaving
        own = span(parcel, payload)
        return any(own.start < other.stop and other.start < own.stop for other in busy)


def span(parcel: Parcel, payload: Bytes) -> slice:
    """Return the bytes of a part that an access touches."""
    nbytes = parcel.second if parcel.first == GET else payload.size // (1 + (parcel.first == SWAP))
    return slice(parcel.tag, parcel.tag + nbytes)


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
        if parcel.first == TOKEN and part.told is not None:
            part.told(parcel.source, parcel.second)
            with self._condition:
                self._condition.notify_all()
            return
        if parcel.first in (LOCK, UNLOCK, CANCEL):
            self._lock(part, parcel)
        else:
            with self._condition:  # which is re-entrant: who has waited is served before anybody else
                if part.must_wait(parcel, payload):
                    part.later.append((parcel, payload))
                else:
                    self._serve(part, parcel, payload)

    def _serve(self, part: Part, parcel: Parcel, payload: Bytes) -> None:
        what = span(parcel, payload)
        if parcel.first != GET or parcel.source == self._wire.rank or parcel.second <= INLINE_NBYTES:
            self._answer(parcel, part, self._access(part, parcel, payload))
            return
        part.leaving.append(what)
        self._answer(parcel, part, part.memory[what], partial(self._left, part, what))

    def _left(self, part: Part, what: slice) -> None:
        """Serve those who have waited for a Get to leave."""
        with self._condition:
            part.leaving.remove(what)
            waiting, part.later = part.later, deque()
            for parcel, payload in waiting:
                self.done(parcel, payload)

    def _lock(self, part: Part, parcel: Parcel) -> None:
        with self._condition:
            if parcel.first == LOCK:
                part.queue.append((parcel, parcel.second == LOCK_EXCLUSIVE))
            elif parcel.first == UNLOCK:
                self._unlock(part, parcel.second == LOCK_EXCLUSIVE)
            else:
                part.queue = deque(entry for entry in part.queue if entry[0].ident != parcel.second)
        if parcel.first != LOCK:
            self._answer(parcel, part)
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

    def _answer(
        self,
        parcel: Parcel,
        part: Part,
        answer: Bytes | None = None,
        then: Callable[[], object] | None = None,
    ) -> None:
        self._wire.send(parcel.source, Parcel(REPLY, ident=parcel.ident, first=part.version), answer, then)

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
        raise UnsupportedError(
            "windows over torch combine predefined types by predefined ops: or use --backend mpi"
        )
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
