"""Selective replacement in lockstep, written with calls of `Comm` and the rules of the policy: what columns must equal.

One number stands for each model. Its bytes travel beside it as a message of the model's length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from spawnsim.comm import ANY_SOURCE, Comm, Status
from spawnsim.policies import AsyncSelectiveAveragingPolicy, SpawnPolicy
from spawnsim.policies.rules.donors import decide, how_many
from spawnsim.policies.rules.selection import Age, Report

ASK, MODEL = 1, 2


class Ripple:
    """A quality that each rank can compute alone: it begins with and moves by functions of rank and iteration.

    `step`: how far models move in an iteration. `swing`: how far the metric is off what the model is worth.
    """

    def __init__(self, step: float = 0.3, swing: float = 0.0, nan_at: tuple[int, ...] = ()) -> None:
        self.step, self.swing, self.nan_at = step, swing, nan_at

    def begin(self, ranks: int, seed: int) -> Any:
        return self.first(np.arange(ranks))

    def first(self, rank: Any) -> Any:
        return np.sin(rank * 12.9898) * 3 // 0.25 * 0.25  # ties

    def moved(self, rank: Any, iteration: int) -> Any:
        return self.step * np.sin(rank * 7.77 + iteration * 1.3)

    def train(self, quality: Any, first: int, count: int) -> None:
        for iteration in range(first, first + count):
            quality += self.moved(np.arange(len(quality)), iteration)

    def metric(self, quality: Any, iteration: int) -> Any:
        ranks = np.arange(len(quality))
        return np.where(np.isin(ranks, self.nan_at), np.nan, quality + self._off(ranks, iteration))

    def metric_of(self, rank: int, quality: float, iteration: int) -> float:
        off = float(self._off(np.asarray(rank), iteration))
        return float("nan") if rank in self.nan_at else quality + off

    def _off(self, rank: Any, iteration: int) -> Any:
        return self.swing * np.sin(rank * 3.1 + iteration)


def train_under(policy_of: Any, comm: Comm, ripple: Ripple, iterations: int, numbers: int) -> None:
    """Train models of so many float32 numbers with a policy of the library itself; the first one is the quality."""
    policy: SpawnPolicy = policy_of()
    model = torch.nn.Linear(numbers, 1, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
        model.weight[0, 0] = float(ripple.first(np.asarray(comm.rank)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for iteration in range(iterations):
        with comm.compute():
            pass
        with torch.no_grad():
            model.weight[0, 0] += float(ripple.moved(np.asarray(comm.rank), iteration))
        metric = ripple.metric_of(comm.rank, model.weight[0, 0].item(), iteration)
        model, optimizer, _ = policy(iteration, model, optimizer, metric, comm)
    comm.record(ended_s=comm.clock.now(), quality=model.weight[0, 0].item())
    policy.shutdown()


def train_in_lockstep(
    policy: AsyncSelectiveAveragingPolicy, comm: Comm, ripple: Ripple, **sizes: int
) -> None:
    """Train with the policy's rules, in rounds in which all meet."""
    rank, last_trigger = comm.rank, -policy.cooldown
    leader = min(policy.wiring.coordinator, comm.size - 1)
    age = Age(policy.age_range, comm.rng("age")) if policy.replacement_mode == "age" else None
    quality = float(ripple.first(np.asarray(rank)))
    width, nbytes = 1 + 2 * how_many(policy.rules.donors.count, comm.size), sizes["nbytes"]
    for iteration in range(sizes["iterations"]):
        with comm.compute():
            pass
        quality += float(ripple.moved(np.asarray(rank), iteration))
        expired = age.tick() if age is not None else False
        if not policy.cadence.due(iteration):
            continue
        metric = ripple.metric_of(rank, quality, iteration)
        row = np.asarray([metric, expired, 0, 0, 0, 0, 0, 0], np.float64)
        rows = np.empty((comm.size, len(row))) if rank == leader else None
        comm.Gather(row, rows, leader)
        told = np.zeros((comm.size, width)) if rank == leader else None
        if rank == leader and iteration - last_trigger >= policy.cooldown:
            assert rows is not None
            assert told is not None
            reports = [Report(each, float(own[0]), bool(own[1])) for each, own in enumerate(rows)]
            found = decide(iteration, reports, policy.rules, comm.rng("donors"))
            last_trigger = iteration if found.assignments else last_trigger
            for replaced, assignment in found.assignments.items():
                for place, donor in enumerate(assignment.donors):
                    told[replaced, 1 + 2 * place : 3 + 2 * place] = donor + 1, assignment.weights[place]
                    told[donor, 0] += 1
        mine = np.empty(width)
        comm.Scatter(told, mine, leader)
        donors = [(int(donor) - 1, weight) for donor, weight in mine[1:].reshape(-1, 2) if donor]
        if donors:
            quality = _take(comm, donors, (policy.replacement.momentum, quality), nbytes)
            comm.record.event(
                "taken", iteration=iteration, donors=[d for d, _ in donors], weights=[w for _, w in donors]
            )
            if age is not None:
                age.reset()
        elif mine[0]:
            _give(comm, int(mine[0]), quality, nbytes)
    comm.record(ended_s=comm.clock.now(), quality=quality)


def _take(comm: Comm, donors: list[tuple[int, float]], own: tuple[float, float], nbytes: int) -> float:
    models = [np.empty(nbytes, np.uint8) for _ in donors]
    receives = [comm.Irecv(model, donor, MODEL) for model, (donor, _) in zip(models, donors, strict=True)]
    for donor, _ in donors:
        comm.Isend(np.zeros(64, np.uint8), donor, ASK)
    type(receives[0]).Waitall(receives)
    values = [float(model[:8].view(np.float64)[0]) for model in models]
    mixed = float(sum(weight * value for (_, weight), value in zip(donors, values, strict=True)))
    momentum, quality = own
    return mixed + momentum * (quality - mixed)


def _give(comm: Comm, asks: int, quality: float, nbytes: int) -> None:
    model = np.zeros(nbytes, np.uint8)
    model[:8].view(np.float64)[0] = quality
    status, sends = Status(), []
    for _ in range(asks):
        comm.Recv(np.empty(64, np.uint8), ANY_SOURCE, ASK, status)
        sends.append(comm.Isend(model, status.Get_source(), MODEL))
    type(sends[0]).Waitall(sends)
