"""Means of gradients and of models over a group: one flat Allreduce, divided by the group's own size.

This room knows modules; the arithmetic is that of the policies (`policies.flat`), whatever the dtype.
"""

from __future__ import annotations

import torch

from spawnsim.distributed.worlds import Group, comm_of, default_backend
from spawnsim.policies.flat import GroupMean
from spawnsim.policies.state import Tensors, Travels, as_real, collect


def average_gradients(
    model: torch.nn.Module, group: Group = None, *, backend: str = default_backend, guard: bool = True
) -> None:
    """Replace each gradient by its mean over the group, in place.

    A rank without a gradient (`grad is None`) counts as zero and gets the mean; where no rank has one it stays None.
    With `guard`, numbers that are not finite are left out, as in `policies.AverageAllPolicy`; a loss scaler that looks
    for overflows after this wants them in: guard=False. All ranks must call.
    Raises `MismatchError` on every rank if the models differ.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return
    gradients = [_gradient(parameter) for parameter in trained]
    held = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.float32)
    live: Tensors = {f"gradient/{number}": gradient for number, gradient in enumerate(gradients)}
    live = as_real({**live, "held": held})
    comm = comm_of(group, backend)
    GroupMean(comm, live, guard=guard)(comm, live)
    for parameter, gradient, share in zip(trained, gradients, held.tolist(), strict=True):
        parameter.grad = gradient if share > 0 else None


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter, requires_grad=False)
    gradient = parameter.grad.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient


def average_models(
    model: torch.nn.Module,
    training_group: Group = None,
    *,
    travels: Travels | None = None,
    backend: str = default_backend,
    guard: bool = True,
) -> None:
    """Replace parameters and buffers by their mean over the group, in place: optimizers keep pointing at them.

    The mean of equal models is that model, to the bit, in a part of the world too. `travels` leaves out buffers or
    frozen parameters; with `guard`, numbers that are not finite are left out, as in `policies.AverageAllPolicy`.
    Raises `MismatchError` on every rank if the models differ.
    """
    comm = comm_of(training_group, backend)
    live = as_real(collect(model, None, travels or Travels()))
    if live:
        GroupMean(comm, live, guard=guard)(comm, live)
