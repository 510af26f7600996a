"""The errors that spawnsim raises, sorted by their origin.

`UsageError`: the program or its parameters (deadlock, mismatched collective, truncated buffer, bad value).
`WorldError`: the world the program runs in (a rank failed, a communicator was revoked, a time-out).
`InternalError`: spawnsim itself.

Each family has the exit status of a command, or of a real job, that it ends. Python and its command-line tools use 1
and 2; the other families begin at 121, where they do not collide with a program's `sys.exit(3)`. Every error can be
rebuilt from its own `args`, because SimPy and pickle rebuild exceptions that way.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import FrameType, ModuleType
from typing import ClassVar

_PACKAGE = str(Path(__file__).parent) + os.sep


class SpawnsimError(Exception):
    """Root of all errors that spawnsim raises on purpose."""

    exit_status: ClassVar[int] = 1


class UsageError(SpawnsimError):
    """The program asked for something impossible: the message states the problem, its place and the remedy."""

    exit_status = 2


class ParameterError(UsageError, ValueError):
    """A parameter is outside its range. Also a `ValueError`, as callers of a constructor expect."""


class UnsupportedError(UsageError, NotImplementedError):
    """A call that this communicator does not offer; the message names it and the alternative."""


class Deadlock(UsageError):
    """Every rank still alive waits for another. The message holds the table and the cycle.

    Attributes:
        causes: call and line of each wait that no rank can end, such as "Ssend heat.py:24"; without dependent waits.
    """

    exit_status = 121
    causes: tuple[str, ...] = ()


class Livelock(UsageError):
    """A rank polls without its time passing."""

    exit_status = 121


class MismatchError(UsageError, RuntimeError):
    """Ranks of one communicator met in different collectives, or with another root, count, type or op.

    Also a `RuntimeError`, like the exceptions of MPI and torch.distributed: programs catch it as one.
    """


class TruncationError(UsageError):
    """A message is longer than the buffer that receives it."""


class WorldError(SpawnsimError):
    """Something outside the program went wrong."""

    exit_status = 122


class RankFailed(WorldError):
    """Other ranks have died. `ranks` are numbered in the communicator of the call."""

    def __init__(self, ranks: Iterable[int], message: str = "") -> None:
        self.ranks = tuple(sorted(ranks))
        super().__init__(self.ranks, message)

    def __str__(self) -> str:
        names = ", ".join(map(str, self.ranks))
        return self.args[1] or f"rank {names} failed"


class Revoked(WorldError):
    """The communicator was revoked by a member; recover() or shrink it."""


class Timeout(WorldError, TimeoutError):
    """A call missed its deadline. `ranks` are the missing ranks, `operation` and `sequence` name the call."""

    def __init__(self, ranks: Iterable[int], operation: str, sequence: int = -1, message: str = "") -> None:
        self.ranks, self.operation, self.sequence = tuple(sorted(ranks)), operation, sequence
        super().__init__()
        self.args = (self.ranks, operation, sequence, message)  # OSError's constructor would keep two of them

    def __str__(self) -> str:
        missing = f"; missing: rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return self.args[3] or f"{self.operation} (number {self.sequence}) missed its deadline{missing}"


class StorageError(WorldError):
    """A run folder cannot be written to: a full disk, a missing folder. Existing contents stay."""

    exit_status = 2


class StudyError(SpawnsimError):
    """Some runs of a study failed; the other runs are kept."""


class CheckFailed(SpawnsimError):
    """An invariant was violated: a `comm.check` of a program, or an invariant of a policy. `what` names it."""

    placed = True  # its message contains rank, time and line

    def __init__(self, what: str, message: str) -> None:
        self.what = what
        super().__init__(what, message)

    def __str__(self) -> str:
        return str(self.args[1])


class DataRace(SpawnsimError):
    """Conflicting accesses to exposed memory that nothing orders, found with `races=True`; `races` lists them."""

    def __init__(self, message: str, races: tuple[str, ...] = ()) -> None:
        self.races = races
        super().__init__(message, races)

    def __str__(self) -> str:
        return str(self.args[0])


class RankError(SpawnsimError):
    """A rank's program raised. The original exception is the `__cause__`; `rank` and `time_s` locate it."""

    def __init__(self, rank: int, time_s: float, message: str) -> None:
        self.rank, self.time_s = rank, time_s
        super().__init__(rank, time_s, message)

    def __str__(self) -> str:
        return str(self.args[2])


class ProgramError(SpawnsimError):
    """The program's file raised while it was loaded, before any rank ran. The original exception is the `__cause__`."""


class InternalError(SpawnsimError):
    """An invariant of spawnsim itself was violated: please report it with the seed and the command."""

    exit_status = 123


