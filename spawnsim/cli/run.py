"""`spawnsim run FILE`: one program on virtual ranks, or on real ones.

On real ranks (`--backend mpi|torch`) this process is the launcher of the job, or one of its ranks, of which rank 0
alone prints. A launcher loads neither torch nor MPI and has no threads, and a rank loads nothing that starts processes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spawnsim.backends import BACKENDS
from spawnsim.cli import (
    exit_code,
    print_error_beside_bar,
    print_note_beside_bar,
    print_warnings,
    report_error,
    report_internal_error,
)
from spawnsim.cli.listing import program_file
from spawnsim.errors import InternalError, ParameterError, SpawnsimError, WorldError
from spawnsim.options import (
    OPTIONS,
    VIRTUAL_ONLY,
    Parser,
    of_virtual_ranks,
    parameters,
    split_at_dashes,
    time_limit,
)
from spawnsim.run import Run, run
from spawnsim.run.process_setup import ended_in_c, loading_without_threads, stoppable
from spawnsim.run.program import is_unmodified, program, refuse_arguments, require_main
from spawnsim.run.real import Job, run_rank, tidy
from spawnsim.run.result import shown, shown_totals
from spawnsim.run.watched import OBSERVERS, require_observers, watched

if TYPE_CHECKING:
    from spawnsim.real.launch.launchers import LaunchContext


def main(argv: Sequence[str]) -> int:
    """Run the subcommand."""
    options, script_arguments = parse(argv)
    if BACKENDS[options.backend].is_real:
        refuse_arguments(script_arguments)
        if options.trace:
            raise ParameterError(
                "--trace is for virtual ranks; of real ones `spawnsim trace` draws the recorded rows and events"
            )
        # Not a default of the parser: an unmodified program on virtual ranks has none.
        options.deadline = 30.0 if options.deadline is None else options.deadline
        return run_real(options, parameters(options.set))
    if options.survive:
        raise ParameterError("--survive is for --backend mpi: virtual ranks survive others as they are")
    if options.check_calls:
        raise ParameterError(
            "--check-calls is for --backend mpi and torch: virtual ranks check their calls as they are"
        )
    if options.ranks is None:
        raise ParameterError("how many virtual ranks? Give --ranks N")
    _require_own_folder(options)
    with stoppable(), ended_in_c(), _stdout_for_the_totals(options.json):
        result = run(
            options.file,
            ranks=options.ranks,
            platform=options.platform,
            stragglers=options.straggler,
            faults=options.faults,
            seed=options.seed,
            out=options.out,
            overwrite=options.overwrite,
            resume=options.resume,
            record_every=options.record_every,
            record_ranks=options.record_ranks,
            whole=options.whole,
            compute=options.compute,
            deadline_s=options.deadline,
            progress=_wants_bar(options),
            trace=options.trace,
            observe=observers(options),
            eager=options.eager,
            check_steps=options.check_steps,
            ties=options.ties or "fifo",
            sums=options.sums or "mpi",
            parameters=parameters(options.set),
            argv=script_arguments,
            options=program_options(options),
            on_error=print_error_beside_bar,
            on_note=None if options.quiet else print_note_beside_bar,
        )
    print_result(result, options)
    # No rank raises where all die at once, and a job script would take the run for one that came to its end.
    return WorldError.exit_status if result.what.get("all_dead") else 0


def _require_own_folder(options: argparse.Namespace) -> None:
    from spawnsim.record.folder import named, require_own

    if options.out is not None and not (options.overwrite or options.resume):
        require_own(named(options.out))


def observers(options: argparse.Namespace) -> list[str]:
    """Return what watches the run, each once."""
    return list(dict.fromkeys([*(["live"] if options.live else []), *options.observe]))


def print_result(result: Run, options: argparse.Namespace) -> None:
    """Print what was noticed of a run that has finished, and its totals, as `--json` and `--quiet` say."""
    for sentence in () if options.quiet else result.what.get("notes", ()):
        print(f"spawnsim: note: {sentence}", file=sys.stderr)
    print_warnings(result.what.get("warnings", ()))
    if options.json:
        print(json.dumps(dict(result.totals)))
    elif not options.quiet:
        facts = shown_totals(result.totals, result.table.rows) | (
            {} if options.out is None else {"folder": options.out}
        )
        if "reproducible" in result.what:
            facts["reproducible"] = (
                f"no: {'; '.join(result.what['leaks'])}" if result.what["leaks"] else "yes"
            )
        print("\n".join(f"{name:16} {shown(value)}" for name, value in facts.items()))


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the arguments that are a script's own: all after `--`, and all that are not known.

    A file with a `main(comm)` takes none.
    """
    own, rest = split_at_dashes(argv)
    options, unknown = parser().parse_known_args(own)
    options.file = program_file(options.file)
    # On real ranks the caller refuses them, in words of its own.
    is_real = BACKENDS[options.backend].is_real
    takes_any = is_real or (options.file.is_file() and (options.whole or is_unmodified(options.file)))
    if unknown and not takes_any:
        parser().error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest and not takes_any:
        refuse_arguments(rest)
    for name, hint in parser().mistyped([] if is_real or options.quiet else unknown):
        print_note_beside_bar(
            f"{name} goes to the program; {hint} What follows -- is the program's, without this note"
        )
    return options, unknown + rest


