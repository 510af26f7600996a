"""`spawnsim report RUN…`: one page about one or more run folders.

This room knows arguments and standard output; the page is made next door.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from spawnsim.options import Parser
from spawnsim.plots.cli import add_grouping
from spawnsim.plots.source import grouped, read
from spawnsim.record.folder import named, require_no_file_of_a_run
from spawnsim.report.page import render


def main(argv: Sequence[str] | None = None) -> int:
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
