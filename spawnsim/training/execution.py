"""Execution of the calls of many ranks: groups of equal calls, one vmapped call for each chunk of rows.

Calls are executed in the order of ranks. Results depend on the set of ranks with a parked call, and so on virtual times
alone. Fewer than `FEW` rows execute one by one, each in its rank's turn. Knows calls and their groups; must not know
time or communicators.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spawnsim.comm.backends import Batching
from spawnsim.errors import UsageError
from spawnsim.training import checks, optimizers
from spawnsim.training.checks import Reference, row_of
from spawnsim.training.dropout import Mask
from spawnsim.training.grouping import Parts
from spawnsim.training.seats import Seat
from spawnsim.training.vmapped import Outcome, Tensors, Vmapped, clip, rows_at_once

FEW = 4  # with fewer rows, models execute one by one: a vmapped call costs as much as four of them
MANY_GROUPS = 8
FIRST = 3  # first steps of each group: in each of them one rank's step is compared


@dataclass(slots=True, eq=False)
class Call:
    """One rank's training step or evaluation.

    Attributes:
        rank: The calling rank.
        time_s: Its virtual time.
        seat: The model.
        kind: The group of calls.
        function: Function of the model and inputs.
        inputs: Inputs. A step has copies, as other ranks may overwrite the originals while it is parked.
        masks: Dropout masks, drawn in the rank's turn.
        state: State of torch's generator before the masks were drawn.
        reference: The call executed alone, if it is to be compared.
        broken: Description of a breach of the contract; "" if it kept the contract.
        alone: Whether the rank must execute it alone after all, in its turn.
        trouble: The error of the batched call that caused this, if any.
        error: Error to raise on the rank.
        outputs: Outputs of the function.
        gradients: Gradients of the trained parameters, if the rank `wants_gradients`.
        versions: Versions of the inputs of an evaluation, which are not copied, when the call began.
    """

    rank: int
    time_s: float
    seat: Seat
    kind: Kind
    function: Callable[..., Any]
    inputs: Sequence[Any]
    reference: Reference | None = None
    broken: str = ""
    masks: Sequence[Tensor] = ()
    state: Tensor | None = None
    alone: bool = False
    trouble: Trouble | None = None
    error: Exception | None = None
    outputs: Sequence[Tensor] = ()
    gradients: Sequence[Tensor] = ()
    wants_gradients: bool = False
    versions: Sequence[int] = ()

    def draw(self) -> None:
        """Draw masks from the rank's generator, in its turn."""
        if self.kind.masks:
            self.state = torch.get_rng_state()
            self.masks = [mask.draw() for mask in self.kind.masks]

    def give_back(self) -> None:
        """Restore the generator to its state before the draws."""
        if self.state is not None:
            torch.set_rng_state(self.state)


class Trouble:
    """An error of a batched call: its ranks then execute their calls alone, to find the rank at fault.

    Args:
        kind: The group; it is refused if all ranks succeed alone.
        error: Error of the batched call.
        calls: Number of ranks.
    """

    def __init__(self, kind: Kind, error: Exception, calls: int) -> None:
        self._kind, self._left = kind, calls
        # The first sentence only: the next ones ask the user to report the error to torch.
        self._why = f"{type(error).__name__}: {error}".splitlines()[0].partition(". ")[0]

    def succeeded(self) -> None:
        """Count a call that succeeded alone."""
        self._left -= 1
        if not self._left:
            self._kind.refusal = self._why


