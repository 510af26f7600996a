"""Requests: mpi4py's `Request` and `Prequest` over completions, and calls that wait for several requests.

A request keeps everything that it needs until it is complete: dropping the object loses no message, because the message
and the posted receive live in the mailbox. When one of several requests fails, the error is `ERR_IN_STATUS`, and each
status has the error code of its request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG, UNDEFINED
from spawnsim.comm.failures import ERR_IN_STATUS, ERR_PENDING, ERR_REQUEST, CallError, SpecTypeError
from spawnsim.comm.handles import Owned, integer, same_kind
from spawnsim.comm.status import Status
from spawnsim.errors import RankFailed, Revoked
from spawnsim.virtual.engine.completion import AllOf, Completion, Receive
from spawnsim.virtual.engine.waiting import (
    FreedOperation,
    WaitingForAny,
    await_any,
    await_one,
    check_revoked,
    finished,
    over_by_itself,
    poll_ahead,
    settled,
)
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.mpi.polling import done_now, over_now


def collect_all(
    requests: Sequence[Request], statuses: Sequence[Status | None], collect: Callable[..., Any]
) -> list[Any]:
    """Return `collect(request, status)` of each request.

    When one request fails, the other complete ones are collected and the rest stay pending (`ERR_PENDING`); then the
    first error is raised with the code `ERR_IN_STATUS`. It keeps its class, such as `TruncationError`.
    """
    found, failed = [], None
    for request, status in zip(requests, statuses):  # noqa: B905 - `strict=False` costs half a microsecond
        # After a failure nothing may wait: MPI requires ERR_PENDING for requests that neither completed nor failed.
        if failed is not None and _pending(request):
            _mark(status, ERR_PENDING)
            continue
        try:
            found.append(collect(request, status))
        except CallError as error:
            _mark(status, error.Get_error_code())
            # Only the first error is raised: MPI leaves the rest to the statuses.
            failed = failed or error
    if failed is not None:
        # `type(failed)`, so that a program that catches TruncationError on one receive catches it from Waitall, too.
        raise type(failed)(ERR_IN_STATUS, f"one of {len(requests)} requests failed: {failed}") from failed
    return found


def _pending(request: Request) -> bool:
    # A known end may lie ahead of the rank's clock, since effects run ahead; until then the request is pending.
    over = request._completion
    return over is not None and (over.finish_s is None or over.finish_s > request._world.kernel.current.clock)


def _mark(status: Status | None, error: int) -> None:
    if status is not None:
        status.error = error


def _check(requests: Sequence[Any]) -> None:
    """Refuse a list with anything but requests, before any request changes."""
    # Checked as a whole before any collection: a bad item in the middle would leave half of the requests null.
    for request in requests:
        if not isinstance(request, Request):
            place = next(place for place, each in enumerate(requests) if each is request)
            raise SpecTypeError(
                f"item {place} of the requests is of type {type(request).__name__}, not Request"
            )


def _take(request: Request, status: Status | None) -> Any:
    return request._collect(status)


def fill(status: Status, source: int, tag: int, nbytes: int) -> None:
    """Write source, tag and size of a received message into a status."""
    status.source, status.tag, status.error = source, tag, 0
    status.nbytes, status.cancelled = nbytes, False


def fill_empty(status: Status | None) -> None:
    """Write the values of an inactive request into a status."""
    if status is not None:
        fill(status, ANY_SOURCE, ANY_TAG, 0)


def _padded(statuses: Sequence[Status] | None, count: int) -> Sequence[Status | None]:
    """Return a status for each request; a list that is too short is extended, as mpi4py does."""
    if statuses is None:
        return [None] * count
    if isinstance(statuses, tuple):
        # A tuple cannot be extended in place, so the missing statuses are lost to the program, as in mpi4py.
        return [*statuses, *[None] * (count - len(statuses))]
    assert isinstance(statuses, list)
    statuses.extend(Status() for _ in range(count - len(statuses)))
    return statuses


def _poll(requests: Sequence[Request]) -> list[int] | None:
    """Return the positions of the completed requests; None if none is active."""
    _check(requests)
    for request in requests:
        if request._completion is not None:
            return done_now(request._world, requests)
    return None


def _await_some(requests: Sequence[Request], operation: str) -> list[int]:
    _check(requests)
    active = [request for request in requests if request._completion is not None]
    if not active:
        return []
    world, completions = active[0]._world, [request._completion for request in requests]
    # Revocation is checked before the wait: an operation that the revocation has ended would never wake this rank.
    if world.revoked:
        for request in active:
            request._check_revoked()
    if settled(world, completions):  # as in `poll`
        over = finished(completions, world.kernel.current.clock)
        if over:
            world.kernel.run_ahead()
            return over
    parts = [request._waiting for request in active if request._waiting is not None]
    waiting = WaitingForAny(operation, parts)
    return await_any(world, completions, waiting)


def _collect_each(requests: Sequence[Request], over: list[int], statuses: list[Status] | None) -> list[Any]:
    chosen = [requests[index] for index in over]
    return collect_all(chosen, _padded(statuses, len(over)), _take)


Deliver = Callable[[Status], Any]
Withdraw = Callable[[Any, float], None]


_UNSEEN = Status()  # used if the caller gives no status
_new = object.__new__


class Reception(Receive):
    """The receive behind a request; `payload.unpack` writes to `into`. None: the message is an object."""

    __slots__ = ("into", "owner")
    into: Any
    owner: Any

    def is_settled(self, time_s: float) -> bool:
        """Whether it is known now if the receive completes by a time, unless a later send arrives by then."""
        # Not if its message is here and the data of a rendezvous are missing: data from the rank itself arrive at once.
        if self.finish_s is None and self.message is None:
            return bool(self.owner._mailbox.is_settled(self.source, time_s))
        return self.finish_s is not None

    def deliver(self, status: Status) -> Any:
        """Deliver the message; return its object, if it has one."""
        self.owner._rank.open_receives -= 1
        message, self.message = self.message, None  # the mailbox may still refer to the receive
        if message is None:  # cancelled
            status.Set_cancelled(True)
            return None
        if status is not _UNSEEN:
            fill(status, message.source, message.tag, message.nbytes)
        return self.owner._taken(message, self.into)


class Delivered:
    """The outcome of a delivery to memory at the known end of a request, kept for the collection."""

    def __init__(self, deliver: Deliver) -> None:
        self.status = Status()
        self._outcome = deliver(self.status)

    def __call__(self, status: Status) -> Any:
        # A copy: MPI's Get_status may be called many times, each with a new status, but data are delivered once.
        status.copy_from(self.status)
        return self._outcome


class Request(Owned):
    """A pending operation of one rank. Null (false) once it is complete and collected.

    The lower-case calls return the received object, the upper-case ones fill the buffer given at the start.
    """

    __slots__ = ("_about", "_completion", "_deliver", "_withdraw", "_world", "_writes")
    kind = "persistent request"
    _about: Any  # the value of `_waiting`, or the arguments that create it
    _completion: Completion | None
    _deliver: Deliver | None  # None: nothing to deliver, as for a send or a barrier
    _writes: bool  # to the program's memory: data are delivered even without a collection
    _withdraw: Withdraw | None
    _world: World

    def __new__(cls, request: Request | None = None) -> Self:
        self = super().__new__(cls)
        self._identity = self._completion = self._withdraw = None
        if request is not None:
            same_kind(Request, request)
            self._copy(request)
            for name in Request.__slots__:
                setattr(self, name, getattr(request, name, None))
        return self

    @property
    def _waiting(self) -> Any:
        """The description of a wait for this request. Created when needed: most requests complete without a wait."""
        about = self._about
        if type(about) is tuple:
            about = self._about = about[0]._waiting(*about[1:])
        return about

    # -- single request -------------------------------------------------------------------------------------

    def wait(self, status: Status | None = None) -> Any:
        """Wait until the operation is complete; return its object, if it has one."""
        completion = self._completion
        if completion is None:  # a null request has no object
            fill_empty(status)
            return None
        world = self._world
        if world.revoked:
            self._check_revoked()
        if not over_by_itself(world, completion):
            try:
                await_one(world, completion, self._waiting)
            except RankFailed:
                self._close()  # the program has waited for this request
                raise
        return self._collect(status)

    def Wait(self, status: Status | None = None) -> bool:
        Request.wait(self, status)
        return True

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        """Return (complete, object); an observation."""
        completion = self._completion
        # Most tests are of completed sends: they skip the switch of ranks that an observation takes.
        if completion is None or poll_ahead(self._world, completion) or over_now(self._world, self):
            return True, self._collect(status)
        return False, None

    def Test(self, status: Status | None = None) -> bool:
        """Return whether the operation is complete; an observation."""
        return Request.test(self, status)[0]

    def Get_status(self, status: Status | None = None) -> bool:
        """Return whether the operation is complete, and leave the request unchanged."""
        if self._completion is None:
            fill_empty(status)
            return True
        done = over_now(self._world, self)
        # MPI: once Get_status returns true, the buffer holds the data, although the request stays. Objects are created
        # at the collection instead, so that no object is created twice.
        fills = self._undelivered() if done else None
        if fills is not None:
            self._deliver = Delivered(fills)
        if done and status is not None:
            self._preview(status)
        return done

    def get_status(self, status: Status | None = None) -> bool:
        return self.Get_status(status)

    def Cancel(self) -> None:
        """Withdraw a receive that has no match yet; any other operation continues."""
        self._need()
        if self._withdraw is not None:
            kernel = self._world.kernel
            kernel.observe()
            self._withdraw(self, kernel.current.clock)
            self._world.charge_poll()

    cancel = Cancel

    def Free(self) -> None:
        """Release the request. The operation continues, and its buffer is filled on completion."""
        self._need()
        self._close()
        completion, self._completion = self._completion, None
        self._freed()
        # MPI: a freed receive still completes and fills its buffer. No call will collect it, so a watcher must deliver.
        if completion is not None and (fills := self._undelivered()) is not None:
            FreedOperation(self._world, completion, fills)

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self._identity is not None:
            raise ValueError("cannot pickle a request: it means something on its own rank only")
        return type(self), ()

    def together(self, other: Request) -> Request:
        """Return one request that is complete when both are; it delivers the outcome of this one."""
        if self._completion is None or other._completion is None:
            return self if other._completion is None else other
        # Both parts leave the ledger of leaks, since the program gets a single handle and can free only that handle.
        self._close()
        other._close()
        parts = (self._completion, other._completion)
        return request_for(self._world, AllOf(self._world.kernel, parts), self._waiting, self._deliver)

    # -- several requests ---------------------------------------------------------------------------------------

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[Any]:
        """Wait until all are complete; return their objects."""
        _check(requests)
        # This class's `wait`, even if a program's subclass overrides it.
        return collect_all(requests, _padded(statuses, len(requests)), Request.wait)

    @classmethod
    def Waitall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        _check(requests)
        collect_all(requests, _padded(statuses, len(requests)), Request.wait)
        return True

    @classmethod
    def testall(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> tuple[bool, list[Any] | None]:
        _check(requests)
        active = [request for request in requests if request._completion is not None]
        if active and len(done_now(active[0]._world, active, every=True)) < len(active):
            return False, None
        return True, Request.waitall(requests, statuses)

    @classmethod
    def Testall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        return Request.testall(requests, statuses)[0]

    @classmethod
    def waitany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, Any]:
        """Wait until one is complete; return its position and object (UNDEFINED if none is active)."""
        # Only the first of the completed requests: MPI completes exactly one, and the rest must stay active.
        index = _await_some(requests, "Waitany")[:1]
        if not index:
            fill_empty(status)
            return UNDEFINED, None
        return index[0], requests[index[0]]._collect(status)

    @classmethod
    def Waitany(cls, requests: Sequence[Request], status: Status | None = None) -> int:
        """Wait until one is complete; return its position."""
        return Request.waitany(requests, status)[0]

    @classmethod
    def testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool, Any]:
        over = _poll(requests)
        if over is None:
            # None and an empty list differ: MPI's flag is true if no request is active, false if none is complete.
            fill_empty(status)
            return UNDEFINED, True, None
        if not over:
            return UNDEFINED, False, None
        return over[0], True, requests[over[0]]._collect(status)

    @classmethod
    def Testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        return Request.testany(requests, status)[:2]

    @classmethod
    def waitsome(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Wait until at least one is complete; return the positions and objects of all complete requests."""
        over = _await_some(requests, "Waitsome")
        if not over:
            return None, None
        return over, _collect_each(requests, over, statuses)

    @classmethod
    def Waitsome(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[int] | None:
        """Wait until at least one is complete; return the positions of all complete requests."""
        return Request.waitsome(requests, statuses)[0]

    @classmethod
    def testsome(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        over = _poll(requests)
        if over is None:
            return None, None
        return over, _collect_each(requests, over, statuses) if over else []

    @classmethod
    def Testsome(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[int] | None:
        return Request.testsome(requests, statuses)[0]

    @classmethod
    def get_status_all(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        pairs = zip(requests, _padded(statuses, len(requests)), strict=False)
        over = [request.Get_status(status) for request, status in pairs]  # all: each fills its status
        return all(over)

    @classmethod
    def get_status_any(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        """Return (position, flag) of a completed request, and leave it unchanged."""
        over = _poll(requests)
        # Get_status again, for its delivery to memory: `_poll` finds the completed operation but fills no buffer.
        if over:
            requests[over[0]].Get_status(status)
            return over[0], True
        if over is None:
            fill_empty(status)
        return UNDEFINED, over is None

    @classmethod
    def get_status_some(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> list[int] | None:
        over = _poll(requests)
        pairs = zip(over or (), _padded(statuses, len(over or ())), strict=False)
        for index, status in pairs:
            requests[index].Get_status(status)
        return over

    Get_status_all, Get_status_any, Get_status_some = get_status_all, get_status_any, get_status_some

    # -- internals ----

    def _undelivered(self) -> Deliver | None:
        """Return the function that fills the program's memory, or None if it is missing or has run already."""
        deliver = self._deliver
        return deliver if self._writes and not isinstance(deliver, Delivered) else None

    def _close(self) -> None:
        if self._completion is not None and self._world.resource_leaks is not None:
            self._world.resource_leaks.closed(self._completion)

    def _check_revoked(self) -> None:
        """Raise `Revoked`, once, if the operation was pending when its communicator was revoked.

        Its memory stays unchanged.
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
            # Made null before the error is raised, so that a second wait does not raise again: MPI completes it with an
            # error once.
            self._completion = None
            self._retire()
            raise

    def _need(self) -> None:
        if self._identity is None:
            raise CallError(ERR_REQUEST, "the request is null: it was already collected or freed")

    def _preview(self, status: Status) -> None:
        message = getattr(self._completion, "message", None)
        if isinstance(self._deliver, Delivered):
            status.copy_from(self._deliver.status)
        elif message is not None:
            fill(status, message.source, message.tag, message.nbytes)

    def _collect(self, status: Status | None) -> Any:
        """Make the request null and deliver its outcome."""
        if self._completion is None:
            fill_empty(status)
            return None
        if status is not None:
            fill(status, ANY_SOURCE, ANY_TAG, 0)
        if self._world.resource_leaks is not None:
            self._close()
        # Emptied before the delivery: if that raises (a truncation), the operation is nevertheless complete.
        deliver, self._completion = self._deliver, None
        self._retire()
        return None if deliver is None else deliver(_UNSEEN if status is None else status)

    def _retire(self) -> None:
        self._identity = None


# Functions instead of class methods: Python (3.11) cannot specialize calls of class methods.
def request_for(
    world: World, completion: Completion, about: Any, deliver: Deliver | None = None, *, writes: bool = True,
    withdraw: Withdraw | None = None,
) -> Request:  # fmt: skip
    """Return a request over a completion. `deliver(status)` runs at the collection, or when completion is known.

    `about` describes a wait for it; or a tuple: a member or a window, and the arguments of its `_waiting`. With
    `writes`, `deliver` fills a buffer and runs even if the request is freed; otherwise it creates the request's object.
    `withdraw(request, now_s)` cancels it; without it, Cancel does nothing.
    """
    request = _new(Request)
    request._identity = request._completion = completion
    request._world, request._about, request._withdraw = world, about, withdraw
    request._deliver, request._writes = deliver, writes
    if world.resource_leaks is not None:
        world.resource_leaks.opened(completion, world.kernel.current.rank, request._waiting)
    return request


def request_over(world: World, deliver: Deliver | None = None, *, writes: bool = True) -> Request:
    """Return a request that is already complete: an eager send, or a call to PROC_NULL."""
    # A finished completion instead of a special case, so that waits and tests take one path for all requests.
    kernel = world.kernel
    return request_for(world, Completion(kernel, kernel.current.clock), None, deliver, writes=writes)


class Prequest(Request):
    """A persistent request: `Start` begins the operation again, and a wait leaves it inactive, not null."""

    __slots__ = ("_begin", "_partitions")
    _begin: Callable[[], Request]
    _partitions: Any  # a `partitioned.Partitioned`; None: the operation is whole

    def __new__(cls, request: Request | None = None) -> Self:
        self = super().__new__(cls, request)
        # A null handle of any class may become a handle of another class, as in mpi4py.
        if request:
            same_kind(Prequest, request)
            self._begin, self._partitions = request._begin, request._partitions  # type: ignore[attr-defined]
        return self

    @classmethod
    def prepare(cls, begin: Callable[[], Request], partitions: Any = None) -> Self:
        """Return an inactive request whose `Start` calls `begin`."""
        self = cls.__new__(cls)
        self._identity, self._begin, self._partitions = object(), begin, partitions
        return self._made()

    def Start(self) -> None:
        """Begin the operation."""
        self._need()
        # MPI: starting an active persistent request is erroneous. Accepting it would drop the pending operation.
        if self._completion is not None:
            raise CallError(
                ERR_REQUEST, "Start of a persistent request that is still active: wait for it first"
            )
        active = self._begin()
        for name in Request.__slots__:
            setattr(self, name, getattr(active, name))

    @classmethod
    def Startall(cls, requests: list[Prequest]) -> None:
        for request in requests:
            request.Start()

    def Pready(self, partition: int) -> None:
        self.Pready_list((partition,))

    def Pready_range(self, partition_low: int, partition_high: int) -> None:
        self.Pready_list(range(integer(partition_low), integer(partition_high) + 1))

    def Pready_list(self, partitions: Sequence[int]) -> None:
        self._parts().ready(partitions)

    def Parrived(self, partition: int) -> bool:
        """Return whether a partition of a receive of `Precv_init` is in the buffer; an observation."""
        return bool(self._parts().arrived(partition))

    def _parts(self) -> Any:
        self._need()
        if self._partitions is None:
            raise CallError(ERR_REQUEST, "only requests of Psend_init and Precv_init have partitions")
        return self._partitions

    def _retire(self) -> None:
        """Stay inactive instead of null."""
