"""Twenty steps of training under each of some policies; records each rank's parameters, bit for bit, as a digest."""

from __future__ import annotations

import hashlib
import json
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    EASGDPolicy,
    EDiTPolicy,
    GossipPolicy,
    NoLoCoPolicy,
    OneRoundLatePolicy,
    OneSidedSelectiveAveragingPolicy,
    OuterOptimizerPolicy,
    SPARTAPolicy,
    SpawnPolicy,
    StreamingDiLoCoPolicy,
    Travels,
    Windows,
    Wiring,
    graphs,
    replay,
)


class Model(torch.nn.Module):
    """All that a state may hold: buffers, a 0-dim parameter, half precision, a frozen and a whole-number part."""

    def __init__(self, seed: int, large: int = 30_000) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.first = torch.nn.Linear(6, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.logZ = torch.nn.Parameter(torch.zeros(()))
        self.short = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.frozen = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)
        self.large = torch.nn.Parameter(torch.zeros(large))  # more than is sent eagerly
        self.large_short = torch.nn.Parameter(torch.zeros(20_000, dtype=torch.bfloat16))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weighted: torch.Tensor = self.norm(self.first(x)) * self.short.float()
        return weighted.sum() + self.logZ + self.large[::1000].sum() + self.large_short[::100].float().sum()


def build(comm: Any, large: int = 30_000) -> tuple[Model, torch.optim.Optimizer]:
    """Return a fresh model, another one on each rank."""
    model = Model(comm.rng.seed("init"), large)
    return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)


OUTER: dict[str, Callable[[], SpawnPolicy]] = {
    "diloco": lambda: OuterOptimizerPolicy.diloco(3),
    "sparseloco": lambda: OuterOptimizerPolicy.sparseloco(3),
    "demo": lambda: OuterOptimizerPolicy.demo(0.01),
    "streaming": lambda: StreamingDiLoCoPolicy(6, fragments=2, overlap=2),
    "eager": lambda: OneRoundLatePolicy.eager(3, compression="float16"),
    "noloco": lambda: NoLoCoPolicy(3),
    "easgd": lambda: EASGDPolicy(3),
    "edit": lambda: EDiTPolicy(3),
    "sparta": lambda: SPARTAPolicy(3),
}


def policy_for(name: str, comm: Any, events: str) -> SpawnPolicy:
    """Return the policy of a name."""
    builder = lambda: build(comm)  # noqa: E731
    if name.startswith("replay"):
        lines = [json.loads(line) for line in Path(events).read_text().splitlines()]
        return replay(lines, builder)
    if name == "neighbours":
        example = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "examples" / "neighbours.py"))
        own: SpawnPolicy = example["NeighbourAveragingPolicy"](3)
        return own
    if name.startswith("outer-"):
        return OUTER[name.removeprefix("outer-")]()
    if name.startswith("gossip"):
        graph = {"ring": graphs.ring, "base": graphs.BaseGraph(1), "pairs": graphs.random_pairs}.get(
            name.split("-")[1]
        )
        return GossipPolicy(
            3, graph=graph or graphs.one_peer_exponential, push_sum="push-sum" in name, delay=int("delay" in name),
            global_every=2 if "global" in name else None,
        )  # fmt: skip
    if name.startswith("average"):
        state = "average" if "optimizer" in name else "keep"
        momentum = 0.25 if "momentum" in name else 0.0
        return AverageAllPolicy(3, momentum=momentum, travels=Travels(optimizer_state=state))
    if name.startswith("worst"):
        return OneSidedSelectiveAveragingPolicy(
            builder, None, 4, 0.0, 0.25, replacement_mode="worst_ratio", cooldown=0, group=comm
        )
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


GROUPS = {"": lambda rank: 0, "halves": lambda rank: rank % 2, "three": lambda rank: rank // 3}


def poison(model: Model, iteration: int) -> None:
    """Spoil some numbers of every kind, in the second step."""
    if iteration == 2:
        with torch.no_grad():
            for tensor in (model.large, model.large_short, model.first.weight.view(-1), model.frozen):
                tensor[1:3], tensor[-1] = math.nan, math.inf


def train(comm: Any, policy: str, steps: int, events: str) -> None:
    """Train under one policy and record how each rank ends; "@halves" and "@three" let some train apart.

    "poisoned": one rank's weights turn into NaN. "equal": all are built alike, and none takes a step.
    "worst": metrics that rise, or fall, from iteration to iteration, and whose order is that of the ranks.
    """
    policy, _, where = policy.partition("@")
    group = comm.Split(GROUPS[where](comm.Get_rank()), 0) if where else comm
    model: Any
    model, optimizer = build(
        comm, large=600_000 if policy.startswith("average") else 30_000
    )  # summed in two pieces
    if "equal" in policy:
        model = Model(5).eval()
        comm.record.event("start", digest=digest(model))
    chosen = policy_for(policy, group, events)
    comm.Barrier()
    for iteration in range(steps):
        with comm.compute(0.001):
            x = torch.from_numpy(
                comm.rng(f"data/{policy.removeprefix('replay-')}").normal(size=(8, 6))
            ).float()
            loss = model(x).square()
            optimizer.zero_grad()
            if "equal" not in policy:
                loss.backward()
                optimizer.step()
        if "poisoned" in policy and comm.Get_rank() == 1:
            poison(model, iteration)
        comm.clock.sleep(0.005)
        if iteration % 5 == 0:  # so that no rank is through before another one was given a core
            comm.Barrier()
        metric = -loss
        if policy.startswith("worst"):
            metric = 0.02 * comm.Get_rank() + (0.1 if "rising" in policy else -0.1) * iteration
        model, optimizer, info = chosen(iteration, model, optimizer, metric, group)
        comm.record(iteration=iteration, **info)
    chosen.shutdown()
    comm.record.event("end", digest=digest(model), finite=all(t.isfinite().all() for t in model.parameters()))


def main(comm: Any, policies: str = "average", steps: int = 20, events: str = "") -> None:
    torch.set_num_threads(1)
    for policy in policies.split(","):
        train(comm, policy, steps, events)
