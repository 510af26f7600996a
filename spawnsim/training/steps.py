"""A training step, stated once: `TrainingStep` and `Evaluation`.

Carried out at once on real ranks. On virtual ranks put off, unless the run says `eager`; what cannot be computed for
many models at once steps alone, and the run has a warning that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from spawnsim.comm.deferred import Deferred, caller
from spawnsim.errors import ParameterError
from spawnsim.training import structure
from spawnsim.training.arena import Arena, Plan, Seat
from spawnsim.training.batches import MOST_STEPS, EvaluationBatch, Put, StepBatch
from spawnsim.training.functions import MOST_MOVES, Alone, OfModel, Outcome, Run
from spawnsim.training.objective import RANDOM, Objective, OfDropout, as_outputs, masks_of, of_row, trial
from spawnsim.training.optimizers import Rule, rule_of
from spawnsim.training.settings import Settings
from spawnsim.training.watching import in_a_mode

# Earlier versions of torch let go, in Python, of a storage that tensors still use: by which rows are held.
OLDEST = "2.10"
DTYPES = (torch.float32, torch.float64)
LAID_OUT = (
    "it draws random numbers in an order that hangs on how inputs or weights lie, which are not contiguous"
)
SPARE = 2  # a row to spare for so many ranks
MOST_PENDING = 8  # evaluations of one model that may be put off at once


class TrainingStep(OfModel):
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
    run has a warning that says why, if it has buffers that a forward pass changes (other than those of BatchNorm),
    hooks, random operations other than nn.Dropout, control flow that depends on data, parameters of several dtypes or
    of less than 32 bits, or another optimizer; also under autocast. A step is computed with the attributes of model and
    loss that it met; where these change more than three times the model steps alone, too: give what changes as a
    tensor, beside the batch.

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

    def _how(self) -> tuple[Any, ...]:
        return self.function, self.max_norm, self.gradients

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
        if found is None or torch._C._is_any_autocast_enabled() or not torch.is_grad_enabled() or in_a_mode():
            return self._at_once(model, optimizer, batch)
        if torch.is_anomaly_enabled():  # who looks for a NaN wants to know where, and at which step
            return self._at_once(model, optimizer, batch)
        deferred, rank = found
        self._settle_inputs(deferred, (*batch, *[group.get("lr") for group in optimizer.param_groups]))
        seat, run = self._seat, Run.of(deferred)
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
            if run.seats.get(model) is seat:
                run.leave(seat, model)
            return self(model, optimizer, *batch)
        return self._put_off(deferred, rank, seat, batch)

    @staticmethod
    def _may_wait(seat: Seat, rank: int) -> bool:
        """Return whether one more step of a model may be put off, behind what is put off of it already."""
        if seat.steps >= MOST_STEPS or seat.rank != rank or not seat.goes_on:
            return False
        # Once a step waits, to freeze a parameter is a look. Before an evaluation was put off nobody asked.
        return seat.steps > 0 or seat.wants

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
            if found[0].objective.drops:
                found = self._of_masks(deferred, seat, key, inputs, ready=ready)
        except (Alone, structure.Unequal) as why:
            alone = why
        if alone is not None:
            deferred.settle(rank)
            try:
                # The program's own error would show ours above it if it were raised while ours is handled.
                outcome = self._at_once(model, seat.optimizer, inputs)
            except Exception:
                Run.of(
                    deferred
                ).forget_refusals()  # it fails by itself: perhaps for its values, and others do not
                raise
            self._explain(deferred, model, alone)
            return outcome
        batch, slots = found
        if seat.steps >= batch.most:
            deferred.settle(rank)
            return self(model, seat.optimizer, *inputs)  # meanwhile others may have come to the model
        while seat.steps >= len(slots):
            slots.append(batch.slots(seat.row, len(slots)))
        for number, slot in slots[seat.steps]:
            if number < len(inputs):
                slot.copy_(inputs[number])
            else:  # drawn now, in the rank's turn, from its generator
                batch.objective.masks[number - len(inputs)].draw(slot)
        watch = Run.of(deferred).watch
        work = Put(rank, seat, batch, [watch.result(each) for each in batch.results])
        work.settings, work.lr = settings, tuple([float(group["lr"]) for group in groups])
        work.depth = seat.steps
        if not seat.pending and any(p.grad is not None for p in seat.parameters):
            seat.optimizer.zero_grad()
        seat.steps += 1
        seat.made += 1
        # lr schedulers warn where the optimizer never made a step.
        seat.optimizer._opt_called = True  # type: ignore[attr-defined]
        return self._put(deferred, work, watch)

    # -- seats and batches --------------------------------------------------------------------------------------

    def _find_seat(
        self, deferred: Deferred, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Seat | None:
        if model in self._alone:
            return None
        self._seat, run = None, Run.of(deferred)
        seat = run.seats.get(model)
        if seat is None or not seat.of(model, optimizer):
            try:
                deferred.settle(rank)
                if seat is not None:  # of another optimizer
                    if seat.pending:
                        deferred.carry_out()
                    run.leave(seat, model)
                if run.moves.get(model, 0) >= MOST_MOVES:
                    raise Alone(
                        "its optimizer, what is trained of it, or its buffers are others every few steps"
                    )
                seat = run.seats[model] = self._arena(deferred, model, optimizer).seat(model, optimizer)
            except (Alone, structure.Unequal) as why:
                self._explain(deferred, model, why)
                return None
        self._seat = seat
        return seat

    def _arena(self, deferred: Deferred, model: nn.Module, optimizer: torch.optim.Optimizer) -> Arena:
        rule = require_alike(model, optimizer)
        settings = [rule.settings(group) for group in optimizer.param_groups]
        names = {rule.states(each) for each in settings}
        if len(names) > 1:
            raise Alone("its optimizer's groups keep different state")
        plan, like = Plan(model, optimizer), next(model.parameters())
        if not plan.trained:
            raise Alone("its optimizer trains none of its parameters")
        states = names.pop()
        key = (
            structure.of_model(model),
            plan.key(),
            like.dtype,
            like.device,
            rule.kind,
            states,
        )
        arenas = Run.of(deferred).arenas.setdefault(key, [])
        for arena in arenas:
            if not arena.full:
                return arena
        # More rows than ranks, for a rank whose model is replaced has two for a while. Rows not used take no memory,
        # except on a GPU, where more are made when they are needed.
        spare = deferred.ranks // SPARE + 1
        capacity = (
            deferred.ranks + spare if like.device.type == "cpu" else spare if arenas else deferred.ranks
        )
        arena = Arena(plan, like, rule, states=states, capacity=capacity)
        arenas.append(arena)
        Run.of(deferred).keys[arena] = (key, len(arenas))
        run = Run.of(deferred)
        run.note_group(deferred, model, (type(model).__qualname__, *key[1:]), (key, len(arenas)))
        return arena

    @staticmethod
    def _require_state(seat: Seat, settings: tuple[Any, ...]) -> None:
        """Take note of new settings, such as a scheduled momentum: there must be rows for the state that they need."""
        rule = rule_of(seat.optimizer)
        if isinstance(rule, str):
            raise Alone(rule)
        if any(not set(seat.arena.rule.states(each)) <= set(seat.arena.states) for each in settings):
            raise Alone("its optimizer keeps state that it did not keep at first")
        seat.settings = settings

    def _open(
        self, deferred: Deferred, seat: Seat, key: Any, inputs: Sequence[Any], *, settings: Settings
    ) -> Any:
        if any(isinstance(each, Tensor) and each.requires_grad for each in inputs):
            raise Alone("an input requires a gradient: detach it, if what it was made of need not get one")
        run = Run.of(deferred)
        whole = (
            "step",
            run.keys[seat.arena],
            settings.key,
            *self._how()[1:],
            key,
        )
        run.note_group(deferred, seat.module(), (type(self.function), *whole[:2], *whole[3:]), whole)
        batch = self._shared(deferred, whole, lambda: self._try(deferred, seat, inputs, settings))
        if batch.objective.masks and not all(map(_lies_in_order, seat.parameters)):
            raise Alone(LAID_OUT)
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
            inputs = self._tried(batch, seat, inputs)
        except Exception as error:  # noqa: BLE001 - the program's own error, if it is one, comes when it steps alone
            # vmap's own text names flags of a call that is not the program's.
            if RANDOM in str(error):
                return (
                    "it draws random numbers otherwise than by torch.nn.Dropout on the CPU, and each rank has a "
                    "generator of its own"
                )
            if isinstance(error, structure.Unequal):
                return str(error)
            # The first sentence: the next ones ask for reports to torch.
            return f"{type(error).__name__}: {error}".splitlines()[0].partition(". ")[0]
        # Of the row, and not of the model: what is put off of that is not carried out for it.
        unused = batch.open(seat.at, inputs)
        return f"the loss does not depend on {unused}: exclude it from the optimizer" if unused else batch

    def _of_masks(
        self, deferred: Deferred, seat: Seat, key: Any, inputs: Sequence[Any], *, ready: dict[Any, Any]
    ) -> Any:
        """Return a seat's batch with dropout, or another one, if what methods read is not what it was."""
        batch: StepBatch = ready[key][0]
        if batch.step.reads is not None and not batch.step.reads.unchanged():
            self._count_change(ready)
            Run.of(deferred).forget(batch)
            ready[key] = self._open(deferred, seat, key, inputs, settings=ready[Settings])
        if ready[key][0].objective.masks and not all(map(_lies_in_order, inputs)):
            raise Alone(LAID_OUT)
        return ready[key]

    @staticmethod
    def _tried(batch: StepBatch, seat: Seat, inputs: Sequence[Any]) -> Sequence[Any]:
        """Raise what vmap has against a step; return its inputs, and behind them masks for dropout."""
        objective = batch.objective
        with OfDropout() as dropout:
            try:
                trial(objective, seat.arena, batch.step.gradient, inputs)
            except RuntimeError as error:
                if RANDOM not in str(error):
                    raise
            else:
                objective.drops = dropout.calls > 0
                return inputs
        if batch.step.reads is None:
            raise structure.Unequal("it draws random numbers, and reads what may change unnoticed")
        call = partial(of_row, seat.arena.plan, objective)
        objective.masks = masks_of(call, seat.arena.of(seat.at), inputs)
        objective.drops = True
        inputs = [*inputs, *[mask.ones() for mask in objective.masks]]
        trial(objective, seat.arena, batch.step.gradient, inputs)
        return inputs

    # -- at once ------------------------------------------------------------------------------------------------

    def _at_once(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[Any]) -> Outcome:
        optimizer.zero_grad()
        loss, more = as_outputs(self.function(model, *batch))
        outs = (loss.detach(), *_apart(more, (*model.parameters(), *model.buffers(), *batch)))
        loss.backward()  # type: ignore[no-untyped-call]
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
        optimizer.step()
        if not self.gradients:
            optimizer.zero_grad()
        return outs[0] if len(outs) == 1 else outs


