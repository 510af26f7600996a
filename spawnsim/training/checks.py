"""The check of the contract of batched calls: one call executed alone, in its rank's turn, is compared with its row.

The function of a step must depend on the model, its arguments and constants alone. A batched call reads any other value
only once for all ranks, and at a different time, so the row differs. Knows one call and its row; must not know the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spawnsim.random import global_states, set_global_states
from spawnsim.training.dropout import Drawing
from spawnsim.training.grouping import Ungroupable, globals_of, parts_of_function, parts_of_model
from spawnsim.training.seats import Seat
from spawnsim.training.vmapped import Outcome, Tensors, Vmapped, as_outputs

# Relative differences due to rounding, by dtype: for a row, and for the same operations executed once more.
TOLERANCES = {torch.float32: (1e-3, 1e-5), torch.float64: (1e-7, 1e-11)}
SMALL = 1e-2  # lower bound of the scale of a difference: the norm of the output or buffer executed alone
EVERY = 100  # calls of a rank from one comparison to the next
DRAWS = "it draws random numbers other than by torch.nn.Dropout, and each rank has its own generators"


class Reference:
    """A call executed alone, before its row is computed.

    Args:
        function: Function of the model and inputs.
        model: The rank's own model.
        seat: Seat of the model.
        inputs: Inputs of the call.

    Attributes:
        outcome: Outcome of the call.
        masks: Masks of its dropout calls.
        changed: Numbers of the buffers that it changed.

    Raises:
        Ungroupable: the function cannot be computed for many models at once.
    """

    def __init__(
        self, function: Callable[..., Any], model: nn.Module, seat: Seat, inputs: Sequence[Any]
    ) -> None:
        self._before = global_states(torch)
        held = [own[name] for own, name in seat.buffers]
        buffers = [each.clone() for each in held]
        changing = [*seat.parameters, *[each for each in inputs if isinstance(each, Tensor)]]
        before = [each.detach().clone() for each in changing]
        versions = [each._version for each in changing]
        try:
            with torch.set_grad_enabled(bool(seat.trained)), Drawing() as drawing:
                self.outcome = self._outcome(function, model, seat, inputs)
        finally:
            for (own, name), each, kept in zip(seat.buffers, held, buffers, strict=True):
                own[name] = each
                with torch.no_grad():
                    each.copy_(kept)
            in_place = versions != [each._version for each in changing]
            if in_place:
                with torch.no_grad():
                    for each, kept in zip(changing, before, strict=True):
                        each.copy_(kept)
            self._now = global_states(torch)
            set_global_states(torch, self._before)
        self.masks = tuple(drawing.masks)
        self.changed = [
            number
            for number, kept in enumerate(buffers)
            if not torch.equal(kept, self.outcome.buffers[number])
        ]
        if in_place:
            raise Ungroupable("its function changes weights or inputs in place")

    @staticmethod
    def _outcome(
        function: Callable[..., Any], model: nn.Module, seat: Seat, inputs: Sequence[Any]
    ) -> Outcome:
        outputs = as_outputs(function(model, *inputs))
        gradients: Sequence[Tensor] = ()
        if seat.trained:
            found: Sequence[Tensor | None] = torch.autograd.grad(outputs[0], seat.trained, allow_unused=True)
            unused = next((name for name, each in zip(seat.names, found, strict=True) if each is None), None)
            if unused is not None:
                raise Ungroupable(f"the loss does not depend on {unused}: exclude it from the optimizer")
            gradients = [each for each in found if each is not None]
        buffers = [own[name].detach().clone() for own, name in seat.buffers]
        return Outcome(gradients, [each.detach().clone() for each in outputs], buffers)

    def draws(self) -> str:
        """Return DRAWS if the function draws random numbers outside of dropout, else ""; leave generators unchanged."""
        drawn = self._before
        if self.masks:
            for mask in self.masks:
                mask.draw()
            drawn = global_states(torch)
            set_global_states(torch, self._before)
        numbers = zip(self._now[1], drawn[1], strict=True)
        drew = self._now[0] != drawn[0] or any(np.any(a != b) for a, b in numbers)
        return DRAWS if drew or not torch.equal(self._now[2], drawn[2]) else ""


def difference(one: Outcome, other: Outcome, names: Sequence[str], tolerance: float) -> str:
    """Return the first difference between two outcomes above the tolerance, in words; "" if they agree."""
    for number, (a, b) in enumerate(zip(one.outputs, other.outputs, strict=False)):
        if a.shape != b.shape or not _close(a, b, tolerance, max(_size(b), SMALL)):
            what = "result" if not names else "loss" if number == 0 else f"output {number}"
            return f"the {what} is {_shown(a)} in the batched call and {_shown(b)} alone"
    if len(one.outputs) != len(other.outputs):
        return f"the function returns {len(one.outputs)} values in the batched call and {len(other.outputs)} alone"
    largest = max((_size(each) for each in other.gradients), default=0.0)
    for name, a, b in zip(names, one.gradients, other.gradients, strict=True):
        if not _close(a, b, tolerance, max(largest, torch.finfo(b.dtype).tiny)):
            return f"the gradient of {name} differs by {_size(a - b) / max(largest, 1e-30):.2g} of the largest one"
    for number, (a, b) in enumerate(zip(one.buffers, other.buffers, strict=True)):
        if not _close(a, b, tolerance, max(_size(b), SMALL)):
            return f"buffer {number} of the model differs afterwards"
    return ""


def _size(value: Tensor) -> float:
    if not value.is_floating_point():
        value = value.double()
    return float(torch.linalg.vector_norm(torch.nan_to_num(value, 0.0, 0.0, 0.0)))


def _close(one: Tensor, other: Tensor, tolerance: float, scale: float) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    finite = torch.equal(one.isfinite(), other.isfinite())
    return finite and _size(one - other) <= tolerance * scale


def _shown(value: Tensor) -> str:
    return f"{float(value):.6g}" if value.numel() == 1 else f"a tensor of {value.numel()} numbers"


def mismatch(vmapped: Vmapped, own: Tensors, row: Outcome, *, alone: Outcome, names: Sequence[str]) -> str:
    """Return how a row of a batched call differs from the call executed alone, in words; "" if they agree.

    Args:
        vmapped: The function of the batched call.
        own: The tensors of the row's model before its update.
        row: The row's outcome of the batched call.
        alone: The outcome of the call executed alone.
        names: Names of the trained parameters.
    """
    loose, tight = TOLERANCES[(*own.trained, *own.fixed)[0].dtype]
    what = difference(row, alone, names, loose)
    if not what:
        return ""
    # Where a result depends on a comparison (a ReLU at 0, an argmax), rounding may change it. In that case the same
    # operations on this model by itself reproduce the call executed alone.
    try:
        again = vmapped.row(own)
    except Exception as error:  # noqa: BLE001 - any error of the program
        return f"the function raised {type(error).__name__}: {error}"
    return what if difference(again, alone, names, tight) else ""


def row_of(outcome: Outcome, row: int) -> Outcome:
    """Return one row of the outcome of many models."""
    return Outcome(*([each[row] for each in part] for part in outcome))


def changes(kind: Any, function: Callable[..., Any], model: nn.Module) -> Iterator[str]:
    """Yield the names of the parts of a function and a model that have changed since their group was created."""
    try:
        now = parts_of_function(function) | parts_of_model(model) | globals_of(function)
    except Ungroupable as why:
        yield str(why)
        return
    yield from (name for name, key in kind.parts.items() if now.get(name) != key)
