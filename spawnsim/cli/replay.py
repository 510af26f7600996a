"""`spawnsim verify RUN` and `spawnsim replay RUN`: run a recorded run again, to compare it or to stop in the middle."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.models.faults import FaultPlan
from spawnsim.options import Parser, parameters
from spawnsim.rerun.again import Again
from spawnsim.rerun.debugger import Change, Replay, Stop
from spawnsim.rerun.divergence import verify as compare
from spawnsim.run.process_setup import stoppable
from spawnsim.run.program import program
from spawnsim.run.result import FINISHED, shown
from spawnsim.units import seconds, text_table

SHOWN = 60  # characters of an outcome
COMPARED = ("virtual_seconds", "events", "messages", "bytes", "replacements", "digest")


def verify(argv: Sequence[str]) -> int:
    """Run a folder's run again and compare; 0 if it repeats, else 1."""
    parser = Parser(
        prog="spawnsim verify",
        description="Run a recorded run on virtual ranks again, and name the first event that differs.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--file", type=Path, help="the program, in place of the copy that the folder keeps")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    verdict = compare(options.run, options.file)
    print(json.dumps(asdict(verdict)) if options.json else verdict.text)
    return 0 if verdict.repeats else 1


def replay(argv: Sequence[str]) -> int:
    """Run a folder's run again up to a stop, and prompt there; or change something there, and compare the ends."""
    options = _parser().parse_args(argv)
    again = Again.of(options.run, options.file)
    until_s = None if options.until is None else seconds(options.until)
    stop = Stop(until_s, options.break_at or "")
    faults, changes = _what_if(again, options.what_if, until_s)
    if until_s is None and not stop.condition and not options.what_if:
        raise ParameterError("where to stop? Give --until TIME or --break EXPRESSION")
    main = None if again.is_whole else program(again.file, again.parameters).main.__code__
    prompts = not options.what_if or bool(stop.condition)
    whole = again.recorded.what.get("record_every", 1) == 1 and not again.recorded.what.get("record_ranks")
    columns = list(again.recorded.table) if whole else None  # of thinned rows some may be missing
    recorder = Replay(stop, changes, sys.stdin if prompts else None, columns=columns, main=main)
    with stoppable():
        found = again.run(recorder, prepare=recorder.prepare, faults=faults)
    if recorder.error is not None:
        raise recorder.error
    if recorder.left:
        return 0
    if prompts and not recorder.stops:
        print(f"the run ended ({found.outcome}) without a stop")
    if options.what_if:
        print(_compared(again, found))
    elif found.totals.get("digest") == again.recorded.totals.get("digest"):
        print(f"ended as recorded: {found.totals.get('digest')}")
    else:
        print(
            f"ended: {found.outcome}"
            if found.outcome != FINISHED
            else "ended, with another digest than recorded"
        )
    return 0


def _what_if(
    again: Again, texts: Sequence[str], until_s: float | None
) -> tuple[FaultPlan | None, list[Change]]:
    """Return the plan with the faults that are added, and the variables that are changed."""
    added, changes = [], []
    for text in texts:
        if "@" in text:
            added.append(text)
        else:
            changes += [Change(name, value) for name, value in _assignment(text).items()]
    if texts and until_s is None:
        raise ParameterError("--what-if: from when on? Give --until TIME")
    if not added:
        return None, changes
    before = FaultPlan.parse(again.scenario.faults, seed=again.scenario.seed)
    # At the end, so that the draws of the faults that were there stay what they were.
    plan = FaultPlan((*before.faults, *FaultPlan.parse("; ".join(added)).faults), before.seed)
    plan.check(again.scenario.ranks)
    for fault in plan.faults[len(before.faults) :]:
        if fault.at_s < (until_s or 0.0):  # type: ignore[attr-defined]
            raise fault.refuse(f"it begins before {until_s:g} s, up to which all is to be as recorded")
    return plan, changes


def _assignment(text: str) -> dict[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not all(part.isidentifier() for part in name.split(".")):
        raise ParameterError(f"--what-if {text}: write a fault such as crash:3@13s, or NAME=VALUE")
    return {name: next(iter(parameters([f"value={value}"]).values()))}


def _compared(again: Again, found: Any) -> str:
    was, now = again.recorded, found
    rows = [(name, shown(was.totals.get(name)), shown(now.totals.get(name))) for name in COMPARED]
    rows.append(("outcome", textwrap.shorten(was.outcome, SHOWN), textwrap.shorten(now.outcome, SHOWN)))
    for name in now.table:
        column = now.table[name]
        if name not in ("rank", "time_s", "iteration") and column.dtype.kind in "if" and name in was.table:
            told = [each[name][~np.isnan(each[name])] for each in (was.table, now.table)]
            if all(map(len, told)):
                before, after = (shown(float(values[-1])) for values in told)
                rows.append((f"last {name}", before, after))
    return text_table(("", "recorded", "what if"), rows)


def _parser() -> Parser:
    parser = Parser(
        prog="spawnsim replay",
        description="Run a recorded run on virtual ranks again, stop at a time or condition, and look at every rank: "
        "the prompt is pdb, and `ranks`, `rank N`, `rows`, `messages`. Commands may also come from a pipe.",
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run folder")
    add("--until", metavar="TIME", help="stop at this virtual time, such as 12.5s")
    add(
        "--break", dest="break_at", metavar="EXPRESSION",
        help="stop where a recorded row meets this: 'rank == 17 and loss > 3'",
    )  # fmt: skip
    add(
        "--what-if", action="append", default=[], metavar="CHANGE",
        help="from --until on: a fault more (crash:3@13s), or another value of a variable of main, or of an attribute "
        "(lr=0.1, policy.cooldown=5); the ends are compared. Repeatable",
    )  # fmt: skip
    add("--file", type=Path, help="the program, in place of the copy that the folder keeps")
    return parser