class Evaluation(OfModel):
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
        if found is None or torch._C._is_any_autocast_enabled() or model in self._alone:
            return self._at_once(model, batch)
        if torch.is_inference_mode_enabled():  # whose tensors nobody could give their values later
            with torch.inference_mode(False):
                return self(model, *batch)
        deferred, rank = found
        self._settle_inputs(deferred, batch)
        seat, run = self._seat, Run.of(deferred)
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
            batch_of = ready.get(key)
            if batch_of is None:
                self._require_few(ready, key)
                batch_of = ready[key] = self._open(deferred, seat, key, batch, settings=ready[Settings])
        except (Alone, structure.Unequal):
            self._alone.add(model)
            return self._at_once(model, batch)
        watch = Run.of(deferred).watch
        outs = [watch.result(each) for each in batch_of.results]
        work = Put(rank, seat, batch_of, outs)
        work.inputs = batch
        return self._put(deferred, work, watch)

    def _open(
        self, deferred: Deferred, seat: Seat, key: Any, inputs: Sequence[Any], *, settings: Settings
    ) -> EvaluationBatch:
        whole = ("evaluation", Run.of(deferred).keys[seat.arena], settings.key, key)
        found: EvaluationBatch = self._shared(
            deferred, whole, lambda: self._try(deferred, seat, inputs, settings)
        )
        return found

    def _try(
        self, deferred: Deferred, seat: Seat, inputs: Sequence[Any], settings: Settings
    ) -> EvaluationBatch | str:
        model = seat.module()
        try:
            batch = EvaluationBatch(deferred, seat.arena, Objective(model, self.function, settings))
            with torch.no_grad():
                trial(batch.objective, seat.arena, batch.function, inputs, trains=False)
                batch.open(seat.at, inputs)
        except Exception as error:  # noqa: BLE001 - vmap's refusals are of many classes
            return f"{type(error).__name__}: {error}"
        return batch

    @torch.no_grad()
    def _at_once(self, model: nn.Module, batch: Sequence[Any]) -> Outcome:
        outcome: Outcome = self.function(model, *batch)
        return outcome


