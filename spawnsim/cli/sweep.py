"""`spawnsim sweep FILE`: one program under all combinations of values, without a study's file.

Most options are those of `spawnsim run`, and take several values with commas between them.
"""

from __future__ import annotations

import argparse
import ast
import os
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from spawnsim.backends import BACKENDS
from spawnsim.cli import print_warnings
from spawnsim.cli.listing import find
from spawnsim.cli.study import add_jobs, require_jobs, say
from spawnsim.errors import ParameterError
from spawnsim.options import (
    OPTIONS,
    VIRTUAL_ONLY,
    Parser,
    choices,
    listed,
    nearest,
    of_virtual_ranks,
    split_at_dashes,
    unquoted,
)
from spawnsim.record.folder import named
from spawnsim.run.process_setup import stoppable
from spawnsim.run.program import is_unmodified, require_kind, require_main, tree_of, written_parameters
from spawnsim.run.virtual import require_possible
from spawnsim.scenario import DEADLINE_S, Scenario
from spawnsim.study import executors
from spawnsim.study.results import DONE, Sweep
from spawnsim.study.store import Cell, grid
from spawnsim.study.sweeping import require_limit
from spawnsim.units import counted, limit, seconds, text_table

QUOTING = """\
Options with LIST take several values: --ranks 8,64 or --set ratio=0.1,0.2,0.4; all combinations are run. A value that
has commas itself is put in quotes, within those of the shell: --set "name='a,b',c". A tuple needs none, --set
"hidden=(32,),(64,64)", nor does a straggler, --straggler none,slow:0.05,10. The same option again adds values.

  spawnsim sweep train.py --ranks 64 --set policy=average,selective --straggler none,pareto:1.5 --seeds 8 --out runs/q
  spawnsim plot runs/q --y 'time_to:accuracy>0.8' --x stragglers --hue policy

The same command goes on with a sweep that was stopped or killed, and tries again what failed. See docs/sweeps.md.
"""
AROUND = {
    "platform": "virtual network: a name or a TOML file; default: the default platform",
    "stragglers": "virtual compute times, such as none,lognormal:0.3",
    "faults": "virtual fault plans: texts, or files",
    "compute": "seconds of a comm.compute() that states none, such as '5 ms'",
    "deadline_s": "seconds that one call may wait; default: 30",
    "ties": "order of virtual ranks at one time: fifo, reverse, random:SEED; default: fifo",
    "sums": "order in which virtual ranks add floats: mpi, gloo; default: mpi",
    "backend": f"{', '.join(BACKENDS)}; default: virtual. Real ranks: with --jobs 1",
}
"""Keyword argument of `spawnsim.run` → what its option is."""
TIME_LIMITS = ("deadline_s",)


def main(argv: Sequence[str]) -> int:
    """Run the subcommand."""
    own, rest = split_at_dashes(argv)
    options = parser().parse_args(own)
    require_jobs(options.jobs)
    limit_s = None if options.run_limit is None else seconds(options.run_limit)
    own_pool = options.executor == "processes"
    require_limit(limit_s, options.jobs, None if own_pool else options.executor)
    cells = cells_of(options, rest)
    out = named(options.out) if options.out else Path("runs") / Path(options.file).stem
    if options.dry_run:
        return _list(cells, out)
    with stoppable():
        chosen = nullcontext() if own_pool else executors.named(options.executor, options.jobs, out / "jobs")
        before = _finished(out)
        found = Sweep.plan(cells, out)
        if left := before - {cell.folder for cell in found.cells}:
            what = f"{counted(len(left), 'run')} of an earlier command, or of files that were edited since"
            say(f"{what}: kept in {out / 'runs'}, no longer part of the sweep")
        say(f"{found.says()}, in {out}; figures at any time: spawnsim plot {shlex.quote(str(out))}")
        try:
            with chosen as carrier:
                Sweep.run(cells, out, jobs=options.jobs, executor=carrier, limit_s=limit_s, say=say)
        finally:
            print_warnings(found.warnings())
    say(f"{found.says()}; {_advice(found)}")
    return 0


def _finished(out: Path) -> set[str]:
    """Return the folders of the finished runs of the sweep that is there; none where no sweep is."""
    try:
        sweep = Sweep.load(out)
    except ParameterError:
        return set()
    return {cell.folder for cell in sweep.of_state(DONE)}


