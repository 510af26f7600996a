"""The models of several experiments as rows of one tensor: how they are built, and make steps together.

A share is the part of a fleet that belongs to one experiment: its ranks are consecutive rows. Every rank has the model,
optimizer and batches that an ordinary program would create, but no stack. Knows steps and scores; must not know
policies, clocks, or when a step is due.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

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
from spawnsim.columnar.rows import WEIGHTS, Rows, at
from spawnsim.columnar.shards import Shards
from spawnsim.errors import UnsupportedError, UsageError
from spawnsim.models.network.cost import Floats
from spawnsim.random import Streams, seeded
from spawnsim.training import checks
from spawnsim.training.checks import EVERY, Reference
from spawnsim.training.execution import FIRST
from spawnsim.training.grouping import Ungroupable
from spawnsim.training.seats import Seat
from spawnsim.training.vmapped import Outcome, Tensors, Vmapped, as_outputs, clip, rows_at_once

if TYPE_CHECKING:
    from spawnsim.columnar.training import Training
    from spawnsim.comm import Comm

ENDED = object()
TENSORS = {Tensor}
# Products of matrices depend in their last bits on the alignment of the result, hence on a row's position in a chunk:
# 16 floats of 4 bytes are a cache line.
POSITIONS = 16


@dataclass(frozen=True)
class Order:
    """Steps to make: `count` iterations of some ranks of a share, from iteration `first` on."""

    share: Share
    ranks: list[int]
    first: int
    count: int


class Share:
    """The ranks of one experiment in a fleet.

    Args:
        how: how they train.
        ranks: number of ranks.
        seed: seed of the experiment.

    Attributes:
        begin: its first row in the fleet.
        shards: division of its ranks over processes; the fleet sets it. Rates and batches are of this process's ranks.
    """

    shards: Shards

    def __init__(self, how: Training, ranks: int, seed: int) -> None:
        self.how, self.ranks, self.seed = how, ranks, seed
        self.begin = 0
        self.rates: list[tuple[float, ...]] = []
        self.data: list[Iterator[Any]] = []
        self.generators = Generators(seed)

    def built(self, rank: int, *, with_data: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a rank's model and optimizer; with data, keep its learning rates and batches."""
        streams, how = Streams(self.seed, rank), self.how
        with generators_kept(), seeded(streams):
            with errors_of(how.build, rank):
                model, optimizer = built(how.build(streams), rank)
            if with_data:
                with errors_of(how.data, rank):
                    self.data.append(iter(how.data(streams, rank, self.ranks)))
                self.rates.append(tuple(float(group["lr"]) for group in optimizer.param_groups))
        return model, optimizer

    def row_of(self, rank: int) -> int:
        """Return the row of a rank of this process in the fleet."""
        return self.begin + rank - self.shards.first

    def kind(self) -> Any:
        """Return a key that is equal for shares whose models can train together."""
        model, optimizer = self.built(0, with_data=False)
        how = self.how
        return how.loss, how.score, tuple(how.report), how.max_norm, kind_of(seat_of(model, optimizer, 0))

    def rates_of(self, ranks: Sequence[int], iteration: int) -> list[tuple[float, ...]]:
        """Return the learning rates of some ranks in an iteration, by group of the optimizer."""
        rates = [self.rates[rank - self.shards.first] for rank in ranks]
        if self.how.schedule is None:
            return rates
        with errors_of(self.how.schedule, iteration=iteration):
            factor = float(self.how.schedule(iteration))
        return [tuple([factor * each for each in own]) for own in rates]

    def batches(self, ranks: Sequence[int], iteration: int) -> list[tuple[Tensor, ...]]:
        """Return the next batches of some ranks."""
        batches, versions, first = [], [], self.shards.first
        # Batches should draw from the rank's streams; with these generators, other draws are reproducible as well.
        with (
            self.generators.of(ranks[0] // self.shards.chunk),
            errors_of(self.how.data, iteration=iteration) as about,
        ):
            for rank in ranks:
                about.rank = rank
                batch = next(self.data[rank - first], ENDED)
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
        return batches


class Fleet:
    """Rows of models that train together.

    Args:
        shares: the experiments, whose `Share.kind` is equal.
        comm: processes that share the rows of each experiment; None: this one alone.

    Raises:
        ParameterError: there are too many processes.
        UnsupportedError: models, optimizers or a score have no form over columns.
    """

    def __init__(self, shares: Sequence[Share], comm: Comm | None = None) -> None:
        self._steps: dict[Any, Vmapped] = {}
        self._how = shares[0].how
        with torch.inference_mode(False), torch.enable_grad():
            self.pattern, self._optimizer = shares[0].built(0, with_data=False)
            self._seat = seat_of(self.pattern, self._optimizer, 0)
            self._fixed = rows_at_once(self._seat.parameters)
            self._chunk = self._fixed  # fewer if the device has no memory for as many
            self._begin(shares, comm)
            scores = [*([] if self._how.score is None else [self._how.score]), *self._how.report]
            self._scores = {score: self._open_score(score) for score in scores}
        self.settings = tuple([self.rows.rule.settings(group) for group in self._optimizer.param_groups])
        self.losses: Floats = np.full(len(self.rows.of[WEIGHTS]), np.nan)

    def _begin(self, shares: Sequence[Share], comm: Comm | None) -> None:
        """Build the models of this process, and copy their weights to rows."""
        for share in shares:
            share.shards = Shards(share.ranks, self._fixed, comm)
        self.rows = rows_of(self._seat, [each.shards for each in shares])
        kind, row = kind_of(self._seat), 0
        for share in shares:
            share.begin = row
            for rank in range(share.shards.first, share.shards.first + share.shards.count):
                model, optimizer = share.built(rank)
                if kind_of(seat_of(model, optimizer, rank)) != kind:
                    raise UnsupportedError(
                        f"columnar: the model or optimizer of rank {rank} differs from those of rank 0 in more "
                        "than weights and learning rates: run it on virtual ranks, which form groups"
                    )
                named = dict(model.named_parameters())
                for place in self.rows.plan.places:
                    self.rows.of[WEIGHTS][row, place.columns] = named[place.name].detach().flatten()
                row += 1

    # ------------------------------------------------------------------------------------------------- training
    def train(self, orders: Sequence[Order]) -> None:
        """Make the steps of some shares."""
        with generators_kept(), torch.inference_mode(False), torch.enable_grad():
            together: dict[tuple[int, int], list[Order]] = {}
            for order in orders:
                together.setdefault((order.first, order.count), []).append(order)
            for (first, count), own in together.items():
                for chunk in self._chunks(own):
                    for iteration in range(first, first + count):
                        self._step(chunk, iteration)

    def skip(self, order: Order) -> None:
        """Draw the batches of steps without making them."""
        with generators_kept(), torch.inference_mode(False), torch.enable_grad():
            for (own,) in self._chunks([order]):
                for iteration in range(order.first, order.first + order.count):
                    order.share.batches(own.ranks, iteration)

    def _chunks(self, orders: Sequence[Order]) -> list[list[Order]]:
        """Divide the ranks of some orders into chunks: whole shares, or parts of one share."""
        chunks: list[list[Order]] = []
        room = 0
        for order in (each for each in orders if each.ranks):  # of this process, perhaps all have died
            room -= room % POSITIONS
            if room < len(order.ranks):
                parts = [
                    Order(order.share, [*ranks], order.first, order.count)
                    for _, ranks in groupby(order.ranks, lambda rank: rank // self._fixed)
                ]
                chunks += [[part] for part in parts]
                room = self._chunk - len(parts[-1].ranks) if len(parts) == 1 else 0
            else:
                chunks[-1].append(order)
                room -= len(order.ranks)
        return chunks

    def _step(self, orders: Sequence[Order], iteration: int) -> None:
        """Make one step of some ranks."""
        staged, rates, rows = self._staged(orders, iteration)
        step = self._step_for([each[0] for each in staged])
        begin, count = 0, len(rows)
        while begin < count:  # as many rows as memory allows, which may decrease meanwhile
            part = slice(begin, begin + self._chunk)
            inputs = [each[part] for each in staged]
            try:
                outcome = self._outcome(step, rows[part], inputs)
            except torch.cuda.OutOfMemoryError:
                if self._chunk == 1:
                    raise
                self._chunk = -(-min(self._chunk, count) // 2)
                torch.cuda.empty_cache()
                continue
            if begin == 0 and (iteration < FIRST or iteration % EVERY == 0):
                self._check(step, outcome, orders, iteration=iteration, inputs=inputs)
            self._update(outcome, rows[part], rates[part])
            begin += len(rows[part])

    def _update(self, outcome: Outcome, rows: list[int], rates: Sequence[tuple[float, ...]]) -> None:
        """Make the optimizer's step of some rows, and keep their losses; padding is not updated."""
        gradients, losses = outcome.gradients, outcome.outputs[0]
        if not all(rates):
            own = [place for place, rate in enumerate(rates) if rate]
            gradients, losses = [each[own] for each in gradients], losses[own]
            rows, rates = [rows[place] for place in own], [rates[place] for place in own]
        with torch.no_grad():
            if self._how.max_norm is not None:
                clip(gradients, self._how.max_norm)
            gradient = torch.cat([each.flatten(1) for each in gradients], 1)
            self.rows.update(rows, gradient, rates, self.settings)
        self.losses[rows] = losses.double().cpu().numpy()

    def _staged(
        self, orders: Sequence[Order], iteration: int
    ) -> tuple[list[Tensor], list[tuple[float, ...]], list[int]]:
        """Return the next batches of some ranks, stacked, their learning rates, and their rows.

        The ranks of each order begin at a multiple of `POSITIONS`. In between, the last rank repeats, without rates.
        """
        batches: list[tuple[Tensor, ...]] = []
        rates: list[tuple[float, ...]] = []
        rows: list[int] = []
        for order in orders:
            share = order.share
            padding = -len(rows) % POSITIONS
            batches += batches[-1:] * padding
            rates += [()] * padding
            rows += rows[-1:] * padding
            batches += share.batches(order.ranks, iteration)
            rates += share.rates_of(order.ranks, iteration)
            rows += [share.row_of(rank) for rank in order.ranks]
        try:
            return [torch.stack(column).detach() for column in zip(*batches, strict=True)], rates, rows
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"columnar: the batches of ranks {orders[0].ranks[0]} to {orders[-1].ranks[-1]} in iteration "
                f"{iteration} are not all tensors of the same number and shapes: {error}"
            ) from error

    def _outcome(self, step: Vmapped, rows: list[int], inputs: Sequence[Tensor]) -> Outcome:
        return step.rows(self._tensors(self.rows.of[WEIGHTS][at(rows)], inputs), [0] * len(inputs))

    def _tensors(self, weights: Tensor, inputs: Sequence[Tensor] = ()) -> Tensors:
        plan, seat = self.rows.plan, self._seat
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
        orders: Sequence[Order],
        *,
        iteration: int,
        inputs: Sequence[Tensor],
    ) -> None:
        """Compare one row with the same step executed alone; each check takes the next row."""
        number = iteration // EVERY % min(len(orders[0].ranks), len(inputs[0]))
        share, rank = orders[0].share, orders[0].ranks[number]
        row = share.row_of(rank)
        model, own = self.model_of(row), [each[number] for each in inputs]
        reference = Reference(self._how.loss, model, seat_of(model, self._optimizer_of(model), rank), own)
        names = [place.name for place in self.rows.plan.trained]
        weights = self._tensors(self.rows.of[WEIGHTS][row : row + 1], [each[None] for each in own])
        alone = Tensors(*([each[0] for each in part] for part in weights))
        order = [self._seat.names.index(name) for name in names]
        ordered = reference.outcome._replace(
            gradients=[reference.outcome.gradients[place] for place in order]
        )
        what = checks.mismatch(step, alone, checks.row_of(outcome, number), alone=ordered, names=names)
        if what:
            raise UsageError(
                f"columnar: rank {rank}, iteration {iteration}: {what}. {name_of(self._how.loss)} may depend on "
                "the model, its arguments and constants alone: yield a value that changes with the batch"
            )

    def _optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer for a copy of the pattern, with the settings of the pattern's optimizer."""
        groups, named = self._optimizer.param_groups, dict(model.named_parameters())
        names = {id(p): name for name, p in self.pattern.named_parameters()}
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

    def _open(self, inputs: Sequence[Tensor]) -> Vmapped:
        """Return a new step for inputs of these shapes; raise an error with the reason if it cannot be vectorized."""
        how, model = self._how, self.model_of(0)
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
            step = Vmapped(self.pattern, how.loss, [place.name for place in self.rows.plan.trained])
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

    # --------------------------------------------------------------------------------------------------- scores
    def _open_score(self, score: Callable[[nn.Module], Tensor]) -> Vmapped:
        """Return the score of many models; raise an error with the reason if it cannot be vectorized."""
        model = self.model_of(0)
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
            found_of_rows = Vmapped(self.pattern, score, ())
            self._scored(found_of_rows, slice(0, 1))
        return found_of_rows

    def _scored(self, score: Vmapped, rows: slice) -> Tensor:
        own = self._tensors(self.rows.of[WEIGHTS][rows])
        places = self.rows.plan.places
        named = {place.name: each for place, each in zip(places, [*own.trained, *own.fixed], strict=True)}
        fixed = [named[name] for name, _ in self.pattern.named_parameters()]
        return score.rows(Tensors((), fixed, own.buffers, (), ()), ()).outputs[0]

    def scores(self, score: Callable[[nn.Module], Tensor], share: Share) -> Floats:
        """Return the score of each rank of a share in this process, float64 (ranks,)."""
        found: Floats = np.empty(share.shards.count)
        begin, end = share.begin, share.begin + share.shards.count
        with torch.inference_mode(False), torch.no_grad():
            while begin < end:
                rows = slice(begin, min(begin + self._chunk, end))
                try:
                    values = self._scored(self._scores[score], rows)
                except torch.cuda.OutOfMemoryError:
                    if self._chunk == 1:
                        raise
                    self._chunk = -(-(rows.stop - begin) // 2)
                    torch.cuda.empty_cache()
                    continue
                found[begin - share.begin : rows.stop - share.begin] = values.double().cpu().numpy()
                begin = rows.stop
        return found

    # -------------------------------------------------------------------------------------------------- looking
    def model_of(self, row: int) -> nn.Module:
        """Return a copy of the first model with the weights of a row."""
        return self.filled(self.rows.of[WEIGHTS][row])

    def filled(self, weights: Tensor) -> nn.Module:
        """Return a copy of the first model with some weights, (columns,)."""
        model = copy.deepcopy(self.pattern)
        named = dict(model.named_parameters())
        with torch.no_grad():
            for place in self.rows.plan.places:
                named[place.name].copy_(weights[place.columns].view(place.shape))
        return model

    def part(self, share: Share) -> Rows:
        """Return the rows of a share, as views."""
        return self.rows.part(share.begin, share.shards)


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


def fleets(shares: Sequence[Share], comm: Comm | None = None) -> list[tuple[Fleet, list[Share]]]:
    """Return the fleets of some shares: one for all whose models can train together."""
    if len(shares) == 1:
        return [(Fleet(shares, comm), [*shares])]
    kinds: dict[Any, list[Share]] = {}
    for share in shares:
        kinds.setdefault(share.kind(), []).append(share)
    return [(Fleet(own, comm), own) for own in kinds.values()]
