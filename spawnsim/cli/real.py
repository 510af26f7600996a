"""`spawnsim run FILE --backend mpi|torch`: as the launcher of a real job, or as one of its ranks.

This room knows where this process stands, and who prints: rank 0 alone.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from spawnsim.cli.ending import report
from spawnsim.errors import ParameterError, SpawnsimError
from spawnsim.run.program import program, require_main
from spawnsim.run.real import Job, run_rank, tidy

INTERRUPTED = 130
VIRTUAL_ONLY = ("platform", "straggler", "faults", "compute")


def run_real(options: argparse.Namespace, parameters: Mapping[str, Any]) -> int:
    """Run the program for real and return the exit code."""
    from spawnsim.real.launch import recognise

    unfit = [name for name in VIRTUAL_ONLY if getattr(options, name) is not None]
    if unfit:
        raise ParameterError(
            f"--{unfit[0]} describes virtual ranks; --backend {options.backend} takes real time"
        )
    here = recognise()
    if here.launcher == "none" and options.ranks not in (None, 1):
        return _start(options, parameters)
    if options.ranks not in (None, here.size):
        raise ParameterError(
            f"-n {options.ranks}: this process is one of {here.size} ranks already; leave -n away"
        )
    return _be_a_rank(options, parameters, rank=here.rank)


def _start(options: argparse.Namespace, parameters: Mapping[str, Any]) -> int:
    from spawnsim.cli.run import arguments_of
    from spawnsim.real.launch import launch

    require_main(options.file)  # else each rank would say so
    arguments = [
        "--backend", options.backend, "--seed", str(options.seed), "--deadline", str(options.deadline),
        *arguments_of(parameters), *(["--json"] if options.json else []), *(["--quiet"] if options.quiet else []),
        *(["--out", str(options.out)] if options.out is not None else []),
    ]  # fmt: skip
    status = INTERRUPTED
    try:
        status = launch(options.file, options.ranks, arguments)
    finally:
        if options.out is not None:
            tidy(options.out, status)
    return status


def _be_a_rank(options: argparse.Namespace, parameters: Mapping[str, Any], *, rank: int) -> int:
    from spawnsim.cli.run import show

    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        try:
            task = program(options.file, parameters)
        except SpawnsimError as error:  # all ranks find the same fault before they meet: one of them says so
            return report(error, quiet=rank != 0)
        job = Job(task, options.backend, out=options.out, seed=options.seed, deadline_s=options.deadline)
        result = run_rank(job)
    if result is not None:
        show(result, as_json=options.json, quiet=options.quiet, out=options.out)
    return 0
