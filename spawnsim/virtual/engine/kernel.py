"""The rule of virtual time: local clocks over SimPy's clock, tasks in greenlets or threads (`carriers`).

Each task owns a local clock. Computing and sending advance or stamp that clock without a switch: *effects may run
ahead*. Anything that other tasks could still change must wait for its time: *observations* park the task until SimPy's
clock reaches the task's clock. By then every task that could act earlier has acted.

The invariant that makes this exact: a task that may run has `clock >= env.now`. A parked task may be behind; the event
that wakes it carries a time of at least `env.now`.

*Deadlock and livelock.* The run is a deadlock if all tasks wait and only default deadlines are due. It is a livelock if
three conditions hold: every task that does not wait polls; for `diagnosis.LIVELOCK_POLLS` polls in a row nothing has
happened anywhere (no send, access, arrival at a collective, computing or end of a wait); and no due event could let a
poll succeed, so that only the pollers' own returns and default deadlines remain. Sleeps and computations of other
tasks, timers, planned faults and messages on their way are all due events, however late, and let polling continue.
Polls count, never seconds: sleeps and the costs of calls between polls change nothing.

*Timers* end waits at their deadlines. An explicit deadline is an ordinary event. A default deadline only means "too
late". Each task has one default timer, which is armed again when it fires: SimPy cannot cancel events, and a timer for
each call would fill the heap.

The kernel handles tasks, clocks and waiting. It must not depend on messages, communicators or networks.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import partial
from heapq import heappop, heappush
from typing import Any, NoReturn, Protocol

from greenlet import GreenletExit, getcurrent

from spawnsim.errors import Timeout, UsageError, WorldError
from spawnsim.virtual.engine.carriers import CARRIERS, Carrier, Threads
from spawnsim.virtual.engine.event_queue import LATE, Entry, EventQueue, ScheduledCall
from spawnsim.virtual.interpreter import AmidBackwardError, watched_collections

# Effects that a task may queue before it waits for the other tasks. Without a bound, a rank that only sends would hold
# all its messages in memory before any is received. The bound changes no result: waiting earlier is always allowed.
RUN_AHEAD = 4096
# Calls that a task may make after its end. Otherwise a loop around `except BaseException` would keep the run from
# ending.
PATIENCE = 32
# An attribute of the threads started by ranks that are greenlets: calling it refuses their calls.
STRAY = "_spawnsim_stray"
Program = Callable[[int], Any]  # the program of a task, called with its rank


class Wait(Protocol):
    """The description of a parked task's wait. It may be lazy, since mostly reports evaluate it."""

    def describe(self) -> str:
        """Return the call with its peer and tag, such as `Recv(source=3, tag=7)`."""
        ...

    def peers(self) -> Sequence[int]: ...

    def missing(self, by_s: float = math.inf) -> Sequence[int]:
        """Return the ranks that had not yet arrived by a time, numbered in the communicator of the call."""
        ...

    def sequence(self) -> int:
        """Return the number of the collective on its communicator; -1 for other calls."""
        ...


class Timer(IntEnum):
    """The state of a task's default timer: not set, set, or set with an event in the heap."""

    NONE, SET, ARMED = 0, 1, 2


class Task:
    """A line of execution of a rank, with its own clock: the rank's program, or a background task next to it."""

    __slots__ = (
        "background", "budget", "carrier", "clock", "deadline_s", "error", "explicit", "kernel", "parked", "polls",
        "program", "rank", "refused", "thrown", "timed", "timer", "turn", "wait",
    )  # fmt: skip

    def __init__(
        self, kernel: Kernel, rank: int, program: Program, *, clock: float, background: bool
    ) -> None:
        self.kernel, self.rank, self.clock = kernel, rank, clock
        self.program: Program | None = program  # None once it has begun
        self.background = background  # whether it runs next to the rank's program
        self.carrier: Carrier
        self.parked = False
        self.wait: Wait | None = None
        self.thrown: BaseException | None = None  # raised in the task when it next runs
        self.error: BaseException | None = None  # the exception that ended it, if any
        self.budget = RUN_AHEAD
        self.deadline_s, self.explicit = kernel.deadline_s, False
        self.timer: int = Timer.NONE  # its one default timer
        self.turn: ScheduledCall | None = None  # makes it ready at a time; created by its first observation
        self.polls = 0  # polls without a result
        self.timed = False  # whether it has read its clock since the watchdog's last check
        self.refused = 0  # calls that it made after its end

    @property
    def name(self) -> str:
        return f"rank {self.rank} (background)" if self.background else f"rank {self.rank}"

    @property
    def alive(self) -> bool:
        """Whether the task may still run: it has neither ended nor been abandoned."""
        return not self.carrier.dead and self.refused <= PATIENCE

    def __repr__(self) -> str:
        return f"Task({self.name}, clock={self.clock:.6g})"


