"""Commands that look at finished runs: `spawnsim plot`, `spawnsim report` and `spawnsim trace`.

Arguments, standard output and exit codes; figures, pages and timelines are made in `spawnsim.plots` and
`spawnsim.report`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from spawnsim.options import Parser
from spawnsim.plots.experiments import grouped, read
from spawnsim.plots.gallery import save_all
from spawnsim.plots.style import FORMATS
from spawnsim.record.folder import named, require_no_file_of_a_run
from spawnsim.report import perfetto
from spawnsim.report.page import render
from spawnsim.report.perfetto import PACKED
from spawnsim.report.trace_reader import LIMIT, Selection, Timeline
from spawnsim.units import seconds


def plot(argv: Sequence[str] | None = None) -> int:
    """Draw the figures of the run folders named in `argv`; print the paths; return the exit code."""
    parser = Parser(prog="spawnsim plot", description="Draw the figures of one or more runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
    parser.add_argument("--out", default="figures", help="folder for the figures (default: %(default)s)")
    parser.add_argument(
        "--column", action="append", default=[], help="metric to draw; may be given more than once"
    )
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=("png", "pdf", "svg"))
    add_grouping(parser)
    args = parser.parse_args(argv)
    out = named(args.out)
    found = grouped([read(folder) for folder in args.runs], args.by, args.label)
    silent = [name for name, run in found.named if not len(run.table["rank"])]
    paths = save_all(found, out, args.column, args.formats)
    sys.stdout.writelines(f"{path}\n" for path in paths)
    if silent:
        sys.stderr.write(f"spawnsim: {', '.join(silent)}: no row was recorded, so there is nothing to draw\n")
    elif not paths:
        sys.stderr.write("spawnsim: no column of numbers was recorded, so there is nothing to draw\n")
    return 0 if paths else 2


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
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
    parser.add_argument("--title", default="spawnsim report")
    parser.add_argument(
        "--out", default="report.html", metavar="FILE", help="the page (default: %(default)s)"
    )
    add_grouping(parser)
    args = parser.parse_args(argv)
    out = named(args.out)
    # Before the runs are read, since a page over a run's own file would lose it.
    require_no_file_of_a_run(out)
    text = render(grouped([read(folder) for folder in args.runs], args.by, args.label), args.title)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{out}\n")
    return 0


def trace(argv: Sequence[str] | None = None) -> int:
    """`spawnsim trace RUN…`: write the runs named in `argv`; return the exit code."""
    parser = Parser(
        prog="spawnsim trace", description="Write runs as Chrome/Perfetto JSON: open it at ui.perfetto.dev."
    )
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run folder; its calls and messages are there if it ran with --trace",
    )
    add("--ranks", metavar="N|LIST", help="the first N ranks only, or these: 0-15, or 3,40-47 (default: all)")
    add("--from", dest="begin", default="0", metavar="S", help="leave out what ended before: 2.5, or '10 ms'")
    add("--until", default=None, metavar="S", help="leave out what began after")
    add(
        "--limit", type=int, default=LIMIT, metavar="N",
        help="entries of the file at most: fewer ranks are shown, or less time (default: %(default)s)",
    )  # fmt: skip
    add(
        "--out",
        help=f"the file; packed if it ends in {PACKED} (default: trace.json, or trace.json{PACKED} if large)",
    )
    args = parser.parse_args(argv)
    out = None if args.out is None else named(args.out)
    if out is not None:
        require_no_file_of_a_run(out)
    selection = Selection(
        None if args.ranks is None else Selection.of_ranks(args.ranks),
        seconds(args.begin),
        math.inf if args.until is None else seconds(args.until),
        args.limit,
    )
    drawing = perfetto.draw([(read(folder), Timeline.of(Path(folder))) for folder in args.runs], selection)
    path = perfetto.write(drawing, out)
    for note in drawing.notes:
        sys.stderr.write(f"spawnsim: trace: {note}\n")
    sys.stdout.write(f"{path}\n")
    return 0
