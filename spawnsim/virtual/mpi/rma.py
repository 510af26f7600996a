"""The one-sided calls: Put, Get and the atomic calls, and the epochs in which they are allowed.

Locks, flushes, fences and post-start-complete-wait determine when an access is allowed and when it is complete;
`rma_service` decides when a target serves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spawnsim.comm import constants
from spawnsim.comm.buffers import Buffer, as_buffer, as_target, locate
from spawnsim.comm.constants import LOCK_EXCLUSIVE, LOCK_SHARED, PROC_NULL, of_mpi4py
from spawnsim.comm.datatypes import Datatype
from spawnsim.comm.failures import (
    ERR_COUNT,
    ERR_RANK,
    ERR_RMA_RANGE,
    ERR_RMA_SYNC,
    ERR_TYPE,
    ERR_WIN,
    ArgumentError,
    CallError,
)
from spawnsim.comm.group import Group
from spawnsim.comm.handles import AINT, Attributes, Info, integer
from spawnsim.comm.memory import address, as_bytes
from spawnsim.comm.ops import NO_OP, REPLACE, SUM, Op
from spawnsim.errors import ParameterError, RankFailed, Revoked, WorldError
from spawnsim.phantoms import PhantomError
from spawnsim.virtual.engine.completion import Completion
from spawnsim.virtual.engine.waiting import Waiting, await_one
from spawnsim.virtual.engine.wire import STANDARD
from spawnsim.virtual.mpi.collectives import agree
from spawnsim.virtual.mpi.instance import Call
from spawnsim.virtual.mpi.payload import warn
from spawnsim.virtual.mpi.requests import Request, request_for, request_over
from spawnsim.virtual.mpi.rma_service import NOBODY, Access, Serve, WindowState

POST, COMPLETE = 1, 2  # tags of the active-target epochs
# A rank spins on its own part after this many accesses to it, each within this time of the previous one.
SPINNING, APART_S = 1000, 1e-6
# A target, an access to it, and the function that delivers the answer.
PendingAccess = tuple[int, Access, Callable[[Any], Any]]
# The memory that an access uses: the part of the target, the operation there, the origin's buffers that it reads, and
# the one that it writes.
Use = tuple[Buffer, str, tuple[Buffer, ...], Buffer | None]


@dataclass(eq=False, slots=True)
class Epoch:
    """One rank's epochs on a window: the ranks that it may access, and its pending accesses. All handles share it."""

    locked: set[int] = NOBODY
    started: frozenset[int] = frozenset()
    locked_all: bool = False
    fenced: bool = False
    under_way: list[PendingAccess] = field(default_factory=list)
    own_s: float = -1.0  # when this rank last completed accesses to its own part
    own: int = 0  # how many times in a row
    tokens: Sequence[Request] = ()  # receives of the ranks that Post has admitted
    accessing: bool = False  # between Start and Complete
    exposed: bool = False  # between Post and Wait


@dataclass(slots=True)
class WaitingForPart(Waiting):
    """An access to a rank's part of a window, or the lock of the part, which other ranks may hold meanwhile."""

    target: Any = None
    origin: int = -1  # a world rank, like the holders of the lock

    def describe(self) -> str:
        """Return the call with its target, and the ranks whose lock delays it."""
        holders = self.target.holding_up(self.origin)
        more = f" and {len(holders) - 8} more" if len(holders) > 8 else ""
        names = f"rank{'s' * (len(holders) > 1)} {', '.join(map(str, holders[:8]))}{more}"
        return Waiting.describe(self) + (f", locked by {names}" if holders else "")

    def peers(self) -> Sequence[int]:
        """Return the world ranks that could end the wait: the holders of the lock, or else the owner of the part."""
        return self.target.holding_up(self.origin) or Waiting.peers(self)

    def missing(self, by_s: float = math.inf) -> Sequence[int]:
        """Return the ranks still awaited: the holders of the lock, or else the owner of the part."""
        return [self.members.index(rank) for rank in self.peers()]

    def doomed(self, by_s: float) -> Sequence[int]:
        """Return the ranks, known to be dead by a time, that hold the lock or own the part."""
        dead = self.context.dead(by_s)
        return Waiting.doomed(self, by_s) or [rank for rank in self.missing() if self.members[rank] in dead]


