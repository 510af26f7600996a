"""Tasks: lines of execution in greenlets, each with a clock of its own.

This room knows one task and what it may wait for. It must not know when it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from greenlet import GreenletExit, getcurrent, greenlet

from spawnsim.errors import Timeout, UsageError

if TYPE_CHECKING:
    from spawnsim.virtual.kernel import Kernel

RUN_AHEAD = (
    4096  # effects that a task may queue before it waits for the others: bounds memory, changes no result
)
PATIENCE = 32  # calls that a task may make after its end before it is left where it stands


class Wait(Protocol):
    """What a parked task waits for. Only reports read it, so it may be as lazy as it likes."""

    def describe(self) -> str:
        """Return the call with its peer and tag, such as `Recv(source=3, tag=7)`."""
        ...

    def peers(self) -> Sequence[int]:
        """Return the world ranks any of which could end the wait."""
        ...

    def missing(self, by_s: float = math.inf) -> Sequence[int]:
        """Return the ranks that had not come by a time, numbered in the communicator of the call."""
        ...

    def sequence(self) -> int:
        """Return the number of the collective on its communicator; -1 for other calls."""
        ...


class Task:
    """One line of execution of a rank, with its own clock: the rank's program, or a background task beside it."""

    __slots__ = (
        "budget", "carrier", "clock", "deadline_s", "error", "explicit", "kernel", "name", "parked", "polls",
        "rank", "refused", "thrown", "timed", "timer_s", "wait",
    )  # fmt: skip

    def __init__(self, kernel: Kernel, rank: int, clock: float, name: str) -> None:
        self.kernel, self.rank, self.clock, self.name = kernel, rank, clock, name
        self.carrier: greenlet
        self.parked = False
        self.wait: Wait | None = None
        self.thrown: BaseException | None = None  # raised in the task when it next runs
        self.error: BaseException | None = None  # how it ended, if badly
        self.budget = RUN_AHEAD
        self.deadline_s, self.explicit = kernel.deadline_s, False
        self.timer_s = math.inf  # when this task's one default timer fires; inf: none is in the heap
        self.polls = 0  # that found nothing
        self.timed = False  # whether it has read its clock since the watchdog last looked
        self.refused = 0  # calls that it made after its end

    @property
    def alive(self) -> bool:
        """Whether the task has not ended yet, nor was left where it stands."""
        return not self.carrier.dead and self.refused <= PATIENCE

    def __repr__(self) -> str:
        return f"Task({self.name}, clock={self.clock:.6g})"


class RankDied(GreenletExit):  # type: ignore[misc]  # greenlet has no types
    """Ends a rank's program where it stands when its time has come. No `except Exception` catches it."""


class Nobody:
    """Stands in for the running task where no rank may call anything: each call asks for its task, and is refused."""

    def __init__(self, refusal: Callable[[], BaseException]) -> None:
        self._refusal = refusal

    def __getattr__(self, name: str) -> NoReturn:
        raise self._refusal()


FINALIZER: Any = Nobody(
    lambda: UsageError(
        "a finalizer that Python's garbage collector runs cannot communicate: it runs in whichever rank comes along. "
        "Free windows and end communication yourself, or break the cycle of references"
    )
)
AFTERWARDS: Any = Nobody(
    lambda: UsageError("a communication call outside a run: its ranks have ended, or have not begun")
)


class Carrier(greenlet):  # type: ignore[misc]  # greenlet has no types
    """A greenlet that knows its task, so that code run by a task can find it without global state."""

    task: Task


def current_task() -> Task | None:
    """Return the task that runs the caller, or None outside virtual ranks."""
    return getattr(getcurrent(), "task", None)


def timeout(task: Task, wait: Wait) -> Timeout:
    """Return the error of a wait that met its deadline."""
    ranks = wait.missing(task.clock)
    missing = ", ".join(map(str, ranks))
    whom = f"; missing: rank {missing}" if missing else ""
    message = (
        f"{task.name} waited {task.deadline_s:g} s in {wait.describe()} and met its deadline at "
        f"{task.clock:.6g} s{whom}. A larger deadline (deadline_s, comm.clock.deadline) waits longer"
    )
    return Timeout(ranks, wait.describe(), wait.sequence(), message)


def current_world() -> Any:
    """Return the owner of the kernel that runs the caller's task. Raises `UsageError` outside virtual ranks."""
    task = current_task()
    if task is None:
        raise UsageError("a communication call outside a virtual rank: no rank is the caller")
    return task.kernel.owner
