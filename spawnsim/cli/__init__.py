"""The command line: one dataclass per command (`declaring`), whose call returns the exit code.

A command's module is imported when the command is called, so `spawnsim --help` is quick and needs no installed extras.
An error ends a command with one clear message on standard error and the exit code of its family. A traceback is shown
only for the program's own exception, and only its part within the program.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import traceback
from collections.abc import Iterable, Sequence
from importlib import import_module
from io import TextIOWrapper

from spawnsim import __version__
from spawnsim.cli.declaring import Command, Parser
from spawnsim.errors import (
    Deadlock,
    InternalError,
    ParameterError,
    ProgramError,
    RankError,
    SpawnsimError,
    UsageError,
    WorldError,
    exit_status_of,
    program_traceback,
)
from spawnsim.run import process_setup
from spawnsim.run.process_setup import use_one_thread
from spawnsim.run.watched import above_bar
from spawnsim.units import text_table

UNREAD = 128 + 13  # the status of a process that SIGPIPE ends
RAISERS = (RankError, ProgramError)  # their cause is an exception of the program itself


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error; for a program's exception, the exception decides."""
    if isinstance(error, RAISERS):
        cause, status = error.__cause__, getattr(error, "status", None)
        if isinstance(cause, SpawnsimError):
            return exit_code(cause)
        status = cause.code if isinstance(cause, SystemExit) else status  # sys.exit(3), comm.Abort(3)
        return status if isinstance(status, int) and 0 < status < 256 else error.exit_status
    return exit_status_of(error, of_program=getattr(error, "placed", False))


def report_error(error: SpawnsimError, *, quiet: bool = False) -> int:
    """Print an error (unless another rank prints it) and return its exit code."""
    if not quiet:
        print_error(error)
    return exit_code(error)


def print_error(error: BaseException) -> None:
    """Print an error with its notes; if it was printed before, only the new notes."""
    text = error_text(error)
    if text:
        print(text, file=sys.stderr, flush=True)


def error_text(error: BaseException) -> str:
    """Return the lines of an error; if they were returned before, only those of new notes."""
    # An error is printed when it happens and again at the end, with notes added meanwhile: only these are new.
    notes = list(getattr(error, "__notes__", ()))
    known: list[str] | None = error.__dict__.get("_printed")
    lines = [f"spawnsim: {error}", *notes] if known is None else [note for note in notes if note not in known]
    if known is None and isinstance(error, RAISERS) and error.__cause__ is not None:
        lines.insert(0, program_traceback(error.__cause__))
    error.__dict__["_printed"] = notes
    return "\n".join(lines)


def print_error_above_bar(error: BaseException) -> None:
    """Print an error while the run's progress bar may be on the terminal."""
    with above_bar():
        print_error(error)


def print_note_above_bar(sentence: str) -> None:
    """Print a note for the user while the run continues."""
    with above_bar():
        print(f"spawnsim: note: {sentence}", file=sys.stderr, flush=True)


def print_warnings(sentences: Iterable[str]) -> None:
    """Print the warnings of a run, or of the runs that a command uses, a line each; no option hides them."""
    for sentence in sentences:
        print(f"spawnsim: warning: {sentence}", file=sys.stderr, flush=True)


def report_interrupt(stop: KeyboardInterrupt) -> int:
    """Report that the command was stopped, and which records are kept; return a shell's status for the signal."""
    notes = [note[0].lower() + note[1:] for note in getattr(stop, "__notes__", ())]
    print("; ".join([f"spawnsim: {process_setup.outcome_of(stop)}", *notes]), file=sys.stderr, flush=True)
    return 128 + process_setup.number_of(stop)


def report_refusal(error: OSError) -> int:
    """Report what the system has refused, such as a folder that cannot be made or a full disk; return the exit code."""
    if error.errno is None:  # raised by a program: the system supplied no text
        return report_internal_error(error)
    place = f"{error.filename}: " if error.filename is not None else ""
    return report_error(ParameterError(f"{place}{error.strerror}"))


def report_internal_error(error: Exception) -> int:
    """Print an internal error with its traceback, and return its exit code."""
    text = "".join(traceback.format_exception(error)).rstrip()
    fault = "spawnsim: this is a defect of spawnsim; please report it with the command and the seed"
    sys.stderr.write(f"{text}\n{fault}\n")  # in one piece: ranks write concurrently
    return InternalError.exit_status


