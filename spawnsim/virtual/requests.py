"""Requests: mpi4py's `Request`, `Prequest` and `Grequest` over completions.

A request owns what it needs until it is over: dropping the object loses no message, because the message and the
posted receive live in the mailbox. This room knows completions and statuses; it must not know how a message travels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.comm.failures import ERR_REQUEST, CallError
from spawnsim.comm.handles import Handle
from spawnsim.comm.status import Status
from spawnsim.errors import Revoked, UnsupportedError
from spawnsim.virtual.engine.completion import AllOf, Completion
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.several import Several, done_now, fill, fill_empty, look
from spawnsim.virtual.unattended import FreedOperation
from spawnsim.virtual.waiting import await_one, check_revoked

PARTITIONS = "partitioned communication is not simulated: send each partition as a message of its own"
Deliver = Callable[[Status], Any]


def _nothing(status: Status) -> None:
    """Deliver nothing: a send, or a barrier."""


class Delivered:
    """What was delivered to memory when a program learnt that a request is over, for when it is collected."""

    def __init__(self, deliver: Deliver) -> None:
        self.status = Status()
        self._outcome = deliver(self.status)

    def __call__(self, status: Status) -> Any:
        status.copy_from(self.status)
        return self._outcome


class Request(Several, Handle):
    """A pending operation of one rank. Null (false) once it is over and collected.

    The lower-case calls return the received object, the upper-case ones fill the buffer given at the start.
    """

    __slots__ = ("_completion", "_deliver", "_waiting", "_withdraw", "_world", "_writes")
    _completion: Completion | None
    _deliver: Deliver
    _writes: bool  # to memory of the program: what is delivered is there although nobody collects it
    _waiting: Any
    _withdraw: Callable[[Any, float], None] | None
    _world: World

    def __new__(cls, request: Request | None = None) -> Self:
        """Return a null request, or a copy of the handle of another."""
        self = super().__new__(cls)
        self._identity = self._completion = self._withdraw = None
        if request is not None:
            self._identity = request._identity
            for name in Request.__slots__:
                setattr(self, name, getattr(request, name, None))
        return self

    @classmethod
    def start(
        cls,
        world: World,
        completion: Completion,
        waiting: Any,
        deliver: Deliver | None = None,
        *,
        writes: bool = True,
    ) -> Self:
        """Return a request over a completion. `deliver(status)` runs when it is collected, or known to be over.

        `writes`: it fills a buffer, and runs also if the request is freed; else it makes the object of the request.
        """
        self = super().__new__(cls)
        self._identity, self._withdraw, self._writes = object(), None, writes and deliver is not None
        self._world, self._completion, self._waiting = world, completion, waiting
        self._deliver = _nothing if deliver is None else deliver
        if world.ledger is not None:
            world.ledger.opened(completion, world.kernel.current.rank, waiting)
        return self

    @classmethod
    def over(cls, world: World, deliver: Deliver | None = None, *, writes: bool = True) -> Self:
        """Return a request that is complete already: an eager send, or a call to PROC_NULL."""
        completion = Completion(world.kernel)
        completion.finish_s = world.kernel.current.clock
        return cls.start(world, completion, None, deliver, writes=writes)

    # -- one -------------------------------------------------------------------------------------------------

    def wait(self, status: Status | None = None) -> Any:
        """Wait until the operation is over; return its object, if it has one."""
        completion = self._completion
        if completion is not None and self._world.revoked:
            self._check_revoked()
        if completion is not None and not completion.over(self._world.kernel.current.clock):
            await_one(self._world, completion, self._waiting)
        return self._collect(status)

    _finish = wait

    def Wait(self, status: Status | None = None) -> bool:
        """Wait until the operation is over."""
        Request.wait(self, status)
        return True

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        """Return (over, object); an observation."""
        if self._completion is None:
            return True, self._collect(status)
        if not done_now(self._world, self):
            return False, None
        return True, self._collect(status)

    def Test(self, status: Status | None = None) -> bool:
        """Return whether the operation is over; an observation."""
        return Request.test(self, status)[0]

    def Get_status(self, status: Status | None = None) -> bool:
        """Return whether the operation is over, and leave the request as it is."""
        if self._completion is None:
            fill_empty(status)
            return True
        done = bool(done_now(self._world, self))
        if done and self._writes and not isinstance(self._deliver, Delivered):
            self._deliver = Delivered(self._deliver)
        if done and status is not None:
            self._preview(status)
        return done

    def get_status(self, status: Status | None = None) -> bool:
        """Return whether the operation is over, and leave the request as it is."""
        return self.Get_status(status)

    def Cancel(self) -> None:
        """Withdraw a receive that has not matched; anything else goes on."""
        self._need()
        if self._withdraw is not None:
            self._withdraw(self, look(self._world))
            self._world.charge_poll()

    cancel = Cancel

    def Free(self) -> None:
        """Let go of the request; the operation goes on, and its buffer is filled when it is over."""
        self._need()
        self._close()
        completion, self._identity, self._completion = self._completion, None, None
        if completion is not None and self._writes and not isinstance(self._deliver, Delivered):
            FreedOperation(self._world, completion, self._deliver)

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self._identity is not None:
            raise ValueError("cannot pickle a request: it means something on its own rank only")
        return type(self), ()

    def together(self, other: Request) -> Request:
        """Return one request that is over when both are; it delivers what this one does."""
        if self._completion is None or other._completion is None:
            return self if other._completion is None else other
        self._close()
        other._close()
        parts = (self._completion, other._completion)
        return Request.start(self._world, AllOf(self._world.kernel, parts), self._waiting, self._deliver)

    def _close(self) -> None:
        """Tell the ledger, if there is one, that nobody need wait any more."""
        if self._completion is not None and self._world.ledger is not None:
            self._world.ledger.closed(self._completion)

    def _check_revoked(self) -> None:
        """Raise `Revoked`, once, if the operation was open when its communicator was revoked.

        Its memory is left alone.
        """
        completion = self._completion
        if completion is None or self._waiting is None:
            return
        try:
            check_revoked(
                self._world, self._waiting, math.inf if completion.finish_s is None else completion.final()
            )
        except Revoked:
            self._close()
            self._completion = None
            self._retire()
            raise

    def _need(self) -> None:
        if self._identity is None:
            raise CallError(ERR_REQUEST, "the request is null: it was collected or freed before")

    def _preview(self, status: Status) -> None:
        message = getattr(self._completion, "message", None)
        if isinstance(self._deliver, Delivered):
            status.copy_from(self._deliver.status)
        elif message is not None:
            fill(status, message.source, message.tag, message.nbytes)

    def _collect(self, status: Status | None) -> Any:
        """Make the request null and deliver."""
        if self._completion is None:
            fill_empty(status)
            return None
        if status is not None:
            fill(status, ANY_SOURCE, ANY_TAG, 0)
        if self._world.ledger is not None:
            self._close()
        deliver, self._completion = self._deliver, None
        self._retire()
        return None if deliver is _nothing else deliver(Status() if status is None else status)

    def _retire(self) -> None:
        self._identity = None


class Prequest(Request):
    """A persistent request: `Start` begins the operation again, and a wait leaves it inactive, not null."""

    __slots__ = ("_begin",)
    _begin: Callable[[], Request]

    @classmethod
    def prepare(cls, begin: Callable[[], Request]) -> Self:
        """Return an inactive request whose `Start` calls `begin`."""
        self = cls.__new__(cls)
        self._identity, self._begin = object(), begin
        return self

    def Start(self) -> None:
        """Begin the operation."""
        self._need()
        if self._completion is not None:
            raise CallError(
                ERR_REQUEST, "Start of a persistent request that is still active: wait for it first"
            )
        active = self._begin()
        for name in Request.__slots__:
            setattr(self, name, getattr(active, name))

    @classmethod
    def Startall(cls, requests: list[Prequest]) -> None:
        """Begin all operations."""
        for request in requests:
            request.Start()

    def _retire(self) -> None:
        """Stay, inactive."""

    def Pready(self, partition: int) -> NoReturn:
        """Refuse."""
        raise UnsupportedError(f"Prequest.Pready: {PARTITIONS}")

    def Pready_range(self, partition_low: int, partition_high: int) -> NoReturn:
        """Refuse."""
        raise UnsupportedError(f"Prequest.Pready_range: {PARTITIONS}")

    def Pready_list(self, partitions: Sequence[int]) -> NoReturn:
        """Refuse."""
        raise UnsupportedError(f"Prequest.Pready_list: {PARTITIONS}")

    def Parrived(self, partition: int) -> NoReturn:
        """Refuse."""
        raise UnsupportedError(f"Prequest.Parrived: {PARTITIONS}")
