"""Models that train over columns: those of all ranks as rows of one tensor.

Each rank has its own model, optimizer and batches, as an ordinary program would make them, and no stack: between two
turns of the policy the steps of a chunk of ranks follow each other while its rows are in the cache.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from spawnsim.columnar.decisions import Decision
from spawnsim.columnar.models import Members, Models
from spawnsim.errors import ParameterError, ProgramError, SpawnsimError, UnsupportedError, UsageError
from spawnsim.policies import AsyncSelectiveAveragingPolicy, AverageAllPolicy, SpawnPolicy
from spawnsim.policies.state.layout import Layout, StateScope, collect
from spawnsim.random import WORLD, Streams, seeded, sequence
from spawnsim.record.recorder import document
from spawnsim.training import structure
from spawnsim.training.arena import STEP, Arena, Plan
from spawnsim.training.functions import Alone
from spawnsim.training.objective import Objective, as_outputs, of_row, of_rows, tensors, trial
from spawnsim.training.row_step import RowStep, chunk_of
from spawnsim.training.settings import Settings
from spawnsim.training.steps import require_alike
from spawnsim.virtual.digest import checksum
from spawnsim.virtual.network.cost import Floats

Build = Callable[[Streams], tuple[nn.Module, torch.optim.Optimizer]]
Data = Callable[[Streams, int, int], Iterable[Any]]
Kind = tuple[tuple[torch.Size, torch.dtype], ...]


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
    score: Callable[[nn.Module], Tensor] | None = None
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
        if self.max_norm is not None and not self.max_norm > 0:
            raise ParameterError(f"max_norm={self.max_norm}: give a number above 0, or None")

    def model(self, rank: int | None = None) -> nn.Module:
        """Return a copy of a rank's model, in the run that goes on (within `on_round`) or was the last.

        Args:
            rank: whose; None: the mean of all ranks' models.

        Raises:
            UsageError: nothing has been run.
            ParameterError: there is no such rank.
        """
        if self._trained is None:
            raise UsageError("Training.model: no run has begun with it")
        return self._trained.model(rank)


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
        UnsupportedError: models, optimizers or the loss have no form over columns, or the policy none with them.
    """

    def __init__(self, how: Training, ranks: int, seed: int, policy: SpawnPolicy) -> None:
        _check_policy(policy)
        self._how, self._ranks, self._seed = how, ranks, seed
        self._losses = np.full(ranks, np.nan)
        self._scores: Floats | None = None
        self._steps: dict[Kind, RowStep] = {}
        self._pattern, optimizer = self._begin()
        self._of_loss = self._settings_of(how.loss)
        self._settings = tuple([self._arena.rule.settings(group) for group in optimizer.param_groups])
        self.nbytes = self._nbytes_of(policy)
        how._trained = self

    def _nbytes_of(self, policy: SpawnPolicy) -> int:
        """Return the bytes of what travels of one model."""
        travels, plan = _travels(policy), self._arena.plan
        tensors = collect(self._pattern, None, travels)
        if travels.with_optimizer:
            for name, rows in self._arena.rows.items():
                shapes = {place.name: (1,) if name == STEP else place.shape for place in plan.trained}
                tensors |= {
                    f"{name} of {of}": rows.new_empty(shape)
                    for of, shape in shapes.items()
                    if name != "weights"
                }
        # An average sums the tensors where they are; a message is laid out, each dtype on a cache line.
        if isinstance(policy, AverageAllPolicy):
            return sum(each.nbytes for each in tensors.values())
        return Layout.of(tensors).nbytes

    def _begin(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Build all ranks' models, and keep their values in rows; return the first, and its optimizer."""
        first: tuple[nn.Module, torch.optim.Optimizer] | None = None
        self._rates: list[tuple[float, ...]] = []
        self._data: list[Iterator[Any]] = []
        kind = None
        with _generators_kept():
            for rank in range(self._ranks):
                streams = Streams(self._seed, rank)
                with seeded(streams), _told(rank, self._how.build):
                    model, optimizer = _built(self._how.build(streams), rank)
                    self._data.append(iter(self._how.data(streams, rank, self._ranks)))
                own = self._kind_of(model, optimizer, rank)
                if first is None:
                    first, kind = (model, optimizer), own
                    self._arena = self._arena_of(model, optimizer)
                if own != kind:
                    raise UnsupportedError(
                        f"columnar: the model or optimizer of rank {rank} differs from that of rank 0 in more than "
                        "weights and learning rates: run it on virtual ranks, which form groups"
                    )
                named = dict(model.named_parameters())
                for place in self._arena.plan.places:
                    self._arena.rows["weights"][rank, place.columns] = named[place.name].detach().flatten()
                self._rates.append(tuple(float(group["lr"]) for group in optimizer.param_groups))
        assert first is not None
        return first

    def _kind_of(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Any:
        """Return what is equal for models that train together."""
        try:
            rule = require_alike(model, optimizer)
            if structure.statistics(model):
                raise Alone("it keeps running statistics, as BatchNorm does")
            if optimizer.state:
                raise Alone("its optimizer has made steps already")
            settings = tuple([rule.settings(group) for group in optimizer.param_groups])
            return Plan(model, optimizer).key(), structure.of_model(model), rule.kind, settings
        except (Alone, structure.Unequal) as why:
            name = type(model).__name__
            raise UnsupportedError(
                f"columnar: the {name} of rank {rank} has no form over columns: {why}; run it on virtual ranks"
            ) from why

    def _arena_of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Arena:
        rule, plan = require_alike(model, optimizer), Plan(model, optimizer)
        if not plan.trained:
            raise UnsupportedError(f"columnar: the optimizer trains no parameter of {type(model).__name__}")
        names = {rule.states(rule.settings(group)): None for group in optimizer.param_groups}
        states = max(names, key=len)
        like = next(model.parameters())
        return Arena(plan, like, rule, states=states, capacity=self._ranks)

    # ------------------------------------------------------------------------------------------------- training
    def train(self, first: int, count: int) -> None:
        self._scores = None
        if not self._of_loss.unchanged():
            self._steps.clear()
            self._of_loss = self._settings_of(self._how.loss)
        chunk = chunk_of(self._arena)
        with _generators_kept():
            # Batches are to be drawn from the rank's streams; what draws otherwise does the same each time, too.
            torch.manual_seed(sequence(self._seed, WORLD, f"columnar.{first}").generate_state(1)[0].item())
            for begin in range(0, self._ranks, chunk):
                rows = range(begin, min(begin + chunk, self._ranks))
                for iteration in range(first, first + count):
                    self._step(rows, iteration)

    def _step(self, rows: range, iteration: int) -> None:
        staged = self._staged(rows, iteration)
        kind = tuple([(each.shape[1:], each.dtype) for each in staged])
        step = self._steps.get(kind)
        if step is None:
            step = self._steps[kind] = self._open([each[0] for each in staged])
        at = slice(rows.start, rows.stop)
        with step.traced.repeating():
            gradient, losses, *_ = step.differentiate(self._arena.of(at), staged)
        with torch.no_grad():
            step.update(at, gradient, self._rates_of(at, iteration), self._settings)
        self._losses[at] = losses.double().cpu().numpy()

    def _rates_of(self, at: slice, iteration: int) -> list[tuple[float, ...]]:
        if self._how.schedule is None:
            return self._rates[at]
        factor = float(self._how.schedule(iteration))
        return [tuple([factor * each for each in rates]) for rates in self._rates[at]]

    def _staged(self, rows: range, iteration: int) -> list[Tensor]:
        """Return the next batch of some ranks: by input, (rows, ...)."""
        batches = []
        for rank in rows:
            with _told(rank, self._how.data, iteration):
                batch = next(self._data[rank], None)
            if batch is None:
                raise UsageError(
                    f"columnar: the batches of rank {rank} have come to their end before iteration {iteration}: "
                    "let data(rng, rank, size) go on without end, as itertools.cycle does"
                )
            batches.append((batch,) if isinstance(batch, Tensor) else tuple(batch))
        try:
            return [torch.stack(column) for column in zip(*batches, strict=True)]
        except (TypeError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"columnar: the batches of ranks {rows.start} to {rows.stop - 1} in iteration {iteration} are not all "
                f"tensors of the same number and shapes: {error}"
            ) from error

    def _open(self, inputs: Sequence[Tensor]) -> RowStep:
        """Return a step for inputs of one kind; say what vmap has against it."""
        name = _name(self._how.loss)
        objective = Objective(self._pattern, self._how.loss, self._of_loss)
        step = RowStep(self._arena, objective, max_norm=self._how.max_norm)
        with _told(0, self._how.loss):  # the program's own errors, before what vmap has against it
            of_row(self._arena.plan, objective, self._arena.of(slice(0, 1)), inputs)
        try:
            trial(objective, self._arena, step.gradient, inputs)
        except Exception as error:  # vmap's refusals are of many classes
            text = f"{error}".splitlines()[0].partition(". ")[0]
            raise UnsupportedError(
                f"columnar: {name} cannot be computed for many models at once: {type(error).__name__}: {text}; run it "
                "on virtual ranks, where such models step alone"
            ) from error
        unused = step.open(slice(0, 1), inputs)
        if unused:
            raise UnsupportedError(
                f"columnar: {name} does not depend on {unused}: exclude it from the optimizer"
            )
        return step

    def _settings_of(self, function: Callable[..., Any]) -> Settings:
        try:
            return Settings(function, self._pattern)
        except structure.Unequal as why:
            raise UnsupportedError(f"columnar: {_name(function)} has no form over columns: {why}") from why

    def metrics(self, iteration: int) -> Floats:
        if self._how.score is None:
            return -self._losses
        return self._scored(self._how.score).copy()

    def _scored(self, score: Callable[[nn.Module], Tensor]) -> Floats:
        if self._scores is not None:
            return self._scores
        objective = Objective(self._pattern, score, self._settings_of(score))

        def outcome(trained: Any, fixed: Any) -> Tensor:
            return as_outputs(functional_call(objective, {**trained, **fixed}, ()))[0]

        call, chunk, found = of_rows(objective.model, outcome, (0, 0)), chunk_of(self._arena), []
        with torch.no_grad():
            for begin in range(0, self._ranks, chunk):
                rows = self._arena.of(slice(begin, min(begin + chunk, self._ranks)))
                found.append(call(*tensors(self._arena.plan, rows)).double().cpu())
        self._scores = torch.cat(found).numpy()
        return self._scores

    def columns(self) -> dict[str, Floats]:
        score = self._how.score
        return {"loss": self._losses} | ({} if score is None else {_name(score): self._scored(score)})

    # ------------------------------------------------------------------------------------------------- exchange
    def equal(self, members: Members) -> bool:
        weights = self._arena.rows["weights"][members]
        # Most differ in the first two already.
        return bool((weights[:2] == weights[0]).all()) and bool((weights == weights[0]).all())

    @torch.no_grad()
    def average(self, members: Members, policy: AverageAllPolicy) -> None:
        how = policy.travels.optimizer_state
        weights = self._rows("weights", policy.travels)
        healed = _averaged(weights, members, policy.momentum, guard=policy.guard)
        if healed is not None:  # the state that spoilt the weights would spoil them again
            ranks = np.arange(self._ranks)[members][healed.cpu().numpy()]
            lost = [rank for rank in ranks.tolist() if not self._has_finite_state(rank)]
            self._reset(torch.tensor(lost, dtype=torch.int64))
        if how == "reset":
            self._reset(members)
        elif how == "average":
            for name in self._names_of_state():
                _averaged(self._arena.rows[name], members, policy.momentum, guard=policy.guard)

    @torch.no_grad()
    def replace(self, decision: Decision, policy: AsyncSelectiveAveragingPolicy) -> None:
        how, guard = policy.replacement, policy.guard
        state, replaced = how.travels.optimizer_state, torch.from_numpy(decision.replaced)
        names = ["weights", *(self._names_of_state() if state == "average" else ())]
        mixed = {name: self._mixed(self._rows(name, how.travels), decision, guard=guard) for name in names}
        heaviest = torch.from_numpy(_heaviest(decision))
        copied = {name: self._arena.rows[name][heaviest] for name in self._names_of_state()}
        for name, values in mixed.items():
            rows = self._rows(name, how.travels)
            if name == "weights" and how.momentum:
                values += how.momentum * (rows[replaced] - values)
            rows[replaced] = values
        if state == "reset":
            self._reset(replaced)
        elif state == "copy":
            for name, values in copied.items():
                self._arena.rows[name][replaced] = values

    def _mixed(self, rows: Tensor, decision: Decision, *, guard: bool) -> Tensor:
        """Return the weighted mean of each replaced rank's donors, (replaced, columns)."""
        found = rows.new_empty((len(decision.replaced), rows.shape[1]))
        for index, begin in enumerate(decision.begins.tolist()):
            edges = slice(begin, begin + int(decision.counts[index]))
            given = rows[torch.from_numpy(decision.donors[edges])]
            weights = torch.from_numpy(decision.weights[edges]).to(rows)
            if guard and not given.sum().isfinite():  # what is not finite is no gift
                weights, given = weights * given.isfinite().all(1), given.nan_to_num(0.0, 0.0, 0.0)
                if not weights.any():
                    found[index] = rows[int(decision.replaced[index])]
                    continue
                weights /= weights.sum()
            found[index] = weights @ given
        return found

    def _rows(self, name: str, travels: StateScope) -> Tensor:
        """Return the columns that travel."""
        rows = self._arena.rows[name]
        return rows if travels.frozen or name != "weights" else rows[:, self._arena.plan.columns]

    def _names_of_state(self) -> list[str]:
        return [name for name in self._arena.rows if name != "weights"]

    def _has_finite_state(self, rank: int) -> bool:
        return all(bool(self._arena.rows[name][rank].isfinite().all()) for name in self._names_of_state())

    def _reset(self, rows: Any) -> None:
        for name in self._names_of_state():
            self._arena.rows[name][rows] = 0

    # -------------------------------------------------------------------------------------------------- looking
    def model(self, rank: int | None) -> nn.Module:
        """Return a copy of a rank's model; None: with the mean of all."""
        if rank is not None and not 0 <= rank < self._ranks:
            raise ParameterError(f"rank={rank}: there are {self._ranks}")
        weights = self._arena.rows["weights"]
        row = weights.mean(0) if rank is None else weights[rank]
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


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Leave the global generators as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextmanager
def _told(rank: int, function: Any, iteration: int | None = None) -> Iterator[None]:
    """Say of an error that a function of the program raises whose it is."""
    try:
        yield
    except SpawnsimError:
        raise
    except Exception as error:
        when = "" if iteration is None else f" in iteration {iteration}"
        raise ProgramError(
            f"columnar: {_name(function)} raised {type(error).__name__} for rank {rank}{when}: {error}"
        ) from error


def _built(made: Any, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = made if isinstance(made, tuple) and len(made) == 2 else (None, None)
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"columnar: build(rng) of rank {rank} returned a {type(made).__name__}: return (model, optimizer)"
        )
    return model, optimizer


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _travels(policy: SpawnPolicy) -> StateScope:
    if isinstance(policy, AsyncSelectiveAveragingPolicy):
        return policy.replacement.travels
    return policy.travels if isinstance(policy, AverageAllPolicy) else StateScope()


def _check_policy(policy: SpawnPolicy) -> None:
    """Raise `UnsupportedError` for what replaced models would get otherwise than on virtual ranks."""
    if isinstance(policy, AsyncSelectiveAveragingPolicy) and policy.replacement.builder is not None:
        raise UnsupportedError(
            f"columnar: {type(policy).__name__} with a model_builder: give None, by which a replaced rank keeps its "
            "optimizer, with new values"
        )
    if _travels(policy).settings:
        raise UnsupportedError("columnar: settings that travel with the optimizer's state have no columns")


def _heaviest(decision: Decision) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the donor of each replaced rank that weighs most; of equals the lowest."""
    order = np.lexsort((decision.donors, -decision.weights, decision.receivers))
    found: np.ndarray[Any, np.dtype[np.int64]] = decision.donors[order][decision.begins]
    return found


def _averaged(rows: Tensor, members: Members, momentum: float, *, guard: bool) -> Tensor | None:
    """Give some rows their mean; return which were healed, bool (members,), or None if all were finite."""
    own = rows[members]
    mean = own.mean(0)
    healed = None
    if guard and not mean.isfinite().all():
        finite = own.isfinite()
        count = finite.sum(0)
        mean = own.nan_to_num(0.0, 0.0, 0.0).sum(0) / count.clamp(min=1)
        mean, healed = torch.where(count > 0, mean, own), ~finite.all(1)
    given = mean
    if momentum:
        given = mean + momentum * torch.where((own - mean).isfinite(), own - mean, 0.0)
    rows[members] = given.expand_as(own)
    return healed
