"""A training step of many rows of an arena at once: gradients by one vmapped call, then one update in place.

Knows rows, a loss and what its inputs look like; must not know whose rows they are, or when a step is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from spawnsim.training import structure
from spawnsim.training.arena import STEP, Arena
from spawnsim.training.objective import Objective, of_row, of_rows, tensors
from spawnsim.training.reading import Globals
from spawnsim.training.tracing import Traced

Rows = slice | Tensor
FEW = 4  # rows below which one at a time is faster than a vmapped call that is not repeated from a record
GRADIENT = "gradient"
CACHE_NBYTES = 16 << 20  # of the weights of a chunk
CHUNK = (16, 32)  # rows of a chunk, at least and at most
# Of the weights of a chunk on a GPU, which computes many rows at once: what takes time there is to begin an operation.
GPU_NBYTES = 256 << 20


def rows_at(rows: Sequence[int]) -> Rows:
    """Return rows as a part of an arena: a slice, whose views are not copied, where they follow each other."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, device="cpu")  # which rows of any device may be chosen by


def chunk_of(arena: Arena) -> int:
    """Return how many rows are computed at once: their weights, gradients and state fit the cache, or fill a GPU."""
    weights = arena.rows["weights"]
    nbytes = weights.stride(0) * weights.element_size()
    if weights.device.type == "cpu":
        return min(max(CACHE_NBYTES // nbytes, CHUNK[0]), CHUNK[1])
    return max(GPU_NBYTES // nbytes, CHUNK[0])


def fewer(rows: int) -> int:
    """Return how many rows to compute at once where a GPU has had no room for so many, of which it keeps nothing."""
    torch.cuda.empty_cache()
    return -(-rows // 2)


class RowStep:
    """A step of rows of one arena, with inputs of one kind.

    Args:
        arena: where the models are.
        objective: the loss.
        max_norm: of a row's gradient, None: any.

    Attributes:
        results: what the loss returns for one row, as long as its values are not known.
        like: by input, one row's; None for what is no tensor.
        gradient: from trained and fixed parameters of one row, and inputs, to gradients and outputs.
        reads: what the loss and the model read beside what they are given; None: not known.
        traced: the gradients of rows, repeated from a record.
    """

    def __init__(self, arena: Arena, objective: Objective, *, max_norm: float | None) -> None:
        self.arena, self.objective, self._max_norm = arena, objective, max_norm
        self.results: list[Tensor] = []
        self.like: list[Tensor | None] = []
        self._fixed_inputs: list[Any] = []  # what is no tensor is part of the function
        self.traced: Traced
        self.reads = self._reads()

        def outcome(trained: Any, fixed: Any, *inputs: Any) -> Any:
            outputs = objective.outputs(trained, fixed, inputs)
            return outputs[0], outputs

        self.gradient = grad_and_value(outcome, has_aux=True)

    def _reads(self) -> Globals | None:
        try:
            return Globals(self.objective.function, self.objective.model)
        except structure.Unequal:
            return None

    def open(self, at: slice, inputs: Sequence[Any]) -> str:
        """Take note of what inputs and results look like, of one row.

        Returns:
            The first parameter that is trained and on which the loss does not depend; "" for none.
        """
        trained, outputs = of_row(self.arena.plan, self.objective, self.arena.of(at), inputs)
        found: Sequence[Tensor | None] = torch.autograd.grad(outputs[0], trained, allow_unused=True)
        self.results = [unknown(each) for each in outputs]
        self._fixed_inputs = list(inputs)
        self.like = [torch.empty_like(each) if isinstance(each, Tensor) else None for each in inputs]
        self.traced = self._trace()
        places = zip(self.arena.plan.trained, found, strict=True)
        return next((place.name for place, each in places if each is None), "")

    def _trace(self) -> Traced:
        """Return the function from rows, as `Arena.of` gives them, and inputs that are tensors.

        It returns gradients, (rows, columns), and outputs, (rows, ...) each, and changes the statistics it is given.
        """
        plan, like, fixed_inputs = self.arena.plan, self.like, self._fixed_inputs
        dims = (0, 0, *(None if each is None else 0 for each in like))
        vmapped = of_rows(self.objective.model, self.gradient, dims)

        changing = len(plan.statistics)

        def call(*given: Tensor) -> list[Tensor]:
            trained, fixed = tensors(plan, given[: 1 + changing])
            rest = iter(given[1 + changing :])
            inputs = [
                other if each is None else next(rest) for each, other in zip(like, fixed_inputs, strict=True)
            ]
            gradients, (_, outputs) = vmapped(trained, fixed, *inputs)
            return [torch.cat([each.reshape(len(each), -1) for each in gradients.values()], 1), *outputs]

        return Traced(call, self.reads, changes=slice(1, 1 + changing))

    def differentiate(self, rows: Sequence[Tensor], staged: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the gradients of some rows, (rows, columns), clipped, and behind them their outputs, (rows, ...) each.

        Their statistics are brought up to date.

        Args:
            rows: as `Arena.of` gives them.
            staged: their inputs, (rows, ...) each; None for what is no tensor.
        """
        gradient, *outputs = self._differentiate(rows, staged)
        if self._max_norm is not None:
            norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient.mul_((self._max_norm / (norms + 1e-6)).clamp_(max=1.0))
        return [gradient, *outputs]

    def _differentiate(self, rows: Sequence[Tensor], staged: Sequence[Tensor | None]) -> Sequence[Tensor]:
        count = len(rows[0])
        if count == 1 or (count < FEW and not self.traced.repeats(count)):
            each = [self._one([part[i : i + 1] for part in rows], staged, i) for i in range(count)]
            return [torch.stack(parts) for parts in zip(*each, strict=True)]
        with torch.no_grad():
            return self.traced(*rows, *[each for each in staged if each is not None])

    def _one(self, row: Sequence[Tensor], staged: Sequence[Tensor | None], i: int) -> list[Tensor]:
        own = [
            fixed if each is None else each[i] for each, fixed in zip(staged, self._fixed_inputs, strict=True)
        ]
        trained, outputs = of_row(self.arena.plan, self.objective, row, own)
        # Plain autograd, which takes a third of the time of `grad_and_value`.
        gradients = torch.autograd.grad(outputs[0], trained)
        return [torch.cat([each.flatten() for each in gradients]), *[each.detach() for each in outputs]]

    def update(
        self, at: Rows, gradient: Tensor, rates: Sequence[Sequence[float]], settings: Sequence[Any]
    ) -> None:
        """Update some rows in place; the gradients may be overwritten.

        Args:
            at: which rows.
            gradient: as `differentiate` returned it.
            rates: learning rates, by row and group of the optimizer.
            settings: of each group, as the optimizer's rule returns them.
        """
        arena = self.arena
        if STEP in arena.rows:
            arena.rows[STEP][at] += 1
        for group in range(len(settings)):
            own = [each[group] for each in rates]
            for span, first in self._spans(at, group):
                self._update_span(at, gradient, own, settings[group], span=span, first=first)

    def _spans(self, at: Rows, group: int) -> list[tuple[slice, int]]:
        """Return the columns of a group, and which parameter tells their count of steps."""
        arena, plan = self.arena, self.arena.plan
        own = [i for i, place in enumerate(plan.trained) if place.group == group]
        if STEP in arena.rows and own:
            counts = arena.rows[STEP][at, own[0] : own[-1] + 1]
            if (counts != counts[:, :1]).any():  # a layer was thawed, or begins anew
                return [(plan.trained[i].columns, i) for i in own]
        return [(plan.spans[group], own[0])] if own else []

    def _update_span(
        self, at: Rows, gradient: Tensor, rates: Sequence[float], settings: Any, *, span: slice, first: int
    ) -> None:
        """Update some columns, which one group trains; `first` tells their count of steps."""
        arena = self.arena
        rows = range(at.start, at.stop) if isinstance(at, slice) else at.tolist()
        pieces = {name: arena.pieces(name, span) for name in ("weights", *arena.states)}
        own = {name: [of[row] for row in rows] for name, of in pieces.items()}
        own[GRADIENT] = [*gradient[:, span].unbind()]
        if STEP in arena.rows:
            # In main memory, as torch keeps them; the kernel wants them where the weights are.
            own[STEP] = [*arena.rows[STEP][at, first].to(gradient.device).unbind()]
        alike: dict[float, list[int]] = {}
        for place, rate in enumerate(rates):
            alike.setdefault(rate, []).append(place)
        for rate, places in alike.items():
            chosen = (
                {name: [of[place] for place in places] for name, of in own.items()} if len(alike) > 1 else own
            )
            arena.rule.update(chosen, rate, settings)


def unknown(like: Tensor) -> Tensor:
    """Return what a result is until it is known: NaN, or 0."""
    return torch.full_like(like.detach(), torch.nan if like.is_floating_point() or like.is_complex() else 0)