class Epochs(Attributes):
    """The calls of one rank's window handle that begin and end epochs."""

    __slots__ = ()

    _comm: Any
    _windows: WindowState
    _name: str
    _place: int
    _epoch: Epoch
    _errhandler: Any
    _info: Info | None

    def _exist(self) -> None:
        if self._identity is None:
            raise CallError(ERR_WIN, "the window is null, or was freed before")

    def _need(self) -> None:
        self._exist()
        if self._comm._context.revoked_s is not None:
            self._comm._need()

    @property
    def _label(self) -> str:
        return self._name or f"window on {self._comm._label}"

    def _wait(self, completion: Completion, operation: str, rank: int) -> None:
        await_one(self._windows.world, completion, self._waiting(operation, rank))

    def _waiting(self, operation: str, rank: int) -> Waiting:
        comm = self._comm
        return WaitingForPart(
            operation, self._label, comm._members, rank, keyword="target", context=comm._context,
            target=self._windows.targets[rank], origin=comm._rank.id,
        )  # fmt: skip

    def _check(self, rank: int, operation: str) -> None:
        """Refuse an access outside any epoch."""
        if self._identity is None or self._comm._context.revoked_s is not None:
            self._need()
        if not 0 <= rank < len(self._windows.targets):
            raise CallError(ERR_RANK, f"{operation}: rank {rank} is not in {self._label}{of_mpi4py(rank)}")
        # MPI: accesses are allowed only inside an access epoch, which a fence, a lock or a Start opens. Real libraries
        # often accept other accesses, and the program then fails on the next machine.
        epoch = self._epoch
        if not (epoch.locked_all or epoch.fenced or rank in epoch.locked or rank in epoch.started):
            raise CallError(
                ERR_RMA_SYNC,
                f"{operation} to rank {rank} of {self._label} outside an epoch: Lock, Fence or Start first",
            )

    def _refuse_open_epoch(self) -> None:
        """Refuse to free a window with an epoch that has not ended; after a fence, warn of accesses without another."""
        epoch = self._epoch
        for is_open, name in (
            (epoch.locked, "Unlock"), (epoch.locked_all, "Unlock_all"), (epoch.accessing, "Complete"),
            (epoch.exposed, "Wait"),
        ):  # fmt: skip
            if is_open:
                raise CallError(ERR_RMA_SYNC, f"Free of {self._label} before {name}, which ends its epoch")
        if epoch.fenced and epoch.under_way:
            warn(self._windows.world, f"freed {self._label} with accesses that no Fence has completed")

    # -- passive target --------------------------------------------------------------------------------------

    def Lock(self, rank: int, lock_type: int = LOCK_EXCLUSIVE, assertion: int = 0) -> None:
        """Begin to access one rank's part. A contended lock takes until it is granted."""
        self._need()
        rank = integer(rank)
        if rank == PROC_NULL:
            return
        # MPI: a rank may hold one lock per target and window. A second lock would wait for the first one forever.
        if rank in self._epoch.locked:
            raise CallError(ERR_RMA_SYNC, f"Lock: {self._label} holds a lock on rank {rank} already")
        if not 0 <= rank < len(self._windows.targets):
            raise CallError(ERR_RANK, f"Lock: rank {rank} is not in {self._label}{of_mpi4py(rank)}")
        if lock_type not in (LOCK_EXCLUSIVE, LOCK_SHARED):
            raise ParameterError(
                f"lock_type={lock_type}: give LOCK_SHARED or LOCK_EXCLUSIVE of spawnsim.comm"
            )
        windows, origin = self._windows, self._comm._rank
        # Locks are ordered by time, so the request may be sent only after all other ranks have reached this time.
        windows.world.kernel.observe()
        access = Access(windows.world, "Lock", (0, 0), lambda data: None, lock=lock_type)
        try:
            self._wait(windows.request(origin, rank, access), "Lock", rank)
        except WorldError:  # a lock granted to a rank that no longer waits would be lost to all other ranks
            windows.release(origin, rank)
            raise
        self._epoch.locked = self._epoch.locked or set()
        self._epoch.locked.add(rank)
        if rank == self._comm._me:
            self._charge_spinning()

    def Unlock(self, rank: int) -> None:
        """End the access: all calls to that rank are then complete at the target."""
        self._need()
        rank = integer(rank)
        if rank == PROC_NULL:
            return
        if rank not in self._epoch.locked:
            raise CallError(ERR_RMA_SYNC, f"Unlock: {self._label} holds no lock on rank {rank}")
        # MPI: all operations of the epoch are complete at the target when Unlock returns, so they are flushed before
        # the lock is released.
        self._flush(rank, "Unlock")
        self._epoch.locked.discard(rank)
        # The release is not awaited: nothing on this rank depends on it, and Unlock costs as much as a send.
        self._windows.release(self._comm._rank, rank)
        self._windows.world.kernel.observe()

    def Lock_all(self, assertion: int = 0) -> None:
        """Begin to access all parts with shared locks. An access waits while its part is locked exclusively."""
        self._need()
        if self._epoch.locked_all:
            raise CallError(ERR_RMA_SYNC, f"Lock_all: {self._label} is locked already")
        # No message: MPI allows lazy locks. Asking each of 1,000 targets would cost 1,000 round trips.
        self._epoch.locked_all = True

    def Unlock_all(self) -> None:
        self._need()
        if not self._epoch.locked_all:
            raise CallError(ERR_RMA_SYNC, f"Unlock_all: {self._label} is not locked")
        self._flush_all("Unlock_all")
        self._epoch.locked_all = False

    def Flush(self, rank: int) -> None:
        rank = integer(rank)
        self._check(rank, "Flush")
        self._flush(rank, "Flush")

    def Flush_all(self) -> None:
        self._need()
        epoch = self._epoch
        if not (epoch.locked_all or epoch.locked or epoch.fenced or epoch.accessing):
            raise CallError(ERR_RMA_SYNC, f"Flush_all of {self._label} outside an epoch: Lock_all first")
        self._flush_all("Flush_all")

    def Flush_local(self, rank: int) -> None:
        # Flush_local may do more than required: a Get is complete at the origin only when its answer has arrived.
        self.Flush(rank)

    def Flush_local_all(self) -> None:
        self.Flush_all()

    def Sync(self) -> None:
        """Synchronize own and other ranks' stores, which needs no action here. It costs the overhead of a poll."""
        self._need()
        world = self._windows.world
        world.kernel.observe()
        # A loop of Sync and load polls shared memory: without a charge it would never reach the time of the store.
        world.charge_poll()
        world.kernel.fruitless()

    def _flush(self, rank: int, operation: str) -> None:
        self._complete([each for each in self._epoch.under_way if each[0] == rank], operation)

    def _flush_all(self, operation: str) -> None:
        self._complete(self._epoch.under_way[:], operation)

    def _complete(self, begun: list[PendingAccess], operation: str) -> None:
        for each in begun:
            rank, access, _ = each
            try:
                if not access.over(self._windows.world.kernel.current.clock):
                    self._wait(access, operation, rank)
            # Timeout is not caught: a flush that missed its deadline may be tried again, so the access stays pending.
            except (RankFailed, Revoked):
                self._epoch.under_way.remove(each)  # it will never complete; after a Timeout it still may
                raise
            self._take(each)
        if begun and begun[-1][0] == self._comm._me:
            self._charge_spinning()

    def _charge_spinning(self) -> None:
        """Charge a loop of accesses to the rank's own part like polls: otherwise no rank would get the time to change
        it.

        Such an access takes as long as a copy within memory, so virtual time would stand still in the loop.
        """
        epoch, world = self._epoch, self._windows.world
        task = world.kernel.current
        epoch.own = epoch.own + 1 if task.clock - epoch.own_s < APART_S else 0
        if epoch.own > SPINNING:
            world.charge_poll()
        epoch.own_s = task.clock

    def _take(self, begun: PendingAccess) -> None:
        """Deliver an answer, once: its request may be waited for after a flush.

        The digest covers the answer, since its contents came from the memory of another rank.
        """
        # An access can be collected twice, by a flush and by its request. A second delivery would overwrite data that
        # the program has stored since.
        under_way = self._epoch.under_way
        if begun in under_way:
            under_way.remove(begun)
            rank, access, deliver = begun
            # Covered when taken, not when served: until then, plain stores of the target may have changed the source
            # memory.
            if access.answer is not None:
                self._comm._rank.digest.cover(access.answer)
            try:
                deliver(access.answer)
            except PhantomError as error:
                raise PhantomError(
                    f"rank {self._comm._me} reads from rank {rank} of {self._label}: {error}"
                ) from None

    # -- active target ---------------------------------------------------------------------------------------

    def Fence(self, assertion: int = 0) -> None:
        """Separate epochs, collectively: all earlier calls are complete after the fence."""
        self._need()
        # First this rank's accesses, then the barrier: together they ensure that all accesses of all ranks are complete
        # after the fence.
        self._flush_all("Fence")
        self._comm._meet(Call("Fence", "barrier"))
        self._windows.world.kernel.observe()
        # MPI: MODE_NOSUCCEED states that no epoch follows, so later accesses without a lock are errors.
        self._epoch.fenced = not assertion & constants.MODE_NOSUCCEED

    def Post(self, group: Group, assertion: int = 0) -> None:
        self._need()
        if self._epoch.exposed:
            raise CallError(ERR_RMA_SYNC, f"Post of {self._label} again: Wait first, which ends the exposure")
        exposed = self._places(group)
        for rank in exposed:
            self._comm._deliver(b"", rank, POST, STANDARD, operation="Post")
        self._epoch.tokens = [self._comm._irecv(rank, COMPLETE, "Wait") for rank in exposed]
        self._epoch.exposed = True

    def Start(self, group: Group, assertion: int = 0) -> None:
        """Begin to access the parts of a group's ranks; waits for their Post."""
        self._need()
        places = self._places(group)
        for rank in places:
            # MPI lets Start wait or not; waiting here means that no access reaches a part before its exposure.
            self._comm._accept(rank, POST, "Start")
        self._epoch.started, self._epoch.accessing = frozenset(places), True

    def Complete(self) -> None:
        self._need()
        if not self._epoch.accessing:
            raise CallError(ERR_RMA_SYNC, f"Complete of {self._label} without Start")
        # Sorted: sets have no order on which a run may depend.
        for rank in sorted(self._epoch.started):
            # The flush precedes the token: the target may read its memory as soon as it has the token.
            self._flush(rank, "Complete")
            self._comm._deliver(b"", rank, COMPLETE, STANDARD, operation="Complete")
        self._epoch.started, self._epoch.accessing = frozenset(), False

    def Wait(self) -> bool:
        self._need()
        if not self._epoch.exposed:
            raise CallError(ERR_RMA_SYNC, f"Wait of {self._label} without Post")
        Request.waitall(self._epoch.tokens)
        self._epoch.tokens, self._epoch.exposed = (), False
        return True

    def Test(self) -> bool:
        self._need()
        over = Request.Testall(self._epoch.tokens)
        if over:
            self._epoch.tokens, self._epoch.exposed = (), False
        return over

    def _places(self, group: Group) -> list[int]:
        return [self._comm._members.index(rank) for rank in group.live()]


