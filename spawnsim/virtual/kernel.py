"""The rule of virtual time: local clocks over SimPy's clock, tasks in greenlets.

Each task owns a local clock. Computing and sending move or stamp that clock and switch to nobody: *effects may run
ahead*. What others could still change must wait for its time: *observations* park the task until SimPy's clock
reaches the task's own. Then every task that could act earlier has acted.

The invariant that makes this exact: a task that may run has `clock >= env.now`. A parked task may be behind; whatever
wakes it carries a time of at least `env.now`.

This room knows tasks, clocks and waiting. It must not know messages, communicators or networks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent

from spawnsim.errors import Livelock, WorldError
from spawnsim.virtual import torchmodes
from spawnsim.virtual.clockwork import LATE, Clockwork
from spawnsim.virtual.garbage import unhurried
from spawnsim.virtual.tasks import RUN_AHEAD, Carrier, Task, Wait, current_task, current_world, timeout

__all__ = ["Kernel", "Task", "Wait", "current_task", "current_world"]

IDLE_LIMIT = 1_000_000  # observations in a row, by all tasks together, in which nothing happened


class Kernel:
    """Runs tasks: first all that are ready, then the next event of SimPy's heap."""

    def __init__(self, deadline_s: float = math.inf) -> None:
        self.env = Clockwork()
        self.ready: deque[Task] = deque()
        self.tasks: list[Task] = []
        self.hub = getcurrent()
        self.owner: Any = None  # whoever runs this kernel: opaque here
        self.current: Task
        self.deadline_s = deadline_s
        self.releases: list[Callable[[], None]] = []  # to be called before time moves: may make tasks ready
        self.on_end: Callable[[Task], None] = lambda task: None
        self.entered: list[Callable[[Task], None]] = []  # called when a task that had left goes on
        self.roused: Callable[[Task], None] | None = None  # called when a task is to take note of an error
        self.failure: BaseException | None = None
        self.closed = False
        self.idle = 0  # observations since something last happened
        self.steps = 0  # events taken from the heap
        self._default_timers = 0
        self._accident: Exception | None = None  # raised by an event that a task let happen

    # -- tasks ---------------------------------------------------------------------------------------------

    def spawn(self, rank: int, program: Callable[[], Any], *, clock: float = 0.0, name: str = "") -> Task:
        """Add a task that will run `program`; it starts when the kernel next runs ready tasks."""
        task = Task(self, rank, clock, name or f"rank {rank}")
        task.carrier = Carrier(lambda: self._carry(task, program), self.hub)
        task.carrier.task = task
        self.tasks.append(task)
        self.ready.append(task)
        return task

    def _carry(self, task: Task, program: Callable[[], Any]) -> None:
        """Run a task's program and keep its outcome: SimPy must never see a rank's exception."""
        for entered in self.entered:
            entered(task)
        try:
            program()
        except GreenletExit:
            pass
        except BaseException as error:  # noqa: BLE001 - a rank's outcome, whatever it is, is judged by the cluster
            task.error = error
        torchmodes.suspend()  # a mode that it ended in must not outlive it, and nobody needs it back
        self.on_end(task)

    # -- waiting -------------------------------------------------------------------------------------------

    def observe(self) -> None:
        """Wait until SimPy's clock has reached the running task's: what it now sees, nobody can still change."""
        task, env = self.current, self.env
        self.idle += 1
        if self.idle > IDLE_LIMIT:
            raise Livelock(
                f"{IDLE_LIMIT:,} polls in a row saw nothing happen anywhere (last by {task.name} at "
                f"{task.clock:.6g} s): the program polls for something that nobody will do"
            )
        task.budget = RUN_AHEAD
        if (
            not self.ready
            and not self.releases
            and (task.clock <= env.now or env.jump(task.clock, task.rank))
        ):
            return
        env.at(task.clock, task.rank, lambda: self.ready.append(task))
        self._leave(task)
        if task.thrown is not None:
            self._raise(task)

    def effect(self) -> None:
        """Count an effect of the running task; now and then wait for the others, to bound what is queued."""
        self.idle = 0
        task = self.current
        task.budget -= 1
        if task.budget <= 0:
            self.observe()

    def block(self, wait: Wait) -> None:
        """Park the running task until `resume`. Raises what the task is resumed with."""
        task = self.current
        task.wait, task.parked = wait, True
        if task.deadline_s != math.inf and (task.explicit or task.timer_s == math.inf):
            self._arm(task)
        self._leave(task)
        task.wait, task.budget = None, RUN_AHEAD
        if task.thrown is not None:
            self._raise(task)

    def resume(self, task: Task, error: BaseException | None = None) -> None:
        """Make a parked task ready (again and again does no harm); `error` is raised where it waits."""
        if task.parked:
            task.parked = False
            task.thrown = error
            self.idle = 0
            self.ready.append(task)

    def throw(self, task: Task, error: BaseException) -> None:
        """Raise `error` in a task when it next runs; wake it if it is parked."""
        if task.parked:
            self.resume(task, error)
        else:
            task.thrown = error

    def _raise(self, task: Task) -> None:
        error, task.thrown = task.thrown, None
        assert error is not None
        if self.roused is not None and isinstance(error, WorldError):
            self.roused(task)
        raise error

    def _leave(self, task: Task) -> None:
        """Give the processor to the next ready task, or to the hub."""
        if self.closed:
            raise GreenletExit
        restore = torchmodes.suspend()
        follower = self._follower()
        if follower is None:
            self.hub.switch()
        elif follower is not task:
            self.current = follower
            follower.carrier.switch()
        if restore is not None:
            restore()
        for entered in self.entered:
            entered(task)
        if self.closed:
            raise GreenletExit

    def _follower(self) -> Task | None:
        """Return the next task to run, having let events happen until there is one; None if that is up to the hub."""
        ready = self.ready
        while not ready:
            if self.releases or self.env.scheduled <= self._default_timers:
                return None
            try:
                self._step()
            except Exception as error:  # noqa: BLE001 - no fault of the task that happens to run: the hub raises it
                self._accident = error
                return None
        # a task not yet begun would inherit this one's recursion depth
        return ready.popleft() if ready[0].carrier else None

    def _step(self) -> None:
        self.steps += 1
        self.env.step()

    # -- deadlines -----------------------------------------------------------------------------------------

    def _arm(self, task: Task) -> None:
        """See that a timer stands at or before the deadline of the wait that begins."""
        wait, due_s = task.wait, task.clock + task.deadline_s
        if task.explicit:
            self.env.at(max(due_s, self.env.now), LATE, lambda: self._expire(task, wait, due_s))
        elif task.timer_s == math.inf:
            self._arm_default(task, due_s)

    def _arm_default(self, task: Task, due_s: float) -> None:
        # One timer a task, re-armed when it fires: SimPy cannot cancel, and a timer a call would fill the heap.
        task.timer_s = max(due_s, self.env.now)
        self._default_timers += 1
        self.env.at(task.timer_s, LATE, lambda: self._default_fires(task))

    def _default_fires(self, task: Task) -> None:
        self._default_timers -= 1
        task.timer_s = math.inf
        if task.parked and not task.explicit:
            due_s = task.clock + task.deadline_s
            if due_s <= self.env.now:
                self._expire(task, task.wait, due_s)
            else:
                self._arm_default(task, due_s)

    def _expire(self, task: Task, wait: Wait | None, due_s: float) -> None:
        if task.parked and task.wait is wait and wait is not None:
            task.clock = max(task.clock, due_s)
            self.resume(task, timeout(task, wait))

    # -- the loop ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until no task can go on. Tasks still alive then wait for each other (or for nothing)."""
        with unhurried():
            self._run()

    def _run(self) -> None:
        env, ready = self.env, self.ready
        while True:
            while ready:
                task = self.current = ready.popleft()
                task.carrier.switch()
                if self._accident is not None:
                    raise self._accident
                if self.failure is not None:
                    return
            if self.releases:
                releases, self.releases = self.releases, []
                for release in releases:
                    release()
                continue
            if env.scheduled <= self._default_timers:  # nothing but timers that only say "too late"
                return
            self._step()

    def close(self) -> None:
        """End every task that is still alive, running its `finally` blocks; their calls end at once."""
        self.closed = True
        for task in self.tasks:
            while not task.carrier.dead:
                if not task.carrier:  # never started
                    break
                self.current = task
                task.carrier.throw(GreenletExit)
