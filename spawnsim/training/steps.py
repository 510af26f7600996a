"""A training step, stated once: `TrainingStep` and `Evaluation`.

Carried out at once on real ranks. On virtual ranks put off, unless the run says `eager`; what cannot be computed for
many models at once steps alone, and the run has a warning that says why.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from spawnsim.comm.deferred import Deferred, caller
from spawnsim.errors import ParameterError
from spawnsim.training import structure
from spawnsim.training.arena import Arena, Plan, Seat
from spawnsim.training.batches import (
    MOST_STEPS,
    RANDOM,
    EvaluationBatch,
    Objective,
    Put,
    StepBatch,
    as_outputs,
    trial,
)
from spawnsim.training.optimizers import Rule, rule_of
from spawnsim.training.settings import Settings
from spawnsim.training.watching import Watch

DTYPES = (torch.float32, torch.float64)
PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size)
KNOWN = {Tensor, bool, int, float, str, type(None)}  # inputs that are not put off themselves
SPARE = 2  # a row to spare for so many ranks
MOST_CHANGES = 3  # of settings, for each of which steps of many are computed together
MOST_VALUES = 8  # of an input that is no tensor
MANY_GROUPS = 8
_CHANGES = "changes"  # beside the batches of a seat: how many there were
MOST_PENDING = 8  # evaluations of one model that may be put off at once

Outcome = Tensor | tuple[Tensor, ...]


class _Run:
    """What the training steps of one run share, from one checkpoint to the next: arenas, batches and seats."""

    def __init__(self, deferred: Deferred) -> None:
        self.watch = Watch(deferred)
        self.seats: weakref.WeakKeyDictionary[nn.Module, Seat] = weakref.WeakKeyDictionary()
        self.arenas: dict[Any, list[Arena]] = {}
        self.keys: dict[Arena, Any] = {}
        self.batches: dict[Any, Any] = {}  # by key: a batch, or why there is none
        self.groups: Counter[Any] = Counter()  # by what is equal in groups that are computed apart
        self.users: weakref.WeakSet[_OfModel] = weakref.WeakSet()

    @classmethod
    def of(cls, deferred: Deferred) -> _Run:
        """Return that of a run."""
        if cls not in deferred.attachments:
            deferred.attachments[cls] = cls(deferred)
        run: _Run = deferred.attachments[cls]
        return run

    def note_group(self, deferred: Deferred, model: nn.Module, alike: Any) -> None:
        """Count a group of models; say so once if there are many, each perhaps of one rank."""
        self.groups[alike] += 1
        if self.groups[alike] == MANY_GROUPS:
            deferred.warn(
                f"{type(model).__name__} models are computed in {MANY_GROUPS} groups and more, since what they or "
                "their loss compute with differs from rank to rank: give it as tensors, beside the batch"
            )

    def close(self) -> None:
        """Let go of rows and inputs; models keep theirs. A step that a module holds may outlive the run."""
        for each in [*self.users]:
            if each._run is self:
                each._forget(None)


class _Alone(Exception):
    """Why a model, or a function, cannot be computed together with others."""


class _OfModel:
    """What steps and evaluations have in common: a function of a model, and where the calling rank's model sits."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise ParameterError(f"{function!r}: give a function of a model and a batch")
        self.function = function
        self._run: _Run | None = None
        self._seat: Seat | None = None
        self._alone: weakref.ref[nn.Module] | None = None  # the last model that steps alone
        # Batches, by inputs and settings. Of each seat its own: ranks may share this object, and take turns in a look.
        self._ready: weakref.WeakKeyDictionary[Seat, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self._latest: tuple[Seat | None, dict[Any, Any]] = (None, {})  # the last that was asked for

    def _ready_for(self, seat: Seat) -> dict[Any, Any]:
        """Return the batches of a seat, for the settings that its model and the function have now.

        Raises:
            _Alone: these change again and again.
        """
        if self._latest[0] is not seat:
            self._latest = seat, self._ready.setdefault(seat, {})
        ready = self._latest[1]
        settings = ready.get(Settings)
        if settings is None or not settings.unchanged():
            changes = ready.get(_CHANGES, 0)
            if changes >= MOST_CHANGES:
                raise _Alone(
                    "what its function or the model computes with changes: give it as a tensor, beside the batch"
                )
            now = Settings(self.function, seat.module())
            if settings is not None and settings.key != now.key:
                ready.clear()
                ready[_CHANGES] = changes + 1
            ready[Settings] = now
        return ready

    def _forget(self, run: _Run | None) -> None:
        if self._run is not run:
            self._run = run
            if run is not None:
                run.users.add(self)
            self._seat = self._alone = None
            self._ready, self._latest = weakref.WeakKeyDictionary(), (None, {})

    @staticmethod
    def _settle_inputs(deferred: Deferred, inputs: Sequence[Any]) -> None:
        """Have inputs carried out that are put off themselves. Before anything is counted: others may act meanwhile."""
        if not KNOWN.issuperset(map(type, inputs)):
            _Run.of(deferred).watch.look(inputs)

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
                (each.shape, each.dtype, each.device) if isinstance(each, Tensor) else _plain(each)
                for each in inputs
            ]
        )

    @staticmethod
    def _require_few(ready: dict[Any, Any], key: Any) -> None:
        """Refuse the ninth value of an input that is no tensor: each has a batch, with room for all ranks' inputs."""
        shapes = _shapes(key)
        if sum(_shapes(each) == shapes for each in ready if type(each) is tuple) >= MOST_VALUES:
            raise _Alone("an input that is no tensor takes ever new values: give it as a tensor")

    def _explain(self, deferred: Deferred, model: nn.Module, why: Exception) -> None:
        self._alone = weakref.ref(model)
        deferred.warn(f"{type(model).__name__} models step alone, not together in one call: {why}")


