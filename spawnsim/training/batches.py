"""What carries out the steps, or the evaluations, that many ranks have put off: a few vmapped calls over rows.

Rows are taken in the order of ranks, in chunks whose weights, gradients and state fit the cache: all that is put off of
one chunk before the next. A chunk of few rows is computed row by row as long as vmapped calls are not repeated from a
record (`tracing`), for one costs as much as four plain ones. Results depend on which ranks had work waiting, and so on
virtual times alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from spawnsim.comm.deferred import Deferred
from spawnsim.training import watching
from spawnsim.training.arena import Arena, Seat
from spawnsim.training.objective import Objective, of_row, of_rows, tensors
from spawnsim.training.row_step import FEW, RowStep, chunk_of, fewer, rows_at, unknown
from spawnsim.training.threads import Threads

Chunk = Sequence[Sequence["Put"]]  # work of some ranks, one after the other
# glibc gives freed memory back to the system, and the next call takes it anew, page by page: a quarter of the time of a
# call of 32 rows. What it keeps is twice the largest block that was freed so far, of those of 32 MiB and less.
LARGEST_NBYTES = (32 << 20) - (8 << 10)
MOST_STEPS = 8  # of one model that may be put off at once
STAGED_NBYTES = 256 << 20  # of the inputs of all steps that are put off; one of each model may take more
EVALUATE, TRAIN = 0, 1  # the stages of work: evaluations first, so that ranks meet at their steps


class Put:
    """A step or an evaluation that a rank has put off."""

    __slots__ = (
        "batch", "depth", "inputs", "lr", "outs", "put_s", "rank", "seat", "settings", "stage", "taken",
    )  # fmt: skip

    def __init__(self, rank: int, seat: Seat, batch: Any, outs: list[Tensor]) -> None:
        self.rank, self.seat, self.batch, self.outs = rank, seat, batch, outs
        self.stage: int = batch.stage
        self.put_s: float = 0.0
        self.depth = 0  # how many steps of its model were put off before it, and not carried out
        self.lr: tuple[float, ...] = ()
        self.settings: tuple[Any, ...] = ()
        self.inputs: tuple[Any, ...] = ()
        # Whether it waits no longer; if it fails beside others, it comes again, in turn.
        self.taken = False

    def drop(self) -> None:
        """Take it back: work of its rank that comes before it has failed."""
        _take([self])
        self.fail()

    def fail(self) -> None:
        """Leave results that are NaN, or 0, and weights as they were."""
        watching.known(self.outs, [torch.zeros_like(out) for out in self.outs])
        for out in self.outs:
            if out.is_floating_point():
                out.fill_(torch.nan)


def _take(works: Sequence[Put]) -> None:
    for work in works:
        if work.taken:
            continue
        work.taken, seat = True, work.seat
        if seat.unknown:  # not again for each of several steps
            watching.release(seat.parameters, seat.watched)
            seat.unknown = False
        watching.release((), work.outs)
        seat.pending -= 1
        seat.steps -= work.stage


def _tell(works: Sequence[Put], outputs: Sequence[Tensor]) -> None:
    """Give the results of some work their values: (rows, ...) each."""
    for number, output in enumerate(outputs):
        watching.known([work.outs[number] for work in works], list(output.unbind()))


class Halfway(Exception):
    """What was raised amid an update: it cannot be made again."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _Batch:
    """Work of one function on models of one arena, with inputs of one kind."""

    stage = EVALUATE

    def __init__(self, deferred: Deferred, arena: Arena, objective: Objective) -> None:
        self.deferred, self.arena, self.objective = deferred, arena, objective
        self.results: list[Tensor] = []  # what results look like
        torch.empty(LARGEST_NBYTES, dtype=torch.uint8)  # and freed at once
        self.chunk = chunk_of(arena)

    def open(self, at: slice, inputs: Sequence[Any]) -> str:
        """Take note of what inputs and results look like, of one row.

        Returns:
            The first parameter that is trained and on which the function does not depend; "" for none.
        """
        raise NotImplementedError

    def carry_out(self, queues: Sequence[Sequence[Put]]) -> None:
        """Carry out as much work of each of some ranks, one after the other."""
        # All of a chunk, whose weights and state are in the cache then, before the next one.
        chunks = [
            [*zip(*queues[at : at + self.chunk], strict=True)] for at in range(0, len(queues), self.chunk)
        ]
        for chunk in self._side_by_side(chunks):
            for works in chunk:
                self._carry_out(works)

    def _side_by_side(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """Compute chunks at the same time, where there are threads for it; return what is left of each."""
        count = torch.get_num_threads()
        if count == 1 or len(chunks) == 1:
            return chunks
        fit = self.independent(chunks)
        if sum(fit) < 2:
            return chunks
        left = iter(Threads.of(self.deferred, count).map(self._ahead, [*compress(chunks, fit)]))
        return [next(left) if each else chunk for each, chunk in zip(fit, chunks, strict=True)]

    def independent(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Return which chunks may be computed beside others: they share nothing with them that changes."""
        return [False] * len(chunks)

    def _ahead(self, chunk: Chunk) -> Chunk:
        """Compute a chunk while others are computed; return what is left of it, from the first that fails."""
        for at, works in enumerate(chunk):
            _take(works)
            try:
                self.compute(works)
            except Halfway as halfway:
                self._fail_all(works, halfway.error)
                return chunk[at + 1 :]
            except Exception:  # noqa: BLE001 - it comes again, in turn
                return chunk[at:]
        return []

    def _carry_out(self, works: Sequence[Put]) -> None:
        """Carry out one piece of work of each of some ranks, unless what a rank put off before it has failed."""
        going_on = []
        for work in works:
            if self.deferred.owes(work.rank):
                work.drop()
            else:
                going_on.append(work)
        if not going_on:
            return
        _take(going_on)
        self._compute_taken(going_on)

    def _compute_taken(self, works: Sequence[Put]) -> None:
        """Compute work, so much at a time as there is memory for, which may become less meanwhile."""
        left = list(works)
        while left:
            now, left = left[: self.chunk], left[self.chunk :]
            try:
                self.compute(now)
            except torch.cuda.OutOfMemoryError as error:
                if len(now) > 1:
                    self._make_smaller(len(now))
                    left = now + left
                else:
                    self._fail(now[0], error)
            except Halfway as halfway:
                self._fail_all(now, halfway.error)
            except Exception as error:  # noqa: BLE001 - whose it is shows when each is computed alone
                # Each of them, also after one that fails.
                succeeded = [self._succeeds(work) for work in now]
                if all(succeeded):
                    name = type(self.objective.model).__name__
                    self.deferred.warn(f"{name} models failed together, and not alone: {error}")

    def _make_smaller(self, rows: int) -> None:
        """Compute half of so many rows at a time from now on: a GPU has no room for more."""
        self.chunk = fewer(rows)
        self.deferred.warn(
            f"{type(self.objective.model).__name__} models are computed {self.chunk} at a time, since the GPU has no "
            "memory for more: the last bits of losses depend on how much of it is free"
        )

    def _succeeds(self, work: Put) -> bool:
        try:
            self.compute([work])
        except Halfway as halfway:
            self._fail(work, halfway.error)
            return False
        except Exception as error:  # noqa: BLE001 - raised in the rank whose it is
            self._fail(work, error)
            return False
        return True

    def _fail_all(self, works: Sequence[Put], error: Exception) -> None:
        error.add_note(f"amid an update of {len(works)} models together, which cannot be made again")
        for work in works:
            self.deferred.failed(work, error)

    def _fail(self, work: Put, error: Exception) -> None:
        error.add_note(f"in work that rank {work.rank} put off at {work.put_s:.6g} s")
        self.deferred.failed(work, error)

    def compute(self, works: Sequence[Put]) -> None:
        """Compute some work at once; nothing has changed if it raises, unless that is `Halfway`."""
        raise NotImplementedError


class StepBatch(_Batch):
    """Training steps: gradients of all rows, then one update.

    Args:
        deferred: the run.
        arena: where the models are.
        objective: the loss.
        max_norm: of a row's gradient, None: any.
        gradients: whether `parameter.grad` is to hold it afterwards.

    Attributes:
        step: of some rows at once.
    """

    stage = TRAIN

    def __init__(
        self,
        deferred: Deferred,
        arena: Arena,
        objective: Objective,
        *,
        max_norm: float | None,
        gradients: bool,
    ) -> None:
        super().__init__(deferred, arena, objective)
        self.step, self._gradients = RowStep(arena, objective, max_norm=max_norm), gradients
        # By depth and input: those of all rows; None: the same for all.
        self._staged: list[list[Tensor | None]] = []
        self.most = 1  # steps of one model that may be put off at once

    def carry_out(self, queues: Sequence[Sequence[Put]]) -> None:
        # Momentum and decay are numbers for all rows of an update; a schedule gives ranks in step the same ones. Ranks
        # that are as many steps ahead have their inputs in one tensor.
        alike: dict[tuple[Any, ...], list[Sequence[Put]]] = {}
        for queue in queues:
            key = tuple([(work.depth, work.settings) for work in queue])
            alike.setdefault(key, []).append(queue)
        with self.step.traced.repeating():
            for each in alike.values():
                super().carry_out(each)

    def independent(self, chunks: Sequence[Chunk]) -> list[bool]:
        fit = [
            self.step.traced.ready(len(chunk[0]))
            and all(
                work.seat.rank == work.rank and not work.seat.apart and not self.deferred.owes(work.rank)
                for works in chunk
                for work in works
            )
            for chunk in chunks
        ]
        return [False] * len(chunks) if self._linked(chunks, fit) else fit

    def _linked(self, chunks: Sequence[Chunk], fit: Sequence[bool]) -> bool:
        """Return whether what is trained here is read by others' losses, or part of others' models: order counts."""
        traced = self.step.traced
        read = [each for chunk in compress(chunks, fit) for each in traced.constants(len(chunk[0]))]
        works = [work for chunk in chunks for works in chunk for work in works]
        apart = [each for work in works for _, each in work.seat.apart]
        memory = [{each.untyped_storage().data_ptr() for each in some} for some in (read, apart)]
        return not memory[0].isdisjoint(memory[1]) or any(map(self.arena.holds, memory[0] | memory[1]))

    def open(self, at: slice, inputs: Sequence[Any]) -> str:
        unused = self.step.open(at, inputs)
        self.results = self.step.results
        # Room for the inputs of all rows.
        nbytes = self.deferred.ranks * sum(each.nbytes for each in self.step.like if each is not None)
        self.most = max(1, min(MOST_STEPS, STAGED_NBYTES // max(nbytes, 1)))
        return unused

    def slots(self, row: int, depth: int) -> list[tuple[int, Tensor]]:
        """Return where a row's inputs go, by their number, if so many steps are put off before."""
        if depth == len(self._staged):  # asked for in turn
            rows = len(self.arena.rows["weights"])
            self._staged.append(
                [None if each is None else each.new_empty((rows, *each.shape)) for each in self.step.like]
            )
        return [(i, staged[row]) for i, staged in enumerate(self._staged[depth]) if staged is not None]

    def compute(self, works: Sequence[Put]) -> None:
        apart = [work.seat for work in works if work.seat.apart]
        for seat in apart:
            seat.fetch()
        at = rows_at([work.seat.row for work in works])
        rows = self.arena.of(at)
        staged = [None if each is None else each[at] for each in self._staged[works[0].depth]]
        gradient, *outputs = self.step.differentiate(rows, staged)
        _tell(works, outputs)  # of which some may be weights
        try:
            with torch.no_grad():
                self.arena.keep(at, rows[1:])
                self._leave_gradients(gradient, works)
                self.step.update(at, gradient, [work.lr for work in works], works[0].settings)
        except Exception as error:
            raise Halfway(error) from error
        for seat in apart:
            seat.store()

    def _leave_gradients(self, gradient: Tensor, works: Sequence[Put]) -> None:
        """Put gradients where the program looks for them, or none."""
        plan = self.arena.plan
        trained = len(plan.trained)
        for seat in [work.seat for work in works if work.seat.graded and not self._gradients]:
            seat.graded = False
            for parameter in seat.parameters[:trained]:
                parameter.grad = None
        if self._gradients:
            for work in works:
                work.seat.graded = True
            for row, work in zip(gradient, works, strict=True):
                for place, parameter in zip(plan.trained, work.seat.parameters, strict=False):
                    # Memory of its own, as after `backward`: the program may keep the last one.
                    parameter.grad = row[place.columns].view(place.shape).clone()


class EvaluationBatch(_Batch):
    """Evaluations: a function of all rows' weights and inputs, which are shared where they are the same."""

    def __init__(self, deferred: Deferred, arena: Arena, objective: Objective) -> None:
        super().__init__(deferred, arena, objective)

        def outcome(trained: Any, fixed: Any, *inputs: Any) -> Any:
            return objective.outputs(trained, fixed, inputs)

        self.function = outcome
        self._calls: dict[
            tuple[int | None, ...], Callable[..., Any]
        ] = {}  # by which inputs differ from row to row

    def open(self, at: slice, inputs: Sequence[Any]) -> str:
        _, outputs = of_row(self.arena.plan, self.objective, self.arena.of(at), inputs)
        self.results = [unknown(each) for each in outputs]
        return ""

    def compute(self, works: Sequence[Put]) -> None:
        apart = [work.seat for work in works if work.seat.apart]
        for seat in apart:
            seat.fetch()
        with torch.no_grad():
            trained, fixed = tensors(
                self.arena.plan, self.arena.of(rows_at([work.seat.row for work in works]))
            )
            together = [_together(column) for column in zip(*(work.inputs for work in works), strict=True)]
            if len(works) < FEW:
                for i, work in enumerate(works):
                    own = ({name: p[i] for name, p in part.items()} for part in (trained, fixed))
                    outputs = self.function(*own, *work.inputs)
                    watching.known(work.outs, list(outputs))
                return
            dims = (0, 0, *(dim for _, dim in together))
            if dims not in self._calls:
                self._calls[dims] = of_rows(self.objective.model, self.function, dims)
            outputs = self._calls[dims](trained, fixed, *(each for each, _ in together))
        _tell(works, outputs)


def _together(column: Sequence[Any]) -> tuple[Any, int | None]:
    """Return one input of all rows, and along which dimension they differ: None, as a rule: all look at the same."""
    first = column[0]
    if not isinstance(first, Tensor):
        return first, None
    if all(each is first or _same_memory(each, first) for each in column):
        return first, None
    return torch.stack(list(column)), 0


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.shape == other.shape
