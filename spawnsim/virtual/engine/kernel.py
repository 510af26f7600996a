"""The rule of virtual time: local clocks over SimPy's clock, tasks in greenlets or threads (`carriers`).

Each task owns a local clock. Computing and sending move or stamp that clock without a switch: *effects may run
ahead*. What others could still change must wait for its time: *observations* park the task until SimPy's clock
reaches the task's own. Then every task that could act earlier has acted.

The invariant that makes this exact: a task that may run has `clock >= env.now`. A parked task may be behind; whatever
wakes it carries a time of at least `env.now`.

*Deadlock and livelock.* If all tasks wait and no event is due but default deadlines, the run is a deadlock. It is a
livelock if all tasks that do not wait poll, for `diagnosis.LIVELOCK_POLLS` polls in a row nothing has happened
anywhere (no send, access, arrival at a collective, computing, end of a wait), and no event is due that could let a
poll succeed: only the pollers' own returns and default deadlines are left. What others sleep or compute, a timer, a
planned fault, a message on its way: each is due, however late, and polling goes on. Polls count, never seconds;
sleeps and the costs of calls between polls change nothing.

*Timers* end waits at their deadlines. An explicit deadline is an event like others. A default one only says "too
late": each task has one timer, armed again when it fires, since SimPy cannot cancel, and a timer for each call
would fill the heap.

The kernel knows tasks, clocks and waiting. It must not know messages, communicators or networks.
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

# Effects that a task may queue before it waits for the others. Without a bound a rank that only sends would hold all
# its messages in memory before any is received. It changes no result: to wait earlier is always allowed.
RUN_AHEAD = 4096
# Calls that a task may make after its end. A loop around `except BaseException` would otherwise keep the run from
# ending.
PATIENCE = 32
# An attribute of threads that a rank has started which is a greenlet: it refuses their calls.
STRAY = "_spawnsim_stray"
Program = Callable[[int], Any]  # of a task: given its rank


class Wait(Protocol):
    """What a parked task waits for. Only reports read it, so it may be as lazy as it likes."""

    def describe(self) -> str:
        """Return the call with its peer and tag, such as `Recv(source=3, tag=7)`."""
        ...

    def peers(self) -> Sequence[int]: ...

    def missing(self, by_s: float = math.inf) -> Sequence[int]:
        """Return the ranks that had not come by a time, numbered in the communicator of the call."""
        ...

    def sequence(self) -> int:
        """Return the number of the collective on its communicator; -1 for other calls."""
        ...


class Timer(IntEnum):
    """How the default timer of a task stands: not set, set, or set with an event in the heap for it."""

    NONE, SET, ARMED = 0, 1, 2


class Task:
    """One line of execution of a rank, with its own clock: the rank's program, or a background task beside it."""

    __slots__ = (
        "beside", "budget", "carrier", "clock", "deadline_s", "error", "explicit", "kernel", "parked", "polls",
        "program", "rank", "refused", "thrown", "timed", "timer", "turn", "wait",
    )  # fmt: skip

    def __init__(self, kernel: Kernel, rank: int, program: Program, *, clock: float, beside: bool) -> None:
        self.kernel, self.rank, self.clock = kernel, rank, clock
        self.program: Program | None = program  # None once it has begun
        self.beside = beside  # the rank's program
        self.carrier: Carrier
        self.parked = False
        self.wait: Wait | None = None
        self.thrown: BaseException | None = None  # raised in the task when it next runs
        self.error: BaseException | None = None  # how it ended, if badly
        self.budget = RUN_AHEAD
        self.deadline_s, self.explicit = kernel.deadline_s, False
        self.timer: int = Timer.NONE  # its one default timer
        self.turn: ScheduledCall | None = None  # makes it ready at a time; made when it first waits for one
        self.polls = 0  # that found nothing
        self.timed = False  # whether it has read its clock since the watchdog last looked
        self.refused = 0  # calls that it made after its end

    @property
    def name(self) -> str:
        return f"rank {self.rank} (background)" if self.beside else f"rank {self.rank}"

    @property
    def alive(self) -> bool:
        """Whether the task has not ended yet, nor was left where it stands."""
        return not self.carrier.dead and self.refused <= PATIENCE

    def __repr__(self) -> str:
        return f"Task({self.name}, clock={self.clock:.6g})"


