"""The states that a replaced rank's donors give: a few are kept, many are taken into a mean as they come.

A rank whose donors are all survivors of a large group cannot keep their states until the last has come: over all
replaced ranks that is memory in the square of the group. Up to `MOST_DONORS` states are kept and mixed in order of
rank. More are added to a running mean in order of arrival, and the record lists them in that order, so that a replay
gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from spawnsim.comm import Comm
from spawnsim.policies.exchange.replacement import (
    Contribution,
    leave_out,
    nonfinite_donors,
    normalized,
    of_optimizer,
    usable,
)
from spawnsim.policies.rules.donors import MOST_DONORS
from spawnsim.policies.state.arithmetic import accumulate, add, sum_dtype
from spawnsim.policies.state.layout import ModelAndOptimizer, StateScope, Tensors, collect


class _RunningMean:
    """The weighted mean of states of one layout: to the bit `blend` of them, in the order in which they were added."""

    def __init__(self, first: Contribution) -> None:
        self._first, self._total = first, first.weight
        self._drifts = [torch.zeros_like(each, dtype=sum_dtype(each.dtype)) for each in _pieces(first)]

    def add(self, given: Contribution) -> None:
        self._total += given.weight
        for drift, value, base in zip(self._drifts, _pieces(given), _pieces(self._first), strict=True):
            accumulate(drift, value, base, given.weight)

    def finish(self) -> Contribution:
        """Return the mean as one contribution that weighs as much as all; nothing can be added after it."""
        first, total = self._first, self._total
        if total > 0 and not math.isclose(total, 1, rel_tol=1e-12):
            for drift in self._drifts:
                drift.div_(total)
        mixed = [add(base, drift) for base, drift in zip(_pieces(first), self._drifts, strict=True)]
        if first.row is not None:
            mixed = [*torch.split(mixed[0], [tensor.numel() for tensor in first.tensors.values()])]
        views = zip(first.tensors.items(), mixed, strict=True)
        return replace(first, weight=total, tensors={name: new.view(old.shape) for (name, old), new in views})


def _pieces(given: Contribution) -> list[torch.Tensor]:
    """Return the tensors of a state: as one, where they lie end to end."""
    return [*given.tensors.values()] if given.row is None else [given.row]


def _layout(given: Contribution) -> Any:
    tensors = given.tensors.items()
    return given.row is None, *((name, tensor.dtype, tensor.shape) for name, tensor in tensors)


class Gathering:
    """What the donors of one replacement give.

    Args:
        weights: of the donors, by rank.
        travels: which parts of the state are exchanged.
        guard: leave out donors whose state is not finite.
    """

    def __init__(self, weights: Mapping[int, float], travels: StateScope, *, guard: bool) -> None:
        self.weights, self.travels, self.guard = weights, travels, guard
        # A replay is given the donors that came, whose weights sum to less than 1 only where a running mean was formed.
        self.running = len(weights) > MOST_DONORS or not math.isclose(sum(weights.values()), 1)
        self._given: list[Contribution] = []
        self._means: dict[Any, _RunningMean] = {}
        self._heaviest: Contribution | None = None
        self._out: list[int] = []

    def add(self, donor: int, iteration: int, tensors: Tensors, whose: ModelAndOptimizer) -> None:
        """Take a donor's whole state; `whose` are this rank's model and optimizer."""
        given = Contribution(donor, iteration, self.weights[donor], tensors)
        if not self.running:
            self._given.append(given)
            return
        if self.guard and nonfinite_donors([given], lambda: collect(*whose, self.travels)):
            self._out.append(donor)
            return
        self._given.append(replace(given, tensors={}))
        if self.travels.optimizer_state == "copy":
            if self._heaviest is None or given.precedence > self._heaviest.precedence:
                self._heaviest = given
            moments = of_optimizer(tensors)
            given = replace(given, tensors={n: t for n, t in tensors.items() if n not in moments})
        layout = _layout(given)
        if layout in self._means:
            self._means[layout].add(given)
        else:
            self._means[layout] = _RunningMean(given)

    def finish(self, comm: Comm, whose: ModelAndOptimizer) -> tuple[list[Contribution], list[Contribution]]:
        """Return the contributions to mix, with weights that sum to 1, and those to record, in order of their sum."""
        if not self.running:
            kept = sorted(self._given, key=lambda each: each.donor)
            kept = usable(comm, kept, whose, self.travels, guard=self.guard)
            return kept, kept
        leave_out(comm, sorted(self._out))
        moments = {} if self._heaviest is None else of_optimizer(self._heaviest.tensors)
        means = [mean.finish() for mean in self._means.values()]
        return normalized([replace(mean, tensors=mean.tensors | moments) for mean in means]), self._given
