"""`EASGDPolicy`: springs tie ranks to a common centre. Source: Zhang, Choromanska and LeCun 2015 (arXiv 1412.6651)."""

from __future__ import annotations

from typing import Any

import torch

from spawnsim.errors import ParameterError
from spawnsim.policies.base import Info
from spawnsim.policies.outer_optimizer import GlobalWeightsPolicy
from spawnsim.policies.state.layout import assign
from spawnsim.policies.state.outer import OuterSGD


class EASGDPolicy(GlobalWeightsPolicy):
    """Elastic averaging SGD, synchronous: c ← c + α·Σ(θ_m − c) and θ ← θ − α·(θ − c), with α = moving_rate/ranks.

    Every rank holds the same centre c, so no rank is a server; one Allreduce per round.

    Args:
        average_every: τ, iterations from one round to the next.
        moving_rate: β = α·ranks, from 0 to 1.
        how: `compression`, `feedback`, `travels`, `cadence`, `timing` as in `OuterOptimizerPolicy`.
    """

    paper = "arXiv 1412.6651"
    promises = ("range", "progress")

    refused = ("lr", "momentum", "nesterov", "sign", "clip", "fragments", "fragmenter")

    def __init__(self, average_every: int = 10, *, moving_rate: float = 0.9, **how: Any) -> None:
        if not 0 <= moving_rate <= 1:
            raise ParameterError(f"moving_rate={moving_rate!r}: give a number from 0 to 1")
        super().__init__(average_every, rule=OuterSGD(moving_rate, 0.0, nesterov=False), **how)
        self.moving_rate = float(moving_rate)

    def turn(
        self, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, info: Info
    ) -> int:
        group = self.outer
        assert group.comm is not None
        live, share = group.live(model), self.rule.lr / group.comm.Get_size()
        (fragment,) = group.fragments
        healed = fragment.read_difference(live)
        own = fragment.weights.zeros()
        for row, delta, weight in zip(own.rows, fragment.delta.rows, fragment.weights.rows, strict=True):
            torch.sub(weight, delta, alpha=1 - share, out=row)  # θ + α·(c − θ), where Δ is c − θ
        mean = group.mean(0, fragment.delta)
        mean.wait()
        fragment.step(self.rule)
        assign(live, own.tensors())
        self.stepped(iteration, info, mean.nbytes)
        return healed
