"""How errors end a command: one clear message on standard error, and an exit code.

This room knows the families of errors. A traceback is shown for the program's own exception alone, and only the part
of it that is the program's.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import spawnsim
from spawnsim.errors import InternalError, ProgramError, RankError, SpawnsimError, UsageError
from spawnsim.run import interrupts
from spawnsim.run.bar import beside_the_bar

RAISERS = (RankError, ProgramError)  # their cause is an exception of the program's own
_HOUSE = str(Path(spawnsim.__file__).parent)


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error; that of the program is decided by what it raised."""
    if isinstance(error, RAISERS):
        cause, status = error.__cause__, getattr(error, "status", None)
        if isinstance(cause, SpawnsimError):
            return exit_code(cause)
        status = cause.code if isinstance(cause, SystemExit) else status  # sys.exit(3), comm.Abort(3)
        return status if isinstance(status, int) and 0 < status < 256 else error.exit_status
    if isinstance(error, UsageError) and error.exit_status == 2 and getattr(error, "placed", False):
        return SpawnsimError.exit_status  # a rank's call, no option of ours
    return getattr(error, "exit_status", 1)


def report(error: SpawnsimError, *, quiet: bool = False) -> int:
    """Print an error (unless another rank does) and return its exit code."""
    if not quiet:
        tell(error)
    return exit_code(error)


def tell(error: BaseException) -> None:
    """Print an error with its notes; of one that was printed before, the notes that are new."""
    notes = list(getattr(error, "__notes__", ()))
    known: list[str] | None = error.__dict__.get("_told")
    lines = [f"spawnsim: {error}", *notes] if known is None else [note for note in notes if note not in known]
    if known is None and isinstance(error, RAISERS) and error.__cause__ is not None:
        lines.insert(0, program_traceback(error.__cause__))
    error.__dict__["_told"] = notes
    if lines:
        print("\n".join(lines), file=sys.stderr, flush=True)


def tell_beside_the_bar(error: BaseException) -> None:
    """Print an error while the run's progress bar may stand on the terminal."""
    with beside_the_bar():
        tell(error)


def note_beside_the_bar(sentence: str) -> None:
    """Print what the user may want to know while the run goes on."""
    with beside_the_bar():
        print(f"spawnsim: note: {sentence}", file=sys.stderr, flush=True)


def interrupted(stop: KeyboardInterrupt) -> int:
    """Say that the command was told to stop, and what is kept; return the status that a shell gives for the signal."""
    notes = [note[0].lower() + note[1:] for note in getattr(stop, "__notes__", ())]
    print("; ".join([f"spawnsim: {interrupts.outcome_of(stop)}", *notes]), file=sys.stderr, flush=True)
    return 128 + interrupts.number_of(stop)


def internal(error: Exception) -> int:
    """Print what must not happen, with its traceback, and return the exit code for it."""
    text = "".join(traceback.format_exception(error)).rstrip()
    fault = "spawnsim: the fault above is ours; please report it with the command and the seed"
    sys.stderr.write(f"{text}\n{fault}\n")  # in one piece: ranks write side by side
    return InternalError.exit_status


def program_traceback(error: BaseException) -> str:
    """Return an exception's traceback from where the program begins: the frames of the house above it left out.

    Of an error of the house's, which says what happened, those below the program's last one are left out, too.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    shown = traceback.TracebackException(type(error), error, trace)
    if isinstance(error, SpawnsimError):
        while len(shown.stack) > 1 and _is_ours(shown.stack[-1].filename):
            shown.stack.pop()
    return "".join(shown.format()).rstrip()


def _is_ours(filename: str) -> bool:
    return filename.startswith((_HOUSE, "<frozen importlib"))