class Kind:
    """A group of calls: one function, models of equal structure, inputs of equal shapes.

    Args:
        seat: Seat of the first model.
        model: The first model.
        function: Function of a model and inputs.
        parts: Parts of the function and the model, by name.
        max_norm: Norm to which gradients are clipped; None: no clipping.

    Attributes:
        refusal: Why the calls execute alone; "" if they do not.
        masks: Dropout masks.
        changed: Numbers of the buffers that calls change.
        compared: Number of the latest step that was compared.
    """

    def __init__(
        self,
        seat: Seat,
        model: nn.Module,
        function: Callable[..., Any],
        *,
        parts: Parts,
        max_norm: float | None,
    ) -> None:
        self.function, self.parts, self._max_norm = function, parts, max_norm
        self._vmapped = Vmapped(model, function, seat.names)
        self._names, self._groups, self._rule = seat.names, seat.groups, seat.rule
        self._chunk = rows_at_once(seat.parameters)
        self.name = type(model).__name__
        self.refusal = ""
        self.masks: Sequence[Mask] = ()
        self.changed: Sequence[int] = ()
        self.compared = 0

    def take(self, reference: Reference) -> None:
        """Record the dropout masks and changed buffers of the first call."""
        self.masks = self._vmapped.objective.masks = reference.masks
        self.changed = reference.changed

    def execute(self, calls: Sequence[Call]) -> bool:
        """Execute calls together, or mark them to execute alone; return whether any executed together."""
        together, begin = False, 0
        while begin < len(calls):
            chunk = calls[begin : begin + self._chunk]
            if len(chunk) < FEW or self.refusal:
                for call in chunk:
                    call.alone = True
                begin += len(chunk)
                continue
            try:
                rows, outcome = self._outcome(chunk)
            except torch.cuda.OutOfMemoryError:
                self._chunk = len(chunk) // 2
                torch.cuda.empty_cache()
                continue
            except Exception as error:  # noqa: BLE001 - torch refuses with many classes of errors
                trouble = Trouble(self, error, len(chunk))
                for call in chunk:
                    call.alone, call.trouble = True, trouble
            else:
                together = True
                self._finish(chunk, rows, outcome)
            begin += len(chunk)
        return together

    def _outcome(self, calls: Sequence[Call]) -> tuple[Tensors, Outcome]:
        seats = [call.seat for call in calls]
        dims, inputs = [], []
        for column in zip(*[call.inputs for call in calls], strict=True):
            shared = not isinstance(column[0], Tensor) or all(each is column[0] for each in column)
            dims.append(None if shared else 0)
            inputs.append(column[0] if shared else torch.stack(column))
        with torch.no_grad():
            rows = Tensors(
                [torch.stack(each) for each in zip(*[seat.trained for seat in seats], strict=True)],
                [torch.stack(each) for each in zip(*[seat.fixed for seat in seats], strict=True)],
                [torch.stack([seat.buffer(i) for seat in seats]) for i in range(len(seats[0].buffers))],
                [torch.stack(each) for each in zip(*[call.masks for call in calls], strict=True)],
                inputs,
            )
        return rows, self._vmapped.rows(rows, dims)

    def _finish(self, calls: Sequence[Call], rows: Tensors, outcome: Outcome) -> None:
        """Compare rows, update models, and assign outputs to calls."""
        for row, call in enumerate(calls):
            if call.reference is not None:
                self._compare(call, row_of(outcome, row))
            elif call.versions and call.versions != versions_of(call.inputs):
                call.error = _overwritten(call)
        seats = [call.seat for call in calls]
        outputs = [each.unbind() for each in outcome.outputs]
        with torch.no_grad():
            for number in self.changed:
                for seat, now in zip(seats, outcome.buffers[number].unbind(), strict=True):
                    seat.buffer(number).copy_(now)
            if self._names:
                if self._max_norm is not None:
                    clip(outcome.gradients, self._max_norm)
                gradients = [each.unbind() for each in outcome.gradients]
                for row, call in enumerate(calls):
                    if call.wants_gradients:
                        call.gradients = [each[row].clone() for each in gradients]
                if self._rule is not None:
                    optimizers.update(seats, self._groups, gradients)
        for row, call in enumerate(calls):
            call.outputs = [each[row] for each in outputs]

    def _compare(self, call: Call, row: Outcome) -> None:
        assert call.reference is not None
        buffers = [call.seat.buffer(number) for number in range(len(call.seat.buffers))]
        own = Tensors(call.seat.trained, call.seat.fixed, buffers, call.masks, call.inputs)
        what = call.broken or checks.mismatch(
            self._vmapped, own, row, alone=call.reference.outcome, names=self._names
        )
        if what:
            call.error = self._broken(call, what)

    def _broken(self, call: Call, what: str) -> UsageError:
        changed = [*checks.changes(self, call.function, call.seat.module())]
        found = (
            f"it has changed: {', '.join(changed)}"
            if changed
            else "it reads a value that changes, such as an entry of a list, an attribute or a generator"
        )
        step = f"step {call.seat.steps}" if self._names else "an evaluation"
        return UsageError(
            f"rank {call.rank}, {step}, at {call.time_s:.6g} s: {what}. The function may depend on the model, its "
            f"arguments and constants alone; {found}. Pass a value that changes as an argument, next to the batch, or "
            "run with --eager"
        )


