"""A model's travelling tensors, collected anew only when the model has changed.

A model of many modules takes longer to walk than its small tensors take to sum, and seldom changes; so what was walked
is remembered, and looked at again without running any Python per module. Knows torch modules; knows no communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from spawnsim.policies.state import Tensors, Travels, as_real, collect


class Collector:
    """Collects live tensors as real ones, and gives the same mapping again as long as they are the same memory.

    What was collected keeps that memory alive, so another tensor cannot have come to lie at the same address.
    """

    def __init__(self, travels: Travels) -> None:
        self._travels = travels
        self._live: Tensors = {}
        self._root: object = None  # the dictionary of the model's own children
        self._children: list[dict[str, Any]] = []  # of each module
        self._modules: list[object] = []  # what is in these
        self._tensors: list[dict[str, Any]] = []  # parameters and buffers of each module
        self._memory: tuple[Sequence[int], ...] = ()

    def __call__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Tensors:
        """Return what travels, by name."""
        if self._travels.with_optimizer:  # state comes and goes
            return as_real(collect(model, optimizer, self._travels))
        if not (self._same_modules(model) and self._read() == self._memory):
            self._walk(model)
            self._live = as_real(collect(model, None, self._travels))
        return self._live

    def _same_modules(self, model: torch.nn.Module) -> bool:
        """Whether there are the same modules: one that comes or goes does so among the children of a known one."""
        if model._modules is not self._root or sum(map(len, self._children)) != len(self._modules):
            return False
        return all(map(is_, chain.from_iterable(map(dict.values, self._children)), self._modules))

    def _read(self) -> tuple[Sequence[int], ...]:
        """Return where the tensors lie, and what else decides what is collected."""
        values = chain.from_iterable(map(dict.values, self._tensors))
        held = [each for each in values if each is not None]
        trained = [] if self._travels.frozen else [each.requires_grad for each in held]
        return [*map(torch.Tensor.data_ptr, held)], [*map(torch.Tensor.numel, held)], trained

    def _walk(self, model: torch.nn.Module) -> None:
        self._root, modules = model._modules, list(model.modules())
        self._children = [module._modules for module in modules]
        self._modules = [*chain.from_iterable(map(dict.values, self._children))]
        self._tensors = [place for module in modules for place in (module._parameters, module._buffers)]
        self._memory = self._read()
