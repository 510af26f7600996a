"""The command line: one subcommand, one function of its arguments that returns the exit code.

This room knows which module serves a subcommand, and how each kind of error ends. A module is imported when its
subcommand is called, so `spawnsim --help` is quick and needs nothing installed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from spawnsim import __version__
from spawnsim.cli.ending import internal, interrupted, report
from spawnsim.errors import Deadlock, InternalError, SpawnsimError, UnsupportedError, UsageError, WorldError
from spawnsim.options import Parser
from spawnsim.run.threads import use_one_thread

COMMANDS = {
    "run": ("spawnsim.cli.run:main", "run a file on virtual ranks, or on real ones"),
    "study": ("spawnsim.study.command:main", "run a study: a grid of runs, and its figures"),
    "plot": ("spawnsim.plots.cli:plot", "draw figures of runs"),
    "report": ("spawnsim.report.command:report", "write one HTML page about runs"),
    "trace": ("spawnsim.report.command:trace", "write a run's timeline for Perfetto or chrome://tracing"),
    "calibrate": ("spawnsim.calibrate.command:main", "measure this cluster, and write a platform file"),
    "validate": ("spawnsim.validate.command:main", "predict a real run, and compare"),
    "list": ("spawnsim.cli.list:main", "list platforms, policies, workloads, studies"),
    "doctor": ("spawnsim.real.launching.doctor:main", "say what this machine can run, and what to change"),
}

EXIT_CODES = f"""\
exit codes:
  0    all went well
  1    the program raised on a rank; sys.exit(N) or Abort(N) gives N
  {UsageError.exit_status}    a parameter or file is not usable
  {Deadlock.exit_status}  the program's ranks wait for each other (deadlock, livelock)
  {WorldError.exit_status}  a call met its deadline, or a rank failed
  {InternalError.exit_status}  spawnsim itself is at fault: please report it
  130  Ctrl-C; 128 + N: stopped by signal N
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    try:
        arguments = _parser().parse_args(argv)
        return _serve(arguments.command, arguments.arguments)
    except SpawnsimError as error:
        return report(error)
    except KeyboardInterrupt as stop:
        return interrupted(stop)
    except Exception as error:  # noqa: BLE001  the outermost door: what arrives here is our fault, and says so
        return internal(error)


def entry() -> None:
    """Run this process's command line; does not return."""
    if {"run", "study"} & set(sys.argv[1:2]) and "--backend" not in sys.argv:
        use_one_thread()
        _fix_hashing()
    sys.exit(main())


def _fix_hashing() -> None:
    """Begin again with hashes of text that are the same each time: the order of a set must not differ between runs."""
    if sys.flags.hash_randomization and "PYTHONHASHSEED" not in os.environ:
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _serve(command: str, arguments: Sequence[str]) -> int:
    name, _, function = COMMANDS[command][0].partition(":")
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise UnsupportedError(f"spawnsim {command}: not in this version ({__version__})") from error
    code: int = getattr(module, function)(arguments)
    return code


def _parser() -> Parser:
    width = max(map(len, COMMANDS))
    table = "\n".join(f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items())
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
