"""`AverageAllPolicy`: every N iterations, all ranks of the group take the mean of their models.

Transport: one Allreduce per wire dtype (`exchange/group_mean.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError, UsageError
from spawnsim.policies.base import Info, Result, SpawnPolicy, as_metric, blank_info
from spawnsim.policies.exchange.group_mean import GroupMean
from spawnsim.policies.rules.cadence import Cadence, Every
from spawnsim.policies.rules.donors import check_momentum
from spawnsim.policies.state.layout import (
    Collector,
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
        super().__init__(
            average_every, cadence=cadence if cadence is not None else Every(average_every, at_zero=True)
        )
        self.guard = bool(guard)
        self.travels = travels or Travels()
        if self.travels.optimizer_state == "copy":
            raise ParameterError(
                "optimizer_state='copy': an average has no single donor; average, reset or keep"
            )
        self.momentum = check_momentum(momentum)
        self.timing = timing if timing is not None else {}
        self.num_averagings = self.num_healed = 0
        self._bound: tuple[object, Comm] | None = None
        self._latest: tuple[int, object] | None = None  # iteration and group
        self._mean: GroupMean | None = None
        self._collect, self._live = Collector(self.travels), dict[str, torch.Tensor]()
        self._idle = blank_info("none", self.average_every)

    def __call__(
        self,
        iteration: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        local_metric: float | None = None,
        group: Any = None,
    ) -> Result:
        """Average with the group if this iteration is due; all ranks of the group must then call."""
        info = self._idle.copy()
        if local_metric is not None:
            info["local_metric"] = as_metric(local_metric)
        self._latest = (iteration, group)
        if self.cadence.due(iteration):
            self._average(self._comm(group), model, optimizer, info)
        return model, optimizer, info

    def _comm(self, group: Any) -> Comm:
        if self._bound is None or self._bound[0] is not group:
            self._bound, self._mean = (group, self.comm_of(group)), None
        return self._bound[1]

    def _average(
        self, comm: Comm, model: torch.nn.Module, optimizer: torch.optim.Optimizer, info: Info
    ) -> None:
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

    def _checked(self, comm: Comm, live: Tensors) -> GroupMean:
        if self._mean is None:
            self._mean = GroupMean(comm, live, guard=self.guard)
        elif live is not self._live and not self._mean.layout.matches(live):
            raise UsageError(
                f"rank {comm.Get_rank()}: the model has changed since the group first averaged "
                f"({self._mean.layout.difference(type(self._mean.layout).of(live))}); make a new policy on all ranks"
            )
        self._live = live
        return self._mean

    def shutdown(self) -> None:
        """Say so if the cadence was longer than the run. Not collective; may be called twice."""
        latest, self._latest = self._latest, None
        if latest is not None:
            self.warn_if_never_due(*latest)

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