class Accesses(Epochs):
    """Put, Get and the atomic calls."""

    __slots__ = ()

    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        self._put(origin, target_rank, target, REPLACE)

    def Get(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Read from a part. The data are in the origin's buffer after the next flush, unlock, fence or complete."""
        self._get(origin, target_rank, target)

    def Accumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = SUM) -> None:
        self._put(origin, target_rank, target, op)

    def Get_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = SUM
    ) -> None:
        self._swap(origin, result, target_rank, target, op=op)

    def Rput(self, origin: Any, target_rank: int, target: Any = None) -> Request:
        """Start Put; the request is complete when the data are written."""
        return self._request("Rput", self._put(origin, target_rank, target, REPLACE))

    def Rget(self, origin: Any, target_rank: int, target: Any = None) -> Request:
        """Start Get; the request is complete when the data have arrived."""
        return self._request("Rget", self._get(origin, target_rank, target))

    def Raccumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = SUM) -> Request:
        return self._request("Raccumulate", self._put(origin, target_rank, target, op))

    def Rget_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = SUM
    ) -> Request:
        return self._request("Rget_accumulate", self._swap(origin, result, target_rank, target, op=op))

    def Fetch_and_op(
        self, origin: Any, result: Any, target_rank: int, target_disp: int = 0, op: Op = SUM
    ) -> None:
        # MPI ignores the origin's buffer with NO_OP; it may be None, but a given buffer is checked, as in mpi4py.
        _check_single("Fetch_and_op", result, *([] if op == NO_OP and origin is None else [origin]))
        self._swap(origin, result, target_rank, [integer(target_disp, AINT), 1], op=op)

    def Compare_and_swap(
        self, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int = 0
    ) -> None:
        """Replace one element if it equals `compare`, and return its previous value, atomically."""
        _check_single("Compare_and_swap", result, origin, compare)
        target_rank, target_disp = integer(target_rank), integer(target_disp, AINT)
        if target_rank == PROC_NULL:
            return
        reads = as_buffer(origin), as_buffer(compare)
        new, expected = reads[0].pack()[:1], reads[1].pack()[:1]
        found = as_buffer(result, writable=True)
        part = self._part(target_rank, [target_disp, 1], found, "Compare_and_swap")

        def serve(data: Any) -> Any:
            there = part.pack()
            # Bytes instead of values: MPI compares representations, and NaN would never equal itself.
            if there.tobytes() == data[1].tobytes():
                part.unpack(data[0])
            return there

        sizes = new.nbytes + expected.nbytes, new.nbytes
        use = part, "CAS", reads, found
        self._begin(
            target_rank, "Compare_and_swap", sizes, serve, use=use, deliver=found.unpack, data=[new, expected]
        )

    # -- implementation --------------------------------------------------------------------------------------

    def _put(self, origin: Any, rank: int, target: Any, op: Op) -> PendingAccess | None:
        rank = integer(rank)
        if rank == PROC_NULL:
            return None
        own = as_buffer(origin)
        part = self._part(rank, target, own, "Put")
        _check_op(op, own, part)
        call = "Put" if op == REPLACE else "Accumulate"
        # `pack` copies: the target serves later, when the origin's buffer may have changed.
        sizes, data, use = (own.nbytes, 0), own.pack(), (part, op.name, (own,), None)
        return self._begin(
            rank, call, sizes, lambda data: _apply(op, part, data), use=use, deliver=_no_answer, data=data
        )

    def _get(self, origin: Any, rank: int, target: Any) -> PendingAccess | None:
        rank = integer(rank)
        if rank == PROC_NULL:
            return None
        own = as_buffer(origin, writable=True)
        part = self._part(rank, target, own, "Get")
        # Packed when the target serves: a Get returns the contents at that time.
        sizes, use = (0, part.nbytes), (part, "GET", (), own)
        return self._begin(rank, "Get", sizes, lambda data: part.pack(), use=use, deliver=own.unpack)

    def _swap(self, origin: Any, result: Any, rank: int, target: Any, *, op: Op) -> PendingAccess | None:
        rank = integer(rank)
        if rank == PROC_NULL:
            return None
        found = as_buffer(result, writable=True)
        reads = () if op == NO_OP else (as_buffer(origin),)
        data = reads[0].pack() if reads else None
        part = self._part(rank, target, found, "Get_accumulate")
        _check_op(op, found, part)

        def serve(data: Any) -> Any:
            # Read and combined in one service: no other access comes between, which is MPI's atomicity.
            there = part.pack()
            if data is not None:
                _apply(op, part, data)
            return there

        sizes, use = (0 if data is None else data.nbytes, found.nbytes), (part, op.name, reads, found)
        return self._begin(rank, "Get_accumulate", sizes, serve, use=use, deliver=found.unpack, data=data)

    def _part(self, rank: int, target: Any, own: Buffer, operation: str) -> Buffer:
        """Return the buffer in the target's memory to which an access refers."""
        self._check(rank, operation)
        displacement, count, datatype = as_target(target, own)
        part = self._windows.targets[rank]
        start, memory = displacement * part.disp_unit, part.memory
        # MPI: in a dynamic window the displacement is an absolute address, not an offset in units.
        if self._windows.flavor == constants.WIN_FLAVOR_DYNAMIC:
            memory, start = _region(part.regions, displacement)
        try:
            return locate(memory, datatype, start, count)
        except ParameterError as error:
            what = f"{operation} to rank {rank} of {self._label}"
            raise CallError(ERR_RMA_RANGE, f"{what}: {error}") from None

    def _begin(
        self, rank: int, call: str, nbytes: tuple[int, int], serve: Serve, *, use: Use,
        deliver: Callable[[Any], Any], data: Any = None,
    ) -> PendingAccess:  # fmt: skip
        """Send an access of `nbytes` bytes (there, back). `deliver` gets the answer when the access is complete.

        The search for races replaces this method, and needs `use`.
        """
        windows = self._windows
        access = Access(windows.world, call, nbytes, serve, data=data)
        windows.request(self._comm._rank, rank, access)
        begun = rank, access, deliver
        self._epoch.under_way.append(begun)
        return begun

    # The access stays pending in the epoch: Flush, Unlock and Fence also complete it (MPI).
    def _request(self, operation: str, begun: PendingAccess | None) -> Request:
        world = self._windows.world
        if begun is None:
            return request_over(world)
        rank, access, _ = begun
        return request_for(world, access, (self, operation, rank), lambda status: self._take(begun))


