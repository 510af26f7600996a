"""Twenty steps of training under each of some policies; records each rank's parameters, bit for bit, as a digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    OneSidedSelectiveAveragingPolicy,
    SpawnPolicy,
    Travels,
    Windows,
    Wiring,
    replay,
)


class Model(torch.nn.Module):
    """All that a state may hold: buffers, a 0-dim parameter, half precision, a frozen and a whole-number part."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.first = torch.nn.Linear(6, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.logZ = torch.nn.Parameter(torch.zeros(()))
        self.short = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.frozen = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weighted: torch.Tensor = self.norm(self.first(x)) * self.short.float()
        return weighted.sum() + self.logZ


def build(comm: Any) -> tuple[Model, torch.optim.Optimizer]:
    """Return a fresh model, another one on each rank."""
    model = Model(comm.rng.seed("init"))
    return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)


def policy_for(name: str, comm: Any, events: str) -> SpawnPolicy:
    """Return the policy of a name."""
    builder = lambda: build(comm)  # noqa: E731
    if name.startswith("replay"):
        lines = [json.loads(line) for line in Path(events).read_text().splitlines()]
        return replay(lines, builder)
    if name.startswith("average"):
        state = "average" if name.endswith("optimizer") else "keep"
        momentum = 0.25 if name.endswith("momentum") else 0.0
        return AverageAllPolicy(3, momentum=momentum, travels=Travels(optimizer_state=state))
    if name.startswith("windows"):
        layout = name.removeprefix("windows-")
        return OneSidedSelectiveAveragingPolicy(
            builder,
            None,
            2,
            age_range=(2, 5),
            group=comm,
            windows=Windows(layout),
        )
    return AsyncSelectiveAveragingPolicy(
        builder, 2, 0.3, name, cooldown=0, momentum=0.1, wiring=Wiring(deadline=0.5), nan_policy="exclude"
    )


def digest(model: torch.nn.Module) -> str:
    """Return a digest of all parameters and buffers, bit for bit."""
    state = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        state.update(name.encode() + tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def train(comm: Any, policy: str, steps: int, events: str) -> None:
    """Train under one policy and record how each rank ends; "@halves" lets even and odd ranks train apart."""
    policy, _, where = policy.partition("@")
    group = comm.Split(comm.Get_rank() % 2, 0) if where else comm
    model: torch.nn.Module
    model, optimizer = build(comm)
    chosen = policy_for(policy, group, events)
    comm.Barrier()
    for iteration in range(steps):
        with comm.compute(0.001):
            x = torch.from_numpy(
                comm.rng(f"data/{policy.removeprefix('replay-')}").normal(size=(8, 6))
            ).float()
            loss = model(x).square()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        comm.clock.sleep(0.005)
        if iteration % 5 == 0:  # so that no rank is through before another one was given a core
            comm.Barrier()
        model, optimizer, info = chosen(iteration, model, optimizer, -loss, group)
        comm.record(iteration=iteration, **info)
    chosen.shutdown()
    comm.record.event("end", digest=digest(model))


def main(comm: Any, policies: str = "average", steps: int = 20, events: str = "") -> None:
    torch.set_num_threads(1)
    for policy in policies.split(","):
        train(comm, policy, steps, events)
