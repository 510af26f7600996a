"""torch's optimizers for many models at once, each with its own learning rate and step count.

The settings of SGD, Adam and AdamW are read at each step, and their state stays in the optimizer itself. The fused
kernels of torch.optim (2.13) update the parameters of all models as one list, in one pass over weights, gradients and
state. An optimizer without a rule makes its step itself.
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
STEP = "step"


@dataclass(frozen=True)
class Rule:
    """The update rule of one class of optimizer.

    Attributes:
        kind: The class.
        counts: Whether it counts steps, in one tensor per parameter.
        refused: Names of settings that the rule does not support, each with the one accepted value.
    """

    kind: type[torch.optim.Optimizer]
    counts: bool = False
    refused: tuple[tuple[str, Any], ...] = ()

    def states(self, settings: Sequence[Any]) -> tuple[str, ...]:
        """Return the names of a parameter's state tensors under some settings, except its step count."""
        raise NotImplementedError

    def settings(self, group: Group) -> tuple[Hashable, ...]:
        """Return the settings of a group that affect its update, except the learning rate."""
        raise NotImplementedError

    def update(self, rows: Rows, lr: float, settings: Sequence[Any]) -> None:
        """Update parameters in place; the gradients may be overwritten.

        Args:
            rows: Lists of tensors: "weights", "gradient", each state, and "step" (0-dim, this step included).
            lr: The learning rate of all parameters.
            settings: The result of `settings`.
        """
        raise NotImplementedError


class _SGD(Rule):
    def states(self, settings: Sequence[Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if settings[0] else ()

    def settings(self, group: Group) -> tuple[Hashable, ...]:
        refused = group["dampening"], group["differentiable"]
        momentum, decay = float(group["momentum"]), float(group["weight_decay"])  # they may be tensors
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


def rule_of(optimizer: torch.optim.Optimizer) -> Rule | None:
    """Return the rule of an optimizer; None if it must make its step itself."""
    rule = RULES.get(type(optimizer))
    if rule is None:
        return None
    if any(group.get(name, fine) != fine for group in optimizer.param_groups for name, fine in rule.refused):
        return None
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return None
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return None
    replaced = vars(optimizer).get("step")  # schedulers wrap the method of the class
    if replaced is not None and getattr(replaced, "__wrapped__", None) is not type(optimizer).step:
        return None
    return rule


def update(models: Sequence[Any], groups: Sequence[int], gradients: Sequence[Sequence[Tensor]]) -> None:
    """Make one step of the optimizers of some models, all with the same rule.

    Args:
        models: Objects with an `optimizer` and the `trained` parameters.
        groups: The optimizer's group of each trained parameter, the same for all models.
        gradients: The gradients of all models, by trained parameter; they may be overwritten.
    """
    rule = RULES[type(models[0].optimizer)]
    for group in sorted(set(groups)):
        places = [place for place, own in enumerate(groups) if own == group]
        alike: dict[tuple[float, Any], list[int]] = {}
        for number, model in enumerate(models):
            settings = model.optimizer.param_groups[group]
            alike.setdefault((float(settings["lr"]), rule.settings(settings)), []).append(number)
        for (lr, settings), chosen in alike.items():
            some = models if len(chosen) == len(models) else [models[number] for number in chosen]
            rows = {
                "weights": [model.trained[place] for place in places for model in some],
                "gradient": [gradients[place][number] for place in places for number in chosen],
            }
            entries = [model.optimizer.state[model.trained[place]] for place in places for model in some]
            _add_state(rows, entries, rule, rule.states(settings))
            rule.update(rows, lr, settings)


def _add_state(
    rows: dict[str, list[Tensor]], entries: Sequence[dict[str, Any]], rule: Rule, states: Sequence[str]
) -> None:
    """Add the state of parameters to their rows, zeros for missing state; count the step."""
    if rule.counts:  # first, as in torch's state
        for entry in entries:
            if not isinstance(entry.get(STEP), Tensor):
                count = torch.promote_types(torch.get_default_dtype(), torch.float32)
                entry[STEP] = torch.tensor(float(entry.get(STEP, 0.0)), dtype=count)
        counts = [entry[STEP] for entry in entries]
        torch._foreach_add_(counts, 1)
        rows[STEP] = [each.to(rows["weights"][0].device) for each in counts]
    for name in states:
        for entry, weights in zip(entries, rows["weights"], strict=True):
            if entry.get(name) is None:
                entry[name] = torch.zeros_like(weights)
        rows[name] = [entry[name] for entry in entries]
