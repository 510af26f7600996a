"""Warm-up: gradients averaged over the whole group, before each of the optimizer's first steps.

This module knows models, optimizers and a communicator's collectives; it knows nothing of what comes after warm-up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from spawnsim.comm import MAX, Comm
from spawnsim.errors import WorldError
from spawnsim.policies.flat import GroupMean
from spawnsim.policies.state import Tensors, Travels, as_real, collect


class WarmUp:
    """Counts the steps of warm-up, and averages gradients in a hook of the optimizer until they are over.

    A hook whose group has lost a rank takes itself away before it raises: the survivors' group attaches it anew, with
    the mean of their weights.
    """

    def __init__(self, steps: int, travels: Travels) -> None:
        self.steps, self.left, self.travels = steps, steps, travels
        self._mean: GroupMean | None = None
        self._hook: Any = None

    @property
    def over(self) -> bool:
        """Whether all steps have been counted."""
        return self.left <= 0

    def regroup(self, comm: Comm) -> None:
        """Go on in a group, for as many steps as the one that has most left: a death finds the survivors at two steps.

        Collective, where there is a warm-up at all.
        """
        self.detach()
        if self.steps:
            own, most = np.array([self.left]), np.zeros(1, np.int64)
            comm.Allreduce(own, most, MAX)
            self.left = int(most[0])

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
        try:
            if self._mean is None:
                self._mean = GroupMean(comm, as_real(live))
            self._mean(comm, as_real(live))
        except WorldError:
            self.detach()
            raise

    def count(self) -> None:
        """Count one step."""
        self.left -= 1
        if self.over:
            self.detach()

    def detach(self) -> None:
        """Take the hook away."""
        self._mean = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
