"""A function of a model, as one of many models at once: what vmap is given, and what it has against it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode

from spawnsim.random import global_states, set_global_states
from spawnsim.training import structure
from spawnsim.training.arena import Arena, Plan
from spawnsim.training.settings import Settings, is_equal
from spawnsim.training.tracing import Unchanging

RANDOM = "random operation"  # part of what vmap raises, too
CHANGED = (
    "dropout is another one than when the step was put off, by something that is not watched, such as an attribute of "
    "a class: look at the loss before you change it"
)


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


class OfDropout(TorchFunctionMode):
    """Calls `dropped` where a program calls `torch.nn.functional.dropout` to drop anything."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is dropout:
            return self._dropout(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _dropout(self, input: Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002 - as torch
        self.calls += 1
        if training and isinstance(p, float) and 0 < p < 1 and input.numel():
            return self.dropped(input, p, inplace=inplace)
        return dropout(input, p, training, inplace)

    def dropped(self, given: Tensor, p: float, *, inplace: bool) -> Tensor:
        """Return what dropout returns."""
        return dropout(given, p, True, inplace)


class _Noting(OfDropout):
    """Takes note of masks. Draws a number for each, so that a loss is noticed that looks after the generator itself."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Mask] = []
        self._state = torch.get_rng_state()

    def dropped(self, given: Tensor, p: float, *, inplace: bool) -> Tensor:
        of_torch: Any = torch._C
        if not given.is_floating_point() or of_torch._functorch.is_batchedtensor(given):
            raise RuntimeError(RANDOM)
        self.require_state()
        torch.rand(1, device="cpu")
        self._state = torch.get_rng_state()
        drawn = torch.empty_like(given)  # as which torch draws, also where the tensor is expanded
        self.masks.append(Mask(drawn.shape, drawn.stride(), drawn.dtype, p))
        return given if inplace else given.clone()

    def require_state(self) -> None:
        """Refuse what else was drawn, or put back."""
        if not torch.equal(torch.get_rng_state(), self._state):
            raise RuntimeError(RANDOM)


class _Dropping(OfDropout):
    """Gives calls of dropout the masks that were drawn for them."""

    def __init__(self, masks: Sequence[Mask], drawn: Sequence[Tensor]) -> None:
        super().__init__()
        self._left = [*zip(masks, drawn, strict=True)][::-1]

    def dropped(self, given: Tensor, p: float, *, inplace: bool) -> Tensor:
        if not self._left:
            raise RuntimeError(CHANGED)
        mask, drawn = self._left.pop()
        if (mask.p, mask.shape, mask.dtype) != (p, given.shape, given.dtype):
            raise RuntimeError(CHANGED)
        scale = drawn / (1 - p)
        return given.mul_(scale) if inplace else given * scale

    def require_all(self) -> None:
        """Refuse masks that are left."""
        if self._left:
            raise RuntimeError(CHANGED)


class Objective(nn.Module):
    """A function of a model and a batch, as a module: torch replaces its parameters by others for one call.

    Attributes:
        masks: of its calls of dropout; they come behind the batch.
        drops: whether there are such calls, be it of evaluation alone.
    """

    def __init__(self, model: nn.Module, function: Callable[..., Any], settings: Settings) -> None:
        super().__init__()
        # A copy without data, for the parameters of this one are exchanged, call by call. Tied ones stay tied. Of
        # shapes: `empty_like` would be a look.
        empty: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
            for p in model.parameters()
        }
        empty |= {
            id(each): torch.empty(each.shape, dtype=each.dtype, device="meta")
            for each in structure.statistics(model).values()
        }
        self.model = copy.deepcopy(model, empty)
        self.function = settings.frozen(function)
        self.masks: tuple[Mask, ...] = ()
        self.drops = False
        self._changing = [each for each in self.model.modules() if structure.statistics_of(each)]

    def forward(self, *batch: Any) -> Any:
        before = [*chain.from_iterable(each._buffers.values() for each in self._changing)]
        outcome = self._outcome(batch)
        now = chain.from_iterable(each._buffers.values() for each in self._changing)
        if self._changing and not all(map(is_, before, now)):
            raise structure.Unequal("it assigns buffers of a normalization")
        return outcome

    def outputs(self, trained: Any, fixed: Any, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return all that the function returns, with other parameters, by their names in the objective."""
        loss, more = as_outputs(functional_call(self, {**trained, **fixed}, tuple(inputs)))
        return loss, *more

    def _outcome(self, batch: Sequence[Any]) -> Any:
        if not self.drops:
            return self.function(self.model, *batch)
        given = len(batch) - len(self.masks)
        with _Dropping(self.masks, batch[given:]) as dropping:
            outcome = self.function(self.model, *batch[:given])
        dropping.require_all()
        return outcome


def as_outputs(outcome: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a loss and what else a step's function has returned."""
    loss, *more = outcome if isinstance(outcome, tuple) else (outcome,)
    return loss, tuple(more)


def tensors(plan: Plan, rows: Sequence[Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what is trained of some rows and what is not, statistics too, by their names in an objective.

    Args:
        plan: how parameters lie in a row.
        rows: the weights, (rows, width), and the statistics, (rows, ...) each.
    """
    weights, *statistics = rows
    fixed = {f"model.{place.name}": place.of(weights) for place in plan.fixed}
    fixed |= {f"model.{each.name}": rows for each, rows in zip(plan.statistics, statistics, strict=True)}
    return {f"model.{place.name}": place.of(weights) for place in plan.trained}, fixed


def of_row(
    plan: Plan, objective: Objective, row: Sequence[Tensor], inputs: Sequence[Any]
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return the trained parameters of one row, as `Arena.of` gives it, and what an objective returns for it."""
    trained, fixed = ({name: p[0] for name, p in part.items()} for part in tensors(plan, row))
    for p in trained.values():  # views made here
        p.requires_grad_()
    return tuple(trained.values()), [*objective.outputs(trained, fixed, inputs)]


def masks_of(call: Callable[..., object], row: Sequence[Tensor], inputs: Sequence[Any]) -> tuple[Mask, ...]:
    """Return the masks of dropout that a call of a function draws, of one row and some inputs.

    Raises:
        RuntimeError: it draws in another way, too, or on a GPU, whose dropout is one operation.
        Unequal: it changes what it was given.
    """
    if row[0].device.type != "cpu":
        raise RuntimeError(RANDOM)
    given = [each for each in (row[0], *inputs) if isinstance(each, Tensor)]
    with _drawing_nothing(but_torch=True), Unchanging(given), _Noting() as noting:
        call(row, inputs)
        noting.require_state()
    return tuple(noting.masks)


def trial(
    objective: Objective,
    arena: Arena,
    call: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    trains: bool = True,
) -> None:
    """Raise what vmap has against a function, which is tried on two rows; unless it `trains` it may change nothing."""
    weights, *statistics = arena.of(slice(0, 1))
    twice = [torch.cat([each, each]) + 1 for each in statistics]  # of what is 0, half is no change
    kept = [each.clone() for each in twice]
    trained, fixed = tensors(arena.plan, [weights.expand(2, -1), *twice])
    two = [each.unsqueeze(0).expand(2, *each.shape) if isinstance(each, Tensor) else each for each in inputs]
    dims = (0, 0, *(0 if isinstance(each, Tensor) else None for each in inputs))
    given = [each for each in (weights, *two) if isinstance(each, Tensor)]
    model = objective.model
    before = structure.of_model(model), structure.attributes(model)
    settings = Settings(objective.function, model)
    # vmap itself refuses to change weights that ranks share, but not by all operations: not by `clamp_`.
    with _drawing_nothing(), Unchanging(given):
        of_rows(model, call, dims)(trained, fixed, *two)
    if not trains and not all(map(torch.equal, twice, kept)):
        raise structure.Unequal("it changes buffers")
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
def _drawing_nothing(*, but_torch: bool = False) -> Iterator[None]:
    """Refuse what draws from a generator of Python, numpy or torch, all of which stay as they are."""
    states = python, of_numpy, state = global_states(torch)
    try:
        yield
        now = zip(np.random.get_state(), of_numpy, strict=True)
        drawn = random.getstate() != python or any(np.any(a != b) for a, b in now)
        if drawn or not (but_torch or torch.equal(torch.get_rng_state(), state)):
            raise RuntimeError(RANDOM)
    finally:
        set_global_states(torch, states)
