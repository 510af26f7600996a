"""How a rank's line of execution is carried: by a greenlet, or by an operating-system thread. One runs at a time.

*Greenlets* are the default: they switch in 0.3 µs and take 6 kB. But a greenlet must not wait inside a frame of C++,
whose stack another greenlet would use meanwhile: pybind11 aborts the process. That is where programs of
torch.distributed wait (DistributedDataParallel reduces its buckets from within autograd). Amid a backward pass a wait
is an error (`stuck`). *Threads* have stacks of their own; a switch costs 10 to 20 µs. Exactly one of them runs, the one
that holds the turn, and it hands the turn on. Results are the same, bit for bit.

The kernel switches through carriers, and knows no more of them than what `Carrier` has.
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

GRACE_S = (
    1.0  # real seconds between two looks at a thread that is told to end: at one place in both, it will not
)
STACK_B = 1 << 20  # of each thread; 8 MB, the usual size, would be all memory that 1,000 ranks may map


class Carrier(Protocol):
    """What carries a line of execution. It is true while it has begun and is not over."""

    dead: bool

    @property
    def gr_frame(self) -> FrameType | None:
        """Where it stands; None while it runs."""
        ...

    def switch(self) -> Any:
        """Let it run in place of the caller; return when the caller's turn has come again."""
        ...

    def __bool__(self) -> bool: ...


class TaskGreenlet(greenlet):  # type: ignore[misc]  # greenlet has no types
    """A greenlet that knows its task, so that code run by a task can find it without global state."""

    __slots__ = ("task",)
    task: Any


class Greenlets:
    """Carriers that share one thread, and with it torch's modes: those are put aside at each switch."""

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
        """Return what will carry `run()` when it is first switched to; at its end the hub goes on."""
        carrier = TaskGreenlet(run, self.hub)
        carrier.task = task
        return carrier


class _Turn:
    """A thread's place in line. It waits until the turn is its own."""

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
    """The place of the thread that runs the kernel: the one that Python interrupts, whichever runs."""

    raised: BaseException | None = None  # by a task, or by the user's Ctrl-C

    def wait(self) -> None:
        """Wait for the turn. An interrupt meanwhile ends the task that runs, and is raised here once that has ended.

        One that stands in a call into C takes no note of it, and is left there.
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
                # From now on limited: the call that was interrupted may have taken the turn already.
                self.raised, limit_s = stop, GRACE_S
                self._threads.interrupt()
        raised, self.raised = self.raised, None
        if raised is not None:
            raise raised


class TaskThread(_Turn):
    """A thread of one task. The process does not wait for it: one that ignores its end must not keep it."""

    def __init__(self, threads: Threads, task: Any, run: Callable[[], None]) -> None:
        super().__init__(threads)
        self.task, self._run, self.dead = task, run, False
        self.ident: int | None = None  # once it has begun

    def __bool__(self) -> bool:
        return self.ident is not None and not self.dead

    @property
    def gr_frame(self) -> FrameType | None:
        """Where it stands; None before it has begun."""
        return None if self.ident is None else sys._current_frames().get(self.ident)

    def wake(self) -> None:
        """Let it go on, or begin."""
        if self.ident is not None:
            super().wake()
            return
        before = threading.stack_size(STACK_B)
        try:
            # Not by `threading.Thread`, which means virtual threads to whoever wakes this one, if that is a rank.
            self.ident = _thread.start_new_thread(self._begin, ())
        finally:
            threading.stack_size(before)

    def _begin(self) -> None:
        self.ident = _thread.get_ident()
        # Each thread has one greenlet from its start: there the task is looked up, as under greenlets.
        getcurrent().task = self.task
        # For `threading.current_thread`. Threads inherit from it whether they are daemons: those of a program are not.
        here: Any = threading._DummyThread()
        here._daemonic, here.name = False, self.task.name
        hub = self._threads.hub
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - as with greenlets, the hub raises it
            hub.raised = error
        forget_thread()
        if self.dead:  # abandoned: the others have gone on without it
            return
        self.dead = True
        self._threads.running = hub
        hub.wake()


def forget_thread() -> None:
    """Forget the object that stands for the calling thread in `threading`."""
    known: dict[int, Any] = getattr(threading, "_active", {})
    known.pop(_thread.get_ident(), None)


class Threads:
    """Carriers with a thread each. What torch keeps per thread is each task's own."""

    @staticmethod
    def suspend_modes() -> None:
        """Do nothing: no other task sees this one's modes."""

    @staticmethod
    def stuck() -> bool:
        """Return False: a thread may wait wherever it is."""
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
        """Return what will carry `run()` when it is first switched to; at its end the hub goes on."""
        return TaskThread(self, task, run)

    def stands(self) -> tuple[int, int] | None:
        """Return what identifies the place at which the thread that runs stands in its program."""
        frame = sys._current_frames().get(self.thread())
        return None if frame is None else (id(frame), frame.f_lasti)

    def abandon(self) -> None:
        """Go on in the hub without the thread that runs: it stands in C, and heeds no exception."""
        running, self.running = self.running, self.hub
        if isinstance(running, TaskThread):
            running.dead = True

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the task that runs, as soon as it executes Python."""
        if self.thread() != self._thread:
            ident = ctypes.c_ulong(self.thread())
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(KeyboardInterrupt))


CARRIERS: dict[str, Callable[[], Greenlets | Threads]] = {"greenlets": Greenlets, "threads": Threads}
