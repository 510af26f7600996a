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
    """Collects live tensors as real ones, and gives the same mapping again as long as they are the same memory."""

    def __init__(self, travels: Travels) -> None:
        self._travels = travels
        self._live: Tensors = {}
        self._places: list[dict[str, Any]] = []  # children, parameters and buffers of each module, root first
        self._content: list[object] = []  # what is in these places
        self._held: list[torch.Tensor] = []
        self._memory: tuple[Sequence[int], ...] = ()

    def __call__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Tensors:
        """Return what travels, by name."""
        if self._travels.with_optimizer:  # state comes and goes
            return as_real(collect(model, optimizer, self._travels))
        if not (self._same_objects(model) and self._read() == self._memory):
            self._walk(model)
            self._live = as_real(collect(model, None, self._travels))
        return self._live

    def _same_objects(self, model: torch.nn.Module) -> bool:
        """Whether all places hold what they held: a module that comes or goes does so in a place that is known."""
        if not self._places or model._modules is not self._places[0]:
            return False
        content = chain.from_iterable(map(dict.values, self._places))
        return sum(map(len, self._places)) == len(self._content) and all(map(is_, content, self._content))

    def _read(self) -> tuple[Sequence[int], ...]:
        """Return what changes when a tensor that stays the same object gets other memory."""
        held, tensor = self._held, torch.Tensor
        trained = [] if self._travels.frozen else [each.requires_grad for each in held]
        return [*map(tensor.data_ptr, held)], [*map(tensor.numel, held)], trained

    def _walk(self, model: torch.nn.Module) -> None:
        self._places = [
            place
            for module in model.modules()
            for place in (module._modules, module._parameters, module._buffers)
        ]
        self._content = [*chain.from_iterable(map(dict.values, self._places))]
        self._held = [each for each in self._content if isinstance(each, torch.Tensor)]
        self._memory = self._read()
