"""`spawnsim calibrate` and `spawnsim validate`, under mpiexec: fit a platform to this cluster; predict a real run.

Rank 0 alone fits, predicts and prints.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from spawnsim.cli.listing import program_file
from spawnsim.errors import ParameterError, SpawnsimError, Timeout
from spawnsim.fidelity import Effort, fit, measure
from spawnsim.fidelity.measuring import Measured, doubts, facts
from spawnsim.fidelity.predicting import (
    Repeat,
    Row,
    Setting,
    Validated,
    case_table,
    differences,
    error_table,
    fitted,
    predict,
    read_cases,
    summary,
    times,
)
from spawnsim.fidelity.scoring import Pair, Score, compare, require_fit, score_table, scores
from spawnsim.fidelity.watching import Seen, watched
from spawnsim.models.platform import Cores, Platform, load_platform, to_toml
from spawnsim.options import Parser, parameters, picture, time_limit
from spawnsim.run.program import Program, program
from spawnsim.scenario import DEADLINE_S, Scenario

QUICK = Effort(budget_s=0.002, most=10, passes=3, largest_nbytes=4 << 20)


def calibrate(argv: Sequence[str]) -> int:
    """Measure, fit, write and print."""
    options = calibrate_parser().parse_args(argv)
    measured = measure_here(QUICK if options.quick else Effort(), options.deadline)
    if measured is None:
        return 0
    platform = fit(measured, options.out.stem)
    pairs = compare(measured, platform)
    if measured.sharing > measured.ranks_per_node:
        sys.stderr.write(
            f"spawnsim: note: of the {measured.sharing} ranks on a node {measured.ranks_per_node} were measured, as "
            "many as it has cores; the file says how many share them\n"
        )
    if options.picture:  # it shows, too, why measurements are refused
        draw_fit(pairs, platform, options.picture)
    found = scores(pairs)
    # Before the file is written: a wrong platform is used by other people later, who do not see this warning.
    require_fit(platform, found)
    write(options.out, platform, found)
    return 0


def measure_here(effort: Effort, deadline_s: float) -> Measured | None:
    """Measure the communicator of this job. Collective; None on all ranks but 0."""
    from spawnsim.real.launch.launchers import detect_launcher

    if detect_launcher().size < 2:
        raise ParameterError("a calibration needs at least 2 ranks: mpiexec -n 2 spawnsim calibrate")
    from spawnsim.real.mpi import guarded, world

    # Before the job's own ranks make the load.
    load = os.getloadavg()[0]
    comm: Any = world(deadline_s=deadline_s)
    with guarded(comm):
        try:
            measured = measure(comm, effort)
        except Timeout as error:
            error.add_note(
                "a calibration on a busy machine: take fewer ranks than cores, wait until it is quiet, or give "
                f"--deadline {10 * deadline_s:g}"
            )
            raise
    if comm.Get_rank() != 0:
        return None
    warn(measured.ranks_per_node, load)
    return measured


def warn(ranks_per_node: int, load: float) -> None:
    """Say on standard error why the measurements are doubtful, if they are."""
    for doubt in doubts(ranks_per_node, os.cpu_count() or 1, load):
        sys.stderr.write(f"spawnsim: warning: {doubt}\n")


def write(out: Path, platform: Platform, found: Sequence[Score]) -> None:
    """Write the platform file, with its errors in comments, and print both."""
    errors = score_table(found).splitlines()
    comments = [
        f"Measured by `spawnsim calibrate` on {date.today().isoformat()}. Predicted against measured times, absolute",
        "relative errors: the median over the sizes that were fitted, over those held out, of these over 10 to 200 kB;",
        "and the largest of all.",
        *errors,
        "",
    ]
    out.write_text(to_toml(platform, comments), encoding="utf-8")
    sys.stdout.write("\n".join([*errors, f"written: {out}", ""]))


def draw_fit(pairs: Sequence[Pair], platform: Platform, picture: Path) -> None:
    """Draw measured against fitted times."""
    from spawnsim.plots import fidelity, style

    names = dict.fromkeys(pair.measured.operation for pair in pairs if pair.measured.nbytes)
    info = {
        name: fidelity.curve(
            (pair.measured.nbytes, pair.measured.seconds, pair.predicted_s, pair.held_out)
            for pair in pairs
            if pair.measured.operation == name and pair.where == ""
        )
        for name in names
    }
    drawn = fidelity.calibration_figure(
        {name: curve for name, curve in info.items() if len(curve.nbytes) > 2}, platform.description
    )
    style.save_as(drawn, picture)
    sys.stdout.write(f"drawn: {picture}\n")


def calibrate_parser() -> Parser:
    """Return the options of `spawnsim calibrate`."""
    parser = Parser(
        prog="mpiexec -n N spawnsim calibrate",
        description="Measure messages, collectives and compute steps on this job's ranks, and fit a platform.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("measured.toml"), metavar="FILE", help="default: measured.toml"
    )
    parser.add_argument(
        "--picture", type=picture, metavar="FILE", help="draw measured against fitted: .png, .pdf or .svg"
    )
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of half a minute; larger errors"
    )
    parser.add_argument(
        "--deadline",
        type=time_limit,
        default=DEADLINE_S,
        metavar="S",
        help="seconds that one call may wait; default: 30",
    )
    return parser


BEFORE_A_RUN = Effort(budget_s=0.004, most=15, passes=4, largest_nbytes=4 << 20)


def validate(argv: Sequence[str]) -> int:
    """Run, predict, compare and print."""
    from spawnsim.real.launch.launchers import detect_launcher

    options = validate_parser().parse_args(argv)
    here = detect_launcher()
    try:
        options.file = program_file(options.file)
        tasks, platform = _asked(options, here.size)
        earlier = [case for path in options.add for case in read_cases(path)]
    except SpawnsimError:  # all ranks find the same fault before they meet: one of them says so
        if here.rank == 0:
            raise
        return 2
    cases: list[Validated] = []
    first = platform is None  # measured before the first run, and kept by rank 0 alone
    for name, task in tasks.items():
        found = observe(task, platform, repeats=options.repeats, seed=options.seed, calibrated=not first)
        first = False
        if found is None:
            continue
        platform = found.platform
        if not (options.vary or options.add):
            judge(options, task, found)
        else:
            cases.append(validated(options, task, found, name))
    if cases:
        judge_all(options, [*earlier, *cases])
    return 0


def _asked(options: argparse.Namespace, ranks: int) -> tuple[dict[str, Program], Platform | None]:
    """Return the programs by what is varied, and the platform, if one is named."""
    if options.repeats < 1 or options.warmup < 0:
        raise ParameterError(f"--repeats {options.repeats} --warmup {options.warmup}: give at least 1 and 0")
    if ranks < 2:
        raise ParameterError(
            f"a validation needs at least 2 ranks: mpiexec -n 2 spawnsim validate {options.file}"
        )
    tasks = {}
    varied = [[(word.partition("=")[0], value) for value in _values(word)] for word in options.vary]
    for combination in product(*varied):
        words = [f"{name}={value}" for name, value in combination]
        tasks[" ".join(words)] = program(options.file, parameters([*options.set, *words]))
    return tasks, load_platform(options.platform) if options.platform else None


def _values(word: str) -> list[str]:
    name, _, values = word.partition("=")
    found = [value for value in values.split(",") if value]
    if not name or not found:
        raise ParameterError(f"--vary {word!r}: write NAME=VALUE,VALUE")
    return found


class Observed(NamedTuple):
    """Runs of one program, rank by rank; the platform to predict them on; what their ranks shared (None: nothing)."""

    platform: Platform
    runs: list[list[Seen]]
    cores: Cores | None


def observe(
    task: Program, platform: Platform | None, *, repeats: int, seed: int, calibrated: bool
) -> Observed | None:
    """Calibrate if need be, and run the program so many times. Collective; None on all ranks but 0."""
    from spawnsim.real.mpi import guarded, world

    runs: list[list[Seen]] = []
    load = os.getloadavg()[0]
    comm: Any = world(seed=seed)
    with guarded(comm):
        measured = None if calibrated else measure(comm, BEFORE_A_RUN)
        here, hosts = facts(comm), comm.allgather(socket.gethostname())
    shared = shared_cores(hosts)
    for _ in range(repeats):
        # A new world for each run, so that its streams begin anew and all repeats draw the same.
        comm = world(seed=seed)
        with guarded(comm):
            seen = watched(task, comm, processor=time.thread_time)
            gathered = comm.gather(seen)
        runs.append(gathered)
    if comm.Get_rank() != 0:
        return None
    warn(max(map(hosts.count, hosts)), load)
    if measured is not None:
        return Observed(fit(measured), runs, shared)
    assert platform is not None
    for difference in differences(platform, here):
        sys.stderr.write(f"spawnsim: warning: {platform.name} was measured elsewhere: {difference}\n")
    return Observed(platform, runs, shared)


def shared_cores(hosts: Sequence[str]) -> Cores | None:
    """Return what the ranks on these hosts share; None: each has a core."""
    count, ranks = os.cpu_count() or 1, max(map(hosts.count, hosts))
    return Cores(count, ranks) if ranks > count else None


def predicted(setting: Setting, found: Observed, seeds: int) -> list[Repeat]:
    """Predict each run; drawn compute times with so many seeds."""
    return [
        Repeat(times(seen, setting.warmup), predict(setting, seen, found.platform, seeds=seeds))
        for seen in found.runs
    ]


def setting_of(options: argparse.Namespace, task: Program, found: Observed) -> Setting:
    """Return what is predicted."""
    return Setting(task, Scenario(len(found.runs[0]), seed=options.seed), options.warmup, found.cores)


def judge(options: argparse.Namespace, task: Program, found: Observed) -> None:
    """Predict each run, and print and draw how far off that is."""
    setting, runs = setting_of(options, task, found), found.runs
    repeats = predicted(setting, found, seeds=5)
    rows = summary(repeats)
    stragglers = fitted(runs[0], setting)
    if options.json:
        document = {"rows": [dataclasses.asdict(row) for row in rows], "stragglers": str(stragglers)}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        facts_line = (
            f"{len(runs[0])} ranks, {len(runs)} runs, platform {found.platform.name}, stragglers {stragglers}"
        )
        sys.stdout.write(f"{facts_line}\n{error_table(rows, len(runs))}\n")
    if options.picture:
        draw_prediction(rows, repeats, options.picture)


def validated(options: argparse.Namespace, task: Program, found: Observed, name: str) -> Validated:
    """Predict the runs of one program, and say how far off that is."""
    ranks, setting = f"{len(found.runs[0])} ranks", setting_of(options, task, found)
    # Of several programs one seed each: they are many, and replayed times need none.
    return Validated(f"{ranks}, {name}" if name else ranks, summary(predicted(setting, found, seeds=1)))


def judge_all(options: argparse.Namespace, cases: Sequence[Validated]) -> None:
    """Print and draw several programs in one table and figure."""
    if options.json:
        sys.stdout.write(json.dumps({"cases": [dataclasses.asdict(case) for case in cases]}) + "\n")
    else:
        sys.stdout.write(f"{case_table(cases)}\n")
    if options.picture:
        from spawnsim.plots import fidelity, style

        errors = {
            case.name: {
                model: list(error)
                for row in case.rows
                if row.measure == "total"
                for model, error in row.errors.items()
            }
            for case in cases
        }
        caption = f"whole runs of {len(cases)} programs; marks: least, median and largest error"
        style.save_as(fidelity.validation_figure(errors, caption), options.picture)


def draw_prediction(rows: Sequence[Row], repeats: Sequence[Repeat], picture: Path) -> None:
    """Draw predicted over measured."""
    from spawnsim.plots import fidelity, style

    errors = {
        row.measure: {model: [repeat.error(model, row.measure) for repeat in repeats] for model in row.errors}
        for row in rows
    }
    drawn = fidelity.validation_figure(errors, f"{len(repeats)} runs; marks are runs, bars their median")
    style.save_as(drawn, picture)


def validate_parser() -> Parser:
    """Return the options of `spawnsim validate`."""
    parser = Parser(
        prog="mpiexec -n N spawnsim validate",
        description="Run a file for real, predict the same run on virtual ranks, and compare.",
    )
    add = parser.add_argument
    add("file", type=Path, help="Python file that defines main(comm)")
    add("--platform", metavar="P", help="a measured platform file; default: a quick calibration first")
    add(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="real runs; the median error is shown, and its range; default: 1",
    )
    add(
        "--warmup",
        type=int,
        default=5,
        metavar="N",
        help="compute blocks at the start that are left aside; default: 5",
    )
    add("--seed", type=int, default=0, metavar="K", help="of every random stream; default: 0")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a keyword argument of main; repeatable",
    )
    add(
        "--vary", action="append", default=[], metavar="NAME=V,V",
        help="run once with each value, and with each combination of several; one table and figure for all",
    )  # fmt: skip
    add(
        "--add", action="append", type=Path, default=[], metavar="FILE",
        help="what --json printed of another job, of other ranks say: shown in the same table",
    )  # fmt: skip
    add("--picture", type=picture, metavar="FILE", help="draw predicted against measured: .png, .pdf or .svg")
    add("--json", action="store_true", help="print one JSON object")
    return parser
