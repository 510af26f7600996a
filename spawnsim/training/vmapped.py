"""A function of a model, for many models at once: one `torch.func.vmap` call over rows of stacked weights.

Knows functions, models and rows; must not know ranks, optimizers or time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from spawnsim.training.dropout import Applying, Mask

# Size of the weights of one call, and bounds of its number of rows. A call has many rows of small models, as its Python
# overhead equals about 40 rows of 9,000 weights.
CALL_NBYTES = 16 << 20
CHUNK = (16, 512)
GPU_NBYTES = 256 << 20  # the same on a GPU, where the number of operations dominates


class Tensors(NamedTuple):
    """The tensors of one model, or of many as rows: trained and fixed parameters, buffers, masks, inputs."""

    trained: Sequence[Tensor]
    fixed: Sequence[Tensor]
    buffers: Sequence[Tensor]
    masks: Sequence[Tensor]
    inputs: Sequence[Any]


class Outcome(NamedTuple):
    """The result of a function: gradients of trained parameters, outputs, buffers afterwards."""

    gradients: Sequence[Tensor]
    outputs: Sequence[Tensor]
    buffers: Sequence[Tensor]


class Objective(nn.Module):
    """A function of a model as a module: `functional_call` replaces the tensors of its model for one call.

    Args:
        model: The model; its structure is copied, without data.
        function: Maps a model and inputs to a tensor, or to a tuple of tensors.
    """

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        empty: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
            for p in model.parameters()
        }
        empty |= {id(each): torch.empty_like(each, device="meta") for each in model.buffers()}
        self.model = copy.deepcopy(model, empty)
        self.function = function
        self.masks: Sequence[Mask] = ()

    def forward(
        self, masks: Sequence[Tensor], inputs: Sequence[Any]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        if self.masks:
            with Applying(self.masks, masks) as applying:
                found = self.function(self.model, *inputs)
            applying.require_all()
        else:
            found = self.function(self.model, *inputs)
        return as_outputs(found), [*self.model.buffers()]


def as_outputs(found: Any) -> tuple[Tensor, ...]:
    """Return the outputs of a function as a tuple; the loss is the first."""
    return found if isinstance(found, tuple) else (found,)


class Vmapped:
    """A function of models of equal structure.

    Args:
        model: One of the models.
        function: Function of a model and inputs.
        trained: Names of the parameters that have gradients; empty for an evaluation.
    """

    def __init__(self, model: nn.Module, function: Callable[..., Any], trained: Sequence[str]) -> None:
        self.objective = Objective(model, function)
        own = set(trained)
        fixed = [name for name, _ in model.named_parameters() if name not in own]
        names = [*trained, *fixed, *[name for name, _ in model.named_buffers()]]
        self._names = [f"model.{name}" for name in names]
        self._trains = bool(trained)
        # oneDNN fuses the LSTM of one model into one operation. Without oneDNN an LSTM can be vectorized, as a GRU can.
        self._is_lstm = any(isinstance(each, nn.LSTM) for each in model.modules())

    def _value(self, trained: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Any]:
        fixed, buffers, masks, inputs = rest
        named = dict(zip(self._names, [*trained, *fixed, *buffers], strict=True))
        outputs, now = functional_call(self.objective, named, (masks, inputs))
        return outputs[0], (outputs, now)

    def rows(self, rows: Tensors, dims: Sequence[int | None]) -> Outcome:
        """Return the outcome of many models, (rows, ...) each.

        Args:
            rows: Stacked tensors of the models; the buffers may be changed in place.
            dims: For each input 0, or None if it is the same for all models.
        """
        call: Any = grad_and_value(self._value, has_aux=True) if self._trains else self._alone
        with torch.no_grad(), _quiet(without_onednn=self._is_lstm):
            gradients, (_, (outputs, buffers)) = vmap(call, in_dims=(0, 0, 0, 0, list(dims)))(
                tuple(rows.trained),
                tuple(rows.fixed),
                tuple(rows.buffers),
                tuple(rows.masks),
                list(rows.inputs),
            )
        return Outcome(gradients, outputs, buffers)

    def _alone(self, *given: Any) -> Any:
        return (), self._value(*given)

    def row(self, row: Tensors) -> Outcome:
        """Return the outcome of one model, by plain autograd."""
        with torch.set_grad_enabled(self._trains):
            trained = [each.detach().requires_grad_() for each in row.trained]
            buffers = [each.clone() for each in row.buffers]
            loss, (outputs, now) = self._value(trained, row.fixed, buffers, row.masks, row.inputs)
            gradients = torch.autograd.grad(loss, trained) if self._trains else ()
        return Outcome(gradients, [each.detach() for each in outputs], [each.detach() for each in now])


@contextmanager
def _quiet(*, without_onednn: bool) -> Iterator[None]:
    """Suppress torch's warnings of operations that it computes model by model: the program did not call vmap."""
    of_torch: Any = torch._C
    warns, whole = of_torch._debug_only_are_vmap_fallback_warnings_enabled(), of_torch._get_mkldnn_enabled()
    of_torch._functorch._set_vmap_fallback_warning_enabled(False)
    of_torch._set_mkldnn_enabled(whole and not without_onednn)
    try:
        yield
    finally:
        of_torch._functorch._set_vmap_fallback_warning_enabled(warns)
        of_torch._set_mkldnn_enabled(whole)


def rows_at_once(parameters: Sequence[Tensor]) -> int:
    """Return the number of models with such parameters per call."""
    nbytes = max(sum(each.nbytes for each in parameters), 1)
    if all(each.device.type == "cpu" for each in parameters):
        return min(max(CALL_NBYTES // nbytes, CHUNK[0]), CHUNK[1])
    return max(GPU_NBYTES // nbytes, CHUNK[0])


def clip(gradients: Sequence[Tensor], max_norm: float) -> None:
    """Clip the gradients of many models, (rows, ...) each, as `torch.nn.utils.clip_grad_norm_` does for one."""
    squares = [torch.linalg.vector_norm(each.flatten(1), dim=1) for each in gradients]
    norms = torch.linalg.vector_norm(torch.stack(squares), dim=0)
    factors = (max_norm / (norms + 1e-6)).clamp_(max=1.0)
    for each in gradients:
        each.mul_(factors.view(-1, *[1] * (each.dim() - 1)))
