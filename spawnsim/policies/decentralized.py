"""`DecentralizedAveragingPolicy`: averaging in small groups, behind the call that all policies share.

It handles models and one `DecentralizedAverager`; `averaging` forms the groups and averages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError, UsageError, WorldError
from spawnsim.policies.averaging.averager import DecentralizedAverager
from spawnsim.policies.averaging.directory import State
from spawnsim.policies.averaging.interface import StepControl
from spawnsim.policies.averaging.vector import Vector
from spawnsim.policies.base import Info, SpawnPolicy
from spawnsim.policies.rules.cadence import Cadence
from spawnsim.policies.state.codecs import (
    Choices,
    CodecChoice,
    CompressionInfo,
    RoleAdaptiveCompression,
    TensorRole,
)
from spawnsim.policies.state.layout import (
    ModelAndOptimizer,
    StateScope,
    Tensors,
    assign,
    assign_optimizer,
    collect,
)

ROLES = {"parameter": TensorRole.PARAMETER, "optimizer": TensorRole.OPTIMIZER}


def infos_by_name(tensors: Tensors) -> list[CompressionInfo]:
    """Return the inputs of the compression choice: name, shape, dtype and role of each tensor of a model's state."""
    return [
        CompressionInfo.from_tensor(tensor, name, ROLES.get(name.partition("/")[0], TensorRole.UNSPECIFIED))
        for name, tensor in tensors.items()
    ]


def _parameters_only(compression: Choices) -> Choices:
    """Return compression that keeps optimizer state exact, unless `compression` chooses per tensor itself."""
    if compression is None or isinstance(compression, (list, tuple, Mapping, CodecChoice)):
        return compression
    return RoleAdaptiveCompression(optimizer="none", default=compression)  # type: ignore[arg-type]


class _ModelAverager(DecentralizedAverager):
    """An averager of a model's tensors; newcomers download the whole model and optimizer."""

    latest: tuple[int, torch.nn.Module, torch.optim.Optimizer]

    def get_current_state(self) -> State:
        """Return ((iteration, names), tensors, their `CompressionInfo`s) of the current model and optimizer."""
        iteration, model, optimizer = self.latest
        tensors = collect(model, optimizer, StateScope(optimizer_state="copy"))
        return (iteration, list(tensors)), list(tensors.values()), infos_by_name(tensors)


