"""PBT, soups, and populations that are drawn together a little (PAPA)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.policy_ranks import line, numbers, walk

import spawnsim
from spawnsim.errors import ParameterError, RankFailed, Revoked, Timeout
from spawnsim.policies import (
    AsyncModelAveragePolicy,
    AverageAllPolicy,
    OneOfBest,
    Perturb,
    PopulationBasedTrainingPolicy,
    Report,
    StateScope,
    Uniform,
    greedy_soup,
    uniform_soup,
)


def with_rate(rank: int) -> Any:
    """Return a model full of its rank, whose learning rate tells whose it was, and an optimizer with a history."""
    model, _ = line(float(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 + rank, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def keep(*_: Any) -> None:
    """Explore nothing."""


def test_the_worst_take_over_weights_optimizer_and_settings_of_one_of_the_best() -> None:
    """12 ranks, a quarter: ranks 0 to 2 go on as one of 9 to 11, who keep what they had."""
    rates: dict[int, float] = {}

    class Noting(PopulationBasedTrainingPolicy):
        def act(self, iteration: int, model: Any, optimizer: Any, *rest: Any) -> Any:
            model, optimizer = super().act(iteration, model, optimizer, *rest)
            rates[rest[1].rank] = optimizer.param_groups[0]["lr"]
            return model, optimizer

    found = walk(lambda _: Noting(10, explore=keep, settings=("lr",)), ranks=12, steps=20, start=with_rate)
    replaced = {event["rank"]: event["donors"] for event in found.events("replacement")}
    assert set(replaced) == {0, 1, 2}
    for rank, donors in replaced.items():
        assert len(donors) == 1
        assert donors[0] in (9, 10, 11)
        assert numbers(found.models[rank]) == {float(donors[0])}
        assert rates[rank] == 1.0 + donors[0]
    explored = {event["rank"]: event["lr"] for event in found.events("explored")}
    assert explored == {rank: 1.0 + donors[0] for rank, donors in replaced.items()}


def test_exploring_multiplies_or_draws_anew() -> None:
    """0.8 and 1.2 equally often; a quarter is drawn anew, where there is something to draw from."""
    model, optimizer = line(0.0)
    rng, seen = np.random.default_rng(0), []
    for _ in range(400):
        optimizer.param_groups[0]["lr"] = 1.0
        Perturb({"lr": lambda rng: 7.0})(model, optimizer, rng)
        seen.append(optimizer.param_groups[0]["lr"])
    counts = {value: seen.count(value) for value in (0.8, 1.2, 7.0)}
    assert sum(counts.values()) == 400
    assert 60 < counts[7.0] < 140
    assert 100 < counts[0.8] < 200
    optimizer.param_groups[0]["lr"] = 1.0
    Perturb(resample=1.0)(model, optimizer, rng)
    assert optimizer.param_groups[0]["lr"] in (0.8, 1.2)


def test_nan_counts_as_the_worst_and_does_not_spread() -> None:
    """A rank whose weights and metric are NaN takes over from another; one whose metric lies gives to none."""

    def metric(rank: int, _: int) -> float:
        return math.nan if rank == 6 else 99.0 if rank == 9 else float(rank)

    def start(rank: int) -> Any:
        return line(math.nan if rank in (6, 9) else float(rank))

    found = walk(
        lambda _: PopulationBasedTrainingPolicy(5, quantile=0.1),
        ranks=12,
        steps=60,
        start=start,
        metric=metric,
    )
    healed = [event for event in found.events("replacement") if event["rank"] == 6]
    assert not healed or all(event["donors"] != [9] for event in healed)
    assert found.events("left_out") or healed
    for rank, model in found.models.items():
        if rank not in (6, 9):
            assert all(math.isfinite(number) for number in numbers(model))


def test_own_exploit_and_burn_in() -> None:
    """A selection and a donor rule of one's own; nothing before the burn-in."""

    def second(reports: Any) -> frozenset[int]:
        return frozenset({1})

    found = walk(
        lambda _: PopulationBasedTrainingPolicy(2, exploit=(second, Uniform(1)), explore=keep, burn_in=10),
        ranks=10, steps=20,
    )  # fmt: skip
    assert {event["rank"] for event in found.events("replacement")} == {1}
    assert min(event["round"] for event in found.events("replacement")) == 10
    rng = np.random.default_rng(0)
    reports = [Report(rank, float(rank)) for rank in range(8)]
    assert {OneOfBest(0.25)(0, reports, rng)[0] for _ in range(30)} == {6, 7}
    for bad in ({"quantile": 0.6}, {"quantile": 0}):
        with pytest.raises(ParameterError, match="quantile"):
            PopulationBasedTrainingPolicy(2, **bad)
    with pytest.raises(ParameterError, match="resample"):
        Perturb(resample=2)
    with pytest.raises(ParameterError, match="settings"):
        StateScope(settings=("lr",))


