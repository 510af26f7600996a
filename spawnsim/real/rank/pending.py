"""Requests of the real building: complete by polling, wait with a deadline, and own what they need until complete.

*Complete* and *null* are two things: any poll of the rank may complete a request, and only the program's own wait or
test makes it null, fills the status and raises what went wrong. Knows the rank's home (clock, wait, poll); knows
neither MPI nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, Self

from spawnsim.comm.constants import UNDEFINED
from spawnsim.comm.failures import ERR_REQUEST, CallError
from spawnsim.errors import SpawnsimError, Timeout
from spawnsim.real.rank import several

Statuses = list[Any] | None


class Pending:
    """A request under mpi4py's names. `Pending()` is null, `Pending(request)` the request itself."""

    __slots__ = (
        "__weakref__",
        "_complete",
        "_error",
        "_home",
        "_lock",
        "_open",
        "_persistent",
        "_what",
        "value",
    )
    _home: Any
    _what: tuple[str, int, Any]
    _error: SpawnsimError | None
    value: Any

    def __new__(cls, request: Pending | None = None) -> Self:
        if request is not None:
            return request  # type: ignore[return-value]
        self = super().__new__(cls)
        self._complete, self._open, self._persistent = True, False, False
        self._error = self.value = None
        return self

    def begin(self, home: Any, what: tuple[str, int, Any]) -> None:
        """Open the request: `what` is (operation, peer or -1, communicator)."""
        self._home, self._what = home, what
        self._lock = Lock()  # one thread at a time tests a request
        self._complete, self._open = False, True
        home.registry.append(self)

    # --------------------------------------------------------------------------------------------- completion
    def _try(self) -> bool:
        """Test once: what each building does its own way."""
        return True

    def _describe(self, status: Any) -> None:
        """Fill the caller's status with what was received."""

    def advance(self) -> bool:
        """Test once; return whether the request is complete. Any thread may call it; errors wait for the owner."""
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
        """Return whether the request is known to be complete."""
        return self._complete

    def _take(self, status: Any = None, *, raising: bool = True) -> SpawnsimError | None:
        """Make a complete request null and report: fill the status, raise its error."""
        error = self._error
        if status is not None:
            _clear(status)
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
        limit_s = self._home.clock.limit_s() if limit_s is None else limit_s
        if not self._home.wait(self.advance, limit_s, (self._what[0], -1, self._what[2]), self._what[1]):
            raise self._timeout(operation, limit_s)

    def _timeout(self, operation: str, limit_s: float) -> Timeout:
        peers = [self._what[1]] if self._what[1] >= 0 else []
        when = f"met its deadline of {limit_s:g} s at {self._home.clock.now():.3f} s"
        text = f"{self._text()}: {operation} {when}; the request goes on and keeps its buffer"
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
        self._home.poll()
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
            _clear(status)
            self._describe(status)
        if not done:
            self._home.poll()
        return done

    get_status = Get_status

    def Cancel(self) -> None:
        """Ask for the end without a result."""
        self._refuse_null("Cancel")

    def _refuse_null(self, operation: str) -> None:
        if not self:
            raise CallError(ERR_REQUEST, f"{operation} of a null request: it is complete, or was freed")

    def cancel(self) -> None:
        """Ask for the end without a result."""
        self.Cancel()

    def Free(self) -> None:
        """Give up the handle; the registry keeps request and buffer until complete."""
        self._refuse_null("Free")
        self._open = self._persistent = False

    free = Free

    def __bool__(self) -> bool:
        return self._open or self._persistent

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pending):
            return NotImplemented
        return self is other or not (self or other)

    def __hash__(self) -> int:
        return id(self)

    # ------------------------------------------------------------------------------------ on several requests
    @classmethod
    def Waitall(cls, requests: Sequence[Any], statuses: Statuses = None) -> bool:
        waiting = [request for request in requests if request._open]
        left = several.limit(waiting)
        for request in waiting:
            request._await("Waitall", left())
        several.take_all(requests, statuses)
        return True

    @classmethod
    def waitall(cls, requests: Sequence[Any], statuses: Statuses = None) -> list[Any]:
        cls.Waitall(requests, statuses)
        return [request.value for request in requests]

    @classmethod
    def Testall(cls, requests: Sequence[Any], statuses: Statuses = None) -> bool:
        done: bool = sum(request.advance() for request in requests) == len(requests)
        if done:
            several.take_all(requests, statuses)
        elif requests:
            next(request for request in requests if request._open)._home.poll()
        return done

    @classmethod
    def testall(cls, requests: Sequence[Any], statuses: Statuses = None) -> tuple[bool, list[Any] | None]:
        done = cls.Testall(requests, statuses)
        return done, [request.value for request in requests] if done else None

    @classmethod
    def Waitany(cls, requests: Sequence[Any], status: Any = None) -> int:
        return (several.some(requests, "Waitany", [status], first=True) or [UNDEFINED])[0]

    @classmethod
    def waitany(cls, requests: Sequence[Any], status: Any = None) -> tuple[int, Any]:
        index = cls.Waitany(requests, status)
        return index, requests[index].value if index >= 0 else None

    @classmethod
    def Testany(cls, requests: Sequence[Any], status: Any = None) -> tuple[int, bool]:
        found = several.done(requests, first=True)
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
        return several.some(requests, "Waitsome", statuses, first=False)

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
        return several.taken(requests, several.done(requests, first=False), statuses)

    @classmethod
    def testsome(
        cls, requests: Sequence[Any], statuses: Statuses = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        found = cls.Testsome(requests, statuses)
        return found, None if found is None else [requests[index].value for index in found]


def _clear(status: Any) -> None:
    status.__init__()
