"""The mean model of a group over time: what averaging would give, whatever the policy.

Ranks of one policy hold different models, and are at different iterations at one time. Papers therefore judge the mean
of all models (the consensus model) at given times. Each rank keeps the weights that it held at those times, which
disturbs nobody; the sums are formed when training is over.

This module knows models, a group's clock and collectives; it must not know policies.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from spawnsim.comm import MAX, SUM, Comm
from spawnsim.errors import ParameterError
from spawnsim.policies.collector import Collector
from spawnsim.policies.state import Travels, collect

AT_ONCE_NBYTES = 1 << 18  # summed by one call: a call for each time would cost more than the sum


class Consensus:
    """Keeps a rank's weights at the multiples of a period of its clock, and gives the group's means of them.

    >>> consensus = Consensus(comm, model, every_s=0.1)
    >>> for iteration in range(iterations):
    ...     model = train_and_exchange(iteration, model)
    ...     consensus.passed(model)
    >>> for time_s, mean in consensus.means():
    ...     comm.record.event("consensus", at_s=time_s, accuracy=accuracy(mean))

    Each time takes the memory of the weights, unless they have not changed since the last one.

    Args:
        comm: the group.
        model: as training begins. Its floating-point parameters and buffers are averaged, in float32 at least.
        every_s: the period, in seconds of `comm.clock`.
    """

    def __init__(self, comm: Comm, model: torch.nn.Module, every_s: float) -> None:
        if not every_s > 0:
            raise ParameterError(f"every_s={every_s!r}: give seconds above 0")
        self._comm, self._every_s, self._model = comm, every_s, model
        self._collect = Collector(Travels())
        self._held = self._weights(model)
        self._kept: list[Tensor] = []

    def passed(self, model: torch.nn.Module) -> None:
        """Note that an iteration has ended with this model; until now the rank held the one of before."""
        due = int(self._comm.clock.now() / self._every_s) + 1
        self._kept += [self._held] * (due - len(self._kept))
        self._held, self._model = self._weights(model), model

    def means(self) -> Iterator[tuple[float, torch.nn.Module]]:
        """Yield each time and the mean model then, on the group's first rank; on the others nothing. Collective.

        Goes on until the last rank has ended, and waits for it; those that ended before count with their last weights.
        """
        comm, held = self._comm, self._held
        with comm.clock.deadline(float("inf")):  # a straggler may end much later than the first
            ticks = comm.allreduce(len(self._kept), op=MAX)
        self._kept += [held] * (ticks - len(self._kept))
        found, at_once = copy.deepcopy(self._model), max(1, AT_ONCE_NBYTES // max(held.nbytes, 1))
        for begin in range(0, ticks, at_once):
            mine = torch.stack(self._kept[begin : begin + at_once])
            total = torch.zeros_like(mine)
            comm.Reduce(mine, total, op=SUM, root=0)
            if comm.Get_rank() == 0:
                for tick, weights in enumerate(total / comm.Get_size(), start=begin):
                    _assign(found, weights)
                    yield tick * self._every_s, found

    def _weights(self, model: torch.nn.Module) -> Tensor:
        """Return all weights as one vector of the widest type, float32 at least."""
        live = self._collect(model, None).values()
        floating = [each.reshape(-1) for each in live if each.is_floating_point()]
        return torch.cat([torch.empty(0, dtype=torch.float32), *floating])


def _assign(model: torch.nn.Module, weights: Tensor) -> None:
    tensors = [each for each in collect(model, None, Travels()).values() if each.is_floating_point()]
    for tensor, part in zip(tensors, torch.split(weights, [each.numel() for each in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