COMMANDS = {
    "run": ("run:RunCommand", "run a file on virtual ranks, or on real ones"),
    "resume": ("run:Resume", "continue a run from its newest checkpoint"),
    "watch": ("replay:Watch", "show a run while it runs: a live page, TensorBoard, …"),
    "columnar": ("columnar:Columnar", "time a policy on up to millions of ranks, held as rows of arrays"),
    "sweep": ("sweep:SweepCommand", "run a file under all combinations of values, seeds and circumstances"),
    "study": ("sweep:Study", "run a study: a grid of runs, and its figures"),
    "fuzz": ("fuzz:Fuzz", "run a file under many seeds, faults and orders of events, and report failures"),
    "verify": ("replay:Verify", "run a folder's run again, and name the first event that differs"),
    "replay": (
        "replay:ReplayCommand",
        "run a folder's run again up to a time or condition, and inspect its ranks",
    ),
    "plot": ("results:Plot", "draw figures of runs"),
    "report": ("results:Report", "write one HTML page about runs"),
    "trace": ("results:Trace", "write a run's timeline for Perfetto or chrome://tracing"),
    "calibrate": ("fidelity:Calibrate", "measure this cluster, and write a platform file"),
    "validate": ("fidelity:Validate", "predict a real run, and compare"),
    "advise": ("advise:Advise", "rank policies and cadences on a cluster, in timing alone"),
    "import": ("fidelity:Import", "read files from clusters: nccl-tests, WAN tables, profiler traces"),
    "explain": (
        "fidelity:Explain",
        "read the dumps of a real job that hangs: which ranks wait for which, and where",
    ),
    "list": ("listing:List", "list platforms, policies, workloads, studies"),
    "new": ("listing:New", "write a file to start from: a study, policy, workload or program"),
    "completion": ("listing:Completion", "print the completion script for bash, zsh or fish"),
    "doctor": ("listing:Doctor", "report what this machine can run, and what to change"),
}
"""Name -> the module in this package and its class, which `declaring` describes; and one line of help."""

EXIT_CODES = f"""\
exit codes:
  0    all went well
  1    the program raised on a rank; sys.exit(N) or Abort(N) gives N; fuzz and verify found a failure or a difference
  {UsageError.exit_status}    a parameter or file is not usable
  {Deadlock.exit_status}  the program's ranks wait for each other (deadlock, livelock)
  {WorldError.exit_status}  a call missed its deadline, a rank failed that others needed, or all ranks died
  {InternalError.exit_status}  a defect of spawnsim: please report it
  130  Ctrl-C; 128 + N: stopped by signal N
"""


def main(argv: Sequence[str] | None = None, *, last: bool = False) -> int:
    """Run one command line and return its exit code; `last`: the process ends afterwards."""
    try:
        given = _parser().parse_args(argv)
        return serve(given.command, getattr(given, "arguments", ()))
    except SpawnsimError as error:
        return report_error(error)
    except KeyboardInterrupt as stop:
        if last:
            process_setup.end_at_once()
        return report_interrupt(stop)
    except BrokenPipeError as error:
        return UNREAD if _is_unread() else report_refusal(error)
    except OSError as error:
        return report_refusal(error)
    except Exception as error:  # noqa: BLE001  what arrives here is a bug of ours
        return report_internal_error(error)


def _is_unread() -> bool:
    """Return whether the reader of standard output has gone, such as `head`."""
    asked = select.poll()
    asked.register(sys.stdout.fileno(), select.POLLOUT)
    return any(state & (select.POLLERR | select.POLLHUP) for _, state in asked.poll(0))


def _written(code: int) -> int:
    """Flush standard output, and return the exit code, or another one if that fails."""
    try:
        if sys.stdout is not None:  # closed before the start, `>&-`
            sys.stdout.flush()
    except OSError as error:
        code = code or (UNREAD if _is_unread() else report_refusal(error))
        # Discard the rest: otherwise the interpreter writes it at exit, and complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def entry() -> None:
    """Run this process's command line; does not return."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A terminal without "µ" or "→" (PYTHONIOENCODING=ascii, latin-1) shows "?" instead.
            stream.reconfigure(errors="replace")
    # Not a rank of a real job; a sweep itself is one only if MPI runs it.
    alone = "--backend" not in sys.argv or sys.argv[1:2] == ["sweep"]
    alone = alone and "mpi4py.MPI" not in sys.modules
    if {"run", "sweep", "study", "fuzz", "verify", "replay"} & set(sys.argv[1:2]) and alone:
        # Before any library is loaded: libraries read the variables once.
        use_one_thread()
        _fix_hashing()
    try:
        code = main(last=True)
    except SystemExit as end:  # after --help or --version
        code = int(end.code or 0)
    sys.exit(_written(code))


def _fix_hashing() -> None:
    """Restart with fixed hashes of text: the order of a set must not differ between runs."""
    if sys.flags.hash_randomization and "PYTHONHASHSEED" not in os.environ:
        os.environ["PYTHONHASHSEED"] = "0"
        # The hash's seed is fixed when the interpreter starts, so the only way is to start again.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def command_of(name: str) -> type[Command]:
    """Return the class of a command; its module is imported now."""
    module, _, kind = COMMANDS[name][0].partition(":")
    found: type[Command] = getattr(import_module(f"spawnsim.cli.{module}"), kind)
    found.prog = f"{found.launcher}spawnsim {name}"
    return found


def serve(name: str, argv: Sequence[str]) -> int:
    """Run a command and return its exit code."""
    return command_of(name).parse(argv)()


def _parser() -> Parser:
    table = text_table((), [(name, text) for name, (_, text) in COMMANDS.items()], left=2, indent="  ")
    parser = Parser(
        prog="spawnsim",
        description="Policies that average and replace models across ranks, on virtual clusters and on real ones.",
        epilog=f"commands:\n{table}\n\n{EXIT_CODES}\n`spawnsim COMMAND --help` describes one command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"spawnsim {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parser
