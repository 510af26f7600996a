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
from collections.abc import Callable, Sequence
from heapq import heappush
from typing import Any, Protocol

import simpy
from greenlet import GreenletExit, getcurrent, greenlet

from spawnsim.errors import InternalError, Livelock, Timeout, UsageError
from spawnsim.virtual import torchmodes

RUN_AHEAD = (
    4096  # effects that a task may queue before it waits for the others: bounds memory, changes no result
)
IDLE_LIMIT = 1_000_000  # observations in a row, by all tasks together, in which nothing happened


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


class Appointment(simpy.Event):
    """A SimPy event at an absolute time. SimPy itself schedules by delay, and now + (t - now) is not always t."""

    def __init__(self, clockwork: Clockwork, action: Callable[[], None]) -> None:
        super().__init__(clockwork)
        self._ok, self._value = True, None
        self.action: Callable[[], None] | None = action
        self.callbacks = [_act]

    def cancel(self) -> None:
        """Do nothing when the time comes. SimPy cannot take an event out of its heap."""
        self.action = None


def _act(event: Any) -> None:
    if event.action is not None:
        event.action()


class Clockwork(simpy.Environment):
    """SimPy's environment with absolute times; equal times are ordered by (rank, sequence)."""

    def at(self, time_s: float, rank: int, action: Callable[[], None]) -> Appointment:
        """Call `action` when the clock reads `time_s`."""
        if time_s < self._now:
            raise InternalError(f"an event at {time_s!r} s was asked for when the clock read {self._now!r} s")
        appointment = Appointment(self, action)
        heappush(self._queue, (time_s, rank, next(self._eid), appointment))  # type: ignore[misc]
        return appointment

    def jump(self, time_s: float, rank: int) -> bool:
        """Set the clock forward if nothing is scheduled before (time, rank); say whether it was done."""
        if self._queue and self._queue[0][:2] <= (time_s, rank):
            return False
        self._now = time_s
        return True

    @property
    def scheduled(self) -> int:
        """Number of events in the heap."""
        return len(self._queue)


class Task:
    """One line of execution of a rank, with its own clock: the rank's program, or a background task beside it."""

    __slots__ = (
        "budget", "carrier", "clock", "deadline_s", "error", "explicit", "kernel", "name", "parked",
        "rank", "thrown", "timer_s", "wait",
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

    @property
    def alive(self) -> bool:
        """Whether the task has not ended yet."""
        return not self.carrier.dead

    def __repr__(self) -> str:
        return f"Task({self.name}, clock={self.clock:.6g})"


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
        self.entered: Callable[[Task], None] | None = None  # called when a task that had left goes on
        self.failure: BaseException | None = None
        self.closed = False
        self.idle = 0  # observations since something last happened
        self.steps = 0  # events taken from the heap
        self._default_timers = 0

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
        if self.entered is not None:
            self.entered(task)
        try:
            program()
        except GreenletExit:
            pass
        except BaseException as error:  # noqa: BLE001 - a rank's outcome, whatever it is, is judged by the cluster
            task.error = error
        restore = torchmodes.suspend()
        if restore is not None:  # it ended inside a mode: nobody needs it back
            restore = None
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
        if task.deadline_s != math.inf:
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
        raise error

    def _leave(self, task: Task) -> None:
        """Give the processor to the next ready task, or to the hub."""
        if self.closed:
            raise GreenletExit
        restore = torchmodes.suspend()
        if (
            self.ready and self.ready[0].carrier
        ):  # a task not yet begun would inherit this one's recursion depth
            follower = self.ready.popleft()
            if follower is not task:
                self.current = follower
                follower.carrier.switch()
        else:
            self.hub.switch()
        if restore is not None:
            restore()
        if self.entered is not None:
            self.entered(task)
        if self.closed:
            raise GreenletExit

    # -- deadlines -----------------------------------------------------------------------------------------

    def _arm(self, task: Task) -> None:
        """See that a timer stands at or before the deadline of the wait that begins."""
        wait, due_s = task.wait, task.clock + task.deadline_s
        if task.explicit:
            self.env.at(max(due_s, self.env.now), task.rank, lambda: self._expire(task, wait, due_s))
        elif task.timer_s == math.inf:
            self._arm_default(task, due_s)

    def _arm_default(self, task: Task, due_s: float) -> None:
        # One timer a task, re-armed when it fires: SimPy cannot cancel, and a timer a call would fill the heap.
        task.timer_s = max(due_s, self.env.now)
        self._default_timers += 1
        self.env.at(task.timer_s, task.rank, lambda: self._default_fires(task))

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
        env, ready = self.env, self.ready
        while True:
            while ready:
                task = self.current = ready.popleft()
                task.carrier.switch()
                if self.failure is not None:
                    return
            if self.releases:
                releases, self.releases = self.releases, []
                for release in releases:
                    release()
                continue
            if env.scheduled <= self._default_timers:  # nothing but timers that only say "too late"
                return
            self.steps += 1
            env.step()

    def close(self) -> None:
        """End every task that is still alive, running its `finally` blocks; their calls end at once."""
        self.closed = True
        for task in self.tasks:
            while not task.carrier.dead:
                if not task.carrier:  # never started
                    break
                self.current = task
                task.carrier.throw(GreenletExit)
