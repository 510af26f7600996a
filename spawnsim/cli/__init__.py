"""The command line: one subcommand, one function of its arguments that returns the exit code.

The table says which module serves a subcommand; it is imported when its subcommand is called, so `spawnsim --help` is
quick and needs nothing installed. An error ends a command with one clear message on standard error and the exit code
of its family. A traceback is shown for the program's own exception alone, and only the part of it that is the
program's.
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
from spawnsim.errors import (
    Deadlock,
    InternalError,
    ParameterError,
    ProgramError,
    RankError,
    SpawnsimError,
    UnsupportedError,
    UsageError,
    WorldError,
    exit_status_of,
    program_traceback,
)
from spawnsim.options import Parser
from spawnsim.run import process_setup
from spawnsim.run.process_setup import use_one_thread
from spawnsim.run.progress_bar import beside_the_bar
from spawnsim.units import text_table

UNREAD = 128 + 13  # as of a process that SIGPIPE ends
RAISERS = (RankError, ProgramError)  # their cause is an exception of the program's own


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error; that of the program is decided by what it raised."""
    if isinstance(error, RAISERS):
        cause, status = error.__cause__, getattr(error, "status", None)
        if isinstance(cause, SpawnsimError):
            return exit_code(cause)
        status = cause.code if isinstance(cause, SystemExit) else status  # sys.exit(3), comm.Abort(3)
        return status if isinstance(status, int) and 0 < status < 256 else error.exit_status
    return exit_status_of(error, of_program=getattr(error, "placed", False))


def report_error(error: SpawnsimError, *, quiet: bool = False) -> int:
    """Print an error (unless another rank does) and return its exit code."""
    if not quiet:
        print_error(error)
    return exit_code(error)


def print_error(error: BaseException) -> None:
    """Print an error with its notes; of one that was printed before, the notes that are new."""
    # An error is told when it happens and again at the end, with notes that came meanwhile: only these are new.
    notes = list(getattr(error, "__notes__", ()))
    known: list[str] | None = error.__dict__.get("_told")
    lines = [f"spawnsim: {error}", *notes] if known is None else [note for note in notes if note not in known]
    if known is None and isinstance(error, RAISERS) and error.__cause__ is not None:
        lines.insert(0, program_traceback(error.__cause__))
    error.__dict__["_told"] = notes
    if lines:
        print("\n".join(lines), file=sys.stderr, flush=True)


def print_error_beside_bar(error: BaseException) -> None:
    """Print an error while the run's progress bar may stand on the terminal."""
    with beside_the_bar():
        print_error(error)


def print_note_beside_bar(sentence: str) -> None:
    """Print what the user may want to know while the run goes on."""
    with beside_the_bar():
        print(f"spawnsim: note: {sentence}", file=sys.stderr, flush=True)


def print_warnings(sentences: Iterable[str]) -> None:
    """Print the warnings of a run, or of the runs that a command uses, a line each; no option hides them."""
    for sentence in sentences:
        print(f"spawnsim: warning: {sentence}", file=sys.stderr, flush=True)


def report_interrupt(stop: KeyboardInterrupt) -> int:
    """Say that the command was told to stop, and what is kept; return the status that a shell gives for the signal."""
    notes = [note[0].lower() + note[1:] for note in getattr(stop, "__notes__", ())]
    print("; ".join([f"spawnsim: {process_setup.outcome_of(stop)}", *notes]), file=sys.stderr, flush=True)
    return 128 + process_setup.number_of(stop)


def report_refusal(error: OSError) -> int:
    """Say what the system has refused, such as a folder that cannot be made or a full disk; return the exit code."""
    if error.errno is None:  # raised by a program: no word of the system's
        return report_internal_error(error)
    place = f"{error.filename}: " if error.filename is not None else ""
    return report_error(ParameterError(f"{place}{error.strerror}"))


def report_internal_error(error: Exception) -> int:
    """Print what must not happen, with its traceback, and return the exit code for it."""
    text = "".join(traceback.format_exception(error)).rstrip()
    fault = "spawnsim: the fault above is ours; please report it with the command and the seed"
    sys.stderr.write(f"{text}\n{fault}\n")  # in one piece: ranks write side by side
    return InternalError.exit_status