class RankDied(GreenletExit):  # type: ignore[misc]  # greenlet has no types
    """Ends a rank's program where it stands when its time has come. No `except Exception` catches it."""


class NoTask:
    """Stands in for the running task where no rank may call anything.

    Every call first asks the running task for its clock or its rank, so one stand-in refuses them all, at no cost to
    the calls that are allowed.
    """

    def __init__(self, refusal: Callable[[], BaseException]) -> None:
        self._refusal = refusal

    def __getattr__(self, name: str) -> NoReturn:
        raise self._refusal()


FINALIZER: Any = NoTask(
    lambda: UsageError(
        "a finalizer that Python's garbage collector runs cannot communicate: it runs in whichever rank comes along. "
        "Free windows and end communication yourself, or break the cycle of references"
    )
)
AFTERWARDS: Any = NoTask(
    lambda: UsageError("a communication call outside a run: its ranks have ended, or have not begun")
)


def _carry() -> None:
    """Run the program of the calling task and keep its outcome: SimPy must never see a rank's exception."""
    task = getcurrent().task
    kernel, program, task.program = task.kernel, task.program, None
    for resumed in kernel.on_resume:
        resumed(task)
    # Called straight from here, each Python function below takes no stack of C, and a wait has little of it to save.
    try:
        program(task.rank)
    except GreenletExit:
        pass
    except BaseException as error:  # noqa: BLE001 - a rank's outcome, whatever it is, is judged by the cluster
        task.error = error
    kernel._carriers.suspend_modes()  # a mode that it ended in must not outlive it
    kernel.on_end(task)


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


def refuse_stray() -> None:
    """End the run, and the calling thread, if a rank that is a greenlet has started it: see `strays`."""
    refuse = vars(threading.current_thread()).get(STRAY)
    if refuse is not None:
        refuse()


def current_world() -> Any:
    """Return the owner of the kernel that runs the caller's task, or raise `UsageError` outside virtual ranks."""
    task = current_task()
    if task is None:
        refuse_stray()
        raise UsageError("a communication call outside a virtual rank: no rank is the caller")
    return task.kernel.owner


