"""`OuterOptimizerPolicy`: an outer optimizer moves global weights by the ranks' mean movement.

FedAvg, BMUF, SlowMo, DiLoCo and MuLoCo are parameter settings of this rule; SparseLoCo and DeMo are settings of its
compressed form. `exchange/outer_group.py` communicates, `state/outer.py` implements the rule.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

import torch

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError
from spawnsim.policies.base import Info, SpawnPolicy
from spawnsim.policies.exchange.outer_group import OuterGroup, fragments_of
from spawnsim.policies.options import OuterOptions
from spawnsim.policies.rules.cadence import Cadence, Every
from spawnsim.policies.rules.merging import as_fragmenter
from spawnsim.policies.state.codecs import NoCompression, as_codec
from spawnsim.policies.state.difference_codecs import DCT, ErrorFeedback, LowBit, TopK
from spawnsim.policies.state.layout import (
    ModelAndOptimizer,
    StateScope,
    assign,
    reset_if_not_finite,
    reset_optimizer,
)
from spawnsim.policies.state.outer import OuterSGD
from spawnsim.policies.state.snapshot import name_of


class GlobalWeightsPolicy(SpawnPolicy):
    """Base class of policies whose ranks continue from global weights. Subclasses implement `turn`.

    Floating-point parameters (and buffers, if `travels` says so) have global weights, complex ones as pairs; all other
    tensors remain each rank's own. In its first call, or in `attach`, every rank takes over the model of the lowest
    rank.

    Args:
        average_every: iterations from one round to the next.
        rule: the outer optimizer, in place of the one specified by `how`.
        cadence: when a round is due, in place of `average_every`; the same on all ranks.
        timing: a dictionary to fill with durations in seconds, by step.
        how: further arguments, see `options.OuterOptions`; the class attribute `usual` has their defaults.

    Attributes:
        outer: the group: `comm`, `live(model)`, its `fragments` and their `mean`; docs/policies.md shows their use.

    Raises:
        ParameterError: an argument is out of range.
        MismatchError: when a group meets, on every rank, if models or arguments differ.
        Timeout: if the group does not meet within `comm.clock.deadline`; this rank's model is then unchanged.
    """

    acts_in_every_call = True
    newcomers_only = False
    promises: tuple[str, ...] = ("progress",)
    states: ClassVar[tuple[str, ...]] = ("average", "healed")

    option_types = (OuterOptions,)
    usual: ClassVar[OuterOptions] = OuterOptions()
    refused: ClassVar[tuple[str, ...]] = ()  # arguments that the class does not support

    def __init__(
        self,
        average_every: int,
        *,
        rule: OuterSGD | None = None,
        cadence: Cadence | None = None,
        timing: dict[str, list[float]] | None = None,
        **how: Any,
    ) -> None:
        super().__init__(average_every, timing=timing)
        given = {**how, "cadence": cadence} if cadence is not None else how
        if unfit := [name for name in self.refused if name in given]:
            raise ParameterError(f"{type(self).__name__} takes no {', '.join(unfit)}")
        options = replace(self.usual, **how)
        fragments = options.fragments
        if fragments != int(fragments) or fragments < 0 or (fragments and self.average_every % fragments):
            raise ParameterError(
                f"fragments={fragments!r}: give a whole number that divides average_every={average_every}"
            )
        if cadence is not None and fragments > 1:
            raise ParameterError("cadence: fragments take turns at equal intervals; give average_every alone")
        self.fragments, self.period = int(fragments), self.average_every // max(int(fragments), 1)
        self.cadence = cadence if cadence is not None else Every(self.period)
        self.rule = rule if rule is not None else options.rule()
        self.travels = options.travels or StateScope(frozen=False, buffers=False)
        cut, codec = as_fragmenter(options.fragmenter), as_codec(options.compression)
        encodes = None if isinstance(codec, NoCompression) else ErrorFeedback(codec, options.feedback)
        # The same text on all ranks: no addresses of objects.
        parts = f"fragments={fragments} {getattr(cut, '__name__', '')}, {name_of(codec)}, feedback={options.feedback}"
        settings = f"{type(self).__name__}(every {average_every}, {self.rule}, {parts})"
        self.outer = OuterGroup(partial(fragments_of, self.fragments, cut), self.travels, settings, encodes)
        self.num_rounds = self.num_healed = 0

    def attach(self, model: torch.nn.Module, group: Any) -> None:
        """Begin before training, with the current model; otherwise the first call does so. Collective.

        Args:
            model: receives the lowest rank's weights.
            group: as in the policy's call.
        """
        self._join(self._bound(group), model)

    def act(
        self,
        iteration: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        metric: float | None,
        comm: Comm,
        info: Info,
    ) -> ModelAndOptimizer:
        """Meet the group if it is new; execute the policy's turn if wanted."""
        if self.outer.comm is not comm and self._join(comm, model):
            return model, optimizer
        if self.wanted(iteration):
            began_s = comm.clock.now()
            healed = self.turn(iteration, model, optimizer, info)
            info["wait_s"] = comm.clock.now() - began_s
            self.note("average", info["wait_s"])
            if healed:
                self._record_healed(comm, healed, optimizer)
            if info["averaged_this_iteration"] and self.travels.optimizer_state == "reset":
                reset_optimizer(optimizer)
        return model, optimizer

    def _join(self, comm: Comm, model: torch.nn.Module) -> bool:
        # Means under way in a group that has ended are lost, and its global weights are unchanged. Means that arrived
        # before a checkpoint have arrived on all ranks with the same number of outer steps.
        before = self.outer.steps
        self._drop_means(come=False)
        fresh = self.outer.meet(comm, model, newcomers_only=self.newcomers_only)
        if self.outer.steps != before:
            self._drop_means(come=True)
        return fresh

    def _drop_means(self, *, come: bool) -> None:
        """Drop the means under way, and with `come` also the arrived ones; for policies that keep means."""

    def wanted(self, iteration: int) -> bool:
        """Return whether to call `turn`: for a round that is due, or for other work of a subclass."""
        return self.due(iteration)

    def due(self, iteration: int) -> bool:
        """Return whether a round is due; a round that the group has completed is not repeated."""
        return self.cadence.due(iteration) and iteration > self.outer.last

    def place_at(self, iteration: int) -> int:
        """Return the fragment that has its turn in an iteration that is due."""
        return (iteration // self.period - 1) % max(self.fragments, 1)

    def turn(
        self, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, info: Info
    ) -> int:
        """Execute a turn: usually read the difference, take its mean, make an outer step, write the model.

        Args:
            iteration: as in the call.
            model: this rank's model, to be changed in place.
            optimizer: the model's optimizer.
            info: to be filled in; `stepped` does so for an outer step.

        Returns:
            The number of this rank's elements that were not finite.
        """
        raise NotImplementedError(f"{type(self).__name__}: define turn()")

    def stepped(self, iteration: int, info: Info, nbytes: int) -> None:
        """Record a completed outer step."""
        group = self.outer
        assert group.comm is not None
        group.stepped(iteration)
        self.num_rounds += 1
        info.update(
            averaged_this_iteration=True, donors=group.comm.Get_size() - 1, bytes=info["bytes"] + nbytes
        )

    def _record_healed(self, comm: Comm, numbers: int, optimizer: torch.optim.Optimizer) -> None:
        self.num_healed += 1
        comm.record.event("healed", numbers=numbers, lost=0)
        reset_if_not_finite(optimizer)

    @property
    def stats(self) -> dict[str, float]:
        """Outer steps so far, and rounds in which this rank had elements that were not finite."""
        return {"num_rounds": self.num_rounds, "num_healed": self.num_healed}

    def state_dict(self) -> dict[str, Any]:
        counts = {"num_rounds": self.num_rounds, "num_healed": self.num_healed}
        return {**super().state_dict(), **counts, "global": self.outer.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.num_rounds, self.num_healed = int(state["num_rounds"]), int(state["num_healed"])
        self.outer.load(state["global"])


class OuterOptimizerPolicy(GlobalWeightsPolicy):
    """FedAvg, BMUF, SlowMo, DiLoCo, MuLoCo, SparseLoCo, DeMo: an outer optimizer on the ranks' mean movement.

    Every `average_every` iterations: Δ = mean of Θ − θ over the group; the outer optimizer uses Δ as its gradient and
    updates Θ; every rank continues from θ = Θ, with its own inner optimizer's state. Class methods provide the
    published constants. An element that is not finite on a rank counts as not moved there. The rank receives the other
    ranks' value, records an event "healed", and resets its optimizer's state if that is not finite either.

    Args:
        average_every: H, iterations from one outer step to the next. In iteration 0 (or in `attach`) all ranks start
            from the model of the lowest rank.
        inner_lr: the outer optimizer sees Δ/γ and steps by lr·γ, where γ is the current learning rate of the inner
            optimizer (of its first group), as in SlowMo. Without effect while γ is constant.
        how: `cadence`, `timing` and `options.OuterOptions`, except fragments.
    """

    paper = "arXiv 1602.05629, 1910.00643, 2311.08105, 2505.23725"
    promises = ("equal", "progress")

    refused = ("fragments", "fragmenter")

    def __init__(self, average_every: int, *, inner_lr: bool = False, **how: Any) -> None:
        super().__init__(average_every, **how)
        self.inner_lr = inner_lr

    def turn(
        self, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, info: Info
    ) -> int:
        live = self.outer.live(model)
        (fragment,) = self.outer.fragments
        healed = fragment.read_difference(live)
        mean = self.outer.mean(0, fragment.delta)
        mean.wait()
        fragment.step(self.rule, float(optimizer.param_groups[0]["lr"]) if self.inner_lr else 1.0)
        assign(live, fragment.weights.tensors())
        self.stepped(iteration, info, mean.nbytes)
        return healed

    # ------------------------------------------------------------------------------------------ published constants
    @classmethod
    def fedavg(cls, average_every: int, **how: Any) -> Self:
        """Return FedAvg among all ranks (McMahan et al. 2017): Θ ← the mean of θ."""
        return cls(average_every, **{"lr": 1.0, "momentum": 0.0, "nesterov": False} | how)

    @classmethod
    def bmuf(cls, average_every: int, **how: Any) -> Self:
        """Return blockwise model-update filtering (Chen and Huo 2016): heavy ball; their momentum: 1 − 1/ranks."""
        return cls(average_every, **{"lr": 1.0, "momentum": 0.9, "nesterov": False} | how)

    @classmethod
    def slowmo(cls, average_every: int = 48, **how: Any) -> Self:
        """Return SlowMo (Wang et al. 2020): u ← βu + Δ/γ, Θ ← Θ − αγu; lr is α, momentum β."""
        constants = {"lr": 1.0, "momentum": 0.5, "nesterov": False, "inner_lr": True}
        return cls(average_every, **constants | how)

    @classmethod
    def diloco(cls, average_every: int = 500, **how: Any) -> Self:
        """Return DiLoCo (Douillard et al. 2023); its inner optimizer is AdamW."""
        return cls(average_every, **{"lr": 0.7, "momentum": 0.9} | how)

    @classmethod
    def muloco(cls, average_every: int = 30, **how: Any) -> Self:
        """Return MuLoCo (Thérien et al. 2025); its inner optimizer is Muon, such as torch.optim.Muon."""
        return cls(average_every, **{"lr": 0.9, "momentum": 0.8} | how)

    @classmethod
    def sparseloco(cls, average_every: int = 30, **how: Any) -> Self:
        """Return SparseLoCo (Sarfi et al. 2025): the 64 largest of 4,096 in 2 bits, feedback 0.95, plain outer SGD."""
        sparse: dict[str, Any] = {"compression": TopK(4096, 64, LowBit(2)), "feedback": 0.95}
        return cls(average_every, **{"lr": 0.4, "momentum": 0.0, "nesterov": False} | sparse | how)

    @classmethod
    def demo(cls, lr: float, *, chunk: int = 64, keep: int = 32, decay: float = 0.999, **how: Any) -> Self:
        """Return DeMo (Peng et al. 2024): in every step, the largest cosine coefficients of decaying momentum, signed.

        The inner optimizer is plain SGD, and its learning rate has no effect: m ← decay·m + g, the sent part is
        subtracted, Θ ← Θ − lr·sign(mean).
        """
        constants: dict[str, Any] = {"momentum": 0.0, "nesterov": False, "sign": True, "feedback": decay}
        return cls(1, lr=lr, compression=DCT(chunk, TopK(chunk, keep)), **constants | how)
