"""`spawnsim study NAME|PATH`: find the file, check that it is a study, run it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from spawnsim.cli import print_warnings
from spawnsim.cli.listing import find
from spawnsim.errors import ParameterError
from spawnsim.options import Parser
from spawnsim.record.folder import named, require_free
from spawnsim.run.process_setup import stoppable
from spawnsim.study.context import Context
from spawnsim.study.executors import load_ahead


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study named in `argv`; return the exit code; errors are printed by the caller."""
    args = _parser().parse_args(argv)
    require_jobs(args.jobs)
    if args.seeds is not None and args.seeds < 1:
        raise ParameterError(f"--seeds {args.seeds}: give how many seeds to run, at least 1")
    path = find(args.study)
    out = Path("runs") / path.stem if args.out is None else named(args.out)
    if out.exists() and not out.is_dir():
        raise ParameterError(f"--out {out} is a file: name a folder")
    # A study's files would lie among those of a run, and its clean-up could take them.
    require_free(out)
    if args.jobs:
        load_ahead()  # beside this process's own libraries: with both cores it is there 3 s earlier
    with stoppable():
        given = {"quick": args.quick, "repeats": args.seeds, "jobs": args.jobs, "say": say}
        context = Context(path.stem, path.parent, out, **given)
        try:
            load(path)(context)
        finally:
            print_warnings(context.warnings())
    return 0


JOBS = "runs at once (default: one per core, 4 at most; 0: one after another, in this process)"


def add_jobs(parser: Parser) -> None:
    """Add how many runs go on at once."""
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4), metavar="N", help=JOBS)


def require_jobs(jobs: int) -> None:
    """Raise `ParameterError` for a number of runs below 0."""
    if jobs < 0:
        raise ParameterError(f"--jobs {jobs}: give the number of runs at once, or 0 for this process")


def _parser() -> Parser:
    parser = Parser(prog="spawnsim study", description="Run a study: a grid of runs, then figures.")
    parser.missing = "`spawnsim list studies` names them."
    parser.add_argument("study", metavar="NAME|PATH", help="a file of studies/, by name, or a path to one")
    parser.add_argument("--quick", action="store_true", help="a small version, to see that it works")
    parser.add_argument("--seeds", type=int, metavar="N", help="how many seeds (default: the study's own)")
    add_jobs(parser)
    parser.add_argument("--out", metavar="DIR", help="figures and runs go here (default: runs/NAME)")
    return parser


def say(line: str) -> None:
    """Print a line at once, also into a pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def load(path: Path) -> Callable[[Context], None]:
    """Import a study's file and return its function `study(context)`."""
    spec = importlib.util.spec_from_file_location(f"spawnsim_study_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ParameterError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    study: Callable[[Context], None] | None = getattr(module, "study", None)
    if study is None:
        what = f"; it has `main`, so run it: spawnsim run {path} --ranks N" if hasattr(module, "main") else ""
        raise ParameterError(f"{path} has no function `study(context)`{what}")
    return study
