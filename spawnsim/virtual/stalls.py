"""The watchdog of real time: reports the line of a rank that has made no call for long and blocks all others.

A thread polls the wall clock. It changes nothing in the run, and the calls of ranks do not depend on it. While a call
into C holds Python's lock, no Python thread runs: then `faulthandler` prints the stacks of all threads.
"""

from __future__ import annotations

import faulthandler
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from traceback import walk_stack
from types import FrameType
from typing import Any

from spawnsim.errors import UnsupportedError
from spawnsim.virtual.engine.diagnosis import place
from spawnsim.virtual.engine.kernel import Kernel, Task, current_task
from spawnsim.virtual.interpreter import Patches, Put

# Wall time without a call: each line is reported once at each of these times, so that long steps make few reports.
NOTED_S = (10.0, 60.0, 600.0, 3600.0, 6 * 3600.0, 24 * 3600.0)
POLL_S = 1.0
BUSY = 0.1  # the share of a processor below which a process counts as waiting
IMPORTING = "<frozen importlib._bootstrap>"
APART = (
    ". A rank that waits for another rank outside of MPI waits forever: all share one process. Use real ranks "
    "(--backend mpi)"
)
THREADS = ", or --carrier threads if it waits for another thread of the rank"


@contextmanager
def stalls_noted(kernel: Kernel, note: Callable[[str], None] | None) -> Iterator[None]:
    """While the block runs, call `note` with a sentence about a rank that makes no call for long."""
    if note is None:
        yield
        return
    over, watchdog = threading.Event(), StallWatchdog(kernel, note)
    watching = threading.Thread(target=watchdog.watch, args=(over,), name="spawnsim-stalls", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


class StallWatchdog:
    """Polls a kernel from another thread, and calls `note` with sentences."""

    def __init__(self, kernel: Kernel, note: Callable[[str], None]) -> None:
        self._kernel, self._note = kernel, note
        self._said: set[tuple[str, float]] = set()

    def watch(self, over: threading.Event) -> None:
        """Poll until the run is complete."""
        before, since_s, since_used_s = _state(self._kernel), time.monotonic(), time.process_time()
        try:
            while not self.no_rank_can_run_while_one_call_into_C_lasts(over):
                now, now_s = _state(self._kernel), time.monotonic()
                if now != before:
                    before, since_s, since_used_s = now, now_s, time.process_time()
                elif now_s - since_s >= NOTED_S[0]:
                    still_s = now_s - since_s
                    self._report(still_s, waits=time.process_time() - since_used_s < BUSY * still_s)
        finally:
            with suppress(RuntimeError, ValueError, OSError):
                faulthandler.cancel_dump_traceback_later()

    def no_rank_can_run_while_one_call_into_C_lasts(self, over: threading.Event) -> bool:
        """Wait for the next poll; return whether the run is complete."""
        # Deferred at each poll. A call that holds Python's lock that long blocks this thread: then C prints the stack,
        # in which this function's name is the only explanation. Standard error may lack a file.
        with suppress(AttributeError, ValueError, OSError, RuntimeError):
            faulthandler.dump_traceback_later(NOTED_S[0] + POLL_S, file=sys.__stderr__)  # type: ignore[arg-type]
        return over.wait(POLL_S)

    def _report(self, still_s: float, *, waits: bool) -> None:
        frame = sys._current_frames().get(self._kernel.thread)
        where = place(frame) or "an unknown line"
        due_s = max(limit_s for limit_s in NOTED_S if limit_s <= still_s)
        if (where, due_s) not in self._said:
            self._said.add((where, due_s))
            self._note(self._sentence(still_s, where, imported(frame), waits=waits))

    def _sentence(self, still_s: float, where: str, module: str, *, waits: bool) -> str:
        task, now_s = _running(self._kernel), self._kernel.env.now
        doing = f"importing {module} " if module else ""
        sentence = (
            f"{'the run' if task is None else task.name} has been {doing}at {where} for {still_s:.0f} s of real time"
            f"{', waiting' * (waits and not module)}; no other rank can run (virtual time stands at {now_s:.6g} s)"
        )
        if module or not waits or task is None:
            return sentence
        return sentence + APART + ("" if self._kernel.threaded else THREADS)


def imported(frame: FrameType | None) -> str:
    """Return the module whose import the stack is in (the one that the program itself imports); "" if none."""
    names = [
        str(each.f_locals.get("name"))
        for each, _ in walk_stack(frame)
        if each.f_code.co_filename == IMPORTING and each.f_code.co_name == "_find_and_load"
    ]
    return names[-1] if names else ""


def _running(kernel: Kernel) -> Task | None:
    """Return the running task, or None if a `NoTask` stands in for it."""
    return kernel.current if type(kernel.current) is Task else None


def _state(kernel: Kernel) -> tuple[object, ...]:
    task = _running(kernel)
    own = () if task is None else (task.clock, task.budget, task.polls)
    return kernel.steps, id(task), kernel.env.now, *own


def _accepting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def accept(listening: Any) -> Any:
        task = current_task()
        endless = task is not None and listening.gettimeout() is None
        if endless and not select.select([listening], [], [], 0)[0]:
            raise UnsupportedError(
                "accept() would wait for a connection, and no other rank could run to make one: ranks of "
                "one process cannot wait for each other outside of MPI. Use real ranks (--backend mpi), or let the "
                "other ranks connect first, and then call Barrier"
            )
        return original(listening)

    return accept


def _install(put: Put) -> None:
    put(socket.socket, "accept", _accepting(socket.socket.accept))


accepts_refused = Patches(_install).in_place
