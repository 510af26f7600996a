"""A multilayer perceptron that draws its initial weights from a given generator, never from torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from spawnsim.errors import ParameterError


class _Linear(nn.Linear):
    """A layer whose weights the enclosing network draws."""

    # A layer's own initialization would draw from the generator that all ranks share. Creating it on torch's meta
    # device first, as torch.nn.utils.skip_init does, takes ten times as long as all the rest of a small network.
    def reset_parameters(self) -> None:
        """Leave the weights as they are."""


class MLP(nn.Module):
    """Linear layers with ReLU between them.

    Args:
        widths: inputs, hidden layers, outputs; `(64, 32, 10)` has 2,410 parameters.
        generator: source of the initial weights, uniform in ±1/√inputs as in `nn.Linear`.
    """

    def __init__(self, widths: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        if len(widths) < 2 or min(widths) < 1:
            raise ParameterError(f"widths={tuple(widths)}: give at least inputs and outputs, each at least 1")
        self.layers = nn.ModuleList(_Linear(i, o) for i, o in pairwise(widths))
        for layer in self.stages():
            bound = layer.in_features**-0.5
            nn.init.uniform_(layer.weight, -bound, bound, generator)
            nn.init.uniform_(layer.bias, -bound, bound, generator)

    def stages(self) -> list[nn.Linear]:
        return cast("list[nn.Linear]", list(self.layers))

    def forward(self, x: Tensor) -> Tensor:  # (..., inputs) -> (..., outputs)
        *hidden, last = self.stages()
        for layer in hidden:
            x = linear(x, layer.weight, layer.bias).relu()
        return linear(x, last.weight, last.bias)


def without_data(numbers: int, *, blocks: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model without memory, only for timing, and its optimizer.

    Args:
        numbers: count of float32 parameters, at least `blocks`.
        blocks: linear layers of about equal parameter counts, at least 1.

    Returns:
        The layers on torch's meta device, and plain SGD.
    """
    sizes = [numbers // blocks + (place < numbers % blocks) for place in range(blocks)]
    model = nn.ModuleList(nn.Linear(size, 1, bias=False, device="meta") for size in sizes)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
