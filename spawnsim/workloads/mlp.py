"""A multilayer perceptron, its gradient in closed form, and the SGD that trains it.

For models so small that autograd's and the optimizer's own overhead would dominate: `SGD` is a drop-in for
`torch.optim.SGD` (same state, same update), at half of its time per step on a model of a few thousand weights.
Nothing here touches torch's global random generator: weights come from the generator that is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, nll_loss

from spawnsim.errors import ParameterError


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
        # On no device first: a layer's own initialisation would draw from the generator that all ranks share.
        self.layers = nn.ModuleList(
            nn.Linear(i, o, device="meta").to_empty(device="cpu") for i, o in pairwise(widths)
        )
        for layer in self.stages():
            bound = layer.in_features**-0.5
            nn.init.uniform_(layer.weight, -bound, bound, generator)
            nn.init.uniform_(layer.bias, -bound, bound, generator)

    def stages(self) -> list[nn.Linear]:
        """Return the layers in the order of their use."""
        return cast("list[nn.Linear]", list(self.layers))

    def forward(self, x: Tensor) -> Tensor:  # (..., inputs) -> (..., outputs)
        *hidden, last = self.stages()
        for layer in hidden:
            x = linear(x, layer.weight, layer.bias).relu()
        return linear(x, last.weight, last.bias)


@torch.no_grad()
def backpropagate(model: MLP, x: Tensor, y: Tensor) -> float:
    """Set `.grad` of each trainable parameter to that of the mean cross-entropy; return the loss.

    At this size autograd's bookkeeping costs more than the arithmetic: the closed form takes half the time.

    Args:
        model: float32 or float64.
        x: inputs, (batch, inputs).
        y: classes, (batch,) int64.
    """
    layers = model.stages()
    inputs = [x]
    for layer in layers[:-1]:
        inputs.append(linear(inputs[-1], layer.weight, layer.bias).relu_())
    log_p = linear(inputs[-1], layers[-1].weight, layers[-1].bias).log_softmax(1)
    # Before the next line, which turns `log_p` into the gradient in place.
    loss = nll_loss(log_p, y).item()
    delta = log_p.exp_().scatter_(1, y.unsqueeze(1), -1.0, reduce="add").div_(len(y))  # d loss / d logits
    for layer, seen in zip(reversed(layers), reversed(inputs), strict=True):
        weight, bias = layer.weight, layer.bias
        if weight.requires_grad:
            weight.grad = delta.t() @ seen
        if bias.requires_grad:
            bias.grad = delta.sum(0)
        # After this layer's own gradient: the next one needs the error before the activation, and the inputs need
        # none.
        if seen is not x:
            delta = (delta @ weight).mul_(seen > 0)
    return loss


def differentiate(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Do what `backpropagate` does, for any classifier, by autograd."""
    model.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


class SGD(torch.optim.Optimizer):
    """v ← momentum·v + gradient, w ← w − lr·v; what `torch.optim.SGD(foreach=True)` does, bit for bit.

    Step hooks registered on the instance run; hooks registered for all optimizers of the process do not.

    Args:
        params: parameters or groups of them, any shape and floating dtype.
        lr: learning rate, at least 0.
        momentum: in [0, 1).
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.0) -> None:
        if not lr >= 0:
            raise ParameterError(f"lr={lr}: give a number of at least 0")
        if not 0 <= momentum < 1:
            raise ParameterError(f"momentum={momentum}: give a number in [0, 1)")
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply one update to every parameter that has a gradient; return the closure's loss, if one is given."""
        # Called here, as `hooked` below leaves out torch's wrapper that would call them.
        for before in self._optimizer_step_pre_hooks.values():
            before(self, (), {})
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group)
        for after in self._optimizer_step_post_hooks.values():
            after(self, (), {})
        return loss

    # torch wraps `step` in a profiler range, which costs as much as the update itself, unless it is marked so.
    step.hooked = True  # type: ignore[attr-defined]

    def _update(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        steps = [p.grad for p in params]
        if group["momentum"]:
            velocities = [self._velocity(p) for p in params]
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, steps)
            steps = velocities
        torch._foreach_add_(params, steps, alpha=-group["lr"])

    def _velocity(self, param: Tensor) -> Tensor:
        state = self.state[param]
        try:
            return state["momentum_buffer"]  # type: ignore[no-any-return]
        except KeyError:
            state["momentum_buffer"] = velocity = torch.zeros_like(param)
            return velocity