def _no_answer(answer: Any) -> None:
    """Deliver nothing."""


def _check_op(op: Op, own: Buffer, part: Buffer) -> None:
    """Raise an error at the call, instead of at the service, if the operation does not support the types.

    Derived types are combined element by element: all elements must have one predefined type, the same at both ends.
    """
    if not own.nbytes or op in (REPLACE, NO_OP):
        return
    ours, theirs = own.datatype.basic, part.datatype.basic
    if ours is None or theirs is None or ours.dtype != theirs.dtype:
        kinds = " and ".join(kind.Get_name() if kind else "a mixed type" for kind in (ours, theirs))
        raise CallError(ERR_TYPE, f"{op.name or 'an operation'} needs elements of one type: got {kinds}")
    op.check(ours)


def _check_single(call: str, result: Any, *others: Any) -> None:
    """Raise an error unless all buffers have one element, of the same type."""
    found = as_buffer(result, writable=True)
    if found.count != 1:
        raise ArgumentError(ERR_COUNT, f"{call} takes one element, but the result's buffer has {found.count}")
    for other in others:
        agree(call, as_buffer(other), found)


def _apply(op: Op, part: Buffer, data: Any) -> None:
    """Combine data with a target's memory."""
    if not part.nbytes:
        return
    basic = part.datatype.basic
    if op == REPLACE or basic is None:
        part.unpack(data)
    else:
        part.unpack(op.reduce(_elements(data, basic), _elements(part.pack(), basic), basic))


def _elements(data: Any, basic: Datatype) -> Any:
    """Return transferred data as an array of elements of a predefined type."""
    if data.dtype == basic.dtype:
        return data
    if basic.dense:
        return data.view(basic.dtype)
    found = np.zeros(len(data) // basic.size, basic.dtype)  # a pair is sent without its padding
    basic.layout.scatter(as_bytes(found), data)
    return found


def _region(regions: Sequence[Any], place: int) -> tuple[Any, int]:
    for region in regions:
        first = address(region)
        # `<=` at the end: an access of no bytes may be located directly after a region.
        if first <= place <= first + region.nbytes:
            return region, place - first
    raise CallError(ERR_RMA_RANGE, f"address {place:#x} is outside the memory that the target has attached")
