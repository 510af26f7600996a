"""`spawnsim sweep FILE`: one program under all combinations of values, without a study file; `spawnsim study NAME`: a
file that builds its own grid of runs, and draws it.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from spawnsim.backends import BACKENDS
from spawnsim.cli import print_warnings
from spawnsim.cli.declaring import JOBS, Command, Jobs, Whole, argument, flag, option
from spawnsim.cli.listing import find, names
from spawnsim.errors import ParameterError
from spawnsim.options import OPTIONS, VIRTUAL_ONLY, choices, listed, nearest, of_virtual_ranks, unquoted
from spawnsim.record.folder import named, require_free
from spawnsim.run.process_setup import stoppable
from spawnsim.run.program import ProgramFile, require_kind
from spawnsim.run.virtual import require_possible
from spawnsim.scenario import DEADLINE_S, Scenario
from spawnsim.study import executors
from spawnsim.study.context import Context
from spawnsim.study.executors import load_ahead
from spawnsim.study.results import DONE, Sweep
from spawnsim.study.store import Cell, grid
from spawnsim.study.sweeping import experiment_of, require_limit
from spawnsim.units import counted, limit, seconds, text_table

AROUND = ("platform", "stragglers", "faults", "compute", "deadline_s", "ties", "sums", "backend")
"""Keyword arguments of `spawnsim.run` whose options take lists."""
TIME_LIMITS = ("deadline_s",)
NOT_OF_COLUMNS = {
    "eager", "whole", "deadline", "ties", "sums", "backend", "executor", "limit", "record_every", "record_ranks",
}  # fmt: skip
Several = Sequence[str]


@dataclass(kw_only=True)
class SweepCommand(Command):
    """Run a file under all combinations of values, under several seeds; continue where it stopped. Options with LIST
    take several values, separated by commas, such as --set ratio=0.1,0.2, and may be repeated. Put a value with
    commas in quotes, inside the shell's quotes: --set "name='a,b',c"; a tuple needs no quotes, and neither does a
    straggler, --straggler none,slow:0.05,10. The same command continues a sweep that was stopped or killed, and
    repeats failed runs. See docs/sweeps.md.
    """

    takes_arguments = True
    examples = (
        "spawnsim sweep train.py -n 64 --set ratio=0.1,0.2,0.4 --straggler none,pareto:1.5 --seeds 8 --out runs/q",
        "spawnsim sweep train.py --ranks 8,64 --set 'hidden=(32,),(64,64)' --out runs/r",
    )
    file: str = argument(
        "file with main(comm), unmodified program, or name (`spawnsim list studies`)", "FILE"
    )
    ranks: Several = option("how many ranks", "LIST", "-n", required=True)
    set: Several = option("values of a keyword argument of main; repeatable", "NAME=LIST", default=())
    platform: Several = option("virtual networks: names or TOML files", "LIST", default=())
    straggler: Several = option("virtual compute times, such as none,lognormal:0.3", "LIST", default=())
    faults: Several = option("virtual fault plans: texts, or files", "LIST", default=())
    compute: Several = option(
        "seconds of a comm.compute() without an argument, such as '5 ms'", "LIST", default=()
    )
    deadline: Several = option("seconds that one call may wait; default: 30", "LIST", default=())
    ties: Several = option(
        "order of virtual ranks at the same time: fifo (default), reverse, random:SEED", "LIST", default=()
    )
    sums: Several = option("order in which virtual ranks add floats: mpi (default), gloo", "LIST", default=())
    backend: Several = option(
        f"{', '.join(BACKENDS)}; default: virtual. Real ranks: with --jobs 1", "LIST", default=()
    )
    seed: Several = option("the seeds, or the first of --seeds; default: 0", "LIST", default=())
    seeds: int | None = option("how many seeds; default: one", "N")
    columns: bool = flag(
        "run all runs at once, as rows of arrays; the file defines training() (docs/columnar.md)"
    )
    eager: bool = flag("execute each TrainingStep of virtual ranks by itself")
    whole: Whole = False
    record_every: int = option("keep only the rows of every Nth iteration; default: all rows", "N", default=1)
    record_ranks: str | None = option("keep only the rows of these ranks, such as 0-9,100", "R")
    out: str | None = option("the sweep's folder; default: runs/NAME of the file", "DIR")
    dry_run: bool = flag("list the runs, and which are done")
    jobs: Jobs = JOBS
    limit: str | None = option("how long one run may take here, such as '10 min'; a longer run fails", "S")
    executor: Literal["processes", "mpi"] = option(
        "where runs execute: in processes of this machine (default), or on the ranks of mpi4py.futures",
        default="processes",
    )

    def __call__(self) -> int:
        limit_s = None if self.limit is None else seconds(self.limit)
        own_pool = self.executor == "processes"
        require_limit(limit_s, self.jobs, None if own_pool else self.executor)
        cells = cells_of(self)
        out = named(self.out) if self.out else Path("runs") / Path(self.file).stem
        if self.dry_run:
            return _list(cells, out)
        with stoppable():
            chosen = nullcontext() if own_pool else executors.mpi_ranks(self.jobs)
            before = _finished(out)
            found = Sweep.plan(cells, out)
            if left := before - {cell.folder for cell in found.cells}:
                what = (
                    f"{counted(len(left), 'run')} of an earlier command, or of files that were edited since"
                )
                say(f"{what}: kept in {out / 'runs'}, no longer part of the sweep")
            say(f"{found.says()}, in {out}; figures at any time: spawnsim plot {shlex.quote(str(out))}")
            try:
                with chosen as carrier:
                    Sweep.run(cells, out, jobs=self.jobs, executor=carrier, limit_s=limit_s, say=say)
            finally:
                print_warnings(found.warnings())
        x = next((name for name in found.varied if name != "policy"), "")
        line = shlex.join(["spawnsim", "plot", str(found.folder), *(["--x", x] if x else [])])
        say(f"{found.says()}; figures: {line}")
        return 0


def _finished(out: Path) -> set[str]:
    """Return the folders of the finished runs of the sweep in `out`; empty without a sweep."""
    try:
        sweep = Sweep.load(out)
    except ParameterError:
        return set()
    return {cell.folder for cell in sweep.of_state(DONE)}


def cells_of(asked: SweepCommand) -> list[Cell]:
    """Return the requested cells, each checked as far as possible without running it."""
    # Absolute, as are the files of circumstances: an executor's processes may run in another folder.
    program = ProgramFile.read(find(asked.file, "main").absolute(), whole=asked.whole)
    over, argv = choices(asked.set), list(asked.arguments)
    if program.is_whole and over:
        raise ParameterError(
            f"--set: {asked.file} has no main(comm) and runs as a whole; give its arguments after --"
        )
    if argv and not program.is_whole:
        raise ParameterError(
            f"unrecognized arguments: {shlex.join(argv)}; main(comm) has parameters: --set NAME=VALUE"
        )
    if asked.columns:
        given = [each.name for each in fields(asked) if getattr(asked, each.name) != each.default]
        if unfit := [name for name in given if name in NOT_OF_COLUMNS]:
            raise ParameterError(f"--columns has no --{unfit[0].replace('_', '-')}: leave out one of them")
    elif not program.is_whole:
        program.require_main()
        _require_parameters(program, over)
    around = {name: _around(name, given) for name in AROUND if (given := getattr(asked, OPTIONS[name][2:]))}
    more = {
        "eager": asked.eager, "whole": asked.whole, "argv": argv, "record_ranks": asked.record_ranks,
        "columns": asked.columns,
    }  # fmt: skip
    more |= {} if asked.record_every == 1 else {"record_every": asked.record_every}
    cells = grid(
        program.path, ranks=_whole_numbers("--ranks", asked.ranks), seeds=_seeds_of(asked.seed, asked.seeds),
        over=over, around=around, **{name: value for name, value in more.items() if value},
    )  # fmt: skip
    if asked.columns:
        for cell in {str([*cell.parameters.items()]): cell for cell in cells}.values():
            experiment_of(cell)
    for cell in {str([cell.ranks, cell.backend, *cell.world.items()]): cell for cell in cells}.values():
        _require_possible(cell, program.is_whole)
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
        # The name of a straggler begins with a letter, so a number is a parameter of the preceding straggler.
        if name == "stragglers" and found and part[:1].isdigit() | part.startswith("."):
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _circumstance(name: str, value: Any) -> Any:
    # None, as without the option, so that both are one run; a whole program's `--compute none` is a model.
    if name in ("platform", "stragglers", "faults") and value == "none":
        return None
    # Absolute: an executor's processes may run in another folder.
    named_file = isinstance(value, str) and os.path.exists(value)
    return str(Path(value).absolute()) if named_file else value


def _whole_numbers(option: str, given: Sequence[str]) -> list[int]:
    texts = [each for text in given for each in listed(text)]
    try:
        return [int(each) for each in texts]
    except ValueError:
        raise ParameterError(f"{option} {','.join(texts)}: give whole numbers, such as 8 or 8,64") from None


def _seeds_of(first: Sequence[str], count: int | None) -> list[int]:
    """Return the seeds: the listed ones; or `count` seeds from the given one, or from 0."""
    listed_ = _whole_numbers("--seed", first) if first else [0]
    if count is None:
        return listed_
    if count < 1 or len(listed_) > 1:
        raise ParameterError(
            f"--seeds {count}: give a number of at least 1, counted from one --seed; or list the seeds with --seed"
        )
    return list(range(listed_[0], listed_[0] + count))


def _require_parameters(program: ProgramFile, over: dict[str, list[Any]]) -> None:
    """Raise `ParameterError` for values that `main` does not take; reads only its text: loading may take long."""
    known, takes_any = program.parameters
    for name, values in over.items():
        if name in known:
            for value in values:
                require_kind(value, known[name])
        elif not takes_any:
            hint = nearest(name, known) or f"its parameters: {', '.join(known) or 'none'}"
            raise ParameterError(f"--set {name}: main takes no parameter {name}; {hint}")


def _require_possible(cell: Cell, whole: bool) -> None:
    if BACKENDS[cell.backend].is_real:
        unfit = [OPTIONS[name] for name in VIRTUAL_ONLY if cell.world.get(name)]
        if unfit:
            raise ParameterError(f"{of_virtual_ranks(unfit)}; --backend {cell.backend} takes real time")
        return
    world = {
        name: cell.world[name]
        for name in ("platform", "stragglers", "faults", "compute")
        if name in cell.world
    }
    world |= {"compute": 0.0} if whole else {}  # for whole programs it is a cost of calls
    deadline_s = cell.world.get("deadline_s", DEADLINE_S)
    ties, sums = cell.world.get("ties", "fifo"), cell.world.get("sums", "mpi")
    try:
        require_possible(
            Scenario(cell.ranks, seed=cell.seed, deadline_s=deadline_s, ties=ties, sums=sums, **world)
        )
    except ParameterError as error:
        error.add_note("put a value with commas in quotes: --straggler \"none,'slow:0.05,10'\"")
        raise


def _list(cells: Sequence[Cell], out: Path) -> int:
    """Print the cells, and their states."""
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


@dataclass(kw_only=True)
class Study(Command):
    """Run a study: a grid of runs, then figures."""

    examples = (
        "spawnsim study demo --quick",
        "spawnsim study my_study.py --seeds 8 --jobs 2 --out runs/mine",
    )
    missing = "`spawnsim list studies` lists them."
    study: str = argument("a file of studies/, by name, or a path to one", "NAME|PATH", names=names)
    quick: bool = flag("a small version, to see that it works")
    seeds: int | None = option("how many seeds (default: the study's own)", "N")
    jobs: Jobs = JOBS
    out: str | None = option("figures and runs go here (default: runs/NAME)", "DIR")

    def __call__(self) -> int:
        if self.seeds is not None and self.seeds < 1:
            raise ParameterError(f"--seeds {self.seeds}: give how many seeds to run, at least 1")
        path = find(self.study)
        out = Path("runs") / path.stem if self.out is None else named(self.out)
        if out.exists() and not out.is_dir():
            raise ParameterError(f"--out {out} is a file: name a folder")
        # A study's files would mix with a run's files, and its clean-up could remove them.
        require_free(out)
        if self.jobs:
            load_ahead()  # in parallel with this process's own libraries: with both cores it is ready 3 s earlier
        with stoppable():
            context = Context(
                path.stem, path.parent, out, quick=self.quick, repeats=self.seeds, jobs=self.jobs, say=say
            )
            try:
                load(path)(context)
            finally:
                print_warnings(context.warnings())
        return 0


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
