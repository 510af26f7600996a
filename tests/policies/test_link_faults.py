"""Policies that stand on collectives and on windows, over links with faults: twelve ranks, models of 120 kB."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support.policy_ranks import line, numbers

import spawnsim
from spawnsim.errors import MismatchError, Timeout
from spawnsim.policies import AverageAllPolicy, OneSidedSelectiveAveragingPolicy, WindowOptions

RANKS, FLOATS, STEPS = 12, 30_000, 12
MADE = {
    "AverageAll": lambda: AverageAllPolicy(4),
    "one-sided": lambda: OneSidedSelectiveAveragingPolicy(
        None, None, 4, replacement_mode="worst_ratio", cooldown=0
    ),
}
each_policy = pytest.mark.parametrize("name", MADE)
FROM = "@0.07s"  # after the first averaging, in which windows are made and tensors agreed upon
LATE = {  # faults that hold up, and damage nothing
    "partition": f"partition:0-3{FROM}+0.2s",
    "drop": f"drop:*>*{FROM}+9s,0.1",
    "delay": f"delay:*>*{FROM},50ms,10ms",
    "down": f"down:0<>1{FROM}+0.3s; down:*>5{FROM}+0.3s",
}


@cache
def plain(name: str) -> tuple[Any, dict[int, np.ndarray]]:
    """Return a run without faults, and its models."""
    return train(name, None)


def train(name: str, faults: str | None, seed: int = 1) -> tuple[Any, dict[int, np.ndarray]]:
    """Let twelve ranks train for twelve iterations of 10 ms; return the run and the models."""
    models: dict[int, np.ndarray] = {}

    def main(comm: Any) -> None:
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.full((FLOATS,), float(comm.rank)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = MADE[name]()
        for step in range(STEPS):
            with comm.compute(0.01):
                pass
            metric = float((comm.rank * 7 + step) % 5)
            model, optimizer, _ = policy(step, model, optimizer, metric, comm)
            comm.record(step=step, sum=float(model.w.detach().double().sum()))
        models[comm.rank] = model.w.detach().numpy().copy()
        policy.shutdown()

    return spawnsim.run(main, ranks=RANKS, faults=faults, seed=seed), models


def links(run: Any) -> set[tuple[str, str]]:
    """Return (what, call) of the faults that struck."""
    return {(event["what"], event["call"]) for event in run.events if event["kind"] == "link"}


@pytest.mark.parametrize("kind", LATE)
def test_averaging_all_comes_later_and_is_the_same(kind: str) -> None:
    """Nothing is lost on reliable connections: models are those of a run without faults, bit for bit."""
    without, models = plain("AverageAll")
    faulty, late = train("AverageAll", LATE[kind])
    assert {call for _, call in links(faulty)} >= {"Allreduce"}
    assert all((late[rank] == models[rank]).all() for rank in range(RANKS))
    assert faulty.totals["virtual_seconds"] > without.totals["virtual_seconds"] + 0.04
    assert faulty.totals["digest"] != without.totals["digest"]
    assert train("AverageAll", LATE[kind])[0].totals["digest"] == faulty.totals["digest"]


@pytest.mark.parametrize("kind", LATE)
def test_reading_from_windows_comes_later(kind: str) -> None:
    """Ranks that read from others wait; each model is still a whole one of some rank, or an average of such."""
    without, _ = plain("one-sided")
    faulty, late = train("one-sided", LATE[kind])
    assert {call for _, call in links(faulty)} & {"Get", "Put"}
    for model in late.values():
        assert (model == model[0]).all(), "a mixture of two models"
        assert 0 <= model[0] <= RANKS - 1
    assert faulty.totals["digest"] != without.totals["digest"]
    assert train("one-sided", LATE[kind])[0].totals["digest"] == faulty.totals["digest"]


def test_averaging_all_across_a_lasting_partition_ends_in_a_timeout() -> None:
    """It names ranks of the other side, and says in which call."""
    with pytest.raises(Timeout, match="Allreduce") as caught:
        train("AverageAll", f"partition:0-5{FROM}")
    assert caught.value.ranks


@pytest.mark.parametrize("faults", ["down:3<>*@0.07s", "partition:0-5@0.07s"])
def test_one_sided_reads_over_dead_links_leave_the_donor_out(faults: str) -> None:
    """Nobody waits for ever: who cannot be read in time is left out, and all ranks train to the end."""
    run, models = train("one-sided", faults)
    assert ("lost", "Get") in links(run)
    assert len(models) == RANKS
    assert sorted(run.table["step"].tolist()) == sorted(list(range(STEPS)) * RANKS)


def test_damaged_links_damage_averages_and_say_so() -> None:
    """Collectives carry no checksums: events tell of it, and models are others than without."""
    faults = f"corrupt:*>*{FROM},0.2"
    without, models = plain("AverageAll")
    faulty, damaged = train("AverageAll", faults)
    assert {what for what, _ in links(faulty)} == {"corrupt"}
    assert faulty.totals["digest"] != without.totals["digest"]
    assert any((damaged[rank] != models[rank]).any() for rank in range(RANKS))
    assert train("AverageAll", faults)[0].totals["digest"] == faulty.totals["digest"]


@pytest.mark.parametrize("layout", ["flat", "per_parameter"])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_damaged_snapshots_are_refused_and_counted(layout: str, share: float) -> None:
    """Headers, descriptions, tensors: what was damaged is read again, and a donor of whom all is damaged left out."""
    ends: dict[int, tuple[set[float], dict[str, float]]] = {}

    def main(comm: Any) -> None:
        model, optimizer = line(float(comm.rank), FLOATS)
        policy = OneSidedSelectiveAveragingPolicy(
            None, None, 4, averaging_strategy="best_only", age_range=(3, 5), replacement_mode="age", cooldown=0,
            windows=WindowOptions(layout, publish_every=1),
        )  # fmt: skip
        for step in range(24):
            with comm.compute(0.01):
                pass
            model, optimizer, _ = policy(step, model, optimizer, float(comm.rank), comm)
        ends[comm.rank] = numbers(model), policy.stats
        policy.shutdown()

    run = spawnsim.run(main, ranks=RANKS, faults=f"corrupt:*>*{FROM},{share}", seed=1)
    assert sum(stats["unreadable"] for _, stats in ends.values()) > RANKS
    assert all(len(held) == 1 for held, _ in ends.values()), "a mixture of two models"
    late = [event for event in run.events if event["kind"] == "replacement" and event["time_s"] > 0.08]
    assert bool(late) == (share < 1)


def test_an_agreement_that_was_damaged_says_so() -> None:
    """No rank is blamed for a guard that it has not given."""
    with pytest.raises(
        MismatchError, match=r"digests of the models of ranks .* were damaged on the way"
    ) as caught:
        train("AverageAll", "corrupt:*>*@0s+0.05s")
    assert "guard" not in str(caught.value)


@each_policy
def test_copies_change_nothing_but_are_reported(name: str) -> None:
    """A reliable connection takes each message once."""
    without, models = plain(name)
    doubled, same = train(name, f"duplicate:*>*{FROM}")
    assert all((same[rank] == models[rank]).all() for rank in range(RANKS))
    assert doubled.totals["virtual_seconds"] == without.totals["virtual_seconds"]
    assert {what for what, _ in links(doubled)} == {"doubled"}
    assert doubled.totals["digest"] != without.totals["digest"]