def program_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return how an unmodified program is run."""
    return {
        "prefix": not options.no_prefix, "virtual_time": options.virtual_time, "private": tuple(options.private),
        "futures": options.futures, "carrier": options.carrier,
    }  # fmt: skip


def _stdout_for_the_totals(as_json: bool) -> contextlib.AbstractContextManager[object]:
    # What the program itself prints must not mix with the JSON.
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def parser() -> Parser:
    """Return the options of `spawnsim run`."""
    parser = Parser(
        prog="spawnsim run",
        description="Run a file that defines main(comm) on virtual ranks, or (--backend) on real ones; or an "
        "unmodified program of mpi4py or torch.distributed. What is not an option here, and all after --, is its own.",
    )
    add = parser.add_argument
    add("file", type=Path, help="file with main(comm), unmodified program, or name (`spawnsim list studies`)")
    add("-n", "--ranks", type=int, metavar="N", help="how many ranks; real ones are started with mpiexec")
    add("--backend", choices=tuple(BACKENDS), default="virtual", help="default: virtual")
    add("--platform", metavar="P", help="virtual network: a name (see `spawnsim list`) or a TOML file")
    add(
        "--straggler",
        "--stragglers",
        metavar="S",
        help="virtual compute times, such as lognormal:0.3 or pareto:2.5",
    )
    add(
        "--faults", metavar="F",
        help="virtual fault plan, such as 'crash:17@3.5s; drop:*>3@0s+5s,0.1'; see `spawnsim list faults`",
    )  # fmt: skip
    add(
        "--compute",
        metavar="S",
        help="seconds of a comm.compute() that states none, such as 0.005 or '5 ms'; of an mpi4py program: what "
        "computing between two calls costs: none, '5 us', file.py:12=2ms, measured, 'measured*2', counted:h100",
    )
    add("--seed", type=int, default=0, metavar="K", help="of every random stream; default: 0")
    add(
        "--deadline",
        type=time_limit,
        metavar="S",
        help="seconds that one call may wait; default: 30; of an mpi4py program on virtual ranks: no limit",
    )
    add(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="a keyword argument of main; repeatable",
    )  # fmt: skip
    _add_program_options(parser)
    _add_recording_options(parser)
    _add_real_options(parser)
    add(
        "--trace", action="store_true",
        help="keep all calls and messages of virtual ranks in the run folder, for `spawnsim trace DIR`",
    )  # fmt: skip
    _add_training_options(parser)
    add(
        "--ties", metavar="ORDER",
        help="the order of virtual ranks at one and the same time: fifo (by number; default), reverse, random:SEED",
    )  # fmt: skip
    add(
        "--sums", metavar="LIBRARY",
        help="the order in which virtual ranks add floats: mpi (default), or gloo for the same bits as --backend torch",
    )  # fmt: skip
    _add_results(parser)
    return parser


def _add_training_options(parser: Parser) -> None:
    """Add how training steps of virtual ranks are executed."""
    add = parser.add_argument
    add(
        "--eager", action="store_true",
        help="execute each TrainingStep of virtual ranks alone, as real ones do",
    )  # fmt: skip
    add(
        "--check-steps", action="store_true",
        help="compare each TrainingStep with the same step executed alone; default: the first ones, then 1 in 100",
    )  # fmt: skip


def _add_results(parser: Parser) -> None:
    """Add where a run is kept, and what is said of it on the terminal."""
    add = parser.add_argument
    add("--out", metavar="DIR", help="run folder to write: run.json, metrics.npz, events.jsonl")
    add("--overwrite", action="store_true", help="replace the run in DIR")
    add(
        "--live", action="store_true",
        help="a page on 127.0.0.1 that shows the run while it goes on; its address is printed. Needs --out DIR",
    )  # fmt: skip
    add(
        "--observe", action="append", default=[], metavar="NAME",
        help=f"what else watches the run, among {', '.join(OBSERVERS)}; repeatable. Needs --out DIR",
    )  # fmt: skip
    add("--json", action="store_true", help="print the totals as one JSON object, and nothing else")
    add("--quiet", action="store_true", help="no progress bar, notes or totals; warnings and errors remain")
    add("--progress", action="store_true", help="a progress bar (of rank 0) also where there is no terminal")


def _add_real_options(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--survive",
        action="store_true",
        help="of --backend mpi: the job goes on when ranks die, if its program catches RankFailed, Revoked and Timeout "
        "and calls comm.recover(); virtual ranks always do",
    )
    add(
        "--check-calls",
        action="store_true",
        help="of real ranks: each blocking collective first compares its call on all ranks, and another call, root, "
        "op, dtype or size is an error that shows them all; virtual ranks always do",
    )


def _add_recording_options(parser: Parser) -> None:
    group = parser.add_argument_group("long runs")
    group.add_argument(
        "--resume", action="store_true",
        help="go on from the newest checkpoint that --out DIR holds (comm.checkpoint); without one begin",
    )  # fmt: skip
    group.add_argument(
        "--record-every", type=int, default=1, metavar="N",
        help="keep the rows of every Nth iteration alone; default: of all. Events are all kept",
    )  # fmt: skip
    group.add_argument(
        "--record-ranks", metavar="R", help="keep the rows of these ranks alone, such as 0-9,100"
    )


def _add_program_options(parser: Parser) -> None:
    group = parser.add_argument_group("unmodified programs of mpi4py and torch.distributed")
    group.add_argument(
        "--whole", action="store_true",
        help="run the file whole on every rank, also where nothing shows that it speaks MPI",
    )  # fmt: skip
    group.add_argument(
        "--carrier", choices=("greenlets", "threads"),
        help="what carries a rank; default: threads for programs of torch.distributed, greenlets for others",
    )  # fmt: skip
    group.add_argument("--no-prefix", action="store_true", help="print lines without [rank 3] in front")
    group.add_argument(
        "--virtual-time", choices=("all", "sleep", "none"), default="all",
        help="which of time.time(), time.perf_counter(), …, and time.sleep() are virtual; default: all",
    )  # fmt: skip
    group.add_argument(
        "--private", action="append", default=[], metavar="PACKAGE",
        help="an installed package that each rank imports for itself; repeatable",
    )  # fmt: skip
    group.add_argument(
        "--futures", action="store_true",
        help="rank 0 alone runs the program, the others work for its MPIPoolExecutor",
    )  # fmt: skip


TURN_S = 0.5  # how long ranks other than 0 leave it to rank 0 to speak


def run_real(options: argparse.Namespace, parameters: Mapping[str, Any]) -> int:
    """Run the program for real and return the exit code."""
    from spawnsim.real.launch.launchers import detect_launcher
    from spawnsim.real.launch.processes import monitor

    here = detect_launcher()
    starts = here.may_start and options.ranks not in (None, 1)
    if not starts:
        # Before anything is loaded: the fork must copy neither threads, as numpy has, nor a started MPI, and a rank has
        # no monitor until then.
        monitor(here.rank, os.environ)  # from here on this is the rank, and its parent its monitor
    # A process with threads cannot see to it that its job dies with it.
    with loading_without_threads() if starts else contextlib.nullcontext():
        from spawnsim.record import ranks_named
        from spawnsim.record.folder import named

    unfit = [OPTIONS[name] for name in VIRTUAL_ONLY if getattr(options, OPTIONS[name][2:]) is not None]
    if unfit:
        raise ParameterError(f"{of_virtual_ranks(unfit)}; --backend {options.backend} takes real time")
    require_observers(observers(options), options.out)
    if options.out is not None:
        options.out = named(options.out)
    if options.survive and not BACKENDS[options.backend].survives:
        raise ParameterError(
            f"--survive: a job of --backend {options.backend} outlives no rank; take --backend mpi"
        )
    if options.survive and options.check_calls:
        raise ParameterError(
            "--check-calls and --survive: a rank that compares its call waits for the dead, too; give one"
        )
    # A run that goes on with fewer ranks keeps its own choice, of those that are left.
    ranks_named(options.record_ranks, None if options.resume else options.ranks if starts else here.size)
    if starts:
        return _start(options, parameters)
    if options.ranks not in (None, here.size):
        raise ParameterError(
            f"-n {options.ranks}: this process is one of {here.size} ranks already; leave -n away"
        )
    return _be_a_rank(options, parameters, here)


def _start(options: argparse.Namespace, parameters: Mapping[str, Any]) -> int:
    import tempfile

    from spawnsim.options import arguments_of
    from spawnsim.real.launch.launchers import start
    from spawnsim.record.folder import require_free
    from spawnsim.record.manifest import own_command

    require_main(options.file, options.ranks)  # else each rank would say so
    if options.out is not None:
        require_free(options.out, overwrite=options.overwrite or options.resume, empty_too=True)
        _require_own_folder(options)
    arguments = [
        "--backend", options.backend, "--seed", str(options.seed), "--deadline", str(options.deadline),
        *arguments_of(parameters), *(["--json"] if options.json else []), *(["--quiet"] if options.quiet else []),
        *(["--progress"] if _wants_bar(options) else []),
        *(["--out", str(options.out)] if options.out is not None else []),
        *(["--overwrite"] if options.overwrite else []), *(["--resume"] if options.resume else []),
        *(["--check-calls"] if options.check_calls else []), *(["--live"] if options.live else []),
        "--record-every", str(options.record_every),
        *(["--record-ranks", options.record_ranks] if options.record_ranks is not None else []),
    ]  # fmt: skip
    kept, begun_s = "", time.time()
    with (
        tempfile.TemporaryDirectory(prefix="spawnsim-") as registry,
        watched(options.out, observers(options), "--registry", registry),
    ):
        ended = start(
            options.file, options.ranks, arguments, survive=options.survive, registry=Path(registry),
            command=own_command(),
        )  # fmt: skip
        # The launcher merges, since ranks that were killed could not, and those left may have been told to stop.
        if options.out is not None and tidy(options.out, ended, begun_s):
            kept = f"what was recorded until then: {options.out}"
    if ended.cause:
        print("; ".join(filter(None, [f"spawnsim: {ended.cause}", kept])), file=sys.stderr)
    elif ended.status and kept:  # a rank has said why, and does not know whether all could write
        print(f"spawnsim: {kept}", file=sys.stderr)
    if ended.mismatch:
        virtual = f"spawnsim run {options.file} --ranks {options.ranks}"
        print(
            f"spawnsim: calls do not fit: `{virtual}` names them, and their lines; --check-calls those of collectives",
            file=sys.stderr,
        )
    return ended.status


def _be_a_rank(options: argparse.Namespace, parameters: Mapping[str, Any], here: LaunchContext) -> int:
    from spawnsim.real.launch.launchers import require_fit
    from spawnsim.real.launch.processes import (
        CHECK_CALLS,
        COMMAND,
        ENDED,
        REGISTRY,
        SURVIVE,
        register,
        register_stage,
        scratch_folder,
    )
    from spawnsim.record.folder import require_free

    # After the monitor's fork, as the process that is the rank has another number than the one the launcher started.
    register(here.rank, os.environ, os.getpid())
    if options.survive:
        os.environ[SURVIVE] = "1"
    if options.check_calls:
        os.environ[CHECK_CALLS] = "1"
    # Taken out: a run that the program itself starts has a command of its own.
    command = os.environ.pop(COMMAND, None)
    write_whole_lines(sys.stdout, sys.stderr)
    with _stdout_for_the_totals(options.json):
        try:
            if BACKENDS[options.backend].launcher == "mpiexec":
                require_fit(here)
            if options.out is not None:  # each rank looks before any of them has begun to write
                require_free(options.out, overwrite=options.overwrite or options.resume, empty_too=True)
                if (
                    REGISTRY not in os.environ
                ):  # the launcher has looked, and observers may have begun to write
                    _require_own_folder(options)
            job = Job(
                program(options.file, parameters), options.backend, out=options.out or scratch_folder(os.environ),
                seed=options.seed, deadline_s=options.deadline, progress=_wants_bar(options),
                keep=options.out is not None, resume=options.resume,
                record_every=options.record_every, record_ranks=options.record_ranks, observed=options.live,
                command=command,
            )  # fmt: skip
            # The launcher watches the ranks that it has started; of others the first one does.
            own = [] if here.rank or REGISTRY in os.environ else observers(options)
            with watched(options.out, own):
                result = run_rank(job)
        # Before its program began: an error of the program itself does not come here.
        except SpawnsimError as error:
            return _never_began(error, here)
    if result is not None:
        print_result(result, options)
    # Last: the launcher takes what happens from here on for the end of a rank that is through.
    register_stage(ENDED, here.rank, os.environ)
    return 0


def _never_began(error: Exception, here: LaunchContext) -> int:
    """Say why this rank cannot begin, if no other has said so, and let no other wait for it. Return the status."""
    from spawnsim.real.launch.processes import WORLD_ERROR, end_job, record_first_end, wait_for_first_end

    status = exit_code(error) if isinstance(error, SpawnsimError) else InternalError.exit_status
    if status == WORLD_ERROR:  # another rank has gone, and how is for its monitor to say
        wait_for_first_end(os.environ)
    # One rank speaks: mostly all find the same fault at once, and n equal messages hide it.
    first = record_first_end(status, "", os.environ)
    if first is None:  # the job was not started by spawnsim
        time.sleep(0.0 if here.rank == 0 else TURN_S)  # mostly all ranks find the same fault
    if first is not False:
        error.add_note(f"spawnsim: rank {here.rank} of {here.size} has not begun; the job ends")
        report_error(error) if isinstance(error, SpawnsimError) else report_internal_error(error)
        if first is None:
            end_job(status, os.environ)
    return status


def resume(argv: Sequence[str]) -> int:
    """Run the subcommand `spawnsim resume`: the run of a folder again, from its newest checkpoint on."""
    from spawnsim import checkpoints
    from spawnsim.options import arguments_of
    from spawnsim.record.folder import read_manifest
    from spawnsim.record.manifest import INPUTS

    parser = Parser(
        prog="spawnsim resume",
        description="Go on with a run from its newest checkpoint (comm.checkpoint): the program, its parameters and "
        "its circumstances are those of the folder, unless they are given here, as options of `spawnsim run`. "
        "The program that the folder keeps is executed: resume no folder that you do not trust.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder; the run goes on in it")
    parser.add_argument(
        "--program", type=Path, metavar="FILE", help="the program; default: the one kept in RUN"
    )
    parser.add_argument("--backend", choices=BACKENDS, help="default: that of RUN")
    options, given = parser.parse_known_args(list(argv))
    what = read_manifest(options.run)["what"]
    found = checkpoints.newest(options.run)
    file = options.program or options.run / INPUTS / "program" / Path(str(what.get("file"))).name
    if not file.is_file():
        raise ParameterError(f"{options.run} keeps no program: give it, with --program FILE")
    # Who has mended the program since expects it to run, and not the one that is kept.
    kept = "" if options.program else f", with the program that it keeps, {file}; another: --program FILE"
    print(f"spawnsim: {options.run} goes on at iteration {found.iteration}{kept}", file=sys.stderr)
    backend = options.backend or str(what.get("backend", "virtual"))
    if what.get("all_dead") and backend == "virtual" and not _gives(given, OPTIONS["faults"]):
        print(
            f"spawnsim: all ranks have died in {options.run}, and its fault plan strikes again; without it: "
            f"spawnsim resume {options.run} --faults ''",
            file=sys.stderr,
        )
    # Real ranks have no virtual circumstances: a run that goes on with them leaves its own behind.
    fit = [name for name in _CIRCUMSTANCES if backend == "virtual" or name not in VIRTUAL_ONLY]
    own = [part for each in fit for part in _circumstance(options.run, what, each)]
    recorded = what.get("parameters")
    if isinstance(recorded, dict):
        own += arguments_of({name: each for name, each in recorded.items() if each is not None})
    own += ["--eager"] * bool(what.get("eager") and backend == "virtual")
    own += ["--check-steps"] * bool(what.get("check_steps") and backend == "virtual")
    return main([str(file), "--backend", backend, *own, "--out", str(options.run), "--resume", *given])


def _gives(arguments: Sequence[str], option: str) -> bool:
    return any(each.partition("=")[0] == option for each in arguments)


_CIRCUMSTANCES = (
    "ranks", "seed", "deadline_s", "platform", "stragglers", "faults", "compute", "ties", "sums", "record_every",
    "record_ranks",
)  # fmt: skip


def _circumstance(folder: Path, what: Mapping[str, Any], name: str) -> list[str]:
    """Return the option that gives a circumstance again; a file is the one that the folder keeps."""
    from spawnsim.record.manifest import INPUTS

    value = what.get(name)
    if value is None:
        return []
    if isinstance(value, (dict, list)):
        raise ParameterError(
            f"{folder}: its {name} was an object of Python. Give {OPTIONS[name]}, or go on in Python: "
            "spawnsim.run(..., out=DIR, resume=True)"
        )
    kept = folder / INPUTS / name / Path(str(value)).name
    return [OPTIONS[name], str(kept if kept.is_file() else value)]


def write_whole_lines(*streams: Any) -> None:
    """Let streams write a line when it is whole, so that launchers do not cut the lines of ranks into each other."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _wants_bar(options: argparse.Namespace) -> bool:
    """Whether rank 0 shows a bar: a rank's standard error is not a terminal, so its launcher decides."""
    return options.progress or (sys.stderr.isatty() and not options.quiet)
