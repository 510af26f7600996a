"""`spawnsim calibrate`, `validate`, `import` and `explain`: a platform from measurements of this cluster, or from files
that clusters write; how well it predicts a real run; and why a real job hangs.

The first two run under mpiexec, where rank 0 alone fits, predicts and prints.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spawnsim import units
from spawnsim.cli.declaring import (
    Command,
    Deadline,
    Json,
    Picture,
    PlatformName,
    ProgramPath,
    Seed,
    argument,
    flag,
    option,
)
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
from spawnsim.options import listed, parameters, settings_of
from spawnsim.run.program import Program, program
from spawnsim.scenario import DEADLINE_S, Scenario

if TYPE_CHECKING:
    from spawnsim.models.compute import Trace

TABLE_SETTINGS: dict[str, Callable[[str], Any]] = {
    "machine": str, "cache": lambda text: int(units.nbytes(text)), "nodes": int, "ranks": int,
}  # fmt: skip
QUICK = Effort(budget_s=0.002, most=10, passes=3, largest_nbytes=4 << 20)
BEFORE_A_RUN = Effort(budget_s=0.004, most=15, passes=4, largest_nbytes=4 << 20)


@dataclass(kw_only=True)
class Calibrate(Command):
    """Measure messages, collectives and compute steps on this job's ranks, or read a table, and fit a platform."""

    launcher = "mpiexec -n N "
    examples = (
        "mpiexec -n 4 spawnsim calibrate --out mine.toml --picture mine.png",
        "spawnsim calibrate --from allreduce.csv --set machine=lumi --set cache=32MiB --out lumi.toml",
    )
    out: Path = option("the platform file", "FILE", default=Path("measured.toml"))
    picture: Picture = None
    quick: bool = flag("take seconds instead of half a minute, with larger errors")
    deadline: Deadline = None
    from_: Path | None = option(
        "fit times of collectives that somebody measured, instead of measuring: a CSV file with nodes, bytes, seconds, "
        "or the output of nccl-tests or the OSU benchmarks",
        "TABLE",
    )
    set: Sequence[str] = option(
        f"a setting of --from: {', '.join(TABLE_SETTINGS)}; repeatable", "NAME=VALUE", default=()
    )

    def __call__(self) -> int:
        if self.from_ is not None:
            return self._fit_table(self.from_)
        if self.set:
            raise ParameterError("--set has the settings of a table: give --from TABLE")
        deadline_s = DEADLINE_S if self.deadline is None else self.deadline
        measured = measure_here(QUICK if self.quick else Effort(), deadline_s)
        if measured is None:
            return 0
        platform = fit(measured, self.out.stem)
        pairs = compare(measured, platform)
        if measured.sharing > measured.ranks_per_node:
            sys.stderr.write(
                f"spawnsim: note: measured {measured.ranks_per_node} of the {measured.sharing} ranks on a node, "
                "as many as it has cores; the file states how many share them\n"
            )
        if self.picture:  # it also shows why measurements are refused
            draw_fit(pairs, platform, self.picture)
        found = scores(pairs)
        # Before the file is written: other people will use a wrong platform later, and do not see this warning.
        require_fit(platform, found)
        write(self.out, platform, found)
        return 0

    def _fit_table(self, path: Path) -> int:
        from spawnsim.fidelity import tablefit
        from spawnsim.fidelity.tables import read_table

        given = settings_of(self.set, TABLE_SETTINGS, "calibrate --from")
        machine, cache = given.pop("machine", None), given.pop("cache", None)
        samples = read_table(path, machine=machine, **given)
        found = tablefit.fit_table(samples, self.out.stem, cache_bytes=cache)
        report = tablefit.report(samples, found)
        comments = [f"Fitted by `spawnsim calibrate --from {path.name}`.", *report.splitlines(), ""]
        self.out.write_text(to_toml(found.platform, comments), encoding="utf-8")
        sys.stdout.write(f"{report}\nwritten: {self.out}\n")
        return 0


def measure_here(effort: Effort, deadline_s: float) -> Measured | None:
    """Measure the communicator of this job. Collective; None on all ranks but 0."""
    from spawnsim.real.launch.launchers import detect_launcher

    if detect_launcher().size < 2:
        raise ParameterError("a calibration needs at least 2 ranks: mpiexec -n 2 spawnsim calibrate")
    from spawnsim.real.mpi import guarded, world

    # Before the job's own ranks cause load.
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
    """Report on standard error why the measurements are doubtful, if they are."""
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