class RankDied(GreenletExit):  # type: ignore[misc]  # greenlet has no types
    """Ends a rank's program wherever it is at the rank's time of death. No `except Exception` catches it."""


class NoTask:
    """Replaces the running task where no rank may make a call.

    Every call first reads the clock or rank of the running task, so one replacement refuses all calls. Permitted calls
    pay nothing for it.
    """

    def __init__(self, refusal: Callable[[], BaseException]) -> None:
        self._refusal = refusal

    def __getattr__(self, name: str) -> NoReturn:
        raise self._refusal()


FINALIZER: Any = NoTask(
    lambda: UsageError(
        "a finalizer that Python's garbage collector runs cannot communicate: it runs on an arbitrary rank. "
        "Free windows and end communication explicitly, or break the cycle of references"
    )
)
AFTERWARDS: Any = NoTask(
    lambda: UsageError("a communication call outside a run: its ranks have ended or have not started")
)


def _carry() -> None:
    """Run the program of the calling task and keep its outcome: SimPy must never see a rank's exception."""
    task = getcurrent().task
    kernel, program, task.program = task.kernel, task.program, None
    for resumed in kernel.on_resume:
        resumed(task)
    # Called directly from here, the Python functions below use no C stack, so a wait has little of it to save.
    try:
        program(task.rank)
    except GreenletExit:
        pass
    except BaseException as error:  # noqa: BLE001 - a rank's outcome, whatever it is, is judged by the cluster
        task.error = error
    kernel._carriers.suspend_modes()  # a mode that the program leaves active must not outlive it
    kernel.on_end(task)


def current_task() -> Task | None:
    """Return the task that runs the caller, or None outside virtual ranks."""
    return getattr(getcurrent(), "task", None)


def timeout(task: Task, wait: Wait) -> Timeout:
    """Return the error of a wait that reached its deadline."""
    ranks = wait.missing(task.clock)
    missing = ", ".join(map(str, ranks))
    whom = f"; missing: rank {missing}" if missing else ""
    message = (
        f"{task.name} waited {task.deadline_s:g} s in {wait.describe()} and missed its deadline at "
        f"{task.clock:.6g} s{whom}. A larger deadline (deadline_s, comm.clock.deadline) waits longer"
    )
    return Timeout(ranks, wait.describe(), wait.sequence(), message)


def refuse_stray() -> None:
    """End the run and the calling thread if a rank that is a greenlet started this thread; see `strays`."""
    refuse = vars(threading.current_thread()).get(STRAY)
    if refuse is not None:
        refuse()


def current_world() -> Any:
    """Return the owner of the kernel that runs the caller's task, or raise `UsageError` outside virtual ranks."""
    task = current_task()
    if task is None:
        refuse_stray()
        raise UsageError("a communication call outside a virtual rank: no rank is running")
    return task.kernel.owner


