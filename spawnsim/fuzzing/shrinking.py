"""Reduces a failing case: fewer ranks, fewer iterations, fewer faults, then simpler times, ties and stragglers.

Greedy: a change is kept if the same error remains. The caller lists the allowed numbers of ranks. Nothing is random:
the same failure has the same smallest case.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from spawnsim.errors import ParameterError
from spawnsim.fuzzing.cases import Case
from spawnsim.models.faults import Fault, FaultPlan

if TYPE_CHECKING:
    from spawnsim.fuzzing.campaign import Failure

ITERATIONS = "iterations"  # the parameter of `main` that is reduced
OTHER_SEEDS = 4  # tried for each number of ranks: its draws differ anyway


def shrunk(
    failure: Failure, fails: Callable[[Case], Failure | None], ranks: Collection[int], budget: int
) -> Failure:
    """Return the failure in the smallest case found.

    Args:
        failure: the original failure.
        fails: runs a case; returns the same failure in it, or None.
        ranks: the allowed numbers of ranks.
        budget: maximum number of cases to try.

    Returns:
        The same failure, possibly in a smaller case.
    """
    best, tried, improved = failure, {failure.case.command("")}, True
    fewer = partial(_ranks, allowed=sorted(ranks))
    while improved and budget > 0:
        improved = False
        for change in (fewer, _faults, _iterations, _simpler, _times):
            for case in change(best.case):
                text = case.command("")
                if text in tried:
                    continue
                tried.add(text)
                budget -= 1
                found = fails(case) if budget >= 0 else None
                if found is not None:
                    best, improved = found, True
                    break  # restart from the best case
    return best


def _with(case: Case, faults: Iterable[Fault], **changes: Any) -> Iterator[Case]:
    """Yield the case with other faults and values, if they are a valid plan for its ranks."""
    try:
        plan = FaultPlan(tuple(faults))
        plan.check(changes.get("ranks", case.ranks))
    except ParameterError:
        return
    yield replace(case, faults=str(plan), **changes)


def _ranks(case: Case, allowed: list[int]) -> Iterator[Case]:
    """Yield the case with fewer ranks, the fewest first; faults of removed ranks move to others, or are dropped."""
    for ranks in allowed[: bisect_left(allowed, case.ranks)]:
        within = [fault for fault in case.plan.faults if all(rank < ranks for rank in fault.ranks)]
        for faults in (list(_moved(case, ranks)), within):
            for seed in (case.seed, *range(OTHER_SEEDS)):
                yield from _with(case, faults, ranks=ranks, seed=seed)


def _moved(case: Case, ranks: int) -> Iterator[Fault]:
    """Yield the faults with their ranks taken modulo the remaining number of ranks."""
    for fault in case.plan.faults:
        values: dict[str, Any] = {}
        for part in fields(fault):
            value = getattr(fault, part.name)
            if part.name in ("rank", "source", "dest") and value is not None:
                values[part.name] = value % ranks
            elif part.name == "members":
                values[part.name] = tuple({member % ranks for member in value})
        try:
            yield replace(fault, **values)
        except ParameterError:
            continue  # a link of a rank with itself


def _faults(case: Case) -> Iterator[Case]:
    """Yield the case without any fault, with half of them, and without each."""
    faults = case.plan.faults
    half = len(faults) // 2
    for subset in (
        (),
        faults[:half],
        faults[half:],
        *((*faults[:at], *faults[at + 1 :]) for at in range(len(faults))),
    ):
        if len(subset) < len(faults):
            yield from _with(case, subset)


def _iterations(case: Case) -> Iterator[Case]:
    """Yield the case with fewer iterations, the fewest first."""
    now = case.parameters.get(ITERATIONS)
    if isinstance(now, int):
        for fewer in (1, 2, 3, 4, 5, 7, 10, now // 2, 3 * now // 4, now - 1):
            if 0 < fewer < now:
                yield replace(case, parameters={**case.parameters, ITERATIONS: fewer})


def _simpler(case: Case) -> Iterator[Case]:
    """Yield the case without stragglers, with the default or reverse order of ties, and with the first seeds."""
    yield replace(case, straggler=None)
    if case.ties != "fifo":
        yield from (replace(case, ties=ties) for ties in ("fifo", "reverse"))
    yield from (replace(case, seed=seed) for seed in range(min(case.seed, 3)))


def _times(case: Case) -> Iterator[Case]:
    """Yield the case with one of a fault's times set to zero, halved, or rounded to fewer digits."""
    for at, fault in enumerate(case.plan.faults):
        for part in fields(fault):
            value = getattr(fault, part.name)
            if not part.name.endswith("_s") or not math.isfinite(value) or not value:
                continue
            for smaller in (0.0, value / 2, float(f"{value:.1g}"), float(f"{value:.2g}")):
                if smaller < value:
                    try:
                        changed = replace(fault, **{part.name: smaller})
                    except ParameterError:
                        continue
                    yield from _with(case, (*case.plan.faults[:at], changed, *case.plan.faults[at + 1 :]))
