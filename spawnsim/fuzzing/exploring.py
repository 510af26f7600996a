"""Exploration: run a program under every schedule, up to a number of deviations from virtual time's own.

A *schedule* is the outcome of all decisions of a run (`spawnsim.virtual.choices`). Each run yields records that take
one of its decisions differently and keep every decision that does not depend on it: *branches*. Schedules that differ
only in the order of independent events have the same outcomes, so they are one schedule. A branch is skipped if a
schedule seen before agrees with it, since that schedule's own branches lead on: no schedule is run twice. Records are
run in the order of their deviations, so the first failure has the fewest.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from spawnsim.fuzzing.campaign import Failure, Target, _Here, _silent, attempt
from spawnsim.fuzzing.cases import Case
from spawnsim.fuzzing.coverage import Reached
from spawnsim.run.process_setup import one_thread
from spawnsim.study.executors import pool
from spawnsim.virtual.choices import Key, Outcome, parsed, written
from spawnsim.virtual.choosing import chosen

PORTION = 8  # records that a process receives at once


class Explored(NamedTuple):
    """The outcome of one record.

    Attributes:
        schedule: all choices; None: the record is infeasible.
        branches: records that take one of its decisions differently.
        failure: if it failed.
        ended: whether its faults have ended it.
        reached: its coverage.
        untried: kinds of outcomes that are no branches, since there are too many.
    """

    schedule: dict[Key, Outcome] | None
    branches: list[dict[Key, Outcome]]
    failure: Failure | None
    ended: bool
    reached: Reached
    untried: frozenset[str] = frozenset()


def explore(target: Target, case: Case, records: Sequence[str], *, expand: bool = True) -> list[Explored]:
    """Run records of choices of one case."""
    with one_thread(), chosen(), _silent() if len(records) > 1 else nullcontext():
        return [_explore(target, replace(case, choices=record), expand) for record in records]


def _explore(target: Target, case: Case, expand: bool) -> Explored:
    failure, watch, ended = attempt(target, case, census=not case.choices and not case.faults)
    choices, reached = watch.choices, watch.reached()
    if choices is None:  # it failed before it began
        return Explored({}, [], failure, ended, reached)
    if watch.infeasible:
        return Explored(None, [], failure, ended, reached)
    branches = list(choices.branches()) if expand else []
    return Explored(choices.leaf(), branches, failure, ended, reached, frozenset(choices.untried))


class Seen:
    """The schedules seen so far; answers whether one of them agrees with a record."""

    def __init__(self) -> None:
        self.count = 0
        self._with: dict[tuple[Key, Outcome], int] = {}  # bit sets of schedules

    def agrees(self, record: dict[Key, Outcome]) -> bool:
        """Whether a schedule has all outcomes of a record."""
        found = (1 << self.count) - 1
        for item in record.items():
            found &= self._with.get(item, 0)
            if not found:
                return False
        return bool(found)

    def add(self, schedule: dict[Key, Outcome]) -> None:
        bit = 1 << self.count
        self.count += 1
        for item in schedule.items():
            self._with[item] = self._with.get(item, 0) | bit


@dataclass
class Covered:
    """The findings of an exploration.

    Attributes:
        cases: number of cases.
        schedules: number of schedules by deviations.
        infeasible: records that no real run can follow.
        runs: all runs.
        left: records that were found and not run.
        complete: deviations up to which every schedule was run; inf: all schedules.
        ended_early: whether a failure or a limit has ended it.
        failures: failures of different kinds, each with the fewest deviations.
        ended: schedules that faults have ended as MPI's rules allow.
        seconds: wall time.
        reached: the coverage of the schedules.
        untried: kinds of outcomes that were not tried, since there are too many.
    """

    cases: int = 0
    schedules: Counter[int] = field(default_factory=Counter)
    infeasible: int = 0
    runs: int = 0
    left: int = 0
    complete: float = math.inf
    ended_early: bool = False
    failures: dict[tuple[str, str], Failure] = field(default_factory=dict)
    small: dict[tuple[str, str], Failure] = field(default_factory=dict)
    ended: int = 0
    seconds: float = 0.0
    reached: Reached = field(default_factory=Reached)
    untried: set[str] = field(default_factory=set)


class Exploration:
    """The exploration of one case."""

    def __init__(self, target: Target, case: Case, deviations: float, found: Covered) -> None:
        self.target, self.case, self.most = target, case, deviations
        self.found, self._seen = found, Seen()
        self._waiting: deque[tuple[int, dict[Key, Outcome]]] = deque([(0, {})])
        self._queued: set[str] = {""}
        self._running: Counter[int] = Counter()  # records that were taken and not yet added, by deviations

    def take(self) -> tuple[int, list[str]]:
        """Return records to run, and their number of deviations; none if there is none at present."""
        records: list[str] = []
        depth = 0
        while self._waiting and len(records) < PORTION and (not records or self._waiting[0][0] == depth):
            depth, record = self._waiting.popleft()
            if not self._seen.agrees(record):
                records.append(written(record))
        self._running[depth] += len(records)
        return depth, records

    def add(self, depth: int, results: Sequence[Explored]) -> None:
        self._running[depth] -= len(results)
        for each in results:
            self.found.runs += 1
            self.found.ended += each.ended
            if each.schedule is None:
                self.found.infeasible += 1
                continue
            if self._seen.agrees(each.schedule):
                continue  # two processes have found it at once
            self._seen.add(each.schedule)
            self.found.schedules[depth] += 1
            self.found.reached.gather(each.reached)
            self.found.untried |= each.untried
            if each.failure is not None:
                self.found.failures.setdefault(each.failure.key, each.failure)
            if depth < self.most:
                for branch in each.branches:
                    self._enqueue(depth + 1, branch)

    def _enqueue(self, depth: int, record: dict[Key, Outcome]) -> None:
        text = written(record)
        if text not in self._queued and not self._seen.agrees(record):
            self._queued.add(text)
            self._waiting.append((depth, record))

    @property
    def depth(self) -> float:
        """The deviations of the next record; inf if there is none."""
        return self._waiting[0][0] if self._waiting else math.inf

    @property
    def running(self) -> float:
        """The fewest deviations of the records that are being run; inf if there are none."""
        return min(+self._running, default=math.inf)

    def close(self) -> None:
        """Note how much is left: records that wait, and records that an interrupt has ended."""
        left = sum(not self._seen.agrees(record) for _, record in self._waiting)
        self.found.left += left + self._running.total()
        self.found.complete = min(self.found.complete, self.depth - 1, self.running - 1)


def crash_points(target: Target, case: Case) -> Iterator[tuple[int, float]]:
    """Yield ranks and times: for each rank a time between any two of its events in the schedule of virtual time."""
    _, watch, _ = attempt(target, case)
    times_s = [] if watch.choices is None else watch.choices.clocks.times_s
    for rank, events_s in enumerate(times_s):
        moments = sorted({0.0, *events_s})
        for one_s, other_s in pairwise(moments):
            yield rank, (one_s + other_s) / 2


class Exhaustion:
    """An exploration of several cases of a program, one after the other, with a common limit."""

    def __init__(
        self, target: Target, *, deviations: float = math.inf, jobs: int = 0, runs: float = math.inf,
        seconds: float = math.inf, progress: Callable[[Covered], None] = lambda found: None,
        found: Covered | None = None,
    ) -> None:  # fmt: skip
        """Prepare it.

        Args:
            target: the program.
            deviations: from the schedule of virtual time.
            jobs: parallel processes; 0: run in this one.
            runs: number of runs after which no new run begins.
            seconds: wall time after which no new run begins.
            progress: receives all findings so far, repeatedly.
            found: receives the findings as they come, so that they survive Ctrl-C (default: a new object).
        """
        self._target, self._most, self._jobs, self._runs = target, deviations, jobs, runs
        self._progress, self._began_s = progress, time.monotonic()
        self._due_s = self._began_s + seconds
        self.found = Covered() if found is None else found

    def run(self, cases: Iterable[Case]) -> Covered:
        """Run every schedule of each case; end at the first failure, or at a limit."""
        found = self.found
        found.ended_early = True
        with pool(self._jobs, fresh=False) if self._jobs > 0 else _Here() as executor:
            for case in cases:
                if not found.cases:
                    self._target.load(case.parameters)  # raises an error of the file itself once
                found.cases += 1
                state = Exploration(self._target, case, self._most, found)
                try:
                    self._case(state, executor)
                finally:
                    state.close()
                if self._is_over():
                    break
            else:
                found.ended_early = False
            tasks = {
                key: executor.submit(simplest, self._target, each) for key, each in found.failures.items()
            }
            for key, task in tasks.items():
                found.small[key] = task.result()
        found.seconds = time.monotonic() - self._began_s
        return found

    def _is_over(self) -> bool:
        found = self.found
        return bool(time.monotonic() > self._due_s or found.runs >= self._runs or found.failures)

    def _case(self, state: Exploration, executor: Executor) -> None:
        waiting: dict[Future[list[Explored]], int] = {}
        while True:
            while not self._is_over() and len(waiting) < max(2 * self._jobs, 1):
                # Records with more deviations wait for those with fewer: then no schedule is counted too deep.
                if state.depth > state.running:
                    break
                depth, records = state.take()
                if not records:
                    break
                waiting[executor.submit(explore, self._target, state.case, records)] = depth
            if not waiting:
                break
            for each in wait(waiting, return_when=FIRST_COMPLETED).done:
                state.add(waiting.pop(each), each.result())
            self.found.seconds = time.monotonic() - self._began_s
            self._progress(self.found)


def simplest(target: Target, failure: Failure) -> Failure:
    """Return the same failure with the fewest choices: those without which it does not occur."""
    best, part = failure, 0
    record = list(parsed(failure.case.choices or "").items())
    with one_thread(), _silent():
        size = max(len(record) // 2, 1)
        while record and size:
            part = 0
            while part < len(record):
                fewer = record[:part] + record[part + size :]
                case = replace(failure.case, choices=written(dict(fewer)))
                (found,) = explore(target, case, [case.choices or ""], expand=False)
                if found.failure is not None and found.failure.is_same(failure):
                    best, record = found.failure, fewer
                else:
                    part += size
            size //= 2
    return best
