"""Ranks whose training is a given walk, so that what a policy makes of it can be computed by hand; all in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import spawnsim
from spawnsim.policies import SpawnPolicy

Vector = NDArray[np.float64]
SHAPES = ((2, 2), (2,), (1, 2), (1,))  # of two linear layers
WIDTH = sum(int(np.prod(shape)) for shape in SHAPES)


def start() -> Vector:
    """Return the weights with which rank 0 begins."""
    parts = [np.random.default_rng([99, place]).normal(size=shape) for place, shape in enumerate(SHAPES)]
    return np.concatenate([part.reshape(-1) for part in parts])


def drift(rank: int, step: int) -> Vector:
    """Return what a rank's training adds in a step, counted from 0."""
    parts = [
        np.random.default_rng([rank, 10 * step + place]).normal(size=shape)
        for place, shape in enumerate(SHAPES)
    ]
    return 0.1 * np.concatenate([part.reshape(-1) for part in parts])


def model_of(weights: Vector, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """Return two linear layers with these weights."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).to(dtype)
    move(model, torch.from_numpy(weights) - vector(model))
    return model


def vector(model: torch.nn.Module) -> torch.Tensor:
    """Return all weights as one vector of float64."""
    return torch.cat([each.detach().double().reshape(-1) for each in model.parameters()])


def move(model: torch.nn.Module, by: torch.Tensor) -> None:
    """Add a vector to the weights."""
    with torch.no_grad():
        for each, part in zip(
            model.parameters(), torch.split(by, [p.numel() for p in model.parameters()]), strict=True
        ):
            each += part.view_as(each)


class Walked:
    """What became of it: weights after each step, by rank; infos; the run."""

    def __init__(self) -> None:
        self.weights: dict[int, list[Vector]] = {}
        self.infos: dict[tuple[int, int], dict[str, Any]] = {}
        self.policies: dict[int, SpawnPolicy] = {}
        self.run: spawnsim.Run

    @property
    def last(self) -> NDArray[np.float64]:
        """The weights at the end, shape (ranks, WIDTH)."""
        return np.stack([self.weights[rank][-1] for rank in sorted(self.weights)])


def walk(
    policy: Callable[[Any], Any],
    *,
    ranks: int = 4,
    steps: int = 12,
    first: int = 1,
    lr: Callable[[int], float] = lambda step: 0.1,
    pace: Callable[[int], float] = lambda rank: 0.01,
    dtype: torch.dtype = torch.float64,
    **how: Any,
) -> Walked:
    """Let ranks walk under a policy that is attached before the first step; its iterations count from `first`."""
    found = Walked()

    def main(comm: Any) -> None:
        rank = comm.Get_rank()
        model = model_of(start() + rank, dtype)  # only rank 0's is kept
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = found.policies[rank] = policy(comm)
        chosen.attach(model, comm)
        for step in range(steps):
            with comm.compute(pace(rank)):
                move(model, torch.from_numpy(drift(rank, step)))
            optimizer.param_groups[0]["lr"] = lr(step)
            model, optimizer, info = chosen(first + step, model, optimizer, None, comm)
            found.infos[rank, step] = info
            found.weights.setdefault(rank, []).append(vector(model).numpy())
        chosen.shutdown()
        chosen.shutdown()

    found.run = spawnsim.run(main, ranks=ranks, seed=how.pop("seed", 7), **how)
    return found


def recursion(
    round_of: Callable[[int, NDArray[np.float64]], NDArray[np.float64]],
    every: int,
    *,
    ranks: int = 4,
    steps: int = 12,
) -> NDArray[np.float64]:
    """Return the weights at the end, where `round_of(round, weights) -> weights` is called every so many steps."""
    weights = np.tile(start(), (ranks, 1))
    for step in range(steps):
        weights = weights + np.stack([drift(rank, step) for rank in range(ranks)])
        if (step + 1) % every == 0:
            weights = round_of((step + 1) // every - 1, weights)
    return weights
