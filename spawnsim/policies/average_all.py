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
    StateScope,
    Tensors,
    assign_optimizer,
    reset_if_not_finite,
    reset_optimizer,
)


class AverageAllPolicy(SpawnPolicy):
    """Model averaging over all ranks of the group: every rank ends with the mean of all ranks.

    Parameters and buffers of any dtype are averaged. The mean of equal models is that model, to the bit. A model of
    many small tensors is averaged at half the cost after `spawnsim.policies.one_storage(model)`.

    Args:
        average_every: iterations between averagings. Iteration 0 averages too, as in the original, so that ranks with
            different initial weights start from the same model.
        momentum: m in θ ← m·θ_own + (1 - m)·mean, from 0 to 1.
        travels: which parts of the state are averaged.
        cadence: when to average, in place of `average_every`.
        timing: a dictionary to fill with durations in seconds, by step.
        guard: ignore floats that are not finite (NaN, infinite): the mean is taken over the ranks with a finite value
            in that place, and all ranks get it; if no rank has a finite value, each keeps its own. A rank with replaced
            values also resets its optimizer's state if that is not finite, records an event "healed" and logs a
            warning. All ranks of a group must give the same value. Without `guard`, one rank's NaN reaches all ranks.

    Raises:
        ParameterError: an argument is out of range.
        MismatchError: at the first averaging, on every rank, if the models of the group differ in name, dtype or shape.
        Timeout: if the group does not meet within `comm.clock.deadline`; this rank's model is then unchanged. (If the
            job cannot survive this, see `comm.capabilities().survives`, it ends instead.)
    """

    paper = "arXiv 1805.09767"
    promises = ("mean", "range", "progress")
    states = ("average", "healed")

    def __init__(
        self,
        average_every: int,
        *,
        momentum: float = 0.0,
        travels: StateScope | None = None,
        cadence: Cadence | None = None,
        timing: dict[str, list[float]] | None = None,
        guard: bool = True,
    ) -> None:
        cadence = cadence if cadence is not None else Every(average_every, at_zero=True)
        super().__init__(average_every, cadence=cadence, timing=timing)
        self.guard = bool(guard)
        self.travels = travels or StateScope()
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
        began_s = comm.clock.now()
        live = self._collect(model, optimizer)
        mean = self._checked(comm, live)
        if comm.Get_size() > 1 and mean(comm, live, self.momentum).numbers:
            self.num_healed += 1
            reset_if_not_finite(optimizer)
        if self.travels.optimizer_state == "reset":
            reset_optimizer(optimizer)
        elif self.travels.optimizer_state == "average":
            # Plain numbers in the state are not averaged in place.
            assign_optimizer(model, optimizer, live)
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
        """Averagings so far, and averagings that healed values of this rank."""
        return {"num_averagings": self.num_averagings, "num_healed": self.num_healed}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_averagings": self.num_averagings, "num_healed": self.num_healed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.num_averagings, self.num_healed = int(state["num_averagings"]), int(state.get("num_healed", 0))
        self._mean = None
