"""`spawnsim advise`: which policy, and how often, on a cluster: a ranking by goodput, in timing alone."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spawnsim import units
from spawnsim.cli import print_note_beside_bar
from spawnsim.errors import ParameterError
from spawnsim.fidelity.advising import Advice, Budget, advise, report
from spawnsim.fidelity.converging import Need, by_time, converge
from spawnsim.fidelity.goodput import POLICIES, Case, Choice, Failures
from spawnsim.models.compute import Fixed, parse_stragglers
from spawnsim.models.faults import rates
from spawnsim.models.platform import load_platform
from spawnsim.options import Parser, nearest, picture
from spawnsim.run.process_setup import stoppable

MOST_SEEDS = 10_000
ALL = "all"  # in place of policies' names


def main(argv: Sequence[str]) -> int:
    """Run the subcommand."""
    options = parser().parse_args(argv)
    # A step takes what it is said to take, with as many ranks beside it as there are.
    platform = dataclasses.replace(load_platform(options.platform), cores=None)
    model_nbytes = units.nbytes(options.model)
    step = units.seconds(options.step) if options.step else _step(platform.step)
    stragglers = platform.stragglers if options.straggler is None else parse_stragglers(options.straggler)
    failures = _failures(options.failures, options.ranks_per_node)
    costs = {"detection_s": units.seconds(options.detection), "restart_s": units.seconds(options.restart)}
    case = Case(
        platform,
        options.ranks,
        model_nbytes,
        step,
        stragglers=tuple(stragglers),
        failures=dataclasses.replace(failures, **costs),
        rounds=options.rounds,
    )
    choices = [
        Choice(policy, every, ratio)
        for policy in _policies(options.policy)
        for every in _numbers("--every", options.every, int)
        for ratio in _numbers("--compression", options.compression, float)
    ]
    if not 1 <= options.seeds <= MOST_SEEDS:
        raise ParameterError(f"--seeds {options.seeds}: give at least 1, at most {MOST_SEEDS:,}")
    with stoppable():
        seeds = range(options.seeds)
        found = advise(
            case, choices, seeds=seeds, target=options.target, noted=_bar, say=print_note_beside_bar
        )
    needs = None
    if options.train:
        with stoppable():
            needs = converge(case, found, steps=options.train, seeds=range(options.seeds))
    budget = None
    if options.budget is not None:
        budget = Budget(options.budget, options.ranks_per_node, options.price)
    elif options.price is not None:
        raise ParameterError("--price: of what? Give a --budget, too")
    more = _more(found, case, budget, needs)
    told = json.dumps(document(found) | more) if options.json else "\n".join([report(found), *_said(more)])
    sys.stdout.write(told + "\n")
    if options.picture:
        draw(found, case, options.picture)
    return 0


def _bar(choices: Sequence[Choice]) -> Iterable[Choice]:
    """Go through the choices with a bar on a terminal: some take half a minute."""
    from tqdm import tqdm

    bar: Iterable[Choice] = tqdm(choices, unit=" choices", leave=False, dynamic_ncols=True, disable=None)
    return bar


def _step(step: object) -> float:
    if not isinstance(step, Fixed):
        raise ParameterError("this platform states no compute step: give --step, such as 300ms")
    return step.duration_s


def _more(
    found: Advice, case: Case, budget: Budget | None, needs: dict[Choice, Need] | None
) -> dict[str, Any]:
    """Return what a budget pays and what convergence needs, as JSON can hold it."""
    more: dict[str, Any] = {}
    if budget is not None:
        paid = {str(row.choice): budget.steps(case, row.goodput) for row in found.rows}
        more["budget"] = {"hours": budget.hours(case.ranks), "steps": paid}
    if needs is not None:
        more["live"] = [
            {
                "choice": str(choice),
                "steps": needs[choice].steps,
                "seconds": seconds,
                "least": least,
                "most": most,
            }
            for choice, seconds, least, most in by_time(found, needs, case.step_s)
        ]
    return more


def _said(more: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that say so."""
    if "budget" in more:
        yield f"the budget pays {more['budget']['hours']:.4g} h: " + "; ".join(
            f"{steps:,.0f} steps {choice}" for choice, steps in more["budget"]["steps"].items()
        )
    if "live" in more:
        lines = [
            (f"{place}", each["choice"], f"{each['steps']:g}", f"{each['seconds']:.3g} s",
             f"{each['least']:.3g} to {each['most']:.3g} s")
            for place, each in enumerate(more["live"], start=1)
        ]  # fmt: skip
        yield "\nby the time until a small live training (digits, skewed shards) is as good as the worst becomes:"
        yield units.text_table(("", "policy", "steps", "time", "interval"), lines, left=2)


def _failures(text: str | None, per_node: int) -> Failures:
    """Return the failures of a preset's name, or of one rank's mean time between failures."""
    if text is None:
        return Failures()
    if text not in rates.FAILURES:
        try:
            return Failures(units.seconds(text))
        except ParameterError as error:
            raise ParameterError(
                f"--failures {text}: give {', '.join(rates.FAILURES)}, or the mean time between failures of one rank, "
                "such as 50000h"
            ) from error
    known = rates.FAILURES[text]
    return Failures(known.rank_mtbf_s(per_node), known.job_mtbf_s)


