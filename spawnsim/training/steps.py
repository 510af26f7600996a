"""A training step, defined once: `TrainingStep` and `Evaluation`.

Real ranks execute a call directly. On virtual ranks it blocks, like `Recv`, until it has been executed together with
the calls of other ranks, unless the run is `eager`. A model that cannot be computed together with other models steps
alone, and the run logs a warning with the reason.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from spawnsim.comm.backends import Batching, batching
from spawnsim.errors import ParameterError
from spawnsim.training.checks import EVERY, Reference
from spawnsim.training.execution import FIRST, Call, Engine, Kind, versions_of
from spawnsim.training.grouping import Ungroupable, globals_of, parts_of_function
from spawnsim.training.seats import Seat
from spawnsim.training.vmapped import as_outputs

PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size, type(None))
Outcome = Tensor | tuple[Tensor, ...]


class _OfModel:
    """Base of steps and evaluations: a function of a model, whose calls on many ranks execute together."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise ParameterError(f"{function!r}: give a function of a model and a batch")
        self.function = function
        self._engine: Engine | None = None
        self._keyed: tuple[Any, Any, int] | None = None  # function, its parts, number of their key
        self._alone: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._kinds: dict[Any, Kind | str] = {}
        self._latest: tuple[Seat | None, int] = (None, -1)

    def _run_of(self) -> Batching | None:
        """Return the run of the calling virtual rank, if its calls wait for calls of other ranks."""
        run = batching()
        if run is not None and (self._engine is None or self._engine.run is not run):
            self._engine, self._keyed, self._alone = Engine.of(run), None, weakref.WeakSet()
            self._kinds, self._latest = {}, (None, -1)
        return run

    def _call(self, run: Batching, model: nn.Module, optimizer: Any, inputs: Sequence[Any]) -> Call | None:
        """Return the call of a rank, for execution with other calls; None if the model steps alone."""
        if run.eager or model in self._alone or _is_in_a_mode():
            return None
        engine = self._engine
        assert engine is not None
        try:
            seat = engine.seat(model, optimizer)
            rank = run.rank()
            if optimizer is not None and (model in engine.shared or seat.rank not in (rank, -1)):
                engine.shared.add(model)
                raise Ungroupable("several ranks train its parameters")
            seat.rank, seat.steps = rank, seat.steps + 1
            return self._opened(engine, seat, model, inputs)
        except Ungroupable as why:
            self._alone.add(model)
            run.warn(f"{type(model).__name__} models step alone, not together in one call: {why}")
            return None

    def _opened(self, engine: Engine, seat: Seat, model: nn.Module, inputs: Sequence[Any]) -> Call:
        if self._latest[0] is not seat:
            self._latest = seat, engine.number(seat.key)
        key = (self._latest[1], self._number(engine), self._how(), seat.modes(), _of_inputs(inputs))
        kind = self._kinds.get(key)
        reference: Reference | None = None
        if kind is None:
            kind = engine.kinds.get(key)
            if kind is None:
                kind, reference = self._new_kind(engine, seat, model, inputs)
                engine.kinds[key] = kind
            self._kinds[key] = kind
        if isinstance(kind, str) or kind.refusal:
            raise Ungroupable(kind if isinstance(kind, str) else kind.refusal)
        run, copied = engine.run, self._copied(inputs)
        call = Call(run.rank(), run.clock_s(), seat, kind, self.function, copied)
        first = seat.steps <= FIRST and kind.compared < seat.steps
        if first or run.check or (seat.steps + call.rank) % EVERY == 0:
            kind.compared = max(kind.compared, seat.steps)
            if reference is None:
                with run.apart():
                    reference = Reference(self.function, model, seat, call.inputs)
                    call.broken = reference.draws()
            call.reference = reference
        call.draw()
        return call

    def _new_kind(
        self, engine: Engine, seat: Seat, model: nn.Module, inputs: Sequence[Any]
    ) -> tuple[Kind | str, Reference | None]:
        """Return a new group, and its first call executed alone; or the reason against a group."""
        assert self._keyed is not None
        engine.count_group(model)
        if any(isinstance(each, Tensor) and each.requires_grad for each in inputs):
            return "an input requires a gradient: detach it", None
        parts = self._keyed[1] | seat.parts | globals_of(self.function)
        try:
            with engine.run.apart():
                kind = Kind(seat, model, self.function, parts=parts, max_norm=self._norm())
                reference = Reference(self.function, model, seat, inputs)
                if draws := reference.draws():
                    return draws, None
        except Exception as error:  # noqa: BLE001 - an error of the program is raised again when the model steps alone
            return str(error) if isinstance(error, Ungroupable) else f"{type(error).__name__}: {error}", None
        kind.take(reference)
        return kind, reference

    def _number(self, engine: Engine) -> int:
        if self._keyed is None or self._keyed[0] is not self.function:
            parts = parts_of_function(self.function)
            self._keyed = self.function, parts, engine.number(tuple(parts.items()))
        return self._keyed[2]

    def _how(self) -> tuple[Any, ...]:
        """Return the attributes of this object that affect the computation: they may be set at any time."""
        return ()

    def _norm(self) -> float | None:
        return None

    def _copied(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return inputs

    def _alone_now(self, run: Batching, model: nn.Module, execute: Callable[[], Outcome]) -> Outcome:
        try:
            return execute()
        finally:
            run.pass_block(lambda: [*model.parameters(), *model.buffers()])

    def _together(
        self, call: Call, execute: Callable[[], Outcome], finish: Callable[[], None] | None = None
    ) -> Outcome:
        """Wait until a call has been executed together with others; execute it here if it is marked `alone`."""
        assert self._engine is not None
        self._engine.run.wait(call, self._engine.execute, call.seat.memory)
        if call.error is not None:
            raise call.error
        if call.alone:
            call.give_back()
            found = execute()
            if call.trouble is not None:
                call.trouble.succeeded()
            return found
        if finish is not None:
            finish()
        return call.outputs[0] if len(call.outputs) == 1 else tuple(call.outputs)


class TrainingStep(_OfModel):
    """A training step: gradient of a loss, perhaps clipped, and one step of the optimizer.

    >>> step = TrainingStep(lambda model, x, y: cross_entropy(model(x), y))
    >>> with comm.compute():
    ...     loss = step(model, optimizer, x, y)
    >>> comm.record(loss=loss)

    On real ranks this is `zero_grad`, `backward`, `step`. On virtual ranks it is a blocking call: the rank waits until
    its step has been executed, together with the steps of all ranks whose models are equal except for their weights,
    in one `torch.func.vmap` call. Afterwards loss, parameters and optimizer state are ordinary tensors with the values
    of an eager step, up to rounding (1e-5 of a loss after 100 steps). The time of a compute block passes in its first
    step.

    `torch.func` sets the contract: the loss is a function of the model, its arguments, and constants. State that
    changes between steps (a coefficient, a counter, a schedule) must be an argument, in addition to the batch. Learning
    rate, momentum and other hyperparameters of the optimizer may change at any step. The contract is checked by
    executing steps alone as well: one rank's step in each of the first three steps of each group of equal models, then
    every hundredth step of each rank, and every step under `--check-steps`. A difference raises `UsageError` on that
    rank.

    SGD, Adam and AdamW of torch.optim update all models at once. With any other optimizer, gradients are computed
    together, and each optimizer makes its own step. A model steps alone, and the run logs a warning with the reason, if
    it has hooks, random operations other than nn.Dropout, control flow that depends on data, or parameters of several
    dtypes or of less than 32 bits. Models also step alone under autocast.

    Args:
        loss: Maps a model and a batch to a scalar, or to a tuple of a scalar and further tensors to return.
        max_norm: Norm to which gradients are clipped, as by `torch.nn.utils.clip_grad_norm_`; None: no clipping.
        gradients: Whether `parameter.grad` holds the gradient afterwards; otherwise it becomes `None`.

    Raises:
        ParameterError: `loss` is not a function, or `max_norm` is not above 0.
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
            model: Any module.
            optimizer: Optimizer of its parameters.
            batch: Tensors, numbers and strings.

        Returns:
            The loss before the update, 0-dim and detached; a tuple if `loss` returns further tensors.

        Raises:
            Exception: An error of `loss`.
            UsageError: The step differs from the same step executed alone: `loss` depends on something else.
        """
        run = self._run_of()
        if run is None:
            return self._at_once(model, optimizer, batch)
        call = self._call(run, model, optimizer, batch) if torch.is_grad_enabled() else None
        if call is None:
            return self._alone_now(run, model, lambda: self._at_once(model, optimizer, batch))
        call.wants_gradients = self.gradients or call.seat.rule is None
        return self._together(
            call,
            lambda: self._at_once(model, optimizer, call.inputs),
            lambda: self._finish(call, optimizer),
        )

    def _finish(self, call: Call, optimizer: torch.optim.Optimizer) -> None:
        """Set `parameter.grad` as the program requested: the gradients, or None."""
        seat = call.seat
        if [p.grad for p in seat.trained].count(None) < len(seat.trained):
            optimizer.zero_grad()
        if call.wants_gradients:
            for p, gradient in zip(seat.trained, call.gradients, strict=True):
                p.grad = gradient
        if seat.rule is None:
            optimizer.step()
            if not self.gradients:
                optimizer.zero_grad()
        else:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn unless it is set

    def _how(self) -> tuple[Any, ...]:
        return ("step", self.max_norm)

    def _norm(self) -> float | None:
        return self.max_norm

    def _copied(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return [each.clone() if isinstance(each, Tensor) else each for each in inputs]

    def _at_once(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[Any]) -> Outcome:
        optimizer.zero_grad()
        loss, *more = as_outputs(self.function(model, *batch))
        outs = (loss.detach(), *_apart(more, (*model.parameters(), *model.buffers(), *batch)))
        loss.backward()  # type: ignore[no-untyped-call]
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
        optimizer.step()
        if not self.gradients:
            optimizer.zero_grad()
        return outs[0] if len(outs) == 1 else outs


class Evaluation(_OfModel):
    """A function of a model that trains nothing, such as its accuracy on held-out data.

    On virtual ranks it is a blocking call, executed for many ranks at once under the contract of a `TrainingStep`.

    Args:
        function: Maps a model and a batch to a tensor, or to a tuple of tensors; called without gradients.

    Raises:
        ParameterError: `function` is not a function.
    """

    def __call__(self, model: nn.Module, *batch: Any) -> Outcome:
        """Evaluate a model.

        Args:
            model: Any module.
            batch: Tensors, numbers and strings.

        Returns:
            The result of the function, detached.

        Raises:
            Exception: An error of the function.
            UsageError: The result differs from the same call executed alone: the function depends on something else.
        """
        run = self._run_of()
        if run is None:
            return self._at_once(model, batch)
        call = None if torch.is_inference_mode_enabled() else self._call(run, model, None, batch)
        if call is None:
            return self._alone_now(run, model, lambda: self._at_once(model, batch))
        call.versions = versions_of(batch)
        return self._together(call, lambda: self._at_once(model, batch))

    def _how(self) -> tuple[Any, ...]:
        return ("evaluation",)

    @torch.no_grad()
    def _at_once(self, model: nn.Module, batch: Sequence[Any]) -> Outcome:
        outcome: Outcome = self.function(model, *batch)
        return outcome


def _apart(outputs: Sequence[Tensor], given: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return detached outputs; outputs that share memory with weights, buffers or inputs, which change, are copied."""
    memory = {each.untyped_storage().data_ptr() for each in given if outputs and isinstance(each, Tensor)}
    found = [each.detach() for each in outputs]
    return tuple(each.clone() if each.untyped_storage().data_ptr() in memory else each for each in found)


def _of_inputs(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return a key of inputs that is equal for calls of one group."""
    return tuple(
        [
            (each.shape, each.dtype, each.device, each.requires_grad)
            if isinstance(each, Tensor)
            else _plain(each)
            for each in inputs
        ]
    )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if not isinstance(value, PLAIN):
        raise Ungroupable(f"an input is a {type(value).__name__}: give tensors one by one, numbers and texts")
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def _is_in_a_mode() -> bool:
    """Return whether autocast, a torch mode or anomaly detection is active around a call."""
    of_torch: Any = torch._C
    if (
        of_torch._is_any_autocast_enabled()
        or of_torch._len_torch_dispatch_stack()
        or torch.is_anomaly_enabled()
    ):
        return True
    functions: int = of_torch._len_torch_function_stack()
    # `torch.set_default_device` uses one mode, for all ranks.
    return functions > (getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not None)
