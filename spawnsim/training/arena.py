"""Many equal models as the rows of one tensor: parameters and optimizer state.

A model that takes a seat keeps working by itself: its parameters become views of its row, so that what it writes the
arena sees, and the reverse; its optimizer finds its state there too. Knows rows and who sits on them; must not know
losses, or when a step is due.
"""

from __future__ import annotations

import heapq
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from spawnsim.training.optimizers import Rule, rule_of
from spawnsim.training.structure import CALLED, hooks_of, statistics, users_of

ALIGN_NBYTES = 64  # each row begins on a cache line, so that results do not depend on which row it is
_REQUIRES_GRADIENT, _ADDRESS = attrgetter("requires_grad"), Tensor.data_ptr
STEP = "step"


def _references_of_a_call() -> int:
    """Return how many references a variable and a call with it are: from Python 3.14 on the call is none."""
    value = object()
    return sys.getrefcount(value)


CALL_REFERENCES = _references_of_a_call()
ENTRY_REFERENCES = 1 + CALL_REFERENCES  # to state that nobody but the optimizer holds


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in a row, and which of the optimizer's groups trains it: -1 for none."""

    name: str
    start: int
    shape: torch.Size
    group: int

    @property
    def columns(self) -> slice:
        """Its columns."""
        return slice(self.start, self.start + self.shape.numel())

    def of(self, rows: Tensor) -> Tensor:
        """Return this parameter of all rows, (rows, *shape), as a view."""
        return rows[:, self.columns].view(len(rows), *self.shape)


@dataclass(frozen=True)
class Statistic:
    """A buffer that each forward pass brings up to date, as of BatchNorm. It has rows of its own, of its own dtype."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


class Plan:
    """How a model's parameters lie in a row: by the optimizer's group, then in the model's order.

    Attributes:
        places: of all parameters; those of one group are next to each other, those that are not trained come last.
        statistics: the buffers that forward passes bring up to date.
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
        self.statistics = [
            Statistic(name, each.shape, each.dtype) for name, each in statistics(model).items()
        ]
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
        places = tuple((place.name, place.shape, place.group) for place in self.places)
        return places, tuple(self.counts), tuple(self.statistics)


class Rows:
    """Zeros, (rows, width), of which some columns of a row can also be had as a tensor with a storage of its own."""

    def __init__(self, like: Tensor, shape: tuple[int, int]) -> None:
        if like.device.type == "cpu":
            # Zeros that nobody has touched take no memory: there may be many more rows than models.
            nbytes = math.prod(shape) * like.dtype.itemsize
            memory = np.zeros(nbytes + ALIGN_NBYTES, np.uint8)
            skip = -memory.ctypes.data % ALIGN_NBYTES
            self.all = torch.from_numpy(memory[skip : skip + nbytes]).view(like.dtype).view(shape)
        else:
            self.all = torch.zeros(shape, dtype=like.dtype, device=like.device)

    def part(self, row: int, columns: slice) -> tuple[Tensor, Any]:
        """Return some columns of a row, (columns,), and the memory that lives as long as any tensor refers to it.

        What pickles a tensor writes its whole storage, and what counts who uses a row counts those of a storage.
        """
        at, size = row * self.all.shape[1], self.all.dtype.itemsize
        memory: Any = self.all.untyped_storage()[(at + columns.start) * size : (at + columns.stop) * size]
        return self.all.new_empty(0).set_(memory), memory


class _Held(weakref.ref[Any]):
    """A reference to memory of a row, as long as anybody else has one."""

    __slots__ = ("arena", "row")
    # Weak: an arena that referred to itself would keep its memory, gigabytes perhaps, until Python's collector looks.
    arena: weakref.ref[Arena]
    row: int


class _Made:
    """Which objects some containers hold, and in which order, so that an exchanged one is noticed.

    Args:
        containers: lists, or views of the values of dictionaries, which are looked at again and again.
    """

    __slots__ = ("_containers", "_held")

    def __init__(self, containers: Iterable[Iterable[Any]]) -> None:
        self._containers = [*containers]
        self._held = [*chain.from_iterable(self._containers)]

    def unchanged(self) -> bool:
        """Return whether each of them is where it was. No values are looked at."""
        now = [*chain.from_iterable(self._containers)]
        return len(now) == len(self._held) and all(map(is_, now, self._held))