COMMANDS = {
    "run": ("spawnsim.cli.run:main", "run a file on virtual ranks, or on real ones"),
    "resume": ("spawnsim.cli.run:resume", "go on with a run from its newest checkpoint"),
    "watch": ("spawnsim.cli.watch:main", "show a run while it goes on: a live page, TensorBoard, …"),
    "columnar": ("spawnsim.cli.columnar:main", "time a policy on up to millions of ranks, as rows of arrays"),
    "sweep": (
        "spawnsim.cli.sweep:main",
        "run a file under all combinations of values, seeds and circumstances",
    ),
    "study": ("spawnsim.cli.study:main", "run a study: a grid of runs, and its figures"),
    "fuzz": (
        "spawnsim.cli.fuzz:main",
        "run a file under many seeds, faults and orders of events, and say what breaks",
    ),
    "verify": (
        "spawnsim.cli.replay:verify",
        "run a folder's run again, and name the first event that differs",
    ),
    "replay": (
        "spawnsim.cli.replay:replay",
        "run a folder's run again up to a time or condition, and look around",
    ),
    "plot": ("spawnsim.cli.results:plot", "draw figures of runs"),
    "report": ("spawnsim.cli.results:report", "write one HTML page about runs"),
    "trace": ("spawnsim.cli.results:trace", "write a run's timeline for Perfetto or chrome://tracing"),
    "calibrate": ("spawnsim.cli.fidelity:calibrate", "measure this cluster, and write a platform file"),
    "validate": ("spawnsim.cli.fidelity:validate", "predict a real run, and compare"),
    "advise": ("spawnsim.cli.advise:main", "rank policies and cadences on a cluster, in timing alone"),
    "import": (
        "spawnsim.cli.inputs:main",
        "read files from clusters: nccl-tests, WAN tables, profiler traces",
    ),
    "list": ("spawnsim.cli.listing:main", "list platforms, policies, workloads, studies"),
    "new": ("spawnsim.cli.new:main", "write a file to begin with: a study, policy, workload or program"),
    "completion": ("spawnsim.cli.completion:main", "print what bash, zsh or fish need to complete commands"),
    "doctor": ("spawnsim.cli.doctor:main", "say what this machine can run, and what to change"),
}

EXAMPLES = {
    "run": (
        "spawnsim run train.py --ranks 1000 --platform ethernet-10g --straggler lognormal:0.3 --out runs/a --live",
        "spawnsim run train.py --backend mpi -n 4 --set lr=0.1 --out runs/b --observe tensorboard",
        "spawnsim run script_of_mpi4py.py --ranks 64 --trace --out runs/c -- --its-own-option 3",
    ),
    "resume": ("spawnsim resume runs/a", "spawnsim resume runs/a --ranks 8"),
    "watch": ("spawnsim watch runs/a --live", "spawnsim watch runs/a --observe tensorboard --observe wandb"),
    "columnar": ("spawnsim columnar average -n 1000000 --straggler lognormal:0.3 --set average_every=10",),
    "sweep": (
        "spawnsim sweep train.py -n 64 --set ratio=0.1,0.2,0.4 --straggler none,pareto:1.5 --seeds 8 --out runs/q",
    ),
    "study": ("spawnsim study demo --quick", "spawnsim study my_study.py --seeds 8 --jobs 2 --out runs/mine"),
    "fuzz": ("spawnsim fuzz train.py --runs 200 -n 2-8 --faults 'crash; delay' --seconds 600",),
    "verify": ("spawnsim verify runs/a",),
    "replay": (
        "spawnsim replay runs/a --until 12.5s",
        "spawnsim replay runs/a --break 'rank == 17 and loss > 3'",
    ),
    "plot": (
        "spawnsim plot runs/a runs/b --column loss --formats png svg --out figures",
        "spawnsim plot runs/q --x ratio --y 'time_to:loss<0.1'",
    ),
    "report": ("spawnsim report runs/a runs/b --title 'Two policies' --out report.html",),
    "trace": ("spawnsim trace runs/c --ranks 0-15 --from 1s --until 1500ms",),
    "calibrate": ("mpiexec -n 4 spawnsim calibrate --out mine.toml --picture mine.png",),
    "validate": ("mpiexec -n 4 spawnsim validate train.py --platform mine.toml --repeats 3",),
    "advise": ("spawnsim advise -n 1024 --model '14 GB' --step 300ms --policy average --failures llama3",),
    "import": ("spawnsim import nccl report.json --out mine.toml",),
    "list": ("spawnsim list", "spawnsim list platforms stragglers"),
    "new": ("spawnsim new study stragglers", "spawnsim new policy my_policy"),
    "completion": ("spawnsim completion bash > ~/.local/share/bash-completion/completions/spawnsim",),
    "doctor": ("spawnsim doctor", "spawnsim doctor --json"),
}
"""What the help of each command ends with; a test parses them all."""

