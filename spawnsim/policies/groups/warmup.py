"""Warm-up: gradients averaged over the whole group, before each of the optimizer's first steps.

This room knows models, optimizers and a communicator's collectives; it knows nothing of what comes after warm-up.
"""

from __future__ import annotations

from typing import Any

import torch

from spawnsim.comm import Comm
from spawnsim.policies.flat import GroupMean
from spawnsim.policies.state import Tensors, Travels, as_real, collect


class WarmUp:
    """Counts the steps of warm-up, and averages gradients in a hook of the optimizer until they are over."""

    def __init__(self, steps: int, travels: Travels) -> None:
        self.left, self.travels = steps, travels
        self._mean: GroupMean | None = None
        self._hook: Any = None

    @property
    def over(self) -> bool:
        """Whether all steps have been counted."""
        return self.left <= 0

    def attach(self, comm: Comm, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Let all ranks begin with the mean of their weights, and average gradients from the next step on."""
        if self._hook is None and not self.over:
            live = as_real(collect(model, None, self.travels))
            GroupMean(comm, live)(comm, live)
            self._hook = optimizer.register_step_pre_hook(lambda *_: self._average(comm, model))

    def _average(self, comm: Comm, model: torch.nn.Module) -> None:
        live: Tensors = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                if parameter.grad is None:  # another rank may have one
                    parameter.grad = torch.zeros_like(parameter)
                live[f"gradient/{name}"] = parameter.grad
        if self._mean is None:
            self._mean = GroupMean(comm, as_real(live))
        self._mean(comm, as_real(live))

    def count(self) -> None:
        """Count one step."""
        self.left -= 1
        if self.over:
            self.detach()

    def detach(self) -> None:
        """Take the hook away."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