def cells_of(options: argparse.Namespace, argv: Sequence[str] = ()) -> list[Cell]:
    """Return the cells that the options ask for, each checked as far as it can be without running it.

    Raises:
        ParameterError: a value means nothing.
    """
    # Absolute, as are the files of circumstances: an executor's processes may stand elsewhere.
    file = find(options.file, "main").absolute()
    whole = options.whole or is_unmodified(file)
    over = choices(options.set)
    if whole and over:
        raise ParameterError(
            f"--set: {options.file} is run whole and has no main(comm); its arguments follow --"
        )
    if argv and not whole:
        raise ParameterError(
            f"unrecognized arguments: {shlex.join(argv)}; main(comm) has parameters: --set NAME=VALUE"
        )
    if not whole:
        require_main(file)
        _require_parameters(file, over)
    around = {name: _around(name, given) for name in AROUND if (given := getattr(options, name))}
    more = {
        "eager": options.eager,
        "whole": options.whole,
        "argv": list(argv),
        "record_ranks": options.record_ranks,
    }
    more |= {} if options.record_every == 1 else {"record_every": options.record_every}
    cells = grid(
        file, ranks=_whole_numbers("--ranks", options.ranks), seeds=seeds_of(options.seed, options.seeds),
        over=over, around=around, **{name: value for name, value in more.items() if value},
    )  # fmt: skip
    for cell in {str([cell.ranks, cell.backend, *cell.world.items()]): cell for cell in cells}.values():
        _require_possible(cell, whole)
    return cells


def _around(name: str, given: Sequence[str]) -> list[Any]:
    option = OPTIONS[name]
    texts = [unquoted(each) for text in given for each in _parts(name, text)]
    if name == "backend" and (wrong := [each for each in texts if each not in BACKENDS]):
        raise ParameterError(f"{option} {wrong[0]}: choose {', '.join(BACKENDS)}")
    try:
        values = [limit(each) if name in TIME_LIMITS else each for each in texts]
    except ParameterError as error:
        raise ParameterError(f"{option}: {error}") from error
    return [_circumstance(name, each) for each in values]


def _parts(name: str, text: str) -> list[str]:
    """Return the values of a list.

    >>> _parts("stragglers", "none,slow:0.05,10,pareto:1.5")
    ['none', 'slow:0.05,10', 'pareto:1.5']
    """
    found: list[str] = []
    for part in listed(text):
        # The name of a straggler begins with a letter, so a number is a parameter of the one before.
        if name == "stragglers" and found and part[:1].isdigit() | part.startswith("."):
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _circumstance(name: str, value: Any) -> Any:
    # None, as where the option is not given, so that both are one run; a whole program's `--compute none` is a model.
    if name in ("platform", "stragglers", "faults") and value == "none":
        return None
    # Absolute: an executor's processes may stand elsewhere.
    named_file = isinstance(value, str) and os.path.exists(value)
    return str(Path(value).absolute()) if named_file else value


def _whole_numbers(option: str, given: Sequence[str]) -> list[int]:
    texts = [each for text in given for each in listed(text)]
    try:
        return [int(each) for each in texts]
    except ValueError:
        raise ParameterError(f"{option} {','.join(texts)}: give whole numbers, such as 8 or 8,64") from None


def seeds_of(first: Sequence[str], count: int | None) -> list[int]:
    """Return the seeds: those listed; or so many, from the one given on, or from 0."""
    listed_ = _whole_numbers("--seed", first) if first else [0]
    if count is None:
        return listed_
    if count < 1 or len(listed_) > 1:
        raise ParameterError(
            f"--seeds {count}: how many, at least 1, from the one --seed on; or list them with --seed"
        )
    return list(range(listed_[0], listed_[0] + count))


def _require_parameters(file: Path, over: dict[str, list[Any]]) -> None:
    """Raise `ParameterError` for what `main` does not take; read of its text, since loading it may take long."""
    for node in tree_of(file).body:
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            known = written_parameters(node)
            for name, values in over.items():
                if name in known:
                    for value in values:
                        require_kind(value, known[name])
                elif node.args.kwarg is None:
                    hint = nearest(name, known) or f"its parameters: {', '.join(known) or 'none'}"
                    raise ParameterError(f"--set {name}: main takes no parameter {name}; {hint}")


