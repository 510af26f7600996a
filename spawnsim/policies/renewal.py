"""A rank's replacement carried out: from the donors' states to the model and optimizer to go on with.

This room knows models, states and weights; no rank, no communicator, no clock. With a `model_builder` the replaced
rank gets a freshly built model and optimizer (which may have other hyper-parameters: exploring); without one its own
are overwritten in place. Tensors are matched by name and shape; what no donor has keeps the rank's own value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from spawnsim.errors import ParameterError
from spawnsim.policies.arithmetic import blend, with_delta, with_momentum
from spawnsim.policies.finite import all_finite
from spawnsim.policies.mixing import check_momentum, check_strategy
from spawnsim.policies.state import (
    Tensors,
    Travels,
    assign,
    assign_optimizer,
    collect,
    reset_optimizer,
)

ModelBuilder = Callable[[], tuple[torch.nn.Module, torch.optim.Optimizer]]
Explore = Callable[[torch.nn.Module, torch.optim.Optimizer, np.random.Generator], None]
Rule = Literal["delta", "replace"]


@dataclass(frozen=True, slots=True)
class Gift:
    """What one donor gave: its state, taken whole at its `iteration`, and how much it weighs."""

    donor: int
    iteration: int
    weight: float
    tensors: Tensors


def shared(gifts: Sequence[Gift]) -> list[Gift]:
    """Return the gifts that have come with weights that sum to 1."""
    total = sum(gift.weight for gift in gifts)
    return [replace(gift, weight=gift.weight / total) for gift in gifts] if total > 0 else list(gifts)


def unsound(gifts: Sequence[Gift], own: Tensors) -> list[int]:
    """Return the donors whose state holds a NaN, or an infinity where this rank has none (masks may hold some)."""
    return [gift.donor for gift in gifts if not all(_sound(t, own.get(n)) for n, t in gift.tensors.items())]


def _sound(value: torch.Tensor, own: torch.Tensor | None) -> bool:
    if not (value.is_floating_point() or value.is_complex()) or all_finite(value):
        return True
    if own is None or own.shape != value.shape:
        return False
    places = ~torch.isfinite(value)
    return bool((value[places] == own[places]).all())


@dataclass(frozen=True, slots=True)
class Renewed:
    """The model and optimizer to go on with; `unmatched` names tensors that no donor had."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    unmatched: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Renewal:
    """How a replacement is carried out.

    θ_new = Σ w_k θ_k over the donors (`rule` "replace"), plus the rank's own steps since it asked for them ("delta");
    then θ ← m·θ_own + (1 - m)·θ_new with m = `momentum`. `explore(model, optimizer, rng)` is called last.
    """

    builder: ModelBuilder | None = None
    strategy: str = "mean"
    momentum: float = 0.0
    rule: Rule = "replace"
    travels: Travels = field(default_factory=lambda: Travels(optimizer_state="reset"))
    explore: Explore | None = None

    def __post_init__(self) -> None:
        check_strategy(self.strategy)
        check_momentum(self.momentum)
        if self.rule not in ("delta", "replace"):
            raise ParameterError(f"rule={self.rule!r}: choose 'delta' or 'replace'")
        if self.builder is None and self.strategy == "reset_weights":
            raise ParameterError(
                "averaging_strategy='reset_weights' needs a model_builder to make the fresh weights"
            )
        if self.builder is not None and not callable(self.builder):
            raise ParameterError(
                f"model_builder={self.builder!r}: give a function that returns (model, optimizer)"
            )

    def reference(self, model: torch.nn.Module) -> Tensors:
        """Return a copy of the parameters as they are now, for the delta rule; empty without it."""
        if self.rule == "replace" or self.strategy == "reset_weights":
            return {}
        own = collect(model, None, Travels(buffers=False))
        return {name: tensor.clone() for name, tensor in own.items()}

    def __call__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        gifts: Sequence[Gift],
        *,
        reference: Tensors,
        rng: np.random.Generator,
    ) -> Renewed:
        """Return the replaced rank's model and optimizer. Without gifts (reset_weights) they are the builder's."""
        fresh, fresh_optimizer = self.builder() if self.builder else (model, optimizer)
        plain = Travels(self.travels.frozen, self.travels.buffers)
        own, live = collect(model, None, plain), collect(fresh, None, plain)
        values, unmatched = self._values(own, live, gifts, reference)
        assign(live, values)
        self._optimizer(model, optimizer, fresh, fresh_optimizer, gifts)
        if self.explore is not None:
            self.explore(fresh, fresh_optimizer, rng)
        return Renewed(fresh, fresh_optimizer, unmatched)

    def _values(
        self, own: Tensors, live: Tensors, gifts: Sequence[Gift], reference: Tensors
    ) -> tuple[Tensors, tuple[str, ...]]:
        values: Tensors = {}
        unmatched: list[str] = []
        for name, target in live.items():
            mixed = mixture(name, target, gifts) if gifts else target
            before = own.get(name)
            same = before is not None and before.shape == target.shape
            if mixed is None:
                unmatched.append(name)
                if same and before is not None:
                    values[name] = before
                continue
            values[name] = self._step(mixed, before if same else None, reference.get(name))
        return values, tuple(unmatched)

    def _step(
        self, mixed: torch.Tensor, own: torch.Tensor | None, reference: torch.Tensor | None
    ) -> torch.Tensor:
        if own is None:
            return mixed
        if reference is not None and reference.shape == own.shape:
            mixed = with_delta(mixed, own, reference)
        return with_momentum(mixed, own, self.momentum)

    def _optimizer(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        fresh: torch.nn.Module,
        fresh_optimizer: torch.optim.Optimizer,
        gifts: Sequence[Gift],
    ) -> None:
        how = self.travels.optimizer_state
        if how == "reset" or self.strategy == "reset_weights":
            reset_optimizer(fresh_optimizer)
            return
        if fresh_optimizer is not optimizer:
            everything = collect(model, optimizer, Travels(optimizer_state="copy"))
            assign_optimizer(fresh, fresh_optimizer, _of_optimizer(everything))
        if how == "copy" and gifts:
            heaviest = max(gifts, key=lambda gift: (gift.weight, -gift.donor))
            assign_optimizer(fresh, fresh_optimizer, _of_optimizer(heaviest.tensors))
        elif how == "average" and gifts:
            names = dict.fromkeys(name for gift in gifts for name in _of_optimizer(gift.tensors))
            mixed = {name: mixture(name, _first(name, gifts), gifts) for name in names}
            assign_optimizer(
                fresh, fresh_optimizer, {n: value for n, value in mixed.items() if value is not None}
            )


def mixture(name: str, like: torch.Tensor, gifts: Sequence[Gift]) -> torch.Tensor | None:
    """Return the weighted mean of a tensor over the donors that have it in this shape; None if none has."""
    having = [gift for gift in gifts if name in gift.tensors and gift.tensors[name].shape == like.shape]
    if not having:
        return None
    mixed = blend([gift.tensors[name] for gift in having], [gift.weight for gift in having])
    return mixed.to(device=like.device, dtype=like.dtype)


def _first(name: str, gifts: Sequence[Gift]) -> torch.Tensor:
    return next(gift.tensors[name] for gift in gifts if name in gift.tensors)


def _of_optimizer(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer/")}
