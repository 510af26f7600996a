"""`SPARTAPolicy`: in every step, average a few weights, drawn at random. Source: EXO Labs 2025."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from spawnsim.comm import Comm
from spawnsim.policies.base import Info
from spawnsim.policies.exchange.group_mean import GroupMean
from spawnsim.policies.options import OuterOptions
from spawnsim.policies.outer_optimizer import GlobalWeightsPolicy
from spawnsim.policies.state.arithmetic import META
from spawnsim.policies.state.difference_codecs import RandomMask
from spawnsim.policies.state.layout import Tensors, assign


class SPARTAPolicy(GlobalWeightsPolicy):
    """SPARTA: in every round the group averages a few weights, drawn at random, and keeps all other weights unchanged.

    All ranks draw the same positions, so positions are not sent. A weight that is not finite on some ranks becomes the
    mean over the other ranks.

    Args:
        average_every: iterations from one round to the next.
        share: share of the weights that is averaged in a round, above 0 and at most 1.
        how: `travels`, `cadence`, `timing` as in `OuterOptimizerPolicy`.
    """

    paper = "EXO Labs 2025"
    newcomers_only = True
    promises = ("range", "progress")

    usual = OuterOptions(1.0, 0.0)
    refused = tuple(field.name for field in fields(OuterOptions) if field.name != "travels")

    def __init__(self, average_every: int = 1, *, share: float = 0.005, **how: Any) -> None:
        super().__init__(average_every, **how)
        self.share = RandomMask(share).share
        self._mean: GroupMean | None = None
        self._picked: Tensors = {}

    def _join(self, comm: Comm, model: torch.nn.Module) -> bool:
        fresh = super()._join(comm, model)
        weights = self.outer.fragments[0].weights
        counts = [RandomMask(self.share).kept(row.numel()) for row in weights.rows]
        self._picked = {
            str(number): row.new_empty(count)
            for number, (row, count) in enumerate(zip(weights.rows, counts, strict=True))
        }
        self._mean = GroupMean(comm, self._picked)
        return fresh

    def turn(
        self, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, info: Info
    ) -> int:
        group = self.outer
        assert group.comm is not None
        assert self._mean is not None
        live, weights = group.live(model), group.fragments[0].weights
        weights.read(live)
        mask = RandomMask(self.share, group.comm.rng.key[0], iteration)
        places = [
            None if weights.device == META else torch.from_numpy(mask.places(row.numel()))
            for row in weights.rows
        ]
        picked = zip(weights.rows, places, self._picked.values(), strict=True)
        chosen = [(row, place, few) for row, place, few in picked if place is not None]
        for row, place, few in chosen:
            few.copy_(row[place])
        self._mean(group.comm, self._picked)  # records healed elements
        for row, place, few in chosen:
            row[place] = few
        assign(live, weights.tensors())
        self.stepped(iteration, info, self._mean.nbytes)
        return 0
