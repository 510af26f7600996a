"""Many equal models as the rows of one tensor: parameters, optimizer state and, where asked for, gradients.

A model that takes a seat keeps working by itself: its parameters become views of its row, so that what it writes the
arena sees, and the reverse; its optimizer finds its state there too. Knows rows and who sits on them; must not know
losses, or when a step is due.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spawnsim.training.optimizers import Rule

ALIGN_NBYTES = 64  # each row begins on a cache line, so that results do not depend on which row it is
_REQUIRES_GRADIENT, _ADDRESS = attrgetter("requires_grad"), Tensor.data_ptr
GRADIENT = "gradient"
STEP = "step"


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in a row, and which of the optimizer's groups trains it: -1 for none."""

    name: str
    start: int
    shape: torch.Size
    group: int

    def of(self, rows: Tensor) -> Tensor:
        """Return this parameter of all rows, (rows, *shape), as a view."""
        count = self.shape.numel()
        return rows[:, self.start : self.start + count].view(len(rows), *self.shape)


class Plan:
    """How a model's parameters lie in a row: by the optimizer's group, then in the model's order.

    Attributes:
        places: of all parameters; those of one group are next to each other, those that are not trained come last.
        width: of a row, padded.
        counts: how many parameters each group has, those included that are frozen.
        spans: the columns of each group.
        wanted: of each parameter in a row, whether it is trained.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        groups = [{id(p) for p in group["params"]} for group in optimizer.param_groups]
        named = list(model.named_parameters())
        chosen = {
            name: next((i for i, group in enumerate(groups) if id(p) in group and p.requires_grad), -1)
            for name, p in named
        }
        ordered = sorted(named, key=lambda item: chosen[item[0]] % (len(groups) + 1))  # stable; -1 comes last
        self.places: list[Place] = []
        start = 0
        for name, p in ordered:
            self.places.append(Place(name, start, p.shape, chosen[name]))
            start += p.numel()
        self.trained = [place for place in self.places if place.group >= 0]
        self.fixed = self.places[len(self.trained) :]
        self.wanted = [place.group >= 0 for place in self.places]
        self.counts = [len(group["params"]) for group in optimizer.param_groups]
        self.used = start
        align = ALIGN_NBYTES // next(model.parameters()).dtype.itemsize
        self.width = -(-start // align) * align
        self.spans = [self._span(group) for group in range(len(groups))]

    def _span(self, group: int) -> slice:
        own = [place for place in self.trained if place.group == group]
        if not own:
            return slice(0, 0)
        return slice(own[0].start, own[-1].start + own[-1].shape.numel())

    @property
    def columns(self) -> slice:
        """The columns of all trained parameters."""
        return slice(0, sum(place.shape.numel() for place in self.trained))

    def key(self) -> Hashable:
        """Return what is equal for equal plans."""
        return tuple((place.name, place.shape, place.group) for place in self.places), tuple(self.counts)


class Rows:
    """Zeros, (rows, width), of which each row can also be had as a tensor with a memory of its own."""

    def __init__(self, like: Tensor, shape: tuple[int, int]) -> None:
        self._dtype, (count, width) = like.dtype, shape
        self._nbytes = width * like.dtype.itemsize
        self._memory: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        if like.device.type == "cpu":
            # Zeros that nobody has touched take no memory: there may be many more rows than models.
            memory = np.zeros(count * self._nbytes + ALIGN_NBYTES, np.uint8)
            skip = -memory.ctypes.data % ALIGN_NBYTES
            self._memory = memory[skip : skip + count * self._nbytes]
            self.all = torch.from_numpy(self._memory).view(like.dtype).view(count, width)
        else:
            self.all = torch.zeros(count, width, dtype=like.dtype, device=like.device)

    def row(self, number: int, keep: Callable[[Any], None]) -> Tensor:
        """Return one row, (1, width); `keep` is given the memory that lives as long as a tensor refers to it."""
        if self._memory is None:
            return self.all[number : number + 1]  # on an accelerator rows are not given to others
        # A storage of its own, for the storage of all cannot tell which of its rows are in use.
        memory = self._memory[number * self._nbytes : (number + 1) * self._nbytes]
        row = torch.from_numpy(memory).view(self._dtype).view(1, -1)
        keep(memory)
        return row


class Seat:
    """A model and its optimizer in a row of an arena.

    Attributes:
        apart: row and parameter, where the parameter has a memory of its own.
        rank: whose step was put off last.
        settings: of the optimizer's groups, at the last step.
        steps: how many training steps of it are put off, `most` at most.
        pending: how much is put off of it in all, evaluations too.
        watched: optimizer state and gradients in the row.
    """

    __slots__ = (
        "__weakref__", "_addresses", "_entries", "_kept", "_model", "_state", "apart", "arena", "most", "optimizer",
        "parameters", "pending", "rank", "row", "settings", "steps", "watched",
    )  # fmt: skip

    def __init__(self, arena: Arena, row: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.arena, self.row, self.optimizer = arena, row, optimizer
        self._model = weakref.ref(model)  # whoever holds the seat must not keep a model that was replaced
        named = dict(model.named_parameters())
        self.parameters = [named[place.name] for place in arena.plan.places]
        self.watched: list[Tensor] = []
        self.settings: tuple[Any, ...] = ()
        self.steps = self.pending = 0
        self.most = 1
        self.rank = -1
        self._take()

    def of(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> bool:
        """Return whether it is that of a model, and of an optimizer if one is given."""
        return self._model() is model and (optimizer is None or self.optimizer is optimizer)

    def module(self) -> nn.Module:
        """Return the model."""
        model = self._model()
        assert model is not None
        return model

    @property
    def trains(self) -> bool:
        """Whether the parameters that require gradients, and the optimizer's groups, are still those of the plan."""
        if not self._counts:
            return False
        return [*map(_REQUIRES_GRADIENT, self.parameters)] == self.arena.plan.wanted

    @property
    def _counts(self) -> bool:
        """Whether the optimizer's groups are as large as in the plan."""
        return [len(group["params"]) for group in self.optimizer.param_groups] == self.arena.plan.counts

    @property
    def goes_on(self) -> bool:
        """Whether its optimizer is as it was when its last step was put off. Its parameters are: to ask is a look."""
        return self._counts and self._keeps_state()

    def fetch(self) -> None:
        """Copy into the row what lies apart."""
        torch._foreach_copy_([view for view, _ in self.apart], [p.detach() for _, p in self.apart])

    def store(self) -> None:
        """Copy the row to what lies apart."""
        torch._foreach_copy_([p.detach() for _, p in self.apart], [view for view, _ in self.apart])

    def settle_in(self) -> bool:
        """Move into the row what has left it: `parameter.data = ...`, or an optimizer that loaded another state.

        Returns:
            Whether it fits there: not what has another shape or dtype now, or is on another device.
        """
        if not self._holds():
            like = self.arena.rows["weights"]
            for place, p in zip(self.arena.plan.places, self.parameters, strict=True):
                if (p.shape, p.dtype, p.device) != (place.shape, like.dtype, like.device):
                    return False
            self._take()
        return True

    def _holds(self) -> bool:
        return [*map(_ADDRESS, self.parameters)] == self._addresses and self._keeps_state()

    def _keeps_state(self) -> bool:
        state = self.optimizer.state
        if state is not self._state or (self._entries and len(state) < len(self.arena.plan.trained)):
            return False
        return all(map(is_, map(dict.get, *self._kept), self._entries))

    def _take(self) -> None:
        """Take the row: move parameters, state and gradients there, with their present values."""
        rows, plan = self.arena.of(self.row), self.arena.plan
        views = [place.of(rows["weights"])[0] for place in plan.places]
        # Whoever has a view of a parameter would look at its old memory for ever: so it stays where it is, and is
        # copied into the row for each step, and back.
        self.apart = []
        move = not _shared(self.parameters)
        for view, parameter in zip(views, self.parameters, strict=True):
            if view.data_ptr() == parameter.data_ptr():
                continue
            view.copy_(parameter.detach())
            if move:
                parameter.data = view
            else:
                self.apart.append((view, parameter))
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        trained = list(zip(plan.trained, self.parameters, strict=False))
        self.watched = []
        if GRADIENT in rows:
            for place, parameter in trained:
                parameter.grad = place.of(rows[GRADIENT])[0]
                self.watched.append(parameter.grad)
        self._state = self.optimizer.state
        self._entries: list[Tensor] = []  # the state in the row, and where the optimizer keeps each of it
        self._kept: tuple[list[dict[str, Any]], list[str]] = ([], [])
        if self.arena.states:
            for number, (place, parameter) in enumerate(trained):
                kept = {} if STEP not in rows else {STEP: rows[STEP][0, number]}
                kept |= {name: place.of(rows[name])[0] for name in self.arena.states}
                self._keep(self._state[parameter], kept)
        self.watched += self._entries

    def _keep(self, entry: dict[str, Any], views: Mapping[str, Tensor]) -> None:
        """Put one parameter's state into its places; state that it has not got yet is zero."""
        for name, view in views.items():
            before = entry.get(name)
            if before is None:
                view.zero_()
            elif before is not view:
                view.copy_(torch.as_tensor(before))
            entry[name] = view
            self._entries.append(view)
            self._kept[0].append(entry)
            self._kept[1].append(name)


