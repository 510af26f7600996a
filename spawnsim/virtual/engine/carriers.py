"""The carriers of a rank's line of execution: a greenlet or an operating-system thread. One runs at a time.

*Greenlets* are the default: they switch in 0.3 µs and take 6 kB. But a greenlet must not wait inside a C++ frame,
because another greenlet would meanwhile use that frame's stack: pybind11 aborts the process. Programs of
torch.distributed wait there (DistributedDataParallel reduces its buckets from within autograd), so a wait during a
backward pass is an error (`stuck`). *Threads* have separate stacks; a switch costs 10 to 20 µs. Exactly one thread
runs, the holder of the turn, and it passes the turn on. Results are the same, bit for bit.

The kernel uses carriers only through the protocol `Carrier`.
"""

from __future__ import annotations

import _thread
import ctypes
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from greenlet import getcurrent, greenlet

from spawnsim.virtual import interpreter

GRACE_S = 1.0  # real seconds between two checks of an interrupted thread; if it did not move, it is stuck
STACK_B = 1 << 20  # of each thread; 8 MB, the usual size, would use up the memory that 1,000 ranks may map


class Carrier(Protocol):
    """The carrier of a line of execution. It is true from its start until its end."""

    dead: bool

    @property
    def gr_frame(self) -> FrameType | None:
        """The frame at which it stands; None while it runs."""
        ...

    def switch(self) -> Any:
        """Run it in place of the caller; return when the caller has the turn again."""
        ...

    def __bool__(self) -> bool: ...


class TaskGreenlet(greenlet):  # type: ignore[misc]  # greenlet has no types
    """A greenlet that knows its task, so that code run by a task can find it without global state."""

    __slots__ = ("task",)
    task: Any


class Greenlets:
    """Carriers that share one thread and therefore torch's modes, which are suspended at each switch."""

    suspend_modes = staticmethod(interpreter.suspend_torch_modes)
    stuck = staticmethod(interpreter.amid_backward)

    def __init__(self) -> None:
        self.hub: Any = getcurrent()
        self._thread = threading.get_ident()

    def thread(self) -> int:
        return self._thread

    def ours(self) -> bool:
        return threading.get_ident() == self._thread

    def carry(self, task: Any, run: Callable[[], None]) -> Any:
        """Return a carrier that runs `run()` at the first switch to it; when it ends, the hub continues."""
        carrier = TaskGreenlet(run, self.hub)
        carrier.task = task
        return carrier


class _Turn:
    """A thread's place in the order of turns. It waits for its turn."""

    def __init__(self, threads: Threads) -> None:
        self._threads, self._woken = threads, _thread.allocate_lock()
        self._woken.acquire()

    def switch(self) -> None:
        threads = self._threads
        here, threads.running = threads.running, self
        self.wake()
        here.wait()

    def wake(self) -> None:
        self._woken.release()

    def wait(self) -> None:
        self._woken.acquire()


class ThreadHub(_Turn):
    """The place of the thread that runs the kernel: Python delivers interrupts to it, whichever thread has the turn."""

    raised: BaseException | None = None  # by a task, or by the user's Ctrl-C

    def wait(self) -> None:
        """Wait for the turn. An interrupt meanwhile ends the running task, and is raised here after the end of that
        task.

        A task that is in a C call ignores the interrupt, and is abandoned.
        """
        limit_s, stood = -1.0, None
        while True:
            try:
                if self._woken.acquire(timeout=limit_s) or self._threads.running is self:
                    break
                stands = self._threads.stands()
                if stands == stood:
                    self._threads.abandon()
                    break
                stood = stands
            except KeyboardInterrupt as stop:
                # Limited from now on: the interrupted call may have taken the turn already.
                self.raised, limit_s = stop, GRACE_S
                self._threads.interrupt()
        raised, self.raised = self.raised, None
        if raised is not None:
            raise raised


class TaskThread(_Turn):
    """The thread of one task. The process does not wait for it: a thread that does not end must not block the exit."""

    def __init__(self, threads: Threads, task: Any, run: Callable[[], None]) -> None:
        super().__init__(threads)
        self.task, self._run, self.dead = task, run, False
        self.ident: int | None = None  # after its start

    def __bool__(self) -> bool:
        return self.ident is not None and not self.dead

    @property
    def gr_frame(self) -> FrameType | None:
        """The frame at which it stands; None before its start."""
        return None if self.ident is None else sys._current_frames().get(self.ident)

    def wake(self) -> None:
        """Start it, or let it continue."""
        if self.ident is not None:
            super().wake()
            return
        before = threading.stack_size(STACK_B)
        try:
            # Not by `threading.Thread`, which starts a virtual thread if a rank calls it.
            self.ident = _thread.start_new_thread(self._begin, ())
        finally:
            threading.stack_size(before)

    def _begin(self) -> None:
        self.ident = _thread.get_ident()
        # Each thread has one greenlet from its start: the task is looked up there, as with greenlets.
        getcurrent().task = self.task
        # For `threading.current_thread`. New threads inherit its daemon flag: a program's threads are not daemons.
        here: Any = threading._DummyThread()
        here._daemonic, here.name = False, self.task.name
        hub = self._threads.hub
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - as with greenlets, the hub raises it
            hub.raised = error
        forget_thread()
        if self.dead:  # abandoned: the other tasks have continued without it
            return
        self.dead = True
        self._threads.running = hub
        hub.wake()


def forget_thread() -> None:
    """Remove the object that represents the calling thread in `threading`."""
    known: dict[int, Any] = getattr(threading, "_active", {})
    known.pop(_thread.get_ident(), None)


class Threads:
    """Carriers with one thread each. Torch's per-thread state is therefore separate for each task."""

    @staticmethod
    def suspend_modes() -> None:
        """Do nothing: no other task sees the modes of this one."""

    @staticmethod
    def stuck() -> bool:
        """Return False: a thread may wait anywhere."""
        return False

    def __init__(self) -> None:
        self.hub: Any = ThreadHub(self)
        self.running: _Turn = self.hub  # whose turn it is
        self._thread = threading.get_ident()

    def thread(self) -> int:
        """Return the identifier of the thread that runs."""
        running = self.running
        begun = running.ident if isinstance(running, TaskThread) else None
        return self._thread if begun is None else begun

    def ours(self) -> bool:
        return threading.get_ident() == self.thread()

    def carry(self, task: Any, run: Callable[[], None]) -> Any:
        """Return a carrier that runs `run()` at the first switch to it; when it ends, the hub continues."""
        return TaskThread(self, task, run)

    def stands(self) -> tuple[int, int] | None:
        """Return an identifier of the place in its program at which the running thread stands."""
        frame = sys._current_frames().get(self.thread())
        return None if frame is None else (id(frame), frame.f_lasti)

    def abandon(self) -> None:
        """Continue in the hub without the running thread, which is in C code and ignores exceptions."""
        running, self.running = self.running, self.hub
        if isinstance(running, TaskThread):
            running.dead = True

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the running task, as soon as it executes Python."""
        if self.thread() != self._thread:
            ident = ctypes.c_ulong(self.thread())
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(KeyboardInterrupt))


CARRIERS: dict[str, Callable[[], Greenlets | Threads]] = {"greenlets": Greenlets, "threads": Threads}
