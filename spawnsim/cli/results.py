"""Commands that look at finished runs: `spawnsim plot`, `spawnsim report` and `spawnsim trace`.

Arguments, standard output and exit codes; figures, pages and timelines are made in `spawnsim.plots` and
`spawnsim.report`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from spawnsim.cli import print_warnings
from spawnsim.errors import ParameterError
from spawnsim.options import Parser, listed
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


def plot(argv: Sequence[str] | None = None) -> int:
    """Draw the figures of the run folders, or of the sweep, named in `argv`; print the paths; return the exit code."""
    args = _plot_parser().parse_args(argv)
    out = named(args.out)
    if any((Path(folder) / PLAN).is_file() for folder in args.runs):
        if len(args.runs) > 1:
            raise ParameterError("draw one sweep at a time: each has its own columns")
        return _plot_sweep(args, out)
    unfit = [name for name in OF_SWEEPS if getattr(args, name)]
    if unfit:
        instead = "; what to draw of a run is --column NAME" if unfit[0] == "y" else ""
        raise ParameterError(
            f"--{unfit[0]} is for a sweep's folder (spawnsim sweep); {args.runs[0]} is none{instead}"
        )
    found = grouped([read(folder) for folder in args.runs], args.by, args.label)
    _warn(found)
    silent = [name for name, run in found.named if not len(run.table["rank"])]
    paths = save_all(found, out, args.column, args.formats)
    sys.stdout.writelines(f"{path}\n" for path in paths)
    if silent:
        sys.stderr.write(f"spawnsim: {', '.join(silent)}: no row was recorded, so there is nothing to draw\n")
    elif not paths:
        sys.stderr.write("spawnsim: no column of numbers was recorded, so there is nothing to draw\n")
    return 0 if paths else 2


def _warn(found: Groups) -> None:
    """Print the warnings of runs before anything is made of them."""
    print_warnings(warnings_of_runs({name: run.what for name, run in found.named}))


OF_SWEEPS = ("y", "x", "hue", "facet", "where", "against", "heat")


def _plot_sweep(args: argparse.Namespace, out: Path) -> int:
    from spawnsim.study import drawing

    if args.by or args.label:
        raise ParameterError("--by and --label are for run folders; of a sweep give --hue and --facet")
    whole = Sweep.load(args.runs[0])
    sweep = drawing.where(whole, args.where)
    facet = [name for given in args.facet for name in listed(given)]
    how = {
        "x": args.x,
        "hue": args.hue,
        "facet": facet,
        "against": args.against,
        "heat": args.heat,
        "band": args.band,
    }
    columns, wanted = args.column, args.y
    if not (columns or wanted) and any(getattr(args, name) for name in OF_SWEEPS if name != "where"):
        columns = [drawing.metric_of(sweep)]
    wanted = wanted or [f"final:{name}" if args.x not in CLOCKS else name for name in columns]
    asked = [drawing.ask(sweep, y, **how) for y in wanted] or drawing.defaults(sweep)
    print_warnings(sweep.warnings())
    sys.stderr.write("".join(f"spawnsim: {line}\n" for line in drawing.missing(sweep).splitlines()))
    for each in asked:
        drawn = drawing.draw(sweep, each)
        sys.stderr.write("".join(f"spawnsim: {line}\n" for line in drawn.blank.splitlines()))
        paths = drawing.save(drawn, out, args.formats, [whole.command, str(manifest.made()["command"])])
        sys.stdout.writelines(f"{path}\n" for path in paths)
    return 0


def _plot_parser() -> Parser:
    parser = Parser(prog="spawnsim plot", description="Draw the figures of one or more runs, or of a sweep.")
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folder, or one sweep's folder, finished or not")
    add("--out", default="figures", help="folder for the figures (default: %(default)s)")
    add("--column", action="append", default=[], help="metric to draw; repeatable (default: those recorded)")
    add(
        "--formats",
        nargs="+",
        default=list(FORMATS),
        choices=("png", "pdf", "svg"),
        help="of the files (default: png pdf)",
    )
    add_grouping(parser)
    group = parser.add_argument_group("figures of a sweep (docs/sweeps.md)")
    add = group.add_argument
    add(
        "--y", action="append", default=[], metavar="MEASURE",
        help="accuracy, final:loss, highest:accuracy, 'time_to:accuracy>0.8', bytes, virtual_seconds, …; repeatable",
    )  # fmt: skip
    add(
        "--x",
        default="",
        metavar="NAME",
        help="a column that varies, time_s, iteration, or a measure (a Pareto front)",
    )
    add("--hue", default="", metavar="NAME", help="the column that colours tell (default: policy)")
    add(
        "--facet",
        action="append",
        default=[],
        metavar="NAMES",
        help="the columns that panels tell (default: the rest)",
    )
    add("--where", action="append", default=[], metavar="NAME=LIST", help="these values alone; repeatable")
    add("--against", default="", metavar="VALUE", help="differences to this value of --hue, paired by seed")
    add("--heat", action="store_true", help="a heat map over --x and --hue")
    add(
        "--band",
        choices=("seeds", "ranks"),
        default="seeds",
        help="of curves over time, what bands are over (default: seeds)",
    )
    return parser


def add_grouping(parser: Parser) -> None:
    """Add the options that say which runs share a curve, and how curves are called."""
    parser.add_argument(
        "--by", action="append", default=[], metavar="NAME",
        help="what alone tells curves apart: a parameter of main, ranks, platform, stragglers, seed, …; repeatable "
        "(default: all that differ but the seed)",
    )  # fmt: skip
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="TEXT",
        help="a curve's name, once per curve, in order",
    )


def report(argv: Sequence[str] | None = None) -> int:
    """Write an HTML page about the runs named in `argv`; return the exit code."""
    parser = Parser(
        prog="spawnsim report", description="Write one self-contained HTML page about one or more runs."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, or a sweep's: its finished runs")
    parser.add_argument(
        "--title", default="spawnsim report", metavar="TEXT", help="of the page (default: %(default)s)"
    )
    parser.add_argument(
        "--out", default="report.html", metavar="FILE", help="the page (default: %(default)s)"
    )
    add_grouping(parser)
    args = parser.parse_args(argv)
    out = named(args.out)
    # Before the runs are read, since a page over a run's own file would lose it.
    require_no_file_of_a_run(out)
    folders = [run for folder in args.runs for run in _runs_of(folder)]
    found = grouped([read(folder) for folder in folders], args.by, args.label)
    _warn(found)
    text = render(found, args.title)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{out}\n")
    return 0


def _runs_of(folder: str) -> list[str | Path]:
    """Return a run's folder, or those of a sweep's finished runs; say which are missing."""
    from spawnsim.study import drawing

    if not (Path(folder) / PLAN).is_file():
        return [folder]
    sweep = Sweep.load(folder)
    found: list[str | Path] = [sweep.store.root / cell.folder for cell in sweep.of_state(DONE)]
    told = drawing.missing(sweep)
    if not found:
        raise ParameterError(f"{folder}: no run is done yet ({sweep.says()})")
    sys.stderr.write("".join(f"spawnsim: {line}\n" for line in told.splitlines()))
    return found


def trace(argv: Sequence[str] | None = None) -> int:
    """`spawnsim trace RUN…`: write the runs named in `argv`; return the exit code."""
    args = _trace_parser().parse_args(argv)
    out = None if args.out is None else named(args.out)
    if out is not None:
        require_no_file_of_a_run(out)
    selection = Selection(
        None if args.ranks is None else Selection.of_ranks(args.ranks),
        seconds(args.begin),
        math.inf if args.until is None else seconds(args.until),
        args.limit,
    )
    runs = {folder: read(folder) for folder in args.runs}
    print_warnings(warnings_of_runs({folder: run.what for folder, run in runs.items()}))
    drawing = perfetto.draw([(run, Timeline.of(Path(folder))) for folder, run in runs.items()], selection)
    for note in drawing.notes:
        sys.stderr.write(f"spawnsim: trace: {note}\n")
    if drawing.is_empty:
        raise ParameterError("trace: there is nothing to show, and no file is written")
    # A run's own folder, where it replaces no other run's; several runs share a file in the working folder.
    own = out is None and len(args.runs) == 1
    path = out or perfetto.default_path(drawing, Path(args.runs[0]) if own else Path())
    if path.exists() and not own:
        sys.stderr.write(f"spawnsim: trace: {path} was there before, and is replaced\n")
    perfetto.write(drawing, path)
    sys.stdout.write(f"{path}\n")
    return 0


def _trace_parser() -> Parser:
    parser = Parser(
        prog="spawnsim trace",
        description="Write runs as Chrome/Perfetto JSON: open it at ui.perfetto.dev.",
    )
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run folder; its calls and messages are there if it ran with --trace",
    )
    add("--ranks", metavar="N|LIST", help="the first N ranks only, or these: 0-15, or 3,40-47 (default: all)")
    add(
        "--from",
        dest="begin",
        default="0",
        metavar="S",
        help="leave out what ended before: 2.5, or '10 ms' (default: 0 s)",
    )
    add(
        "--until", default=None, metavar="S", help="leave out what began after, in seconds or such as '10 ms'"
    )
    add(
        "--limit", type=int, default=LIMIT, metavar="N",
        help="entries of the file at most: fewer ranks are shown, or less time (default: %(default)s)",
    )  # fmt: skip
    add(
        "--out",
        help=f"the file; packed if it ends in {PACKED} (default: trace.json, or trace.json{PACKED} if large, in the "
        "run's folder; of several runs in this one)",
    )
    return parser
