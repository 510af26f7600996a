"""`spawnsim fuzz FILE`: draw cases, run them, report what broke, how often each fault struck, and how to replay it.

Every dimension of a case is an option that can be fixed. The command that replays a failure is therefore this one,
with all options fixed.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from spawnsim.cli.declaring import (
    Command,
    Json,
    PlatformName,
    ProgramPath,
    Quiet,
    Settings,
    Whole,
    flag,
    number_of_jobs,
    option,
)
from spawnsim.cli.listing import program_file
from spawnsim.errors import ParameterError
from spawnsim.fuzzing.campaign import Failure, Found, Target, campaign
from spawnsim.fuzzing.cases import DEADLINE_S, DEFAULT_FAULTS, SURVIVED, Space
from spawnsim.fuzzing.exploring import Covered, Exhaustion, crash_points
from spawnsim.options import parameters
from spawnsim.run.process_setup import stoppable
from spawnsim.run.program import ProgramFile, refuse_arguments
from spawnsim.units import counted, limit, seconds

NONE = ("none", "")


@dataclass(kw_only=True)
class Fuzz(Command):
    """Run a file under many seeds, fault plans, delays and orders of simultaneous events; say what breaks, in the
    smallest case, with the command that replays it. An unmodified program's arguments come after --.
    """

    takes_arguments = True
    examples = (
        "spawnsim fuzz train.py --runs 200 -n 2-8 --faults 'crash; delay' --limit 10min",
        "spawnsim fuzz train.py --exhaustive --deviations 2 -n 4",
    )
    file: ProgramPath
    runs: int | None = option("cases (default: 1000; with --exhaustive, runs: no limit)", "N")
    seed: int = option("of the first case; each further case adds 1 (default: 0)", "K", default=0)
    ranks: str = option(
        "numbers of ranks to draw from, such as 8, 2-8 or 4,8,64", "LIST", "-n", default="2-8"
    )
    faults: str | None = option(
        "kinds of fault to draw, and faults of every case, separated by ';': 'crash; pause', 'crash:3@2s', 'none' "
        f"(default: '{DEFAULT_FAULTS}', and restart with --survive)",
        "PLAN",
    )
    ties: str | None = option(
        "orders of simultaneous events: fifo, reverse, random, random:SEED (default: all)", "LIST"
    )
    straggler: str | None = option("separated by ';' (default: 'none;lognormal:0.3')", "LIST")
    platform: PlatformName = None
    compute: str | None = option("seconds of a comm.compute() without an argument", "S")
    deadline: float | None = option(
        f"seconds that one call may wait (default: {DEADLINE_S:g}; unmodified or --exhaustive: no limit)",
        "S",
        parse=limit,
    )
    set: Settings = ()
    alive: str | None = option(
        "virtual seconds after the last fault in which each rank must make progress; none: no check (default: some, "
        "in half of the cases)",
        "S",
    )
    survive: bool = flag(
        "the program promises to continue when ranks die and calls exceed deadlines: an end by either is a failure, too"
    )
    exhaustive: bool = flag(
        "run every schedule instead of drawn cases: all outcomes of wildcards, of Waitany and tests, and all orders of "
        "accesses to windows. 'crash' in --faults: one crash at any point"
    )
    deviations: int | None = option(
        "with --exhaustive: schedules with at most D decisions taken otherwise than in virtual time (default: all)",
        "D",
    )
    pct: int | None = option(
        "draw priorities of ranks that find bugs of this depth with a known probability, in place of delays and drawn "
        "faults (default: no)",
        "DEPTH",
    )
    choices: str | None = option("decisions of every case, as --exhaustive prints them", "RECORD")
    races: bool = flag(
        "accesses to exposed memory that nothing orders are failures, as in `spawnsim run --races`"
    )
    whole: Whole = False
    jobs: int = option(
        "cases at once; 0: in this process (default: one per core)",
        "N",
        parse=number_of_jobs,
        default=os.cpu_count() or 1,
    )
    limit: str | None = option("start no further case after this time: seconds, or a text such as 10min", "S")
    json: Json = False
    quiet: Quiet = False

    def __call__(self) -> int:
        self.file = program_file(self.file)
        program = ProgramFile.read(self.file, whole=self.whole)
        if not program.is_whole:
            refuse_arguments(self.arguments)
        if (self.runs is not None and self.runs < 1) or self.seed < 0:
            raise ParameterError("--runs must be at least 1, --seed at least 0")
        space = _space(self, unmodified=program.is_whole)
        if self.pct is not None and (self.pct < 1 or self.exhaustive):
            raise ParameterError("--pct must be at least 1, and draws cases: without --exhaustive")
        if self.exhaustive:
            if self.choices is not None:
                raise ParameterError("--choices gives one schedule: without --exhaustive, which tries all")
            return self._explore(space)
        if self.deviations is not None:
            raise ParameterError("--deviations bounds an exploration: give --exhaustive, too")
        self.runs = 1000 if self.runs is None else self.runs
        # A pool takes two seconds to start, in which one process completes a few cases.
        jobs = self.jobs if self.runs > 1 else 0
        found = Found()
        with (
            self._shown(found),
            stoppable(),
            _bar(self.runs, shown=sys.stderr.isatty() and not self.quiet) as progress,
        ):
            campaign(
                Target(self.file, self.whole), space, range(self.seed, self.seed + self.runs), jobs=jobs,
                # The single case of a command that replays a failure is already minimal.
                shrink=self.runs > 1, progress=progress,
                seconds=math.inf if self.limit is None else seconds(self.limit), found=found,
            )  # fmt: skip
            if found.runs == found.infeasible:
                raise ParameterError(
                    f"--choices {self.choices}: no run of {self.file} can follow it. It is the record of another "
                    "program, perhaps before a change, or of other parameters"
                )
        return 1 if found.failures else 0

    def _explore(self, space: Space) -> int:
        """Run all schedules."""
        target, most = Target(self.file, self.whole), math.inf if self.deviations is None else self.deviations
        found = Covered()
        with (
            self._shown(found),
            stoppable(),
            _counter(shown=sys.stderr.isatty() and not self.quiet) as progress,
        ):
            Exhaustion(
                target, deviations=most, jobs=self.jobs, runs=self.runs or math.inf, progress=progress,
                seconds=math.inf if self.limit is None else seconds(self.limit), found=found,
            ).run(space.every(partial(crash_points, target)))  # fmt: skip
        return 1 if found.failures else 0

    @contextmanager
    def _shown(self, found: Found | Covered) -> Iterator[None]:
        """Print the findings after the block, also if a signal has ended it."""
        try:
            yield
        except KeyboardInterrupt:
            if found.runs:
                self._print(found)
            raise
        self._print(found)

    def _print(self, found: Found | Covered) -> None:
        file = str(self.file)
        if isinstance(found, Covered):
            print(json.dumps(_covered(found, file)) if self.json else explored(found, file, self.deviations))
        else:
            print(json.dumps(document(found, file)) if self.json else report(found, file, self.pct or 0))


def _space(asked: Fuzz, *, unmodified: bool) -> Space:
    """Return the space of cases that the options describe."""
    world: dict[str, Any] = {
        name: value
        for name, value in (
            ("platform", asked.platform),
            ("compute", asked.compute),
            ("deadline_s", asked.deadline),
        )
        if value is not None
    }
    if (
        unmodified or asked.exhaustive
    ):  # written for an MPI that knows no deadlines; a forced choice may wait long
        world = {"deadline_s": math.inf} | world
    if asked.races:
        world["races"] = True
    if asked.arguments:
        world["argv"] = tuple(asked.arguments)
    how: dict[str, Any] = {"choices": asked.choices, "depth": asked.pct or 0}
    if asked.exhaustive:  # one calm case, unless options give more
        how |= {"stragglers": (None,), "ties": ("fifo",)}
    if asked.straggler is not None:
        how["stragglers"] = [None if word in NONE else word for word in asked.straggler.split(";")]
    if asked.alive is not None:
        how["alive_s"] = math.inf if asked.alive in NONE else seconds(asked.alive)
    if asked.ties is not None:
        how["ties"] = asked.ties.split(",")
    return Space(
        ranks=numbers(asked.ranks),
        faults=_faults(asked),
        parameters=parameters(asked.set), world=world, survive=asked.survive, **how,
    )  # fmt: skip


def _faults(asked: Fuzz) -> str:
    if asked.faults is not None:
        return asked.faults
    return "" if asked.exhaustive or asked.pct else DEFAULT_FAULTS + SURVIVED * asked.survive


def numbers(text: str) -> list[int]:
    """Return the numbers of ranks that a text names: "2-8", "4,8,64".

    >>> numbers("2-4,8")
    [2, 3, 4, 8]
    """
    found: list[int] = []
    for word in text.split(","):
        first, _, last = word.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise ParameterError(f"--ranks {text}: write 8, 2-8 or 4,8,64")
        found += range(int(first), int(last or first) + 1)
    return found


def report(found: Found, file: str, depth: int = 0) -> str:
    """Return the findings of a campaign as text; `depth`, of its randomized priorities, if it has any."""
    parts = [_failure(found, key, file) for key in sorted(found.failures)]
    parts += found.report()
    if found.steps:
        parts.append(_chances(found, depth))
    rate = f", {found.runs / found.seconds * 60:,.0f} a minute" if found.seconds > 1 else ""
    ended = f"; {found.ended:,} were ended by their faults, as MPI permits" if found.ended else ""
    wrong = (
        f"; {found.infeasible:,} cannot follow the record of choices, and prove nothing"
        if found.infeasible
        else ""
    )
    broken = sum(found.counts.values())
    verdict = f"{broken:,} failed, in {counted(len(found.failures), 'way')}" if broken else "nothing broke"
    parts.append(f"{counted(found.runs, 'case')} in {found.seconds:.1f} s{rate}: {verdict}{ended}{wrong}")
    return "\n\n".join(parts)


def _chances(found: Found, depth: int) -> str:
    """Return the published probability with which randomized priorities find a bug."""
    ranks, steps = max(found.steps.items(), key=lambda each: each[0] * each[1] ** (depth - 1))
    one = 1 / (ranks * max(steps, 1) ** (depth - 1))
    return (
        f"priorities: {counted(ranks, 'rank')} and {counted(steps, 'step')}; a case finds a given bug of depth {depth} "
        f"with a probability of at least 1/({ranks}·{steps:,}^{depth - 1}) = {one:.3g}, "
        f"{counted(found.runs, 'case')} with {1 - (1 - one) ** found.runs:.3g}"
    )


def _failure(found: Found, key: tuple[str, str], file: str) -> str:
    failure, small = found.failures[key], found.small.get(key)
    where = f" at {failure.place}" if failure.place else ""
    shrunk = small is not None and small.case != failure.case
    lines = [
        f"{failure.what}{where}: {found.counts[key]:,} of {found.runs:,} cases", failure.message, failure.table,
        f"{'as found' if shrunk else 'replay'}: {failure.case.command(file)}",
    ]  # fmt: skip
    if small is not None and shrunk:
        lines += [
            "the same error in the smallest case:", small.message, small.table,
            f"replay: {small.case.command(file)}",
        ]  # fmt: skip
    return "\n".join(filter(None, lines))


def explored(found: Covered, file: str, most: int | None) -> str:
    """Return the findings of an exploration as text."""
    whole = Found(
        runs=found.runs, failures=found.failures, small=found.small, counts=Counter(found.failures.keys())
    )
    parts = [_failure(whole, key, file) for key in sorted(found.failures)]
    parts += found.reached.report()
    schedules = sum(found.schedules.values())
    bound = "" if most is None else f" with at most {counted(most, 'deviation')}"
    within = f" in {counted(found.cases, 'case')}" if found.cases > 1 else ""
    if found.failures:
        verdict = f"{counted(schedules, 'schedule')}{within} until the first failure"
    elif not found.left and not found.ended_early:
        verdict = f"all {counted(schedules, 'schedule')}{bound}{within} pass"
    else:
        done = [f"{number:,} with {depth}" for depth, number in sorted(found.schedules.items())]
        verdict = (
            f"{counted(schedules, 'schedule')}{within} pass, by deviations: {', '.join(done)}; "
            f"at least {found.left:,} more were found and not run{bound and ', of those'}{bound}"
        )
        if found.complete >= 0:
            verdict += f"; complete up to {counted(int(found.complete), 'deviation')}"
    rate = f", {found.runs / found.seconds * 60:,.0f} runs a minute" if found.seconds > 1 else ""
    ended = f"; {found.ended:,} were ended by their faults, as MPI permits" if found.ended else ""
    wrong = f"; {found.infeasible:,} records proved infeasible" if found.infeasible else ""
    untried = f"; not tried: {', '.join(sorted(found.untried))}" if found.untried else ""
    return "\n\n".join([*parts, f"{verdict} ({found.seconds:.1f} s{rate}){ended}{wrong}{untried}"])


def _covered(found: Covered, file: str) -> dict[str, Any]:
    """Return the findings of an exploration as JSON values."""
    return {
        "cases": found.cases, "schedules": dict(sorted(found.schedules.items())), "runs": found.runs,
        "infeasible": found.infeasible, "left": found.left, "ended": found.ended, "seconds": found.seconds,
        "complete": None if math.isinf(found.complete) else found.complete, "untried": sorted(found.untried),
        **found.reached.document(),
        "failures": [
            {"what": small.what, "place": small.place, "message": small.message, "choices": small.case.choices,
             "replay": small.case.command(file)}
            for _, small in sorted((found.failures | found.small).items())
        ],
    }  # fmt: skip


def document(found: Found, file: str) -> dict[str, Any]:
    """Return the findings of a campaign as JSON values."""

    def summary(failure: Failure) -> dict[str, Any]:
        return asdict(failure) | {
            "case": json.loads(failure.case.to_json()),
            "replay": failure.case.command(file),
        }

    return {
        "runs": found.runs, "seconds": found.seconds, "ended": found.ended, "infeasible": found.infeasible,
        **found.document(),
        "failures": [
            summary(failure) | {"count": found.counts[key], "small": summary(found.small.get(key, failure))}
            for key, failure in sorted(found.failures.items())
        ],
    }  # fmt: skip


@contextmanager
def _counter(*, shown: bool) -> Iterator[Callable[[Covered], None]]:
    """Give a function that shows the progress of an exploration."""
    from tqdm import tqdm

    with tqdm(unit=" schedules", leave=False, dynamic_ncols=True, disable=not shown) as bar:
        yield lambda found: bar.update(sum(found.schedules.values()) - bar.n) and None


@contextmanager
def _bar(runs: int, *, shown: bool) -> Iterator[Any]:
    """Give a function that shows the campaign's progress."""
    from tqdm import tqdm

    with tqdm(total=runs, unit=" cases", leave=False, dynamic_ncols=True, disable=not shown) as bar:

        def tell(found: Found) -> None:
            bar.set_postfix_str(f"{len(found.failures)} failures", refresh=False)
            bar.update(found.runs - bar.n)

        yield tell