def _apart(outputs: Sequence[Tensor], given: Iterable[Any]) -> tuple[Tensor, ...]:
    """Return outputs, detached; copies of those that share memory with weights, buffers or inputs: these change."""
    memory = {each.untyped_storage().data_ptr() for each in given if outputs and isinstance(each, Tensor)}
    found = [each.detach() for each in outputs]
    return tuple(each.clone() if each.untyped_storage().data_ptr() in memory else each for each in found)


def require_alike(model: nn.Module, optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule of the optimizer, or say why rows cannot hold the model."""
    if torch.__version__ < OLDEST:
        raise Alone(f"torch {torch.__version__} is older than {OLDEST}")
    rule = rule_of(optimizer)
    if isinstance(rule, str):
        raise Alone(rule)
    parameters = list(model.parameters())
    if any(type(p) is not nn.Parameter for p in parameters):
        raise Alone("its parameters are of a class of their own")
    if len({(p.dtype, p.device) for p in parameters}) != 1 or parameters[0].dtype not in DTYPES:
        raise Alone("its parameters are not all of one dtype, float32 or float64, on one device")
    changed = [*structure.statistics(model).values()]
    if any(type(each) is not Tensor or each.device != parameters[0].device for each in changed):
        raise Alone("buffers that its forward pass changes are of a class of their own, or on another device")
    if _overlap([*parameters, *changed]):
        raise Alone("its parameters, or buffers that its forward pass changes, share memory")
    known = {id(p) for p in parameters}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise Alone("its optimizer has parameters that are not the model's")
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(p.requires_grad and id(p) not in trained for p in parameters):
        raise Alone("a parameter that requires a gradient is not in its optimizer")
    return rule


def _lies_in_order(value: Any) -> bool:
    """Return whether a value lies as a new tensor of its shape would, if it is one. Asked in a way that is no look."""
    return not isinstance(value, Tensor) or value.stride() == torch.empty(value.shape, device="meta").stride()


def _overlap(parameters: Sequence[Tensor]) -> bool:
    """Return whether parameters lie over each other, as where one was tied to another by way of `.data`."""
    parts = []
    for p in parameters:
        last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
        if p.numel():
            parts.append((p.data_ptr(), p.data_ptr() + last * p.element_size()))
    return any(begin <= last for (_, last), (begin, _) in pairwise(sorted(parts)))
