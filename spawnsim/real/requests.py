"""Requests that own their buffers, and waits with a deadline.

A dropped `Isend` handle corrupts messages on both MPIs, silently. Here every request stands in its rank's registry,
with its buffer, until it is complete; polls sweep the registry. Knows mpi4py's requests and the rank's home; knows no
communicator's methods.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from spawnsim.errors import Timeout
from spawnsim.real.waiting import wait_until
from spawnsim.real.words import failure, rank_back

if TYPE_CHECKING:
    from spawnsim.real.home import Home


class MPIRequest:
    """A request: mpi4py's methods, with deadlines. Buffers are held by the raw request."""

    __slots__ = ("__weakref__", "_complete", "_home", "_lock", "_raw", "_status", "_what", "value")

    def __init__(self, raw: MPI.Request, home: Home, what: tuple[str, int, Any]) -> None:
        self._raw, self._home, self._what = raw, home, what
        self._lock = Lock()  # one thread at a time tests a request
        self._status = MPI.Status()
        self._complete = False
        self.value: Any = None  # what an object receive has brought
        home.registry.append(self)

    # --------------------------------------------------------------------------------------------- completion
    def advance(self) -> bool:
        """Test once; return whether the request is complete. Any thread may call it."""
        if self._complete or not self._lock.acquire(blocking=False):
            return self._complete
        try:
            if self:  # another thread may have completed it since
                self._complete = self._try()
        finally:
            self._lock.release()
        return self._complete

    def _try(self) -> bool:
        try:
            return self._raw.Test(self._status)
        except MPI.Exception as error:
            self._complete = True
            raise failure(error, self._what[2]._raw, self._text()) from None

    def _text(self) -> str:
        operation, peer, comm = self._what
        with_whom = "" if peer < 0 else f" with rank {peer}"
        return f"rank {comm.rank} of {comm.label}: {operation}{with_whom}"

    def _wait(self, operation: str, limit_s: float | None = None) -> None:
        if self.advance():
            return
        home = self._home
        limit_s = home.clock.limit_s() if limit_s is None else limit_s
        if not home.wait(self.advance, limit_s, (self._what[0], -1, self._what[2])):
            raise self._timeout(operation, limit_s)

    def _timeout(self, operation: str, limit_s: float) -> Timeout:
        peers = [self._what[1]] if self._what[1] >= 0 else []
        text = (
            f"{self._text()}: {operation} met its deadline of {limit_s:g} s at {self._home.clock.now():.3f} s"
        )
        return Timeout(peers, operation, -1, f"{text}; the request goes on and keeps its buffer")

    # --------------------------------------------------------------------------------------- mpi4py's methods
    def Wait(self, status: Any = None) -> bool:
        self._wait("Wait")
        fill(status, self._status)
        return True

    def Test(self, status: Any = None) -> bool:
        done = self.advance()
        if done:
            fill(status, self._status)
        else:
            self._home.poll()
        return done

    def wait(self, status: Any = None) -> Any:
        self.Wait(status)
        return self.value

    def test(self, status: Any = None) -> tuple[bool, Any]:
        done = self.Test(status)
        return done, self.value if done else None

    def Get_status(self, status: Any = None) -> bool:
        return self.Test(status)

    get_status = Get_status

    def Cancel(self) -> None:
        if not self._complete:
            self._raw.Cancel()

    cancel = Cancel

    def Free(self) -> None:
        """Give up the handle; the registry keeps request and buffer until complete."""

    def Start(self) -> None:
        """Start a persistent request."""
        self._raw.Start()  # type: ignore[attr-defined]
        self._complete = False
        self._home.registry.append(self)

    def __bool__(self) -> bool:
        return not self._complete

    # ------------------------------------------------------------------------------------ on several requests
    @classmethod
    def Waitall(cls, requests: Sequence[Any], statuses: list[Any] | None = None) -> bool:
        limit = _limit(requests)
        for request in requests:
            request._wait("Waitall", limit())
        _fill_all(requests, statuses)
        return True

    @classmethod
    def waitall(cls, requests: Sequence[Any], statuses: list[Any] | None = None) -> list[Any]:
        cls.Waitall(requests, statuses)
        return [request.value for request in requests]

    @classmethod
    def Testall(cls, requests: Sequence[Any], statuses: list[Any] | None = None) -> bool:
        done: bool = sum(request.advance() for request in requests) == len(requests)
        if done:
            _fill_all(requests, statuses)
        return done

    @classmethod
    def testall(
        cls, requests: Sequence[Any], statuses: list[Any] | None = None
    ) -> tuple[bool, list[Any] | None]:
        done = cls.Testall(requests, statuses)
        return done, [request.value for request in requests] if done else None

    @classmethod
    def Waitany(cls, requests: Sequence[Any], status: Any = None) -> int:
        return cls._some(requests, "Waitany", [status])[0]

    @classmethod
    def waitany(cls, requests: Sequence[Any], status: Any = None) -> tuple[int, Any]:
        index = cls.Waitany(requests, status)
        return index, requests[index].value if index >= 0 else None

    @classmethod
    def Testany(cls, requests: Sequence[Any], status: Any = None) -> tuple[int, bool]:
        index = next((i for i, r in enumerate(requests) if r and r.advance()), -1)
        if index < 0:
            return MPI.UNDEFINED, not any(requests)
        fill(status, requests[index]._status)
        return index, True

    @classmethod
    def testany(cls, requests: Sequence[Any], status: Any = None) -> tuple[int, bool, Any]:
        index, done = cls.Testany(requests, status)
        return index, done, requests[index].value if index >= 0 else None

    @classmethod
    def Waitsome(cls, requests: Sequence[Any], statuses: list[Any] | None = None) -> list[int] | None:
        return cls._some(requests, "Waitsome", statuses, every=True) if any(requests) else None

    @classmethod
    def Testsome(cls, requests: Sequence[Any], statuses: list[Any] | None = None) -> list[int] | None:
        if not any(requests):
            return None
        return [i for i, request in enumerate(requests) if request and request.advance()]

    @classmethod
    def _some(
        cls, requests: Sequence[Any], operation: str, statuses: list[Any] | None, *, every: bool = False
    ) -> list[int]:
        """Wait for at least one request that is open now; return the indices that are complete."""
        open_now = [i for i, request in enumerate(requests) if request]
        if not open_now:
            return [MPI.UNDEFINED]
        done: list[int] = []

        def look() -> bool:
            for index in open_now:
                if requests[index].advance():
                    done.append(index)
                    if not every:
                        return True
            return bool(done)

        first = requests[open_now[0]]
        limit_s = first._home.clock.limit_s()
        if not first._home.wait(look, limit_s, (operation, -1, first._what[2])):
            raise first._timeout(operation, limit_s)
        for status, index in zip(statuses or [], done, strict=False):
            fill(status, requests[index]._status)
        return done