def _shared(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether anything else refers to the memory of parameters: a view, an array, a window."""
    users: dict[int, list[Any]] = {}
    for parameter in parameters:
        storage = parameter.untyped_storage()
        users.setdefault(storage._cdata, []).append(storage)
    # Each parameter is a user of its storage, and so is the object that stands for the storage in Python.
    return any(torch._C._storage_Use_Count(each) > len(held) + 1 for each, held in users.items())


class Arena:
    """Rows for models of one structure, trained by optimizers of one class.

    Args:
        plan: how parameters lie in a row.
        like: a parameter: its dtype and device are those of the rows.
        rule: of the optimizers.
        states: the names of their state, counts of steps apart.
        capacity: how many rows.
        gradients: whether gradients are kept.

    Attributes:
        rows: "weights", each state, the "step"s of each parameter and the "gradient": (capacity, columns) each.
    """

    def __init__(
        self, plan: Plan, like: Tensor, rule: Rule, *, states: Sequence[str], capacity: int, gradients: bool
    ) -> None:
        self.plan, self.rule, self.states = plan, rule, tuple(states)
        names = ["weights", *states, *([GRADIENT] if gradients else [])]
        self._rows = {name: Rows(like, (capacity, plan.width)) for name in names}
        if rule.counts:
            # As torch counts: in main memory, in float32, or in float64 where the weights are.
            count = torch.empty(0, dtype=torch.promote_types(like.dtype, torch.float32))
            self._rows[STEP] = Rows(count, (capacity, max(len(plan.trained), 1)))
        self.rows = {name: rows.all for name, rows in self._rows.items()}
        self._pieces: dict[tuple[str, int, int], tuple[Tensor, ...]] = {}
        self._free = list(range(capacity))
        self._kept: dict[int, dict[int, weakref.ref[Any]]] = {}

    @property
    def full(self) -> bool:
        """Whether no row is free."""
        return not self._free

    def pieces(self, name: str, columns: slice) -> tuple[Tensor, ...]:
        """Return some columns of a tensor row by row, (columns,) each: views, made once."""
        key = name, columns.start, columns.stop
        if key not in self._pieces:
            self._pieces[key] = self.rows[name][:, columns].unbind()
        return self._pieces[key]

    def seat(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Seat:
        """Give a model a row: the first that is free."""
        return Seat(self, heapq.heappop(self._free), model, optimizer)

    def of(self, row: int) -> dict[str, Tensor]:
        """Return a row of each tensor, (1, columns), which is not given to another model while a part of it is held."""
        kept = self._kept.setdefault(row, {})

        def gone(ref: weakref.ref[Any]) -> None:
            del kept[id(ref)]
            if not kept:
                heapq.heappush(self._free, row)

        def keep(memory: Any) -> None:
            ref = weakref.ref(memory, gone)
            kept[id(ref)] = ref

        return {name: rows.row(row, keep) for name, rows in self._rows.items()}
