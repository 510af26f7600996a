"""The process that runs virtual ranks, or a study: how signals stop it, and how many threads its libraries use.

Ctrl-C, SIGTERM and a closed terminal (SIGHUP) arrive as a `KeyboardInterrupt`. No `except Exception` of a program
catches it, and the run ends with all that was recorded. A second signal ends the process at once: only the last half
second of records may be missing on disk. (Real ranks have their own handlers: a library may hold them where no Python
runs.)

Numeric libraries get one thread, since sums depend on how they are split: the same seed gives the same digest on
machines of 2 and of 64 cores. An OMP_NUM_THREADS of the user takes precedence, and run.json records the number of
threads.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_stack
from types import FrameType
from typing import Any

from spawnsim.errors import program_place
from spawnsim.signals import heard, outcome_of_signal

# Each signal with its default handler in Python. Python itself turns SIGINT into a KeyboardInterrupt, but the second
# one as well: that does not help if a rank in its own thread is in C code, or waits for a lock for ever.
SIGNALS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


class Stopped(KeyboardInterrupt):
    """A signal has stopped this process; `number` is the signal's."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        self.number = number
        super().__init__(number)

    def __str__(self) -> str:
        return outcome_of_signal(self.number)


def outcome_of(stop: KeyboardInterrupt) -> str:
    """Return the "outcome" of a run that was stopped."""
    return outcome_of_signal(number_of(stop))


def number_of(stop: KeyboardInterrupt) -> int:
    """Return the signal that has stopped it."""
    return stop.number if isinstance(stop, Stopped) else signal.SIGINT


@contextmanager
def stoppable() -> Iterator[None]:
    """While the block runs, a stop signal raises `Stopped` in the main thread; ignored or handled signals stay so."""
    # Python sets handlers in the main thread alone; elsewhere, as in a notebook's worker, the caller's handlers stay.
    ours: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        # A SIGHUP that nohup ignores must stay ignored, and a program's own handler must stay in place.
        ours = [number for number, usual in SIGNALS.items() if signal.getsignal(number) == usual]
    for number in ours:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in ours:
            # A program may have set its own handler meanwhile, which must stay. Or the signal arrived and its handler
            # was reset.
            if signal.getsignal(number) in (_stop, signal.SIG_DFL):
                signal.signal(number, SIGNALS[number])


def _stop(number: int, _frame: FrameType | None) -> None:
    # Reset before raising: a program that hangs in its `finally` blocks ends at the second signal.
    signal.signal(number, signal.SIG_DFL)
    raise Stopped(number)


def _reset_in_child() -> None:
    """Restore the default handlers in a forked process: its signals do not concern the run."""
    for number, usual in SIGNALS.items():
        if signal.getsignal(number) == _stop:
            signal.signal(number, usual)


os.register_at_fork(after_in_child=_reset_in_child)


GRACE_S = 2.0  # real seconds in which the main thread must handle a signal


@contextmanager
def ended_in_c() -> Iterator[None]:
    """While the block runs, a stop signal ends the process even if its main thread stays in a call into C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[threading.Timer] = []

    def act(number: int) -> None:
        if number in SIGNALS:
            waiting.append(threading.Timer(GRACE_S, _leave_at_once, (number,)))
            waiting[-1].daemon = True
            waiting[-1].start()

    def undo() -> None:
        for timer in waiting:
            timer.cancel()

    with heard(act, undo):
        yield


def _leave_at_once(number: int) -> None:
    """End the process, unless the main thread has handled the signal: `_stop` resets its handler."""
    if signal.getsignal(number) is not _stop:
        return
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    place = program_place(walk_stack(frame))
    where = f" ({place})" if place else ""
    sys.stderr.write(f"spawnsim: {outcome_of_signal(number)}, in a C call that ignores signals{where}\n")
    sys.stderr.flush()
    os._exit(128 + number)


def end_at_once() -> None:
    """Let one more Ctrl-C end this stopped process, which is about to exit; Python itself would raise in it."""
    if signal.getsignal(signal.SIGINT) == SIGNALS[signal.SIGINT]:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


TOLD = "OMP_NUM_THREADS"
VARIABLES = (TOLD, "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def use_one_thread() -> None:
    """Let libraries that are not loaded yet use one thread, unless the user has set another number."""
    # A user who sets this variable has chosen for all three; each library reads another of them.
    if TOLD not in os.environ:
        os.environ.update(dict.fromkeys(VARIABLES, "1"))


@contextmanager
def loading_without_threads() -> Iterator[None]:
    """Keep numeric libraries that are loaded in the block from starting threads; restore the environment afterwards."""
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update(dict.fromkeys(VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def one_thread() -> Iterator[None]:
    """While the block runs, torch uses one thread, loaded or not, unless the user has set another number."""
    if TOLD in os.environ:
        yield
        return
    torch: Any = sys.modules.get("torch")
    # A loaded torch has read the environment already, and needs a call; the variable sets the number for one that is
    # loaded later.
    before = None if torch is None else torch.get_num_threads()
    os.environ[TOLD] = "1"
    try:
        if torch is not None:
            torch.set_num_threads(1)
        yield
    finally:
        # Removed, since processes that the caller starts later would inherit one thread.
        del os.environ[TOLD]
        if torch is not None:
            torch.set_num_threads(before)
