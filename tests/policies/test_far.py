"""Policies on models that do not lie in main memory: no card is needed, any use as main memory fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs.every_policy import CASES, Case, policy_of
from support.far import Far, card

import spawnsim
from spawnsim.policies import AsyncSelectiveAveragingPolicy, AverageAllPolicy, SpawnPolicy, StateScope

ENOUGH = 60


class Away(torch.nn.Module):
    """One number in tensors of many types, large and small, on the far device."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(Far(torch.full((200, 100), value)))
        self.bias = torch.nn.Parameter(Far(torch.full((7,), value, dtype=torch.bfloat16)))
        self.logZ = torch.nn.Parameter(Far(torch.tensor(value, dtype=torch.float64)))
        self.register_buffer("seen", Far(torch.tensor([value])))
        self.register_buffer("count", Far(torch.tensor([int(value)])))


def away(value: float) -> tuple[Away, torch.optim.Optimizer]:
    """Return such a model with an optimizer that has taken a step: Adam's counts stay in main memory."""
    model = Away(value)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        moments = {key: Far(parameter.near.detach().clone()) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(value), **moments}
    return model, optimizer


def final(make: Callable[[Any], SpawnPolicy]) -> list[list[torch.Tensor]]:
    """Let four ranks take steps until something has happened; return each rank's numbers, optimizer included."""
    found: dict[int, list[torch.Tensor]] = {}

    def main(comm: Any) -> None:
        policy, happened, iteration = make(comm), 0, 0
        model, optimizer = away(float(comm.Get_rank()))
        while not happened:
            comm.clock.sleep(0.001)
            model, optimizer, info = policy(iteration, model, optimizer, float(comm.Get_rank()), comm)
            happened = comm.allreduce(int(info["averaged_this_iteration"] or info["is_replaced"]))
            iteration += 1
            assert iteration < ENOUGH
        policy.shutdown()
        assert all(isinstance(tensor, Far) for tensor in model.state_dict().values())
        numbers = [tensor for name, tensor in model.state_dict().items() if name != "count"]
        kept = [*numbers, *(tensor for state in optimizer.state.values() for tensor in state.values())]
        found[comm.Get_rank()] = [getattr(tensor, "near", tensor).detach().double() for tensor in kept]

    with card():
        spawnsim.run(main, ranks=4)
    return [found[rank] for rank in range(4)]


def hull(tensors: list[torch.Tensor]) -> tuple[float, float]:
    """Return the least and the greatest number."""
    return min(float(t.min()) for t in tensors), max(float(t.max()) for t in tensors)


@pytest.mark.parametrize("case", [case for case in CASES if case[2] in ("none", "threshold")], ids=" ".join)
def test_every_policy(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models stay on their device and between the least and the greatest rank."""
    monkeypatch.setattr("programs.every_policy.plain", away)
    for tensors in final(lambda comm: policy_of(case, comm)):
        low, high = hull(tensors)
        assert low >= 0
        assert high <= 3
        assert case[0] != "AverageAllPolicy" or float(tensors[0].flatten()[0]) == 1.5


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_averaging_with_the_optimizer(momentum: float) -> None:
    """Moments on the device and step counts in main memory are averaged together, each where it lies."""
    travels = StateScope(optimizer_state="average")
    for rank, tensors in enumerate(final(lambda _: AverageAllPolicy(1, momentum=momentum, travels=travels))):
        wanted = (1 - momentum) * 1.5 + momentum * rank
        assert hull(tensors) == (wanted, wanted)


def test_a_copied_optimizer_comes_whole() -> None:
    """Who is replaced has its moments and step counts from one donor, whole."""
    how: dict[str, Any] = {"threshold": 0.5, "cooldown": 0, "travels": StateScope(optimizer_state="copy")}
    found = final(lambda _: AsyncSelectiveAveragingPolicy(lambda: away(2.5), 2, **how))
    whole = {rank: hull(tensors[4:]) for rank, tensors in enumerate(found)}
    assert all(low == high for low, high in whole.values())
    assert any(low != rank for rank, (low, _) in whole.items())
