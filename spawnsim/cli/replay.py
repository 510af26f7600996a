"""`spawnsim watch`, `verify` and `replay`: watch a run while it runs; or run a recorded one again, to compare it or to
stop in the middle.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spawnsim.cli.declaring import Command, Json, KeptProgram, Observers, RunFolder, option
from spawnsim.errors import ParameterError
from spawnsim.record.folder import MANIFEST, RUNNING, read_manifest
from spawnsim.rerun.again import Again
from spawnsim.rerun.debugger import Replay, Stop
from spawnsim.rerun.divergence import verify
from spawnsim.run import Run
from spawnsim.run.process_setup import stoppable
from spawnsim.run.result import FINISHED
from spawnsim.run.watched import PIPE, require_observers
from spawnsim.units import seconds

if TYPE_CHECKING:
    from spawnsim.report.observers import Observer

FOR_EVER_S = 10 * 365 * 86_400.0


@dataclass(kw_only=True)
class Verify(Command):
    """Run a recorded run on virtual ranks again, and name the first event that differs; the status is then 1."""

    examples = ("spawnsim verify runs/a",)
    run: RunFolder
    program: KeptProgram = None
    json: Json = False

    def __call__(self) -> int:
        verdict = verify(self.run, self.program)
        print(json.dumps(asdict(verdict)) if self.json else verdict.text)
        return 0 if verdict.repeats else 1


@dataclass(kw_only=True)
class ReplayCommand(Command):
    """Run a recorded run on virtual ranks again, stop at a time or condition, and inspect every rank: the prompt
    is pdb, and `ranks`, `rank N`, `rows`, `messages`. Commands may also come from a pipe.
    """

    examples = (
        "spawnsim replay runs/a --until 12.5s",
        "spawnsim replay runs/a --break 'rank == 17 and loss > 3'",
    )
    run: RunFolder
    until: str | None = option("stop at this virtual time, such as 12.5s", "TIME")
    break_: str = option(
        "stop where a recorded row satisfies this: 'rank == 17 and loss > 3'", "EXPRESSION", default=""
    )
    program: KeptProgram = None

    def __call__(self) -> int:
        again = Again.of(self.run, self.program)
        until_s = None if self.until is None else seconds(self.until)
        stop = Stop(until_s, self.break_)
        if until_s is None and not stop.condition:
            raise ParameterError("replay needs a place to stop: give --until TIME or --break EXPRESSION")
        what = again.recorded.what
        whole = what.get("record_every", 1) == 1 and not what.get("record_ranks")
        columns = list(again.recorded.table) if whole else None  # thinned rows may lack some columns
        recorder = Replay(stop, sys.stdin, columns=columns)
        with stoppable():
            found = again.run(recorder, prepare=recorder.prepare)
        if recorder.error is not None:
            raise recorder.error
        if recorder.left:
            return 0
        if not recorder.stops:
            print(f"the run ended ({found.outcome}) before it reached a stop")
        if found.totals.get("digest") == again.recorded.totals.get("digest"):
            print(f"ended as recorded: {found.totals.get('digest')}")
        elif found.outcome != FINISHED:
            print(f"ended: {found.outcome}")
        else:
            print("ended with a different digest than recorded")
        return 0


# -------------------------------------------------------------------------------------------------------- watch
@dataclass(kw_only=True)
class Watch(Command):
    """Show a run in a browser on this machine, or in loggers, while it runs; show a run that has ended as a whole.
    `spawnsim run --observe` does so from its beginning. Ctrl-C ends it.
    """

    examples = ("spawnsim watch runs/a", "spawnsim watch runs/a --observe tensorboard --observe mlflow")
    run: RunFolder
    observe: Observers = ("live",)

    def __call__(self) -> int:
        from spawnsim.report.live import LivePage
        from spawnsim.report.observers import LOGGERS, Logging, follow

        names = list(dict.fromkeys(self.observe))
        # If a run has started this process, it ends when the run's folder is whole; the run then closes its end of a
        # pipe.
        registry = os.environ.get(PIPE)
        require_observers(names, self.run)
        if registry is None and read_manifest(self.run)["outcome"] != RUNNING:
            Run.load(self.run)  # reports unreadable folders now; a running run may still write its folder
        pages = [LivePage(str(self.run))] if "live" in names else []
        try:
            for page in pages:
                print(f"spawnsim: live: {page.url}", file=sys.stderr, flush=True)
            if registry is not None and not _begun(self.run):
                return 0  # the run itself reports why it did not begin
            what = read_manifest(self.run)["what"]
            loggers = [Logging(LOGGERS[name](self.run, what)) for name in names if name in LOGGERS]
            observers: list[Observer] = [*pages, *loggers]
            over = _ended(stays=bool(pages)) if registry is None else _closed
            follow(self.run, observers, over, Path(registry) if registry else None)
        finally:
            for page in pages:
                page.close()
        return 0


def _begun(folder: Path) -> bool:
    """Wait until a run has begun its folder; return False if the run ended without a folder."""
    while not (folder / MANIFEST).exists():
        if _closed(0.1):
            return False
    return True


def _closed(wait_s: float, _run: Run | None = None) -> bool:
    """Wait until standard input is closed, for at most `wait_s`; return whether it is."""
    return bool(select.select([sys.stdin], [], [], wait_s)[0]) and not os.read(sys.stdin.fileno(), 4096)


def _ended(*, stays: bool) -> Callable[[float, Run | None], bool]:
    """Return a function that waits until the run has ended; a page that was opened by hand stays until Ctrl-C."""

    def over(wait_s: float, run: Run | None) -> bool:
        ended = run is not None and run.outcome != RUNNING
        if ended and not stays:
            return True
        # No new data will arrive, and the page stays as it is.
        time.sleep(FOR_EVER_S if ended else wait_s)
        return False

    return over