def _limit(requests: Sequence[Any]) -> Callable[[], float]:
    """Return a function that says how many seconds a wait for all of these still has."""
    if not requests:
        return lambda: 0.0
    end = time.perf_counter() + requests[0]._home.clock.limit_s()
    return lambda: max(0.0, end - time.perf_counter())


def _fill_all(requests: Sequence[Any], statuses: list[Any] | None) -> None:
    for status, request in zip(statuses or [], requests, strict=False):
        fill(status, request._status)


def fill(status: Any, raw: MPI.Status) -> None:
    """Copy what a receive has found into the caller's status, spawnsim's or mpi4py's."""
    if status is None:
        return
    source, tag, nbytes = raw.Get_source(), raw.Get_tag(), raw.Get_count(MPI.BYTE)
    if isinstance(status, MPI.Status):
        status.Set_source(source)
        status.Set_tag(tag)
        status.Set_elements(MPI.BYTE, nbytes)
    else:
        status.fill(rank_back(source), tag, nbytes)
    status.Set_cancelled(raw.Is_cancelled())


class Registry:
    """All requests of a rank that are not known to be complete."""

    def __init__(self) -> None:
        self._open: deque[MPIRequest] = deque()
        self.append = self._open.append

    def sweep(self) -> None:
        """Look at two requests: one more than an operation adds, so the registry holds pending ones only."""
        held = self._open
        for _ in range(min(2, len(held))):
            try:
                request = held.popleft()
            except IndexError:  # another thread took the last one
                return
            if not request.advance():
                held.append(request)

    def __len__(self) -> int:
        return len(self._open)

    def drain(self, limit_s: float) -> int:
        """Sweep until all requests are complete, at most `limit_s` seconds; return how many are left."""

        def empty() -> bool:
            self.sweep()
            return not self._open

        wait_until(empty, limit_s)
        return len(self._open)


__all__ = ["MPIRequest", "Registry", "fill"]
