"""Calls from a thread that a rank has started, where ranks are greenlets and share one thread: each ends the run.

The kernel would attribute such a call to the rank that happens to run. So it checks the calling thread, from the first
thread that a program starts. The rank itself may wait for the thread in real time, where only a signal reaches it.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NoReturn

from spawnsim.errors import UsageError
from spawnsim.importing import loading
from spawnsim.virtual.engine.diagnosis import place
from spawnsim.virtual.engine.kernel import STRAY, Kernel, Task, current_task, refuse_stray
from spawnsim.virtual.interpreter import Patches, Put

GRACE_S, POLL_S = 0.5, 0.02  # how long a rank has to reach the error in its own call; polling interval
# Not SIGINT, which a worker of a pool and the background of a shell ignore: it would interrupt no wait there. Nothing
# sends this one but the kernel, for urgent data of a socket that asks for it.
WAKING = signal.SIGURG


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `Thread.start` that records which rank has started a thread."""

    @wraps(original)
    def start(thread: Any) -> None:
        task = current_task()
        if task is not None and not loading():  # otherwise it belongs to a library, for all ranks
            vars(thread)[STRAY] = partial(_refuse, task)
            task.kernel.__class__ = GuardedKernel
            on_main = task.kernel.thread == threading.main_thread().ident
            if on_main and signal.getsignal(WAKING) == signal.SIG_DFL:
                signal.signal(WAKING, signal.default_int_handler)
        original(thread)

    return start


class GuardedKernel(Kernel):
    """A kernel whose program has threads: a call, which first reads the running task, may come from one of them."""

    @property
    def current(self) -> Task:
        """The running task. Ends the calling thread if a rank has started it."""
        if current_task() is None:
            refuse_stray()
        running: Task = vars(self)["current"]
        return running

    @current.setter
    def current(self, task: Task) -> None:
        vars(self)["current"] = task


def _refuse(task: Task) -> None:
    """End the rank's run, and the calling thread with it."""
    if task.kernel.closed:
        return
    line = place(sys._getframe(1))
    error = UsageError(
        f"a thread of rank {task.rank} called MPI ({line}): a rank that is a greenlet may call it only from its "
        "program. Give --carrier threads, with which all threads of a rank may communicate"
    )
    error.__dict__["placed"] = True  # the message has rank and line
    task.kernel.fail(error, task)
    _wake(task.kernel)


def _wake(kernel: Kernel) -> NoReturn:
    """Interrupt the running rank, unless the run ends within the grace period; then end the calling thread."""
    main = threading.main_thread().ident
    for _ in range(round(GRACE_S / POLL_S)):
        if kernel.closed:
            break
        time.sleep(POLL_S)
    if not kernel.closed and kernel.thread == main and callable(signal.getsignal(WAKING)):
        signal.pthread_kill(main, WAKING)
    raise SystemExit  # no traceback: the run's report has the error


def _install(put: Put) -> None:
    put(threading.Thread, "start", _marking(threading.Thread.start))


strays_refused = Patches(_install).in_place