class DecentralizedAveragingPolicy(SpawnPolicy):
    """Every `average_every` iterations, average the model with a small group of ranks that search at the same time.

    All keyword arguments of `DecentralizedAverager` apply (`target_group_size`, `matchmaking`, `compression`, …).

    Args:
        average_every: iterations between averagings.
        prefix: the averager's prefix; two policies on one group need two.
        asynchronous: if true, a call begins a step and returns. A later call applies the average when it has arrived,
            as a delta, so that training steps taken meanwhile are preserved. If false, a call waits for the step, and
            continues without an average if no group was found within `step_timeout` (default: one search,
            `min_matchmaking_time` + `request_timeout`, or the deadline if that is shorter). A rank without a group
            waits for that time: choose both times to fit the time between averagings.
        load_state: a rank whose first call is after iteration 0 downloads model and optimizer from the best donor, and
            returns them with "loaded_from_peer" in `info`.
        travels: which parts of the state are averaged.
        weight: this rank's weight.
        compression: as in `DecentralizedAverager`. A name or codec keeps the optimizer's state exact: a rounded second
            moment leads to steps of any size. The keys of tensors are their names, and they have roles.

    Additional keys of `info`: "group_size", the number of averaged ranks, including this one; "complete", whether all
    ranks of the group were averaged in all elements; "received", the share of this rank's elements that came back
    averaged; "missing", the number of ranks whose values are missing from some elements (the event "partial_average"
    names these ranks, with the share of missing elements). "donors" counts the ranks whose values are in all elements.
    """

    paper = "arXiv 2103.03239"

    acts_in_every_call = True
    promises = ("range", "progress")
    states = ("average", "group", "partial_average")

    # fmt: off
    def __init__(
        self, average_every: int = 1, *, prefix: str = "policy", asynchronous: bool = False, load_state: bool = False,
        travels: StateScope | None = None, weight: float = 1.0, cadence: Cadence | None = None,
        timing: dict[str, list[float]] | None = None, **averager: Any,
    ) -> None:
        # fmt: on
        super().__init__(average_every, cadence=cadence, timing=timing)
        self.travels = travels if travels is not None else StateScope()
        if self.travels.optimizer_state in ("copy", "reset"):
            raise ParameterError(
                f"optimizer_state={self.travels.optimizer_state!r}: averaging in groups keeps or averages "
                "optimizers; give keep or average"
            )
        self.asynchronous, self.load_state, self.weight = asynchronous, load_state, weight
        self.num_averagings = self.num_partial = 0
        self.averager: _ModelAverager | None = None
        self._parameters = {"prefix": prefix, **averager, "compression": _parameters_only(averager.get("compression"))}
        self._control: tuple[StepControl, float, int] | None = None  # step, its start time, bytes sent before
        self._resumed = False  # loaded from a checkpoint, so no download
        self.idle_info |= {"group_size": 0, "received": 0.0, "complete": False, "missing": 0}

    def act(
        self,
        iteration: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        metric: float | None,
        comm: Comm,
        info: Info,
    ) -> ModelAndOptimizer:
        """Average with a group if this iteration is due; serve other ranks in any case."""
        averager = self.averager
        if averager is None or averager.comm is not comm:
            averager = self._join(comm, iteration, model, optimizer, info)
        elif model is not averager.latest[1]:
            self._rebind(averager, model, optimizer)
        averager.latest = iteration, model, optimizer
        averager.donor.priority = float(iteration)  # newcomers ask the rank with the highest iteration
        averager.progress()
        self._finish(averager, info)
        alone = comm.Get_size() == 1  # e.g. the last survivor: a search would wait until its time-out
        if self._control is None and self.cadence.due(iteration) and not alone:
            self._start(averager)
            if not self.asynchronous:
                averager.engine.drive(self._arrived, math.inf)
            self._finish(averager, info)
        return model, optimizer

    def _join(
        self, comm: Comm, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, info: Info
    ) -> _ModelAverager:
        if self.averager is not None:
            with suppress(WorldError):  # the previous group may be revoked, after the death of a rank
                self.averager.shutdown(0.0)
        live = collect(model, optimizer, self.travels)
        averager = self.averager = _ModelAverager(
            list(live.values()), comm, **{"start": False, "tensor_infos": infos_by_name(live), **self._parameters}
        )
        averager.latest = iteration, model, optimizer
        self._control = None
        if self.load_state and iteration > 0 and not self._resumed:
            info["loaded_from_peer"] = self._load(averager, live)
        self._resumed = False
        return averager

    def _rebind(
        self, averager: DecentralizedAverager, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Follow the caller to another model object, if it has the same tensors."""
        tensors = list(collect(model, optimizer, self.travels).values())
        vector = Vector(tensors, averager.codecs(tensors))
        if vector.schema != averager.vector.schema:
            raise UsageError(f"rank {averager.rank}: the model has other tensors than before; make a new policy")
        averager.vector = vector

    def _load(self, averager: _ModelAverager, live: Tensors) -> bool:
        state = averager.load_state_from_peers(timeout=averager.search_s())
        if not isinstance(state, tuple):
            return False
        (_, names), tensors = state
        values = dict(zip(names, tensors, strict=True))
        if any(name in values and values[name].shape != tensor.shape for name, tensor in live.items()):
            raise UsageError(f"rank {averager.rank}: the donor's model has other shapes than this one")
        _, model, optimizer = averager.latest
        assign(collect(model, None, StateScope()), values)
        assign_optimizer(model, optimizer, values)
        return True

    def _start(self, averager: DecentralizedAverager) -> None:
        began_s = averager.comm.clock.now()
        sent = averager.endpoint.counts["bytes_sent"]
        control = averager.step(wait=False, weight=self.weight, timeout=self._search_s(averager))
        assert isinstance(control, StepControl)
        self._control = (control, began_s, sent)

    def _search_s(self, averager: DecentralizedAverager) -> float:
        # A rank without a group may be late for a collective call (a checkpoint's, or the last one), in which all other
        # ranks wait for it. If it searched for the whole deadline, theirs would expire first.
        settings = averager.settings
        one_s = settings.min_matchmaking_time + settings.request_timeout
        return averager.search_s() if settings.step_timeout is not None else min(averager.search_s(), one_s)

    def _arrived(self) -> bool:
        return self._control is None or self._control[0].done()

    def _finish(self, averager: DecentralizedAverager, info: Info) -> None:
        """Record the outcome of a completed step; the averager has applied it already."""
        if self._control is None or not self._control[0].done():
            return
        (control, began_s, sent), self._control = self._control, None
        wait_s = averager.comm.clock.now() - began_s
        self.note("average", wait_s)
        result = control.averaged
        if result is not None and len(result) > 1:  # in a group of one there is nothing to average
            own = averager.rank
            self.num_averagings += 1
            self.num_partial += not result.complete
            info.update(
                averaged_this_iteration=True,
                donors=sum(rank != own and rank not in result.missing for rank in result),
                group_size=len(result),
                received=result.received,
                complete=result.complete,
                missing=len(result.missing),
            )
        info.update(bytes=averager.endpoint.counts["bytes_sent"] - sent, wait_s=wait_s)

    def shutdown(self) -> None:
        """Leave: cancel the step under way and withdraw declarations. Not collective; may be called twice."""
        super().shutdown()
        if self.averager is not None:
            self.averager.shutdown()
        self._control = None

    def drain(self) -> None:
        """Wait for the step under way, and leave; see `SpawnPolicy.drain`."""
        averager = self.averager
        if averager is not None and self._control is not None:
            with suppress(WorldError):  # the group has lost a rank, which ended its step
                averager.engine.drive(self._arrived, self._search_s(averager))
            self._finish(averager, {})
        super().drain()

    @property
    def stats(self) -> dict[str, float]:
        own: dict[str, float] = {"num_averagings": self.num_averagings, "num_partial": self.num_partial}
        return own | (self.averager.stats if self.averager is not None else {})

    def state_dict(self) -> dict[str, Any]:
        # The counters, and the bits of the group key.
        bits = (
            self._parameters.get("initial_group_bits") if self.averager is None else self.averager.bits
        )
        state = {**super().state_dict(), "num_averagings": self.num_averagings, "num_partial": self.num_partial}
        return state if bits is None else state | {"bits": bits}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.num_averagings, self.num_partial = int(state["num_averagings"]), int(state.get("num_partial", 0))
        self.averager, self._resumed = None, True
        if "bits" in state:
            self._parameters["initial_group_bits"] = state["bits"]