class Kernel:
    """Runs tasks: first all that are ready, then the next event of SimPy's heap."""

    def __init__(
        self, deadline_s: float = math.inf, carrier: str = "greenlets", *, ties: str = "fifo"
    ) -> None:
        self.env = EventQueue(ties)
        self._carriers = CARRIERS[carrier]()
        self._timers: list[tuple[float, int, int, Task]] = []  # a heap of default ones: when, rank, number
        self._timers_set = 0  # so far
        self._alarms = 0  # events in the heap that stand for default timers
        self.ready: deque[Task] = deque()
        self.tasks: list[Task] = []
        self.hub = self._carriers.hub
        self.owner: Any = None  # the world whose kernel this is; opaque here
        self.current: Task = AFTERWARDS
        self._dead: Any = NoTask(lambda: self._refuse(getcurrent().task))
        self.deadline_s = deadline_s
        self.releases: list[Callable[[], None]] = []  # to be called before time moves: may make tasks ready
        self.on_end: Callable[[Task], None] = lambda task: None
        self.on_resume: list[Callable[[Task], None]] = []  # called when a task that had left goes on
        self.on_wake: Callable[[Task], None] | None = None  # called when a task is to take note of an error
        self.failure: BaseException | None = None
        self.closed = False
        # Whether tasks that are woken together go on in the order of ranks: see `resume`.
        self.in_turn = False
        self.idle = 0  # polls that found nothing since something last happened
        self.fruitless: Callable[[], None] = lambda: None  # to be called by polls that found nothing
        self.stuck: Callable[[Task], Exception] = lambda task: UsageError(f"{task.name} cannot wait here")
        self.steps = 0  # events taken from the heap
        self._accident: Exception | None = None  # raised by an event that a task let happen

    # -- tasks ---------------------------------------------------------------------------------------------

    @property
    def thread(self) -> int:
        return self._carriers.thread()

    @property
    def threaded(self) -> bool:
        return isinstance(self._carriers, Threads)

    def spawn(self, rank: int, program: Program, *, clock: float = 0.0, beside: bool = False) -> Task:
        """Add a task of a rank that will run `program(rank)`; it starts when the kernel next runs ready tasks.

        `beside` says that it is a background task, and not the rank's own program.
        """
        task = Task(self, rank, program, clock=clock, beside=beside)
        # A function that all tasks share: with a closure for each and what it holds, a rank took half a kilobyte more.
        task.carrier = self._carriers.carry(task, _carry)
        self.tasks.append(task)
        self.ready.append(task)
        return task

    # -- waiting -------------------------------------------------------------------------------------------

    def observe(self, kind: int = 0) -> None:
        """Wait until SimPy's clock has reached the running task's: what it sees then can no longer change.

        Its place among what happens then is that of ranks, or of another `kind`: LATE for one that meets a deadline.
        """
        task, env = self.current, self.env
        place = task.rank + kind
        if self.closed:
            self._refuse(task)
        task.budget = RUN_AHEAD
        # If nothing can happen before this task's time, the clock is set forward without an event or a switch. So a
        # rank that polls alone costs no more than the call; with an event each, polling was twice as slow.
        # Else something comes first, which `_follower` relies on.
        if not self.ready and not self.releases and env.jump(task.clock, place):
            return
        if task.turn is None:
            task.turn = ScheduledCall(partial(self.ready.append, task))
        self._leave(task, env.entry(task.clock, place, task.turn))
        if task.thrown is not None:
            self._raise(task)

    def effect(self) -> None:
        """Count an effect of the running task; now and then wait for the others, to bound what is queued."""
        self.idle = 0
        task = self.current  # as in `run_ahead`
        task.budget -= 1
        if task.budget <= 0:
            self.spent(task)

    def run_ahead(self) -> None:
        """Let the running task go on before its time, but not for ever."""
        task = self.current
        task.budget -= 1
        if task.budget <= 0:
            self.spent(task)

    def spent(self, task: Task) -> None:
        """Let a task whose budget is spent wait for the others. Where it cannot wait, it goes on."""
        if not self.closed and self._carriers.stuck():
            task.budget = RUN_AHEAD
        else:
            self.observe()

    def block(self, wait: Wait, *, lost: bool = False) -> None:
        """Park the running task until `resume`, or if all is `lost` until its deadline.

        Raises what the task is resumed with.
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
        """Make a parked task ready (again and again does no harm); `error` is raised where it waits."""
        if task.parked:
            task.parked = False
            task.thrown = error
            self.idle = 0
            # Without latency a message sent now arrives now, so the order in which ranks go on at one time can be seen
            # by others; it must then be that of ranks and not that of whatever happened to wake them.
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
        if self.on_wake is not None and isinstance(error, WorldError):
            self.on_wake(task)
        raise error

    def _leave(self, task: Task, turn: Entry | None = None) -> None:
        """Give the processor to the next ready task, or to the hub; until a turn of its own, if there is one."""
        if self.closed:
            self._refuse(task)
        try:
            restore = self._carriers.suspend_modes()
        except AmidBackwardError:
            error = self.stuck(task)
            task.wait, task.parked = None, False
            raise error from None
        # From task to task directly, and events are let happen on this task's own stack: by way of the hub each wait
        # would cost two switches. The follower may be this task itself, whose event has come: then there is none.
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
        """End the run with an error, from the running task, whose program cannot catch it."""
        self.fail(error, self.current)
        self._leave(self.current)
        raise GreenletExit

    def fail(self, error: BaseException, task: Task) -> None:
        """Note that a task's error ends the run, as soon as the hub runs next. The first error counts."""
        if self.failure is None:
            error.__dict__["_task"], self.failure = task, error

    def _follower(self, task: Task, turn: Entry | None) -> Task | None:
        """Return the next task to run, having let events happen until there is one; None if that is up to the hub."""
        ready, env = self.ready, self.env
        while not ready and not self.releases and self.failure is None:
            if turn is None and env.scheduled() <= self._alarms:
                return None
            self.steps += 1
            try:
                env.step()
            except Exception as error:  # noqa: BLE001 - no fault of the task that happens to run: the hub raises it
                self._accident = error
                break
            # The turn of a task that leaves goes to the heap only if others come before it: what a rank does to itself
            # (a window's own part) then takes the event of the access, and neither one to go on nor a switch.
            if turn is not None and not ready and not self.releases and env.reach(turn):
                return task
        if turn is not None:
            env.enter(turn)
        # A greenlet that has not begun inherits the recursion depth of the task that begins it: a chain of ranks, each
        # begun by the one before, would end in a RecursionError. So the hub begins them all.
        hub = self.failure is not None or self._accident is not None or not ready or not ready[0].carrier
        return None if hub else ready.popleft()

    # -- deadlines -----------------------------------------------------------------------------------------

    def bound(self, task: Task) -> None:
        """Turn the default deadline of a parked task into an event: nothing else is going to end its wait."""
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

    # SimPy cannot take an event out of its heap, and a timer for each wait would fill it: hardly any wait
    # meets its deadline. So a task has one default timer at a time, which is armed for the first deadline and, when it
    # fires too early for the wait that goes on then, is armed again for that. They have a heap of their own, of which
    # only the first stands in SimPy's: an event for each would take half a kilobyte of each rank.
    def _arm_default(self, task: Task, due_s: float) -> None:
        task.timer = Timer.SET
        self._timers_set += 1
        heappush(self._timers, (max(due_s, self.env.now), task.rank, self._timers_set, task))
        self._arm_first()

    def _arm_first(self) -> None:
        """See that an event stands for the default timer that is due first."""
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
        # A wait without one (of members in `recover`) leaves none: at no time, it would stand for those of later waits.
        if task.parked and not task.explicit and task.deadline_s != math.inf:
            due_s = task.clock + task.deadline_s
            if due_s <= self.env.now:
                self._expire(task, task.wait, due_s)
            else:
                self._arm_default(task, due_s)
        self._arm_first()

    def ends_a_wait(self, action: partial[None]) -> bool:
        """Whether an event's action is an explicit deadline that is still to end a wait: no default, no return."""
        return action.func == self._expire and action.args[0].wait is action.args[1]

    def _expire(self, task: Task, wait: Wait | None, due_s: float) -> None:
        if task.parked and task.wait is wait and wait is not None:
            task.clock = max(task.clock, due_s)
            self.resume(task, timeout(task, wait))

    # -- the loop ------------------------------------------------------------------------------------------

    def run(self, judge: Callable[[], None] = lambda: None) -> None:
        """Run until no task can go on, call `judge`, and end the tasks that are left.

        Those wait for each other, or for nothing. `judge` may look at them, and tell what is wrong.
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
        """Take note of Python's collector: the calls of its finalizers are not those of the rank that runs now."""
        if begins:
            self._interrupted, self.current = self.current, FINALIZER
        else:
            self.current = self._interrupted

    def _run(self) -> None:
        env, ready = self.env, self.ready
        while True:
            # Tasks before releases before events: whatever a ready task does at the present time may add to what a
            # release decides on, and neither may happen after time has moved.
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
            # What is left are default deadlines, which only say "too late": nothing can end the waits that are left. To
            # let them fire would turn each deadlock into a time-out of whichever rank waits longest, without its cycle.
            if env.scheduled() <= self._alarms:
                return
            self.steps += 1
            env.step()

    def _enter(self, task: Task) -> None:
        # A greenlet's stack begins in the hub's. Whatever unwinds it (C++ does when torch raises) goes on from its
        # beginning into the hub's frames, and must find there what the hub was calling when the task began. So tasks
        # are begun, continued and ended by this one call, in functions that Python runs in one frame of C. Throwing
        # into them from elsewhere ended in segmentation faults.
        self.current = task
        task.carrier.switch()

    # -- the end -------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """End every task that is alive where it waits: its `finally` blocks run, its further calls are refused."""
        self.closed = True
        # Sends and computing check nothing but their budget. Without one they go to `observe`, which refuses them.
        for task in self.tasks:
            task.budget = 0
        for task in self.tasks:
            if task.carrier:  # begun, and not over
                self._enter(task)

    def _refuse(self, task: Task) -> NoReturn:
        """End a call that is made after the end of the run, or of the rank; after `PATIENCE` of them never return."""
        task.refused += 1
        if task.refused > PATIENCE:
            # A greenlet that is collected is run once more, to be ended by GreenletExit, which this program catches.
            # A reference that is never given back keeps it from being collected: it leaks, once, on purpose.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(task.carrier))
            with suppress(AmidBackwardError):
                self._carriers.suspend_modes()
            while True:
                self.hub.switch()
        raise GreenletExit
