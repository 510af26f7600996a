"""Fault tolerance at scale: the controller of the stacks, and simulations against closed forms."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.studies import STUDIES, study_of

from spawnsim.study import Context


@pytest.fixture(scope="module")
def study() -> ModuleType:
    """Return the study's module."""
    return study_of("fault_tolerance_at_scale")


def covers(stacks: list[list[int]], alive: list[int], depth: int) -> bool:
    """Whether living groups can compute all types, each at most `depth` of its stack: by Hall's theorem."""
    types = range(len(stacks))
    return all(
        len(chosen) <= depth * sum(any(kind in stacks[group] for kind in chosen) for group in alive)
        for count in range(1, len(stacks) + 1)
        for chosen in itertools.combinations(types, count)
    )


@pytest.mark.parametrize("seed", range(4))
def test_stacks_are_as_shallow_as_possible(study: ModuleType, seed: int) -> None:
    """After each failure all types have living owners, and one shard less for each group would not cover them."""
    draw = np.random.default_rng(seed)
    groups, redundancy = 8, 4
    stacks = study.Stacks(groups, redundancy, 1, draw)
    for group in draw.permutation(groups):
        stacks.begin()
        made = {kind for each in stacks.made for kind in each}
        assert made == set(range(groups))
        again = stacks.fail(int(group))
        alive = [each for each in range(groups) if stacks.alive[each]]
        held = {kind for each in alive for kind in stacks.stack[each]}
        assert (again is None) == (held != set(range(groups)))
        if again is None:
            return
        assert all(stacks.copies), "a type that nobody has computed in this step"
        assert covers(stacks.stack, alive, stacks.depth)
        assert stacks.depth == 1 or not covers(stacks.stack, alive, stacks.depth - 1)


def test_plain_jobs_agree_with_their_closed_forms(study: ModuleType) -> None:
    """Restarts: the textbook form; repetitions, roll-backs and both: the simulation within its 99.9 % interval."""
    restarts = study.Plain(70.0, 0.0, 1 / 900, restart_s=600.0)
    assert restarts.mean_s(5) == pytest.approx((900 + 600) * math.expm1((5 * 70 + 60) / 900))
    repeats = study.Plain(70.0, 1 / 300, 0.0)
    both = study.Plain(70.0, 1 / 300, 1 / 4000, restart_s=600.0)
    assert both.mean_s(9) > 9 * repeats.mean_s(1) > 9 * 70.0
    for job, every in ((restarts, restarts.best()), (repeats, 1), (both, both.best())):
        found = job.periods(every, 2000, np.random.default_rng(1))
        assert abs(found.mean() - job.mean_s(every)) < 3.29 * found.std() / math.sqrt(len(found))


def test_masked_failures_agree_with_their_closed_form(study: ModuleType) -> None:
    """SPARe and replication, exponential gaps, within 4 %; without failures nothing is lost but the saves."""
    job = study.Job(200, 300.0, 3600.0)
    for redundancy, eager in ((9, False), (3, True)):
        found = study.masked(job, redundancy, eager=eager, steps=4000, seed=1)["slowdown"]
        assert found == pytest.approx(study.predicted(job, redundancy, eager=eager), rel=0.04)
    calm = study.masked(study.Job(200, 1e12, 3600.0), 9, eager=False, steps=50, seed=1)
    assert calm["slowdown"] == pytest.approx(1 + job.save_s / (50 * job.step_s)) and calm["stacks"] == 1


def test_virtual_ranks_take_the_same_steps(study: ModuleType, tmp_path: Path) -> None:
    """A rank for each group: they die, recover, compute again, up to the same wipe-out."""
    assert study.on_virtual_ranks(Context("some", STUDIES, tmp_path, quick=True))
