"""Models that train over columns: the models of all ranks are rows of one tensor.

Each rank has the model, optimizer and batches that an ordinary program would create, but no stack. Between two turns
of the policy, a chunk of ranks makes all its steps in succession while its rows are in the cache.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spawnsim.columnar import exchange
from spawnsim.columnar.models import Models
from spawnsim.columnar.program import (
    Generators,
    built,
    errors_of,
    generators_kept,
    in_words,
    kind_of,
    name_of,
    refused,
    rows_of,
    seat_of,
    version,
)
from spawnsim.columnar.rows import WEIGHTS, Members, at
from spawnsim.errors import ParameterError, UnsupportedError, UsageError
from spawnsim.models.network.cost import Floats
from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    OuterOptimizerPolicy,
    SpawnPolicy,
)
from spawnsim.policies.rules.donors import Decision
from spawnsim.policies.state.layout import Layout, StateScope, collect
from spawnsim.random import WORLD, Streams, seeded
from spawnsim.record.recorder import document
from spawnsim.training import checks
from spawnsim.training.checks import EVERY, Reference
from spawnsim.training.execution import FIRST
from spawnsim.training.grouping import Ungroupable
from spawnsim.training.optimizers import STEP
from spawnsim.training.seats import Seat
from spawnsim.training.vmapped import Outcome, Tensors, Vmapped, as_outputs, clip, rows_at_once
from spawnsim.virtual.digest import checksum

Build = Callable[[Streams], tuple[nn.Module, torch.optim.Optimizer]]
Data = Callable[[Streams, int, int], Iterable[Any]]
Score = Callable[[nn.Module], Tensor]
# Columns of a run's rows: a score with one of these names becomes "score".
COLUMNS = {
    "rank", "time_s", "iteration", "local_metric", "compute_s", "wait_s", "is_replaced", "donors", "loss",
}  # fmt: skip
ENDED = object()
TENSORS = {Tensor}


@dataclass
class Training:
    """How models train: functions that an ordinary program can call as well.

    Args:
        build: maps a rank's streams (`comm.rng`) to a model and its optimizer (SGD, Adam or AdamW of torch).
        loss: maps a model and a batch to a scalar, as for `TrainingStep`.
        data: maps a rank's streams, the rank and the number of ranks to endless batches: tuples of tensors, whose
            shapes are the same for all ranks in an iteration. It draws from the streams.
        score: maps a model to the scalar that each rank reports; None: minus the loss of the latest batch.
        max_norm: the norm to which gradients are clipped; None: no clipping.
        schedule: maps an iteration to a factor of the learning rates, as for torch's `LambdaLR`; None: 1.

    Raises:
        ParameterError: an argument is not a function, or `max_norm` is not above 0.
    """

    build: Build
    loss: Callable[..., Any]
    data: Data
    score: Score | None = None
    max_norm: float | None = None
    schedule: Callable[[int], float] | None = None
    _trained: Trained | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("build", "loss", "data"):
            if not callable(getattr(self, name)):
                raise ParameterError(f"{name}={getattr(self, name)!r}: give a function")
        for name in ("score", "schedule"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ParameterError(f"{name}={value!r}: give a function, or None")
        norm: Any = self.max_norm
        if norm is not None and not (isinstance(norm, (int, float)) and norm > 0):
            raise ParameterError(f"max_norm={norm!r}: give a number above 0, or None")

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_trained": None}  # a copy has not been run

    def model(self, rank: int | None = None) -> nn.Module:
        """Return a copy of a rank's model, from the current run (within `on_round`) or the latest one.

        Args:
            rank: the rank; None: the mean of the models of all living ranks.

        Raises:
            UsageError: no run has begun.
            ParameterError: there is no such rank.
        """
        if self._trained is None:
            raise UsageError("Training.model: no run has begun with it")
        return self._trained.model(rank)


class Trained(Models):
    """The models of a run.

    Args:
        how: how they train.
        ranks: number of ranks.
        seed: seed of the run.
        policy: policy of the run.

    Attributes:
        nbytes: size of the part of one model that travels.

    Raises:
        UnsupportedError: models, optimizers, the score, or the policy with such models have no form over columns.
    """

    def __init__(self, how: Training, ranks: int, seed: int, policy: SpawnPolicy) -> None:
        exchange.check_policy(policy)
        if torch._C._is_any_autocast_enabled():
            raise UnsupportedError("columnar: models train in their own dtype: leave the autocast block")
        # A weak reference avoids a cycle: the memory of a run is freed with the last reference to its `Training`.
        self._holder, self._how = weakref.ref(how), copy.copy(how)
        self._ranks, self._seed = ranks, seed
        self._members = np.arange(ranks)  # the living ranks
        self._losses, self._scores = np.full(ranks, np.nan), np.full(ranks, np.nan)
        self._scored = False  # whether scores are newer than the last step
        self._steps: dict[Any, Vmapped] = {}
        self._generators = Generators(Streams(seed, WORLD))
        with torch.inference_mode(False), torch.enable_grad():
            self._pattern, self._optimizer = self._begin()
            self._chunk = rows_at_once(self._seat.parameters)
            self._score = self._open_score()
        groups = self._optimizer.param_groups
        self._settings = tuple([self._rows.rule.settings(group) for group in groups])
        self.nbytes = self._nbytes_of(policy)
        self.whole_nbytes = Layout.of(collect(self._pattern, None, StateScope())).nbytes

    def _begin(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Build the models of all ranks, and copy their weights to rows; return the first model and its optimizer."""
        first: tuple[nn.Module, torch.optim.Optimizer] | None = None
        self._rates: list[tuple[float, ...]] = []
        self._data: list[Iterator[Any]] = []
        how, kind = self._how, None
        for rank in range(self._ranks):
            streams = Streams(self._seed, rank)
            with generators_kept(), seeded(streams):
                with errors_of(how.build, rank):
                    model, optimizer = built(how.build(streams), rank)
                with errors_of(how.data, rank):
                    self._data.append(iter(how.data(streams, rank, self._ranks)))
            seat = seat_of(model, optimizer, rank)
            own = kind_of(seat)
            if first is None:
                first, kind, self._seat = (model, optimizer), own, seat
                self._rows = rows_of(seat, self._ranks)
            if own != kind:
                raise UnsupportedError(
                    f"columnar: the model or optimizer of rank {rank} differs from those of rank 0 in more "
                    "than weights and learning rates: run it on virtual ranks, which form groups"
                )
            named = dict(model.named_parameters())
            for place in self._rows.plan.places:
                self._rows.of[WEIGHTS][rank, place.columns] = named[place.name].detach().flatten()
            self._rates.append(tuple(float(group["lr"]) for group in optimizer.param_groups))
        assert first is not None
        return first

    def _nbytes_of(self, policy: SpawnPolicy) -> int:
        """Return the size in bytes of the part of one model that travels."""
        travels, rows = exchange.travels_of(policy), self._rows
        given = collect(self._pattern, None, travels)
        for place in rows.plan.trained if travels.with_optimizer else ():
            for name in rows.rule.states(self._settings[place.group]):
                given[f"{name} of {place.name}"] = rows.of[name].new_empty(place.shape)
            if STEP in rows.of:
                given[f"{STEP} of {place.name}"] = rows.of[STEP].new_empty(())
        # Sums run over the tensors themselves; a message has a layout that aligns each dtype to a cache line.
        if isinstance(policy, (AverageAllPolicy, OuterOptimizerPolicy)):
            return sum(each.nbytes for each in given.values())
        return Layout.of(given).nbytes

    # ------------------------------------------------------------------------------------------------- training
    def train(self, first: int, count: int, members: Members) -> None:
        self._members, self._scored = np.arange(self._ranks)[members], False
        if (how := self._holder()) is not None:
            how._trained = self
        chunk, iterations = self._chunk, range(first, first + count)
        ranks = self._members.tolist()
        # Batches should draw from the rank's streams; with these generators, other draws are reproducible as well.
        with self._generators.in_place(), torch.inference_mode(False), torch.enable_grad():
            for begin in range(0, len(ranks), chunk):
                for iteration in iterations:
                    self._step(ranks[begin : begin + chunk], iteration)

    def _step(self, ranks: list[int], iteration: int) -> None:
        """Make one step of some ranks."""
        staged, rates = self._staged(ranks, iteration), self._rates_of(ranks, iteration)
        step = self._step_for([each[0] for each in staged])
        begin, count = 0, len(ranks)
        while begin < count:  # as many rows as memory allows, which may decrease meanwhile
            part = slice(begin, begin + self._chunk)
            inputs = [each[part] for each in staged]
            try:
                outcome = self._outcome(step, ranks[part], inputs)
            except torch.cuda.OutOfMemoryError:
                if self._chunk == 1:
                    raise
                self._chunk = -(-min(self._chunk, count) // 2)
                torch.cuda.empty_cache()
                continue
            if begin == 0 and (iteration < FIRST or iteration % EVERY == 0):
                self._check(step, outcome, ranks[part], iteration=iteration, inputs=inputs)
            with torch.no_grad():
                if self._how.max_norm is not None:
                    clip(outcome.gradients, self._how.max_norm)
                gradient = torch.cat([each.flatten(1) for each in outcome.gradients], 1)
                self._rows.update(ranks[part], gradient, rates[part], self._settings)
            self._losses[ranks[part]] = outcome.outputs[0].double().cpu().numpy()
            begin += len(ranks[part])

    def _outcome(self, step: Vmapped, ranks: list[int], inputs: Sequence[Tensor]) -> Outcome:
        rows = self._tensors(self._rows.of[WEIGHTS][at(ranks)], inputs)
        return step.rows(rows, [0] * len(inputs))

    def _tensors(self, weights: Tensor, inputs: Sequence[Tensor] = ()) -> Tensors:
        plan, seat = self._rows.plan, self._seat
        buffers = [seat.buffer(number) for number in range(len(seat.buffers))]
        return Tensors(
            [place.of(weights) for place in plan.trained],
            [place.of(weights) for place in plan.fixed],
            [each.expand(len(weights), *each.shape) for each in buffers],
            (),
            inputs,
        )

    def _check(
        self,
        step: Vmapped,
        outcome: Outcome,
        ranks: Sequence[int],
        *,
        iteration: int,
        inputs: Sequence[Tensor],
    ) -> None:
        """Compare one row with the same step executed alone; each check takes the next row."""
        row = iteration // EVERY % len(ranks)
        model, own = self._of_rank(ranks[row]), [each[row] for each in inputs]
        reference = Reference(
            self._how.loss, model, seat_of(model, self._optimizer_of(model), ranks[row]), own
        )
        names = [place.name for place in self._rows.plan.trained]
        rows = self._tensors(
            self._rows.of[WEIGHTS][ranks[row] : ranks[row] + 1], [each[None] for each in own]
        )
        alone = Tensors(*([each[0] for each in part] for part in rows))
        order = [self._seat.names.index(name) for name in names]
        ordered = reference.outcome._replace(
            gradients=[reference.outcome.gradients[place] for place in order]
        )
        what = checks.mismatch(step, alone, checks.row_of(outcome, row), alone=ordered, names=names)
        if what:
            raise UsageError(
                f"columnar: rank {ranks[row]}, iteration {iteration}: {what}. {name_of(self._how.loss)} may depend on "
                "the model, its arguments and constants alone: yield a value that changes with the batch"
            )

    def _optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer for a copy of the pattern, with the settings of the pattern's optimizer."""
        groups, named = self._optimizer.param_groups, dict(model.named_parameters())
        names = {id(p): name for name, p in self._pattern.named_parameters()}
        kind: Any = type(self._optimizer)
        made: torch.optim.Optimizer = kind(
            [{**group, "params": [named[names[id(p)]] for p in group["params"]]} for group in groups]
        )
        return made

    def _step_for(self, inputs: Sequence[Tensor]) -> Vmapped:
        """Return the step for inputs of these shapes and dtypes."""
        key = tuple([(each.shape, each.dtype) for each in inputs])
        if key not in self._steps:
            self._steps[key] = self._open(inputs)
        return self._steps[key]

    def _rates_of(self, ranks: Sequence[int], iteration: int) -> list[tuple[float, ...]]:
        rates = [self._rates[rank] for rank in ranks]
        if self._how.schedule is None:
            return rates
        with errors_of(self._how.schedule, iteration=iteration):
            factor = float(self._how.schedule(iteration))
        return [tuple([factor * each for each in own]) for own in rates]

    def _staged(self, ranks: Sequence[int], iteration: int) -> list[Tensor]:
        """Return the next batches of some ranks, stacked: one tensor (ranks, ...) for each input."""
        batches, versions = [], []
        with errors_of(self._how.data, iteration=iteration) as about:
            for rank in ranks:
                about.rank = rank
                batch = next(self._data[rank], ENDED)
                if type(batch) is not tuple or not TENSORS.issuperset(map(type, batch)):  # rare
                    batch = _as_tensors(batch, rank, iteration)
                batches.append(batch)
                versions.append([*map(version, batch)])
        changed = [
            rank
            for rank, batch, before in zip(ranks, batches, versions, strict=True)
            if [*map(version, batch)] != before
        ]
        if changed:
            raise UsageError(
                f"columnar: the batch of rank {changed[0]} in iteration {iteration} was overwritten while the "
                "batches of other ranks were drawn: yield tensors that ranks do not share"
            )
        try:
            return [torch.stack(column).detach() for column in zip(*batches, strict=True)]
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"columnar: the batches of ranks {ranks[0]} to {ranks[-1]} in iteration {iteration} are not all "
                f"tensors of the same number and shapes: {error}"
            ) from error

    def _open(self, inputs: Sequence[Tensor]) -> Vmapped:
        """Return a new step for inputs of these shapes; raise an error with the reason if it cannot be vectorized."""
        how, model = self._how, self._of_rank(0)
        name = name_of(how.loss)
        with errors_of(how.loss):  # raise the program's own errors before vmap refuses the function
            loss: Any = as_outputs(how.loss(model, *[each.clone() for each in inputs]))[0]
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            raise UsageError(
                f"columnar: {name} returned {in_words(loss)}: return a tensor without dimensions that depends on the "
                "model's weights"
            )
        with refused(name):
            self._require_pure(seat_of(model, self._optimizer_of(model), 0), how.loss, inputs)
            step = Vmapped(self._pattern, how.loss, [place.name for place in self._rows.plan.trained])
            self._outcome(step, [0], [each[None] for each in inputs])
        return step

    @staticmethod
    def _require_pure(seat: Seat, function: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        """Raise `Ungroupable` if a function draws random numbers, or changes the model."""
        reference = Reference(function, seat.module(), seat, inputs)
        if reference.masks or reference.draws():
            raise Ungroupable("it draws random numbers")
        if reference.changed:
            raise Ungroupable("its forward pass changes buffers, as BatchNorm does")

    # -------------------------------------------------------------------------------------------------- judging
    def metrics(self, iteration: int) -> Floats:
        return -self._losses if self._how.score is None else self._evaluated().copy()

    def columns(self) -> dict[str, Floats]:
        losses, score = {"loss": self._losses}, self._how.score
        if score is None:
            return losses
        name = name_of(score)
        return losses | {name if name.isidentifier() and name not in COLUMNS else "score": self._evaluated()}

    def _open_score(self) -> Vmapped | None:
        """Return the score of many models; raise an error with the reason if it cannot be vectorized."""
        score = self._how.score
        if score is None:
            return None
        model = self._of_rank(0)
        with errors_of(score), torch.no_grad():
            found = as_outputs(score(copy.deepcopy(model)))
        value: Any = found[0]
        if len(found) > 1 or not isinstance(value, Tensor) or value.dim():
            what = "several values" if len(found) > 1 else in_words(value)
            raise UsageError(
                f"columnar: {name_of(score)} returned {what}: return a tensor without dimensions"
            )
        with refused(name_of(score)):
            self._require_pure(Seat(model, None), score, ())
            found_of_rows = Vmapped(self._pattern, score, ())
            self._scored_rows(found_of_rows, slice(0, 1))
        return found_of_rows

    def _scored_rows(self, score: Vmapped, rows: slice) -> Tensor:
        own = self._tensors(self._rows.of[WEIGHTS][rows])
        places = self._rows.plan.places
        named = {place.name: each for place, each in zip(places, [*own.trained, *own.fixed], strict=True)}
        fixed = [named[name] for name, _ in self._pattern.named_parameters()]
        return score.rows(Tensors((), fixed, own.buffers, (), ()), ()).outputs[0]

    def _evaluated(self) -> Floats:
        if self._scored:
            return self._scores
        assert self._score is not None
        begin = 0
        with torch.inference_mode(False), torch.no_grad():
            while begin < self._ranks:
                rows = slice(begin, min(begin + self._chunk, self._ranks))
                try:
                    found = self._scored_rows(self._score, rows)
                except torch.cuda.OutOfMemoryError:
                    if self._chunk == 1:
                        raise
                    self._chunk = -(-(rows.stop - begin) // 2)
                    torch.cuda.empty_cache()
                    continue
                self._scores[rows] = found.double().cpu().numpy()
                begin = rows.stop
        self._scored = True
        return self._scores

    # ------------------------------------------------------------------------------------------------- exchange
    def are_equal(self, members: Members, policy: AverageAllPolicy) -> bool:
        return exchange.are_equal(self._rows, members, policy)

    def average(self, members: Members, policy: AverageAllPolicy, *, equal: bool) -> None:
        exchange.average(self._rows, members, policy, equal=equal)

    def replace(self, decision: Decision, policy: AsyncSelectiveAveragingPolicy) -> None:
        exchange.replace(self._rows, decision, policy)

    def begin_together(self, members: Members, policy: OuterOptimizerPolicy) -> None:
        self._outer = exchange.begin_together(self._rows, members, policy)

    def step_together(self, members: Members, policy: OuterOptimizerPolicy, iteration: int) -> None:
        ranks = np.arange(self._ranks)[members].tolist()
        rates = {own[0] for own in self._rates_of(ranks, iteration)} if policy.inner_lr else {1.0}
        if len(rates) > 1:
            raise UsageError(
                f"columnar: {type(policy).__name__} with inner_lr, and ranks whose learning rates differ: "
                "each would have its own global weights"
            )
        exchange.step_together(self._rows, members, policy, outer=self._outer, scale=rates.pop())

    # -------------------------------------------------------------------------------------------------- looking
    def model(self, rank: int | None) -> nn.Module:
        """Return a copy of a rank's model; None: a model with the mean weights of all living ranks."""
        if rank is not None and not (type(rank) is int and 0 <= rank < self._ranks):
            raise ParameterError(f"rank={rank!r}: there are {self._ranks}, numbered from 0")
        weights = self._rows.of[WEIGHTS]
        if rank is None:
            return self._filled(weights[at(self._members.tolist())].mean(0))
        return self._of_rank(rank)

    def _of_rank(self, rank: int) -> nn.Module:
        return self._filled(self._rows.of[WEIGHTS][rank])

    def _filled(self, row: Tensor) -> nn.Module:
        """Return a copy of the first model with the weights of a row."""
        model = copy.deepcopy(self._pattern)
        named = dict(model.named_parameters())
        with torch.no_grad():
            for place in self._rows.plan.places:
                named[place.name].copy_(row[place.columns].view(place.shape))
        return model

    def checksum(self) -> int:
        return checksum([self._rows.of[WEIGHTS].cpu().numpy(), self._losses])

    def described(self) -> dict[str, Any]:
        return {"training": document(self._how)}


def _as_tensors(batch: Any, rank: int, iteration: int) -> tuple[Tensor, ...]:
    """Return a batch of tensors as a tuple; raise `UsageError` for any other batch."""
    if batch is ENDED:
        raise UsageError(
            f"columnar: the batches of rank {rank} ended before iteration {iteration}: let "
            "data(rng, rank, size) yield batches without end, as itertools.cycle does"
        )
    found = (batch,) if isinstance(batch, Tensor) else batch
    if not isinstance(found, (tuple, list)) or not all(isinstance(each, Tensor) for each in found):
        raise UsageError(
            f"columnar: the batch of rank {rank} in iteration {iteration} is {in_words(batch)}: yield a tensor, or "
            "a tuple of tensors"
        )
    return tuple(found)
