"""A rank that is told to stop by SIGINT (Ctrl-C) or SIGTERM: the job ends with one line, and nothing recorded is lost.

A rank may be inside a call of a library that runs no Python, so no handler of Python's can be counted on: a thread
hears of the signal through the interpreter's wake-up pipe, and ends the job as any other error does. A program that
has handlers of its own keeps them. Knows signals and an ending; knows neither MPI nor torch.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from spawnsim.real.launching.roll import sign_first_end

if TYPE_CHECKING:  # a launcher loads this room for its words alone
    from spawnsim.real.rank.ending import Ending

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TOLD = "SPAWNSIM_STARTED"
"""Set by `launch`: whoever started the job says that it was stopped, so its ranks need not."""


def outcome(number: int) -> str:
    """Return the "outcome" of a run that a signal has stopped."""
    return "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"


@contextmanager
def stoppable(ending: Ending) -> Iterator[None]:
    """While the block runs, a signal to stop ends the whole job. Outside of the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    former = {number: signal.signal(number, _noted) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(heard, ending), name="spawnsim-signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in former.items():
            if signal.getsignal(number) is _noted:
                signal.signal(number, handler)
        os.close(told)


def _noted(_number: int, _frame: FrameType | None) -> None:
    """Do nothing in the program's thread: the listening one acts."""


def _listen(heard: int, ending: Ending) -> None:
    while number := os.read(heard, 1):
        if number[0] in SIGNALS and signal.getsignal(number[0]) is _noted:
            _stop(number[0], ending)
    os.close(heard)


def _stop(number: int, ending: Ending) -> None:
    rank, name = ending.watchdog.channel.rank, signal.Signals(number).name
    everyone = "SLURM_STEP_ID" in os.environ  # Slurm tells all ranks at once: one of them says so
    known = TOLD in os.environ or (everyone and rank > 0)
    said = f"rank {rank} was told to stop ({name})"
    if TOLD in os.environ and not ending.doomed:  # who has started the job says it, unless it was told itself
        sign_first_end(128 + number, said, os.environ)
    text = "" if known or ending.doomed else f"spawnsim: {said}; the job ends"
    ending.end(text, summary=outcome(number), status=128 + number)