class Seat:
    """A model and its optimizer in a row of an arena.

    Attributes:
        graded: whether the last step that was carried out left gradients.
        made: how many steps were put off of it.
        apart: row and tensor, of parameters and state that have a memory of their own.
        rank: whose work is put off; -1: that of several ranks.
        settings: of the optimizer's groups, at the last step.
        steps: how many training steps of it are put off.
        pending: how much is put off of it in all, evaluations too.
        unknown: whether parameters and state are watched, since work is put off of which nothing was carried out yet.
        watched: the optimizer's state, each tensor where the optimizer keeps it, and buffers that steps change.
    """

    __slots__ = (
        "__weakref__", "_addresses", "_counts", "_hooked", "_hooks", "_kept", "_made", "_model", "_state",
        "_state_made", "_states", "_statistics", "_step", "_trained", "apart", "arena", "graded", "made", "optimizer",
        "parameters", "pending", "rank", "row", "settings", "steps", "unknown", "watched",
    )  # fmt: skip

    def __init__(self, arena: Arena, row: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.arena, self.row, self.optimizer = arena, row, optimizer
        # Whoever holds the seat must not keep a model that was replaced.
        self._model: Callable[[], nn.Module | None] = weakref.ref(model)
        named = dict(model.named_parameters())
        self.parameters = [named[place.name] for place in arena.plan.places]
        self._statistics = [*statistics(model).values()]
        self.settings: tuple[Any, ...] = ()
        self.steps = self.pending = self.made = 0
        self.unknown = self.graded = False
        self.rank = -1
        self._made = _Made(_containers(model))
        # Where modules keep their hooks, of which there are none.
        self._hooked = [vars(each)[name] for each in model.modules() for name in CALLED]
        self._hooks = -1  # how many torch had numbered when none was found here
        self._trained = [p for group in optimizer.param_groups for p in group["params"]]
        self._counts = [len(group["params"]) for group in optimizer.param_groups]
        self._step = vars(optimizer).get("step")  # a scheduler's, that calls the class's
        self._take()

    def of(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> bool:
        """Return whether it is that of a model, and of an optimizer if one is given."""
        return self._model() is model and (optimizer is None or self.optimizer is optimizer)

    @property
    def at(self) -> slice:
        """Its row, as a part of the arena."""
        return slice(self.row, self.row + 1)

    def module(self) -> nn.Module:
        """Return the model."""
        model = self._model()
        assert model is not None
        return model

    @property
    def goes_on(self) -> bool:
        """Whether model and optimizer are made as they were when the last step was put off. Looks at no values."""
        return self._is_made and self._keeps_state()

    @property
    def trains(self) -> bool:
        """Whether all is still in the row, and the parameters that require gradients are those of the plan."""
        return self._keeps_state() and self.holds and self.wants

    @property
    def wants(self) -> bool:
        """Whether the parameters that require gradients are those of the plan."""
        return [*map(_REQUIRES_GRADIENT, self.parameters)] == self.arena.plan.wanted

    @property
    def holds(self) -> bool:
        """Whether the model's parameters are still in the row: not after `parameter.data = ...`."""
        return self._is_made and [*map(_ADDRESS, chain(self.parameters, self._statistics))] == self._addresses

    @property
    def _is_made(self) -> bool:
        """Whether modules, parameters, buffers and groups are the same, without hooks, which may do anything."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        if any(self._hooked) or not self._made.unchanged() or [*map(len, groups)] != self._counts:
            return False
        if not all(map(is_, chain.from_iterable(groups), self._trained)):
            return False
        if vars(self.optimizer).get("step") is not self._step:
            return False
        # Torch numbers the hooks of the whole process: as long as there was no new one, none is looked for.
        return RemovableHandle.next_id == self._hooks or self._has_no_hooks()

    def _has_no_hooks(self) -> bool:
        found = bool(hooks_of(self.module())) or isinstance(rule_of(self.optimizer), str)
        self._hooks = -1 if found else RemovableHandle.next_id
        return not found

    def join(self, rank: int) -> None:
        """Take note of whose work is put off."""
        self.rank = rank if not self.pending or self.rank == rank else -1
        self.pending += 1

    def fetch(self) -> None:
        """Copy into the row what lies apart."""
        torch._foreach_copy_([view for view, _ in self.apart], [each.detach() for _, each in self.apart])

    def store(self) -> None:
        """Copy the row to what lies apart."""
        torch._foreach_copy_([each.detach() for _, each in self.apart], [view for view, _ in self.apart])

    def leave(self) -> None:
        """Give up a model and state that another seat takes over: whoever holds this one asks for that one then."""
        self._model = _nobody
        self._state_made = _Made(())
        for each in (self.watched, self._kept, self._states, self.apart):
            each.clear()

    def renews(self) -> bool:
        """Take state that the optimizer has begun anew into the same row, as a reset does.

        Returns:
            Whether it did: not if more has changed, nor if somebody holds the state that was there.
        """
        rule, groups, state = self.arena.rule, self.optimizer.param_groups, self._state
        kept = {name for group in groups for name in rule.states(rule.settings(group))}
        if self.apart or not self.holds or not kept.issubset(self.arena.states):
            return False
        # To the optimizer's state refer this seat, and the view of its values.
        if state is not self.optimizer.state and sys.getrefcount(state) > CALL_REFERENCES + 2:
            return False
        # To a tensor refer its entry, and this seat three times; to an entry this seat three times, and the optimizer,
        # if it still has it.
        there = {id(each) for each in state.values()}
        if any(sys.getrefcount(each) > ENTRY_REFERENCES + 3 for each in self._kept) or any(
            sys.getrefcount(each) > CALL_REFERENCES + 3 + (id(each) in there) for each in self._states
        ):
            return False
        # Or a view of it: its memory is used by the tensor, and by that of which it is a view.
        if any(users_of(each) > 2 for each in self._kept):
            return False
        self._take_state()
        return True

    def _keeps_state(self) -> bool:
        if not self._kept:  # there is none, as of SGD without momentum
            return True
        return self.optimizer.state is self._state and self._state_made.unchanged()

    def _take(self) -> None:
        """Take the row: move parameters and state there, with their present values."""
        views, tensors = self._weights() + self._places_of_statistics(), [*self.parameters, *self._statistics]
        # Whoever has a view of a parameter would look at its old memory for ever: so it stays where it is, and is
        # copied into the row for each step, and back. So does one in part of a storage, all of which is pickled.
        self.apart: list[tuple[Tensor, Tensor]] = []
        move = not _shared(tensors)
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor.detach())
            if move and _lies_alike(view, tensor):
                tensor.data = view
            else:
                self.apart.append((view, tensor))
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._take_state()

    def _weights(self) -> list[Tensor]:
        """Return the places of the parameters, in one storage where they lie in one as they do in a row."""
        arena, row, places = self.arena, self.row, self.arena.plan.places
        offsets = [place.start for place in places]
        storages = {parameter.untyped_storage()._cdata for parameter in self.parameters}
        if len(storages) == 1 and offsets == [*map(Tensor.storage_offset, self.parameters)]:
            part = arena.part(row, "weights", slice(0, arena.plan.used))
            return [part[place.columns].view(place.shape) for place in places]
        return [arena.part(row, "weights", place.columns).view(place.shape) for place in places]

    def _places_of_statistics(self) -> list[Tensor]:
        part = self.arena.part
        return [
            part(self.row, each.name, slice(0, each.shape.numel())).view(each.shape)
            for each in self.arena.plan.statistics
        ]

    def _take_state(self) -> None:
        arena, row = self.arena, self.row
        self._state = self.optimizer.state
        self._kept: list[Tensor] = []
        if arena.states:
            trained = zip(arena.plan.trained, self.parameters, strict=False)
            for number, (place, parameter) in enumerate(trained):
                kept = {}
                if STEP in arena.rows:  # first, as torch has it
                    kept[STEP] = arena.part(row, STEP, slice(number, number + 1)).view(())
                for name in arena.states:
                    kept[name] = arena.part(row, name, place.columns).view(place.shape)
                self._keep(parameter, kept)
        self.watched = [*self._kept, *self._statistics]
        self._states = [*self._state.values()]  # of each parameter
        self._state_made = _Made([self._state.values(), *map(dict.values, self._states)])

    def _keep(self, parameter: Tensor, views: Mapping[str, Tensor]) -> None:
        """Put one parameter's state into its places; state that it has not got yet is zero."""
        entry = self._state[parameter]
        for name, view in views.items():
            before = entry.get(name)
            if before is None:
                view.zero_()
            else:
                view.copy_(torch.as_tensor(before))
            # What was loaded and is kept elsewhere, as a state to go back to or by another optimizer, changes with it.
            if isinstance(before, Tensor) and (
                sys.getrefcount(before) > ENTRY_REFERENCES or not _lies_alike(view, before)
            ):
                self.apart.append((view, before))
            else:
                entry[name] = view
            self._kept.append(entry[name])


def _containers(model: nn.Module) -> Iterator[Iterable[Any]]:
    """Yield views of what modules consist of; between them what tells where one ends."""
    for each in model.modules():
        if each._modules:
            yield each._modules.values()
            yield (None,)
        if each._parameters:
            yield each._parameters.values()
        yield each._buffers.values()


def _nobody() -> None:
    """Refer to no model."""


def _lies_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors lie alike in storages of one size."""
    return (
        one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        and one.storage_offset() == other.storage_offset()
        and one.stride() == other.stride()
    )


def _shared(tensors: Sequence[Tensor]) -> bool:
    """Return whether anything else refers to the memory of tensors: a view, an array, a window."""
    storages = [each.untyped_storage()._cdata for each in tensors]
    ours = Counter(storages)
    return any(users_of(each) > ours[storage] for each, storage in zip(tensors, storages, strict=True))


class Arena:
    """Rows for models of one structure, trained by optimizers of one class.

    Args:
        plan: how parameters lie in a row.
        like: a parameter: its dtype and device are those of the rows.
        rule: of the optimizers.
        states: the names of their state, counts of steps apart.
        capacity: how many rows.

    Attributes:
        rows: "weights", each state, the "step"s of each parameter and each statistic: (capacity, columns) each.
    """

    def __init__(self, plan: Plan, like: Tensor, rule: Rule, *, states: Sequence[str], capacity: int) -> None:
        self.plan, self.rule, self.states = plan, rule, tuple(states)
        names = ["weights", *states]
        self._rows = {name: Rows(like, (capacity, plan.width)) for name in names}
        if rule.counts:
            # As torch counts: in main memory, in float32, or in float64 where that is the default.
            count = torch.empty(0, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))
            self._rows[STEP] = Rows(count, (capacity, max(len(plan.trained), 1)))
        for each in plan.statistics:
            numbers = torch.empty(0, dtype=each.dtype, device=like.device)
            self._rows[each.name] = Rows(numbers, (capacity, each.shape.numel()))
        self.rows = {name: rows.all for name, rows in self._rows.items()}
        self._pieces: dict[tuple[str, int, int], tuple[Tensor, ...]] = {}
        self._free = list(range(capacity))
        self._held: dict[int, dict[int, _Held]] = {}
        self._reference = weakref.ref(self)

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

    def of(self, at: slice | Tensor) -> list[Tensor]:
        """Return the weights of some rows, (rows, width), and copies of their statistics, (rows, ...) each."""
        copies = [self.rows[each.name][at].clone().view(-1, *each.shape) for each in self.plan.statistics]
        return [self.rows["weights"][at], *copies]

    def keep(self, at: slice | Tensor, statistics: Sequence[Tensor]) -> None:
        """Have the statistics of some rows be what these copies are now."""
        for each, copy in zip(self.plan.statistics, statistics, strict=True):
            self.rows[each.name][at] = copy.view(len(copy), -1)

    def seat(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Seat:
        """Give a model a row: the first that is free."""
        return Seat(self, heapq.heappop(self._free), model, optimizer)

    def part(self, row: int, name: str, columns: slice) -> Tensor:
        """Return some columns of a row of one tensor, (columns,), with a storage of their own.

        The row is not given to another model while that, or another part of it, is held.
        """
        part, memory = self._rows[name].part(row, columns)
        held = _Held(memory, _let_go)
        held.arena, held.row = self._reference, row
        self._held.setdefault(row, {})[id(held)] = held
        return part

    def holds(self, place: int) -> bool:
        """Return whether an address is that of a row, or within one."""
        return any(0 <= place - rows.data_ptr() < rows.nbytes for rows in self.rows.values())

    def let_go(self, held: _Held) -> None:
        """Take note that memory of a row is no longer held: with its last part the row is free."""
        others = self._held[held.row]
        del others[id(held)]
        if not others:
            heapq.heappush(self._free, held.row)


def _let_go(held: weakref.ref[Any]) -> None:
    assert isinstance(held, _Held)
    arena = held.arena()
    if arena is not None:
        arena.let_go(held)
