"""A model and its optimizer as a member of a group: the tensors that form its row, and whether they are still valid.

Knows one model; must not know other models, functions or ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from spawnsim.training.grouping import Parts, Ungroupable, hooks_of, parts_of_model
from spawnsim.training.optimizers import Rule, rule_of

DTYPES = (torch.float32, torch.float64)
_REQUIRES_GRADIENT, _TRAINING = attrgetter("requires_grad"), attrgetter("training")


class Seat:
    """A model, and its optimizer if it trains, as they were when they joined their group.

    Args:
        model: Any module.
        optimizer: Optimizer of its parameters; None for an evaluation.

    Attributes:
        parts: The structure of the model, by name.
        key: A key that is equal for models that can be computed together.
        trained: The parameters that the optimizer updates, in the model's order.
        groups: The optimizer's group of each trained parameter.
        rule: Update rule of the optimizer; None if it makes its step itself.
        rank: The rank that trains it.
        steps: Number of steps begun.

    Raises:
        Ungroupable: it cannot be computed together with other models.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._model = weakref.ref(model)
        self.optimizer = optimizer
        self.parts: Parts = parts_of_model(model)
        self.parameters = [*model.parameters()]
        self.buffers: list[tuple[dict[str, Any], str]] = [
            (each._buffers, name)
            for each in model.modules()
            for name, own in each._buffers.items()
            if own is not None
        ]
        self._modules = [*model.modules()]
        self._require_dtype()
        self.names: list[str] = []
        self.trained: list[Tensor] = []
        self.groups: list[int] = []
        self.rule: Rule | None = None
        if optimizer is not None:
            self._take(model, optimizer)
        own = set(map(id, self.trained))
        self.fixed = [p for p in self.parameters if id(p) not in own]
        self._containers = [*_containers(self._modules)]
        self._held = [*chain.from_iterable(self._containers)]
        self._wanted = [*map(_REQUIRES_GRADIENT, self.parameters)]
        self._in_groups = self._of_groups()
        self._handles = RemovableHandle.next_id
        self.key: Hashable = tuple(self.parts.items()), type(optimizer), self.rule is None, tuple(self.groups)
        self.rank, self.steps = -1, 0

    def _require_dtype(self) -> None:
        if any(type(p) is not nn.Parameter for p in self.parameters):
            raise Ungroupable("its parameters are not plain torch.nn.Parameters")
        if len({(p.dtype, p.device) for p in self.parameters}) != 1 or self.parameters[0].dtype not in DTYPES:
            raise Ungroupable("its parameters are not all of one dtype, float32 or float64, on one device")
        if len({id(own[name]) for own, name in self.buffers}) != len(self.buffers):
            raise Ungroupable("modules share a buffer")

    def _take(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        group_of = {
            id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        if not group_of.keys() <= set(map(id, self.parameters)):
            raise Ungroupable("its optimizer has parameters that are not the model's")
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            if id(p) not in group_of:
                raise Ungroupable(f"{name} requires a gradient and is not in its optimizer")
            self.names.append(name)
            self.trained.append(p)
            self.groups.append(group_of[id(p)])
        if not self.trained:
            raise Ungroupable("its optimizer trains none of its parameters")
        self.rule = rule_of(optimizer)

    def of(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> bool:
        """Return whether it belongs to a model and an optimizer of unchanged structure."""
        if self._model() is not model or self.optimizer is not optimizer:
            return False
        now = [*chain.from_iterable(self._containers)]
        if len(now) != len(self._held) or not all(map(is_, now, self._held)):
            return False
        if [*map(_REQUIRES_GRADIENT, self.parameters)] != self._wanted:
            return False
        if optimizer is not None and not self._is_trained_alike(optimizer):
            return False
        # Torch numbers the hooks of the whole process: search for hooks only if there is a new one.
        if RemovableHandle.next_id != self._handles:
            self._handles = RemovableHandle.next_id
            return not hooks_of(model)
        return True

    def _is_trained_alike(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._of_groups() == self._in_groups and rule_of(optimizer) is self.rule

    def _of_groups(self) -> list[int]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [id(p) for group in groups for p in group["params"]]

    def module(self) -> nn.Module:
        """Return the model."""
        model = self._model()
        assert model is not None
        return model

    def modes(self) -> tuple[bool, ...]:
        return tuple(map(_TRAINING, self._modules))

    def buffer(self, number: int) -> Tensor:
        """Return the current buffer: modules may assign another tensor."""
        own, name = self.buffers[number]
        found: Tensor = own[name]
        return found

    def memory(self) -> Sequence[Tensor]:
        return [*self.trained, *[own[name] for own, name in self.buffers]]


def _containers(modules: Sequence[nn.Module]) -> Iterable[Iterable[Any]]:
    """Yield views of the modules and of the parameters of each module, with a separator before parameters."""
    for each in modules:
        if each._modules:
            yield each._modules.values()
        if each._parameters:
            yield (None,)
            yield each._parameters.values()
