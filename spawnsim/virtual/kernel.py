"""The rule of virtual time: local clocks over SimPy's clock, tasks in greenlets.

Each task owns a local clock. Computing and sending move or stamp that clock and switch to nobody: *effects may run
ahead*. What others could still change must wait for its time: *observations* park the task until SimPy's clock
reaches the task's own. Then every task that could act earlier has acted.

The invariant that makes this exact: a task that may run has `clock >= env.now`. A parked task may be behind; whatever
wakes it carries a time of at least `env.now`.

*Deadlock and livelock.* If all tasks wait and no event is due but default deadlines, the run is a deadlock. It is a
livelock if all tasks that do not wait poll, for `livelock.LIMIT` polls in a row nothing has happened anywhere (no send,
access, arrival at a collective, computing, end of a wait), and no event is due that could let a poll succeed: only the
pollers' own returns and default deadlines are left. What others sleep or compute, a timer, a planned fault, a message
on its way: each is due, however late, and polling goes on. Polls count, never seconds; sleeps and tolls between polls
change nothing.

This room knows tasks, clocks and waiting. It must not know messages, communicators or networks.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from greenlet import GreenletExit, getcurrent

from spawnsim.errors import WorldError
from spawnsim.virtual import torchmodes
from spawnsim.virtual.garbage import unhurried
from spawnsim.virtual.tasks import (
    AFTERWARDS,
    FINALIZER,
    PATIENCE,
    RUN_AHEAD,
    Carrier,
    Nobody,
    RankDied,
    Task,
    Wait,
    current_task,
    current_world,
)
from spawnsim.virtual.timers import Timers

__all__ = ["Kernel", "RankDied", "Task", "Wait", "current_task", "current_world"]


class Kernel(Timers):
    """Runs tasks: first all that are ready, then the next event of SimPy's heap."""

    def __init__(self, deadline_s: float = math.inf) -> None:
        super().__init__()
        self.ready: deque[Task] = deque()
        self.tasks: list[Task] = []
        self.hub = getcurrent()
        self.owner: Any = None  # whoever runs this kernel: opaque here
        self.current: Task = AFTERWARDS
        self._dead: Any = Nobody(lambda: self._refuse(getcurrent().task))
        self.deadline_s = deadline_s
        self.releases: list[Callable[[], None]] = []  # to be called before time moves: may make tasks ready
        self.on_end: Callable[[Task], None] = lambda task: None
        self.entered: list[Callable[[Task], None]] = []  # called when a task that had left goes on
        self.roused: Callable[[Task], None] | None = None  # called when a task is to take note of an error
        self.failure: BaseException | None = None
        self.closed = False
        self.in_turn = (
            False  # whether who is woken goes on in the order of ranks: without latency others can tell
        )
        self.idle = 0  # polls that found nothing since something last happened
        self.fruitless: Callable[[], None] = lambda: None  # to be called by polls that found nothing
        self.steps = 0  # events taken from the heap
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
        if self.closed:
            self._refuse(task)
        task.budget = RUN_AHEAD
        if not self.ready and not self.releases and env.jump(task.clock, task.rank):
            return
        env.at(task.clock, task.rank, partial(self.ready.append, task))
        self._leave(task)
        if task.thrown is not None:
            self._raise(task)

    def effect(self) -> None:
        """Count an effect of the running task; now and then wait for the others, to bound what is queued."""
        self.idle = 0
        self.run_ahead()

    def run_ahead(self) -> None:
        """Let the running task go on before its time, but not for ever."""
        task = self.current
        task.budget -= 1
        if task.budget <= 0:
            self.observe()

    def block(self, wait: Wait, *, lost: bool = False) -> None:
        """Park the running task until `resume`, or if all is `lost` until its deadline.

        Raises what the task is resumed with.
        """
        task = self.current
        task.wait, task.parked = wait, True
        if lost:
            self.bound(task)
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
            if self.in_turn:
                self.env.at(self.env.now, task.rank, partial(self.ready.append, task))
            else:
                self.ready.append(task)

    def throw(self, task: Task, error: BaseException) -> None:
        """Raise `error` in a task when it next runs; wake it if it is parked, at the present time."""
        if task.parked:
            task.clock = max(task.clock, self.env.now)
            self.resume(task, error)
        else:
            task.thrown = error

    def die(self) -> RankDied:
        """Return what ends the running task, whose rank has died. What its `finally` blocks call is refused."""
        self.current = self._dead
        return RankDied()

    def _raise(self, task: Task) -> None:
        error, task.thrown = task.thrown, None
        assert error is not None
        if isinstance(error, RankDied):
            raise self.die()
        if self.roused is not None and isinstance(error, WorldError):
            self.roused(task)
        raise error

    def _leave(self, task: Task) -> None:
        """Give the processor to the next ready task, or to the hub."""
        if self.closed:
            self._refuse(task)
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

    def stop(self, error: BaseException) -> NoReturn:
        """End the run with an error, from the running task, whose program cannot catch it."""
        self.fail(error, self.current)
        self._leave(self.current)
        raise GreenletExit

    def fail(self, error: BaseException, task: Task) -> None:
        """Note that a task's error ends the run, as soon as it is the hub's turn."""
        if self.failure is None:
            error.__dict__["_task"], self.failure = task, error

    def _follower(self) -> Task | None:
        """Return the next task to run, having let events happen until there is one; None if that is up to the hub."""
        ready = self.ready
        if self.failure is not None:
            return None
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

    # -- the loop ------------------------------------------------------------------------------------------

    def run(self, judge: Callable[[], None] = lambda: None) -> None:
        """Run until no task can go on, call `judge`, and end the tasks that are left.

        Those wait for each other, or for nothing. `judge` may look at them, and tell what is wrong.
        """
        with unhurried(self._collecting):
            try:
                try:
                    self._run()
                except KeyboardInterrupt as stop:
                    self.failure = stop
                judge()
            finally:
                self._close()
                self.current = AFTERWARDS

    def _collecting(self, begins: bool) -> None:
        """Take note of Python's collector: what its finalizers call is called by no rank, whoever runs now."""
        if begins:
            self._interrupted, self.current = self.current, FINALIZER
        else:
            self.current = self._interrupted

    def _run(self) -> None:
        env, ready = self.env, self.ready
        while True:
            while ready:
                self._enter(ready.popleft())
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

    def _enter(self, task: Task) -> None:
        """Let a task run, from the hub.

        Whatever unwinds a task's stack (C++ does when torch raises) goes on from its beginning into the hub's, and
        must find there what the hub was calling when the task began. So tasks are begun and continued by this one
        call, in functions that Python runs in one frame of C; a `throw` from elsewhere ended in segmentation faults.
        """
        self.current = task
        task.carrier.switch()

    # -- the end -------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """End every task that is alive where it waits: its `finally` blocks run, its further calls are refused."""
        self.closed = True
        for task in self.tasks:
            task.budget = 0  # so that effects, too, come to `observe`
        for task in self.tasks:
            if task.carrier:  # begun, and not over
                self._enter(task)

    def _refuse(self, task: Task) -> NoReturn:
        """End a call that is made after the end of the run, or of the rank.

        A program that takes no notice is left where it stands.
        """
        task.refused += 1
        if task.refused > PATIENCE:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(task.carrier))  # collected, it would be run once more
            torchmodes.suspend()
            while True:
                self.hub.switch()
        raise GreenletExit
