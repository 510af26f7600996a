"""Models that train over columns: those of all ranks as rows of one tensor.

Each rank has its own model, optimizer and batches, as an ordinary program would make them, and no stack: between two
turns of the policy the steps of a chunk of ranks follow each other while its rows are in the cache.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from spawnsim.columnar import exchange
from spawnsim.columnar.decisions import Decision, Members
from spawnsim.columnar.models import Models
from spawnsim.columnar.program import (
    Generators,
    arena_of,
    built,
    generators_kept,
    in_words,
    kind_of,
    name_of,
    refused,
    told_of,
    version,
)
from spawnsim.errors import ParameterError, UnsupportedError, UsageError
from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    OuterOptimizerPolicy,
    SpawnPolicy,
)
from spawnsim.policies.state.layout import Layout, StateScope, collect
from spawnsim.random import WORLD, Streams, seeded
from spawnsim.record.recorder import document
from spawnsim.training import structure
from spawnsim.training.arena import STEP, Arena
from spawnsim.training.objective import Objective, of_row, of_rows, tensors, trial
from spawnsim.training.row_step import RowStep, chunk_of, fewer, rows_at
from spawnsim.training.settings import Settings
from spawnsim.training.threads import Threads
from spawnsim.virtual.digest import checksum
from spawnsim.virtual.network.cost import Floats

Build = Callable[[Streams], tuple[nn.Module, torch.optim.Optimizer]]
Data = Callable[[Streams, int, int], Iterable[Any]]
Score = Callable[[nn.Module], Tensor]
# Of a run's rows: no score is called so.
COLUMNS = {
    "rank", "time_s", "iteration", "local_metric", "compute_s", "wait_s", "is_replaced", "donors", "loss",
}  # fmt: skip
ENDED = object()
TENSORS = {Tensor}


@dataclass
class Training:
    """How models train: three functions, of which an ordinary program calls the same.

    Args:
        build: from a rank's streams (`comm.rng`) to a model and its optimizer (SGD, Adam, AdamW of torch).
        loss: from a model and a batch to a scalar, as for `TrainingStep`.
        data: from a rank's streams, the rank and how many there are to its batches, without end: tuples of tensors,
            whose shapes are the same for all ranks in an iteration. It draws from the streams.
        score: what each rank reports, from a model to a scalar; None: minus the loss of the latest batch.
        max_norm: the norm to which gradients are clipped; None: not.
        schedule: from an iteration to what learning rates are multiplied by, as for torch's `LambdaLR`; None: 1.

    Raises:
        ParameterError: one of them is no function, or `max_norm` not above 0.
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
        """Return a copy of a rank's model, in the run that goes on (within `on_round`) or was the last.

        Args:
            rank: whose; None: the mean of the models of all ranks that are alive.

        Raises:
            UsageError: nothing has been run.
            ParameterError: there is no such rank.
        """
        if self._trained is None:
            raise UsageError("Training.model: no run has begun with it")
        return self._trained.model(rank)


class _Given(NamedTuple):
    """A step of some ranks: their batches, by input, their learning rates, and how it is computed."""

    ranks: list[int]
    staged: list[Tensor]
    rates: list[tuple[float, ...]]
    step: RowStep

    def part(self, rows: slice) -> _Given:
        """Return that of some of the ranks."""
        return _Given(self.ranks[rows], [each[rows] for each in self.staged], self.rates[rows], self.step)


