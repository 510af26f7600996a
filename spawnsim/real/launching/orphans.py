"""Processes that have lost their parents: the launcher's process adopts them, and sees to their end.

When mpiexec kills a rank's keeper the rank dies as well, but a moment later and as nobody's child; when a rank aborts
the job, mpiexec ends before the processes that it has started. Knows processes alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent has died
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # Linux: orphans become children of this process
PATIENCE_S = 2.0  # how long one may take to end by itself
LOOK_S = 1e-3


def _prctl() -> Callable[..., int] | None:
    """Return Linux's control of processes, where there is one."""
    return getattr(ctypes.CDLL(None), "prctl", None)


def dying_with_parent(number: int) -> Callable[[], object] | None:
    """Return what a new process calls so that it gets this signal when its parent dies.

    None where the system has no such thing, and in a process of several threads: a copy of it may do nearly nothing.
    """
    prctl = _prctl()
    if prctl is None or len(os.listdir("/proc/self/task")) > 1:
        return None
    return partial(prctl, PR_SET_PDEATHSIG, int(number))


@contextmanager
def adopted() -> Iterator[None]:
    """Make what loses its parent below this process its child while the block runs, where the system allows it."""
    prctl = _prctl()
    if prctl is None:
        yield
        return
    before = ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def see_off(processes: Iterable[int]) -> None:
    """Wait until those of these that are children of this process have ended, and kill those that do not."""
    known = list(processes)
    while any(_seen_off(process) for process in known):  # each may have left children of its own
        pass


def _seen_off(process: int) -> bool:
    """Return whether it was a child; no longer."""
    try:
        end_s = time.monotonic() + PATIENCE_S
        while os.waitpid(process, os.WNOHANG) == (0, 0):
            if time.monotonic() > end_s:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                break
            time.sleep(LOOK_S)
    except ChildProcessError:
        return False
    return True


def children(process: int) -> list[int]:
    """Return the processes that a process has started and not yet seen off."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == process:
                found.append(int(entry.name))
    return found
