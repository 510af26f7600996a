"""A function of a model, as one of many models at once: what vmap is given, and what it has against it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from spawnsim.training import structure
from spawnsim.training.arena import Arena, Plan
from spawnsim.training.settings import Settings, is_equal

RANDOM = "random operation"  # part of what vmap raises, too


class Objective(nn.Module):
    """A function of a model and a batch, as a module: torch replaces its parameters by others for one call."""

    def __init__(self, model: nn.Module, function: Callable[..., Any], settings: Settings) -> None:
        super().__init__()
        # A copy without data, for the parameters of this one are exchanged, call by call. Tied ones stay tied. Of
        # shapes: `empty_like` would be a look.
        empty: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
            for p in model.parameters()
        }
        self.model = copy.deepcopy(model, empty)
        self.function = settings.frozen(function)

    def forward(self, *batch: Any) -> Any:
        return self.function(self.model, *batch)


def as_outputs(outcome: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a loss and what else a step's function has returned."""
    loss, *more = outcome if isinstance(outcome, tuple) else (outcome,)
    return loss, tuple(more)


def parameters(plan: Plan, rows: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return trained and fixed parameters of some rows, by their names in an objective."""
    return (
        {f"model.{place.name}": place.of(rows) for place in plan.trained},
        {f"model.{place.name}": place.of(rows) for place in plan.fixed},
    )


def trial(objective: Objective, arena: Arena, call: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Raise what vmap has against a function: it is tried on two rows."""
    weights = arena.rows["weights"][:1].expand(2, -1)
    trained, fixed = parameters(arena.plan, weights)
    two = [each.unsqueeze(0).expand(2, *each.shape) if isinstance(each, Tensor) else each for each in inputs]
    dims = (0, 0, *(0 if isinstance(each, Tensor) else None for each in inputs))
    model = objective.model
    before = structure.of_model(model), structure.attributes(model)
    settings = Settings(objective.function, model)
    with _drawing_nothing():
        of_rows(model, call, dims)(trained, fixed, *two)
    now = structure.attributes(model)
    alike = len(now) == len(before[1]) and all(map(is_equal, now, before[1]))
    if not alike or structure.of_model(model) != before[0]:
        raise structure.Unequal("a forward pass changes its attributes")
    if not settings.unchanged():
        raise structure.Unequal("its function changes what it refers to")


def of_rows(
    model: nn.Module, function: Callable[..., Any], dims: tuple[int | None, ...]
) -> Callable[..., Any]:
    """Return a function of a model for many rows; torch does not warn of what it computes model by model in it."""
    vmapped = vmap(function, in_dims=dims)
    # oneDNN computes an LSTM of one model in one operation. Without it there are operations for many, as of a GRU.
    without = any(isinstance(each, nn.LSTM) for each in model.modules())

    def call(*args: Any) -> Any:
        # The warnings ask the program's author, who has not called vmap, for reports to torch.
        of_torch: Any = torch._C
        warns, whole = (
            of_torch._debug_only_are_vmap_fallback_warnings_enabled(),
            of_torch._get_mkldnn_enabled(),
        )
        of_torch._functorch._set_vmap_fallback_warning_enabled(False)
        of_torch._set_mkldnn_enabled(whole and not without)
        try:
            return vmapped(*args)
        finally:
            of_torch._functorch._set_vmap_fallback_warning_enabled(warns)
            of_torch._set_mkldnn_enabled(whole)

    return call


@contextmanager
def _drawing_nothing() -> Iterator[None]:
    """Refuse what draws from a generator of Python, numpy or torch, all of which stay as they are."""
    python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
        now = zip(np.random.get_state(), of_numpy, strict=True)
        drawn = random.getstate() != python or any(np.any(a != b) for a, b in now)
        if drawn or not torch.equal(torch.get_rng_state(), of_torch):
            raise RuntimeError(RANDOM)
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
