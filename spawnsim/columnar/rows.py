"""Many equal models as the rows of one tensor: parameters and optimizer state.

Knows rows; must not know losses, policies, or when a step is due.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spawnsim.training.optimizers import STEP, Rule

if TYPE_CHECKING:
    from spawnsim.columnar.shards import Shards

ALIGN_NBYTES = 64  # each row begins on a cache line, so that results do not depend on which row it is
Members = NDArray[np.int64] | slice  # which ranks take part: an index into columns over all ranks
WEIGHTS, GRADIENT = "weights", "gradient"


@dataclass(frozen=True)
class Place:
    """Position of a parameter in a row, and the optimizer's group that trains it (-1: not trained)."""

    name: str
    start: int
    shape: torch.Size
    group: int

    @property
    def columns(self) -> slice:
        """Its columns."""
        return slice(self.start, self.start + self.shape.numel())

    def of(self, rows: Tensor) -> Tensor:
        """Return a view of this parameter in all rows, (rows, *shape)."""
        return rows[:, self.columns].view(len(rows), *self.shape)


class Plan:
    """Layout of a model's parameters in a row: by the optimizer's group, then in the model's order.

    Attributes:
        places: Places of all parameters. Parameters of one group are adjacent; untrained parameters are at the end.
        names: Names of all parameters, in the model's order.
        trained: Places of the trained parameters.
        fixed: Places of the untrained parameters.
        width: Columns of a row, padding included.
        spans: The columns of each group.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        count = len(optimizer.param_groups)
        group_of = {
            id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        named = [
            (group_of.get(id(p), -1) if p.requires_grad else -1, name, p)
            for name, p in model.named_parameters()
        ]
        self.names = [name for _, name, _ in named]
        named.sort(key=lambda item: item[0] % (count + 1))  # stable; -1 comes last
        self.places: list[Place] = []
        start = 0
        for group, name, p in named:
            self.places.append(Place(name, start, p.shape, group))
            start += p.numel()
        self.trained = [place for place in self.places if place.group >= 0]
        self.fixed = self.places[len(self.trained) :]
        align = ALIGN_NBYTES // named[0][2].dtype.itemsize
        self.width = -(-start // align) * align
        self.spans = [self._span(group) for group in range(count)]

    def _span(self, group: int) -> slice:
        own = [place.columns for place in self.trained if place.group == group]
        return slice(own[0].start, own[-1].stop) if own else slice(0, 0)

    @property
    def columns(self) -> slice:
        """The columns of all trained parameters."""
        return slice(0, sum(place.shape.numel() for place in self.trained))


class Rows:
    """Rows for models of one structure, trained by optimizers of one class.

    Args:
        plan: Layout of a row.
        like: A parameter with the dtype and device of the rows.
        rule: Update rule of the optimizers.
        states: Names of the optimizers' state tensors, except step counts.
        ranks: Number of rows.

    Attributes:
        shards: Of a part: the division of an experiment's ranks over processes; the rows are this process's.
        of: Tensors (ranks, columns) by name: "weights", each state, and "step" if the rule counts steps.
    """

    shards: Shards

    def __init__(self, plan: Plan, like: Tensor, rule: Rule, *, states: Sequence[str], ranks: int) -> None:
        self.plan, self.rule, self.states = plan, rule, tuple(states)
        self.of = {name: _zeros(like, (ranks, plan.width)) for name in (WEIGHTS, *states)}
        if rule.counts:
            # Torch counts steps in main memory, in float32, or in float64 if that is the default dtype.
            dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
            self.of[STEP] = torch.zeros(ranks, len(plan.trained), dtype=dtype)
        self._pieces: dict[tuple[str, int], tuple[Tensor, ...]] = {}

    def part(self, begin: int, shards: Shards) -> Rows:
        """Return this process's rows of an experiment, as views of the same memory."""
        found, rows = copy.copy(self), slice(begin, begin + shards.count)
        found.shards = shards
        found.of = {name: each[rows] for name, each in self.of.items()}
        found._pieces = {}
        return found

    def pieces(self, name: str, group: int) -> tuple[Tensor, ...]:
        """Return a group's columns of each row, (columns,) each: views, cached."""
        key = name, group
        if key not in self._pieces:
            self._pieces[key] = self.of[name][:, self.plan.spans[group]].unbind()
        return self._pieces[key]

    def update(
        self,
        ranks: Sequence[int],
        gradient: Tensor,
        rates: Sequence[Sequence[float]],
        settings: Sequence[object],
    ) -> None:
        """Update the rows of some ranks in place; the gradients may be overwritten.

        Args:
            ranks: The rows to update.
            gradient: Gradients, (rows, columns).
            rates: Learning rates, by row and group of the optimizer.
            settings: Settings of each group, as the optimizer's rule returns them.
        """
        if STEP in self.of:
            self.of[STEP][torch.tensor(ranks)] += 1
        for group, own in enumerate(settings):
            if not self.plan.spans[group].stop:
                continue
            gradients = gradient[:, self.plan.spans[group]].unbind()
            alike: dict[float, list[int]] = {}
            for number, each in enumerate(rates):
                alike.setdefault(each[group], []).append(number)
            for rate, chosen in alike.items():
                some = [ranks[number] for number in chosen]
                rows = {
                    name: [*map(self.pieces(name, group).__getitem__, some)]
                    for name in (WEIGHTS, *self.states)
                }
                rows[GRADIENT] = [gradients[number] for number in chosen]
                if STEP in self.of:  # equal for all parameters of a model
                    rows[STEP] = [*self.of[STEP][some, 0].to(gradient.device).unbind()]
                self.rule.update(rows, rate, own)  # type: ignore[arg-type]


def _zeros(like: Tensor, shape: tuple[int, int]) -> Tensor:
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    memory = np.zeros(math.prod(shape) * like.dtype.itemsize + ALIGN_NBYTES, np.uint8)
    skip = -memory.ctypes.data % ALIGN_NBYTES
    nbytes = math.prod(shape) * like.dtype.itemsize
    return torch.from_numpy(memory[skip : skip + nbytes]).view(like.dtype).view(shape)


def at(ranks: Sequence[int]) -> slice | Tensor:
    """Return an index of the rows of some ranks: a slice, which does not copy, if the ranks are consecutive."""
    if ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        return slice(ranks[0], ranks[0] + len(ranks))
    return torch.tensor(ranks, device="cpu")  # it can index rows on any device