EXIT_CODES = f"""\
exit codes:
  0    all went well
  1    the program raised on a rank; sys.exit(N) or Abort(N) gives N; of fuzz and verify: something was found
  {UsageError.exit_status}    a parameter or file is not usable
  {Deadlock.exit_status}  the program's ranks wait for each other (deadlock, livelock)
  {WorldError.exit_status}  a call met its deadline, or a rank failed that others needed; also if all ranks died
  {InternalError.exit_status}  spawnsim itself is at fault: please report it
  130  Ctrl-C; 128 + N: stopped by signal N
"""


def main(argv: Sequence[str] | None = None, *, last: bool = False) -> int:
    """Run one command line and return its exit code; `last` says that the process then ends."""
    Parser.examples = ()
    try:
        arguments = _parser().parse_args(argv)
        return _serve(arguments.command, arguments.arguments)
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
    """Write what standard output still holds, and return the exit code, which is another one if that fails."""
    try:
        if sys.stdout is not None:  # closed before the start, `>&-`
            sys.stdout.flush()
    except OSError as error:
        code = code or (UNREAD if _is_unread() else report_refusal(error))
        # What is left goes nowhere: else the interpreter writes it at its end, and complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def entry() -> None:
    """Run this process's command line; does not return."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A terminal that knows neither "µ" nor "→" (PYTHONIOENCODING=ascii, latin-1) shows "?" in their place.
            stream.reconfigure(errors="replace")
    # No rank of a real job, which a sweep itself never is unless MPI carries it.
    alone = "--backend" not in sys.argv or sys.argv[1:2] == ["sweep"]
    alone = alone and "mpi4py.MPI" not in sys.modules
    if {"run", "sweep", "study", "fuzz", "verify", "replay"} & set(sys.argv[1:2]) and alone:
        # Before any library is loaded: they read the variables once.
        use_one_thread()
        _fix_hashing()
    try:
        code = main(last=True)
    except SystemExit as end:  # after --help or --version
        code = int(end.code or 0)
    sys.exit(_written(code))


def _fix_hashing() -> None:
    """Begin again with hashes of text that are the same each time: the order of a set must not differ between runs."""
    if sys.flags.hash_randomization and "PYTHONHASHSEED" not in os.environ:
        os.environ["PYTHONHASHSEED"] = "0"
        # The hash's seed is fixed when the interpreter starts, so there is no other way than to start again.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _serve(command: str, arguments: Sequence[str]) -> int:
    name, _, function = COMMANDS[command][0].partition(":")
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        # A missing library of somebody else's is another error than a command that this version has not.
        if error.name is None or not name.startswith(error.name):
            raise
        raise UnsupportedError(f"spawnsim {command}: not in this version ({__version__})") from error
    Parser.examples = EXAMPLES.get(command, ())
    code: int = getattr(module, function)(arguments)
    return code


def parser_of(command: str) -> Parser:
    """Return the parser of a command, as its help is shown.

    Args:
        command: one of `COMMANDS`.

    Returns:
        Its parser.
    """
    with Parser.caught() as shown:
        _serve(command, ["--help"])
    return shown[0]


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
