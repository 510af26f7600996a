"""torch's optimizers, on many models at once: each row by its own learning rate and count of steps.

SGD, Adam and AdamW are taken as they are: their settings are read at each step, and their state lies in rows beside
the weights, where the optimizer itself finds it too. Formulas: torch.optim of 2.13. What a rule does not know is
refused by name, and the model steps alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Group = Mapping[str, Any]
State = Mapping[str, Tensor]  # name -> (rows, width); "step": (rows, 1), counted before the update


@dataclass(frozen=True)
class Rule:
    """How one class of optimizer updates.

    Attributes:
        kind: the class.
        counts: whether it counts steps, a tensor for each parameter.
        refused: settings that it may not have, with the value that is fine.
    """

    kind: type[torch.optim.Optimizer]
    counts: bool = False
    refused: tuple[tuple[str, Any], ...] = ()

    def states(self, settings: Sequence[Any]) -> tuple[str, ...]:
        """Return the names of the state that a parameter has under some settings."""
        raise NotImplementedError

    def settings(self, group: Group) -> tuple[Hashable, ...]:
        """Return what decides how a group is updated, but for its learning rate."""
        raise NotImplementedError

    def update(
        self, weights: Tensor, gradient: Tensor, state: State, lr: Tensor | float, settings: Sequence[Any]
    ) -> None:
        """Update some columns of the rows in place; the gradient may be overwritten.

        Args:
            weights: (rows, columns).
            gradient: (rows, columns).
            state: of the same rows and columns.
            lr: one number, or one for each row, (rows, 1).
            settings: as `settings` returned them.
        """
        raise NotImplementedError


class _SGD(Rule):
    def states(self, settings: Sequence[Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if settings[0] else ()

    def settings(self, group: Group) -> tuple[Hashable, ...]:
        return group["momentum"], group["weight_decay"], group["nesterov"], group["maximize"]

    def update(
        self, weights: Tensor, gradient: Tensor, state: State, lr: Tensor | float, settings: Sequence[Any]
    ) -> None:
        momentum, decay, nesterov, maximize = settings
        if maximize:
            gradient.neg_()
        if decay:
            gradient.add_(weights, alpha=decay)
        if momentum:
            velocity = state["momentum_buffer"].mul_(momentum).add_(gradient)
            gradient = gradient.add_(velocity, alpha=momentum) if nesterov else velocity
        _descend(weights, gradient, lr)


class _Adam(Rule):
    decoupled = False

    def states(self, settings: Sequence[Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if settings[4] else ("exp_avg", "exp_avg_sq")

    def settings(self, group: Group) -> tuple[Hashable, ...]:
        decoupled = group.get("decoupled_weight_decay", False)
        betas = tuple(float(beta) for beta in group["betas"])
        return *betas, group["eps"], (group["weight_decay"], decoupled), group["amsgrad"], group["maximize"]

    def update(
        self, weights: Tensor, gradient: Tensor, state: State, lr: Tensor | float, settings: Sequence[Any]
    ) -> None:
        beta1, beta2, eps, (decay, decoupled), amsgrad, maximize = settings
        if maximize:
            gradient.neg_()
        if decay and decoupled:
            weights.mul_(1 - lr * decay)
        elif decay:
            gradient.add_(weights, alpha=decay)
        mean, square, steps = state["exp_avg"], state["exp_avg_sq"], state["step"]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if amsgrad:
            square = torch.maximum(state["max_exp_avg_sq"], square, out=state["max_exp_avg_sq"])
        # The gradient is not needed any more, so its memory takes what is divided by.
        below = torch.sqrt(square, out=gradient).div_((1 - beta2**steps).sqrt()).add_(eps)
        _descend(weights, mean / below, lr / (1 - beta1**steps))


def _descend(weights: Tensor, direction: Tensor, lr: Tensor | float) -> None:
    if isinstance(lr, Tensor):
        weights.addcmul_(direction, lr, value=-1)
    else:
        weights.add_(direction, alpha=-lr)


_PLAIN = (("differentiable", False),)
RULES: dict[type, Rule] = {
    torch.optim.SGD: _SGD(torch.optim.SGD, refused=(*_PLAIN, ("dampening", 0))),
    torch.optim.Adam: _Adam(torch.optim.Adam, counts=True, refused=_PLAIN),
    torch.optim.AdamW: _Adam(torch.optim.AdamW, counts=True, refused=_PLAIN),
}


def rule_of(optimizer: torch.optim.Optimizer) -> Rule | str:
    """Return the rule of an optimizer, or why there is none."""
    rule = RULES.get(type(optimizer))
    if rule is None:
        return f"{type(optimizer).__name__} is none of {', '.join(kind.__name__ for kind in RULES)}"
    for group in optimizer.param_groups:
        for name, fine in rule.refused:
            if group.get(name, fine) != fine:
                return f"{type(optimizer).__name__} has {name}={group[name]}"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "its optimizer has hooks"
    return rule
