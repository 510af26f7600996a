"""Small models and runs for tests of policies on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import spawnsim
from spawnsim.policies import SpawnPolicy

WIDE = 30_000  # numbers in a model by default: 120 kB, more than any platform sends eagerly


class Line(torch.nn.Module):
    """A model whose every number is the same: what a mixture did to it can be read off."""

    def __init__(self, value: float, width: int = WIDE, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((width,), value, dtype=dtype))
        self.logZ = torch.nn.Parameter(torch.tensor(value, dtype=dtype))
        self.register_buffer("seen", torch.full((2,), value))


def line(
    value: float, width: int = WIDE, dtype: torch.dtype = torch.float32
) -> tuple[Line, torch.optim.Optimizer]:
    """Return such a model and a plain optimizer."""
    model = Line(value, width, dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def numbers(model: torch.nn.Module) -> set[float]:
    """Return the distinct numbers in a model."""
    return {number for tensor in model.state_dict().values() for number in tensor.double().unique().tolist()}


class Steps:
    """What happened on each rank: infos by (rank, iteration), final models by rank, the run."""

    def __init__(self) -> None:
        self.infos: dict[tuple[int, int], dict[str, Any]] = {}
        self.models: dict[int, torch.nn.Module] = {}
        self.policies: dict[int, SpawnPolicy] = {}
        self.run: spawnsim.Run

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the run's events of a kind."""
        return [event for event in self.run.events if event["kind"] == kind]


def walk(
    policy: Callable[[Any], SpawnPolicy],
    *,
    ranks: int = 4,
    steps: int = 10,
    metric: Callable[[int, int], float | None] = lambda rank, _: float(rank),
    start: Callable[[int], tuple[torch.nn.Module, torch.optim.Optimizer]] = lambda rank: line(float(rank)),
    group: Callable[[Any], Any] = lambda comm: comm,
    pace: Callable[[int], float] = lambda rank: 0.01,
    **how: Any,
) -> Steps:
    """Run a policy on virtual ranks that do nothing but compute for a while; rank r's model is all r."""
    found = Steps()

    def main(comm: Any) -> None:
        rank, where = comm.Get_rank(), group(comm)
        chosen = found.policies[rank] = policy(comm)
        model, optimizer = start(rank)
        for iteration in range(steps):
            with comm.compute(pace(rank)):
                pass
            given = metric(rank, iteration)
            model, optimizer, info = chosen(iteration, model, optimizer, given, where)
            comm.record(iteration=iteration, **info)
            found.infos[rank, iteration], found.models[rank] = info, model
        chosen.shutdown()
        chosen.shutdown()

    found.run = spawnsim.run(main, ranks=ranks, seed=how.pop("seed", 7), **how)
    return found