def program_traceback(error: BaseException) -> str:
    """Return an exception's traceback from the beginning of the program: without spawnsim's frames.

    The last frames stay, unless the error is spawnsim's own, whose message explains the cause.
    """
    trace = error.__traceback__
    # Never remove the last frame: an exception entirely within spawnsim still needs a place.
    while trace is not None and trace.tb_next is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    shown = traceback.TracebackException(type(error), error, trace)
    last = max((i for i, each in enumerate(shown.stack) if not _is_ours(each.filename)), default=0)
    shown.stack[:last] = [each for each in shown.stack[:last] if not _is_ours(each.filename)]
    if isinstance(error, SpawnsimError):
        dataclass = ("<string>", "__init__")  # the constructor that Python generates
        while len(shown.stack) > 1 and (
            _is_ours(shown.stack[-1].filename)
            or (shown.stack[-1].filename, shown.stack[-1].name) == dataclass
        ):
            shown.stack.pop()
    return "".join(shown.format()).rstrip()


EXTRAS = {"torchft": "torchft", "gfn": "gfn", "sklearn": "demo"}
"""Package that a program imports → the extra of spawnsim that installs it."""


TRACKERS = (
    "aim", "clearml", "comet_ml", "dvclive", "mlflow", "neptune", "swanlab", "tensorboard", "tensorboardX", "trackio",
    "wandb",
)  # fmt: skip
"""Packages that send a program's measures to a service: `--stub NAME` replaces them."""


def did_you_mean(error: BaseException) -> str:
    """Return the names that an `AttributeError` may mean, as the interpreter suggests at the end of a plain program.

    For a module that is not installed, return the extra of spawnsim that installs it, or the option that replaces it.

    >>> try:
    ...     "".joyn
    ... except AttributeError as error:
    ...     print(error, did_you_mean(error), sep="")
    'str' object has no attribute 'joyn'; did you mean join?
    """
    name, owner = getattr(error, "name", None), getattr(error, "obj", None)
    if isinstance(error, ModuleNotFoundError):
        top = str(name).partition(".")[0]
        extra = EXTRAS.get(top)
        if top in TRACKERS:
            return f"; install it, or give --stub {top}: virtual ranks then run without it and record its scalars"
        return f"; pip install 'spawnsim[{extra}]'" if extra else ""
    if not isinstance(error, AttributeError) or name is None:
        return ""
    # Not `dir` of the object itself, which may be the program's own code.
    known = dir(owner if isinstance(owner, (type, ModuleType)) else type(owner))
    public = [each for each in known if not each.startswith("_")]
    # MPI has most calls twice, such as Allreduce and allreduce.
    found = [each for each in public if each.lower() == name.lower()] or get_close_matches(name, public, n=1)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def reported_place(error: BaseException) -> str:
    """Return type and text of a program's exception, and the program's innermost line of it, in one line.

    For spawnsim's own errors, which are long, and for texts of several lines, return only the first words: the
    traceback has the rest.
    """
    text = "" if isinstance(error, SpawnsimError) else str(error).strip().partition("\n")[0]
    kind = ": ".join(filter(None, [type(error).__name__, text])) + did_you_mean(error)
    place = program_place(list(traceback.walk_tb(error.__traceback__))[::-1])
    return f"{kind} ({place})" if place else kind


def program_place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return file and line of the program's innermost frame, as "train.py:12", or "" if none is the program's.

    Args:
        frames: frames with their lines, the innermost one first.
    """
    import sysconfig  # needed here alone

    # A line of a library helps less than the program's line that called it.
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    for frame, line in frames:
        filename = frame.f_code.co_filename
        if not (_is_ours(filename) or filename.startswith(("<", *libraries)) or _is_compiled(frame)):
            return f"{Path(filename).name}:{line}"
    return ""


def _is_compiled(frame: FrameType) -> bool:
    """Return whether a frame is compiled code: Cython names a source file that seldom exists, by another path."""
    return str(frame.f_globals.get("__file__", "")).endswith(tuple(EXTENSION_SUFFIXES))


def _is_ours(filename: str) -> bool:
    return filename.startswith((_PACKAGE, "<frozen importlib"))


def exit_status_of(error: BaseException, *, of_program: bool = False) -> int:
    """Return the exit status of a command, or of a real job, that an error ends; 1 for other exceptions.

    `of_program`: a rank's call has raised it. A wrong value is then an error of the program like any other, and not
    one of the command's options.
    """
    status: int = getattr(error, "exit_status", 1)
    own = of_program and isinstance(error, UsageError) and status == UsageError.exit_status
    return SpawnsimError.exit_status if own else status
