"""A run stopped in the middle: every rank's stack, clock, pending call and recorded values at a prompt.

A run repeats to the bit, so going back in time is running again up to there. While it is replayed no rank runs ahead
of the others, which changes no result: at a stop each stands where it stands at that virtual time.
"""

from __future__ import annotations

import ast
import cmd
import ctypes
import math
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, TextIO

from spawnsim.errors import ParameterError, SpawnsimError
from spawnsim.options import nearest
from spawnsim.record import Recorder
from spawnsim.units import seconds
from spawnsim.virtual.engine import diagnosis
from spawnsim.virtual.engine.event_queue import LATE
from spawnsim.virtual.engine.kernel import Task
from spawnsim.virtual.engine.matching import undelivered
from spawnsim.virtual.engine.world import World

LAST = LATE + (1 << 39)  # in the place of a rank: after all else that happens at a time
SHOWN = 10  # rows, events, messages
WIDTH = 100  # of a value's text
BUILTINS = {"math": math, "abs": abs, "min": min, "max": max, "len": len}  # what a condition may call


class Left(SpawnsimError):
    """The user has left the debugger before the end of the run."""

    exit_status = 0


@dataclass
class Stop:
    """Where a replay stops.

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
        """Refuse a condition on what was never recorded: it would never be met, and nobody told.

        Args:
            recorded: the names of all columns.

        Raises:
            ParameterError: a name of the condition is not among them.
        """
        known = [*recorded, "rank", "time_s", *BUILTINS]
        names = ast.walk(ast.parse(self.condition, mode="eval")) if self.condition else ()
        for name in (each.id for each in names if isinstance(each, ast.Name)):
            if name not in known:
                hint = nearest(name, known) or f"recorded were: {', '.join(recorded) or 'none'}"
                raise ParameterError(
                    f"--break {self.condition!r}: nothing that was recorded is called {name}; {hint}"
                )

    def met(self, names: Mapping[str, Any]) -> bool:
        """Whether a recorded row meets the condition; a row that lacks a name does not."""
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
class Change:
    """What a what-if changes when the replay stops: `name = value` in each rank's `main`."""

    name: str
    value: Any


@dataclass
class Replay(Recorder):
    """A recorder that stops the run it records, and prompts.

    Attributes:
        stop: where.
        changes: what is changed there.
        stdin: of the prompt; None: it does not prompt, and goes on.
        stdout: of the prompt.
        columns: names that a condition may use; None: not known.
    """

    stop: Stop
    changes: Sequence[Change] = ()
    stdin: TextIO | None = None
    stdout: TextIO = field(default_factory=lambda: sys.stdout)
    columns: Collection[str] | None = None
    main: CodeType | None = None  # of the program, in whose frames parameters live
    stops: int = 0
    left: bool = False  # whether the user has ended it
    error: SpawnsimError | None = None  # what is wrong with what the user has asked for

    def __post_init__(self) -> None:
        super().__init__()
        self.stop_where(self.stop)
        self.world: World | None = None
        self.last: dict[int, list[dict[str, Any]]] = {}
        self._busy = False

    def prepare(self, world: World) -> None:
        """Keep the ranks of a world from running ahead, and have it stopped in time."""
        self.world = world
        for rank in world.ranks:
            rank.observers += 1
        if self.stop.until_s is not None:
            self.stop_at(self.stop.until_s)

    def stop_where(self, stop: Stop) -> None:
        """Have the run stopped where a condition is met; `ParameterError` if it never can be."""
        if self.columns is not None:
            stop.require(self.columns)
        self.stop = stop

    def stop_at(self, time_s: float) -> None:
        """Have the run stopped at a virtual time."""
        assert self.world is not None
        env = self.world.kernel.env
        env.at(max(time_s, env.now), LAST, lambda: self.stopped(f"{time_s:.6g} s"))

    def row(self, rank: int, time_s: float, values: Mapping[str, Any]) -> None:
        """Keep one row, and stop if it meets the condition."""
        super().row(rank, time_s, values)
        row = {"rank": rank, "time_s": time_s, **{name: _plain(value) for name, value in values.items()}}
        self.last.setdefault(rank, []).append(row)
        del self.last[rank][: -SHOWN * 10]
        met = False
        with self._kept():
            met = self.stop.met(row)
        if met:
            self.stopped(f"rank {rank} at {time_s:.6g} s: {self.stop.condition}", rank)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep an error of the user's, and end the run: raised in a rank it would be the program's."""
        assert self.world is not None
        try:
            yield
        except SpawnsimError as error:
            self.error, self.stop, self.stdin = error, Stop(), None
            self.world.kernel.fail(error, self.world.kernel.tasks[0])

    def stopped(self, why: str, rank: int = 0) -> None:
        """Apply what is to be changed, once, and prompt."""
        assert self.world is not None
        changes, self.changes = self.changes, ()
        for task in self.world.kernel.tasks:
            if task.alive and not task.beside:
                for change in changes:
                    with self._kept():
                        self.change(task, change)
        self.stops += 1
        if self.stdin is not None and not self._busy:
            self._busy = True  # what is printed there may compute, and record
            try:
                Prompt(self, self.world, why, rank).cmdloop()
            finally:
                self._busy = False

    def change(self, task: Task, change: Change) -> None:
        """Set a variable of a rank's `main`, or an attribute of one of its objects."""
        frame = _frame_of(task, self.main)
        if frame is None:
            raise ParameterError(f"{task.name} is not in main, where {change.name} could be changed")
        _set(frame, change.name, change.value)