def _policies(texts: Sequence[str]) -> list[str]:
    """Return the policies that lists name, each once, in the order of their first mention."""
    words = [word.strip() for text in texts or ["average"] for word in text.split(",")]
    wrong = [word for word in words if word not in (*POLICIES, ALL)]
    if wrong:
        hint = nearest(wrong[0], (*POLICIES, ALL)) or f"{ALL} is all of them"
        raise ParameterError(
            f"--policy {wrong[0]!r}: give {', '.join(POLICIES)}, with commas between; {hint}"
        )
    return list(dict.fromkeys(each for word in words for each in (POLICIES if word == ALL else (word,))))


def _numbers(option: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return list(dict.fromkeys(kind(word) for word in text.split(",")))
    except ValueError as error:
        raise ParameterError(
            f"{option} {text!r}: give numbers with commas between, such as 1,8,32"
        ) from error


def document(found: Advice) -> dict[str, object]:
    """Return the advice as JSON can hold it.

    Args:
        found: what `advise` found.

    Returns:
        `ranking` (a mapping per choice, best first), `break_even`, `changes`, and how it was made.
    """
    rows = [dataclasses.asdict(row) for row in found.rows]
    changes = {
        name: [[str(now), str(before)] for now, before in found.changes(name)] for name in found.rows[0].worse
    }
    return {
        # "every" is what was asked for.
        "ranking": [row.pop("choice") | {"every_in_effect": row.pop("every")} | row for row in rows],
        "break_even": found.break_even,
        "target": found.target,
        "changes": changes,
        "network_models": found.models,
        "seeds": found.seeds,
    }


def draw(found: Advice, case: Case, picture: Path) -> None:
    """Draw goodput against cadence, a line for each policy."""
    from spawnsim.plots import fidelity, style

    curves: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in found.rows:
        ratio = f", {row.choice.ratio:g} x smaller" * (row.choice.ratio != 1)
        curves.setdefault(row.choice.policy + ratio, []).append((row.every, row.goodput, row.low, row.high))
    size = f"{case.model_nbytes / 1e6:,.0f} MB · steps of {1e3 * case.step_s:g} ms"
    around = [f"stragglers {'+'.join(map(str, case.stragglers))}"] * bool(case.stragglers)
    around += ["failures"] * (min(case.failures.mtbf_s, case.failures.job_mtbf_s) < math.inf)
    parts = [f"{case.ranks} ranks", case.platform.name, size, *around, "bars: seeds and network models"]
    caption = " · ".join(parts)
    asked = sorted({row.choice.every for row in found.rows})
    style.save_as(fidelity.advice_figure(curves, asked, found.target, caption), picture)


def parser() -> Parser:
    """Return the options of `spawnsim advise`.

    Returns:
        The parser.
    """
    parser = Parser(
        prog="spawnsim advise",
        description="Rank policies and cadences on a cluster by goodput, in timing alone. docs/clusters.md says what "
        "is simulated, and what is not.",
    )
    add = parser.add_argument
    add("-n", "--ranks", type=int, required=True, metavar="N", help="how many ranks")
    add("--platform", metavar="NAME|FILE", help="default: as of `spawnsim run`")
    add("--model", required=True, metavar="BYTES", help="one model, such as '123 MB'")
    add("--step", metavar="TIME", help="of a compute step, such as 300ms; default: the platform's")
    policies = f"{', '.join(POLICIES)}; or all; repeatable; default: average"
    add("--policy", action="append", default=[], metavar="LIST", help=policies)
    add("--every", default="1,8,32,128", metavar="LIST", help="steps between exchanges; default: 1,8,32,128")
    add(
        "--compression",
        default="1",
        metavar="LIST",
        help="how many times smaller what travels is; default: 1",
    )
    add(
        "--straggler",
        metavar="KIND",
        help=f"such as {rates.PERSISTENT} (persistent, realistic); default: the platform's",
    )
    add(
        "--failures",
        metavar="NAME|TIME",
        help=f"{', '.join(rates.FAILURES)}, or one rank's mean time between failures",
    )
    add(
        "--ranks-per-node",
        type=int,
        default=8,
        metavar="N",
        help="that fail together, for a name; default: 8",
    )
    add("--detection", default="30s", metavar="TIME", help="until a death is noticed; default: 30s")
    add("--restart", default="5min", metavar="TIME", help="until a rank is back; default: 5min")
    add("--seeds", type=int, default=3, metavar="N", help="default: 3")
    add("--rounds", type=int, default=4, metavar="N", help="exchanges simulated for each choice; default: 4")
    add(
        "--target",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="of time computing, for break-even; default: 0.9",
    )
    add("--budget", type=float, metavar="AMOUNT", help="node-hours, or money where --price is given")
    add("--price", type=float, metavar="AMOUNT", help="of a node of --ranks-per-node ranks for an hour")
    add(
        "--train", type=int, default=0, metavar="STEPS",
        help="train a small model for so many steps under each choice, and rank by the time until all are as good; "
        "default: 0, none",
    )  # fmt: skip
    add("--picture", type=picture, metavar="FILE", help="draw goodput against cadence: .png, .pdf or .svg")
    add("--json", action="store_true", help="print one JSON object")
    return parser
