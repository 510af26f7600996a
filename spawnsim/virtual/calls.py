"""The calls of the virtual MPI, for those who watch them: the costs of computing between calls, the timeline.

While a run is watched every call is wrapped, and the watchers of the calling rank's world are asked to make it. A run
that nobody watches is not touched. This room knows which functions are calls; it must not know what they do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from spawnsim.virtual.comm.calling import CallingComm
from spawnsim.virtual.mpi import CLASSES
from spawnsim.virtual.patching import Patches, Put
from spawnsim.virtual.tasks import current_task

# Calls that cost no computing: questions about handles, and the house's own doors.
FREE = (
    "Get_", "Set_", "Is_", "Compare", "py2f", "f2py", "fromhandle", "fromint", "toint", "Create_errhandler",
    "Create_keyval", "Free_keyval", "Delete_attr", "Call_errhandler", "enter", "called", "over", "start", "prepare",
)  # fmt: skip
Watcher = Callable[[str, Any, Callable[[], Any]], Any]
"""Makes a call, given its name, the object whose method it is, and what makes it; returns what that returns."""


def _calls() -> Iterator[tuple[type, str, Any]]:
    """Yield class, name and function of all calls: of the virtual MPI's classes, and those that they are made of."""
    for owner in dict.fromkeys(each for cls in CLASSES for each in cls.__mro__):
        if owner.__module__.startswith("spawnsim.virtual") and owner is not CallingComm:
            for name, raw in list(vars(owner).items()):
                function = isinstance(raw, (classmethod, FunctionType))
                if function and not name.startswith("_") and not name.startswith(FREE):
                    yield owner, name, raw


def watched(name: str, raw: Any) -> Any:
    """Return a call that is made by the watchers of the calling rank's world, the first one outermost."""
    if isinstance(raw, classmethod):
        return classmethod(watched(name, raw.__func__))

    @functools.wraps(raw)
    def watching(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        call = functools.partial(raw, *args, **kwargs)
        for watcher in reversed(task.kernel.owner.watchers if task is not None else ()):
            call = functools.partial(watcher, name, args[0] if args else None, call)
        return call()

    return watching


def _install(put: Put) -> None:
    for owner, name, raw in _calls():
        put(owner, name, watched(name, raw))


being_watched = Patches(_install).in_place