def _set(frame: FrameType, what: str, value: Any) -> None:
    """Set a variable of a function, or an attribute that one of its objects has.

    One that is misspelt would change nothing, and not be noticed.
    """
    owner, _, name = what.rpartition(".")
    if not owner:
        if name not in frame.f_locals:
            function = frame.f_code.co_name
            raise ParameterError(f"{function} has no variable {name}; it has: {', '.join(frame.f_locals)}")
        set_local(frame, name, value)
        return
    try:
        thing = eval(owner, frame.f_globals, frame.f_locals)
        getattr(thing, name)
    except (NameError, AttributeError) as error:
        raise ParameterError(f"{owner}.{name} cannot be changed: {error}") from error
    setattr(thing, name, value)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1 else value


def set_local(frame: FrameType, name: str, value: Any) -> None:
    """Set a local variable of a function that stands still."""
    frame.f_locals[name] = value
    if sys.version_info < (3, 13):  # there `f_locals` is a copy until it is written back
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _stack(task: Task) -> list[FrameType]:
    """Return the frames of a task, the innermost first."""
    return [frame for frame, _ in traceback.walk_stack(task.carrier.gr_frame or sys._getframe())]


def _own(task: Task) -> list[FrameType]:
    """Return those frames that are the program's, the innermost first."""
    return [frame for frame in _stack(task) if diagnosis.is_program(frame.f_code.co_filename)]


def _frame_of(task: Task, code: CodeType | None) -> FrameType | None:
    """Return the frame of the program's main function, or its outermost one."""
    own = _own(task)
    return next((frame for frame in own if frame.f_code == code), own[-1] if own and code is None else None)


