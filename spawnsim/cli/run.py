"""`spawnsim run FILE`: one program on virtual ranks, or on real ones.

This room knows options and how to print totals.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spawnsim.cli.ending import note_beside_the_bar, tell_beside_the_bar
from spawnsim.errors import ParameterError
from spawnsim.options import Parser, parameters
from spawnsim.run import Run, run
from spawnsim.run.interrupts import stoppable
from spawnsim.run.result import shown
from spawnsim.run.unmodified import is_unmodified, refuse_arguments


def main(argv: Sequence[str]) -> int:
    """Run the subcommand."""
    options, script_arguments = parse(argv)
    if options.backend != "virtual":
        from spawnsim.cli.real import run_real

        refuse_arguments(script_arguments)
        if options.trace:
            raise ParameterError(
                "--trace is for virtual ranks; of real ones `spawnsim trace` draws the recorded rows and events"
            )
        options.deadline = 30.0 if options.deadline is None else options.deadline
        return run_real(options, parameters(options.set))
    if options.survive:
        raise ParameterError("--survive is for --backend mpi: virtual ranks survive others as they are")
    if options.ranks is None:
        raise ParameterError("how many virtual ranks? Give --ranks N")
    with stoppable(), _stdout_for_the_totals(options.json):
        result = run(
            options.file,
            ranks=options.ranks,
            platform=options.platform,
            stragglers=options.straggler,
            faults=options.faults,
            seed=options.seed,
            out=options.out,
            overwrite=options.overwrite,
            whole=options.whole,
            compute=options.compute,
            deadline_s=options.deadline,
            progress=options.progress or (sys.stderr.isatty() and not options.quiet),
            trace=options.trace,
            parameters=parameters(options.set),
            argv=script_arguments,
            options=program_options(options),
            on_error=tell_beside_the_bar,
            on_note=None if options.quiet else note_beside_the_bar,
        )
    if not options.quiet:
        tell(result.what)
    show(result, as_json=options.json, quiet=options.quiet, out=options.out)
    return 0


def show(result: Run, *, as_json: bool, quiet: bool, out: str | Path | None) -> None:
    """Print the totals of a run that has finished."""
    if as_json:
        print(json.dumps(dict(result.totals)))
    elif not quiet:
        facts = {**result.totals} | ({} if out is None else {"folder": out})
        if "reproducible" in result.what:
            facts["reproducible"] = (
                f"no: {'; '.join(result.what['leaks'])}" if result.what["leaks"] else "yes"
            )
        print("\n".join(f"{name:16} {shown(value)}" for name, value in facts.items()))


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the arguments that are a script's own: all after `--`, and all that are not known.

    A file with a `main(comm)` takes none.
    """
    own, dashes, rest = list(argv), "--" in argv, []
    if dashes:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    options, unknown = parser().parse_known_args(own)
    takes_any = options.backend != "virtual" or (
        options.file.is_file() and (options.whole or is_unmodified(options.file))
    )
    if unknown and not takes_any:
        parser().error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest and not takes_any:
        refuse_arguments(rest)
    return options, unknown + rest


def program_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return how an unmodified program is run."""
    return {
        "prefix": not options.no_prefix, "virtual_time": options.virtual_time, "private": tuple(options.private),
        "futures": options.futures,
    }  # fmt: skip


def tell(what: Mapping[str, Any]) -> None:
    """Print what was noticed of a run, a line each."""
    for kind in ("note", "warning"):
        for sentence in what.get(f"{kind}s", ()):
            print(f"spawnsim: {kind}: {sentence}", file=sys.stderr)


def _stdout_for_the_totals(as_json: bool) -> contextlib.AbstractContextManager[object]:
    # What the program itself prints must not mix with the JSON.
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def parser() -> Parser:
    """Return the options of `spawnsim run`."""
    parser = Parser(
        prog="spawnsim run",
        description="Run a file that defines main(comm) on virtual ranks, or (--backend) on real ones; or an "
        "unmodified mpi4py program on virtual ranks. What is not an option here, and all after --, are its arguments.",
    )
    add = parser.add_argument
    add("file", type=Path, help="Python file that defines main(comm), or an mpi4py program")
    add("-n", "--ranks", type=int, metavar="N", help="how many ranks; real ones are started with mpiexec")
    add("--backend", choices=("virtual", "mpi", "torch"), default="virtual", help="default: virtual")
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
        "computing between two calls costs: none, '5 us', file.py:12=2ms, measured, 'measured*2'",
    )
    add("--seed", type=int, default=0, metavar="K", help="of every random stream; default: 0")
    add(
        "--deadline",
        type=float,
        metavar="S",
        help="seconds that one call may wait; default: 30; of an mpi4py program on virtual ranks: no limit",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a keyword argument of main; repeatable",
    )
    _add_program_options(parser)
    add(
        "--survive",
        action="store_true",
        help="of --backend mpi: the job goes on when ranks die, if its program catches RankFailed, Revoked and Timeout "
        "and calls comm.recover(); virtual ranks always do",
    )
    add("--out", metavar="DIR", help="run folder to write: run.json, metrics.npz, events.jsonl")
    add(
        "--trace",
        action="store_true",
        help="keep all calls and messages of virtual ranks in the run folder, for `spawnsim trace DIR`",
    )
    add("--overwrite", action="store_true", help="the run that the folder holds may be lost")
    add("--json", action="store_true", help="print the totals as one JSON object, and nothing else")
    add("--quiet", action="store_true", help="no progress bar, no totals")
    add("--progress", action="store_true", help="a progress bar (of rank 0) also where there is no terminal")
    return parser


def _add_program_options(parser: Parser) -> None:
    group = parser.add_argument_group("unmodified mpi4py programs")
    group.add_argument(
        "--whole", action="store_true",
        help="run the file whole on every rank, also where nothing shows that it speaks MPI",
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
