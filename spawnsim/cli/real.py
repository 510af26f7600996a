"""`spawnsim run FILE --backend mpi|torch`: as the launcher of a real job, or as one of its ranks.

This room knows where this process stands, and who prints: rank 0 alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spawnsim.cli.ending import exit_code, internal, report
from spawnsim.errors import InternalError, ParameterError, SpawnsimError
from spawnsim.run.program import program, require_main
from spawnsim.run.real import Job, run_rank, tidy

if TYPE_CHECKING:
    from spawnsim.real.launching.launch import Here

VIRTUAL_ONLY = ("platform", "straggler", "faults", "compute")
TURN_S = 0.5  # how long ranks other than 0 leave it to rank 0 to speak


def run_real(options: argparse.Namespace, parameters: Mapping[str, Any]) -> int:
    """Run the program for real and return the exit code."""
    from spawnsim.real.launching.launch import recognise
    from spawnsim.record.folder import named

    unfit = [name for name in VIRTUAL_ONLY if getattr(options, name) is not None]
    if unfit:
        raise ParameterError(
            f"--{unfit[0]} describes virtual ranks; --backend {options.backend} takes real time"
        )
    if options.out is not None:
        options.out = named(options.out)
    if options.survive and options.backend != "mpi":
        raise ParameterError("--survive: torch.distributed outlives no rank; take --backend mpi")
    here = recognise()
    if here.may_start and options.ranks not in (None, 1):
        return _start(options, parameters)
    if options.ranks not in (None, here.size):
        raise ParameterError(
            f"-n {options.ranks}: this process is one of {here.size} ranks already; leave -n away"
        )
    return _be_a_rank(options, parameters, here)


def _start(options: argparse.Namespace, parameters: Mapping[str, Any]) -> int:
    from spawnsim.options import arguments_of
    from spawnsim.real.launching.launch import start
    from spawnsim.record.folder import require_free

    require_main(options.file)  # else each rank would say so
    if options.out is not None:
        require_free(options.out, overwrite=options.overwrite)
    arguments = [
        "--backend", options.backend, "--seed", str(options.seed), "--deadline", str(options.deadline),
        *arguments_of(parameters), *(["--json"] if options.json else []), *(["--quiet"] if options.quiet else []),
        *(["--progress"] if _wants_bar(options) else []),
        *(["--out", str(options.out)] if options.out is not None else []),
        *(["--overwrite"] if options.overwrite else []),
    ]  # fmt: skip
    ended = start(options.file, options.ranks, arguments, survive=options.survive)
    kept = ""
    if options.out is not None and tidy(options.out, ended.status, ended.cause):
        kept = f"; what was recorded until then: {options.out}"
    if ended.cause:
        print(f"spawnsim: {ended.cause}{kept}", file=sys.stderr)
    return ended.status


def _be_a_rank(options: argparse.Namespace, parameters: Mapping[str, Any], here: Here) -> int:
    from spawnsim.cli.run import show, tell
    from spawnsim.real.launching.keeper import keep
    from spawnsim.real.launching.launch import require_fit
    from spawnsim.real.launching.roll import ENDED, SURVIVE, scratch, sign, sign_stage
    from spawnsim.record.folder import require_free

    keep(here.rank, os.environ)  # from here on this is the rank, and its parent its keeper
    sign(here.rank, os.environ, os.getpid())
    if options.survive:
        os.environ[SURVIVE] = "1"
    write_whole_lines(sys.stdout, sys.stderr)
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        try:
            if options.backend == "mpi":
                require_fit(here)
            if options.out is not None:  # each rank looks before any of them has begun to write
                require_free(options.out, overwrite=options.overwrite)
            job = Job(
                program(options.file, parameters), options.backend, out=options.out or scratch(os.environ),
                seed=options.seed, deadline_s=options.deadline, progress=_wants_bar(options),
            )  # fmt: skip
            result = run_rank(job)
        except (
            SpawnsimError
        ) as error:  # before its program began; one of the program itself does not come here
            return _never_began(error, here)
    if result is not None:
        if not options.quiet:
            tell(result.what)
        show(result, as_json=options.json, quiet=options.quiet, out=options.out)
    sign_stage(ENDED, here.rank, os.environ)
    return 0


def _never_began(error: Exception, here: Here) -> int:
    """Say why this rank cannot begin, if no other has said so, and let no other wait for it. Return the status."""
    from spawnsim.real.launching.keeper import end_job
    from spawnsim.real.launching.roll import WORLD, await_first_end, sign_first_end

    status = exit_code(error) if isinstance(error, SpawnsimError) else InternalError.exit_status
    if status == WORLD:  # another rank has gone, and how is for its keeper to say
        await_first_end(os.environ)
    first = sign_first_end(status, "", os.environ)
    if first is None:  # nobody of ours has started the job
        time.sleep(0.0 if here.rank == 0 else TURN_S)  # mostly all ranks find the same fault
    if first is not False:
        error.add_note(f"spawnsim: rank {here.rank} of {here.size} has not begun; the job ends")
        report(error) if isinstance(error, SpawnsimError) else internal(error)
        if first is None:
            end_job(status, os.environ)
    return status


def write_whole_lines(*streams: Any) -> None:
    """Let streams write a line when it is whole, so that launchers do not cut the lines of ranks into each other."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _wants_bar(options: argparse.Namespace) -> bool:
    """Whether rank 0 shows a bar: a rank's own standard error is no terminal, so its launcher decides."""
    return options.progress or (sys.stderr.isatty() and not options.quiet)
