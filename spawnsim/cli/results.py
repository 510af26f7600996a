"""Commands for finished runs: `spawnsim plot`, `spawnsim report` and `spawnsim trace`.

Arguments, standard output and exit codes; figures, pages and timelines come from `spawnsim.plots` and
`spawnsim.report`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spawnsim.cli import print_warnings
from spawnsim.cli.declaring import Command, Option, RunFolders, flag, option
from spawnsim.errors import ParameterError
from spawnsim.options import listed
from spawnsim.plots.experiments import Groups, grouped, read
from spawnsim.plots.gallery import save_all
from spawnsim.plots.panels import CLOCKS
from spawnsim.plots.style import FORMATS
from spawnsim.record import manifest
from spawnsim.record.folder import named, require_no_file_of_a_run
from spawnsim.report import perfetto
from spawnsim.report.page import render
from spawnsim.report.perfetto import PACKED
from spawnsim.report.trace_reader import LIMIT, Selection, Timeline
from spawnsim.run.result import warnings_of_runs
from spawnsim.study.results import DONE, PLAN, Sweep
from spawnsim.units import seconds

OF_SWEEPS = "figures of a sweep (docs/sweeps.md)"
Several = Sequence[str]
By = Annotated[
    Several,
    Option(
        "the only distinction between curves: a parameter of main, ranks, platform, stragglers, seed, …; repeatable "
        "(default: all that differ, except the seed)",
        "NAME",
    ),
]


def _formats(text: str) -> list[str]:
    found = text.split(",")
    if unknown := [each for each in found if each not in ("png", "pdf", "svg")]:
        raise ParameterError(f"{unknown[0]}: give png, pdf or svg, with commas between")
    return found


@dataclass(kw_only=True)
class Plot(Command):
    """Draw the figures of one or more runs, or of a sweep, finished or not."""

    examples = (
        "spawnsim plot runs/a runs/b --y loss --format png,svg --out figures",
        "spawnsim plot runs/q --x ratio --y 'time_to:loss<0.1'",
    )
    runs: RunFolders
    out: str = option("folder for the figures", "DIR", default="figures")
    y: Several = option(
        "a recorded column (default: all); of a sweep a measure: accuracy, final:loss, highest:accuracy, "
        "'time_to:accuracy>0.8', bytes, virtual_seconds, …; repeatable",
        "MEASURE",
        default=(),
    )
    format: Several = option(
        "of the files, with commas between (default: png,pdf)", "LIST", parse=_formats, default=FORMATS
    )
    by: By = ()
    x: str = option(
        "a column that varies, time_s, iteration, or a measure (a Pareto front)",
        "NAME",
        group=OF_SWEEPS,
        default="",
    )
    hue: str = option("the column that colours show (default: policy)", "NAME", group=OF_SWEEPS, default="")
    facet: Several = option(
        "the columns that panels show (default: the rest)", "NAMES", group=OF_SWEEPS, default=()
    )
    where: Several = option("only these values; repeatable", "NAME=LIST", group=OF_SWEEPS, default=())
    against: str = option(
        "differences from this value of --hue, paired by seed", "VALUE", group=OF_SWEEPS, default=""
    )
    heat: bool = flag("draw a heat map over --x and --hue", group=OF_SWEEPS)

    def __call__(self) -> int:
        out = named(self.out)
        if any((Path(folder) / PLAN).is_file() for folder in self.runs):
            if len(self.runs) > 1:
                raise ParameterError("draw one sweep at a time: each has its own columns")
            return self._of_sweep(out)
        unfit = [name for name in ("x", "hue", "facet", "where", "against", "heat") if getattr(self, name)]
        if unfit:
            raise ParameterError(
                f"--{unfit[0]} is for a sweep's folder (spawnsim sweep); {self.runs[0]} is not a sweep"
            )
        found = grouped([read(folder) for folder in self.runs], self.by)
        _warn(found)
        silent = [name for name, run in found.named if not len(run.table["rank"])]
        paths = save_all(found, out, self.y, self.format)
        sys.stdout.writelines(f"{path}\n" for path in paths)
        if silent:
            sys.stderr.write(
                f"spawnsim: {', '.join(silent)}: no row was recorded, so there is nothing to draw\n"
            )
        elif not paths:
            sys.stderr.write("spawnsim: no column of numbers was recorded, so there is nothing to draw\n")
        return 0 if paths else 2

    def _of_sweep(self, out: Path) -> int:
        from spawnsim.study import drawing

        if self.by:
            raise ParameterError("--by is for run folders; for a sweep give --hue and --facet")
        whole = Sweep.load(self.runs[0])
        sweep = drawing.where(whole, self.where)
        facet = [name for given in self.facet for name in listed(given)]
        wanted = list(self.y)
        if not wanted and (self.x or self.hue or facet or self.against or self.heat):
            column = drawing.metric_of(sweep)
            wanted = [column if self.x in CLOCKS else f"final:{column}"]
        asked = [
            drawing.ask(sweep, y, x=self.x, hue=self.hue, facet=facet, against=self.against, heat=self.heat)
            for y in wanted
        ] or drawing.defaults(sweep)
        print_warnings(sweep.warnings())
        sys.stderr.write("".join(f"spawnsim: {line}\n" for line in drawing.missing(sweep).splitlines()))
        for each in asked:
            drawn = drawing.draw(sweep, each)
            sys.stderr.write("".join(f"spawnsim: {line}\n" for line in drawn.blank.splitlines()))
            paths = drawing.save(drawn, out, self.format, [whole.command, str(manifest.made()["command"])])
            sys.stdout.writelines(f"{path}\n" for path in paths)
        return 0


def _warn(found: Groups) -> None:
    print_warnings(warnings_of_runs({name: run.what for name, run in found.named}))


@dataclass(kw_only=True)
class Report(Command):
    """Write one self-contained HTML page about one or more runs; of a sweep's folder its finished runs."""

    examples = ("spawnsim report runs/a runs/b --out report.html",)
    runs: RunFolders
    out: str = option("the page", "FILE", default="report.html")
    by: By = ()

    def __call__(self) -> int:
        out = named(self.out)
        # Before the runs are read: a page over a run's own file would lose that file.
        require_no_file_of_a_run(out)
        found = grouped([read(run) for folder in self.runs for run in _runs_of(folder)], self.by)
        _warn(found)
        text = render(found, "spawnsim report")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{out}\n")
        return 0


