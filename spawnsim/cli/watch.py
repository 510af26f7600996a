"""`spawnsim watch RUN`: show a run that goes on, or has ended, to a browser or to loggers."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from spawnsim.options import Parser
from spawnsim.record.folder import MANIFEST, RUNNING, read_manifest
from spawnsim.report.live import LivePage
from spawnsim.report.observers import LOGGERS, Logging, Observer, follow
from spawnsim.run import Run
from spawnsim.run.watched import OBSERVERS, require_observers

FOR_EVER_S = 10 * 365 * 86_400.0


def main(argv: Sequence[str]) -> int:
    """Watch until the run has ended, and return the exit code."""
    options = parser().parse_args(argv)
    names = list(dict.fromkeys([*(["live"] if options.live else []), *options.observe])) or ["live"]
    require_observers(names, options.run)
    if not options.until_closed and read_manifest(options.run)["outcome"] != RUNNING:
        Run.load(options.run)  # what cannot be read is told now; that of a run which goes on may come yet
    pages = [LivePage(str(options.run))] if "live" in names else []
    try:
        for page in pages:
            print(f"spawnsim: live: {page.url}", file=sys.stderr, flush=True)
        if options.until_closed and not _begun(options.run):
            return 0  # what has kept the run from beginning is told by it
        what = read_manifest(options.run)["what"]
        loggers = [Logging(LOGGERS[name](options.run, what)) for name in names if name in LOGGERS]
        observers: list[Observer] = [*pages, *loggers]
        over = _closed if options.until_closed else _ended(stays=bool(pages))
        follow(options.run, observers, over, options.registry)
    finally:
        for page in pages:
            page.close()
    return 0


def parser() -> Parser:
    """Return the options of `spawnsim watch`."""
    parser = Parser(
        prog="spawnsim watch",
        description="Show a run to a browser on this machine, or to loggers, while it goes on, and one that has ended "
        "as a whole. `spawnsim run --live` and `--observe` do so from its beginning.",
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the run folder")
    add(
        "--live",
        action="store_true",
        help="a page on 127.0.0.1; the default without --observe. Ctrl-C ends it",
    )
    add(
        "--observe", action="append", default=[], choices=tuple(OBSERVERS), metavar="NAME",
        help=f"among {', '.join(OBSERVERS)}; repeatable (default: live)",
    )  # fmt: skip
    add(
        "--registry", type=Path, metavar="DIR",
        help="where the launcher of real ranks keeps how far they are; `spawnsim run` gives it (default: unknown)",
    )  # fmt: skip
    add(
        "--until-closed", action="store_true",
        help="until standard input is closed, as `spawnsim run` does when the run's folder is whole",
    )  # fmt: skip
    return parser


def _begun(folder: Path) -> bool:
    """Wait until a run has begun its folder; return whether it has, before it has ended."""
    while not (folder / MANIFEST).exists():
        if _closed(0.1):
            return False
    return True


def _closed(wait_s: float, _run: Run | None = None) -> bool:
    """Wait until standard input is closed, so long at most; return whether it is."""
    return bool(select.select([sys.stdin], [], [], wait_s)[0]) and not os.read(sys.stdin.fileno(), 4096)


def _ended(*, stays: bool) -> Callable[[float, Run | None], bool]:
    """Return what waits until the run has ended; a page that was opened by hand stays until Ctrl-C."""

    def over(wait_s: float, run: Run | None) -> bool:
        ended = run is not None and run.outcome != RUNNING
        if ended and not stays:
            return True
        # Nothing new comes any more, and the page stays as it is.
        time.sleep(FOR_EVER_S if ended else wait_s)
        return False

    return over
