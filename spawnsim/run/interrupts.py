"""A process that runs virtual ranks, or a study, is told to stop: by Ctrl-C, by SIGTERM, or as its terminal goes.

Each arrives as a `KeyboardInterrupt`, which no `except Exception` of a program takes for an error of its own, and
which ends a run with all that was recorded. A second signal ends the process at once: what was recorded half a second
before is on disk.

This room knows signals and words. Real ranks have their own: a library may hold them where no Python runs.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from spawnsim.real.rank.stopping import outcome

SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # Python itself turns SIGINT into a KeyboardInterrupt


class Stopped(KeyboardInterrupt):
    """This process was told to stop by a signal; `number` is the signal's."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        self.number = number
        super().__init__(number)

    def __str__(self) -> str:
        return outcome(self.number)


def outcome_of(stop: KeyboardInterrupt) -> str:
    """Return the "outcome" of a run that was stopped."""
    return outcome(number_of(stop))


def number_of(stop: KeyboardInterrupt) -> int:
    """Return the signal that has stopped it."""
    return stop.number if isinstance(stop, Stopped) else signal.SIGINT


@contextmanager
def stoppable() -> Iterator[None]:
    """While the block runs, a signal to stop raises `Stopped` in the main thread; one ignored, or handled, stays so."""
    ours: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is _stop:
                signal.signal(number, signal.SIG_DFL)


def _stop(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Stopped(number)