class Trained(Models):
    """The models of a run.

    Args:
        how: they train.
        ranks: how many.
        seed: of the run.
        policy: of the run.

    Attributes:
        nbytes: of what travels of one model.

    Raises:
        UnsupportedError: models, optimizers or the score have no form over columns, or the policy none with them.
    """

    def __init__(self, how: Training, ranks: int, seed: int, policy: SpawnPolicy) -> None:
        exchange.check_policy(policy)
        if torch._C._is_any_autocast_enabled():
            raise UnsupportedError("columnar: models train in their own dtype: leave the autocast block")
        # No cycle: the memory of a run is free as soon as nobody has its `Training`.
        self._holder, self._how = weakref.ref(how), copy.copy(how)
        self._ranks, self._seed = ranks, seed
        self._members = np.arange(ranks)  # who is alive
        self._losses, self._scores = np.full(ranks, np.nan), np.full(ranks, np.nan)
        self._scored = False  # since the last step
        self._steps: dict[Any, RowStep] = {}
        self._generators = Generators(Streams(seed, WORLD))
        with torch.inference_mode(False), torch.enable_grad():
            self._pattern, optimizer = self._begin()
            self._chunk = chunk_of(self._arena)  # rows that are computed at once
            self._of_loss = self._settings_of(how.loss)
            self._score = self._open_score()
        self._settings = tuple([self._arena.rule.settings(group) for group in optimizer.param_groups])
        self.nbytes = self._nbytes_of(policy)
        self.whole_nbytes = Layout.of(collect(self._pattern, None, StateScope())).nbytes

    def _begin(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Build all ranks' models, and keep their values in rows; return the first, and its optimizer."""
        first: tuple[nn.Module, torch.optim.Optimizer] | None = None
        self._rates: list[tuple[float, ...]] = []
        self._data: list[Iterator[Any]] = []
        how, kind = self._how, None
        for rank in range(self._ranks):
            streams = Streams(self._seed, rank)
            with generators_kept(), seeded(streams):
                with told_of(how.build, rank):
                    model, optimizer = built(how.build(streams), rank)
                with told_of(how.data, rank):
                    self._data.append(iter(how.data(streams, rank, self._ranks)))
            own = kind_of(model, optimizer, rank)
            if first is None:
                first, kind = (model, optimizer), own
                self._arena = arena_of(model, optimizer, self._ranks)
            if own != kind:
                raise UnsupportedError(
                    f"columnar: the model or optimizer of rank {rank} differs from that of rank 0 in more than weights "
                    "and learning rates: run it on virtual ranks, which form groups"
                )
            named = dict(model.named_parameters())
            for place in self._arena.plan.places:
                self._arena.rows["weights"][rank, place.columns] = named[place.name].detach().flatten()
            self._rates.append(tuple(float(group["lr"]) for group in optimizer.param_groups))
        assert first is not None
        return first

    def _nbytes_of(self, policy: SpawnPolicy) -> int:
        """Return the bytes of what travels of one model."""
        travels, arena = exchange.travels_of(policy), self._arena
        given = collect(self._pattern, None, travels)
        for place in arena.plan.trained if travels.with_optimizer else ():
            for name in arena.rule.states(self._settings[place.group]):
                given[f"{name} of {place.name}"] = arena.rows[name].new_empty(place.shape)
            if STEP in arena.rows:
                given[f"{STEP} of {place.name}"] = arena.rows[STEP].new_empty(())
        # Sums are of the tensors; a message is laid out, each dtype on a cache line.
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
        chunks = [ranks[begin : begin + chunk] for begin in range(0, len(ranks), chunk)]
        # Batches are to be drawn from the rank's streams; what draws otherwise does the same each time, too.
        with self._generators.in_place(), torch.inference_mode(False), torch.enable_grad():
            # A GPU computes all rows of a chunk at once by itself.
            if torch.get_num_threads() > 1 and len(chunks) > 1 and self._arena.rows["weights"].is_cpu:
                self._train_side_by_side(chunks, iterations)
                return
            for ranks in chunks:
                for iteration in iterations:
                    given = self._given(ranks, iteration)
                    with given.step.traced.repeating():
                        self._compute(given)

    def _train_side_by_side(self, chunks: Sequence[list[int]], iterations: range) -> None:
        """Compute chunks at the same time: batches of all are drawn first, in this thread."""
        with closing(Threads(torch.get_num_threads())) as threads:
            for iteration in iterations:
                given = [self._given(ranks, iteration) for ranks in chunks]
                with ExitStack() as repeating:
                    for step in {id(each.step): each.step for each in given}.values():
                        repeating.enter_context(step.traced.repeating())
                    # What is not repeated from a record may be anything of Python's.
                    ready = [each.step.traced.ready(len(each.ranks)) for each in given]
                    for each in compress(given, [not is_so for is_so in ready]):
                        self._compute(each)
                    threads.map(self._compute, [*compress(given, ready)])

    def _given(self, ranks: list[int], iteration: int) -> _Given:
        """Return what a step of some ranks is given: all that the program's functions have a part in."""
        staged, rates = self._staged(ranks, iteration), self._rates_of(ranks, iteration)
        return _Given(ranks, staged, rates, self._step_for(staged))

    def _compute(self, given: _Given) -> None:
        begin, count = 0, len(given.ranks)
        while begin < count:  # so many at a time as there is memory for, which may become less meanwhile
            part = given.part(slice(begin, begin + self._chunk)) if count > self._chunk else given
            at = rows_at(part.ranks)
            try:
                gradient, losses, *_ = part.step.differentiate(self._arena.of(at), part.staged)
            except torch.cuda.OutOfMemoryError:
                if len(part.ranks) == 1:
                    raise
                self._chunk = fewer(len(part.ranks))
                continue  # out of this block, in which the error keeps what was in memory
            with torch.no_grad():
                part.step.update(at, gradient, part.rates, self._settings)
            self._losses[part.ranks] = losses.double().cpu().numpy()
            begin += len(part.ranks)

    def _step_for(self, staged: Sequence[Tensor]) -> RowStep:
        """Return the step for inputs of one kind, and for what the loss reads now."""
        if not self._of_loss.unchanged():
            self._of_loss = self._settings_of(self._how.loss)
        key = (self._of_loss.key, *[(each.shape[1:], each.dtype) for each in staged])
        if key not in self._steps:
            self._steps[key] = self._open([each[0] for each in staged])
        return self._steps[key]

    def _rates_of(self, ranks: Sequence[int], iteration: int) -> list[tuple[float, ...]]:
        rates = [self._rates[rank] for rank in ranks]
        if self._how.schedule is None:
            return rates
        with told_of(self._how.schedule, iteration=iteration):
            factor = float(self._how.schedule(iteration))
        return [tuple([factor * each for each in own]) for own in rates]

    def _staged(self, ranks: Sequence[int], iteration: int) -> list[Tensor]:
        """Return the next batch of some ranks: by input, (ranks, ...)."""
        batches, versions = [], []
        with told_of(self._how.data, iteration=iteration) as about:
            for rank in ranks:
                about.rank = rank
                batch = next(self._data[rank], ENDED)
                if type(batch) is not tuple or not TENSORS.issuperset(map(type, batch)):  # as nearly all are
                    batch = _as_tensors(batch, rank, iteration)
                batches.append(batch)
                versions.append([*map(version, batch)])
        changed = [
            rank
            for rank, batch, told in zip(ranks, batches, versions, strict=True)
            if [*map(version, batch)] != told
        ]
        if changed:
            raise UsageError(
                f"columnar: the batch of rank {changed[0]} in iteration {iteration} was overwritten while those of "
                "other ranks were drawn: yield tensors that they do not share"
            )
        try:
            return [torch.stack(column).detach() for column in zip(*batches, strict=True)]
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"columnar: the batches of ranks {ranks[0]} to {ranks[-1]} in iteration {iteration} are not all "
                f"tensors of the same number and shapes: {error}"
            ) from error

    def _open(self, inputs: Sequence[Tensor]) -> RowStep:
        """Return a step for inputs of one kind; say what vmap has against it."""
        how, arena = self._how, self._arena
        name = name_of(how.loss)
        objective = Objective(self._pattern, how.loss, self._of_loss)
        step = RowStep(arena, objective, max_norm=how.max_norm)
        with told_of(how.loss):  # the program's own errors, before what vmap has against it
            _, found = of_row(arena.plan, objective, _copied(arena), inputs)
        loss: Any = found[0]
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            raise UsageError(
                f"columnar: {name} returned {in_words(loss)}: return a tensor without dimensions that depends on the "
                "model's weights"
            )
        with refused(name):
            trial(objective, arena, step.gradient, inputs)
        unused = step.open(slice(0, 1), inputs)
        if unused:
            raise UnsupportedError(
                f"columnar: {name} does not depend on {unused}: leave it out of the optimizer, and let it require no "
                "gradient"
            )
        return step

    def _settings_of(self, function: Callable[..., Any]) -> Settings:
        try:
            return Settings(function, self._pattern)
        except structure.Unequal as why:
            raise UnsupportedError(f"columnar: {name_of(function)} has no form over columns: {why}") from why

    # -------------------------------------------------------------------------------------------------- judging
    def metrics(self, iteration: int) -> Floats:
        return -self._losses if self._how.score is None else self._evaluated().copy()

    def columns(self) -> dict[str, Floats]:
        losses, score = {"loss": self._losses}, self._how.score
        if score is None:
            return losses
        name = name_of(score)
        return losses | {name if name.isidentifier() and name not in COLUMNS else "score": self._evaluated()}

    def _open_score(self) -> tuple[Settings, Callable[..., Any]] | None:
        """Return the score as a function of rows, with what it reads; say what vmap has against it."""
        score, arena = self._how.score, self._arena
        if score is None:
            return None
        settings = self._settings_of(score)
        objective = Objective(self._pattern, score, settings)
        with told_of(score), torch.no_grad():
            _, found = of_row(arena.plan, objective, _copied(arena), ())
        value: Any = found[0]
        if len(found) > 1 or not isinstance(value, Tensor) or value.dim():
            what = "several values" if len(found) > 1 else in_words(value)
            raise UsageError(
                f"columnar: {name_of(score)} returned {what}: return a tensor without dimensions"
            )

        def outcome(trained: Any, fixed: Any) -> Tensor:
            return objective.outputs(trained, fixed, ())[0]

        with refused(name_of(score)), torch.no_grad():
            trial(objective, arena, outcome, (), trains=False)
        return settings, of_rows(objective.model, outcome, (0, 0))

    def _evaluated(self) -> Floats:
        if self._scored:
            return self._scores
        assert self._score is not None
        if not self._score[0].unchanged():
            self._score = self._open_score()
            assert self._score is not None
        begin = 0
        with torch.inference_mode(False), torch.no_grad():
            while begin < self._ranks:
                at = slice(begin, min(begin + self._chunk, self._ranks))
                try:
                    found = self._score[1](*tensors(self._arena.plan, self._arena.of(at)))
                except torch.cuda.OutOfMemoryError:
                    if at.stop - at.start == 1:
                        raise
                    self._chunk = fewer(at.stop - at.start)
                    continue
                self._scores[at] = found.double().cpu().numpy()
                begin = at.stop
        self._scored = True
        return self._scores

    # ------------------------------------------------------------------------------------------------- exchange
    def are_equal(self, members: Members, policy: AverageAllPolicy) -> bool:
        return exchange.are_equal(self._arena, members, policy)

    def average(self, members: Members, policy: AverageAllPolicy, *, equal: bool) -> None:
        exchange.average(self._arena, members, policy, equal=equal)

    def replace(self, decision: Decision, policy: AsyncSelectiveAveragingPolicy) -> None:
        exchange.replace(self._arena, decision, policy)

    def begin_together(self, members: Members, policy: OuterOptimizerPolicy) -> None:
        self._outer = exchange.begin_together(self._arena, members, policy)

    def step_together(self, members: Members, policy: OuterOptimizerPolicy, iteration: int) -> None:
        ranks = np.arange(self._ranks)[members].tolist()
        rates = {own[0] for own in self._rates_of(ranks, iteration)} if policy.inner_lr else {1.0}
        if len(rates) > 1:
            raise UsageError(
                f"columnar: {type(policy).__name__} with inner_lr, and ranks whose learning rates differ: each would "
                "have global weights of its own"
            )
        exchange.step_together(self._arena, members, policy, outer=self._outer, scale=rates.pop())

    # -------------------------------------------------------------------------------------------------- looking
    def model(self, rank: int | None) -> nn.Module:
        """Return a copy of a rank's model; None: with the mean of those that are alive."""
        if rank is not None and not (type(rank) is int and 0 <= rank < self._ranks):
            raise ParameterError(f"rank={rank!r}: there are {self._ranks}, numbered from 0")
        weights = self._arena.rows["weights"]
        row = weights[rows_at(self._members.tolist())].mean(0) if rank is None else weights[rank]
        model = copy.deepcopy(self._pattern)
        named = dict(model.named_parameters())
        with torch.no_grad():
            for place in self._arena.plan.places:
                named[place.name].copy_(row[place.columns].view(place.shape))
        return model

    def checksum(self) -> int:
        return checksum([self._arena.rows["weights"].cpu().numpy(), self._losses])

    def described(self) -> dict[str, Any]:
        return {"training": document(self._how)}


def _as_tensors(batch: Any, rank: int, iteration: int) -> tuple[Tensor, ...]:
    """Return a batch as a tuple, if it is one of tensors."""
    if batch is ENDED:
        raise UsageError(
            f"columnar: the batches of rank {rank} have come to their end before iteration {iteration}: let "
            "data(rng, rank, size) go on without end, as itertools.cycle does"
        )
    found = (batch,) if isinstance(batch, Tensor) else batch
    if not isinstance(found, (tuple, list)) or not all(isinstance(each, Tensor) for each in found):
        raise UsageError(
            f"columnar: the batch of rank {rank} in iteration {iteration} is {in_words(batch)}: yield a tensor, or "
            "a tuple of tensors"
        )
    return tuple(found)


def _copied(arena: Arena) -> list[Tensor]:
    """Return the first row, as a copy: what is tried may write there."""
    return [each.clone() for each in arena.of(slice(0, 1))]
