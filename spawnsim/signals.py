"""Stop signals: their names in messages, and a thread that acts on them while the main thread is blocked.

Loaded by ranks, launchers and runs on virtual ranks.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def outcome_of_signal(number: int) -> str:
    """Return the "outcome" of a run that a signal has stopped."""
    return "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"


def signal_name(number: int) -> str:
    """Return a signal's number, with its name if it has one."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


@contextmanager
def heard(act: Callable[[int], object], undo: Callable[[], object]) -> Iterator[None]:
    """While the block runs, call `act(number)` in a separate thread for each signal that has a handler.

    A Python handler runs between two bytecodes of the main thread, which may be blocked in a C call forever. The
    interpreter's C handler writes the signal's number to a pipe immediately, and the thread reads it there. The thread
    needs Python's lock: a process whose C call never releases the lock can only be killed. Only the main thread may
    call this function.

    Args:
        act: is called with the signal's number. A handler must be set, or the default action ends the process.
        undo: is called at the end of the block, and in each process that is forked within it.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def listen() -> None:
        while number := os.read(reading, 1)[0]:
            act(number)
        os.close(reading)

    def end() -> None:
        signal.set_wakeup_fd(before)
        undo()

    def end_in_child() -> None:  # the child lacks the thread and must not write to its parent's pipe
        end()
        os.close(reading)
        os.close(writing)

    threading.Thread(target=listen, name="spawnsim-signals", daemon=True).start()
    _undoing.append(end_in_child)
    try:
        yield
    finally:
        _undoing.remove(end_in_child)
        end()
        os.write(writing, b"\0")  # children may hold the pipe open
        os.close(writing)


# A signal to a process that a program has forked (a loader's worker) is meant for that process alone, but a forked
# process would first write to its parent's pipe. SIGTERM is blocked until the child has been detached from the pipe,
# since pools stop workers right after their start. SIGINT is not blocked: its exception would be lost during a fork.
_undoing: list[Callable[[], None]] = []
_masks = threading.local()


def _before_fork() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,) if _undoing else ())


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _in_child() -> None:
    while _undoing:
        _undoing.pop()()
    _in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
