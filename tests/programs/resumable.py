"""A training that saves checkpoints, in all that a run may be made of; and dies once, if it is told to."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spawnsim import TrainingStep
from spawnsim.policies import (
    AsyncModelAveragePolicy,
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    DecentralizedAveragingPolicy,
    DecoupledDiLoCoPolicy,
    OneSidedSelectiveAveragingPolicy,
    OuterOptimizerPolicy,
    SpawnPolicy,
)


def policy_of(name: str, comm: Any) -> SpawnPolicy:
    """Return a policy that acts several times in 20 iterations."""
    make = {
        "all": lambda: AverageAllPolicy(4),
        "selective": lambda: AsyncSelectiveAveragingPolicy(None, 3, 0.3, cooldown=0),
        "age": lambda: AsyncSelectiveAveragingPolicy(None, 3, replacement_mode="age", age_range=(4, 7)),
        "one-sided": lambda: OneSidedSelectiveAveragingPolicy(
            None, None, 3, replacement_ratio=0.3, replacement_mode="worst_ratio"
        ),
        "one-sided age": lambda: OneSidedSelectiveAveragingPolicy(None, None, 3, age_range=(4, 7)),
        "groups": lambda: DecentralizedAveragingPolicy(3, target_group_size=4, load_state=True),
        "groups beside": lambda: DecentralizedAveragingPolicy(3, target_group_size=4, asynchronous=True),
        "clock": lambda: AsyncModelAveragePolicy("all", 20),
        "pairs": lambda: AsyncModelAveragePolicy("random", 20, warmup_steps=15),
        "diloco": lambda: OuterOptimizerPolicy.diloco(4),
        "decoupled": lambda: DecoupledDiLoCoPolicy(4, fragments=2),
        "background": lambda: AsyncModelAveragePolicy("ring", 20, background=True),
    }
    return make[name]()


def build(comm: Any, width: int, *, counts: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model, of mixed types if it counts, and an optimizer with state."""
    between = torch.nn.BatchNorm1d(width) if counts else torch.nn.Tanh()
    model = torch.nn.Sequential(torch.nn.Linear(8, width), between, torch.nn.Linear(width, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.tensor(comm.rng("init").normal(size=parameter.shape)))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def error(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the loss."""
    return ((model(x)[:, 0] - x.sum(1)) ** 2).mean()


def main(
    comm: Any, policy: str = "all", iterations: int = 20, every: int = 6, die: str = "", eager: bool = True,
    width: int = 30, greets: bool = True,
) -> None:  # fmt: skip
    """Train; `die` names a file: the first time that iteration 15 is reached, it is written, and the process killed."""
    model, optimizer = build(comm, width, counts=eager)
    acting = policy_of(policy, comm)
    step = None if eager else TrainingStep(error)
    ring = comm.Split(0, -comm.rank)
    saved = comm.restore(model=model, optimizer=optimizer, policy=acting)
    total = 0.0 if saved is None else saved.extra["total"]
    for iteration in range(0 if saved is None else saved.iteration, iterations):
        if die and iteration == 15 and comm.rank == comm.size - 1 and not Path(die).exists():
            Path(die).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with comm.compute(0.01):
            x = torch.tensor(comm.rng("data").normal(size=(4, 8)), dtype=torch.float32)
            if step is None:
                optimizer.zero_grad()
                loss = error(model, x)
                loss.backward()
                optimizer.step()
                loss = loss.item()
            else:
                loss = step(model, optimizer, x)
        total += random.random() + float(np.random.rand()) + float(torch.rand(()))
        model, optimizer, info = acting(iteration, model, optimizer, local_metric=-loss, group=comm)
        if greets and iteration == 5:  # a message that is on its way, or has not been taken, at the cut
            ring.send(("hello", comm.rank), (ring.rank + 1) % ring.size, tag=7)
        if greets and iteration == 7:
            assert ring.recv(source=(ring.rank - 1) % ring.size, tag=7)[0] == "hello"
        weight = float(sum(each.double().sum() for each in model.state_dict().values()))
        comm.record(
            iteration=iteration, loss=loss, total=total, weight=weight, word="late" * (iteration > 9), **info
        )
        if every and (iteration + 1) % every == 0:
            comm.checkpoint(
                iteration=iteration + 1,
                model=model,
                optimizer=optimizer,
                policy=acting,
                extra={"total": total},
            )
    acting.shutdown()
