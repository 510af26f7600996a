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

# The weights of one call, and its number of rows. Of small models a call takes many: the Python of a call costs as much
# as some 40 rows of 9,000 weights.
CALL_NBYTES = 16 << 20
CHUNK = (16, 512)
GPU_NBYTES = 256 << 20  # on a GPU, where the number of operations counts


class Tensors(NamedTuple):
    """The tensors of one model, or of many as rows: trained and other parameters, buffers, masks, inputs."""

    trained: Sequence[Tensor]
    fixed: Sequence[Tensor]
    buffers: Sequence[Tensor]
    masks: Sequence[Tensor]
    inputs: Sequence[Any]


class Outcome(NamedTuple):
    """The result of a function: gradients of what is trained, outputs, buffers afterwards."""

    gradients: Sequence[Tensor]
    outputs: Sequence[Tensor]
    buffers: Sequence[Tensor]


class Objective(nn.Module):
    """A function of a model as a module: `functional_call` replaces the tensors of its model for one call.

    Args:
        model: It is copied, without data.
        function: From a model and inputs to a tensor, or to a tuple of them.
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
    """A function of models that are alike.

    Args:
        model: One of them.
        function: Of a model and inputs.
        trained: The names of the parameters with respect to which gradients are taken; none for an evaluation.
    """

    def __init__(self, model: nn.Module, function: Callable[..., Any], trained: Sequence[str]) -> None:
        self.objective = Objective(model, function)
        own = set(trained)
        fixed = [name for name, _ in model.named_parameters() if name not in own]
        names = [*trained, *fixed, *[name for name, _ in model.named_buffers()]]
        self._names = [f"model.{name}" for name in names]
        self._trains = bool(trained)
        # oneDNN computes an LSTM of one model in one operation. Without it there are operations for many, as of a GRU.
        self._is_lstm = any(isinstance(each, nn.LSTM) for each in model.modules())

    def _value(self, trained: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Any]:
        fixed, buffers, masks, inputs = rest
        named = dict(zip(self._names, [*trained, *fixed, *buffers], strict=True))
        outputs, now = functional_call(self.objective, named, (masks, inputs))
        return outputs[0], (outputs, now)

    def rows(self, rows: Tensors, dims: Sequence[int | None]) -> Outcome:
        """Return the outcome of many models, (rows, ...) each.

        Args:
            rows: Their tensors, stacked; the buffers may be changed in place.
            dims: Of each input 0, or None where it is the same for all models.
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
    """Let torch not warn of operations that it computes model by model: the program has not called vmap."""
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
    """Return how many models like one are computed at once."""
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
