"""`spawnsim run FILE --backend mpi|torch`: as the launcher of a real job, or as one of its ranks.

This room knows where this process stands, and who prints: rank 0 alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spawnsim.cli.ending import report
from spawnsim.errors import ParameterError, SpawnsimError, UsageError
from spawnsim.run.program import program, require_main
from spawnsim.run.real import Job, run_rank, tidy

if TYPE_CHECKING:
    from spawnsim.real.launching.launch import Here

VIRTUAL_ONLY = ("platform", "straggler", "faults", "compute")


def run_real(options: argparse.Namespace, parameters: Mapping[str, Any]) -> int:
    """Run the program for real and return the exit code."""
    from spawnsim.real.launching.launch import recognise

    unfit = [name for name in VIRTUAL_ONLY if getattr(options, name) is not None]
    if unfit:
        raise ParameterError(
            f"--{unfit[0]} describes virtual ranks; --backend {options.backend} takes real time"
        )
    here = recognise()
    if here.may_start and options.ranks not in (None, 1):
        return _start(options, parameters)
    if options.ranks not in (None, here.size):
        raise ParameterError(
            f"-n {options.ranks}: this process is one of {here.size} ranks already; leave -n away"
        )
    return _be_a_rank(options, parameters, here)


def _start(options: argparse.Namespace, parameters: Mapping[str, Any]) -> int:
    from spawnsim.cli.run import arguments_of
    from spawnsim.real.launching.launch import start

    require_main(options.file)  # else each rank would say so
    arguments = [
        "--backend", options.backend, "--seed", str(options.seed), "--deadline", str(options.deadline),
        *arguments_of(parameters), *(["--json"] if options.json else []), *(["--quiet"] if options.quiet else []),
        *(["--progress"] if _wants_bar(options) else []),
        *(["--out", str(options.out)] if options.out is not None else []),
    ]  # fmt: skip
    ended = start(options.file, options.ranks, arguments)
    kept = ""
    if options.out is not None and tidy(options.out, ended.status, ended.cause):
        kept = f"; what was recorded until then: {options.out}"
    if ended.cause:
        print(f"spawnsim: {ended.cause}{kept}", file=sys.stderr)
    return ended.status


def _be_a_rank(options: argparse.Namespace, parameters: Mapping[str, Any], here: Here) -> int:
    from spawnsim.cli.run import show
    from spawnsim.real.launching.keeper import keep
    from spawnsim.real.launching.launch import require_fit
    from spawnsim.real.launching.roll import sign

    keep(here.rank, os.environ)  # from here on this is the rank, and its parent its keeper
    sign(here.rank, os.environ, os.getpid())
    write_whole_lines(sys.stdout, sys.stderr)
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        try:
            if options.backend == "mpi":
                require_fit(here)
            task = program(options.file, parameters)
        except SpawnsimError as error:  # all ranks find the same fault before they meet: one of them says so
            return report(error, quiet=here.rank != 0)
        job = Job(
            task, options.backend, out=options.out, seed=options.seed, deadline_s=options.deadline,
            progress=_wants_bar(options),
        )  # fmt: skip
        try:
            result = run_rank(job)
        except (
            UsageError
        ) as error:  # likewise; one of the program itself ends the job, and does not come here
            return report(error, quiet=here.rank != 0)
    if result is not None:
        show(result, as_json=options.json, quiet=options.quiet, out=options.out)
    return 0


def write_whole_lines(*streams: Any) -> None:
    """Let streams write a line when it is whole, so that launchers do not cut the lines of ranks into each other."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _wants_bar(options: argparse.Namespace) -> bool:
    """Whether rank 0 shows a bar: a rank's own standard error is no terminal, so its launcher decides."""
    return options.progress or (sys.stderr.isatty() and not options.quiet)
