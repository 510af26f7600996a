"""Saying which rank computes on while nothing else happens: an endless loop and a long step look alike from outside.

Time on the wall is looked at by a thread of its own, which changes nothing of the run. This room knows the kernel's
counters and Python's frames.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from spawnsim.virtual.kernel import Kernel, Task
from spawnsim.virtual.reports import place

FIRST_S, LATER = 10.0, 3.0  # the first note after so many seconds, each later one after so many times as many
LOOK_S = 1.0


@contextmanager
def noted(kernel: Kernel, note: Callable[[str], None] | None) -> Iterator[None]:
    """While the block runs, `note` is given a sentence about a rank that makes no call for long."""
    if note is None:
        yield
        return
    over, thread = threading.Event(), threading.get_ident()
    watching = threading.Thread(
        target=_watch, args=(kernel, note, over, thread), name="spawnsim-stalls", daemon=True
    )
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def _watch(kernel: Kernel, note: Callable[[str], None], over: threading.Event, thread: int) -> None:
    before, still_s, due_s = _state(kernel), 0.0, FIRST_S
    while not over.wait(LOOK_S):
        now = _state(kernel)
        still_s = still_s + LOOK_S if now == before else 0.0
        before, due_s = now, due_s if still_s else FIRST_S
        if still_s >= due_s:
            note(_sentence(kernel, still_s, sys._current_frames().get(thread)))
            due_s *= LATER


def _running(kernel: Kernel) -> Task | None:
    """Return the task that runs, if any does: one of those that stand in for none is no task."""
    return kernel.current if type(kernel.current) is Task else None


def _state(kernel: Kernel) -> tuple[object, ...]:
    task = _running(kernel)
    own = () if task is None else (task.clock, task.budget, task.polls)
    return kernel.steps, id(task), kernel.env.now, *own


def _sentence(kernel: Kernel, still_s: float, frame: FrameType | None) -> str:
    task = _running(kernel)
    return (
        f"{'the run' if task is None else task.name} has computed for {still_s:.0f} s without a call "
        f"({place(frame) or 'at an unknown line'}); virtual time stands at {kernel.env.now:.6g} s"
    )
