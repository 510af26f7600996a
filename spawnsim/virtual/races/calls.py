"""Shows the detector the one-sided calls: their memory, their completion, and the locks of each rank.

The functions of `mpi.rma` and `mpi.rma_service` are wrapped for the time of a run, so other runs pay nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np

from spawnsim.comm.buffers import Buffer, as_buffer
from spawnsim.comm.memory import flat
from spawnsim.virtual.engine.kernel import Kernel, Task, current_task
from spawnsim.virtual.interpreter import Patches, Put
from spawnsim.virtual.mpi.context import Member
from spawnsim.virtual.mpi.requests import Request
from spawnsim.virtual.mpi.rma import Accesses, Epochs
from spawnsim.virtual.mpi.rma_service import Target, WindowState
from spawnsim.virtual.mpi.windows import Win

Hook = Callable[..., None]


def _hooked(raw: Callable[..., Any], *, before: Hook | None = None, after: Hook | None = None) -> Any:
    """Return a function that also calls hooks with the detector, its task, and the arguments (after: the result)."""

    @functools.wraps(raw)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        races = None if task is None else task.kernel.owner.races
        if races is None:
            return raw(*args, **kwargs)
        if before is not None:
            before(races, task, *args, **kwargs)
        result = raw(*args, **kwargs)
        if after is not None:
            after(races, task, result, *args, **kwargs)
        return result

    return hooked


def _on_service(raw: Callable[..., Any], *, before: Hook | None = None, after: Hook | None = None) -> Any:
    """Return the same for a function that no rank calls: its second argument, or itself, leads to the world."""

    @functools.wraps(raw)
    def hooked(self: Any, given: Any, *args: Any) -> Any:
        world = self.world if isinstance(self, WindowState) else self.rank.kernel.owner
        races = world.races
        if races is not None and before is not None:
            before(races, self, given)
        result = raw(self, given, *args)
        if races is not None and after is not None:
            after(races, self, given)
        return result

    return hooked


def _taken(races: Any, _task: Task, *given: Any) -> None:
    _, _, begun = given
    races.complete_here(begun[1])


def _flushed(races: Any, task: Task, *given: Any) -> None:
    _, window, *rank, _ = given
    if not races.calls.get(task, ("",))[0].startswith("Flush_local"):
        races.complete_there(window._epoch, rank[0] if rank else None)


def _received(races: Any, task: Task, request: Any, *given: Any) -> None:
    member, _, _, call, *into = given
    if into and isinstance(into[0], (np.ndarray, Buffer)) and request._completion is not None:
        races.starts(member._rank.id, request._completion, as_buffer(into[0]), call=call, writes=True)


def _sends(races: Any, task: Task, request: Any, *given: Any, operation: str, buf: Any = None) -> None:
    if isinstance(buf, np.ndarray) and request._completion is not None:
        races.starts(given[0]._rank.id, request._completion, as_buffer(buf), call=operation, writes=False)


ROOTS = {
    "Ibcast": 1,
    "Igather": 2,
    "Igatherv": 2,
    "Iscatter": 2,
    "Iscatterv": 2,
    "Ireduce": 3,
}  # places of `root`
STARTED = frozenset(
    (
        *ROOTS, "Iallgather", "Iallgatherv", "Ialltoall", "Ialltoallv", "Iallreduce", "Ireduce_scatter",
        "Ireduce_scatter_block", "Iscan", "Iexscan",
    )
)  # fmt: skip
"""Collectives that use their buffers until their requests are complete."""


def buffers_of(name: str, call: Any) -> list[tuple[Any, bool]]:
    """Return the arrays that a started collective uses on this rank, and whether it writes to them."""
    while isinstance(call.func, MethodType):  # another watcher makes the call
        call = call.args[-1]
    subject, *given = call.args
    place = ROOTS.get(name)
    root = 0 if place is None else given[place] if len(given) > place else call.keywords.get("root", 0)
    here = place is None or subject.Get_rank() == root
    if name == "Ibcast":
        found = [(given[0] if given else call.keywords.get("buf"), not here)]
    else:
        names = [*given[:2], *(call.keywords.get(each) for each in ("sendbuf", "recvbuf")[len(given) :])]
        found = [(names[0], False), (names[1], True)]
        if not here:  # the root alone receives, or sends
            found = found[1:] if name.startswith("Iscatter") else found[:1]
    arrays = [
        (spec[0] if isinstance(spec, (list, tuple)) and spec else spec, writes) for spec, writes in found
    ]
    return [(spec, writes) for spec, writes in arrays if isinstance(spec, np.ndarray) and spec.size]


def _collected(races: Any, _task: Task, request: Any, *_given: Any) -> None:
    if request._completion is not None:
        races.ends(request._completion)


def _opened(races: Any, _task: Task, window: Any, *_given: Any, **_how: Any) -> None:
    races.opened(window)


def _attached(races: Any, _task: Task, *given: Any) -> None:
    _, window, memory = given
    races.attached(window, flat(memory))


def _freed(races: Any, _task: Task, *given: Any) -> None:
    races.closed(given[1])


def _unlocked(races: Any, _task: Task, *given: Any) -> None:
    windows, origin, place = given
    races.unlocks(origin.id, windows.targets[place])


def _served(races: Any, _windows: Any, access: Any) -> None:
    races.served(access, access.connection.target)


def _admitted(races: Any, target: Any, access: Any) -> None:
    if access.lock:
        races.granted(access.connection.origin.id, target, access.lock)


def _released(races: Any, target: Any, who: int) -> None:
    races.released(who, target)


def _leaving(races: Any, _task: Task, *given: Any) -> None:
    races.leaves(given[1])


def _beginning(raw: Callable[..., Any]) -> Any:
    """Return `Accesses._begin` for runs that look for races."""

    @functools.wraps(raw)
    def beginning(window: Any, rank: int, call: str, *given: Any, **more: Any) -> Any:
        races = window._windows.world.races
        if races is not None:
            races.begin(window, rank, call, more["use"])
        return raw(window, rank, call, *given, **more)

    return beginning


def _requesting(raw: Callable[..., Any]) -> Any:
    """Return `WindowState.request` for runs that look for races: it belongs to the call that begins."""

    @functools.wraps(raw)
    def requesting(windows: Any, origin: Any, rank: int, access: Any) -> Any:
        races = windows.world.races
        if races is not None and races.issuing is not None:
            races.sent[access], races.issuing = races.issuing, None
        return raw(windows, origin, rank, access)

    return requesting


def _notice(put: Put) -> None:
    put(Kernel, "_leave", _hooked(Kernel._leave, before=_leaving))
    put(Accesses, "_begin", _beginning(Accesses._begin))
    put(WindowState, "request", _requesting(WindowState.request))
    put(Epochs, "_take", _hooked(Epochs._take, after=_taken))
    put(Epochs, "_flush", _hooked(Epochs._flush, after=_flushed))
    put(Epochs, "_flush_all", _hooked(Epochs._flush_all, after=_flushed))
    put(Member, "_irecv", _hooked(Member._irecv, after=_received))
    put(Member, "_isend", _hooked(Member._isend, after=_sends))
    put(Request, "_collect", _hooked(Request._collect, before=_collected))
    put(Request, "Free", _hooked(Request.Free, before=_collected))
    put(Win, "_open", classmethod(_hooked(Win._open.__func__, after=_opened)))  # type: ignore[attr-defined]
    put(Win, "Attach", _hooked(Win.Attach, after=_attached))
    put(Win, "Free", _hooked(Win.Free, after=_freed))
    put(WindowState, "release", _hooked(WindowState.release, before=_unlocked))
    put(WindowState, "serve", _on_service(WindowState.serve, before=None, after=_served))
    put(Target, "_admit", _on_service(Target._admit, before=_admitted))
    put(Target, "release", _on_service(Target.release, before=_released))


noticing = Patches(_notice).in_place
