"""A run stopped in the middle: pdb in every rank's frames, with the ranks' clocks, calls and recorded values.

A run repeats bit for bit, so going back in time means running again up to that time. During a replay no rank runs
ahead of the others, which changes no result: at a stop, each rank is exactly where it is at that virtual time.
"""

from __future__ import annotations

import ast
import ctypes
import math
import pdb
import sys
import traceback
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, TextIO

from spawnsim.errors import ParameterError, SpawnsimError
from spawnsim.options import nearest
from spawnsim.record import Recorder
from spawnsim.virtual.engine import diagnosis
from spawnsim.virtual.engine.event_queue import LATE
from spawnsim.virtual.engine.kernel import Task
from spawnsim.virtual.engine.matching import undelivered
from spawnsim.virtual.engine.world import World
from spawnsim.waits import is_program

LAST = LATE + (1 << 39)  # in the place of a rank: after all other events at a time
SHOWN = 10  # rows, messages
BUILTINS = {"math": math, "abs": abs, "min": min, "max": max, "len": len}  # for conditions


class Left(SpawnsimError):
    """The user has left the debugger before the end of the run."""


@dataclass
class Stop:
    """The condition at which a replay stops.

    Attributes:
        until_s: a virtual time, or None.
        condition: an expression of recorded names, `rank` and `time_s`, such as "rank == 17 and loss > 3", or "".
    """

    until_s: float | None = None
    condition: str = ""

    def __post_init__(self) -> None:
        try:
            self.code: CodeType | None = (
                compile(self.condition, "<break>", "eval") if self.condition else None
            )
        except SyntaxError as error:
            raise ParameterError(
                f"--break {self.condition!r}: {error.msg}; write 'rank == 17 and loss > 3'"
            ) from error

    def require(self, recorded: Collection[str]) -> None:
        """Reject a condition on a name that was never recorded: it would never be met."""
        known = [*recorded, "rank", "time_s", *BUILTINS]
        names = ast.walk(ast.parse(self.condition, mode="eval")) if self.condition else ()
        for name in (each.id for each in names if isinstance(each, ast.Name)):
            if name not in known:
                hint = nearest(name, known) or f"recorded columns: {', '.join(recorded) or 'none'}"
                raise ParameterError(
                    f"--break {self.condition!r}: no recorded column is called {name}; {hint}"
                )

    def met(self, names: Mapping[str, Any]) -> bool:
        """Return whether a recorded row meets the condition; a row that lacks a name does not."""
        if self.code is None:
            return False
        try:
            return bool(eval(self.code, {"__builtins__": {}, **BUILTINS}, dict(names)))  # the user's own
        except NameError:
            return False
        except Exception as error:
            raise ParameterError(
                f"--break {self.condition!r} raised {type(error).__name__}: {error}"
            ) from error


@dataclass
class Replay(Recorder):
    """A recorder that stops the run it records, and prompts.

    Attributes:
        stop: the condition of the stop.
        stdin: commands for the prompt; None: the run continues without one.
        stdout: the output of the prompt.
        columns: names that a condition may use; None: unknown.
    """

    stop: Stop
    stdin: TextIO | None = None
    stdout: TextIO = field(default_factory=lambda: sys.stdout)
    columns: Collection[str] | None = None
    stops: int = 0
    left: bool = False  # whether the user has ended it
    error: SpawnsimError | None = None  # a mistake in the condition

    def __post_init__(self) -> None:
        super().__init__()
        if self.columns is not None:
            self.stop.require(self.columns)
        self.world: World | None = None
        self.last: dict[int, list[dict[str, Any]]] = {}
        self._busy = False

    def prepare(self, world: World) -> None:
        """Keep the ranks of a world from running ahead, and schedule the stop."""
        self.world = world
        for rank in world.ranks:
            rank.observers += 1
        until_s = self.stop.until_s
        if until_s is not None:
            world.kernel.env.at(until_s, LAST, lambda: self.stopped(f"{until_s:.6g} s"))

    def row(self, rank: int, time_s: float, values: Mapping[str, Any]) -> None:
        """Record one row, and stop if it meets the condition."""
        super().row(rank, time_s, values)
        row = {"rank": rank, "time_s": time_s, **{name: _plain(value) for name, value in values.items()}}
        self.last.setdefault(rank, []).append(row)
        del self.last[rank][: -SHOWN * 10]
        assert self.world is not None
        try:
            met = self.stop.met(row)
        except ParameterError as error:
            # Raised in a rank, the error would appear as the program's.
            self.error, self.stop, self.stdin, met = error, Stop(), None, False
            self.world.kernel.fail(error, self.world.kernel.tasks[0])
        if met:
            self.stopped(f"rank {rank} at {time_s:.6g} s: {self.stop.condition}", rank)

    def stopped(self, why: str, rank: int = 0) -> None:
        """Prompt."""
        assert self.world is not None
        self.stops += 1
        if self.stdin is not None and not self._busy:
            self._busy = True  # printing an expression may compute, and record
            try:
                Prompt(self, self.world, why, rank).interact()
            finally:
                self._busy = False


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1 else value