@dataclass(kw_only=True)
class Validate(Command):
    """Run a file for real, predict the same run on virtual ranks, and compare."""

    launcher = "mpiexec -n N "
    examples = ("mpiexec -n 4 spawnsim validate train.py --platform mine.toml --runs 3",)
    file: ProgramPath
    platform: PlatformName = None
    runs: int = option("real runs; the median error is shown, and its range", "N", default=1)
    warmup: int = option("compute blocks at the start that are not counted", "N", default=5)
    seed: Seed = 0
    set: Sequence[str] = option(
        "a keyword argument of main; of several values, and of several such options, each combination is run, and "
        "one table and figure shows them all; repeatable",
        "NAME=LIST",
        default=(),
    )
    add: Sequence[Path] = option(
        "--json output of another job, such as one with other ranks: shown in the same table",
        "FILE",
        default=(),
    )
    picture: Picture = None
    json: Json = False

    def __call__(self) -> int:
        from spawnsim.real.launch.launchers import detect_launcher

        here = detect_launcher()
        try:
            self.file = program_file(self.file)
            tasks, platform = self.tasks(here.size)
            earlier = [case for path in self.add for case in read_cases(path)]
        except SpawnsimError:  # all ranks find the same fault before they meet: one of them reports it
            if here.rank == 0:
                raise
            return 2
        cases: list[Validated] = []
        first = platform is None  # measured before the first run, and kept only by rank 0
        for name, task in tasks.items():
            found = observe(task, platform, repeats=self.runs, seed=self.seed, calibrated=not first)
            first = False
            if found is None:
                continue
            platform = found.platform
            setting = Setting(task, Scenario(len(found.runs[0]), seed=self.seed), self.warmup, found.cores)
            if len(tasks) == 1 and not self.add:
                self._judge(setting, found)
            else:
                ranks = f"{len(found.runs[0])} ranks"
                # One seed for each of several programs: they are many, and replayed times need no seeds.
                rows = summary(predicted(setting, found, seeds=1))
                cases.append(Validated(f"{ranks}, {name}" if name else ranks, rows))
        if cases:
            judge_all([*earlier, *cases], as_json=self.json, picture=self.picture)
        return 0

    def tasks(self, ranks: int) -> tuple[dict[str, Program], Platform | None]:
        """Return the programs by the varied setting, and the platform, if one is named."""
        if self.runs < 1 or self.warmup < 0:
            raise ParameterError(f"--runs {self.runs} --warmup {self.warmup}: give at least 1 and 0")
        if ranks < 2:
            raise ParameterError(
                f"a validation needs at least 2 ranks: mpiexec -n 2 spawnsim validate {self.file}"
            )
        parameters(self.set)  # raises if one is not a setting
        values = [listed(each.partition("=")[2]) for each in self.set]
        names = [each.partition("=")[0] for each in self.set]
        tasks = {}
        for combination in product(*values):
            words = [f"{name}={value}" for name, value in zip(names, combination, strict=True)]
            varied = [word for word, each in zip(words, values, strict=True) if len(each) > 1]
            tasks[" ".join(varied)] = program(self.file, parameters(words))
        return tasks, load_platform(self.platform) if self.platform else None

    def _judge(self, setting: Setting, found: Observed) -> None:
        """Predict each run, and print and draw the errors."""
        runs, repeats = found.runs, predicted(setting, found, seeds=5)
        rows, stragglers = summary(repeats), fitted(found.runs[0], setting)
        if self.json:
            document = {"rows": [dataclasses.asdict(row) for row in rows], "stragglers": str(stragglers)}
            sys.stdout.write(json.dumps(document) + "\n")
        else:
            where = f"platform {found.platform.name}, stragglers {stragglers}"
            sys.stdout.write(
                f"{len(runs[0])} ranks, {len(runs)} runs, {where}\n{error_table(rows, len(runs))}\n"
            )
        if self.picture:
            draw_prediction(rows, repeats, self.picture)


class Observed(NamedTuple):
    """Runs of one program, rank by rank; the platform for predictions; the ranks' shared cores (None: no sharing)."""

    platform: Platform
    runs: list[list[Seen]]
    cores: Cores | None


def observe(
    task: Program, platform: Platform | None, *, repeats: int, seed: int, calibrated: bool
) -> Observed | None:
    """Calibrate if necessary, and run the program repeatedly. Collective; None on all ranks but 0."""
    from spawnsim.real.mpi import guarded, world

    runs: list[list[Seen]] = []
    load = os.getloadavg()[0]
    comm: Any = world(seed=seed)
    with guarded(comm):
        measured = None if calibrated else measure(comm, BEFORE_A_RUN)
        here, hosts = facts(comm), comm.allgather(socket.gethostname())
    shared = shared_cores(hosts)
    for _ in range(repeats):
        # A new world for each run: its streams begin anew, and all repeats draw the same numbers.
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
    """Return the cores that the ranks on these hosts share; None: each has a core."""
    count, ranks = os.cpu_count() or 1, max(map(hosts.count, hosts))
    return Cores(count, ranks) if ranks > count else None