def test_populations_outlive_deaths_and_take_in_newcomers() -> None:
    """Two of twelve die, one comes back; the survivors recover, and decisions go on."""
    ended: dict[int, Any] = {}

    def main(comm: Any) -> None:
        policy, (model, optimizer) = PopulationBasedTrainingPolicy(3, quantile=0.25), with_rate(comm.rank)
        group, iteration = comm, 0
        while iteration < 60:
            try:
                with comm.compute(0.01):
                    pass
                metric = float(comm.rank)
                model, optimizer, _ = policy(iteration, model, optimizer, metric, group)
                if iteration % 5 == 0:
                    group.Barrier()
                iteration += 1
            except (RankFailed, Revoked, Timeout):
                found = group.recover(iteration)
                group, iteration = found.comm, found.step
        policy.shutdown()
        ended[comm.rank] = numbers(model)

    run = spawnsim.run(main, ranks=12, faults="crash:4@0.05s;crash:11@0.1s;restart:4@0.2s")
    assert set(ended) == set(range(12)) - {11}
    assert max(event["time_s"] for event in run.events if event["kind"] == "replacement") > 0.3


def test_papa_is_a_percent_of_the_way_to_the_mean() -> None:
    """PAPA: w ← .99 w + .01 w̄ each ten steps; without waiting, the same share of what the clock's averages give."""
    found = walk(lambda _: AverageAllPolicy(10, momentum=0.99), ranks=12, steps=31,
                 start=lambda rank: line(float(rank), 5, torch.float64))  # fmt: skip
    for rank, model in found.models.items():
        assert model.logZ.item() == pytest.approx(5.5 + (rank - 5.5) * 0.99**4, abs=1e-12)
    found = walk(lambda _: AsyncModelAveragePolicy(sync_interval_ms=100, share=0.01), ranks=12, steps=101,
                 start=lambda rank: line(float(rank), 5, torch.float64))  # fmt: skip
    counts = {policy.num_averagings for policy in found.policies.values()}
    assert len(counts) == 1
    assert min(counts) >= 5
    for rank, model in found.models.items():
        times = found.policies[rank].num_averagings
        assert model.logZ.item() == pytest.approx(5.5 + (rank - 5.5) * 0.99**times, abs=1e-9)
    with pytest.raises(ParameterError, match="share"):
        AsyncModelAveragePolicy(share=0)


def test_soups() -> None:
    """Uniform: the mean. Greedy: the best, then those that do it no harm; NaN is never in; all get the same."""
    found: dict[int, Any] = {}

    def goodness(model: Any) -> Any:
        return -(model.logZ.detach() - 4.4).abs()

    def main(comm: Any) -> None:
        model, _ = line(math.nan if comm.rank == 9 else float(comm.rank))
        taken = greedy_soup(model, comm, goodness)
        other, _ = line(float(comm.rank))
        uniform_soup(other, comm)
        found[comm.rank] = (taken, numbers(model), numbers(other))

    spawnsim.run(main, ranks=11)
    assert set(map(str, found.values())) == {"([4, 5], {4.5}, {5.0})"}


def test_a_greedy_soup_reaches_tensors_of_any_strides() -> None:
    """Weights that lie channels-last are shared as well."""
    found: dict[int, Any] = {}

    def main(comm: Any) -> None:
        model = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        for parameter in model.parameters():
            parameter.detach().fill_(comm.rank)
        greedy_soup(model, comm, lambda model: 0.0)
        found[comm.rank] = [numbers(model), model.weight.is_contiguous(memory_format=torch.channels_last)]

    spawnsim.run(main, ranks=3)
    assert list(found.values()) == [[{1.0}, True]] * 3
