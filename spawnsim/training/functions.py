"""What training steps and evaluations have in common: a function of a model, whose work a run puts off.

Knows which models of a run sit where, which batches there are, and what steps alone; must not know optimizers.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from spawnsim.comm.deferred import Deferred
from spawnsim.errors import ParameterError
from spawnsim.training.arena import Arena, Seat
from spawnsim.training.batches import Put
from spawnsim.training.settings import Settings
from spawnsim.training.structure import digits_of
from spawnsim.training.watching import Watch

PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size)
KNOWN = {Tensor, bool, int, float, str, type(None)}  # inputs that are not put off themselves
MOST_CHANGES = 3  # of settings, for each of which steps of many are computed together
MOST_VALUES = 8  # of an input that is no tensor
MANY_GROUPS = 8
# Of a model from row to row, each after less than so many steps: a move costs as much as several.
MOST_MOVES = 8
# Of models, with what they compute with, in one run: so many, and so many for each rank.
FUNCTIONS = (64, 4)
_HOW = "how"  # beside the batches of a seat: what decided of them
_CHANGES = "changes"  # beside the batches of a seat: how many there were

Outcome = Tensor | tuple[Tensor, ...]


class Run:
    """What the training steps of one run share, from one checkpoint to the next: arenas, batches and seats."""

    def __init__(self, deferred: Deferred) -> None:
        self.watch = Watch(deferred)
        self.seats: weakref.WeakKeyDictionary[nn.Module, Seat] = weakref.WeakKeyDictionary()
        self.arenas: dict[Any, list[Arena]] = {}
        self.keys: dict[Arena, Any] = {}
        self.batches: dict[Any, Any] = {}  # by key: a batch, or why there is none
        self.groups: Counter[Any] = Counter()  # by what is equal in groups that are computed apart
        self._noted: set[Any] = set()
        self.functions: set[Any] = set()
        self.moves: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self.users: weakref.WeakSet[OfModel] = weakref.WeakSet()

    @classmethod
    def of(cls, deferred: Deferred) -> Run:
        """Return that of a run."""
        if cls not in deferred.attachments:
            deferred.attachments[cls] = cls(deferred)
        run: Run = deferred.attachments[cls]
        return run

    def note_group(self, deferred: Deferred, model: nn.Module, alike: Any, group: Any) -> None:
        """Count a group of models, if it is a new one; say so once if there are many, each perhaps of one rank."""
        if group in self._noted:
            return
        self._noted.add(group)
        self.groups[alike] += 1
        if self.groups[alike] == MANY_GROUPS:
            deferred.warn(
                f"{type(model).__name__} models are computed in {MANY_GROUPS} groups and more, since their classes, or "
                "what they or their loss compute with, differ from rank to rank: define classes outside of functions, "
                "and give what differs as tensors, beside the batch"
            )

    def leave(self, seat: Seat, model: nn.Module) -> None:
        """Let a model leave its row, and count how often it has done so after a few steps."""
        self.moves[model] = self.moves.get(model, 0) + 1 if seat.made < MOST_MOVES else 0
        seat.leave()
        del self.seats[model]

    def forget(self, batch: Any) -> None:
        """Let no more be put off with a batch."""
        self.batches = {key: each for key, each in self.batches.items() if each is not batch}

    def forget_refusals(self) -> None:
        """Let functions that were refused be tried again."""
        self.batches = {key: batch for key, batch in self.batches.items() if not isinstance(batch, str)}

    def close(self) -> None:
        """Let go of rows and inputs; models keep theirs. A step that a module holds may outlive the run."""
        self.watch.close()
        for each in [*self.users]:
            if each._run is self:
                each._forget(None)


class Alone(Exception):
    """Why a model, or a function, cannot be computed together with others."""


class OfModel:
    """What steps and evaluations have in common: a function of a model, and where the calling rank's model sits."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise ParameterError(f"{function!r}: give a function of a model and a batch")
        self.function = function
        self._run: Run | None = None
        self._seat: Seat | None = None
        self._alone: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that step alone
        # Batches, by inputs and settings. Of each seat its own: ranks may share this object, and take turns in a look.
        self._ready: weakref.WeakKeyDictionary[Seat, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self._latest: tuple[Seat | None, dict[Any, Any]] = (None, {})  # the last that was asked for

    def _how(self) -> tuple[Any, ...]:
        """Return what of this object decides what is computed: its attributes may be set at any time."""
        return (self.function,)

    def _ready_for(self, seat: Seat) -> dict[Any, Any]:
        """Return the batches of a seat, for the settings that its model and the function have now.

        Raises:
            Alone: these change again and again.
        """
        if self._latest[0] is not seat:
            self._latest = seat, self._ready.setdefault(seat, {})
        ready = self._latest[1]
        settings, how = ready.get(Settings), self._how()
        if settings is None or how != ready[_HOW] or not settings.unchanged():
            changes = self._require_few_changes(ready)
            now = Settings(self.function, seat.module())
            if settings is not None and (how != ready[_HOW] or settings.key != now.key):
                ready.clear()
                ready[_CHANGES] = changes + 1
            ready[Settings], ready[_HOW] = now, how
        return ready

    @staticmethod
    def _require_few_changes(ready: dict[Any, Any]) -> int:
        """Return how many changes there were of what is computed with; refuse the fourth."""
        changes: int = ready.get(_CHANGES, 0)
        if changes >= MOST_CHANGES:
            raise Alone(
                "what its function or the model computes with changes: give it as a tensor, beside the batch"
            )
        return changes

    @classmethod
    def _count_change(cls, ready: dict[Any, Any]) -> None:
        """Take note of a change of what is computed with, which settings do not show."""
        ready[_CHANGES] = cls._require_few_changes(ready) + 1

    def _forget(self, run: Run | None) -> None:
        if self._run is not run:
            self._run = run
            if run is not None:
                run.users.add(self)
            self._seat, self._alone = None, weakref.WeakSet()
            self._ready, self._latest = weakref.WeakKeyDictionary(), (None, {})

    @staticmethod
    def _settle_inputs(deferred: Deferred, inputs: Sequence[Any]) -> None:
        """Have inputs carried out that are put off themselves. Before anything is counted: others may act meanwhile."""
        if not KNOWN.issuperset(map(type, inputs)):
            Run.of(deferred).watch.look(inputs)

    @staticmethod
    def _put(deferred: Deferred, work: Put, watch: Watch) -> Outcome:
        """Put off some work; return its results, which are not known yet."""
        seat, outs = work.seat, work.outs
        if not seat.pending:
            watch.watch(seat.parameters, seat.watched)
            seat.unknown = True
        seat.join(work.rank)
        deferred.put_off(work)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _kind(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return what two calls must have in common to be carried out at once."""
        return tuple(
            [
                (each.shape, each.dtype, each.device, each.requires_grad)
                if isinstance(each, Tensor)
                else _plain(each)
                for each in inputs
            ]
        )

    @staticmethod
    def _shared(deferred: Deferred, key: Any, make: Callable[[], Any]) -> Any:
        """Return the batch that the run has for a key, made where there is none yet.

        Raises:
            Alone: why there can be none.
        """
        batches = Run.of(deferred).batches
        if key not in batches:
            functions, what = Run.of(deferred).functions, key[2]
            if what not in functions and len(functions) >= FUNCTIONS[0] + FUNCTIONS[1] * deferred.ranks:
                raise Alone(
                    "there are too many functions of a model: make one TrainingStep, and give it the batch"
                )
            functions.add(what)
            with deferred.apart():
                batches[key] = make()
        if isinstance(batches[key], str):
            raise Alone(batches[key])
        return batches[key]

    @staticmethod
    def _require_few(ready: dict[Any, Any], key: Any) -> None:
        """Refuse the ninth value of an input that is no tensor: each has a batch, with room for all ranks' inputs."""
        shapes = _shapes(key)
        if sum(_shapes(each) == shapes for each in ready if type(each) is tuple) >= MOST_VALUES:
            raise Alone("an input that is no tensor takes ever new values: give it as a tensor")

    def _explain(self, deferred: Deferred, model: nn.Module, why: Exception) -> None:
        """Let a model step alone from now on: what refuses it is not asked again."""
        self._alone.add(model)
        self._seat = None
        deferred.warn(f"{type(model).__name__} models step alone, not together in one call: {why}")


def _shapes(key: Any) -> list[Any]:
    """Return what the tensors have in common, of what two calls must have."""
    kinds, training = key
    return [training, *(each if each and type(each[0]) is torch.Size else None for each in kinds)]


def _plain(value: Any) -> Any:
    """Return a key of an input that is no tensor. What may change before a step is carried out has none."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if value is not None and not isinstance(value, PLAIN):
        raise Alone(f"an input is a {type(value).__name__}: give tensors one by one, numbers and texts")
    return type(value), digits_of(value)
