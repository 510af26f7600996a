"""Requests of real ranks: they complete by polling, wait with a deadline, and own their buffers until complete.

*Complete* and *null* differ: any poll of the rank may complete a request, but only the program's own wait or test makes
it null, fills the status and raises its error. A real rank waits by `wait_until`: it spins (a message that is about to
arrive then costs no context switch), then yields the core (ranks may outnumber cores), and then sleeps for about 2 % of
the time waited so far, at most `NAP_S`, so that a long wait leaves its core to computing ranks. The registry holds all
requests of a rank that are not known to be complete.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, Self

from spawnsim.comm.constants import UNDEFINED
from spawnsim.comm.failures import ERR_IN_STATUS, ERR_REQUEST, CallError
from spawnsim.errors import SpawnsimError, Timeout

SPINS = 200  # tests before the first clock reading: about 60 us
YIELD_S = 2e-3  # afterwards, for this long, yield the core between two tests
NAP_S = 3e-4  # longest sleep between two tests
NAP_SHARE = 0.02  # a nap is at most this share of the wait so far, which limits the added latency

_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))


def wait_until(done: Callable[[], bool], limit_s: float) -> bool:
    """Call `done` until it returns true; return False if `limit_s` seconds pass before that."""
    for _ in range(SPINS):
        if done():
            return True
    begin = time.perf_counter()
    while not done():
        waited = time.perf_counter() - begin
        if waited > limit_s:
            return done()
        if waited < YIELD_S:
            _yield_core()
        else:
            time.sleep(min(NAP_S, NAP_SHARE * waited))
    return True


Statuses = list[Any] | None


def _time_left(requests: Sequence[Any]) -> Callable[[], float]:
    if not requests:
        return lambda: 0.0
    end = time.perf_counter() + requests[0]._runtime.clock.limit_s()
    return lambda: max(0.0, end - time.perf_counter())


def _report_all(requests: Sequence[Any], statuses: Statuses) -> None:
    """Make all requests null; raise ERR_IN_STATUS for a usage error, as in MPI, and any other error unchanged."""
    given = [*(statuses or []), *[None] * len(requests)]
    errors = [request._take(status, raising=False) for request, status in zip(requests, given, strict=False)]
    first = next((error for error in errors if error is not None), None)
    if isinstance(first, CallError):
        raise CallError(ERR_IN_STATUS, f"one of {len(requests)} requests failed: {first}") from first
    if first is not None:
        raise first


def _find_complete(requests: Sequence[Any], *, first: bool) -> list[int]:
    """Return the indices of open requests that are complete now, the first one or all."""
    found: list[int] = []
    for index, request in enumerate(requests):
        if request._open and request.advance():
            found.append(index)
            if first:
                break
    return found


def _report_found(requests: Sequence[Any], found: list[int], statuses: Statuses) -> list[int]:
    """Make complete requests null and fill statuses in order; return the indices."""
    for index, status in zip(found, [*(statuses or []), *[None] * len(found)], strict=False):
        requests[index]._take(status)
    return found


def _wait_for_some(
    requests: Sequence[Any], operation: str, statuses: Statuses, *, first: bool
) -> list[int] | None:
    """Wait until at least one open request is complete; return the indices, or None if no request is open."""
    waiting = next((request for request in requests if request._open), None)
    if waiting is None:
        return None
    runtime, found = waiting._runtime, _find_complete(requests, first=first)
    limit_s = runtime.clock.limit_s()

    def poll() -> bool:
        found.extend(_find_complete(requests, first=first))
        return bool(found)

    if not found and not runtime.wait(poll, limit_s, (operation, -1, waiting._what[2])):
        raise waiting._timeout(operation, limit_s)
    return _report_found(requests, found, statuses)


class RequestRegistry:
    """All requests of a rank that are not known to be complete."""

    def __init__(self) -> None:
        self._held: deque[Any] = deque()
        self.append = self._held.append

    def sweep(self) -> None:
        """Test two requests, which keeps the registry short at a constant cost per operation."""
        # Each operation adds one request and tests two, so complete requests leave faster than new ones arrive. Testing
        # all would cost a policy with 1,000 open sends 1,000 tests per message.
        held = self._held
        for _ in range(min(2, len(held))):
            try:
                request = held.popleft()
            except IndexError:  # another thread took the last one
                return
            if not request.advance():
                held.append(request)

    def __len__(self) -> int:
        return len(self._held)

    def held(self) -> list[Any]:
        return list(self._held)


class RealRequest:
    """A request with mpi4py's method names. `RealRequest()` is null; `RealRequest(request)` returns `request`."""

    __slots__ = (
        "__weakref__",
        "_complete",
        "_error",
        "_lock",
        "_open",
        "_persistent",
        "_runtime",
        "_what",
        "value",
    )
    _runtime: Any
    _what: tuple[str, int, Any]
    _error: SpawnsimError | None
    value: Any

    def __new__(cls, request: RealRequest | None = None) -> Self:
        if request is not None:
            return request  # type: ignore[return-value]
        self = super().__new__(cls)
        self._complete, self._open, self._persistent = True, False, False
        self._error = self.value = None
        return self

    def begin(self, runtime: Any, what: tuple[str, int, Any]) -> None:
        """Open the request: `what` is (operation, peer or -1, communicator)."""
        self._runtime, self._what = runtime, what
        self._lock = Lock()  # one thread at a time tests a request
        self._complete, self._open = False, True
        runtime.registry.append(self)

    # --------------------------------------------------------------------------------------------- completion
    def _try(self) -> bool:
        return True

    def _describe(self, status: Any) -> None:
        """Fill the caller's status with source, tag and size of the received message."""

    def advance(self) -> bool:
        """Test once; return whether the request is complete. Any thread may call it; errors are kept for the owner."""
        # MPI does not allow two threads to test one request at the same time, but the watchdog, a background task and
        # the program may all poll. A thread that finds the lock taken returns: the holder is already testing.
        if self._complete or not self._lock.acquire(blocking=False):
            return self._complete
        try:
            if not self.complete():  # another thread may have completed it since
                self._complete = self._try()
        except SpawnsimError as error:
            self._error, self._complete = error, True
        finally:
            self._lock.release()
        return self._complete

    def complete(self) -> bool:
        return self._complete

    def _take(self, status: Any = None, *, raising: bool = True) -> SpawnsimError | None:
        """Make a complete request null, fill the status, and raise the request's error."""
        error = self._error
        if status is not None:
            _clear_status(status)
            if self._open:
                self._describe(status)
                if isinstance(error, CallError):
                    status.Set_error(error.Get_error_class())
        self._open, self._error = False, None
        if error is not None and raising:
            raise error
        return error

    def _text(self) -> str:
        operation, peer, comm = self._what
        with_whom = "" if peer < 0 else f" with rank {peer}"
        return f"rank {comm.rank} of {comm.label}: {operation}{with_whom}"

    def _await(self, operation: str, limit_s: float | None = None) -> None:
        if self.advance():
            return
        limit_s = self._runtime.clock.limit_s() if limit_s is None else limit_s
        if not self._runtime.wait(self.advance, limit_s, (self._what[0], -1, self._what[2]), self._what[1]):
            raise self._timeout(operation, limit_s)

    def _timeout(self, operation: str, limit_s: float) -> Timeout:
        peers = [self._what[1]] if self._what[1] >= 0 else []
        when = self._runtime.clock.met(limit_s)
        text = f"{self._text()}: {operation} {when}; the request stays active and keeps its buffer"
        return Timeout(peers, operation, -1, text)

    # --------------------------------------------------------------------------------------- mpi4py's methods
    def Wait(self, status: Any = None) -> bool:
        self._await("Wait")
        self._take(status)
        return True

    def Test(self, status: Any = None) -> bool:
        if self.advance():
            self._take(status)
            return True
        self._runtime.poll()
        return False

    def wait(self, status: Any = None) -> Any:
        self.Wait(status)
        return self.value

    def test(self, status: Any = None) -> tuple[bool, Any]:
        done = self.Test(status)
        return done, self.value if done else None

    def Get_status(self, status: Any = None) -> bool:
        done = self.advance()
        if done and status is not None:
            _clear_status(status)
            self._describe(status)
        if not done:
            self._runtime.poll()
        return done

    get_status = Get_status

    def Cancel(self) -> None:
        self._refuse_null("Cancel")

    def _refuse_null(self, operation: str) -> None:
        if not self:
            raise CallError(ERR_REQUEST, f"{operation} of a null request: it is complete, or was freed")

    def cancel(self) -> None:
        self.Cancel()

    def Free(self) -> None:
        """Release the handle; the registry keeps request and buffer until the request is complete."""
        self._refuse_null("Free")
        self._open = self._persistent = False

    free = Free

    def __bool__(self) -> bool:
        return self._open or self._persistent

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RealRequest):
            return NotImplemented
        return self is other or not (self or other)

    def __hash__(self) -> int:
        return id(self)

    # ------------------------------------------------------------------------------------ on several requests
    @classmethod
    def Waitall(cls, requests: Sequence[Any], statuses: Statuses = None) -> bool:
        waiting = [request for request in requests if request._open]
        left = _time_left(waiting)
        for request in waiting:
            request._await("Waitall", left())
        _report_all(requests, statuses)
        return True

    @classmethod
    def waitall(cls, requests: Sequence[Any], statuses: Statuses = None) -> list[Any]:
        cls.Waitall(requests, statuses)
        return [request.value for request in requests]

    @classmethod
    def Testall(cls, requests: Sequence[Any], statuses: Statuses = None) -> bool:
        done: bool = sum(request.advance() for request in requests) == len(requests)
        if done:
            _report_all(requests, statuses)
        elif requests:
            next(request for request in requests if request._open)._runtime.poll()
        return done

    @classmethod
    def testall(cls, requests: Sequence[Any], statuses: Statuses = None) -> tuple[bool, list[Any] | None]:
        done = cls.Testall(requests, statuses)
        return done, [request.value for request in requests] if done else None

    @classmethod
    def Waitany(cls, requests: Sequence[Any], status: Any = None) -> int:
        return (_wait_for_some(requests, "Waitany", [status], first=True) or [UNDEFINED])[0]

    @classmethod
    def waitany(cls, requests: Sequence[Any], status: Any = None) -> tuple[int, Any]:
        index = cls.Waitany(requests, status)
        return index, requests[index].value if index >= 0 else None

    @classmethod
    def Testany(cls, requests: Sequence[Any], status: Any = None) -> tuple[int, bool]:
        found = _find_complete(requests, first=True)
        if found:
            requests[found[0]]._take(status)
            return found[0], True
        return UNDEFINED, not any(request._open for request in requests)

    @classmethod
    def testany(cls, requests: Sequence[Any], status: Any = None) -> tuple[int, bool, Any]:
        index, done = cls.Testany(requests, status)
        return index, done, requests[index].value if index >= 0 else None

    @classmethod
    def Waitsome(cls, requests: Sequence[Any], statuses: Statuses = None) -> list[int] | None:
        return _wait_for_some(requests, "Waitsome", statuses, first=False)

    @classmethod
    def waitsome(
        cls, requests: Sequence[Any], statuses: Statuses = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        found = cls.Waitsome(requests, statuses)
        return found, None if found is None else [requests[index].value for index in found]

    @classmethod
    def Testsome(cls, requests: Sequence[Any], statuses: Statuses = None) -> list[int] | None:
        if not any(request._open for request in requests):
            return None
        return _report_found(requests, _find_complete(requests, first=False), statuses)

    @classmethod
    def testsome(
        cls, requests: Sequence[Any], statuses: Statuses = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        found = cls.Testsome(requests, statuses)
        return found, None if found is None else [requests[index].value for index in found]


def _clear_status(status: Any) -> None:
    status.__init__()


def late_receive(
    comm: Any, operation: str, source: int, tag: int, *, left: tuple[int, int] | None
) -> Timeout:
    """Return the error of a receive or probe that exceeded its deadline.

    Args:
        comm: the communicator.
        operation: the call's name.
        source: as in the call.
        tag: as in the call.
        left: source and tag of an arrived message that the call does not match; most likely one of the two is wrong.
    """
    clock = comm.runtime.clock
    who = f"from {'any rank' if source < 0 else f'rank {source}'}, {'any tag' if tag < 0 else f'tag {tag}'},"
    other = "" if left is None else f"; a message from rank {left[0]} with tag {left[1]} is not received"
    text = f"rank {comm.rank} of {comm.label}: {operation} {who} {clock.met(clock.limit_s())}{other}"
    return Timeout([source] if source >= 0 else [], operation, -1, text)