def predicted(setting: Setting, found: Observed, seeds: int) -> list[Repeat]:
    """Predict each run; drawn compute times with `seeds` seeds."""
    return [
        Repeat(times(seen, setting.warmup), predict(setting, seen, found.platform, seeds=seeds))
        for seen in found.runs
    ]


def judge_all(cases: Sequence[Validated], *, as_json: bool, picture: Path | None) -> None:
    """Print and draw several programs in one table and figure."""
    if as_json:
        sys.stdout.write(json.dumps({"cases": [dataclasses.asdict(case) for case in cases]}) + "\n")
    else:
        sys.stdout.write(f"{case_table(cases)}\n")
    if picture:
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
        style.save_as(fidelity.validation_figure(errors, caption), picture)


def draw_prediction(rows: Sequence[Row], repeats: Sequence[Repeat], picture: Path) -> None:
    """Draw predicted over measured."""
    from spawnsim.plots import fidelity, style

    errors = {
        row.measure: {model: [repeat.error(model, row.measure) for repeat in repeats] for model in row.errors}
        for row in rows
    }
    drawn = fidelity.validation_figure(errors, f"{len(repeats)} runs; marks are runs, bars their median")
    style.save_as(drawn, picture)


# ------------------------------------------------------------------------------------------------------- import
KINDS = {
    "nccl": "report of all_reduce_perf -J: a platform file",
    "wan": "CSV of milliseconds/Gbit/s between regions: a platform file; members=8,4: ranks in each region",
    "kineto": "PyTorch profiler traces, one a rank: a folder for --compute",
}


@dataclass(kw_only=True)
class Import(Command):
    """Read files from a cluster. See docs/clusters.md."""

    examples = ("spawnsim import nccl report.json --out mine.toml",)
    kind: str = argument("; ".join(f"{kind}: {what}" for kind, what in KINDS.items()), choices=KINDS)
    files: Sequence[Path] = argument("kineto: one for each rank; else one", "FILE")
    out: Path = option("a .toml file; kineto: a folder", "PATH", required=True)
    set: Sequence[str] = option("a setting of the kind, such as members=8,4", "NAME=VALUE", default=())

    def __call__(self) -> int:
        from spawnsim.fidelity import inputs

        out = self.out
        given = settings_of(
            self.set, {"members": _members} if self.kind == "wan" else {}, f"import {self.kind}"
        )
        if self.kind == "kineto":
            use = write_times(inputs.read_kineto(list(self.files)), out)
        else:
            if len(self.files) != 1:
                raise ParameterError(f"import {self.kind}: give one file, not {len(self.files)}")
            if out.suffix != ".toml":
                raise ParameterError(f"--out {out}: a platform is a .toml file")
            if self.kind == "nccl":
                platform = inputs.read_nccl(self.files[0])
            else:
                platform = inputs.read_wan(self.files[0], given.get("members", 1))
            out.write_text(to_toml(platform), encoding="utf-8")
            error = dict(platform.fitted).get("largest_error")
            use = f"--platform {out}" + (f" (one link for all: off by up to {error})" if error else "")
        sys.stdout.write(f"written: {out}; use it as {use}\n")
        return 0


@dataclass(kw_only=True)
class Explain(Command):
    """Read the dumps of a real job that hangs, and print which ranks wait for which, in which call, and which ranks
    never arrived. See docs/howto/hang.md.
    """

    examples = ("spawnsim explain dumps/", "spawnsim explain /tmp/fr_trace_rank_*")
    dumps: Sequence[Path] = argument(
        "one of each rank, with the rank in its name, or folders: of PyTorch's flight recorder, py-spy or faulthandler",
        "DUMP",
    )

    def __call__(self) -> int:
        from spawnsim.explain import explain

        print(explain(self.dumps))
        return 0


def _members(text: str) -> list[int] | int:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        raise ParameterError("give whole numbers, such as 8 or 4,4,8") from None
    return counts if len(counts) > 1 else counts[0]


def write_times(trace: Trace, out: Path) -> str:
    """Write compute times as the columns of a run."""
    rows = [np.asarray(row, dtype=np.float64) for row in trace.rows]
    out.mkdir(parents=True, exist_ok=True)
    ranks = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    np.savez(out / "metrics.npz", rank=ranks, compute_s=np.concatenate(rows))
    return f"--compute {out},cycle ({len(rows)} ranks, {len(ranks)} steps)"
