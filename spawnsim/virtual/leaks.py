"""What a program reads that no seed repeats: the wall clock, the system's entropy, threads of its own.

The first place of each kind is noted, if the program's own code is there and not a library's; then the run does not
call itself reproducible. What cannot be noticed: `datetime.now()`, the order of sets (the command line fixes
PYTHONHASHSEED), numbers from `id()`, and when the collector calls finalizers.

This room knows functions and frames. What a leak means is the business of others.
"""

from __future__ import annotations

import os
import random
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any

from spawnsim.virtual.kernel import current_task
from spawnsim.virtual.patching import Patches, Put

CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
DATES = ("localtime", "gmtime", "ctime", "asctime", "strftime")
STANDARD = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))
INSTALLED = ("site-packages", "dist-packages", str(Path(__file__).parent.parent))


def _install(put: Put) -> None:
    put(os, "urandom", _noticed(os.urandom, "the system's entropy was read"))
    put(random, "_urandom", os.urandom)
    put(threading.Thread, "start", _noticed(threading.Thread.start, "a thread was started"))
    for name in (*CLOCKS, *(f"{name}_ns" for name in CLOCKS), *DATES):
        if isinstance(getattr(time, name), BuiltinFunctionType):  # else it is virtual
            put(time, name, _noticed(getattr(time, name), f"the wall clock was read (time.{name})"))


def _noticed(original: Callable[..., Any], what: str) -> Callable[..., Any]:
    kind = what.partition(" (")[0]

    def noticed(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        if task is not None:
            found = task.kernel.owner.leaks
            if kind not in found:
                place = _place(sys._getframe(1))
                if place is not None:
                    found[kind] = f"{what} by rank {task.rank} ({place})"
        return original(*args, **kwargs)

    noticed.__name__, noticed.__doc__ = getattr(original, "__name__", ""), original.__doc__
    return noticed


def _place(frame: FrameType | None) -> str | None:
    """Return the file and line of a program that calls, maybe through the standard library; None: a library does."""
    while frame is not None:
        file = frame.f_code.co_filename
        if any(folder in file for folder in INSTALLED):
            return None
        if not file.startswith((*STANDARD, "<frozen")):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


noticing = Patches(_install).in_place