def _runs_of(folder: str) -> list[str | Path]:
    """Return a run's folder, or the folders of a sweep's finished runs; report the missing ones."""
    from spawnsim.study import drawing

    if not (Path(folder) / PLAN).is_file():
        return [folder]
    sweep = Sweep.load(folder)
    found: list[str | Path] = [sweep.store.root / cell.folder for cell in sweep.of_state(DONE)]
    missing = drawing.missing(sweep)
    if not found:
        raise ParameterError(f"{folder}: no run has finished yet ({sweep.says()})")
    sys.stderr.write("".join(f"spawnsim: {line}\n" for line in missing.splitlines()))
    return found


@dataclass(kw_only=True)
class Trace(Command):
    """Write runs as Chrome/Perfetto JSON: open it at ui.perfetto.dev."""

    examples = ("spawnsim trace runs/c --ranks 0-15 --from 1s --until 1500ms",)
    runs: RunFolders
    ranks: str | None = option("the first N ranks only, or these: 0-15, or 3,40-47 (default: all)", "N|LIST")
    from_: str = option("omit entries that ended before: 2.5, or '10 ms' (default: 0 s)", "S", default="0")
    until: str | None = option("omit entries that began after, in seconds or such as '10 ms'", "S")
    limit: int = option(
        "the most entries in the file: beyond them, fewer ranks or less time is shown", "N", default=LIMIT
    )
    out: str | None = option(
        f"the file; packed if it ends in {PACKED} (default: trace.json, or trace.json{PACKED} if large, in the "
        "run's folder; of several runs in this one)",
        "FILE",
    )

    def __call__(self) -> int:
        out = None if self.out is None else named(self.out)
        if out is not None:
            require_no_file_of_a_run(out)
        selection = Selection(
            None if self.ranks is None else Selection.of_ranks(self.ranks),
            seconds(self.from_),
            math.inf if self.until is None else seconds(self.until),
            self.limit,
        )
        runs = {folder: read(folder) for folder in self.runs}
        print_warnings(warnings_of_runs({folder: run.what for folder, run in runs.items()}))
        drawing = perfetto.draw([(run, Timeline.of(Path(folder))) for folder, run in runs.items()], selection)
        for note in drawing.notes:
            sys.stderr.write(f"spawnsim: trace: {note}\n")
        if drawing.is_empty:
            raise ParameterError("trace: there is nothing to show; no file was written")
        # A run's own folder, where it replaces no other run's timeline; several runs share a file in the working
        # folder.
        own = out is None and len(self.runs) == 1
        path = out or perfetto.default_path(drawing, Path(self.runs[0]) if own else Path())
        if path.exists() and not own:
            sys.stderr.write(f"spawnsim: trace: {path} existed, and was replaced\n")
        perfetto.write(drawing, path)
        sys.stdout.write(f"{path}\n")
        return 0