def versions_of(inputs: Sequence[Any]) -> Sequence[int]:
    """Return the version counters of tensors among some inputs."""
    return [0 if each.is_inference() else each._version for each in inputs if isinstance(each, Tensor)]


def _overwritten(call: Call) -> UsageError:
    return UsageError(
        f"rank {call.rank} at {call.time_s:.6g} s: another rank overwrote an input of an evaluation while it waited: "
        "give each rank its own tensors"
    )


class Engine:
    """The groups of one run, and the execution of their calls.

    Args:
        run: The run.

    Attributes:
        kinds: By key, a group, or the reason why calls with this key execute alone.
    """

    def __init__(self, run: Batching) -> None:
        self.run = run
        self.kinds: dict[Hashable, Kind | str] = {}
        self._numbers: dict[Hashable, int] = {}
        self._seats: dict[bool, weakref.WeakKeyDictionary[nn.Module, Seat]] = {
            trains: weakref.WeakKeyDictionary() for trains in (True, False)
        }
        self._owners: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self.shared: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._groups: Counter[str] = Counter()

    @classmethod
    def of(cls, run: Batching) -> Engine:
        """Return the engine of a run."""
        if cls not in run.attachments:
            run.attachments[cls] = cls(run)
        found: Engine = run.attachments[cls]
        return found

    def seat(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Seat:
        """Return the seat of a model; create a new one if the model or its optimizer has changed."""
        seats = self._seats[optimizer is not None]
        seat = seats.get(model)
        if seat is None or not seat.of(model, optimizer):
            rank, steps = (-1, 0) if seat is None else (seat.rank, seat.steps)
            seat = seats[model] = Seat(model, optimizer)
            seat.rank, seat.steps = rank, steps
            if optimizer is not None:
                self._own(model, seat)
        return seat

    def _own(self, model: nn.Module, seat: Seat) -> None:
        """Record the owner of a model's parameters; models that share parameters step alone."""
        for p in seat.parameters:
            owner = self._owners.get(id(p))
            if owner is not None and owner is not model and any(p is each for each in owner.parameters()):
                self.shared |= {owner, model}
            self._owners[id(p)] = model

    def number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def count_group(self, model: nn.Module) -> None:
        """Count a new group; warn if there are many, perhaps one per rank."""
        name = type(model).__name__
        self._groups[name] += 1
        if self._groups[name] == MANY_GROUPS:
            self.run.warn(
                f"{name} models are computed in {MANY_GROUPS} or more groups: their classes or attributes, the values "
                "to which their loss refers, or the shapes of their batches differ. Define classes outside of "
                "functions, and pass values as arguments, next to the batch"
            )

    def execute(self, calls: Sequence[Call]) -> None:
        """Execute calls, given in the order of ranks."""
        groups: dict[Kind, list[Call]] = {}
        for call in calls:
            groups.setdefault(call.kind, []).append(call)
        for kind, own in groups.items():
            self.run.batched |= kind.execute(own)
