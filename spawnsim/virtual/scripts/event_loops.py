"""asyncio in unmodified programs: each rank has its own running loop, and its waits take virtual time.

asyncio reads the time from `time.monotonic`, which is virtual, and waits in a selector, which is not: a sleeping
coroutine would never wake. Ranks that are greenlets share a thread, and asyncio allows one running loop per thread.
Waits without a limit are for external events, and take real time.
"""

from __future__ import annotations

import selectors
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from spawnsim.importing import after_import
from spawnsim.virtual.engine.kernel import Kernel, Task, current_task
from spawnsim.virtual.mpi.communicators import held

LOOPS = "asyncio.selector_events"


class VirtualSelector(selectors.DefaultSelector):
    """The selector of a rank's loop: it polls files, and lets virtual time pass."""

    def select(self, timeout: float | None = None) -> Any:
        """Return the files that are ready now, or after the rank's timeout."""
        found = super().select(0)
        if found or (timeout is not None and timeout <= 0):
            return found
        if timeout is None:
            return super().select()
        held("OWN").clock.sleep(timeout)
        return super().select(0)


class EventLoops:
    """asyncio's per-thread state, for each task of a kernel; inactive until a rank makes a loop."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._kept: dict[Task, tuple[Any, Any]] = {}  # of tasks that were switched out within a loop
        self._last: Task | None = None  # None: no rank has made a loop yet
        self._outside: tuple[Any, Any] = (None, None)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the loops of ranks virtual time while the block runs."""
        with ExitStack() as stack, after_import(LOOPS, lambda: self._change(stack)):
            yield
            if self._last is not None:
                self._put(self._outside)

    def _change(self, stack: ExitStack) -> None:
        kind: Any = sys.modules[LOOPS].BaseSelectorEventLoop
        make = kind.__init__

        def init(loop: Any, selector: Any = None) -> None:
            task = current_task()
            if task is not None and selector is None:
                self._begin(task)
                selector = VirtualSelector()
            make(loop, selector)

        kind.__init__ = init
        stack.callback(setattr, kind, "__init__", make)

    def _begin(self, task: Task) -> None:
        if self._last is None and not self._kernel.threaded:
            self._last, self._outside = task, self._state()
            self._kernel.on_resume.append(self._enter)

    def _enter(self, task: Task) -> None:
        """Save the state of the previous task, and restore this task's."""
        last, self._last = self._last, task
        if last is task or last is None:
            return
        state = self._state()
        if state == self._outside:
            self._kept.pop(last, None)
        else:
            self._kept[last] = state
        mine = self._kept.get(task, self._outside)
        if mine != state:
            self._put(mine)

    @staticmethod
    def _state() -> tuple[Any, Any]:
        return sys.modules["asyncio.events"]._get_running_loop(), sys.get_asyncgen_hooks()

    @staticmethod
    def _put(state: tuple[Any, Any]) -> None:
        sys.modules["asyncio.events"]._set_running_loop(state[0])
        sys.set_asyncgen_hooks(*state[1])
