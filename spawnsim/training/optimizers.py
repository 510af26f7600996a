"""torch's optimizers, on many models at once: each row by its own learning rate and count of steps.

SGD, Adam and AdamW are taken as they are: their settings are read at each step, and their state lies in rows beside
the weights, where the optimizer itself finds it too. A row is updated by the fused kernels of torch.optim (2.13), which
go through weights, gradient and state once. What a rule does not know is refused by name, and the model steps alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

Group = Mapping[str, Any]
Rows = Mapping[str, list[Tensor]]


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
        """Return what decides how a group is updated, but for its learning rate; what is refused, too."""
        raise NotImplementedError

    def update(self, rows: Rows, lr: float, settings: Sequence[Any]) -> None:
        """Update some rows in place; the gradients may be overwritten.

        Args:
            rows: their "weights", "gradient" and each state, (columns,) each, and "step", 0-dim each, counted before.
            lr: of all these rows.
            settings: as `settings` returned them.
        """
        raise NotImplementedError


class _SGD(Rule):
    def states(self, settings: Sequence[Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if settings[0] else ()

    def settings(self, group: Group) -> tuple[Hashable, ...]:
        refused = group["dampening"], group["differentiable"]
        momentum, decay = float(group["momentum"]), float(group["weight_decay"])  # perhaps tensors
        return momentum, decay, group["nesterov"], group["maximize"], refused

    def update(self, rows: Rows, lr: float, settings: Sequence[Any]) -> None:
        momentum, decay, nesterov, maximize, _ = settings
        torch._fused_sgd_(
            rows["weights"], rows["gradient"], rows["momentum_buffer"] if momentum else [], lr=lr, momentum=momentum,
            weight_decay=decay, dampening=0.0, nesterov=nesterov, maximize=maximize, is_first_step=False,
        )  # fmt: skip


class _Adam(Rule):
    def states(self, settings: Sequence[Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if settings[4] else ("exp_avg", "exp_avg_sq")

    def settings(self, group: Group) -> tuple[Hashable, ...]:
        decoupled = group.get("decoupled_weight_decay", False)
        betas = tuple(float(beta) for beta in group["betas"])
        decay, refused = (float(group["weight_decay"]), decoupled), group["differentiable"]
        return *betas, float(group["eps"]), decay, group["amsgrad"], group["maximize"], refused

    def update(self, rows: Rows, lr: float, settings: Sequence[Any]) -> None:
        beta1, beta2, eps, (decay, decoupled), amsgrad, maximize, _ = settings
        fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
        fused(
            rows["weights"], rows["gradient"], rows["exp_avg"], rows["exp_avg_sq"],
            rows["max_exp_avg_sq"] if amsgrad else [], rows["step"], lr=lr, beta1=beta1, beta2=beta2,
            weight_decay=decay, eps=eps, amsgrad=amsgrad, maximize=maximize,
        )  # fmt: skip


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
        return f"its optimizer is {type(optimizer).__name__}, none of {', '.join(kind.__name__ for kind in RULES)}"
    for group in optimizer.param_groups:
        for name, fine in rule.refused:
            if group.get(name, fine) != fine:
                return f"{type(optimizer).__name__} has {name}={group[name]}"
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return "its optimizer has hooks"
    replaced = vars(optimizer).get("step")  # schedulers replace it by what calls that of the class
    if replaced is not None and getattr(replaced, "__wrapped__", None) is not type(optimizer).step:
        return "its optimizer's step was replaced"
    return rule
