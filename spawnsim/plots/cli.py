"""`spawnsim plot RUN…`: all figures of one or more run folders.

This room knows arguments and standard output; the drawing is next door.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from spawnsim.options import Parser
from spawnsim.plots.gallery import save_all
from spawnsim.plots.source import grouped, read
from spawnsim.plots.style import FORMATS
from spawnsim.record.folder import named


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
