"""Waiting for several requests at once, and the registry that holds all open ones of a rank.

Knows requests by four things: `_open`, `advance()`, `_take(status)` and their home's clock and wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from spawnsim.comm.failures import ERR_IN_STATUS, CallError

Statuses = list[Any] | None


def limit(requests: Sequence[Any]) -> Callable[[], float]:
    """Return a function that says how many seconds a wait for all of these still has."""
    if not requests:
        return lambda: 0.0
    end = time.perf_counter() + requests[0]._home.clock.limit_s()
    return lambda: max(0.0, end - time.perf_counter())


def take_all(requests: Sequence[Any], statuses: Statuses) -> None:
    """Make all null; a usage error of one of several is ERR_IN_STATUS, as in MPI, the world's errors are themselves."""
    given = [*(statuses or []), *[None] * len(requests)]
    errors = [request._take(status, raising=False) for request, status in zip(requests, given, strict=False)]
    first = next((error for error in errors if error is not None), None)
    if isinstance(first, CallError):
        raise CallError(ERR_IN_STATUS, f"one of {len(requests)} requests failed: {first}") from first
    if first is not None:
        raise first


def done(requests: Sequence[Any], *, first: bool) -> list[int]:
    """Return the indices of open requests that are complete now, the first one or all."""
    found: list[int] = []
    for index, request in enumerate(requests):
        if request._open and request.advance():
            found.append(index)
            if first:
                break
    return found


def taken(requests: Sequence[Any], found: list[int], statuses: Statuses) -> list[int]:
    """Make requests that are complete null, filling statuses in order; return their indices."""
    for index, status in zip(found, [*(statuses or []), *[None] * len(found)], strict=False):
        requests[index]._take(status)
    return found


def some(requests: Sequence[Any], operation: str, statuses: Statuses, *, first: bool) -> list[int] | None:
    """Wait until at least one open request is complete; return their indices, None when none is open."""
    waiting = next((request for request in requests if request._open), None)
    if waiting is None:
        return None
    home, found = waiting._home, done(requests, first=first)
    limit_s = home.clock.limit_s()

    def look() -> bool:
        found.extend(done(requests, first=first))
        return bool(found)

    if not found and not home.wait(look, limit_s, (operation, -1, waiting._what[2])):
        raise waiting._timeout(operation, limit_s)
    return taken(requests, found, statuses)


class Registry:
    """All requests of a rank that are not known to be complete."""

    def __init__(self) -> None:
        self._held: deque[Any] = deque()
        self.append = self._held.append

    def sweep(self) -> None:
        """Look at two requests: one more than an operation adds, so the registry holds pending ones only."""
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
        """Return the requests that are held now."""
        return list(self._held)
