"""Windows derived from messages: mpi4py's one-sided calls, as requests that the wire's thread of the target serves.

So accesses are served while the target's program computes. Each access is served as a whole, so no access sees half of
another; a part counts its versions. A large Get is sent directly from the part, without a copy: accesses that would
change bytes in transit wait until these have left. The owner's own loads and stores are not ordered with the accesses
of other ranks: the owner must lock its own part, or publish whole snapshots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Condition
from typing import Any

import numpy as np

from spawnsim.comm.buffers import Buffer, as_buffer, as_target
from spawnsim.comm.constants import LOCK_EXCLUSIVE, PROC_NULL, of_mpi4py
from spawnsim.comm.datatypes import BY_NAME as TYPES
from spawnsim.comm.datatypes import Datatype
from spawnsim.comm.failures import ERR_RANK, CallError
from spawnsim.comm.handles import integer
from spawnsim.comm.memory import as_bytes
from spawnsim.comm.ops import BY_NAME as OPS
from spawnsim.comm.ops import SUM, Op
from spawnsim.errors import ParameterError, Timeout, UnsupportedError
from spawnsim.real.runtime.messages import bytes_of, missing_call
from spawnsim.real.runtime.requests import RealRequest
from spawnsim.real.runtime.window_sync import WindowSync, window_comm
from spawnsim.real.runtime.wire import INLINE_NBYTES, Bytes, Parcel, Receiver, Wire

REQUEST, REPLY = 5, 6
GET, PUT, ACCUMULATE, SWAP, LOCK, UNLOCK, CANCEL, TOKEN = range(8)
CHANGES = (PUT, ACCUMULATE, SWAP)
ACCESSES = (GET, *CHANGES)
OP_NAMES, TYPE_NAMES = list(OPS), list(TYPES)


@dataclass
class WindowPart:
    """One rank's memory of a window, and its locks."""

    memory: Bytes
    on_token: Callable[[int, int], None]  # is called with the sender and the token of an epoch
    version: int = 0
    writer: bool = False
    readers: int = 0
    queue: deque[tuple[Parcel, bool]] = field(default_factory=deque)
    leaving: list[slice] = field(default_factory=list)  # byte ranges in transit
    later: deque[tuple[Parcel, Bytes]] = field(default_factory=deque)  # accesses that wait for `leaving`

    # A large Get is sent from the part itself: with a copy, it ran at half the speed of a raw receive. MPI leaves the
    # result of a Get that overlaps a Put undefined, but here an access is served as a whole. Policies rely on this: a
    # snapshot has one version. So a change of bytes in transit waits, and later accesses to the same bytes wait behind
    # it, since MPI orders accumulates of one origin to one location.
    def must_wait(self, parcel: Parcel, payload: Bytes) -> bool:
        """Whether an access would change bytes in transit, or follows a waiting access to the same bytes."""
        busy = [_byte_range(*waiting) for waiting in self.later]
        if parcel.first in CHANGES:
            busy += self.leaving
        own = _byte_range(parcel, payload)
        return any(own.start < other.stop and other.start < own.stop for other in busy)

    def access(self, parcel: Parcel, payload: Bytes) -> Bytes | None:
        """Execute the access of a parcel; return the requested bytes."""
        kind, target = parcel.first, self.memory[_byte_range(parcel, payload)]
        before = target.copy() if kind in (GET, SWAP) or parcel.third else None
        if kind == PUT:
            target[:] = payload
        elif kind == ACCUMULATE:
            _combine(parcel.second, payload, target)
        elif kind == SWAP:  # compare value, then new value
            if not (target == payload[: target.size]).all():
                return before
            target[:] = payload[target.size :]
        self.version += kind != GET
        return before

    def unlock(self, *, exclusive: bool) -> None:
        if exclusive:
            self.writer, self.version = False, self.version + 1
        else:
            self.readers -= 1

    def grant(self) -> list[Parcel]:
        """Lock the part for waiting requests, first come, first served (so no writer starves); return these."""
        granted = []
        while self.queue and not self.writer and not (self.queue[0][1] and self.readers):
            parcel, self.writer = self.queue.popleft()
            self.readers += not self.writer
            granted.append(parcel)
        return granted


def _byte_range(parcel: Parcel, payload: Bytes) -> slice:
    nbytes = parcel.second if parcel.first == GET else payload.size // (1 + (parcel.first == SWAP))
    return slice(parcel.tag, parcel.tag + nbytes)


def accumulate_code(op: Op, datatype: Datatype) -> int:
    """Return the number that encodes an op on a predefined type in a parcel."""
    named = next((name for name, known in TYPES.items() if known is datatype), None)
    if named is None or op.name not in OPS:
        raise UnsupportedError(
            "windows over messages combine predefined types by predefined ops only: use these, or --backend mpi"
        )
    return OP_NAMES.index(op.name) * len(TYPE_NAMES) + TYPE_NAMES.index(named)


