"""The five members that a virtual rank has beyond MPI: clock, compute, rng, background, record.

They belong to the rank, not to a communicator: all communicators of a rank share them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from spawnsim.comm.properties import stated as property_of
from spawnsim.errors import CheckFailed, Timeout, UsageError
from spawnsim.importing import amid_shared_import
from spawnsim.models.compute import Sampler
from spawnsim.random import Streams
from spawnsim.units import check_duration
from spawnsim.virtual import properties
from spawnsim.virtual.digest import COMPUTE, SLEEP, nanoseconds
from spawnsim.virtual.engine import diagnosis
from spawnsim.virtual.engine.completion import Completion
from spawnsim.virtual.engine.kernel import AFTERWARDS, NoTask, Task
from spawnsim.virtual.engine.waiting import Unbroken, await_one
from spawnsim.virtual.engine.world import Rank, World
from spawnsim.virtual.operations import Operation, recorded


class Limit:
    """The context manager of `clock.deadline`. A generator-based one would take three times as long, and 0.4 kB."""

    __slots__ = ("_before", "_seconds", "_world")

    def __init__(self, world: World, seconds: float) -> None:
        self._world, self._seconds = world, seconds
        self._before: tuple[Task, float, bool]

    def __enter__(self) -> None:
        task = self._world.kernel.current
        self._before = task, task.deadline_s, task.explicit
        # An explicit deadline is an event, unlike the run's default one (`Kernel._arm`): something will happen at that
        # time, so a wait with it is not a deadlock.
        task.deadline_s = min(self._seconds, task.deadline_s) if task.explicit else self._seconds
        task.explicit = True

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        task, seconds, explicit = self._before
        task.deadline_s, task.explicit = seconds, explicit


class Clock:
    """`comm.clock`: the rank's own time, in virtual seconds."""

    __slots__ = ("__weakref__", "_rank", "_world")

    def __init__(self, world: World, rank: Rank) -> None:
        self._world, self._rank = world, rank

    def now(self) -> float:
        """Return the rank's virtual time.

        Returns:
            Virtual seconds since the start of the run, a float.
        """
        # `timed` informs the watchdog that this rank may be polling until some time, which is not a livelock at once.
        kernel = self._world.kernel
        if self._rank.observers and not amid_shared_import(sys._getframe()):
            kernel.observe()
        kernel.current.timed = True
        return self._rank.shown_s(kernel.current.clock)

    def sleep(self, seconds: float) -> None:
        """Let time pass; unlike in `compute`, the rank answers one-sided accesses by other ranks.

        Args:
            seconds: Virtual seconds, at least 0.

        Raises:
            ParameterError: A negative time, or NaN.
        """
        check_duration("sleep", seconds)
        task = self._world.kernel.current
        self._rank.digest.note((task.clock, SLEEP, -1, nanoseconds(seconds), 0))
        self._rank.advance_to(task, task.clock + seconds)
        if amid_shared_import(sys._getframe()):
            return
        self._world.kernel.observe()
        # A loop that sleeps and reads exposed memory is polling; the library sees only the sleep.
        if self._rank.attachments.get("windows"):
            self._world.kernel.fruitless()

    def deadline(self, seconds: float) -> Limit:
        """Limit the duration of each blocking call in a `with` block; a late call raises `errors.Timeout`.

        Args:
            seconds: Virtual seconds for each call, at least 0; math.inf waits for ever. The tightest of nested
                deadlines applies.

        Returns:
            The context manager.

        Raises:
            ParameterError: A negative time, or NaN.
        """
        check_duration("deadline", seconds)
        return Limit(self._world, seconds)

    def limit_s(self) -> float:
        """Return how many virtual seconds a blocking call may take now."""
        return self._world.kernel.current.deadline_s


