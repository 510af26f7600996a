"""Several requests of which one fails: MPI's `ERR_IN_STATUS`, and what each status then says.

This room knows completions and statuses; it must not know what a request delivers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from spawnsim.comm.failures import ERR_IN_STATUS, ERR_PENDING, CallError
from spawnsim.comm.status import Status

if TYPE_CHECKING:
    from spawnsim.virtual.requests import Request


def collect_all(
    requests: Sequence[Request], statuses: Sequence[Status | None], collect: Callable[..., Any]
) -> list[Any]:
    """Return `collect(request, status)` of each request.

    When one fails, the others that are over are collected, the rest stay as they are (`ERR_PENDING`); then the error
    of the first is raised as `ERR_IN_STATUS`. It keeps its class: what was a `TruncationError` still is.
    """
    found, failed = [], None
    for request, status in zip(requests, statuses, strict=False):
        if failed is not None and _pending(request):
            _mark(status, ERR_PENDING)
            continue
        try:
            found.append(collect(request, status))
        except CallError as error:
            _mark(status, error.Get_error_code())
            failed = failed or error
    if failed is not None:
        raise type(failed)(ERR_IN_STATUS, f"a request of {len(requests)} failed: {failed}") from failed
    return found


def _pending(request: Request) -> bool:
    completion = request._completion
    if completion is None:
        return False
    return completion.finish_s is None or completion.finish_s > request._world.kernel.current.clock


def _mark(status: Status | None, error: int) -> None:
    if status is not None:
        status.error = error
