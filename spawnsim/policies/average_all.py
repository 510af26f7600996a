"""`AverageAllPolicy`: every N iterations, all ranks of the group take the mean of their models.

Transport: one Allreduce per wire dtype (`exchange/group_mean.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError, UsageError
from spawnsim.policies.base import Info, SpawnPolicy
from spawnsim.policies.exchange.group_mean import GroupMean
from spawnsim.policies.rules.cadence import Cadence, Every
from spawnsim.policies.rules.donors import check_momentum
from spawnsim.policies.state.layout import (
    Collector,
    Layout,
    ModelAndOptimizer,
    Tensors,
    Travels,
    assign_optimizer,
    reset_if_not_finite,
    reset_optimizer,
)


class AverageAllPolicy(SpawnPolicy):
    """Model averaging over all ranks of the group: every rank ends with the mean of all ranks.

    Parameters and buffers are averaged, in any dtype; `travels` adds or leaves out parts. `momentum` m keeps a
    part of the own weights: θ ← m·θ_own + (1 - m)·mean. A model of many small tensors is averaged at half the price
    after `spawnsim.policies.one_storage(model)`. Iteration 0 averages too, as in the original: ranks that were built
    apart begin together (another `cadence` does otherwise). The mean of equal models is that model, to the bit.

    `guard`: a float that is not finite (NaN, infinite) counts for nothing: the mean is taken over the ranks that have
    a finite one there, and all ranks get it, the others' included; where no rank has one, each keeps its own. A rank
    that was healed so forgets its optimizer's state if that is not finite either, and records an event "healed" and a
    warning. All ranks of a group must give the same. Without it one rank's NaN reaches all of them.

    Raises:
        MismatchError: at the first averaging, on every rank, if the models of the group differ in name, dtype or shape.
        Timeout: if the group does not meet within `comm.clock.deadline`; the own model is then unchanged.
            (Where a job does not survive this, `comm.capabilities().survives`, it ends instead.)
    """

    def __init__(
        self,
        average_every: int,
        *,
        momentum: float = 0.0,
        travels: Travels | None = None,
        cadence: Cadence | None = None,
        timing: dict[str, list[float]] | None = None,
        guard: bool = True,
    ) -> None:
        cadence = cadence if cadence is not None else Every(average_every, at_zero=True)
        super().__init__(average_every, cadence=cadence, timing=timing)
        self.guard = bool(guard)
        self.travels = travels or Travels()
        if self.travels.optimizer_state == "copy":
            raise ParameterError(
                "optimizer_state='copy': an average has no single donor; average, reset or keep"
            )
        self.momentum = check_momentum(momentum)
        self.num_averagings = self.num_healed = 0
        self._mean: tuple[Comm, GroupMean] | None = None
        self._collect, self._live = Collector(self.travels), dict[str, torch.Tensor]()

    def act(
        self,
        iteration: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        metric: float | None,
        comm: Comm,
        info: Info,
    ) -> ModelAndOptimizer:
        """Average with the group; all of its ranks must call in this iteration."""
        began_s = comm.clock.now()
        live = self._collect(model, optimizer)
        mean = self._checked(comm, live)
        if comm.Get_size() > 1 and mean(comm, live, self.momentum).numbers:
            self.num_healed += 1
            reset_if_not_finite(optimizer)
        if self.travels.optimizer_state == "reset":
            reset_optimizer(optimizer)
        elif self.travels.optimizer_state == "average":
            assign_optimizer(
                model, optimizer, live
            )  # plain numbers among the state are not averaged in place
        self.num_averagings += 1
        wait_s = comm.clock.now() - began_s
        self.note("average", wait_s)
        info.update(
            averaged_this_iteration=True, donors=comm.Get_size() - 1, bytes=mean.nbytes, wait_s=wait_s
        )
        return model, optimizer

    def _checked(self, comm: Comm, live: Tensors) -> GroupMean:
        if self._mean is None or self._mean[0] is not comm:
            self._mean = (comm, GroupMean(comm, live, guard=self.guard))
        mean = self._mean[1]
        if live is not self._live and not mean.layout.matches(live):
            raise UsageError(
                f"rank {comm.Get_rank()}: the model has changed since the group first averaged "
                f"({mean.layout.difference(Layout.of(live))}); make a new policy on all ranks"
            )
        self._live = live
        return mean

    @property
    def stats(self) -> dict[str, float]:
        """Averagings so far, and those in which this rank was healed."""
        return {"num_averagings": self.num_averagings, "num_healed": self.num_healed}

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return {**super().state_dict(), "num_averagings": self.num_averagings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the counters of a checkpoint."""
        super().load_state_dict(state)
        self.num_averagings = int(state["num_averagings"])
