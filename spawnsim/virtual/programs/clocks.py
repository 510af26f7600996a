"""The clocks of `time` as ranks see them: virtual seconds, from zero.

This room knows the module `time`. What the time is, the virtual MPI tells.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from spawnsim.errors import ParameterError
from spawnsim.virtual.comm.calling import held
from spawnsim.virtual.kernel import current_task
from spawnsim.virtual.mpi import MPI

CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
CHOICES = ("all", "sleep", "none")


@contextmanager
def virtual_time(which: str = "all") -> Iterator[None]:
    """Make `time.sleep` ("sleep"), or the clocks as well ("all"), virtual for ranks while the block runs."""
    if which not in CHOICES:
        raise ParameterError(f"virtual_time={which!r}: give one of {', '.join(CHOICES)}")
    patches: dict[str, Callable[..., Any]] = {} if which == "none" else {"sleep": _sleeping(time.sleep)}
    if which == "all":
        patches |= {name: _reading(getattr(time, name)) for name in CLOCKS}
        patches |= {f"{name}_ns": _counting(getattr(time, f"{name}_ns")) for name in CLOCKS}
    before = {name: getattr(time, name) for name in patches}
    for name, function in patches.items():
        setattr(time, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(time, name, function)


def _sleeping(original: Callable[[float], None]) -> Callable[[float], None]:
    def sleep(seconds: float, /) -> None:
        if current_task() is None:
            original(seconds)
            return
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        held("OWN").clock.sleep(seconds)

    return sleep


def _reading(original: Callable[[], float]) -> Callable[[], float]:
    return lambda: original() if current_task() is None else MPI.Wtime()


def _counting(original: Callable[[], int]) -> Callable[[], int]:
    return lambda: original() if current_task() is None else round(MPI.Wtime() * 1e9)
