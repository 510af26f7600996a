"""`spawnsim report RUN…` and `spawnsim trace RUN…`: one page, or one timeline, of one or more run folders.

This room knows arguments and standard output; pages and timelines are made next door.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from spawnsim.options import Parser
from spawnsim.plots.cli import add_grouping
from spawnsim.plots.source import grouped, read
from spawnsim.record.folder import named, require_no_file_of_a_run
from spawnsim.report import trace as perfetto
from spawnsim.report.page import render
from spawnsim.report.timeline import LIMIT, Selection, Timeline
from spawnsim.report.trace import PACKED
from spawnsim.units import seconds


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