class Prompt(cmd.Cmd):
    """Commands at a stop. `rank` is the one that commands without a number are about."""

    def __init__(self, replay: Replay, world: World, why: str, rank: int) -> None:
        super().__init__(stdin=replay.stdin, stdout=replay.stdout)
        self.use_rawinput = replay.stdin is not None and replay.stdin is sys.stdin and replay.stdin.isatty()
        self.prompt = "(replay) " if self.use_rawinput else ""
        self._replay, self._world, self._rank = replay, world, rank
        self._below = sys._getframe(1)  # without the prompt's own frames
        self.intro = f"stopped at {why}\n{self._table([rank])}"

    # -- what it says ------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Print a text."""
        self.stdout.write(f"{text}\n")

    def _tasks(self) -> list[Task]:
        return [task for task in self._world.kernel.tasks if task.alive]

    def _table(self, first: Sequence[int] = ()) -> str:
        tasks = self._tasks()
        return diagnosis.standing(tasks, first, self._below) if tasks else "all ranks have ended"

    def _of(self, arg: str) -> tuple[Task, str] | None:
        """Return the task of the rank that an argument begins with, or of the current one, and the rest of it."""
        word, _, rest = arg.strip().partition(" ")
        if word.isdigit():
            self._rank = int(word)
        else:
            rest = arg.strip()
        found = next((task for task in self._tasks() if task.rank == self._rank and not task.beside), None)
        if found is None:
            self.say(f"rank {self._rank} does not run")
            return None
        return found, rest

    def _in_frame(self, arg: str, then: Callable[[FrameType, str], None]) -> None:
        found = self._of(arg)
        if found is None:
            return
        own = _own(found[0])
        if not own:
            self.say(f"rank {self._rank} has not begun its program")
            return
        try:
            then(own[0], found[1])
        except Exception as error:  # noqa: BLE001 - whatever the expression raises is the answer
            self.say(f"{type(error).__name__}: {error}")

    # -- commands ----------------------------------------------------------------------------------------------

    def do_ranks(self, arg: str) -> None:
        """Ranks [N...]: where ranks stand: clock, call, line; those that are named first."""
        self.say(self._table([int(word) for word in arg.split() if word.isdigit()]))

    def do_where(self, arg: str) -> None:
        """Where [N]: the stack of a rank, as far as it is the program's."""
        found = self._of(arg)
        if found is not None and found[1]:
            self.say(f"where {arg}: give the number of a rank")
        elif found is not None:
            shown = [(frame, frame.f_lineno) for frame in reversed(_own(found[0]))]
            self.say(
                "".join(traceback.StackSummary.extract(iter(shown)).format()).rstrip()
                or "(not in the program)"
            )

    def do_locals(self, arg: str) -> None:
        """Locals [N]: the variables of a rank's innermost function."""
        self._in_frame(
            arg,
            lambda frame, _: self.say(
                "\n".join(f"{k} = {_short(v)}" for k, v in sorted(frame.f_locals.items()))
            ),
        )

    def do_print(self, arg: str) -> None:
        """Print [N] EXPRESSION: a value in a rank's innermost function."""
        self._in_frame(arg, lambda frame, text: self.say(repr(eval(text, frame.f_globals, frame.f_locals))))

    do_p = do_print

    def do_set(self, arg: str) -> None:
        """Set [N] NAME=VALUE: change a variable in a rank's innermost function; the run is another one from here on."""

        def change(frame: FrameType, text: str) -> None:
            name, sign, value = (part.strip() for part in text.partition("="))
            if sign:
                _set(frame, name, eval(value, frame.f_globals, frame.f_locals))
            else:
                self.say(f"set {arg}: write NAME=VALUE")

        self._in_frame(arg, change)

    def do_rows(self, arg: str) -> None:
        """Rows [N]: the last rows that a rank has recorded."""
        found = self._of(arg)
        rank = self._rank if found is None else found[0].rank
        self.say("\n".join(map(str, self._replay.last.get(rank, [])[-SHOWN:])) or "nothing was recorded")

    def do_events(self, _arg: str) -> None:
        """Events: the last events of all ranks: faults, replacements."""
        self.say("\n".join(map(str, self._replay.events()[-SHOWN:])) or "none")

    def do_messages(self, _arg: str) -> None:
        """Messages: those that were sent and that no receive has taken."""
        found = [
            f"{context.name or 'a communicator'}: {message.source} → {mailbox.rank}, tag {message.tag}, "
            f"{message.nbytes} bytes, arrives {message.envelope_s:.6g} s"
            for context in self._world.open_contexts
            for mailbox in context.mailboxes.values()
            for message in undelivered(mailbox)
        ]
        more = f"\n… and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        self.say("\n".join(sorted(found)[:SHOWN]) + more if found else "none")

    def do_until(self, arg: str) -> bool | None:
        """Until TIME: go on to a virtual time, such as 12.5s."""
        try:
            time_s, now_s = seconds(arg), self._world.kernel.env.now
            if time_s < now_s:
                raise ParameterError(
                    f"until {arg.strip()}: it is {now_s:.6g} s already; replay once more to go back"
                )
            self._replay.stop_at(time_s)
        except ParameterError as error:
            self.say(str(error))
            return None
        return True

    def do_break(self, arg: str) -> None:
        """Break EXPRESSION: stop where a recorded row meets it; without one, nowhere."""
        try:
            self._replay.stop_where(Stop(condition=arg.strip()))
        except ParameterError as error:
            self.say(str(error))

    def do_continue(self, _arg: str) -> bool:
        """Continue: go on, to the next stop or to the end."""
        return True

    do_c = do_continue

    def do_quit(self, _arg: str) -> bool:
        """Quit: leave, and end the run."""
        kernel = self._world.kernel
        if self._tasks():  # else the run ends by itself
            kernel.fail(Left("left"), self._tasks()[0])
        self._replay.stop, self._replay.stdin, self._replay.left = Stop(), None, True
        return True

    do_q = do_quit

    def do_EOF(self, arg: str) -> bool:
        """End of input: quit."""
        return self.do_quit(arg)

    def emptyline(self) -> bool:
        """Do nothing."""
        return False

    def default(self, line: str) -> None:
        """Evaluate what is no command, as `print` does."""
        self.do_print(line)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= WIDTH else f"{text[:WIDTH]}…"
