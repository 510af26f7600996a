"""Timers that end waits at their deadlines.

An explicit deadline is an event like others. A default one only says "too late": each task has one timer, armed again
when it fires, since SimPy cannot cancel, and a timer for each call would fill the heap. This room knows waits of tasks.
"""

from __future__ import annotations

import math
from functools import partial

from spawnsim.virtual.clockwork import LATE, Clockwork
from spawnsim.virtual.tasks import Task, Wait, timeout


class Timers:
    """The part of the kernel that ends waits."""

    def __init__(self) -> None:
        self.env = Clockwork()
        self._default_timers = 0

    def resume(self, task: Task, error: BaseException | None = None) -> None:
        """Make a parked task ready; `error` is raised where it waits."""
        raise NotImplementedError

    def bound(self, task: Task) -> None:
        """Make an event of the default deadline of a parked task: nothing else is going to end its wait."""
        if task.parked and task.deadline_s != math.inf and not task.explicit:
            self._arm_explicit(task)

    def _arm(self, task: Task) -> None:
        """See that a timer stands at or before the deadline of the wait that begins."""
        if task.explicit:
            self._arm_explicit(task)
        elif task.timer_s == math.inf:
            self._arm_default(task, task.clock + task.deadline_s)

    def _arm_explicit(self, task: Task) -> None:
        wait, due_s = task.wait, task.clock + task.deadline_s
        self.env.at(max(due_s, self.env.now), LATE + task.rank, partial(self._expire, task, wait, due_s))

    def _arm_default(self, task: Task, due_s: float) -> None:
        task.timer_s = max(due_s, self.env.now)
        self._default_timers += 1
        self.env.at(task.timer_s, LATE + task.rank, partial(self._default_fires, task))

    def _default_fires(self, task: Task) -> None:
        self._default_timers -= 1
        task.timer_s = math.inf
        if task.parked and not task.explicit:
            due_s = task.clock + task.deadline_s
            if due_s <= self.env.now:
                self._expire(task, task.wait, due_s)
            else:
                self._arm_default(task, due_s)

    def ends_a_wait(self, action: partial[None]) -> bool:
        """Whether an event's action is an explicit deadline that is still to end a wait: no default, no return."""
        return action.func == self._expire and action.args[0].wait is action.args[1]

    def _expire(self, task: Task, wait: Wait | None, due_s: float) -> None:
        if task.parked and task.wait is wait and wait is not None:
            task.clock = max(task.clock, due_s)
            self.resume(task, timeout(task, wait))