class TrainingStep(_OfModel):
    """A training step: gradient of a loss, perhaps clipped, and one step of the optimizer.

    >>> step = TrainingStep(lambda model, x, y: cross_entropy(model(x), y))
    >>> with comm.compute():
    ...     loss = step(model, optimizer, x, y)
    >>> comm.record(loss=loss)

    On real ranks this is `zero_grad`, `backward`, `step`. On virtual ranks the step is put off and carried out together
    with those of all ranks whose models are equal but for their weights, in one `torch.func.vmap` call: 2 to 4 times
    faster for small models, and 4 to 6 times if nobody looks at each loss: several steps of a model are put off then.
    Whoever looks at the loss, a parameter, a gradient or the optimizer's state has them carried out first: ranks,
    policies, messages and windows see what they would see had they been carried out at once, up to rounding (1e-5 of a
    loss after 100 steps). Look at the loss after the `compute` block, not within it: only when time has passed do
    others have steps to share the call with. An array or a view taken of a parameter before, and read by something
    else than a communication call, is not watched: look at the loss first.

    Models that differ in anything but weights form groups. SGD, Adam and AdamW of torch.optim are taken as they are,
    with momentum, weight decay, groups of parameters, and a learning rate for each rank. A model steps alone, and the
    run has a warning that says why, if it has buffers that a forward pass changes (BatchNorm), hooks, dropout, control
    flow that depends on data, parameters of several dtypes or of less than 32 bits, or another optimizer; also under
    autocast. A step is computed with the attributes of model and loss that it met; where these change more than three
    times the model steps alone, too: give what changes as a tensor, beside the batch.

    Args:
        loss: from a model and a batch to a scalar, or to a tuple of a scalar and further tensors that are returned. It
            calls nothing of a communicator and changes nothing but tensors it made.
        max_norm: the norm to which gradients are clipped, as `torch.nn.utils.clip_grad_norm_` does; None: not.
        gradients: whether `parameter.grad` holds the gradient afterwards; otherwise it is None.

    Raises:
        ParameterError: `loss` is no function, or `max_norm` not above 0.
    """

    def __init__(
        self, loss: Callable[..., Any], *, max_norm: float | None = None, gradients: bool = False
    ) -> None:
        super().__init__(loss)
        if max_norm is not None and not max_norm > 0:
            raise ParameterError(f"max_norm={max_norm}: give a number above 0, or None")
        self.max_norm, self.gradients = max_norm, gradients

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *batch: Any) -> Outcome:
        """Train on a batch.

        Args:
            model: any module.
            optimizer: of its parameters.
            batch: tensors, which are read at once and may be overwritten after the call, and values that can be hashed.

        Returns:
            The loss before the update, 0-dim and detached; with whatever else `loss` returns, as a tuple.

        Raises:
            Exception: what `loss` raised; on virtual ranks perhaps in a later look or call of this rank, or from the
                run. What was put off after that step is dropped.
        """
        found = caller()
        if found is None or torch._C._is_any_autocast_enabled() or not torch.is_grad_enabled():
            return self._at_once(model, optimizer, batch)
        deferred, rank = found
        self._settle_inputs(deferred, batch)
        seat, run = self._seat, _Run.of(deferred)
        if run is not self._run or seat is None or not seat.of(model, optimizer):
            self._forget(run)
            seat = self._find_seat(deferred, rank, model, optimizer)
            if seat is None:
                return self._at_once(model, optimizer, batch)
        if (seat.pending and not self._may_wait(seat, rank)) or deferred.owes(rank):
            deferred.settle(rank)
            if seat.pending:  # another rank's, of a model that ranks share
                deferred.carry_out()
        # Frozen, converted, or memory or state exchanged: another row. Whoever keeps what was in this one, keeps it.
        if not (seat.pending or seat.trains or (seat.renews() and seat.trains)):
            self._seat = None
            if _Run.of(deferred).seats.get(model) is seat:
                seat.leave()
                del _Run.of(deferred).seats[model]
            return self(model, optimizer, *batch)
        return self._put_off(deferred, rank, seat, batch)

    @staticmethod
    def _may_wait(seat: Seat, rank: int) -> bool:
        """Return whether one more step of a model may be put off, behind what is put off of it already."""
        return seat.steps < MOST_STEPS and seat.rank == rank and seat.goes_on

    def _put_off(self, deferred: Deferred, rank: int, seat: Seat, inputs: Sequence[Any]) -> Outcome:
        rule, groups = seat.arena.rule, seat.optimizer.param_groups
        settings = tuple([rule.settings(group) for group in groups])
        model = seat.module()
        alone: Exception | None = None
        try:
            ready = self._ready_for(seat)
            if settings != seat.settings:
                self._require_state(seat, settings)
            key = (self._kind(inputs), model.training)
            found: Any = ready.get(key)
            if found is None:
                self._require_few(ready, key)
                found = ready[key] = self._open(deferred, seat, key, inputs, settings=ready[Settings])
        except (_Alone, structure.Unequal) as why:
            alone = why
        if alone is not None:
            deferred.settle(rank)
            # Perhaps the program's own error, which would show ours above it if it were raised while ours is handled.
            outcome = self._at_once(model, seat.optimizer, inputs)
            self._explain(deferred, model, alone)
            return outcome
        batch, slots = found
        if seat.steps >= batch.most:
            deferred.settle(rank)
            return self(model, seat.optimizer, *inputs)  # meanwhile others may have come to the model
        while seat.steps >= len(slots):
            slots.append(batch.slots(seat.row, len(slots)))
        for number, slot in slots[seat.steps]:
            given = inputs[number]
            slot.copy_(given.detach() if given.requires_grad else given)
        watch = _Run.of(deferred).watch
        work = Put(rank, seat, batch, [watch.result(each) for each in batch.results])
        work.settings, work.lr = settings, tuple([float(group["lr"]) for group in groups])
        work.depth = seat.steps
        if not seat.pending and any(p.grad is not None for p in seat.parameters):
            seat.optimizer.zero_grad()
        seat.steps += 1
        # lr schedulers warn where the optimizer never made a step.
        seat.optimizer._opt_called = True  # type: ignore[attr-defined]
        return self._put(deferred, work, watch)

    # -- seats and batches --------------------------------------------------------------------------------------

    def _find_seat(
        self, deferred: Deferred, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Seat | None:
        if self._alone is not None and self._alone() is model:
            return None
        self._seat = None
        seat = _Run.of(deferred).seats.get(model)
        if seat is None or not seat.of(model, optimizer):
            try:
                deferred.settle(rank)
                if seat is not None:  # of another optimizer
                    if seat.pending:
                        deferred.carry_out()
                    seat.leave()
                    del _Run.of(deferred).seats[model]
                seat = _Run.of(deferred).seats[model] = self._arena(deferred, model, optimizer).seat(
                    model, optimizer
                )
            except (_Alone, structure.Unequal) as why:
                self._explain(deferred, model, why)
                return None
        self._seat = seat
        return seat

    def _arena(self, deferred: Deferred, model: nn.Module, optimizer: torch.optim.Optimizer) -> Arena:
        rule = _require_alike(model, optimizer)
        settings = [rule.settings(group) for group in optimizer.param_groups]
        names = {rule.states(each) for each in settings}
        if len(names) > 1:
            raise _Alone("its optimizer's groups keep different state")
        plan, like = Plan(model, optimizer), next(model.parameters())
        if not plan.trained:
            raise _Alone("its optimizer trains none of its parameters")
        states = names.pop()
        key = (
            structure.of_model(model),
            plan.key(),
            like.dtype,
            like.device,
            rule.kind,
            states,
        )
        arenas = _Run.of(deferred).arenas.setdefault(key, [])
        for arena in arenas:
            if not arena.full:
                return arena
        # More rows than ranks, for a rank whose model is replaced has two for a while. Rows not used take no memory.
        capacity = deferred.ranks + deferred.ranks // SPARE + 1
        arena = Arena(plan, like, rule, states=states, capacity=capacity)
        arenas.append(arena)
        _Run.of(deferred).keys[arena] = (key, len(arenas))
        _Run.of(deferred).note_group(deferred, model, (type(model), *key[1:]))
        return arena

    @staticmethod
    def _require_state(seat: Seat, settings: tuple[Any, ...]) -> None:
        """Take note of new settings, such as a scheduled momentum: there must be rows for the state that they need."""
        rule = rule_of(seat.optimizer)
        if isinstance(rule, str):
            raise _Alone(rule)
        if any(not set(seat.arena.rule.states(each)) <= set(seat.arena.states) for each in settings):
            raise _Alone("its optimizer keeps state that it did not keep at first")
        seat.settings = settings

    def _open(
        self, deferred: Deferred, seat: Seat, key: Any, inputs: Sequence[Any], *, settings: Settings
    ) -> Any:
        run = _Run.of(deferred)
        whole = (
            "step",
            run.keys[seat.arena],
            settings.key,
            self.max_norm,
            self.gradients,
            key,
        )
        batch = run.batches.get(whole)
        if batch is None:
            with deferred.apart():
                batch = run.batches[whole] = self._try(deferred, seat, inputs, settings)
            run.note_group(deferred, seat.module(), (type(self.function), *whole[:2], *whole[3:]))
        if isinstance(batch, str):
            raise _Alone(batch)
        return batch, [batch.slots(seat.row, 0)]

    def _try(
        self, deferred: Deferred, seat: Seat, inputs: Sequence[Any], settings: Settings
    ) -> StepBatch | str:
        """Return a new batch, or why there can be none."""
        try:
            batch = StepBatch(
                deferred,
                seat.arena,
                Objective(seat.module(), self.function, settings),
                max_norm=self.max_norm,
                gradients=self.gradients,
            )
            trial(batch, batch._gradient, inputs)
        except Exception as error:  # noqa: BLE001 - the program's own error, if it is one, comes when it steps alone
            # vmap's own text names flags of a call that is not the program's.
            if RANDOM in str(error):
                return "it draws random numbers, as dropout does, and each rank has a generator of its own"
            if isinstance(error, structure.Unequal):
                return str(error)
            # The first sentence: the next ones ask for reports to torch.
            return f"{type(error).__name__}: {error}".splitlines()[0].partition(". ")[0]
        # Of the row, and not of the model: what is put off of that is not carried out for it.
        unused = batch.open(seat.row, inputs)
        return f"the loss does not depend on {unused}: exclude it from the optimizer" if unused else batch

    # -- at once ------------------------------------------------------------------------------------------------

    def _at_once(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[Any]) -> Outcome:
        optimizer.zero_grad()
        loss, more = as_outputs(self.function(model, *batch))
        outs = (loss.detach(), *_apart(more, (*model.parameters(), *batch)))
        loss.backward()  # type: ignore[no-untyped-call]
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
        optimizer.step()
        if not self.gradients:
            optimizer.zero_grad()
        return outs[0] if len(outs) == 1 else outs


class Evaluation(_OfModel):
    """A function of a model that trains nothing, such as its accuracy on held-out data.

    On virtual ranks put off and carried out for many ranks at once, as a `TrainingStep`, for models that have made one.
    `comm.record(accuracy=evaluate(model, x, y))` does not look at the value; the row is completed later.

    Args:
        function: from a model and a batch to a tensor, or a tuple of them; called without gradients.

    Raises:
        ParameterError: `function` is no function.
    """

    def __call__(self, model: nn.Module, *batch: Any) -> Outcome:
        """Evaluate a model.

        Args:
            model: any module.
            batch: tensors, which may not be overwritten before the result is looked at, and values that can be hashed.

        Returns:
            What the function returns, detached.

        Raises:
            Exception: what the function raised; on virtual ranks perhaps in a later look or call of this rank, or from
                the run.
        """
        found = caller()
        if found is None or torch._C._is_any_autocast_enabled():
            return self._at_once(model, batch)
        if torch.is_inference_mode_enabled():  # whose tensors nobody could give their values later
            with torch.inference_mode(False):
                return self(model, *batch)
        deferred, rank = found
        self._settle_inputs(deferred, batch)
        seat, run = self._seat, _Run.of(deferred)
        if run is not self._run or seat is None or not seat.of(model, None):
            self._forget(run)
            seat = self._seat = run.seats.get(model)
            if seat is None:  # it has made no step
                return self._at_once(model, batch)
        if seat.pending - seat.steps >= MOST_PENDING:
            deferred.settle(rank)
        if seat.steps and seat.rank != rank:  # a model that ranks share
            deferred.carry_out()
        if not (seat.goes_on if seat.pending else seat.holds):
            return self._at_once(model, batch)
        try:
            ready = self._ready_for(seat)
            key = (self._kind(batch), model.training)
            if key not in ready:
                self._require_few(ready, key)
        except (_Alone, structure.Unequal):
            return self._at_once(model, batch)
        if key not in ready:
            ready[key] = self._open(deferred, seat, key, batch, settings=ready[Settings])
        batch_or_why = ready[key]
        if isinstance(batch_or_why, str):
            return self._at_once(model, batch)
        watch = _Run.of(deferred).watch
        outs = [watch.result(each) for each in batch_or_why.results]
        work = Put(rank, seat, batch_or_why, outs)
        work.inputs = batch
        return self._put(deferred, work, watch)

    def _open(
        self, deferred: Deferred, seat: Seat, key: Any, inputs: Sequence[Any], *, settings: Settings
    ) -> EvaluationBatch | str:
        run = _Run.of(deferred)
        whole = ("evaluation", run.keys[seat.arena], settings.key, key)
        if whole not in run.batches:
            with deferred.apart():
                run.batches[whole] = self._try(deferred, seat, inputs, settings)
        found: EvaluationBatch | str = run.batches[whole]
        return found

    def _try(
        self, deferred: Deferred, seat: Seat, inputs: Sequence[Any], settings: Settings
    ) -> EvaluationBatch | str:
        model = seat.module()
        try:
            batch = EvaluationBatch(deferred, seat.arena, Objective(model, self.function, settings))
            with torch.no_grad():
                trial(batch, batch.function, inputs)
                batch.open(seat.row, inputs)
        except Exception as error:  # noqa: BLE001 - vmap's refusals are of many classes
            return f"{type(error).__name__}: {error}"
        return batch

    @torch.no_grad()
    def _at_once(self, model: nn.Module, batch: Sequence[Any]) -> Outcome:
        outcome: Outcome = self.function(model, *batch)
        return outcome


def _apart(outputs: Sequence[Tensor], given: Iterable[Any]) -> tuple[Tensor, ...]:
    """Return outputs, detached; copies of those that share memory with weights or inputs, which will change."""
    memory = {each.untyped_storage().data_ptr() for each in given if outputs and isinstance(each, Tensor)}
    found = [each.detach() for each in outputs]
    return tuple(each.clone() if each.untyped_storage().data_ptr() in memory else each for each in found)


def _shapes(key: Any) -> list[Any]:
    """Return what the tensors have in common, of what two calls must have."""
    kinds, training = key
    return [training, *(each if each and type(each[0]) is torch.Size else None for each in kinds)]


def _plain(value: Any) -> Any:
    """Return a key of an input that is no tensor. What may change before a step is carried out has none."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if value is not None and not isinstance(value, PLAIN):
        raise _Alone(f"an input is a {type(value).__name__}: give tensors one by one, numbers and texts")
    return type(value), value


def _require_alike(model: nn.Module, optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule of the optimizer, or say why rows cannot hold the model."""
    rule = rule_of(optimizer)
    if isinstance(rule, str):
        raise _Alone(rule)
    parameters = list(model.parameters())
    if any(type(p) is not nn.Parameter for p in parameters):
        raise _Alone("its parameters are of a class of their own")
    if len({(p.dtype, p.device) for p in parameters}) != 1 or parameters[0].dtype not in DTYPES:
        raise _Alone("its parameters are not all of one dtype, float32 or float64, on one device")
    known = {id(p) for p in parameters}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise _Alone("its optimizer has parameters that are not the model's")
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(p.requires_grad and id(p) not in trained for p in parameters):
        raise _Alone("a parameter that requires a gradient is not in its optimizer")
    return rule
