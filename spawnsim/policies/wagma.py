"""`WAGMAPolicy`: wait-avoiding averaging in small groups that change from round to round.

`exchange/wait_avoiding.py` sums over a group without waiting for its slow members; `rules.graphs.butterfly_group`
defines the groups.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError
from spawnsim.policies.base import Info, SpawnPolicy
from spawnsim.policies.exchange.group_mean import GroupMean, latest_round
from spawnsim.policies.exchange.wait_avoiding import WaitAvoidingSums
from spawnsim.policies.rules.cadence import Cadence
from spawnsim.policies.rules.graphs import butterfly_group
from spawnsim.policies.state.arithmetic import sum_dtype
from spawnsim.policies.state.layout import Collector, ModelAndOptimizer, StateScope, Tensors, assign


class WAGMAPolicy(SpawnPolicy):
    """Wait-avoiding group averaging: no rank waits for a slow group member, except in every `sync_every`-th round.

    The first member to reach a round makes all other members contribute, in the background, their latest weights. If a
    rank's current weights θ are in the group's sum, it continues with their mean. If it came late, and older weights
    are in the sum, it continues with (sum + θ)/(S + 1). Each `sync_every`-th round is the mean of all ranks, so no
    contribution is older. Parameters and buffers may have any dtype. Ranks need equal numbers of rounds.

    Args:
        average_every: iterations from one round to the next.
        group_size: S, a power of two; None: the largest one up to the square root of the number of ranks, at least 2.
        sync_every: τ; every `sync_every` rounds the mean of all ranks is taken.
        travels: which parts of the state are averaged; each rank keeps its own optimizer state.
        patience_s: the longest wait for a group whose members are alive.
        cadence: when rounds are due, in place of `average_every`.
        timing: a dictionary to fill with durations in seconds, by step.
        tag: tag of the messages; two policies on one communicator need two tags.

    `info["staleness"]` is the age in rounds of this rank's contribution to the group: 0 if it came in time.

    Raises:
        ParameterError: an argument is out of range.
        MismatchError: in the first round, on every rank, if the models of the group differ in name, dtype or shape.
        RankFailed: a member of the round's group has died; this rank's model is then unchanged.
        Timeout: the group's sum did not arrive within `patience_s`; this rank's model is then unchanged.
    """

    paper = "arXiv 2005.00124"
    promises = ("range",)

    def __init__(
        self,
        average_every: int = 1,
        *,
        group_size: int | None = None,
        sync_every: int = 10,
        travels: StateScope | None = None,
        patience_s: float = 60.0,
        cadence: Cadence | None = None,
        timing: dict[str, list[float]] | None = None,
        tag: int = 7421,
    ) -> None:
        super().__init__(average_every, cadence=cadence, timing=timing)
        self.group_size, self.sync_every, self.patience_s, self.tag = group_size, sync_every, patience_s, tag
        self.travels = travels or StateScope()
        if self.travels.optimizer_state != "keep":
            raise ParameterError("optimizer_state: this policy leaves optimizers alone; give 'keep'")
        if group_size is not None and (group_size < 2 or group_size & (group_size - 1)):
            raise ParameterError(f"group_size={group_size!r}: give a power of two, at least 2")
        if sync_every < 1 or not patience_s > 0:
            raise ParameterError(
                f"sync_every={sync_every!r}, patience_s={patience_s!r}: rounds of at least 1, seconds > 0"
            )
        self.num_averagings = self.num_late = 0
        self.idle_info["staleness"] = 0
        self._collect = Collector(self.travels)
        self._met: Comm | None = None  # the communicator of the following attributes
        self._mean: GroupMean
        self._sums: WaitAvoidingSums | None = None

    def act(
        self,
        iteration: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        metric: float | None,
        comm: Comm,
        info: Info,
    ) -> ModelAndOptimizer:
        began_s, live = comm.clock.now(), self._collect(model, None)
        if self._met is not comm or self._sums is None:
            self._sums = self._meet(comm, live)
        if (self.num_averagings + 1) % self.sync_every == 0:
            if comm.Get_size() > 1:
                self._mean(comm, live)
            donors, nbytes = comm.Get_size() - 1, self._mean.nbytes
        else:
            own = _wide(live)
            total, members, staleness = self._sums.sum(self.num_averagings, own, self.patience_s)
            assign(live, _mean(total, own, len(members), live, late=staleness > 0))
            donors, phases = len(members) - 1, len(members).bit_length() - 1
            nbytes = 2 * phases * self._sums.form.weights.nbytes
            self.num_late += staleness > 0
            info["staleness"] = staleness
        self.num_averagings += 1
        wait_s = comm.clock.now() - began_s
        self.note("average", wait_s)
        info.update(averaged_this_iteration=donors > 0, donors=donors, bytes=nbytes, wait_s=wait_s)
        return model, optimizer

    def _meet(self, comm: Comm, live: Tensors) -> WaitAvoidingSums:
        """Begin on a group; collective. Messages under way on the previous one are lost."""
        if self._sums is not None:
            self._sums.engine.stop()
        self._mean = GroupMean(comm, live)
        self.num_averagings = latest_round(comm, self.num_averagings)
        self._met, size = comm, comm.Get_size()
        wanted = self.group_size or max(2, 1 << (size.bit_length() - 1) // 2)
        groups = partial(butterfly_group, comm.Get_rank(), size, wanted, seed=comm.rng.key[0])
        return WaitAvoidingSums(comm, self.tag, (self.num_averagings, _wide(live)), groups)

    def shutdown(self) -> None:
        """Leave. Other ranks may still be in rounds that are complete here: they have all the messages they need."""
        super().shutdown()
        if self._sums is not None:
            self._sums.engine.stop(self.patience_s)
        self._met, self._sums = None, None

    @property
    def stats(self) -> dict[str, float]:
        return {"num_averagings": self.num_averagings, "num_late": self.num_late}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_averagings": self.num_averagings, "num_late": self.num_late}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.num_averagings, self.num_late = int(state["num_averagings"]), int(state["num_late"])


def _wide(live: Tensors) -> Tensors:
    return {name: tensor.detach().to(sum_dtype(tensor.dtype), copy=True) for name, tensor in live.items()}


def _mean(total: Tensors, own: Tensors, count: int, live: Tensors, *, late: bool) -> Tensors:
    """Return a rank's new weights: the mean of its group, plus its own weights if they came too late for the sum."""
    found: Tensors = {}
    for name, tensor in total.items():
        value = (tensor + own[name]) / (count + 1) if late else tensor / count
        found[name] = value if live[name].is_floating_point() or live[name].is_complex() else value.round()
    return found