def _require_possible(cell: Cell, whole: bool) -> None:
    if BACKENDS[cell.backend].is_real:
        told = [OPTIONS[name] for name in VIRTUAL_ONLY if cell.world.get(name)]
        if told:
            raise ParameterError(f"{of_virtual_ranks(told)}; --backend {cell.backend} takes real time")
        return
    world = {
        name: cell.world[name]
        for name in ("platform", "stragglers", "faults", "compute")
        if name in cell.world
    }
    world |= {"compute": 0.0} if whole else {}  # there it is a cost of calls
    deadline_s = cell.world.get("deadline_s", DEADLINE_S)
    ties, sums = cell.world.get("ties", "fifo"), cell.world.get("sums", "mpi")
    try:
        require_possible(
            Scenario(cell.ranks, seed=cell.seed, deadline_s=deadline_s, ties=ties, sums=sums, **world)
        )
    except ParameterError as error:
        error.add_note("a value with commas is put in quotes: --straggler \"none,'slow:0.05,10'\"")
        raise


def _list(cells: Sequence[Cell], out: Path) -> int:
    """Print the cells, and which of them are done."""
    from spawnsim.study.store import Store, labels

    store, names = Store(out / "runs"), labels(cells)
    distinct = {cell.key: cell for cell in cells}
    rows = [
        (names[key], store.folder(cell).name, "done" if store.done(cell) else "to do")
        for key, cell in distinct.items()
    ]
    say(text_table(("run", "folder", "state"), rows, left=3))
    say(f"{counted(len(rows), 'run')}, {sum(row[2] == 'to do' for row in rows)} to do, in {store.root}")
    return 0


def _advice(found: Sweep) -> str:
    """Return a command that draws the sweep, of what it varies."""
    x = next((name for name in found.varied if name != "policy"), "")
    line = ["spawnsim", "plot", str(found.folder), *(["--x", x] if x else [])]
    return f"figures: {shlex.join(line)}"


def parser() -> Parser:
    """Return the options of `spawnsim sweep`.

    Returns:
        The parser.
    """
    parser = Parser(
        prog="spawnsim sweep", epilog=QUOTING, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run a file under all combinations of values, under several seeds; go on where it was stopped.",
    )  # fmt: skip
    add = parser.add_argument
    add(
        "file",
        help="Python file that defines main(comm), an unmodified program (its arguments after --), or a program of the "
        "studies by name, such as digits",
    )
    add("-n", "--ranks", action="append", required=True, metavar="LIST", help="how many ranks")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=LIST",
        help="values of a keyword argument of main; repeatable",
    )
    for name, text in AROUND.items():
        others = ["--stragglers"] if name == "stragglers" else []
        add(OPTIONS[name], *others, dest=name, action="append", default=[], metavar="LIST", help=text)
    add(
        "--seed",
        action="append",
        default=[],
        metavar="LIST",
        help="the seeds, or the first of --seeds; default: 0",
    )
    add("--seeds", type=int, metavar="N", help="how many seeds; default: one")
    add("--eager", action="store_true", help="carry out each TrainingStep at once")
    add("--whole", action="store_true", help="run the file whole on every rank")
    add(
        "--record-every",
        type=int,
        default=1,
        metavar="N",
        help="keep the rows of every Nth iteration alone; default: of all",
    )
    add("--record-ranks", metavar="R", help="keep the rows of these ranks alone, such as 0-9,100")
    add("--out", metavar="DIR", help="the sweep's folder; default: runs/NAME of the file")
    add("--dry-run", action="store_true", help="list the runs, and which are done")
    add_jobs(parser)
    add(
        "--run-limit", metavar="S",
        help="how long one run may take here, such as '10 min'; one that takes longer is ended, and has failed",
    )  # fmt: skip
    add(
        "--executor", default="processes", metavar="E",
        help="what carries the runs: processes (of this machine; default), dask[:ADDRESS], ray[:ADDRESS], mpi, "
        "submitit[:cluster=local,timeout_min=60,slurm_partition=…]",
    )  # fmt: skip
    return parser