class Compute:
    """`comm.compute(...)`: a block whose duration comes from the compute model or from the program."""

    __slots__ = ("_blocks", "_called", "_rank", "_stated_s", "_world", "sampler", "seconds")

    def __init__(self, world: World, rank: Rank, sampler: Sampler) -> None:
        self._world, self._rank, self.sampler = world, rank, sampler
        self._stated_s: float | None = None
        self._called = False  # without a block since then
        self._blocks: list[
            tuple[Task, float | None, bool]
        ] = []  # open blocks: task, stated seconds, whether their time has passed
        self.seconds = 0.0  # duration of the last block

    def __call__(self, seconds: float | None = None) -> Compute:
        """Begin a block of computing: `with comm.compute(0.01): ...`; its time passes at the end of the block.

        Args:
            seconds: Virtual seconds that the block takes on a rank that does not straggle, at least 0. None: the run's
                compute model determines them.

        Returns:
            The context manager; its `seconds` is the duration of the last block.

        Raises:
            ParameterError: A negative time, or NaN.
            UsageError: The result of the previous call was not used as a block, so no time passed.
        """
        if seconds is not None:
            check_duration("compute", seconds)
        if self._called:
            task = self._world.kernel.current
            raise UsageError(
                f"{task.name} at {task.clock:.6g} s: the comm.compute() before this one began no block, so it took no "
                "time: write `with comm.compute(...):`"
            )
        self._stated_s, self._called = seconds, True
        return self

    def __enter__(self) -> Compute:
        self._called = False
        self._blocks.append((self._world.kernel.current, self._stated_s, False))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        place = self._innermost()
        if place is None:  # the run has ended
            return
        _, stated_s, passed = self._blocks.pop(place)
        if kind is None and not passed:
            self.spend(stated_s)

    def pass_block(self, *, observe: bool = True) -> bool:
        """Let the time of the innermost open block pass now instead of at its end; return whether there is one."""
        place = self._innermost()
        if place is None:
            return False
        task, stated_s, passed = self._blocks[place]
        if not passed:
            self._blocks[place] = task, stated_s, True
            self.spend(stated_s, observe=observe)
        return True

    def _innermost(self) -> int | None:
        task, blocks = self._world.kernel.current, self._blocks
        return next((at for at in range(len(blocks) - 1, -1, -1) if blocks[at][0] is task), None)

    def sampler_counts(self) -> tuple[int, int]:
        """Return how many durations were drawn, and how many of these the program did not state."""
        return self.sampler.__self__.counts if hasattr(self.sampler, "__self__") else (0, 0)

    def sample_on(self, taken: int, unstated: int) -> None:
        """Continue drawing from the position that `sampler_counts` returned."""
        if hasattr(self.sampler, "__self__"):
            self.sampler.__self__.skip(taken, unstated)

    def spend(self, stated_s: float | None, *, call_cost: bool = False, observe: bool = True) -> None:
        """Let the time of one block pass. A `call_cost` is not progress: polls that pay it are still fruitless.

        Without `observe`, the caller waits for the rank's own time later, if other ranks may read the memory that it
        writes.
        """
        world, rank = self._world, self._rank
        kernel = world.kernel
        task = kernel.current
        begin_s = task.clock
        duration_s = self.sampler(stated_s, begin_s)
        end_s = world.plan.stretch(rank.id, begin_s, duration_s) if world.plan else begin_s + duration_s
        if world.cores is not None and begin_s < end_s:
            end_s = world.cores.spend(rank, duration_s)
        self.seconds = seconds = end_s - begin_s
        # A rank that is paused for ever within a block never leaves it: its clock becomes inf, which sums and integer
        # nanoseconds cannot represent.
        ends = seconds < math.inf
        rank.compute_s += seconds if ends else 0.0
        rank.digest.note((begin_s, COMPUTE, -1, nanoseconds(seconds) if ends else -1, 0))
        if not call_cost:
            kernel.idle = 0
        kernel.run_ahead()
        if rank.observers and world.cores is None:
            rank.compute_from(begin_s, end_s)
        rank.advance_to(task, end_s)
        # Other ranks may read the memory that this rank writes next: the write must happen at the rank's own time.
        if rank.observers and observe:
            kernel.observe()