def _combine(code: int, payload: Bytes, target: Bytes) -> None:
    """Combine bytes of elements into a part: `target = target op payload`, as MPI's Accumulate."""
    number, kind = divmod(code, len(TYPE_NAMES))
    op, dtype = OPS[OP_NAMES[number]], np.dtype(TYPES[TYPE_NAMES[kind]].dtype)
    if op.name == "REPLACE":
        target[:] = payload
    elif op.name != "NO_OP":
        target[:] = as_bytes(op.reduce(target.copy().view(dtype), payload.copy().view(dtype)))


@dataclass
class PendingAccess:
    """An access that waits for its answer."""

    into: Bytes | None = None
    complete: bool = False
    version: int = 0
    then: Callable[[], object] | None = None


class WindowServer(Receiver):
    """Serves a rank's parts of all windows, each access as a whole; `replies` holds the rank's own accesses."""

    def __init__(self, wire: Wire, condition: Condition) -> None:
        self._wire, self._condition = wire, condition
        self.parts: dict[int, WindowPart] = {}
        self.replies = Replies(condition)
        wire.receivers |= {REQUEST: self, REPLY: self.replies}

    def done(self, parcel: Parcel, payload: Bytes) -> None:
        """Serve one request."""
        part, exclusive = self.parts[parcel.context], parcel.second == LOCK_EXCLUSIVE
        with self._condition:  # re-entrant: accesses that have waited are served before any other
            if parcel.first in ACCESSES:
                if part.must_wait(parcel, payload):
                    part.later.append((parcel, payload))
                else:
                    self._serve(part, parcel, payload)
                return
            if parcel.first == TOKEN:
                part.on_token(parcel.source, parcel.second)
                self._condition.notify_all()
                return
            if parcel.first == LOCK:
                part.queue.append((parcel, exclusive))
            elif parcel.first == UNLOCK:
                part.unlock(exclusive=exclusive)
            else:
                part.queue = deque(entry for entry in part.queue if entry[0].ident != parcel.second)
            answered = part.grant() if parcel.first == LOCK else [parcel, *part.grant()]
        for each in answered:
            self._answer(each, part)

    def _serve(self, part: WindowPart, parcel: Parcel, payload: Bytes) -> None:
        if parcel.first != GET or parcel.source == self._wire.rank or parcel.second <= INLINE_NBYTES:
            self._answer(parcel, part, part.access(parcel, payload))
            return
        what = _byte_range(parcel, payload)
        part.leaving.append(what)
        self._answer(parcel, part, part.memory[what], partial(self._left, part, what))

    def _left(self, part: WindowPart, what: slice) -> None:
        with self._condition:
            part.leaving.remove(what)
            waiting, part.later = part.later, deque()
            for parcel, payload in waiting:
                self.done(parcel, payload)

    def _answer(
        self,
        parcel: Parcel,
        part: WindowPart,
        answer: Bytes | None = None,
        then: Callable[[], object] | None = None,
    ) -> None:
        self._wire.send(parcel.source, Parcel(REPLY, ident=parcel.ident, first=part.version), answer, then)


class Replies(Receiver):
    """Receiver of the answers, by the idents of the accesses."""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self.wanted: dict[int, PendingAccess] = {}

    def begin(self, parcel: Parcel) -> Bytes | None:
        wanted = self.wanted.get(parcel.ident)
        return wanted.into if wanted is not None and parcel.nbytes else None

    def done(self, parcel: Parcel, payload: Bytes) -> None:
        with self._condition:
            wanted = self.wanted.pop(parcel.ident, None)
            if wanted is not None:
                wanted.version, wanted.complete = parcel.first, True
                if wanted.then is not None:
                    wanted.then()
            self._condition.notify_all()


class AccessRequest(RealRequest):
    """The request of `Rget` and `Rput`."""

    __slots__ = ("_wanted",)
    _wanted: PendingAccess

    @classmethod
    def of(cls, runtime: Any, what: tuple[str, int, Any], wanted: PendingAccess) -> AccessRequest:
        self = cls()
        self._wanted = wanted
        self.begin(runtime, what)
        return self

    def _try(self) -> bool:
        return self._wanted.complete


