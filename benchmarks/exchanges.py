"""A training of matrix products under any policy, for real runs and their predictions.

    mpiexec -n 2 spawnsim validate benchmarks/exchanges.py --set policy=average,selective --set size=1e4,1e6

A step takes some milliseconds of one core. Ranks exchange a model of `size` parameters in four tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from spawnsim.errors import ParameterError
from spawnsim.policies import (
    AsyncModelAveragePolicy,
    AsyncSelectiveAveragingPolicy,
    AsyncServerPolicy,
    AverageAllPolicy,
    DecoupledDiLoCoPolicy,
    EASGDPolicy,
    EDiTPolicy,
    GossipPolicy,
    NoLoCoPolicy,
    OneRoundLatePolicy,
    OneSidedSelectiveAveragingPolicy,
    OuterOptimizerPolicy,
    PopulationBasedTrainingPolicy,
    ServerOptions,
    ServerRule,
    SPARTAPolicy,
    SpawnPolicy,
    StreamingDiLoCoPolicy,
    WAGMAPolicy,
    Windows,
    graphs,
)

SIDE = 160  # of the matrices of a step: a product takes about a third of a millisecond

Builder = Callable[[], tuple[torch.nn.Module, torch.optim.Optimizer]]
POLICIES: dict[str, Callable[[int, Builder, Any], SpawnPolicy | None]] = {
    "none": lambda every, build, comm: None,
    "average": lambda every, build, comm: AverageAllPolicy(every),
    "selective": lambda every, build, comm: AsyncSelectiveAveragingPolicy(build, every, 0.5, cooldown=0),
    "flat": lambda every, build, comm: _one_sided(every, build, comm, "flat"),
    "per_parameter": lambda every, build, comm: _one_sided(every, build, comm, "per_parameter"),
    "population": lambda every, build, comm: PopulationBasedTrainingPolicy(every),
    "gossip": lambda every, build, comm: GossipPolicy(every, graph=graphs.BaseGraph(1)),
    "push_sum": lambda every, build, comm: GossipPolicy(
        every, graph=graphs.one_peer_exponential, push_sum=True, delay=1
    ),
    "server": lambda every, build, comm: AsyncServerPolicy(ServerOptions(ServerRule(0.5, 0.0)), steps=every),
    "easgd": lambda every, build, comm: EASGDPolicy(every),
    "diloco": lambda every, build, comm: OuterOptimizerPolicy.diloco(every),
    "sparseloco": lambda every, build, comm: OuterOptimizerPolicy.sparseloco(every),
    "streaming": lambda every, build, comm: StreamingDiLoCoPolicy(
        2 * every, fragments=2, fragmenter="greedy"
    ),
    "decoupled": lambda every, build, comm: DecoupledDiLoCoPolicy(every, fragments=2),
    "late": lambda every, build, comm: OneRoundLatePolicy(every),
    "noloco": lambda every, build, comm: NoLoCoPolicy(every),
    "edit": lambda every, build, comm: EDiTPolicy(every),
    "sparta": lambda every, build, comm: SPARTAPolicy(every),
    "wagma": lambda every, build, comm: WAGMAPolicy(every),
    "clock": lambda every, build, comm: AsyncModelAveragePolicy(sync_interval_ms=20.0 * every),
}


def _one_sided(every: int, build: Builder, comm: Any, layout: Any) -> SpawnPolicy:
    return OneSidedSelectiveAveragingPolicy(
        build, None, every, 0.5, cooldown=0, group=comm, windows=Windows(layout)
    )


class Model(torch.nn.Module):
    """Four tensors of a quarter of the parameters each."""

    def __init__(self, size: int, draw: np.random.Generator) -> None:
        super().__init__()
        for name in "abcd":
            values = draw.standard_normal(size // 4, dtype=np.float32)
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(values)))


def main(
    comm: Any,
    policy: str = "average",
    size: float = 1e5,  # number of parameters
    iterations: int = 60,
    every: int = 5,  # iterations between two exchanges
    products: int = 8,  # matrix products per step
) -> None:
    """Take steps, and exchange a model with the other ranks."""
    if policy not in POLICIES:
        raise ParameterError(f"policy={policy!r}: choose {', '.join(POLICIES)}")
    torch.set_num_threads(1)
    draw = comm.rng("model")

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = Model(int(size), draw)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = build()
    exchange = POLICIES[policy](every, build, comm)
    matrix = np.eye(SIDE) * 0.5
    for iteration in range(iterations):
        with comm.compute():
            for _ in range(products):
                matrix = matrix @ matrix + matrix
                matrix /= max(float(np.abs(matrix).max()), 1.0)
        if exchange is not None:
            # Ranks take turns to have the worst metric, so that a rank is replaced in every round.
            metric = float((comm.Get_rank() + iteration // every) % comm.Get_size())
            model, optimizer, _ = exchange(iteration, model, optimizer, local_metric=metric, group=comm)
    if exchange is not None:
        exchange.shutdown()
