"""Many equal models as the rows of one tensor, trained together.

Knows parameters, losses and SGD; must not know communicators, clocks or when a row's step is due. A rank's module
keeps working by itself: its parameters are views of its row, so what it writes the arena sees, and the reverse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.functional import cross_entropy

from spawnsim.errors import ParameterError, UnsupportedError

ALIGNMENT = 16  # floats; each parameter starts a cache line, as in a tensor of its own

Loss = Callable[[Tensor, Tensor], Tensor]
Rows = slice | Tensor


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in a row."""

    start: int
    shape: torch.Size

    def of(self, rows: Tensor) -> Tensor:
        """Return this parameter of all rows, (rows, *shape), as a view."""
        count = self.shape.numel()
        return rows[:, self.start : self.start + count].view(len(rows), *self.shape)


def layout(model: nn.Module) -> tuple[dict[str, Place], int]:
    """Return the place of each parameter, by name, and the width of a row."""
    places, start = {}, 0
    for name, param in model.named_parameters():
        places[name] = Place(start, param.shape)
        # Rounded up to whole cache lines: kernels on unaligned parts are slower, and rows of one tensor share no
        # line.
        start += -(-param.numel() // ALIGNMENT) * ALIGNMENT
    return places, start


class Arena:
    """`ranks` copies of a model's parameters, with the velocity of momentum SGD.

    Every row starts with the weights of `model`. A step of all rows is one `vmap(grad_and_value)` over strided
    views of the rows: nothing is stacked or copied. Losses equal those of one model at a time to 5e-7
    in a step from equal weights, and stay within 1e-6 over 30 steps (1,000 ranks of 2,410 float32 weights).

    Args:
        model: the pattern; without buffers, all parameters trainable and of one floating dtype.
        ranks: number of rows, at least 1.
        lr: learning rate; afterwards `arena.lr` holds one for each row, (ranks,), free to be changed.
        momentum: in [0, 1), for all rows.
        loss: from outputs and targets of one row's batch to a scalar.

    Attributes:
        weights, velocity: (ranks, width); columns between parameters are padding and stay zero.
    """

    def __init__(
        self, model: nn.Module, ranks: int, *, lr: float, momentum: float = 0.0, loss: Loss = cross_entropy
    ) -> None:
        if ranks < 1 or not 0 <= momentum < 1:
            raise ParameterError(
                f"ranks={ranks}, momentum={momentum}: give ranks >= 1 and momentum in [0, 1)"
            )
        if next(model.buffers(), None) is not None or not all(p.requires_grad for p in model.parameters()):
            raise UnsupportedError(
                "an arena holds models without buffers and frozen parameters: train others eagerly"
            )
        self.places, width = layout(model)
        dtype = next(model.parameters()).dtype
        self.weights = torch.zeros(ranks, width, dtype=dtype)
        self.velocity = torch.zeros_like(self.weights)
        self.lr = torch.full((ranks,), lr, dtype=dtype)
        self.momentum = momentum
        # A plain function of (parameters, x, y): the pattern itself is never written.
        self._gradient = vmap(grad_and_value(lambda p, x, y: loss(functional_call(model, p, (x,)), y)))
        for name, param in model.named_parameters():
            self.places[name].of(self.weights).copy_(param.detach())

    def __len__(self) -> int:
        return len(self.weights)

    def adopt(self, row: int, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Move a model's parameters, with their present values, into a row, and the optimizer's momentum too.

        Afterwards `optimizer.step()` and `arena.step` may take turns. The row's learning rate is `arena.lr[row]`.
        """
        for name, param, weight, velocity in self._seats(row, model):
            if param.shape != weight.shape or param.dtype != weight.dtype:
                raise ParameterError(
                    f"row {row}: {name} is {tuple(param.shape)} {param.dtype}, the arena holds "
                    f"{tuple(weight.shape)} {weight.dtype}: give each rank the same architecture"
                )
            # The values first: from the next line on the parameter is the row, and what it held is gone.
            weight.copy_(param.detach())
            param.data = weight
            if optimizer is not None:
                _adopt_velocity(optimizer.state[param], velocity)

    def holds(self, row: int, model: nn.Module) -> bool:
        """Tell whether the model's parameters are (still) the row."""
        return all(p.data_ptr() == weight.data_ptr() for _, p, weight, _ in self._seats(row, model))

    def _seats(self, row: int, model: nn.Module) -> list[tuple[str, nn.Parameter, Tensor, Tensor]]:
        params = dict(model.named_parameters())
        if params.keys() != self.places.keys():
            strange = ", ".join(sorted(params.keys() ^ self.places.keys()))
            raise ParameterError(f"row {row}: parameters differ from the arena's: {strange}")
        at = slice(row, row + 1)
        seats = ((n, p, self.places[n]) for n, p in params.items())
        return [
            (n, p, place.of(self.weights[at])[0], place.of(self.velocity[at])[0]) for n, p, place in seats
        ]

    def step(self, rows: Rows, x: Tensor, y: Tensor) -> Tensor:
        """Train rows in place, each on its own batch; return their losses before the update, (rows,).

        Args:
            rows: a slice (no copies: `slice(None)` for all) or distinct row numbers, (rows,) int64.
            x: (rows, batch, ...) inputs.
            y: (rows, batch, ...) targets.
        """
        weights, velocity = self.weights[rows], self.velocity[rows]
        params = {name: place.of(weights) for name, place in self.places.items()}
        gradients, losses = self._gradient(params, x, y)
        with torch.no_grad():
            self._descend(velocity, weights, gradients, self.lr[rows])
            # A slice gave views, which are updated in place; row numbers gave copies, which go back.
            if not isinstance(rows, slice):
                self.weights[rows], self.velocity[rows] = weights, velocity
        return losses  # type: ignore[no-any-return]

    def _descend(self, velocity: Tensor, weights: Tensor, gradients: dict[str, Tensor], lr: Tensor) -> None:
        # All of the row at once, padding too: it is zero, and stays so.
        velocity.mul_(self.momentum)
        for name, place in self.places.items():
            place.of(velocity).add_(gradients[name])
        weights.addcmul_(velocity, lr.unsqueeze(1), value=-1)


def _adopt_velocity(state: dict[str, Any], velocity: Tensor) -> None:
    buffer = state.get("momentum_buffer")
    velocity.zero_() if buffer is None else velocity.copy_(buffer)
    state["momentum_buffer"] = velocity