class DerivedWin(WindowSync):
    """A window with mpi4py's methods, created by `comm.Win.Allocate` and `comm.Win.Create`; collective."""

    def __init__(self, comm: Any, number: int, memory: Bytes, disp_unit: int) -> None:
        self._comm, self._runtime, self.memory = comm, comm.runtime, memory
        self._server = self._runtime.window_server
        self.label = f"window {number} of {comm.label}"
        self._ident = comm._context ^ (number << 1) ^ (1 << 60)
        self._begin_sync()
        self._server.parts[self._ident] = WindowPart(memory, self._count_token)
        facts = comm.allgather((memory.nbytes, disp_unit))
        self._sizes, self._units = [size for size, _ in facts], [unit for _, unit in facts]
        self._open: dict[int, list[PendingAccess]] = {rank: [] for rank in range(comm.size)}
        self._versions: dict[int, int] = {}
        comm.Barrier()

    def tomemory(self) -> Any:
        return self.memory

    def version(self, rank: int) -> int:
        return self._versions.get(rank, 0)

    # ------------------------------------------------------------------------------------------------ accesses
    def _ask(
        self, rank: int, request: Parcel, wanted: PendingAccess, payload: Bytes | None = None
    ) -> PendingAccess:
        if rank == PROC_NULL:
            wanted.complete = True
            return wanted
        request.kind, request.context, request.ident = REQUEST, self._ident, next(self._runtime.wire.idents)
        self._server.replies.wanted[request.ident] = wanted
        self._open[rank].append(wanted)
        if request.first in ACCESSES:
            self._runtime.counters.access(wanted.into if payload is None else payload)
        self._runtime.wire.send(self._comm.members[rank], request, payload)
        return wanted

    def _range(self, rank: int, target: Any, origin: Buffer) -> tuple[int, int]:
        """Return first byte and size of an access; an access outside of the part is an error on the origin."""
        displacement, count, datatype = as_target(target, origin)
        if rank == PROC_NULL:
            return 0, count * datatype.size
        rank = integer(rank)
        if not 0 <= rank < self._comm.size:
            raise CallError(
                ERR_RANK, f"rank {rank}: this window has ranks 0 to {self._comm.size - 1}{of_mpi4py(rank)}"
            )
        if not datatype.dense:
            raise UnsupportedError(
                "windows over messages take dense datatypes: access each block, or use --backend mpi"
            )
        self._require_epoch(rank)
        start, nbytes = displacement * self._units[rank], count * datatype.size
        self._require_inside(rank, start, nbytes, self._sizes[rank])
        return start, nbytes

    def _get(self, origin: Any, rank: int, target: Any) -> PendingAccess:
        into = as_buffer(origin, writable=True)
        start, nbytes = self._range(rank, target, into)
        straight = into.datatype.is_predefined and into.datatype.dense and into.nbytes == nbytes
        memory = as_bytes(into.array) if straight else np.empty(nbytes, np.uint8)
        wanted = PendingAccess(memory, then=None if straight else lambda: into.unpack(memory))
        return self._ask(rank, Parcel(0, tag=start, first=GET, second=nbytes), wanted)

    def Get(self, origin: Any, target_rank: int, target: Any = None) -> None:
        self._get(origin, target_rank, target)

    def Rget(self, origin: Any, target_rank: int, target: Any = None) -> RealRequest:
        wanted = self._get(origin, target_rank, target)
        return AccessRequest.of(self._runtime, ("Win.Rget", target_rank, self._comm), wanted)

    def _put(self, origin: Any, rank: int, target: Any) -> PendingAccess:
        given = as_buffer(origin)
        start, _ = self._range(rank, target, given)
        return self._ask(rank, Parcel(0, tag=start, first=PUT), PendingAccess(), bytes_of(given))

    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        self._put(origin, target_rank, target)

    def Rput(self, origin: Any, target_rank: int, target: Any = None) -> RealRequest:
        wanted = self._put(origin, target_rank, target)
        return AccessRequest.of(self._runtime, ("Win.Rput", target_rank, self._comm), wanted)

    def Accumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = SUM) -> None:
        self._accumulate((origin, None), target_rank, target, op)

    def Get_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = SUM
    ) -> None:
        self._accumulate((origin, result), target_rank, target, op)

    def _accumulate(self, buffers: tuple[Any, Any], rank: int, target: Any, op: Op) -> None:
        given = as_buffer(buffers[0])
        op.check(given.datatype, one_sided=True)
        start, _ = self._range(rank, target, given)
        code = accumulate_code(op, given.datatype)
        into = None if buffers[1] is None else as_bytes(as_buffer(buffers[1], writable=True).array)
        parcel = Parcel(0, tag=start, first=ACCUMULATE, second=code, third=int(into is not None))
        self._ask(rank, parcel, PendingAccess(into), bytes_of(given))

    def Fetch_and_op(
        self, origin: Any, result: Any, target_rank: int, target_disp: int = 0, op: Op = SUM
    ) -> None:
        self._accumulate((_one(origin), _one(result)), target_rank, target_disp, op)

    def Compare_and_swap(
        self, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int = 0
    ) -> None:
        given = as_buffer(_one(origin))
        if as_buffer(_one(compare)).nbytes != given.nbytes or as_buffer(compare).dtype != given.dtype:
            raise ParameterError("Compare_and_swap: give origin, compare and result of one type")
        start, _ = self._range(target_rank, target_disp, given)
        payload = np.concatenate([as_bytes(as_buffer(_one(compare)).pack()), as_bytes(given.pack())])
        into = as_bytes(as_buffer(_one(result), writable=True).array)
        self._ask(target_rank, Parcel(0, tag=start, first=SWAP), PendingAccess(into), payload)

    # ------------------------------------------------------------------------------------------ tokens of epochs
    def _send_token(self, rank: int, token: int) -> None:
        parcel = Parcel(REQUEST, self._ident, first=TOKEN, second=token)
        self._runtime.wire.send(self._comm.members[rank], parcel)

    def _count_token(self, sender: int, token: int) -> None:
        """Count a token; called under the condition, as it is taken back."""
        self._tokens_of[self._comm.members.index(sender), token] += 1

    # ---------------------------------------------------------------------------------------------- completion
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise missing_call(self._comm, f"Win.{name}", "Lock, Put, Get, Flush or Fence")

    def Flush(self, rank: int) -> None:
        waiting, self._open[rank] = self._open[rank], []
        limit_s = self._runtime.clock.limit_s()
        call = (f"Win.Flush of rank {rank}", -1, self._comm)
        if not self._runtime.wait(lambda: all(wanted.complete for wanted in waiting), limit_s, call):
            text = f"rank {self._comm.rank}: Win.Flush of rank {rank} missed its deadline of {limit_s:g} s"
            raise Timeout([rank], "Win.Flush", -1, text)
        if waiting:
            self._versions[rank] = waiting[-1].version

    def Flush_all(self) -> None:
        for rank in range(self._comm.size):
            self.Flush(rank)

    Flush_local, Flush_local_all = Flush, Flush_all

    def _acquire(self, rank: int, lock_type: int, limit_s: float, call: tuple[str, int, Any]) -> bool:
        request = Parcel(0, first=LOCK, second=lock_type)
        wanted = self._ask(rank, request, PendingAccess())
        self._open[rank].remove(wanted)
        if not self._runtime.wait(lambda: wanted.complete, limit_s, call):
            self._ask(rank, Parcel(0, first=CANCEL, second=request.ident), PendingAccess())
            self.Flush(rank)
        return wanted.complete

    def _release(self, rank: int, lock_type: int) -> None:
        self._ask(rank, Parcel(0, first=UNLOCK, second=lock_type), PendingAccess())
        self.Flush(rank)

    def Fence(self, assertion: int = 0) -> None:
        self.Flush_all()
        self._comm.Barrier()
        self._fence(assertion)

    def Sync(self) -> None:
        """Do nothing: there is one copy of the memory, so all stores are visible."""

    def Free(self) -> None:
        self.Flush_all()
        self._comm.Barrier()
        self._server.parts.pop(self._ident, None)


