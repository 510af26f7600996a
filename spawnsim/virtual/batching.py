"""Training steps of virtual ranks: parked until the earliest of their compute blocks ends, then executed together.

The clock of a parked rank is at the end of its block, so once its call is executed it may run ahead like any rank.
Actions before the earliest end cannot depend on the calls, and happen first. This module knows time, blocks and parked
ranks; it must not depend on the content of the calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any

import numpy as np

from spawnsim.comm.backends import register_batching
from spawnsim.errors import UsageError
from spawnsim.virtual import interpreter
from spawnsim.virtual.engine.event_queue import BATCHED
from spawnsim.virtual.engine.kernel import NoTask, Task, current_task
from spawnsim.virtual.engine.waiting import Unbroken
from spawnsim.virtual.engine.world import Rank, World

TOGETHER: Any = NoTask(
    lambda: UsageError(
        "a loss or an evaluation cannot communicate or draw from a rank's streams: it is executed for many ranks at "
        "once. Do so outside the function that TrainingStep or Evaluation receives, or run with --eager"
    )
)


class WaitingForStep(Unbroken):
    """A parked training step or evaluation. The event at the earliest end of a block ends the wait."""

    __slots__ = ()

    def describe(self) -> str:
        return "a training step"

    def peers(self) -> tuple[int, ...]:
        """Return (): it waits for no rank."""
        return ()

    def missing(self, by_s: float = math.inf) -> tuple[int, ...]:
        """Return (): it waits for no rank."""
        return ()


WAIT = WaitingForStep()


class BatchedCalls:
    """The parked calls of one run: `comm.backends.Batching` for virtual ranks.

    Args:
        world: The run.
        eager: Whether each call executes alone, in its rank's turn.
        check: Whether each call is compared with the same call executed alone.
        compute_of: Returns the `services.Compute` of a rank.
    """

    def __init__(self, world: World, *, eager: bool, check: bool, compute_of: Callable[[int], Any]) -> None:
        self.world, self.kernel, self.eager, self.check = world, world.kernel, eager, check
        self.ranks = len(world.ranks)
        self.batched = False
        self.attachments: dict[Any, Any] = {}
        self._compute_of = compute_of
        self._parked: dict[Task, tuple[Any, bool]] = {}  # a call, and whether it is in a compute block
        self._execute: Callable[[Sequence[Any]], None]
        self._due_s: list[float] = []  # a heap of the times for which an event is scheduled
        self._warned: dict[str, int] = {}

    def rank(self) -> int:
        return self.kernel.current.rank

    def clock_s(self) -> float:
        return self.kernel.current.clock

    def wait(
        self, call: Any, execute: Callable[[Sequence[Any]], None], memory: Callable[[], Sequence[Any]]
    ) -> None:
        """Park the calling rank until `execute` has executed its call, together with other ranks' calls."""
        kernel, task = self.kernel, self.kernel.current
        rank = self.world.ranks[task.rank]
        ahead = self._may_pass(rank, memory)
        in_block = ahead and self._compute_of(task.rank).pass_block(observe=False)
        if not ahead:
            kernel.observe()
        self._execute = execute
        self._schedule(task.clock)
        self._parked[task] = call, in_block
        limit = task.deadline_s, task.explicit
        task.deadline_s, task.explicit = math.inf, False
        try:
            kernel.block(WAIT)
        finally:
            task.deadline_s, task.explicit = limit
            self._parked.pop(task, None)
        if ahead and rank.observers:
            kernel.observe()

    def pass_block(self, memory: Callable[[], Sequence[Any]]) -> None:
        """Let the compute block of a call pass that was executed alone, as `wait` would."""
        rank = self.kernel.current.rank
        if self._may_pass(self.world.ranks[rank], memory):
            self._compute_of(rank).pass_block()

    def _may_pass(self, rank: Rank, memory: Callable[[], Sequence[Any]]) -> bool:
        """Return whether a rank's block may pass before its call: its end is known, and no task reads its memory."""
        if self.world.cores is not None:
            return False
        if rank.observers == 0:
            return True
        if sum(task.alive for task in rank.tasks) > 1:
            return False
        windows = rank.attachments.get("windows")
        return not windows or not _overlap(windows, memory())

    # -- execution -----------------------------------------------------------------------------------------------

    def _schedule(self, due_s: float) -> None:
        """Ensure that an event is scheduled at or before a time."""
        if not self._due_s or due_s < self._due_s[0]:
            heappush(self._due_s, due_s)
            self.kernel.env.at(max(due_s, self.kernel.env.now), BATCHED, self._fire)

    def _fire(self) -> None:
        heappop(self._due_s)
        if not self._parked:
            return
        due = [task for task in self._parked if task.clock <= self.kernel.env.now]
        # Outside blocks, ranks seldom call at the same time: such a call must not split the batch of computing ranks.
        if any(self._parked[task][1] for task in due):
            due = [*self._parked]
        if due:
            self._run(due)
        if self._parked:
            self._schedule(min(task.clock for task in self._parked))

    def _run(self, tasks: Sequence[Task]) -> None:
        """Execute the calls of some ranks, and resume these ranks."""
        tasks = sorted(tasks, key=lambda task: (task.rank, task.clock))
        calls = [self._parked.pop(task)[0] for task in tasks]
        with self.apart():
            self._execute(calls)
        for task in tasks:
            self.kernel.resume(task)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Prohibit communication within the block; torch's modes are the default ones there."""
        kernel, restore = self.kernel, interpreter.suspend_torch_modes()
        calling, kernel.current = kernel.current, TOGETHER
        try:
            yield
        finally:
            kernel.current = calling
            if restore is not None:
                restore()

    # -- warnings ------------------------------------------------------------------------------------------------

    def warn(self, sentence: str) -> None:
        """Record a warning of the calling rank, once per run."""
        if sentence not in self._warned:
            task = self.kernel.current
            self._warned[sentence] = task.rank
            self.world.recorder.event(task.rank, task.clock, "warning", {"text": sentence})

    def warned(self, rank: int) -> list[str]:
        return [sentence for sentence, whose in self._warned.items() if whose == rank]

    def resume(self, rank: int, *, batched: bool, warned: Sequence[str]) -> None:
        """Restore a rank's state from an earlier part of this run."""
        self.batched = self.batched or batched
        self._warned |= dict.fromkeys(warned, rank)


def _overlap(windows: Sequence[Any], tensors: Sequence[Any]) -> bool:
    """Return whether any window of a rank overlaps with tensors."""
    targets = [window._windows.targets[window._place] for window in windows]
    arrays = [
        array for each in targets for array in (each.memory, *each.regions) if type(array) is np.ndarray
    ]
    exposed = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays]
    own = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors]
    return any(
        begin < end_of_own and begin_of_own < end
        for begin, end in exposed
        for begin_of_own, end_of_own in own
    )


def _of_caller() -> BatchedCalls | None:
    task = current_task()
    if task is None or task.kernel.owner is None:
        return None
    found: BatchedCalls | None = task.kernel.owner.batching
    return found


register_batching(_of_caller)
