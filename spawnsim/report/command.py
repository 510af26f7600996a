"""`spawnsim report RUN…`: one page about one or more run folders.

This room knows arguments and standard output; the page is made next door.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from spawnsim.plots.source import read
from spawnsim.report.page import render


def main(argv: Sequence[str] | None = None) -> int:
    """Write an HTML page about the runs named in `argv`; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="spawnsim report", description="Write one self-contained HTML page about one or more runs."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
    parser.add_argument("--title", default="spawnsim report")
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), help="the page (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    text = render([read(folder) for folder in args.runs], args.title)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{args.out}\n")
    return 0
