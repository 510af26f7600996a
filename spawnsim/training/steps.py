"""A training step, stated once: `TrainingStep` and `Evaluation`.

On real ranks a call executes as it stands. On virtual ranks it blocks, like `Recv`, until it has been executed with
those of other ranks, unless the run says `eager`. A model that cannot be computed with others steps alone, and the run
has a warning with the reason.
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
    """What steps and evaluations have in common: a function of a model, whose calls many ranks make together."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise ParameterError(f"{function!r}: give a function of a model and a batch")
        self.function = function
        self._engine: Engine | None = None
        self._keyed: tuple[Any, Any, int] | None = None  # the function, its parts, and their number
        self._alone: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._kinds: dict[Any, Kind | str] = {}
        self._latest: tuple[Seat | None, int] = (None, -1)

    def _run_of(self) -> Batching | None:
        """Return the run of the calling virtual rank, if its calls wait for others'."""
        run = batching()
        if run is not None and (self._engine is None or self._engine.run is not run):
            self._engine, self._keyed, self._alone = Engine.of(run), None, weakref.WeakSet()
            self._kinds, self._latest = {}, (None, -1)
        return run

    def _call(self, run: Batching, model: nn.Module, optimizer: Any, inputs: Sequence[Any]) -> Call | None:
        """Return the call of a rank, to be executed with others; None if the model steps alone."""
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
        """Return a new group, and its first call executed alone; or why there is none."""
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
        except Exception as error:  # noqa: BLE001 - the program's own error, if it is one, comes when it steps alone
            return str(error) if isinstance(error, Ungroupable) else f"{type(error).__name__}: {error}", None
        kind.take(reference)
        return kind, reference

    def _number(self, engine: Engine) -> int:
        if self._keyed is None or self._keyed[0] is not self.function:
            parts = parts_of_function(self.function)
            self._keyed = self.function, parts, engine.number(tuple(parts.items()))
        return self._keyed[2]

    def _how(self) -> tuple[Any, ...]:
        """Return which attributes of this object decide what is computed: they may be set at any time."""
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
        """Wait until a call has been executed with others; execute it alone if it was left to its rank."""
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
    its step has been executed, with those of all ranks whose models are equal but for their weights, in one
    `torch.func.vmap` call. Afterwards loss, parameters and optimizer state are ordinary tensors with the values of an
    eager step, up to rounding (1e-5 of a loss after 100 steps). The time of a compute block passes in its first step.

    The contract is that of `torch.func`: the loss is a function of the model, its arguments, and constants. State that
    changes between steps (a coefficient, a counter, a schedule) must be an argument, beside the batch; learning rate,
    momentum and other hyperparameters of the optimizer may change at any step. The contract is checked: for the first
    three steps of each group of equal models one rank's step, later every hundredth step of each rank, and under
    `--check-steps` every step is also executed alone; a difference raises `UsageError` on that rank.

    SGD, Adam and AdamW of torch.optim update all models at once; of another optimizer, gradients are computed together
    and each makes its step itself. A model steps alone, and the run has a warning that says why, if it has hooks,
    random operations other than nn.Dropout, control flow that depends on data, parameters of several dtypes or of less
    than 32 bits; also under autocast.

    Args:
        loss: From a model and a batch to a scalar, or to a tuple of a scalar and further tensors that are returned.
        max_norm: The norm to which gradients are clipped, as `torch.nn.utils.clip_grad_norm_` does; None: not.
        gradients: Whether `parameter.grad` holds the gradient afterwards; otherwise it is None.

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
            model: Any module.
            optimizer: Of its parameters.
            batch: Tensors, numbers and texts.

        Returns:
            The loss before the update, 0-dim and detached; with whatever else `loss` returns, as a tuple.

        Raises:
            Exception: What `loss` raised.
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
        """Leave gradients where the program looks for them, or none."""
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
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn where it made no step

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

    On virtual ranks a blocking call, executed for many ranks at once under the contract of a `TrainingStep`.

    Args:
        function: From a model and a batch to a tensor, or a tuple of them; called without gradients.

    Raises:
        ParameterError: `function` is no function.
    """

    def __call__(self, model: nn.Module, *batch: Any) -> Outcome:
        """Evaluate a model.

        Args:
            model: Any module.
            batch: Tensors, numbers and texts.

        Returns:
            What the function returns, detached.

        Raises:
            Exception: What the function raised.
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
    """Return outputs, detached; copies of those that share memory with weights, buffers or inputs: these change."""
    memory = {each.untyped_storage().data_ptr() for each in given if outputs and isinstance(each, Tensor)}
    found = [each.detach() for each in outputs]
    return tuple(each.clone() if each.untyped_storage().data_ptr() in memory else each for each in found)


def _of_inputs(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return what the inputs of calls that are alike have in common."""
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
    """Return whether a program has autocast, a mode of torch's or its search for NaN around a call."""
    of_torch: Any = torch._C
    if (
        of_torch._is_any_autocast_enabled()
        or of_torch._len_torch_dispatch_stack()
        or torch.is_anomaly_enabled()
    ):
        return True
    functions: int = of_torch._len_torch_function_stack()
    # One is that of `torch.set_default_device`, of all ranks.
    return functions > (getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not None)
