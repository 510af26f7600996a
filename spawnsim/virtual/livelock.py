"""Telling polls that will never succeed from polls that will: the rule is told in `kernel`.

A *fruitless* poll has found nothing, and knows of nothing that is on its way to it. Whatever happens anywhere sets
`kernel.idle` to 0, which counts them. Whether polls are endless cannot be known of a program in general; so each limit
below is one that a program which ends by itself will hardly reach:

* `LIMIT` polls in a row; in the second half of them each task that does not wait must have polled `EACH` times.
* A program that reads its clock between polls may wait for a time. It is given `DAY_S` of virtual time, or `TIMED`
  times as many polls, whatever comes first.

This room knows the kernel's tasks and events. Which messages are under way, it is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from spawnsim.errors import SpawnsimError
from spawnsim.virtual.clockwork import Appointment
from spawnsim.virtual.kernel import Kernel
from spawnsim.virtual.tasks import Task

LIMIT = 1_000_000
EACH = 10_000
TIMED = 100
DAY_S = 86_400.0


class Watchdog:
    """Ends the run of a kernel that is in a livelock.

    Args:
        kernel: whose polls are counted.
        under_way: says whether any message is on its way.
        report: makes the error of a number of polls in a row, and the virtual time when they began.
    """

    def __init__(
        self, kernel: Kernel, under_way: Callable[[], bool], report: Callable[[int, float], SpawnsimError]
    ) -> None:
        self._kernel, self._under_way, self._report = kernel, under_way, report
        self._began_s, self._polls = 0.0, 0  # of what goes on since something last happened
        self._before: dict[Task, int] = {}  # polls of each task when it was last looked at
        kernel.fruitless = self.fruitless

    def fruitless(self) -> None:
        """Count a poll of the running task that found nothing; look at the whole run now and then."""
        kernel = self._kernel
        kernel.current.polls += 1
        kernel.idle += 1
        if kernel.idle == 1:
            self._began_s, self._polls = kernel.current.clock, 0
        elif kernel.idle == LIMIT // 2:
            self._mark()
        elif kernel.idle >= LIMIT:
            self._judge()

    def _mark(self) -> None:
        """Begin to observe who polls."""
        kernel = self._kernel
        self._polls, kernel.idle = self._polls + LIMIT // 2, LIMIT // 2
        self._before = {task: task.polls for task in kernel.tasks}
        for task in kernel.tasks:
            task.timed = False

    def _judge(self) -> None:
        """End the run if it is in a livelock; else begin anew."""
        kernel = self._kernel
        running = [task for task in kernel.tasks if task.alive and not task.parked and task.clock < math.inf]
        endless = (
            all(task.polls - self._before.get(task, task.polls) >= EACH for task in running)
            and not any(map(self._matters, kernel.env.events()))
            and not self._under_way()
        )
        timed = any(task.timed for task in running)
        self._mark()
        if not endless:
            kernel.idle = 0
        elif not timed or self._long():
            kernel.stop(self._report(self._polls, self._began_s))

    def _long(self) -> bool:
        """Whether even programs that wait for a time have polled for too long."""
        return self._polls >= TIMED * LIMIT or self._kernel.current.clock - self._began_s >= DAY_S

    def _matters(self, event: Appointment) -> bool:
        """Whether an event could change what polls find. A task's return does not: its polls are looked at."""
        action = event.action
        if not isinstance(action, partial):
            return action is not None
        return self._kernel.ends_a_wait(action)