class Kernel:
    """Runs tasks: first all ready tasks, then the next event of SimPy's heap."""

    def __init__(
        self, deadline_s: float = math.inf, carrier: str = "greenlets", *, ties: str = "fifo"
    ) -> None:
        self.env = EventQueue(ties)
        self._carriers = CARRIERS[carrier]()
        self._timers: list[tuple[float, int, int, Task]] = []  # a heap of default timers: time, rank, number
        self._timers_set = 0  # so far
        self._alarms = 0  # events in the heap that stand for default timers
        self.ready: deque[Task] = deque()
        self.tasks: list[Task] = []
        self.hub = self._carriers.hub
        self.owner: Any = None  # the world whose kernel this is; opaque here
        self.current: Task = AFTERWARDS
        self._dead: Any = NoTask(lambda: self._refuse(getcurrent().task))
        self.deadline_s = deadline_s
        self.releases: list[Callable[[], None]] = []  # called before time advances; may make tasks ready
        self.on_end: Callable[[Task], None] = lambda task: None
        self.on_resume: list[Callable[[Task], None]] = []  # called when a task that had left continues
        # Called before a program outside all ranks continues in the middle of a run: see `scripts.spawning`.
        self.on_leave: list[Callable[[], None]] = []
        self.on_wake: Callable[[Task], None] | None = None  # called when a task is about to receive an error
        self.failure: BaseException | None = None
        self.closed = False
        # Whether tasks that are woken together continue in the order of ranks: see `resume`.
        self.in_turn = False
        self.idle = 0  # polls without a result since the last progress
        self.fruitless: Callable[[], None] = lambda: None  # to be called by polls without a result
        self.stuck: Callable[[Task], Exception] = lambda task: UsageError(f"{task.name} cannot wait here")
        self.stalled: Callable[[], bool] = lambda: False  # called at a deadlock; whether it has woken a task
        self.steps = 0  # events taken from the heap
        self._accident: Exception | None = None  # raised by an event that ran on a task's stack

    # -- tasks ---------------------------------------------------------------------------------------------

    @property
    def thread(self) -> int:
        return self._carriers.thread()

    @property
    def threaded(self) -> bool:
        return isinstance(self._carriers, Threads)

    def spawn(self, rank: int, program: Program, *, clock: float = 0.0, background: bool = False) -> Task:
        """Add a task of a rank that will run `program(rank)`; it starts when the kernel next runs ready tasks.

        `background`: it is a background task, and not the rank's program.
        """
        task = Task(self, rank, program, clock=clock, background=background)
        # A function that all tasks share: a closure for each task, with its contents, cost half a kilobyte more a rank.
        task.carrier = self._carriers.carry(task, _carry)
        self.tasks.append(task)
        self.ready.append(task)
        return task

    # -- waiting -------------------------------------------------------------------------------------------

    def observe(self, kind: int = 0) -> None:
        """Wait until SimPy's clock has reached the running task's clock: the state visible then can no longer change.

        Among the events of that time, the task is ordered by its rank plus `kind`: LATE for a wait that reaches a
        deadline.
        """
        task, env = self.current, self.env
        place = task.rank + kind
        if self.closed:
            self._refuse(task)
        task.budget = RUN_AHEAD
        # If nothing can happen before this task's time, the clock advances without an event or a switch. A rank that
        # polls alone then pays only for the call; with an event per poll, polling was twice as slow. Otherwise some
        # event comes first, which `_follower` relies on.
        if not self.ready and not self.releases and env.jump(task.clock, place):
            return
        if task.turn is None:
            task.turn = ScheduledCall(partial(self.ready.append, task))
        self._leave(task, env.entry(task.clock, place, task.turn))
        if task.thrown is not None:
            self._raise(task)

    def effect(self) -> None:
        """Count an effect of the running task. Occasionally wait for the other tasks, to bound the queue of effects."""
        self.idle = 0
        task = self.current  # as in `run_ahead`
        task.budget -= 1
        if task.budget <= 0:
            self.spent(task)

    def run_ahead(self) -> None:
        """Let the running task continue before its time, within its budget."""
        task = self.current
        task.budget -= 1
        if task.budget <= 0:
            self.spent(task)

    def spent(self, task: Task) -> None:
        """Let a task with an exhausted budget wait for the other tasks. Where it cannot wait, it continues."""
        if not self.closed and self._carriers.stuck():
            task.budget = RUN_AHEAD
        else:
            self.observe()

    def block(self, wait: Wait, *, lost: bool = False) -> None:
        """Park the running task until `resume`, or, if `lost`, until its deadline.

        Raises the error with which the task is resumed.
        """
        task = self.current
        task.wait, task.parked = wait, True
        if lost:
            self.bound(task)
        if task.deadline_s != math.inf and (task.explicit or not task.timer):
            self._arm(task)
        self._leave(task)
        task.wait, task.budget = None, RUN_AHEAD
        if task.thrown is not None:
            self._raise(task)

    def resume(self, task: Task, error: BaseException | None = None) -> None:
        """Make a parked task ready; `error` is raised where it waits. Repeated calls have no effect."""
        if task.parked:
            task.parked = False
            task.thrown = error
            self.idle = 0
            # Without latency a message sent now arrives now, so other ranks can see the order in which ranks continue
            # at one time. It must then be the order of ranks, independent of the event that woke them.
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
        """Return the exception that ends the running task of a dead rank. Calls in its `finally` blocks are refused."""
        self.current = self._dead
        return RankDied()

    def _raise(self, task: Task) -> None:
        error, task.thrown = task.thrown, None
        assert error is not None
        if isinstance(error, RankDied):
            raise self.die()
        if self.on_wake is not None and isinstance(error, WorldError):
            self.on_wake(task)
        raise error

    def _leave(self, task: Task, turn: Entry | None = None) -> None:
        """Yield to the next ready task, or to the hub; `turn` is the task's next event, if it has one."""
        if self.closed:
            self._refuse(task)
        try:
            restore = self._carriers.suspend_modes()
        except AmidBackwardError:
            error = self.stuck(task)
            task.wait, task.parked = None, False
            raise error from None
        # Switch from task to task directly, and run events on this task's stack: through the hub each wait would cost
        # two switches. If the next event resumes this task itself, no switch is needed.
        follower = self._follower(task, turn)
        if follower is None:
            self.hub.switch()
        elif follower is not task:
            self.current = follower
            follower.carrier.switch()
        if restore is not None:
            restore()
        if follower is not task:
            for resumed in self.on_resume:
                resumed(task)
        if self.closed:
            raise GreenletExit

    def stop(self, error: BaseException) -> NoReturn:
        """End the run with an error, from the running task; its program cannot catch the error."""
        self.fail(error, self.current)
        self._leave(self.current)
        raise GreenletExit

    def fail(self, error: BaseException, task: Task) -> None:
        """Record an error of a task that ends the run as soon as the hub runs next. Only the first error counts."""
        if self.failure is None:
            error.__dict__["_task"], self.failure = task, error

    def _follower(self, task: Task, turn: Entry | None) -> Task | None:
        """Return the next task to run, after running events until a task is ready; None if the hub must decide."""
        ready, env = self.ready, self.env
        while not ready and not self.releases and self.failure is None:
            if turn is None and env.scheduled() <= self._alarms:
                return None
            self.steps += 1
            try:
                env.step()
            except Exception as error:  # noqa: BLE001 - not the fault of the task that happens to run: the hub raises it
                self._accident = error
                break
            # The turn of a task that leaves enters the heap only if other events precede it. A rank's access to its own
            # part of a window then needs only the event of the access: neither an event to continue nor a switch.
            if turn is not None and not ready and not self.releases and env.reach(turn):
                return task
        if turn is not None:
            env.enter(turn)
        # A new greenlet inherits the recursion depth of the task that starts it: a chain of ranks, each started by the
        # previous one, would end in a RecursionError. So the hub starts all tasks.
        hub = self.failure is not None or self._accident is not None or not ready or not ready[0].carrier
        return None if hub else ready.popleft()

    # -- deadlines -----------------------------------------------------------------------------------------

    def bound(self, task: Task) -> None:
        """Turn the default deadline of a parked task into an event: nothing else will end its wait."""
        if task.parked and task.deadline_s != math.inf and not task.explicit:
            self._arm_explicit(task)

    def _arm(self, task: Task) -> None:
        if task.explicit:
            self._arm_explicit(task)
        elif not task.timer:
            self._arm_default(task, task.clock + task.deadline_s)

    def _arm_explicit(self, task: Task) -> None:
        wait, due_s = task.wait, task.clock + task.deadline_s
        self.env.at(max(due_s, self.env.now), LATE + task.rank, partial(self._expire, task, wait, due_s))

    # SimPy cannot remove an event from its heap, and a timer for each wait would fill it: hardly any wait reaches its
    # deadline. So a task has one default timer at a time, armed for the first deadline. If it fires too early for the
    # wait then in progress, it is armed again for that wait. Default timers have their own heap, and only the first one
    # has an event in SimPy's heap: an event for each would take half a kilobyte per rank.
    def _arm_default(self, task: Task, due_s: float) -> None:
        task.timer = Timer.SET
        self._timers_set += 1
        heappush(self._timers, (max(due_s, self.env.now), task.rank, self._timers_set, task))
        self._arm_first()

    def _arm_first(self) -> None:
        """Ensure that an event stands for the default timer that is due first."""
        if self._timers:
            due_s, rank, _, task = self._timers[0]
            if task.timer is not Timer.ARMED:
                task.timer = Timer.ARMED
                self._alarms += 1
                self.env.at(due_s, LATE + rank, partial(self._default_fires))

    def _default_fires(self) -> None:
        self._alarms -= 1
        task = heappop(self._timers)[3]
        task.timer = Timer.NONE
        # A wait without a deadline (of members in `recover`) sets no timer: a timer without a time would replace the
        # timers of later waits.
        if task.parked and not task.explicit and task.deadline_s != math.inf:
            due_s = task.clock + task.deadline_s
            if due_s <= self.env.now:
                self._expire(task, task.wait, due_s)
            else:
                self._arm_default(task, due_s)
        self._arm_first()

    def ends_a_wait(self, action: partial[None]) -> bool:
        """Whether an event is an explicit deadline that can still end a wait: no default timer, no return of a task."""
        return action.func == self._expire and action.args[0].wait is action.args[1]

    def _expire(self, task: Task, wait: Wait | None, due_s: float) -> None:
        if task.parked and task.wait is wait and wait is not None:
            task.clock = max(task.clock, due_s)
            self.resume(task, timeout(task, wait))

    # -- the loop ------------------------------------------------------------------------------------------

    def run(self, judge: Callable[[], None] = lambda: None) -> None:
        """Run until no task can continue, call `judge`, and end the remaining tasks.

        The remaining tasks wait for each other, or for nothing. `judge` may inspect them and record an error.
        """
        with watched_collections(self._collecting, self._carriers.ours):
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
        """Track Python's collector: calls made by finalizers do not belong to the rank that runs now."""
        if begins:
            self._interrupted, self.current = self.current, FINALIZER
        else:
            self.current = self._interrupted

    def _run(self) -> None:
        env, ready = self.env, self.ready
        while True:
            # Tasks before releases before events: a ready task's actions at the present time may affect the decision of
            # a release, and neither may happen after time has advanced.
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
            # Only default deadlines remain, which mean "too late": nothing can end the remaining waits. Firing them
            # would report each deadlock as a timeout of the rank that waits longest, without its cycle.
            if env.scheduled() <= self._alarms:
                if self.stalled():
                    continue
                return
            self.steps += 1
            env.step()

    def _enter(self, task: Task) -> None:
        # A greenlet's stack begins in the hub's. An unwinding of the stack (C++ unwinds when torch raises) continues
        # from the greenlet's beginning into the hub's frames, and must find there the call that the hub was making when
        # the task began. So tasks are started, continued and ended by this one call, in functions that Python runs in
        # one C frame. Throwing into them from elsewhere ended in segmentation faults.
        self.current = task
        task.carrier.switch()

    # -- the end -------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """End every living task where it waits: its `finally` blocks run, its further calls are refused."""
        self.closed = True
        # Sends and computations check only their budget. Without a budget they call `observe`, which refuses them.
        for task in self.tasks:
            task.budget = 0
        for task in self.tasks:
            if task.carrier:  # started and not ended
                self._enter(task)

    def _refuse(self, task: Task) -> NoReturn:
        """End a call made after the end of the run or of the rank; after `PATIENCE` such calls, never return."""
        task.refused += 1
        if task.refused > PATIENCE:
            # A collected greenlet runs once more, to be ended by GreenletExit, which this program catches. An extra
            # reference that is never released prevents the collection: a single, intentional leak.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(task.carrier))
            with suppress(AmidBackwardError):
                self._carriers.suspend_modes()
            while True:
                self.hub.switch()
        raise GreenletExit
