"""Models that train over columns: how they train, and the models of one experiment.

Between two turns of the policy, a chunk of ranks makes all its steps in succession while its rows are in the cache.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from spawnsim.columnar import exchange
from spawnsim.columnar.fleet import Fleet, Order, Share, fleets
from spawnsim.columnar.models import Models, Sizes
from spawnsim.columnar.program import name_of
from spawnsim.columnar.rows import WEIGHTS, Members
from spawnsim.columnar.supported import check_policy, parts_of, travels_of
from spawnsim.errors import ParameterError, UnsupportedError, UsageError
from spawnsim.models.network.cost import Floats, Ints
from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    GossipPolicy,
    OuterOptimizerPolicy,
    SPARTAPolicy,
    SpawnPolicy,
    StreamingDiLoCoPolicy,
)
from spawnsim.policies.gossip import WEIGHT
from spawnsim.policies.outer_optimizer import GlobalWeightsPolicy
from spawnsim.policies.rules.donors import Decision
from spawnsim.policies.state.codecs import encoded_nbytes
from spawnsim.policies.state.difference_codecs import RandomMask
from spawnsim.policies.state.layout import Layout, StateScope, collect
from spawnsim.random import Streams, generator
from spawnsim.record.recorder import document
from spawnsim.training.optimizers import STEP
from spawnsim.virtual.digest import checksum

if TYPE_CHECKING:
    from spawnsim.comm import Comm

Build = Callable[[Streams], tuple[nn.Module, torch.optim.Optimizer]]
Data = Callable[[Streams, int, int], Iterable[Any]]
Score = Callable[[nn.Module], Tensor]
# Columns of a run's rows: a score with one of these names becomes "score".
COLUMNS = {
    "rank", "time_s", "iteration", "local_metric", "compute_s", "wait_s", "is_replaced", "donors", "loss", "lr",
}  # fmt: skip


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
        report: further functions like `score`, recorded in rows under their names, and in "round" events as
            "mean_NAME" of the mean of all models before the exchange.

    Raises:
        ParameterError: an argument is not a function, or `max_norm` is not above 0.
    """

    build: Build
    loss: Callable[..., Any]
    data: Data
    score: Score | None = None
    max_norm: float | None = None
    schedule: Callable[[int], float] | None = None
    report: Sequence[Score] = ()
    _trained: Trained | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("build", "loss", "data"):
            if not callable(getattr(self, name)):
                raise ParameterError(f"{name}={getattr(self, name)!r}: give a function")
        for name in ("score", "schedule"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ParameterError(f"{name}={value!r}: give a function, or None")
        names = [name_of(each) for each in self.report]
        if (
            not {*names}.isdisjoint(COLUMNS)
            or len({*names}) < len(names)
            or not all(map(str.isidentifier, names))
        ):
            raise ParameterError(f"report={self.report!r}: give functions with names of their own")
        norm: Any = self.max_norm
        if norm is not None and not (isinstance(norm, (int, float)) and norm > 0):
            raise ParameterError(f"max_norm={norm!r}: give a number above 0, or None")

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_trained": None}  # a copy has not been run

    def model(self, rank: int | None = None) -> nn.Module:
        """Return a copy of a rank's model, from the current run (within `on_round`) or the latest one.

        If processes share the run, all of them must call it.

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
    """The models of one experiment: a share of a fleet.

    Args:
        how: how they train; it returns models of this experiment from its next report on.
        fleet: the rows.
        share: the experiment's share of them.
        policy: its policy.

    Attributes:
        shards: division of its ranks over processes.
    """

    def __init__(self, how: Training, fleet: Fleet, share: Share, policy: SpawnPolicy) -> None:
        # A weak reference avoids a cycle: the memory of a run is freed with the last reference to its `Training`.
        self._holder, self._how = weakref.ref(how), share.how
        self._fleet, self._share, self._rows, self.shards = fleet, share, fleet.part(share), share.shards
        self._parts = parts_of(policy)
        self._members = np.arange(share.ranks)  # the living ranks
        self._scores: dict[Score, Floats] = {}  # of the present weights
        self._settings = any(travels_of(each).settings for each in self._parts)
        self._explore: dict[int, np.random.Generator] = {}  # by rank, from its first replacement on
        self._outer: dict[SpawnPolicy, exchange.GlobalWeights] = {}

    def sizes(self, policy: SpawnPolicy) -> Sizes:
        if isinstance(policy, GossipPolicy):
            summed = collect(self._fleet.pattern, None, policy.travels).values()
            return self._nbytes_of(policy), sum(each.nbytes for each in summed)
        whole = Layout.of(collect(self._fleet.pattern, None, StateScope())).nbytes
        if isinstance(policy, GlobalWeightsPolicy):
            each = [
                self._nbytes_of_fragment(policy, names) for names in exchange.cut(self._fleet.pattern, policy)
            ]
            return (each if policy.fragments != 1 else each[0]), whole
        return self._nbytes_of(policy), whole

    def _nbytes_of_fragment(self, policy: GlobalWeightsPolicy, names: Sequence[str]) -> int:
        """Return the bytes of a difference."""
        named = dict(self._fleet.pattern.named_parameters())
        count, itemsize = sum(named[name].numel() for name in names), named[names[0]].itemsize
        if isinstance(policy, SPARTAPolicy):
            return RandomMask(policy.share).kept(count) * itemsize
        feedback = policy.outer.feedback
        return count * itemsize if feedback is None else encoded_nbytes(feedback.codec, count)

    def _nbytes_of(self, policy: SpawnPolicy) -> int:
        """Return the size in bytes of the part of one model that travels."""
        travels, rows = travels_of(policy), self._rows
        given = collect(self._fleet.pattern, None, travels)
        for place in rows.plan.trained if travels.with_optimizer else ():
            for name in rows.rule.states(self._fleet.settings[place.group]):
                given[f"{name} of {place.name}"] = rows.of[name].new_empty(place.shape)
            if STEP in rows.of:
                given[f"{STEP} of {place.name}"] = rows.of[STEP].new_empty(())
        for number in range(len(self._fleet.settings)):
            given |= {f"{number}/{key}": torch.empty((), dtype=torch.float64) for key in travels.settings}
        if isinstance(policy, GossipPolicy) and policy.push_sum:
            given[WEIGHT] = torch.empty((), dtype=torch.float64)
        # Sums run over the tensors themselves; a message has a layout that aligns each dtype to a cache line.
        if isinstance(policy, AverageAllPolicy):
            return sum(each.nbytes for each in given.values())
        return Layout.of(given).nbytes

    # ------------------------------------------------------------------------------------------------- training
    def train(self, first: int, count: int, members: Members) -> None:
        self._fleet.train([self.order(first, count, members)])

    def order(self, first: int, count: int, members: Members) -> Order:
        """Return the steps of `train`, which the fleet must make."""
        self._members = np.arange(self._share.ranks)[members]
        self._scores.clear()
        if (how := self._holder()) is not None:
            how._trained = self
        return Order(self._share, self.shards.own_ranks(members), first, count)

    # -------------------------------------------------------------------------------------------------- judging
    @property
    def _losses(self) -> Floats:
        return self._fleet.losses[self._share.begin : self._share.begin + self.shards.count]

    def metrics(self, iteration: int) -> Floats:
        if (how := self._holder()) is not None:
            how._trained = self  # experiments may share their functions
        score = self._how.score
        return self.shards.gathered(-self._losses if score is None else self._evaluated(score).copy())

    def columns(self) -> dict[str, Floats]:
        found = {"loss": self._losses}
        if self._settings:
            found["lr"] = np.asarray([each[0] for each in self._share.rates])
        if (score := self._how.score) is not None:
            name = name_of(score)
            found[name if name.isidentifier() and name not in COLUMNS else "score"] = self._evaluated(score)
        found |= {name_of(each): self._evaluated(each) for each in self._how.report}
        return {name: self.shards.gathered(each) for name, each in found.items()}

    def of_mean(self) -> dict[str, float]:
        if not self._how.report:
            return {}
        mean = self.model(None)
        with torch.no_grad():
            return {f"mean_{name_of(each)}": float(each(mean)) for each in self._how.report}

    def _evaluated(self, score: Score) -> Floats:
        if score not in self._scores:
            self._scores[score] = self._fleet.scores(score, self._share)
        return self._scores[score]

    # ------------------------------------------------------------------------------------------------- exchange
    def are_equal(self, members: Members, policy: AverageAllPolicy, mask: RandomMask | None = None) -> bool:
        return exchange.are_equal(self._rows, members, policy, mask)

    def average(
        self, members: Members, policy: AverageAllPolicy, *, equal: bool, mask: RandomMask | None = None
    ) -> None:
        exchange.average(self._rows, members, policy, equal=equal, mask=mask)

    def replace(self, decision: Decision, policy: AsyncSelectiveAveragingPolicy) -> None:
        heaviest, how = exchange.replace(self._rows, decision, policy), policy.replacement
        rates, first, taken = self._share.rates, self.shards.first, dict[int, tuple[float, ...]]()
        if how.travels.settings:
            held = {"rates": torch.tensor(rates, dtype=torch.float64)}
            of = self.shards.fetched(held, decision.receivers, decision.donors)
            taken = {rank: tuple(of(donor)["rates"].tolist()) for rank, donor in heaviest.items()}
        for rank in heaviest if how.explore is not None else ():
            taken[rank] = self._explored(rank, taken.get(rank, rates[rank - first]), how.explore)
        for rank, own in taken.items():
            rates[rank - first] = own

    def _explored(self, rank: int, rates: tuple[float, ...], explore: Any) -> tuple[float, ...]:
        """Return the learning rates to which a replaced rank varies its own, from its own stream."""
        if rank not in self._explore:
            self._explore[rank] = generator(self._share.seed, rank, "explore")
        optimizer = SimpleNamespace(param_groups=[{"lr": rate} for rate in rates])
        explore(None, optimizer, self._explore[rank])
        return tuple([float(group["lr"]) for group in optimizer.param_groups])

    def mix(self, receivers: Ints, senders: Ints, weights: Floats, policy: GossipPolicy) -> None:
        exchange.mix(self._rows, receivers, senders, weights, travels=policy.travels)

    def begin_together(self, members: Members, policy: GlobalWeightsPolicy) -> None:
        self._outer[policy] = exchange.begin_together(
            self._rows, members, policy, exchange.cut(self._fleet.pattern, policy)
        )

    def send_difference(self, members: Members, policy: GlobalWeightsPolicy, place: int = 0) -> None:
        exchange.send_difference(self._rows, members, policy, outer=self._outer[policy], place=place)

    def step_together(
        self, members: Members, policy: GlobalWeightsPolicy, iteration: int, place: int = 0
    ) -> None:
        ranks = self.shards.own_ranks(members)
        inner_lr = isinstance(policy, OuterOptimizerPolicy) and policy.inner_lr
        rates = {own[0] for own in self._share.rates_of(ranks, iteration)} if inner_lr else {1.0}
        rates = set().union(*self.shards.each(rates))
        if len(rates) > 1:
            raise UsageError(
                f"columnar: {type(policy).__name__} with inner_lr, and ranks whose learning rates differ: "
                "each would have its own global weights"
            )
        exchange.step_together(
            self._rows, members, policy, outer=self._outer[policy], place=place, scale=rates.pop()
        )

    # --------------------------------------------------------------------------------------------- checkpoints
    def require_savable(self) -> None:
        """Raise `UnsupportedError` if models have state that checkpoints lack."""
        for policy in self._parts:
            explores = isinstance(policy, AsyncSelectiveAveragingPolicy) and policy.replacement.explore
            encodes = isinstance(policy, GlobalWeightsPolicy) and policy.outer.feedback is not None
            streams = isinstance(policy, StreamingDiLoCoPolicy)
            if self._settings or explores or encodes or streams:
                raise UnsupportedError(
                    f"columnar: checkpoints of {type(policy).__name__} with learning rates that travel or vary, "
                    "compression, or means under way, are not supported: leave out checkpoint_every and resume"
                )

    def rows(self) -> dict[str, Tensor]:
        """Return everything that the models of this process consist of, a row each: the memory itself."""
        return {**self._rows.of, "losses": torch.from_numpy(self._losses)}

    def shared(self) -> dict[str, dict[str, Tensor]]:
        """Return the global weights and the outer momentum, by the policy's place among the parts of the whole one."""
        outer = {str(place): self._outer.get(each) for place, each in enumerate(self._parts)}
        return {
            place: {"weights": each.weights, "momentum": each.momentum}
            for place, each in outer.items()
            if each
        }

    def set_shared(self, shared: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Set what `shared` has returned."""
        for place, each in shared.items():
            weights, momentum = (
                each[name].to(self._rows.of[WEIGHTS].device) for name in ("weights", "momentum")
            )
            found = self._outer[self._parts[int(place)]] = exchange.GlobalWeights(weights)
            found.momentum = momentum

    def skip(self, first: int, count: int, members: Members) -> None:
        """Draw the batches of `train` without making a step."""
        self._fleet.skip(self.order(first, count, members))

    # -------------------------------------------------------------------------------------------------- looking
    def model(self, rank: int | None) -> nn.Module:
        """Return a copy of a rank's model; None: a model with the mean weights of all living ranks."""
        if rank is not None and not (type(rank) is int and 0 <= rank < self._share.ranks):
            raise ParameterError(f"rank={rank!r}: there are {self._share.ranks}, numbered from 0")
        weights = self._rows.of[WEIGHTS]
        if rank is None:
            return self._fleet.filled(exchange.mean_of(self.shards, weights, self._members))
        return self._fleet.filled(self.shards.row(weights, rank))

    def checksum(self) -> int:
        weights, losses, chunk = self._rows.of[WEIGHTS].cpu().numpy(), self._losses, self.shards.chunk
        chunks = [slice(begin, begin + chunk) for begin in range(0, self.shards.count, chunk)]
        own = [checksum([weights[each], losses[each]]) for each in chunks]
        return checksum(np.concatenate(self.shards.each(np.array(own))))

    def described(self) -> dict[str, Any]:
        return {"training": document(self._how)}


def trained(
    given: Sequence[tuple[Training, int, int, SpawnPolicy]], comm: Comm | None = None
) -> list[Trained]:
    """Return the models of some experiments, each in a fleet with all others that can train together.

    Args:
        given: for each experiment how models train, the number of ranks, the seed, and the policy.
        comm: processes that share the models; None: this one alone.

    Raises:
        UnsupportedError: models, optimizers, the score, or the policy with such models have no form over columns.
    """
    for *_, policy in given:
        for part in parts_of(policy):
            check_policy(part)
    if torch._C._is_any_autocast_enabled():
        raise UnsupportedError("columnar: models train in their own dtype: leave the autocast block")
    shares = [Share(copy.copy(how), ranks, seed) for how, ranks, seed, _ in given]
    with torch.inference_mode(False), torch.enable_grad():
        fleet_of = {id(share): fleet for fleet, own in fleets(shares, comm) for share in own}
    return [
        Trained(how, fleet_of[id(share)], share, policy)
        for share, (how, _, _, policy) in zip(shares, given, strict=True)
    ]


def train_together(orders: Sequence[tuple[Models, int, int, Members]]) -> None:
    """Train the models of some experiments: those of one fleet at once.

    Args:
        orders: for each experiment its models, and the arguments of `Models.train`.
    """
    of_fleet: dict[int, tuple[Fleet, list[Order]]] = {}
    for models, first, count, members in orders:
        if isinstance(models, Trained):
            fleet = models._fleet
            of_fleet.setdefault(id(fleet), (fleet, []))[1].append(models.order(first, count, members))
        else:
            models.train(first, count, members)
    for fleet, own in of_fleet.values():
        fleet.train(own)
