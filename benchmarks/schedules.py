"""Explored schedules: speed, reduction, and planted bugs found; and the policies with one crash anywhere.

    PYTHONPATH=.:tests python benchmarks/schedules.py            # speed, reduction, twenty planted bugs
    PYTHONPATH=.:tests python benchmarks/schedules.py --drawn 10000       # cases that find the bugs in programs/deep
    PYTHONPATH=.:tests python benchmarks/schedules.py --policies --seconds 60

Speed is in schedules per minute of one core's time. The full tree of a task farm has one leaf for each order of its
calls: each send and each receive is a step, and any rank that can take its next step may be the one that acts.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from support.random_policies import EVERY

from spawnsim.comm import ANY_SOURCE, Status
from spawnsim.fuzzing.campaign import Target, attempt, campaign
from spawnsim.fuzzing.cases import Case, Space
from spawnsim.fuzzing.exploring import Covered, Exhaustion, crash_points
from spawnsim.units import text_table
from spawnsim.virtual.choices import parsed

PROGRAMS = Path(__file__).parents[1] / "tests" / "programs"
SURVIVORS = ("own_step", "world_size")  # programs that promise to continue without dead ranks
LONG = ("aliased_models", "stale_donor", "clock_decides")  # bugs that few iterations do not show
SMALL = ("cancel_missed", "late_register", "two_locks")  # programs of three ranks


def ten_messages(comm: Any) -> None:
    """Send nine messages from three ranks to the fourth, and one back."""
    if comm.rank == 0:
        for _ in range(9):
            comm.recv(source=ANY_SOURCE)
        comm.send(None, 1)
    else:
        for number in range(3):
            comm.send(number, 0)
        if comm.rank == 1:
            comm.recv(source=0)


def farm(comm: Any, tasks: int = 6) -> None:
    """Give a task to each worker, and another to each worker that answers."""
    status, given = Status(), 0
    if comm.rank:
        while comm.recv(source=0) is not None:
            comm.send(None, 0)
        return
    for worker in range(1, comm.size):
        comm.send(given, worker)
        given += 1
    for _ in range(tasks):
        comm.recv(source=ANY_SOURCE, status=status)
        comm.send(given if given < tasks else None, status.source)
        given += 1


def orders(workers: int, tasks: int) -> int:
    """Return the number of orders of the calls of `farm`."""

    @cache
    def count(given: int, answered: int, owed: int, states: tuple[str, ...]) -> int:
        """Count from a state; `owed`: the worker to which rank 0 sends next, or -1. Workers: i)dle, w)ith a task sent,
        b)usy, a)nswered, e)nd sent, d)one.
        """

        def after(worker: int, state: str) -> tuple[str, ...]:
            return (*states[:worker], state, *states[worker + 1 :])

        found = 0
        if given < workers:  # the first tasks
            found += count(given + 1, answered, -1, after(given, "w"))
        elif owed >= 0:
            found += count(given + 1, answered, -1, after(owed, "w" if given < tasks else "e"))
        elif answered < tasks:
            for worker, state in enumerate(states):
                if state == "a":
                    found += count(given, answered + 1, worker, after(worker, "i"))
        for worker, state in enumerate(states):
            if state in "wbe":
                step = {"w": "b", "b": "a", "e": "d"}[state]
                found += count(given, answered, owed, after(worker, step))
        return found or int(all(state == "d" for state in states))

    return count(0, 0, -1, ("i",) * workers)


def explore(program: Any, ranks: int, **how: Any) -> tuple[Covered, float]:
    """Explore one case; return the findings, and the seconds of processor time."""
    began_s = time.process_time()
    most = how.pop("most", math.inf)
    case = Case(seed=0, ranks=ranks, choices="", **({"world": {"deadline_s": math.inf}} | how))
    return Exhaustion(Target(program), deviations=most).run([case]), time.process_time() - began_s


def ranks_of(path: Path) -> int:
    """Return the number of ranks of a program with a planted bug."""
    return 4 if path.parent.name == "deep" and path.stem not in SMALL else 3


def drawn(cases: int) -> None:
    """Print how many of the cases that a campaign draws fail, for each deep bug."""
    for path in sorted((PROGRAMS / "deep").glob("*.py")):
        space = Space(ranks=[ranks_of(path)], world={"deadline_s": math.inf})
        found = campaign(
            Target(path), space, range(cases), jobs=os.cpu_count() or 1, shrink=False, most=cases
        )
        print(
            f"{path.stem}: {found.counts.total():,} of {found.runs:,} cases fail ({found.seconds:.0f} s)",
            flush=True,
        )


def bug(path: Path) -> tuple[str, ...]:
    """Return the row of a program with a planted bug."""
    name, began_s = path.stem, time.process_time()
    iterations = {} if path.parent.name == "deep" else {"iterations": 20 if name in LONG else 3}
    space = Space(
        ranks=[ranks_of(path)], ties=["fifo"], parameters=iterations,
        faults="crash" if name in SURVIVORS else "", survive=name in SURVIVORS, world={"deadline_s": math.inf},
        stragglers=["lognormal:0.3" if name == "clock_decides" else None],
    )  # fmt: skip
    target = Target(path)
    found = Exhaustion(target).run(space.every(lambda case: crash_points(target, case)))
    small = next(iter(found.small.values()), None)
    left = "not found" if small is None else f"{len(parsed(small.case.choices or ''))}"
    return name, f"{found.runs:,}", left, f"{time.process_time() - began_s:.1f} s"


def two_rounds(target: Target, space: Space) -> Space:
    """Return a space with the fewest iterations after which the policy has averaged twice as often as in a round."""
    first = 0
    for iterations in range(2, 31):
        space = replace(space, parameters={**space.parameters, "iterations": iterations})
        _, watch, _ = attempt(target, space.calm(3))
        averages = sum(times for (state, _), times in watch.states.items() if state.endswith("'s average"))
        if first and averages >= 2 * first:
            break
        first = first or averages
    return space


def policies(seconds: float, names: list[str]) -> list[tuple[str, ...]]:
    """Return a row for each policy: 3 ranks, 2 rounds, and one crash between any two events of a rank, or none.

    Schedules with one deviation more are explored in all of these cases, as long as the seconds suffice.
    """
    target, rows = Target(PROGRAMS / "fuzzed_policies.py"), []
    for name in names or EVERY:
        space = Space(
            ranks=[3], faults="crash", ties=["fifo"], stragglers=[None], survive=True, world={"deadline_s": 2.0},
            parameters={"policy": name},
        )  # fmt: skip
        space = two_rounds(target, space)
        cases = list(space.every(lambda case: crash_points(target, case)))
        until_s, covered, most = time.monotonic() + seconds, "nothing", 0
        found = Covered()
        while covered != "all schedules" and not found.failures:
            deeper = Exhaustion(target, deviations=most, seconds=until_s - time.monotonic()).run(cases)
            if deeper.ended_early and not deeper.failures:
                break
            found, most = deeper, most + 1
            covered = f"up to {most - 1} deviations" if found.schedules[most - 1] else "all schedules"
        row = (
            name, f"{space.parameters['iterations']}", f"{len(cases)}", f"{sum(found.schedules.values()):,}", covered,
            "; ".join(each.case.command("FILE") for each in found.small.values()) or "-",
        )  # fmt: skip
        print(*row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--policies", action="store_true")
    parser.add_argument("--drawn", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf)
    asked = parser.parse_args()
    if asked.policies:
        rows = policies(asked.seconds, asked.names)
        print(text_table(("policy", "iterations", "cases", "schedules", "covered", "failures"), rows))
        return
    if asked.drawn:
        drawn(asked.drawn)
        return
    explore(ten_messages, 4, most=1)  # imports
    found, took_s = explore(ten_messages, 4)
    print(
        f"4 ranks, 10 messages: {sum(found.schedules.values()):,} schedules, {found.runs / took_s * 60:,.0f} a minute"
    )
    found, _ = explore(farm, 4)
    schedules, full = sum(found.schedules.values()), orders(3, 6)
    print(
        f"farm of 4 ranks, 6 tasks: {schedules:,} of {full:,} orders of calls, 1 in {full / schedules:,.0f}"
    )
    paths = [path for folder in ("planted", "deep") for path in sorted((PROGRAMS / folder).glob("*.py"))]
    print(
        text_table(("planted bug", "runs", "choices left", "processor time"), [bug(path) for path in paths])
    )


if __name__ == "__main__":
    main()
