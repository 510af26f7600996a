"""What makes a virtual rank look like a process: its own `sys.argv`, modules and streams.

A rank's things are put in place when it comes to run, and taken away when another does. This room knows Python's
global state. It must not know messages.
"""

from __future__ import annotations

import atexit
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any

from spawnsim.virtual.kernel import Task, current_task
from spawnsim.virtual.programs.imports import OwnModules

ATTRIBUTES = (
    "argv",
    "path",
    "stdin",
    "stdout",
    "stderr",
    "excepthook",
    "displayhook",
)  # of sys, one each a rank


@dataclass(eq=False)
class Process:
    """What one rank has for itself."""

    attributes: dict[str, Any]
    modules: dict[str, ModuleType] = field(default_factory=dict)
    at_exit: list[Callable[[], Any]] = field(default_factory=list)


class Processes:
    """All ranks' processes; at most one is in place."""

    def __init__(self, own: OwnModules, attributes: dict[str, Any]) -> None:
        self.own = own
        self._attributes = attributes
        self._all: dict[int, Process] = {}
        self._here: Process | None = None

    def add(self, rank: int) -> None:
        """Add a rank, at the start of its program."""
        attributes = self._attributes | {
            "argv": list(self._attributes["argv"]), "path": list(self._attributes["path"]),
            "excepthook": sys.__excepthook__,
        }  # fmt: skip
        if rank:
            attributes["stdin"] = io.StringIO()  # as under mpiexec: rank 0 reads what is typed
        main = ModuleType("__main__")
        self._all[rank] = Process(attributes, {"__main__": main})

    def enter(self, task: Task) -> None:
        """Put the process of a task's rank in place."""
        process = self._all[task.rank]
        here = self._here
        if process is here:
            return
        if here is not None:
            self._put_away(here)
        self._here = process
        for name, value in process.attributes.items():
            setattr(sys, name, value)
        sys.modules.update(process.modules)

    def _put_away(self, process: Process) -> None:
        for name in ATTRIBUTES:
            process.attributes[name] = getattr(sys, name)
        loaded = sys.modules
        process.modules = {name: loaded.pop(name) for name in self.own.names if name in loaded}

    def calling(self) -> Process | None:
        """Return the process of the rank that runs."""
        task = current_task()
        return None if task is None else self._all.get(task.rank)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let ranks come and go while the block runs; then everything is as it was."""
        attributes = {name: getattr(sys, name) for name in ATTRIBUTES}
        hidden = self.own.hidden() | {"__main__": sys.modules["__main__"]}
        for name in hidden:
            sys.modules.pop(name, None)
        sys.meta_path.insert(0, self.own)
        register, unregister = atexit.register, atexit.unregister
        atexit.register, atexit.unregister = self._registering(register), self._unregistering(unregister)
        try:
            yield
        finally:
            atexit.register, atexit.unregister = register, unregister
            sys.meta_path.remove(self.own)
            if self._here is not None:
                self._put_away(self._here)
            self._here = None
            for name, value in attributes.items():
                setattr(sys, name, value)
            sys.modules.update(hidden)

    # -- atexit ------------------------------------------------------------------------------------------------

    def _registering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return an `atexit.register` that keeps what a rank registers for the end of that rank."""

        def register(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
            process = self.calling()
            if process is None or not self._by_a_rank(sys._getframe(1)):
                original(function, *args, **kwargs)
            else:
                call = lambda: function(*args, **kwargs)  # noqa: E731
                call.function = function  # type: ignore[attr-defined]
                process.at_exit.append(call)
            return function

        return register

    def _by_a_rank(self, frame: FrameType | None) -> bool:
        """Whether a function is registered by what a rank does, and not by a module that all ranks share.

        What a shared module registers while it is imported is for all ranks, and so is what the standard library does:
        it often registers once for whatever comes.
        """
        names = [""]
        while frame is not None:
            names.append(str(frame.f_globals.get("__name__")))
            if names[1].partition(".")[0] in sys.stdlib_module_names or frame.f_code.co_name == "<module>":
                break
            frame = frame.f_back
        return names[-1] in self.own.names

    def _unregistering(self, original: Callable[..., Any]) -> Callable[[Callable[..., Any]], None]:
        def unregister(function: Callable[..., Any]) -> None:
            original(function)
            process = self.calling()
            if process is not None:
                process.at_exit = [call for call in process.at_exit if call.function != function]  # type: ignore[attr-defined]

        return unregister
