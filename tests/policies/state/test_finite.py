"""Numbers that are not finite reach nobody through a mean, and who has them is healed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.policy_ranks import Line, Steps, line, walk

import spawnsim
from spawnsim.errors import MismatchError
from spawnsim.policies import AsyncModelAveragePolicy, AverageAllPolicy, StateScope
from spawnsim.policies.exchange.group_mean import leave_out
from spawnsim.policies.state.arithmetic import all_finite
from spawnsim.torchgfn.distributed import average_gradients

RANKS = 10
POISON = pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])


def poisoned(
    poison: float, *, ranks: tuple[int, ...] = (3,), places: slice = slice(5, 9)
) -> Callable[[int], tuple[Line, torch.optim.Optimizer]]:
    """Return what starts rank r with all r, but some ranks with numbers that are not finite; all have a mask."""

    def start(rank: int) -> tuple[Line, torch.optim.Optimizer]:
        model = Line(float(rank))
        model.short = torch.nn.Parameter(torch.full((20_000,), float(rank), dtype=torch.bfloat16))
        model.norm = torch.nn.BatchNorm1d(3)
        model.register_buffer("mask", torch.tensor([-math.inf, 0.0]))
        if rank in ranks:
            model.weight.data[places] = model.short.data[places] = poison
            model.norm.running_var[1] = poison
        return model, torch.optim.Adam(model.parameters())

    return start


def averaged(start: Callable[[int], Any], momentum: float = 0.0, **how: Any) -> Steps:
    """Average once."""
    return walk(lambda _: AverageAllPolicy(1, momentum=momentum, **how), ranks=RANKS, steps=1, start=start)


@POISON
def test_one_ranks_poison_reaches_nobody(poison: float) -> None:
    """All ranks get the mean of the nine that have a finite number there, and of all ten elsewhere."""
    found = averaged(poisoned(poison))
    for model in found.models.values():
        for tensor, rounded in ((model.weight, 1e-6), (model.short, 4e-3)):
            assert tensor[5:9].tolist() == pytest.approx([42 / 9] * 4, rel=rounded)
            assert {*tensor[:5].tolist(), *tensor[9:].tolist()} == {4.5}
        assert model.norm.running_var.tolist() == [1.0] * 3
        assert model.mask.tolist() == [-math.inf, 0.0]
    (event,) = found.events("healed")
    assert (event["rank"], event["numbers"], event["lost"]) == (3, 9, 0)
    assert found.policies[3].stats["num_healed"] == 1


def test_without_the_guard_it_reaches_all() -> None:
    """What a plain sum does."""
    found = averaged(poisoned(math.nan), guard=False)
    assert all(model.weight[5].isnan() for model in found.models.values())
    assert not found.events("healed")


def test_momentum_keeps_nothing_of_what_is_not_finite() -> None:
    """The healed rank takes the mean alone there; the others keep their share of their own."""
    found = averaged(poisoned(math.nan), momentum=0.5)
    assert found.models[3].weight[5].item() == pytest.approx(42 / 9)
    assert found.models[2].weight[5].item() == pytest.approx(0.5 * 2 + 0.5 * 42 / 9)
    assert found.models[3].weight[0].item() == 0.5 * 3 + 0.5 * 4.5


def test_where_no_rank_has_a_finite_number_each_keeps_its_own() -> None:
    """Nothing can heal it; the event says that it is lost, and the rest is averaged."""
    found = averaged(poisoned(math.nan, ranks=tuple(range(RANKS))))
    for rank, model in found.models.items():
        assert model.weight[5:9].isnan().all()
        assert {*model.weight[:5].tolist(), *model.weight[9:].tolist()} == {4.5}
        assert [event["lost"] for event in found.events("healed") if event["rank"] == rank] == [9]


def test_a_healed_rank_forgets_an_optimizer_that_is_not_finite() -> None:
    """Else the next step would undo it; the others' state stays, and so does a finite one."""
    for moment, kept in ((math.nan, False), (1.0, True)):
        found: dict[int, bool] = {}

        def main(comm: Any, moment: float = moment, found: dict[int, bool] = found) -> None:
            model, optimizer = line(1.0)
            for parameter in model.parameters():
                optimizer.state[parameter]["exp_avg"] = torch.full_like(parameter, 1.0)
            if comm.Get_rank() == 1:
                model.weight.data[0] = math.nan
                optimizer.state[model.weight]["exp_avg"][0] = moment
            AverageAllPolicy(1)(0, model, optimizer, group=comm)
            found[comm.Get_rank()] = bool(optimizer.state)

        spawnsim.run(main, ranks=3)
        assert found == {0: True, 1: kept, 2: True}


def test_an_averaged_optimizer_is_healed_itself() -> None:
    """Moments that travel are numbers like others."""
    moments: dict[int, float] = {}

    def main(comm: Any) -> None:
        model, optimizer = line(1.0)
        optimizer.state[model.weight]["exp_avg"] = torch.full_like(model.weight, float(comm.Get_rank()))
        if comm.Get_rank() == 1:
            optimizer.state[model.weight]["exp_avg"][3] = math.inf
        AverageAllPolicy(1, travels=StateScope(optimizer_state="average"))(0, model, optimizer, group=comm)
        moments[comm.Get_rank()] = float(optimizer.state[model.weight]["exp_avg"][3])

    spawnsim.run(main, ranks=3)
    assert moments == {0: 1.0, 1: 1.0, 2: 1.0}


def test_gradients_are_guarded_too() -> None:
    """By the toolkit, unless a loss scaler wants to see them, and in warm-up."""
    found: dict[tuple[str, int], float] = {}

    def main(comm: Any) -> None:
        rank = comm.Get_rank()
        for name in ("guarded", "plain", "warm-up"):
            model, optimizer = line(0.0)
            policy = AsyncModelAveragePolicy("all", 100, 1, tag=9000)
            if name == "warm-up":
                policy.attach(model, optimizer, comm)
            model.weight.grad = torch.full_like(model.weight, math.nan if rank == 2 else 1.0)
            if name == "warm-up":
                optimizer.step()
            else:
                average_gradients(model, comm, guard=name == "guarded")
            found[name, rank] = float(model.weight.grad[0])
            policy.shutdown()

    spawnsim.run(main, ranks=3)
    assert {found[name, rank] for name in ("guarded", "warm-up") for rank in range(3)} == {1.0}
    assert all(math.isnan(found["plain", rank]) for rank in range(3))


def test_all_ranks_must_guard_alike() -> None:
    """Else they would wait for different sums."""
    with pytest.raises(MismatchError, match="guard"):
        walk(lambda comm: AverageAllPolicy(1, guard=comm.Get_rank() > 0), ranks=3, steps=1)


def test_a_sum_that_overflows_is_no_finding() -> None:
    """Finite numbers stay finite, however large; what is left out is remembered with its place."""
    assert all_finite(torch.full((9,), 3e38))
    assert all_finite(torch.full((9,), 6e4, dtype=torch.float16))
    row = torch.tensor([1.0, math.nan, 2.0, -math.inf])
    left_out = leave_out(row)
    assert left_out is not None
    assert row.tolist() == [1.0, 0.0, 2.0, 0.0]
    assert left_out.places.tolist() == [1, 3]
    assert np.array_equal(left_out.values.numpy(), [math.nan, -math.inf], equal_nan=True)
    assert leave_out(row) is None
