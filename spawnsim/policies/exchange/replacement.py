"""A rank's replacement carried out, from the donors' states to the model and optimizer to go on with; and its record.

With a `model_builder` the replaced rank gets a freshly built model and optimizer (which may have other
hyper-parameters: exploring); without one its own are overwritten in place. Tensors are matched by name and shape; what
no donor has keeps the rank's own value. The record is what `info` and events.jsonl say of a replacement, with all that
`replay` needs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError
from spawnsim.policies.rules.donors import check_momentum, check_strategy
from spawnsim.policies.state.arithmetic import all_finite, blend, with_delta, with_momentum
from spawnsim.policies.state.layout import (
    ModelAndOptimizer,
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
class Contribution:
    """What one donor gave: its state, taken whole at its `iteration`, and how much it weighs."""

    donor: int
    iteration: int
    weight: float
    tensors: Tensors


def normalized(gifts: Sequence[Contribution]) -> list[Contribution]:
    """Return the gifts that have come with weights that sum to 1."""
    total = sum(gift.weight for gift in gifts)
    return [replace(gift, weight=gift.weight / total) for gift in gifts] if total > 0 else list(gifts)


def nonfinite_donors(gifts: Sequence[Contribution], own: Tensors) -> list[int]:
    """Return the donors whose state holds a NaN, or an infinity where this rank has none (masks may hold some)."""
    return [
        gift.donor for gift in gifts if not all(_is_usable(t, own.get(n)) for n, t in gift.tensors.items())
    ]


def _is_usable(value: torch.Tensor, own: torch.Tensor | None) -> bool:
    if not (value.is_floating_point() or value.is_complex()) or all_finite(value):
        return True
    if own is None or own.shape != value.shape:
        return False
    places = ~torch.isfinite(value)
    return bool((value[places] == own[places]).all())


@dataclass(frozen=True, slots=True)
class ReplacementResult:
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
        gifts: Sequence[Contribution],
        *,
        reference: Tensors,
        rng: np.random.Generator,
    ) -> ReplacementResult:
        """Return the replaced rank's model and optimizer. Without gifts (reset_weights) they are the builder's."""
        fresh, fresh_optimizer = self.builder() if self.builder else (model, optimizer)
        plain = Travels(self.travels.frozen, self.travels.buffers)
        own, live = collect(model, None, plain), collect(fresh, None, plain)
        values, unmatched = self._values(own, live, gifts, reference)
        assign(live, values)
        self._optimizer(model, optimizer, fresh, fresh_optimizer, gifts)
        if self.explore is not None:
            self.explore(fresh, fresh_optimizer, rng)
        return ReplacementResult(fresh, fresh_optimizer, unmatched)

    def _values(
        self, own: Tensors, live: Tensors, gifts: Sequence[Contribution], reference: Tensors
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
        gifts: Sequence[Contribution],
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


def mixture(name: str, like: torch.Tensor, gifts: Sequence[Contribution]) -> torch.Tensor | None:
    """Return the weighted mean of a tensor over the donors that have it in this shape; None if none has."""
    having = [gift for gift in gifts if name in gift.tensors and gift.tensors[name].shape == like.shape]
    if not having:
        return None
    mixed = blend([gift.tensors[name] for gift in having], [gift.weight for gift in having])
    return mixed.to(device=like.device, dtype=like.dtype)


def _first(name: str, gifts: Sequence[Contribution]) -> torch.Tensor:
    return next(gift.tensors[name] for gift in gifts if name in gift.tensors)


def _of_optimizer(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer/")}


Served = Literal["before", "after"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplacementRecord:
    """What happened to a rank at `iteration`.

    `round` is the iteration whose metrics decided, `asked` the own iteration at which the donors were asked (the
    reference of the delta rule), `low` and `high` the metrics' range as far as it was known.
    """

    iteration: int
    round: int
    asked: int
    metric: float
    gifts: Sequence[Contribution]
    low: float = math.nan
    high: float = math.nan
    nbytes: int = 0
    wait_s: float = 0.0
    unmatched: tuple[str, ...] = ()
    mode: str = ""  # "max" or "min", where it is known which metrics are better

    @property
    def staleness(self) -> int:
        """Iterations by which the oldest donor snapshot is behind this rank; negative if it is ahead."""
        return max((self.iteration - gift.iteration for gift in self.gifts), default=0)

    def tell(self, info: dict[str, Any], so_far: int) -> None:
        """Write the replacement into the info of the call in which it happened."""
        info.update(
            averaged_this_iteration=bool(self.gifts), is_replaced=True, num_replacements_so_far=so_far,
            global_min_metric=self.low, global_max_metric=self.high, donors=len(self.gifts),
            staleness=self.staleness, bytes=self.nbytes, wait_s=self.wait_s,
        )  # fmt: skip

    def record(self, comm: Comm, renewal: Renewal, *, served: Served) -> None:
        """Add the event "replacement", with all that `replay` needs; warn of tensors that no donor had.

        Ranks are those of the whole run, also where the communicator is a part of it. `served` says whether donors
        give what they have before or after a replacement of their own in the same call.
        """
        world = comm.Get_group().members
        comm.record.event(
            "replacement", iteration=self.iteration, round=self.round, replaced=world[comm.Get_rank()],
            donors=[world[gift.donor] for gift in self.gifts], weights=[gift.weight for gift in self.gifts],
            versions=[gift.iteration for gift in self.gifts], asked=self.asked, metric=self.metric, low=self.low,
            high=self.high, bytes=self.nbytes, wait_s=self.wait_s, served=served,
            strategy=renewal.strategy, momentum=renewal.momentum, rule=renewal.rule,
            optimizer_state=renewal.travels.optimizer_state, mode=self.mode,
        )  # fmt: skip
        if self.unmatched:
            shown = ", ".join(self.unmatched[:5]) + (", …" if len(self.unmatched) > 5 else "")
            count = len(self.unmatched)
            logger.warning(
                "rank %d: %d tensors without a match at the donors stay: %s", comm.rank, count, shown
            )


def without_nonfinite(
    comm: Comm, gifts: Sequence[Contribution], whose: ModelAndOptimizer, renewal: Renewal
) -> list[Contribution]:
    """Return the gifts that hold no NaN and no strange infinity, with weights that sum to 1.

    Donors that are left out are told of: an event "left_out", and a warning.
    """
    out = nonfinite_donors(gifts, collect(*whose, renewal.travels))
    if out:
        world = comm.Get_group().members
        comm.record.event("left_out", donors=[world[donor] for donor in out])
        logger.warning("rank %d: what donors %s gave is not finite: left out", comm.rank, out)
    return normalized([gift for gift in gifts if gift.donor not in out])
