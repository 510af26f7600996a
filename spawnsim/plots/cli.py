"""`spawnsim plot RUN…`: all figures of one or more run folders.

This room knows arguments and standard output; the drawing is next door.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from spawnsim.plots.gallery import save_all
from spawnsim.plots.source import read
from spawnsim.plots.style import FORMATS
from spawnsim.record.folder import named


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the figures of the run folders named in `argv`; print the paths; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="spawnsim plot", description="Draw the figures of one or more runs."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
    parser.add_argument("--out", default="figures", help="folder for the figures (default: %(default)s)")
    parser.add_argument(
        "--column", action="append", default=[], help="metric to draw; may be given more than once"
    )
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=("png", "pdf", "svg"))
    args = parser.parse_args(argv)
    runs = [read(folder) for folder in args.runs]
    for path in save_all(runs, named(args.out), args.column, args.formats):
        sys.stdout.write(f"{path}\n")
    return 0
