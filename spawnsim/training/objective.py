"""A function of a model, as one of many models at once: what vmap is given, and what it has against it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode

from spawnsim.training import structure
from spawnsim.training.arena import Arena, Plan
from spawnsim.training.settings import Settings, is_equal

RANDOM = "random operation"  # part of what vmap raises, too


@dataclass(frozen=True)
class Mask:
    """What a call of dropout keeps: 1 there, and 0 elsewhere."""

    shape: torch.Size
    stride: tuple[int, ...]  # numbers are drawn in the order in which they lie in memory
    dtype: torch.dtype
    p: float

    def ones(self) -> Tensor:
        """Return one that keeps all."""
        return torch.ones(self.shape, dtype=self.dtype, device="cpu")

    def draw(self, out: Tensor) -> None:
        """Draw one from torch's generator as torch's own dropout does on the CPU."""
        if out.stride() == self.stride:
            out.bernoulli_(1 - self.p)
        else:
            drawn = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
            out.copy_(drawn.bernoulli_(1 - self.p))


class _Dropout(TorchFunctionMode):
    """Gives calls of `torch.nn.functional.dropout` their masks, or takes note of what these are to be."""

    def __init__(self, masks: Sequence[Tensor] | None) -> None:
        super().__init__()
        self._masks = None if masks is None else iter(masks)
        self.found: list[Mask] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is dropout:
            return self._dropout(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _dropout(self, input: Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002 - as torch
        if not (training and isinstance(p, float) and 0 < p < 1 and input.numel()):
            return dropout(input, p, training, inplace)
        if self._masks is not None:
            scale = next(self._masks) / (1 - p)
            return input.mul_(scale) if inplace else input * scale
        drawn = torch.empty_like(input)  # as which torch draws, also where the input is expanded
        self.found.append(Mask(drawn.shape, drawn.stride(), drawn.dtype, p))
        return input if inplace else input.clone()


class Objective(nn.Module):
    """A function of a model and a batch, as a module: torch replaces its parameters by others for one call.

    Attributes:
        masks: of its calls of dropout, which come behind the batch.
    """

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
        self.masks: tuple[Mask, ...] = ()

    def forward(self, *batch: Any) -> Any:
        if not self.masks:
            return self.function(self.model, *batch)
        given = len(batch) - len(self.masks)
        with _Dropout(batch[given:]):
            return self.function(self.model, *batch[:given])


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


def masks_of(objective: Objective, arena: Arena, inputs: Sequence[Any]) -> tuple[Mask, ...]:
    """Return the masks of dropout that a function needs for some inputs.

    Raises:
        RuntimeError: it draws in another way, too, or on a GPU, whose dropout is one operation.
    """
    weights = arena.rows["weights"][:1]
    if weights.device.type != "cpu":
        raise RuntimeError(RANDOM)
    trained, fixed = ({name: p[0] for name, p in part.items()} for part in parameters(arena.plan, weights))
    with _drawing_nothing(), torch.no_grad(), _Dropout(None) as noting:
        functional_call(objective, {**trained, **fixed}, tuple(inputs))
    return tuple(noting.found)


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