def _one(spec: Any) -> Any:
    """Refuse more than one element: the atomic calls take one."""
    count = as_buffer(spec).count
    if count != 1:
        raise ParameterError(f"{count} elements: the atomic calls take one; use Get_accumulate for more")
    return spec


class Windows:
    """`comm.Win`: creates windows on a communicator, with mpi4py's names. All calls are collective."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._made = comm, 0

    def _make(self, memory: Bytes, disp_unit: int, given: Any) -> DerivedWin:
        comm = window_comm(self._comm, given)
        comm.Win._made += 1
        return DerivedWin(comm, comm.Win._made, memory, disp_unit)

    def Allocate(self, size: int, disp_unit: int = 1, info: Any = None, comm: Any = None) -> DerivedWin:
        return self._make(np.zeros(size, np.uint8), disp_unit, comm)

    def Create(self, memory: Any, disp_unit: int = 1, info: Any = None, comm: Any = None) -> DerivedWin:
        given = (
            np.zeros(0, np.uint8) if memory is None else np.asarray(as_buffer(memory, writable=True).array)
        )
        return self._make(as_bytes(given), disp_unit, comm)

    def __getattr__(self, name: str) -> Any:
        if not name[:1].isupper():
            raise AttributeError(name)
        raise missing_call(self._comm, f"Win.{name}", "Win.Allocate or Win.Create")

    def Allocate_shared(
        self, size: int, disp_unit: int = 1, info: Any = None, comm: Any = None
    ) -> DerivedWin:
        raise missing_call(self._comm, "Win.Allocate_shared", "Win.Allocate with Get and Put")
