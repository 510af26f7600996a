"""Calls on several requests at once: wait for all, for any, for some; and what they share with calls on one.

This room knows completions and statuses; a request it knows by what it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG, UNDEFINED
from spawnsim.comm.failures import SpecTypeError
from spawnsim.comm.status import Status
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.instatus import collect_all
from spawnsim.virtual.waiting import WaitingForAny, await_any, finished

if TYPE_CHECKING:
    from spawnsim.virtual.requests import Request


class Several:
    """The calls of `Request` that take a list of requests."""

    __slots__ = ()

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[Any]:
        """Wait until all are over; return their objects."""
        _check(requests)
        return collect_all(requests, _lend(statuses, len(requests)), _finish)

    @classmethod
    def Waitall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        """Wait until all are over."""
        Several.waitall(requests, statuses)
        return True

    @classmethod
    def testall(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> tuple[bool, list[Any] | None]:
        """Return (all are over, their objects)."""
        _check(requests)
        active = [request for request in requests if request._completion is not None]
        if active and len(done_now(active[0]._world, *active, every=True)) < len(active):
            return False, None
        return True, Several.waitall(requests, statuses)

    @classmethod
    def Testall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        """Return whether all are over."""
        return Several.testall(requests, statuses)[0]

    @classmethod
    def waitany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, Any]:
        """Wait until one is over; return its position and object (UNDEFINED if none is active)."""
        index = _await_some(requests, "Waitany")[:1]
        if not index:
            fill_empty(status)
            return UNDEFINED, None
        return index[0], requests[index[0]]._collect(status)

    @classmethod
    def Waitany(cls, requests: Sequence[Request], status: Status | None = None) -> int:
        """Wait until one is over; return its position."""
        return Several.waitany(requests, status)[0]

    @classmethod
    def testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool, Any]:
        """Return (position, flag, object) of one that is over, if any."""
        over = _look_at(requests)
        if over is None:
            fill_empty(status)
            return UNDEFINED, True, None
        if not over:
            return UNDEFINED, False, None
        return over[0], True, requests[over[0]]._collect(status)

    @classmethod
    def Testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        """Return (position, flag) of one that is over, if any."""
        return Several.testany(requests, status)[:2]

    @classmethod
    def waitsome(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Wait until at least one is over; return positions and objects of all that are."""
        over = _await_some(requests, "Waitsome")
        if not over:
            return None, None
        return over, _collect_each(requests, over, statuses)

    @classmethod
    def Waitsome(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[int] | None:
        """Wait until at least one is over; return the positions of all that are."""
        return Several.waitsome(requests, statuses)[0]

    @classmethod
    def testsome(
        cls, requests: Sequence[Request], statuses: list[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Return positions and objects of all that are over."""
        over = _look_at(requests)
        if over is None:
            return None, None
        return over, _collect_each(requests, over, statuses)

    @classmethod
    def Testsome(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[int] | None:
        """Return the positions of all that are over."""
        return Several.testsome(requests, statuses)[0]

    @classmethod
    def get_status_all(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        """Return whether all are over, and leave them as they are."""
        lent = zip(requests, _lend(statuses, len(requests)), strict=False)
        over = [request.Get_status(status) for request, status in lent]  # all: each fills its status
        return all(over)

    @classmethod
    def get_status_any(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        """Return (position, flag) of one that is over, and leave it as it is."""
        over = _look_at(requests)
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
        """Return the positions of all that are over, and leave them as they are."""
        over = _look_at(requests)
        lent = zip(over or (), _lend(statuses, len(over or ())), strict=False)
        for index, status in lent:
            requests[index].Get_status(status)
        return over

    Get_status_all, Get_status_any, Get_status_some = get_status_all, get_status_any, get_status_some


def _check(requests: Sequence[Request]) -> None:
    """Refuse what is no list of requests, before anything is done to one of them."""
    for place, request in enumerate(requests):
        if not isinstance(request, Several):
            raise SpecTypeError(
                f"item {place} of the requests is of type {type(request).__name__}: no request"
            )


def _take(request: Request, status: Status | None) -> Any:
    """Collect one that is over."""
    return request._collect(status)


def _finish(request: Request, status: Status | None) -> Any:
    """Wait for one, whatever a program's own class makes of `wait`."""
    return request._finish(status)


def fill(status: Status, source: int, tag: int, nbytes: int) -> None:
    """Write what was received into a status."""
    status.source, status.tag, status.error = source, tag, 0
    status.nbytes, status.cancelled = nbytes, False


def fill_empty(status: Status | None) -> None:
    """Write into a status what an inactive request gives."""
    if status is not None:
        fill(status, ANY_SOURCE, ANY_TAG, 0)


def _lend(statuses: Sequence[Status] | None, count: int) -> Sequence[Status | None]:
    """Return a status for each request; a list that is too short is extended, as mpi4py does."""
    if statuses is None:
        return [None] * count
    if isinstance(statuses, tuple):
        return [*statuses, *[None] * (count - len(statuses))]
    assert isinstance(statuses, list)
    statuses.extend(Status() for _ in range(count - len(statuses)))
    return statuses


def look(world: World, *requests: Request) -> float:
    """Observe; return the time of the look. The caller charges for it once it has looked.

    Raises `Revoked` if one of the requests was open when its communicator was revoked.
    """
    world.kernel.observe()
    if world.revoked:
        for request in requests:
            request._check_revoked()
    return world.kernel.current.clock


def done_now(world: World, *requests: Request, every: bool = False) -> list[int]:
    """Observe; return the positions of the requests that are over.

    The kernel is told of a look in vain: none is over (or not `every` one), and of no other the end is known.
    """
    now_s = look(world, *requests)
    completions = [request._completion for request in requests if request._completion is not None]
    done = finished([request._completion for request in requests], now_s)
    known = sum(each.finish_s is not None for each in completions)
    if known == len(done) < len(completions) and (every or not done):
        world.kernel.fruitless()
    world.charge_poll()
    return done


def _look_at(requests: Sequence[Request]) -> list[int] | None:
    """Return the positions of the requests that are over; None if none is active."""
    _check(requests)
    world = next((request._world for request in requests if request._completion is not None), None)
    if world is None:
        return None
    return done_now(world, *requests)


def _await_some(requests: Sequence[Request], operation: str) -> list[int]:
    _check(requests)
    active = [request for request in requests if request._completion is not None]
    if not active:
        return []
    if active[0]._world.revoked:
        for request in active:
            request._check_revoked()
    parts = [request._waiting for request in active if request._waiting is not None]
    waiting = WaitingForAny(operation, parts)
    return await_any(active[0]._world, [request._completion for request in requests], waiting)


def _collect_each(requests: Sequence[Request], over: list[int], statuses: list[Status] | None) -> list[Any]:
    chosen = [requests[index] for index in over]
    return collect_all(chosen, _lend(statuses, len(over)), _take)
