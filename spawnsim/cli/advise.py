"""`spawnsim advise`: which policy and cadence suit a cluster: a ranking by goodput, in timing alone."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spawnsim import units
from spawnsim.cli import print_note_above_bar
from spawnsim.cli.declaring import Command, Json, Picture, PlatformName, Ranks, option
from spawnsim.errors import ParameterError
from spawnsim.fidelity.advising import Advice, Budget, Need, advise, by_time, converge, report
from spawnsim.fidelity.goodput import POLICIES, Case, Choice, Failures
from spawnsim.models.compute import Fixed, parse_stragglers
from spawnsim.models.faults import rates
from spawnsim.models.platform import load_platform
from spawnsim.options import nearest, settings_of
from spawnsim.run.process_setup import stoppable

MOST_SEEDS = 10_000
ALL = "all"  # in place of policy names
SETTINGS: dict[str, tuple[Any, Callable[[str], Any]]] = {
    "detection": (30.0, units.seconds),
    "restart": (300.0, units.seconds),
    "ranks_per_node": (8, units.whole),
    "rounds": (4, units.whole),
    "target": (0.9, units.number),
    "budget": (None, units.number),
    "price": (None, units.number),
}
"""Name of a setting -> its default, and its parser."""


@dataclass(kw_only=True)
class Advise(Command):
    """Rank policies and cadences on a cluster by goodput, from timing alone. docs/clusters.md states the limits of the
    simulation.
    """

    examples = ("spawnsim advise -n 1024 --model '14 GB' --compute 300ms --policy average --failures llama3",)
    ranks: Ranks
    platform: PlatformName = None
    model: str = option("one model, such as '123 MB'", "BYTES", required=True)
    compute: str | None = option("duration of a compute step, such as 300ms; default: the platform's", "S")
    policy: Sequence[str] = option(
        f"{', '.join(POLICIES)}; or all; repeatable; default: average",
        "LIST",
        names=(*POLICIES, ALL),
        default=("average",),
    )
    every: str = option("steps between exchanges", "LIST", default="1,8,32,128")
    compression: str = option("compression ratio of the transmitted model", "LIST", default="1")
    straggler: str | None = option(
        f"such as {rates.PERSISTENT} (persistent, realistic); default: the platform's", "KIND"
    )
    failures: str | None = option(
        f"{', '.join(rates.FAILURES)}, or one rank's mean time between failures", "NAME|TIME"
    )
    seeds: int = option("how many seeds", "N", default=3)
    train: int = option(
        "train a small model for so many steps under each choice, and rank by the time until all are as good; "
        "default: none",
        "STEPS",
        default=0,
    )
    set: Sequence[str] = option(
        "detection=30s (until a death is noticed), restart=5min (until a rank is back), ranks_per_node=8 (that "
        "fail together), rounds=4 (exchanges simulated for each choice), target=0.9 (share of time computing, for "
        "break-even), budget=AMOUNT (node-hours, or money with price=AMOUNT of a node's hour); repeatable",
        "NAME=VALUE",
        default=(),
    )
    picture: Picture = None
    json: Json = False

    def __call__(self) -> int:
        known = {name: read for name, (_, read) in SETTINGS.items()}
        given = settings_of(self.set, known, "advise")
        how = {name: default for name, (default, _) in SETTINGS.items()} | given
        if how["price"] is not None and how["budget"] is None:
            raise ParameterError("--set price needs a budget: add --set budget=AMOUNT")
        # A step takes its stated time, regardless of the number of ranks on a node.
        platform = dataclasses.replace(load_platform(self.platform), cores=None)
        model_nbytes = units.nbytes(self.model)
        step = units.seconds(self.compute) if self.compute else _step(platform.step)
        stragglers = platform.stragglers if self.straggler is None else parse_stragglers(self.straggler)
        failures = dataclasses.replace(
            _failures(self.failures, how["ranks_per_node"]),
            detection_s=how["detection"],
            restart_s=how["restart"],
        )
        case = Case(
            platform,
            self.ranks,
            model_nbytes,
            step,
            stragglers=tuple(stragglers),
            failures=failures,
            rounds=how["rounds"],
        )
        choices = [
            Choice(policy, every, ratio)
            for policy in _policies(self.policy)
            for every in _numbers("--every", self.every, int)
            for ratio in _numbers("--compression", self.compression, float)
        ]
        if not 1 <= self.seeds <= MOST_SEEDS:
            raise ParameterError(f"--seeds {self.seeds}: give at least 1, at most {MOST_SEEDS:,}")
        seeds, needs = range(self.seeds), None
        with stoppable():
            found = advise(
                case, choices, seeds=seeds, target=how["target"], noted=_bar, say=print_note_above_bar
            )
            if self.train:
                needs = converge(case, found, steps=self.train, seeds=seeds)
        budget = None
        if how["budget"] is not None:
            budget = Budget(how["budget"], how["ranks_per_node"], how["price"])
        more = _more(found, case, budget, needs)
        text = (
            json.dumps(document(found) | more)
            if self.json
            else "\n".join([report(found), *_detail_lines(more)])
        )
        sys.stdout.write(text + "\n")
        if self.picture:
            draw(found, case, self.picture)
        return 0


def _bar(choices: Sequence[Choice]) -> Iterable[Choice]:
    """Iterate over the choices with a bar on a terminal: some take half a minute."""
    from tqdm import tqdm

    bar: Iterable[Choice] = tqdm(choices, unit=" choices", leave=False, dynamic_ncols=True, disable=None)
    return bar


def _step(step: object) -> float:
    if not isinstance(step, Fixed):
        raise ParameterError("this platform states no compute step: give --compute, such as 300ms")
    return step.duration_s


def _more(
    found: Advice, case: Case, budget: Budget | None, needs: dict[Choice, Need] | None
) -> dict[str, Any]:
    """Return the results for a budget and for convergence, as JSON values."""
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


def _detail_lines(more: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that report these results."""
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
        yield "\nranked by the time until a small training run (digits, skewed shards) reaches the worst final quality:"
        yield units.text_table(("", "policy", "steps", "time", "interval"), lines, left=2)


def _failures(text: str | None, per_node: int) -> Failures:
    """Return the failures for a preset's name, or for one rank's mean time between failures."""
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
    words = [word.strip() for text in texts for word in text.split(",")]
    wrong = [word for word in words if word not in (*POLICIES, ALL)]
    if wrong:
        hint = nearest(wrong[0], (*POLICIES, ALL)) or f"{ALL} selects all of them"
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
    """Return the advice as JSON values."""
    rows = [dataclasses.asdict(row) for row in found.rows]
    changes = {
        name: [[str(now), str(before)] for now, before in found.changes(name)] for name in found.rows[0].worse
    }
    return {
        # "every" is the requested value.
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