def _own(task: Task) -> list[FrameType]:
    stack = traceback.walk_stack(task.carrier.gr_frame or sys._getframe())
    return [frame for frame, _ in stack if is_program(frame.f_code.co_filename)]


class Prompt(pdb.Pdb):
    """pdb at a stop, in the frames of one rank at a time. Its own commands are `ranks`, `rank`, `rows`, `messages`."""

    def __init__(self, replay: Replay, world: World, why: str, rank: int) -> None:
        super().__init__(stdin=replay.stdin, stdout=replay.stdout, nosigint=True, readrc=False)
        raw = replay.stdin is not None and replay.stdin is sys.stdin and replay.stdin.isatty()
        self.use_rawinput, self.prompt = raw, "(replay) " if raw else ""
        self._replay, self._world, self._rank = replay, world, rank
        self._below = sys._getframe(1)  # without the prompt's own frames
        self.message(f"stopped at {why}")
        self.do_ranks(str(rank))

    def interact(self) -> None:
        """Prompt until the user continues, or quits and ends the run."""
        self.reset()
        for rank in (self._rank, *(task.rank for task in self._tasks())):
            self._rank = rank
            frame = self._frame()
            if frame is not None:
                self.interaction(frame, None)
                break
        if self.quitting:
            kernel, tasks = self._world.kernel, self._tasks()
            if tasks:  # otherwise the run ends by itself
                kernel.fail(Left("left"), tasks[0])
            self._replay.stop, self._replay.stdin, self._replay.left = Stop(), None, True

    def default(self, line: str) -> None:
        """Execute a statement in the frame."""
        super().default(line)
        if sys.version_info < (3, 13):  # older versions set copies that must be written back
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(self.curframe), ctypes.c_int(0))

    def _tasks(self) -> list[Task]:
        return [task for task in self._world.kernel.tasks if task.alive]

    def _frame(self) -> FrameType | None:
        tasks = [task for task in self._tasks() if task.rank == self._rank and not task.background]
        return next(iter(_own(tasks[0])), None) if tasks else None

    def do_ranks(self, arg: str) -> None:
        """Print clock, call and line of all ranks, named ranks first."""
        tasks, first = self._tasks(), [int(word) for word in arg.split() if word.isdigit()]
        self.message(diagnosis.standing(tasks, first, self._below) if tasks else "all ranks have ended")

    def do_rank(self, arg: str) -> None:
        """Go to the frames of a rank, where all commands of pdb apply."""
        before, self._rank = self._rank, int(arg) if arg.isdigit() else -1
        frame = self._frame()
        if frame is None:
            self.error(f"rank {arg or 'N'}: give the number of a running rank")
            self._rank = before
        else:
            self.setup(frame, None)
            self.print_stack_entry(self.stack[self.curindex])

    def do_rows(self, _arg: str) -> None:
        """Print the last rows that the rank has recorded."""
        self.message(
            "\n".join(map(str, self._replay.last.get(self._rank, [])[-SHOWN:])) or "nothing was recorded"
        )

    def do_messages(self, _arg: str) -> None:
        """Print the messages that were sent and that no receive has taken."""
        found = sorted(
            f"{context.name or 'a communicator'}: {message.source} → {mailbox.rank}, tag {message.tag}, "
            f"{message.nbytes} bytes, arrives {message.envelope_s:.6g} s"
            for context in self._world.open_contexts
            for mailbox in context.mailboxes.values()
            for message in undelivered(mailbox)
        )
        more = [f"… and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        self.message("\n".join([*found[:SHOWN], *more]) or "none")