class Record:
    """`comm.record(**values)` adds a row; `comm.record.event(kind, **fields)` adds a line to events.jsonl."""

    __slots__ = ("_rank", "_world")

    def __init__(self, world: World, rank: Rank) -> None:
        self._world, self._rank = world, rank

    def __call__(self, **values: Any) -> None:
        """Add one row to the run's table.

        Args:
            values: One value for each column: numbers, texts, booleans. Rank and time are columns of every row.
        """
        self._world.kernel.idle = 0
        self._world.recorder.row(self._rank.id, self._world.kernel.current.clock, values)
        if self._world.properties is not None:
            self._world.properties.row(self._rank.id, values, sys._getframe(1))

    def event(self, kind: str, **fields: Any) -> None:
        """Add one event to the run's events, such as a replacement.

        Args:
            kind: What happened, one word.
            fields: Details, in types that JSON can represent.
        """
        self._world.recorder.event(self._rank.id, self._world.kernel.current.clock, kind, fields)

    def operation(self, name: str, method: str, *arguments: Any) -> AbstractContextManager[Operation]:
        """Record a block as an operation on an object that ranks share, as an event of kind "operation".

        Args:
            name: The object.
            method: The operation: the name of a method of its specification (`comm.check(name, linearizable=...)`).
            arguments: The arguments of the method.

        Returns:
            The context manager. It yields an object whose `result` the block sets to what the operation returned, if
            anything. An operation whose block does not end, or ends with an exception, is pending: it has no `end_s`.
        """
        return recorded(self._world, (name, method, arguments), sys._getframe(1))


class Background:
    """A task that runs concurrently with the rank's program: `comm.background(fn)`. It has a separate clock."""

    def __init__(self, world: World, rank: Rank, program: Callable[[], Any]) -> None:
        self._world, self._rank = world, rank
        self._over = Completion(world.kernel)
        rank.observers += 1
        clock = world.kernel.current.clock
        self._task = world.kernel.spawn(
            rank.id, lambda _rank: self._run(program), clock=clock, background=True
        )
        rank.tasks.append(self._task)

    def _run(self, program: Callable[[], Any]) -> None:
        # The program may be ahead of SimPy's clock when it starts the task. From here on, two tasks share memory, and
        # neither may run ahead.
        self._world.kernel.observe()
        try:
            program()
        finally:
            self._rank.observers -= 1
            self._over.complete(self._world.kernel.current.clock)

    @property
    def alive(self) -> bool:
        return self._over.finish_s is None

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of the task.

        Args:
            timeout: Virtual seconds to wait at most; None: as long as a blocking call may take.

        Returns:
            Whether the task has ended.

        Raises:
            Timeout: Without a `timeout`, if the deadline of blocking calls has passed.
        """
        if timeout is not None and not timeout > 0:
            return not self.alive
        bound = nullcontext() if timeout is None else Clock(self._world, self._rank).deadline(timeout)
        try:
            with bound:
                await_one(self._world, self._over, WaitingForTask(self._task))
        except Timeout:
            if timeout is None:
                raise
            return False
        return True


class WaitingForTask(Unbroken):
    """A wait for a background task of the same rank; both die together."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def describe(self) -> str:
        return f"join of {self._task.name}"

    def peers(self) -> tuple[int, ...]:
        return (self._task.rank,)

    def missing(self, by_s: float = math.inf) -> tuple[int, ...]:
        """Return (): it waits for no other rank."""
        return ()


class RankServices:
    """The five members of one rank."""

    __slots__ = ("_rank", "_world", "clock", "compute", "record")

    def __init__(self, world: World, rank: Rank, sampler: Sampler) -> None:
        self._world, self._rank = world, rank
        self.clock = Clock(world, rank)
        self.compute = Compute(world, rank, sampler)
        self.record = Record(world, rank)

    @property
    def rng(self) -> Streams:
        """The rank's random streams."""
        task: Any = self._world.kernel.current
        if type(task) is NoTask and task is not AFTERWARDS:
            task.clock  # noqa: B018 - raises an error that states why nothing may be drawn
        return self._rank.streams

    def background(self, program: Callable[[], Any]) -> Background:
        """Run `program` concurrently with the rank's own."""
        return Background(self._world, self._rank, program)

    def check(self, condition: Any, message: str = "", **stated: Any) -> None:
        """End the run with `CheckFailed` unless a condition holds; the program cannot catch it.

        `stated` is a property of the whole run, whose name is `condition`: see `spawnsim.comm.Comm.check`.
        """
        if stated:
            properties.state(self._world, property_of(condition, message, **stated))
        elif not condition:
            kernel = self._world.kernel
            task, line = kernel.current, diagnosis.place(sys._getframe(1))
            text = f"{message or 'a check failed'} ({task.name} at {task.clock:.6g} s, {line})"
            kernel.stop(CheckFailed("check", text))
