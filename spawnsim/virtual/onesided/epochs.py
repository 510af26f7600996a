"""When one-sided calls may be made and when they are complete: locks, flushes, fences, post-start-complete-wait.

This room knows epochs of one rank's window handle. When a target serves an access is the business of `service`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spawnsim.comm import constants
from spawnsim.comm.constants import LOCK_EXCLUSIVE, PROC_NULL
from spawnsim.comm.failures import ERR_RANK, ERR_RMA_SYNC, ERR_WIN, CallError
from spawnsim.comm.group import Group
from spawnsim.comm.handles import Attributes
from spawnsim.comm.info import Info
from spawnsim.comm.integers import integer
from spawnsim.errors import RankFailed, Revoked
from spawnsim.virtual.engine.completion import Completion
from spawnsim.virtual.engine.wire import STANDARD
from spawnsim.virtual.meeting import Call
from spawnsim.virtual.onesided.service import Access, Windows
from spawnsim.virtual.requests import Request
from spawnsim.virtual.waiting import Waiting, await_one

POST, COMPLETE = 1, 2  # tags of the active-target epochs
Begun = tuple[int, Access, Callable[[Any], Any]]  # an access to a target, and what delivers the answer


class Epochs(Attributes):
    """The state of one rank's window handle: who may be accessed, and what is under way."""

    _comm: Any
    _windows: Windows
    _name: str
    _place: int
    _locked: set[int]
    _started: set[int]
    _locked_all: bool
    _fenced: bool
    _under_way: list[Begun]
    _tokens: list[Request]
    _exposed: list[int]
    _errhandler: Any
    _info: Info

    def _exist(self) -> None:
        if self._identity is None:
            raise CallError(ERR_WIN, "the window is null, or was freed before")

    def _need(self) -> None:
        """Refuse one that is null or freed, or whose communicator was revoked."""
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
        return Waiting(operation, self._label, comm._members, rank, 0, "target", context=comm._context)

    def _check(self, rank: int, operation: str) -> None:
        """Refuse an access outside any epoch."""
        self._need()
        if not 0 <= rank < len(self._windows.targets):
            raise CallError(ERR_RANK, f"{operation}: rank {rank} is not in {self._label}")
        if not (self._fenced or self._locked_all or rank in self._locked or rank in self._started):
            raise CallError(
                ERR_RMA_SYNC,
                f"{operation} to rank {rank} of {self._label} outside an epoch: Lock, Fence or Start first",
            )

    # -- passive target --------------------------------------------------------------------------------------

    def Lock(self, rank: int, lock_type: int = LOCK_EXCLUSIVE, assertion: int = 0) -> None:
        """Begin to access one rank's part. A contended lock costs the time until it is granted."""
        self._need()
        rank = integer(rank)
        if rank == PROC_NULL:
            return
        if rank in self._locked:
            raise CallError(ERR_RMA_SYNC, f"Lock: {self._label} holds a lock on rank {rank} already")
        if not 0 <= rank < len(self._windows.targets):
            raise CallError(ERR_RANK, f"Lock: rank {rank} is not in {self._label}")
        windows, origin = self._windows, self._comm._rank
        windows.world.kernel.observe()
        access = Access(windows.world, "Lock", (0, 0), lambda data: None, lock=lock_type)
        self._wait(windows.request(origin, rank, access), "Lock", rank)
        self._locked.add(rank)

    def Unlock(self, rank: int) -> None:
        """End the access: all calls to that rank are then complete there."""
        self._need()
        rank = integer(rank)
        if rank == PROC_NULL:
            return
        if rank not in self._locked:
            raise CallError(ERR_RMA_SYNC, f"Unlock: {self._label} holds no lock on rank {rank}")
        self._flush(rank, "Unlock")
        self._locked.discard(rank)
        self._windows.release(self._comm._rank, rank)
        self._windows.world.kernel.observe()

    def Lock_all(self, assertion: int = 0) -> None:
        """Begin to access all parts, shared. A part locked alone by another is waited for when it is accessed."""
        self._need()
        if self._locked_all:
            raise CallError(ERR_RMA_SYNC, f"Lock_all: {self._label} is locked already")
        self._locked_all = True

    def Unlock_all(self) -> None:
        """End the access to all parts."""
        self._need()
        if not self._locked_all:
            raise CallError(ERR_RMA_SYNC, f"Unlock_all: {self._label} is not locked")
        self._flush_all("Unlock_all")
        self._locked_all = False

    def Flush(self, rank: int) -> None:
        """Complete all calls to one rank."""
        rank = integer(rank)
        self._check(rank, "Flush")
        self._flush(rank, "Flush")

    def Flush_all(self) -> None:
        """Complete all calls."""
        self._need()
        self._flush_all("Flush_all")

    def Flush_local(self, rank: int) -> None:
        """Complete all calls to one rank as far as this rank's buffers go."""
        self.Flush(rank)

    def Flush_local_all(self) -> None:
        """Complete all calls as far as this rank's buffers go."""
        self.Flush_all()

    def Sync(self) -> None:
        """Make own and others' stores see each other: they do. It costs the call overhead, as every look does."""
        self._need()
        world = self._windows.world
        world.kernel.observe()
        world.charge_poll()
        world.kernel.fruitless()

    def _flush(self, rank: int, operation: str) -> None:
        self._complete([each for each in self._under_way if each[0] == rank], operation)

    def _flush_all(self, operation: str) -> None:
        self._complete(self._under_way[:], operation)

    def _complete(self, begun: list[Begun], operation: str) -> None:
        for each in begun:
            try:
                self._wait(each[1], operation, each[0])
            except (RankFailed, Revoked):
                self._under_way.remove(each)  # it will never be over; one that is late may yet be
                raise
            self._take(each)

    def _take(self, begun: Begun) -> None:
        """Deliver an answer, once: its request may be waited for after a flush.

        The digest covers it, since its contents came from the memory of another rank.
        """
        if begun in self._under_way:
            self._under_way.remove(begun)
            _, access, deliver = begun
            self._comm._rank.trace.cover(access.answer)
            deliver(access.answer)

    # -- active target ---------------------------------------------------------------------------------------

    def Fence(self, assertion: int = 0) -> None:
        """Separate epochs, collectively: all calls before it are complete after it."""
        self._need()
        self._flush_all("Fence")
        self._comm._meet(Call("Fence", "barrier"))
        self._windows.world.kernel.observe()
        self._fenced = not assertion & constants.MODE_NOSUCCEED

    def Post(self, group: Group, assertion: int = 0) -> None:
        """Let the ranks of a group access this rank's part."""
        self._need()
        self._exposed = self._places(group)
        for rank in self._exposed:
            self._comm._deliver(b"", rank, POST, STANDARD, operation="Post")
        self._tokens = [self._comm._irecv(rank, COMPLETE, "Wait", _nothing) for rank in self._exposed]

    def Start(self, group: Group, assertion: int = 0) -> None:
        """Begin to access the parts of a group's ranks; waits until they have posted."""
        self._need()
        places = self._places(group)
        for rank in places:
            self._comm._accept(rank, POST, "Start")
        self._started = set(places)

    def Complete(self) -> None:
        """End the access that Start began."""
        self._need()
        for rank in sorted(self._started):
            self._flush(rank, "Complete")
            self._comm._deliver(b"", rank, COMPLETE, STANDARD, operation="Complete")
        self._started = set()

    def Wait(self) -> bool:
        """Wait until all ranks of Post's group have completed."""
        self._need()
        Request.waitall(self._tokens)
        self._tokens = []
        return True

    def Test(self) -> bool:
        """Return whether all ranks of Post's group have completed."""
        self._need()
        over = Request.Testall(self._tokens)
        if over:
            self._tokens = []
        return over

    def _places(self, group: Group) -> list[int]:
        return [self._comm._members.index(rank) for rank in group.live()]


def _nothing(payload: Any) -> None:
    """Take a token."""
