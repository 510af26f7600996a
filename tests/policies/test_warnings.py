"""What a run says of a policy that could not act in it, and of metrics that cannot be compared."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import spawnsim
from spawnsim import (
    AsyncModelAveragePolicy,
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    DecentralizedAveragingPolicy,
    SpawnPolicy,
)
from spawnsim.policies import Every, OneSidedSelectiveAveragingPolicy

RANKS, ITERATIONS = 12, 30


def warned(make: Any, metric: Any = lambda rank: float(rank)) -> list[str]:
    """Return the warnings of 12 ranks that call a policy 30 times, 10 ms apart."""

    def main(comm: Any) -> None:
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = make()
        for iteration in range(ITERATIONS):
            with comm.compute(0.01):
                pass
            model, optimizer, _ = policy(iteration, model, optimizer, metric(comm.rank), comm)
        policy.shutdown()
        policy.shutdown()

    found: list[str] = spawnsim.run(main, ranks=RANKS).what.get("warnings", [])
    return found


def one_sided(every: int, **how: Any) -> OneSidedSelectiveAveragingPolicy:
    """Return the policy over windows, which the first call makes."""
    return OneSidedSelectiveAveragingPolicy(None, None, every, **how)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: AverageAllPolicy(40),
            "average_every=40 is due in iteration 0 and then in 40, and the last iteration was 29",
        ),
        (
            lambda: AverageAllPolicy(40, cadence=Every(40)),
            "average_every=40 is first due in 40, and the last iteration was 29",
        ),
        (
            lambda: DecentralizedAveragingPolicy(40),
            "average_every=40 is first due in 40, and the last iteration was 29",
        ),
        (
            lambda: AsyncSelectiveAveragingPolicy(None, 40),
            "average_every=40 is first due in 40, and the last iteration was 29",
        ),
        (
            lambda: AsyncSelectiveAveragingPolicy(None, 5, cooldown=200),
            "cooldown=200 exceeds the 30 iterations: one round replaced ranks, 4 later rounds did not",
        ),
        (
            lambda: AsyncSelectiveAveragingPolicy(None, 5, replacement_mode="age"),
            "age_range=(50, 150) begins beyond the 30 iterations: no rank was replaced",
        ),
        (
            lambda: one_sided(40, replacement_mode="worst_ratio"),
            "average_every=40 is first due in 40, and the last iteration was 29",
        ),
        (
            lambda: one_sided(5, replacement_mode="age"),
            "age_range=(50, 150) begins beyond the 30 iterations: no rank was replaced",
        ),
        (
            lambda: AsyncModelAveragePolicy(sync_interval_ms=500),
            "sync_interval_ms=500 exceeds the 290 ms of training: never averaged",
        ),
    ],
)
def test_a_policy_that_cannot_act_says_so_once(make: Any, sentence: str) -> None:
    """One sentence for all ranks and both calls of `shutdown`, with the setting and the length of the run."""
    assert warned(make) == [f"{type(make()).__name__}: {sentence}"]


def test_selection_without_a_metric_is_reported() -> None:
    """Nobody is ever replaced then."""
    (found,) = warned(lambda: AsyncSelectiveAveragingPolicy(None, 5), metric=lambda rank: None)
    assert "no local_metric" in found


@pytest.mark.parametrize("of", [range(RANKS), [2, 11]])
def test_metrics_that_are_never_a_number_are_reported_once(of: Any) -> None:
    """Of all ranks, or of some."""

    def metric(rank: int) -> float:
        return math.nan if rank in of else float(rank)

    (found,) = warned(lambda: AsyncSelectiveAveragingPolicy(None, 5), metric)
    assert "no finite local_metric was ever given on some ranks" in found


def test_a_policy_of_which_a_checkpoint_saves_nothing_is_reported(tmp_path: Any) -> None:
    """What it keeps in arrays, also in lists and mappings; not where it says what is to be saved."""

    class Keeping(SpawnPolicy):
        def act(self, iteration: Any, model: Any, optimizer: Any, metric: Any, comm: Any, info: Any) -> Any:
            self.anchor, self.buffers, self.name = torch.ones(2), {"of": np.ones(3)}, "any"
            return model, optimizer

    class Saving(Keeping):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "anchor": self.anchor}

    def main(comm: Any, saves: bool = False) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = Saving() if saves else Keeping()
        for iteration in range(4):
            model, optimizer, _ = policy(iteration, model, optimizer, group=comm)
            comm.checkpoint(iteration=iteration + 1, model=model, policy=policy)

    for saves in (False, True):
        run = spawnsim.run(main, ranks=RANKS, parameters={"saves": saves}, out=tmp_path / str(saves))
        reported = run.what.get("warnings", [])
        assert reported == [
            "Keeping: checkpoints do not save anchor, buffers: define state_dict() and load_state_dict()"
        ] * (not saves)


def test_a_builder_that_makes_another_model_is_reported(caplog: Any) -> None:
    """With both shapes, and the name of what differs."""

    def build(width: int) -> Any:
        model = torch.nn.Linear(width, 4)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def main(comm: Any) -> None:
        model, optimizer = build(9 if comm.rank == 0 else 8)
        policy = AsyncSelectiveAveragingPolicy(lambda: build(8), 5)
        for iteration in range(ITERATIONS):
            with comm.compute(0.01):
                pass
            model, optimizer, _ = policy(iteration, model, optimizer, float(comm.rank), comm)
        policy.shutdown()

    spawnsim.run(main, ranks=RANKS)
    assert "parameter/weight is (4, 8), and was (4, 9)" in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        lambda: AverageAllPolicy(29),
        lambda: AsyncSelectiveAveragingPolicy(None, 5),
        lambda: AsyncSelectiveAveragingPolicy(None, 5, cooldown=10),
        lambda: one_sided(5, replacement_mode="worst_ratio"),
        lambda: AsyncModelAveragePolicy(sync_interval_ms=50),
    ],
)
def test_a_policy_that_acts_is_not_warned_of(make: Any) -> None:
    """Not even at the shortest possible run, or where a cooldown skips rounds as it should."""
    assert warned(make) == []


@pytest.mark.parametrize("keeps", [True, False])
def test_a_scheduler_that_a_replacement_leaves_behind_is_noticed(keeps: bool) -> None:
    """It moves the optimizer that the rank had before; one whose values alone are replaced stays under it."""

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(8, 4)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def main(comm: Any) -> None:
        model, optimizer = build()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        policy = AsyncSelectiveAveragingPolicy(None if keeps else build, 5)
        for iteration in range(ITERATIONS):
            with comm.compute(0.01):
                optimizer.step()
                scheduler.step()
            model, optimizer, info = policy(iteration, model, optimizer, float(comm.rank), comm)
            comm.record(lr=optimizer.param_groups[0]["lr"], **info)
        policy.shutdown()

    run = spawnsim.run(main, ranks=RANKS)
    reported = run.what.get("warnings", [])
    assert run.totals["replacements"] > 0
    assert bool((run.table["lr"] == 0.1).any()) != keeps
    assert ["model_builder=None" in each for each in reported] == [True] * (not keeps)


@pytest.mark.parametrize("how", [{}, {"mode": "min"}])
@pytest.mark.parametrize("own_data", [True, False])
def test_a_metric_of_a_ranks_own_data_is_noticed(own_data: bool, how: dict[str, Any]) -> None:
    """Each rank fits a number of its own, or all the same one: replacing makes the own loss worse, or better."""
    sign = 1.0 if how else -1.0

    def main(comm: Any) -> None:
        wanted = float(10 * comm.rank if own_data else RANKS)
        learnt = wanted + (1 + comm.rank) / 10 if own_data else float(comm.rank)
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        policy = AsyncSelectiveAveragingPolicy(None, 10, **how)
        for iteration in range(200):
            if iteration % 10 == 0:
                torch.nn.init.constant_(model.weight, learnt)
            with comm.compute(0.01):
                loss = abs(model.weight.item() - wanted)
            model, optimizer, info = policy(iteration, model, optimizer, sign * loss, comm)
            comm.record(iteration=iteration, **info)
        policy.shutdown()

    run = spawnsim.run(main, ranks=RANKS)
    found = run.what.get("warnings", [])
    assert run.totals["replacements"] > 20
    assert [("local_metric was worse than before" in each) for each in found] == [True] * own_data
