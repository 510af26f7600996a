"""A run over columns: in each iteration all ranks compute, then meet if the policy's cadence is due.

It keeps the contents of a run folder: rows of a sample of ranks, one "round" event per turn with aggregates over all
ranks, and one "replacement" event per replacement, or "sampled_replacement" events if only a sample of the ranks has
rows. `on_round` receives all arrays of a round.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spawnsim import random
from spawnsim.columnar.durations import STREAMS, Durations, Streams
from spawnsim.columnar.meetings import Group, Turn, turn_of
from spawnsim.columnar.models import Models, Numbers, Quality, RandomWalk
from spawnsim.columnar.training import Trained, Training
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.models.faults import Crash, FaultPlan, Pause, SlowDown
from spawnsim.models.network.cost import Floats, Ints
from spawnsim.models.platform import load_platform
from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    Every,
    OuterOptimizerPolicy,
    SpawnPolicy,
    StateScope,
)
from spawnsim.policies.rules.donors import Decision
from spawnsim.policies.rules.selection import Mask, selection_for
from spawnsim.record import folder, manifest
from spawnsim.record.recorder import Recorder, document, vars_of
from spawnsim.record.table import Table
from spawnsim.run.process_setup import one_thread
from spawnsim.run.result import Run, ordered
from spawnsim.scenario import available_B
from spawnsim.virtual.digest import checksum

if TYPE_CHECKING:
    from spawnsim.models.compute import ComputeModel
    from spawnsim.models.platform import Platform

SAMPLE = 256  # ranks whose rows are kept


@dataclass(frozen=True)
class Round:
    """One turn of the policy; columns are over `members`.

    Attributes:
        iteration: the iteration of all ranks.
        members: world ranks that took part, ascending, int64 (members,).
        entered_s: arrival of each member, float64 (members,), seconds.
        left_s: departure of each member, float64 (members,), seconds.
        metrics: metric that each member reported, float64 (members,); None if metrics are not tracked.
        decision: the replaced ranks and their donors; None for averaging.
        died: ranks found dead at this turn, int64.
        messages: number of messages sent in this turn.
        nbytes: their size in bytes.
    """

    iteration: int
    members: Ints
    entered_s: Floats
    left_s: Floats
    metrics: Floats | None
    decision: Decision | None
    died: Ints
    messages: int
    nbytes: int


LEAST_B = 500  # bytes that a rank takes
OnRound = Callable[[Round], None]


@dataclass(frozen=True)
class _Circumstances:
    """The arguments of `run` that describe where the ranks run."""

    ranks: int
    iterations: int
    model_nbytes: int | None
    platform: Any
    stragglers: Any
    faults: Any
    seed: int
    compute: Any
    streams: Streams
    mtbf_s: float | None
    detection_s: float
    sample: int

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("iterations", 1), ("seed", 0), ("sample", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ParameterError(f"{name}={value!r}: give an integer of at least {least}")
        if self.ranks * LEAST_B > available_B():
            raise ParameterError(
                f"ranks={self.ranks:,}: columns take about {LEAST_B} bytes a rank, "
                f"{self.ranks * LEAST_B / 1e9:,.0f} GB, and {available_B() / 1e9:,.1f} GB are available: give fewer"
            )
        if self.streams not in STREAMS:
            raise ParameterError(f"streams={self.streams!r}: choose one of {', '.join(STREAMS)}")
        if self.mtbf_s is not None and not self.mtbf_s > 0:
            raise ParameterError(f"mtbf_s={self.mtbf_s!r}: give seconds above 0, of one rank")
        if not self.detection_s >= 0:
            raise ParameterError(f"detection_s={self.detection_s!r}: give seconds of at least 0")

    def parts(self) -> tuple[Platform, FaultPlan, ComputeModel]:
        platform = load_platform(self.platform)
        platform.check(self.ranks)
        if platform.cores is not None and platform.crowded(self.ranks):
            raise UnsupportedError(
                f"columnar: {self.ranks} ranks share {platform.cores.count} cores of a node: the end of a block "
                "then depends on all other ranks; run it on virtual ranks, or leave cores out of the platform"
            )
        plan = FaultPlan.parse(self.faults, seed=self.seed, ranks=self.ranks, network=platform.network)
        plan.check(self.ranks)
        other = [fault.kind for fault in plan.faults if not isinstance(fault, (Crash, Pause, SlowDown))]
        if other:
            raise UnsupportedError(
                f"columnar: a fault of kind {other[0]!r} affects single messages, or restarts a program: columns "
                "support crash, pause and slow; run it on virtual ranks"
            )
        return platform, plan, platform.compute_model(self.compute, self.stragglers)

    def deaths_s(self, plan: FaultPlan) -> Floats:
        """Return the time of death of each rank; inf: never."""
        deaths_s = np.full(self.ranks, np.inf)
        if self.mtbf_s is not None:
            stream = random.generator(self.seed, random.WORLD, "columnar.deaths")
            deaths_s = self.mtbf_s * stream.standard_exponential(self.ranks)
        for fault in plan.faults:
            if isinstance(fault, Crash):
                deaths_s[fault.rank] = min(deaths_s[fault.rank], fault.at_s)
        return deaths_s

    def described(self) -> dict[str, Any]:
        return {each.name: document(getattr(self, each.name)) for each in fields(self)}


def run(
    policy: SpawnPolicy,
    *,
    ranks: int,
    iterations: int,
    model_nbytes: int | None = None,
    quality: Quality | None = None,
    training: Training | None = None,
    platform: Any = None,
    stragglers: Any = None,
    faults: Any = None,
    mtbf_s: float | None = None,
    detection_s: float = 0.0,
    seed: int = 0,
    compute: Any = None,
    streams: Streams = "ranks",
    sample: int = SAMPLE,
    on_round: OnRound | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
) -> Run:
    """Run a policy over columns: times and decisions of very many ranks, with numbers as models or models that train.

    In each iteration every rank computes; if the policy's cadence is due, all living ranks then take its turn together.
    docs/columnar.md lists the policies that have a turn, and the differences from the ordinary mode.

    Args:
        policy: a policy with the same parameters as on virtual ranks; the run does not change it.
        ranks: number of ranks.
        iterations: number of iterations of each rank.
        model_nbytes: size of one model on the wire; None (only with `training`): the size of the trained model.
        quality: numbers in place of models; None: `RandomWalk()`.
        training: models that train, instead of `quality`.
        platform: name, TOML file or object; None: the default platform.
        stragglers: a specification such as "lognormal:0.3", or an object; None: the platform's.
        faults: a fault plan of crashes, pauses and slow-downs; None: no faults.
        mtbf_s: mean time between failures of one rank, in seconds: it dies for good at a random time; None: never.
        detection_s: seconds that the living ranks wait, after all have arrived, when they find that a rank has died.
        seed: seed of every random stream, at least 0.
        compute: compute time of a rank in an iteration; None: the platform's.
        streams: "ranks": the draws of an ordinary run; "bulk": draws for all ranks at once, faster for a million ranks.
        sample: number of ranks, evenly spaced, that have rows and replacement events in the run.
        on_round: called with each round.
        out: run folder to write.
        overwrite: whether a run in `out` may be overwritten.

    Returns:
        Rows of the sample, events, and totals over all ranks; see `Run`.

    Raises:
        ParameterError: a parameter is invalid; nothing ran.
        UnsupportedError: the policy, a fault or a straggler has no form over columns.
        UsageError: the policy's rules refuse their input.
    """
    where = _Circumstances(
        ranks, iterations, model_nbytes, platform, stragglers, faults, seed, compute, streams, mtbf_s, detection_s,
        sample,
    )  # fmt: skip
    if training is not None and not isinstance(training, Training):
        raise ParameterError(f"training={training!r}: give a spawnsim.columnar.Training")
    if training is not None and quality is not None:
        raise ParameterError("quality and training: give one, numbers or models")
    place = None if out is None else folder.named(out)
    if place is not None:
        folder.require_free(place, overwrite=overwrite)
    with one_thread():
        found = _Running(policy, where, on_round, partial(_models, policy, quality, training, where)).go()
    if place is not None:
        found.save(place)
    return found


def _models(
    policy: SpawnPolicy, quality: Quality | None, training: Training | None, where: _Circumstances
) -> Models:
    if training is None:
        return Numbers(quality if quality is not None else RandomWalk(), where.ranks, where.seed)
    return Trained(training, where.ranks, where.seed, policy)


class _Running:
    """A run in progress."""

    def __init__(
        self,
        policy: SpawnPolicy,
        where: _Circumstances,
        on_round: OnRound | None,
        begin: Callable[[], Models],
    ) -> None:
        platform, plan, model = where.parts()
        self.policy, self.where, self.on_round, self.began_s = policy, where, on_round, time.perf_counter()
        self.group = Group(where.ranks, platform, plan)
        self.turn = self._turn(1 if where.model_nbytes is None else where.model_nbytes)
        self.models = begin()  # after the checks that may refuse the policy
        if where.model_nbytes is None:
            self.turn = self._turn(self.models.nbytes, self.models.whole_nbytes)
        self.durations = Durations(
            model, plan, where.ranks, blocks=where.iterations, seed=where.seed, streams=where.streams
        )
        self.deaths_s = where.deaths_s(plan)
        self.trained = 0  # iterations trained so far
        self.left_s = np.zeros(where.ranks)  # departure from the latest turn
        self.kept = _Kept(where, policy, self.turn.nbytes)
        self.blocks = self.replaced = self.lost = 0
        self.digest = hashlib.blake2b(digest_size=16)

    def _turn(self, nbytes: int | None, whole_nbytes: int | None = None) -> Turn:
        draws: dict[str, Any] = {"seed": self.where.seed, "streams": self.where.streams}
        return turn_of(self.policy, self.group, nbytes, whole_nbytes=whole_nbytes, **draws)

    def go(self) -> Run:
        """Run until the last iteration, or until all ranks have died."""
        for iteration in range(self.where.iterations):
            clock = self.group.cards.clock
            clock[:] = self.durations.ends(clock)
            self.blocks += self.group.size
            self.turn.tick()
            if self.turn.due(iteration):
                self._meet(iteration)
            if not self.group.size:
                break
        else:
            self._bury()
            if self.group.size and self.kept.last != iteration:
                self._train(iteration)
                self.kept.rows(
                    iteration, self.group.cards.clock, self.left_s, None, more=self.models.columns()
                )
        return self._run(iteration + 1)

    def _bury(self) -> Ints:
        """Remove ranks from the group whose time of death has passed; return them."""
        cards, at = self.group.cards, self.group.at
        dead = self.deaths_s[at] <= cards.clock[at]
        if not dead.any():
            return np.empty(0, np.int64)
        world = self.group.world()
        died = world[dead]
        cards.clock[died] = self.deaths_s[died]
        self.group.members = world[~dead]
        self.lost += len(died)
        self.kept.died(died, self.deaths_s)
        return died

    def _meet(self, iteration: int) -> None:
        group, cards = self.group, self.group.cards
        died = self._bury()
        if not group.size:
            return
        at = group.at
        entered_s = cards.clock.copy()
        if len(died) and self.where.detection_s:
            cards.clock[at] = cards.clock[at].max() + self.where.detection_s
        self._train(iteration)
        metrics, more = self.models.metrics(iteration), self.models.columns()
        before = group.traffic.messages, group.traffic.nbytes
        decision = self.turn.act(iteration, metrics, self.models)
        self.replaced += 0 if decision is None else len(decision.replaced)
        done = Round(
            iteration, group.world(), entered_s[at], cards.clock[at].copy(), metrics[at], decision, died,
            group.traffic.messages - before[0], group.traffic.nbytes - before[1],
        )  # fmt: skip
        self.kept.round(done, self.left_s[at])
        self.kept.rows(iteration, entered_s, self.left_s, (cards.clock, metrics, decision), more=more)
        self.left_s[:] = cards.clock
        parts = [cards.clock] if decision is None else [cards.clock, decision.replaced, decision.donors]
        self.digest.update(str([checksum(part) for part in parts]).encode())
        if self.on_round is not None:
            self.on_round(done)

    def _train(self, iteration: int) -> None:
        """Train all ranks up to an iteration, inclusive."""
        self.models.train(self.trained, iteration + 1 - self.trained, self.group.at)
        self.trained = iteration + 1

    def _run(self, iterations: int) -> Run:
        cards, traffic = self.group.cards, self.group.traffic
        self.digest.update(str([checksum(cards.clock), self.models.checksum()]).encode())
        known = {
            "ranks": self.where.ranks,
            "iterations": iterations,
            "virtual_seconds": float(cards.clock.max()),
            "wall_seconds": time.perf_counter() - self.began_s,
            "events": self.blocks,
            "messages": traffic.messages,
            "bytes": traffic.nbytes,
            "replacements": self.replaced,
            "deaths": self.lost,
            "digest": self.digest.hexdigest(),
        }
        table, recorder = self.kept.table(), self.kept.recorder
        what = self._described()
        return Run(what, table, recorder.events(), ordered(known))

    def _described(self) -> dict[str, Any]:
        own = {"policy": type(self.policy).__name__.removesuffix("Policy")} | _made_of(self.policy)
        about: dict[str, Any] = {"file": None, "main": "columnar", "parameters": own}
        about |= {"backend": "virtual", "columnar": True} | self.models.described()
        about |= self.where.described() | {"model_nbytes": self.turn.nbytes}
        about |= {"notes": list(self.turn.notes), "reproducible": True, "leaks": []}
        return about | {"versions": manifest.versions(), "made": manifest.made()}


NO_PARAMETERS = {"timing", "wiring"}  # they do not affect decisions
# The default scopes of policies; for every other policy the whole state travels.
USUAL: dict[type[SpawnPolicy], StateScope] = {
    AsyncSelectiveAveragingPolicy: StateScope(optimizer_state="reset"),
    OuterOptimizerPolicy: StateScope(frozen=False, buffers=False),
}


def _made_of(policy: SpawnPolicy) -> dict[str, Any]:
    """Return the parameters of a policy by name, read from the policy itself, its rules and its other parts."""
    own = vars(policy)
    held = [own, *[vars_of(each) for each in own.values() if is_dataclass(each)]]
    # Only its declared parameters: a policy also holds counters.
    kinds = [kind for kind in type(policy).__mro__ if issubclass(kind, SpawnPolicy)]
    found = {name: part[name] for name in policy.parameters() for part in reversed(held) if name in part}
    # None, the default, where other parameters determine the value: comparisons ignore values that only one run has.
    if policy.cadence == Every(policy.average_every, at_zero=isinstance(policy, AverageAllPolicy)):
        found["cadence"] = None
    if isinstance(policy, AsyncSelectiveAveragingPolicy) and found["selection"] == selection_for(
        policy.replacement_mode, ratio=policy.replacement_ratio, threshold=policy.threshold, mode=policy.mode
    ):
        found["selection"] = None
    if found.get("travels") == next((USUAL[each] for each in kinds if each in USUAL), StateScope()):
        found["travels"] = None
    if "lr" in found:
        found.pop("rule", None)
    return {name: document(value) for name, value in found.items() if name not in NO_PARAMETERS}


class _Kept:
    """The records of a run: rows of a sample of ranks, and events."""

    def __init__(self, where: _Circumstances, policy: SpawnPolicy, model_nbytes: int) -> None:
        count = min(where.sample, where.ranks)
        self.ranks: Ints = np.unique(np.linspace(0, where.ranks - 1, count).round().astype(np.int64))
        self.recorder, self.last = Recorder(), -1
        self._sampled: Mask = np.zeros(where.ranks, np.bool_)
        self._sampled[self.ranks] = True
        self._alive = np.ones(len(self.ranks), np.bool_)
        self._nbytes = model_nbytes
        self._columns: list[dict[str, np.ndarray[Any, Any]]] = []
        # Figures of replacements show shares of all ranks, so a sample needs a kind of event that they do not read.
        self._kind = "replacement" if count == where.ranks else "sampled_replacement"
        self._how = _how(policy)

    def died(self, ranks: Ints, deaths_s: Floats) -> None:
        """Record the deaths of ranks."""
        for rank in ranks[self._sampled[ranks]].tolist():
            self._alive[np.searchsorted(self.ranks, rank)] = False
            self.recorder.event(rank, float(deaths_s[rank]), "crash", {})

    def rows(
        self, iteration: int, entered_s: Floats, since_s: Floats,
        turn: tuple[Floats, Floats, Decision | None] | None, *, more: Mapping[str, Floats],
    ) -> None:  # fmt: skip
        """Add a row for each living rank of the sample."""
        self.last, who = iteration, self.ranks[self._alive]
        clock, metrics, decision = (entered_s, None, None) if turn is None else turn
        replaced, donors = np.zeros(len(who), np.bool_), np.zeros(len(who), np.int64)
        if decision is not None and len(decision.replaced):
            place = np.minimum(np.searchsorted(decision.replaced, who), len(decision.replaced) - 1)
            replaced = decision.replaced[place] == who
            donors = np.where(replaced, decision.counts[place], 0)
        self._columns.append(
            {
                "rank": who.astype(np.int32),
                "time_s": clock[who],
                "iteration": np.full(len(who), iteration),
                "local_metric": np.full(len(who), np.nan) if metrics is None else metrics[who],
                "compute_s": entered_s[who] - since_s[who],
                "wait_s": clock[who] - entered_s[who],
                "is_replaced": replaced,
                "donors": donors,
                **{name: values[who] for name, values in more.items()},
            }
        )

    def round(self, done: Round, since_s: Floats) -> None:
        """Add the events of a turn."""
        wait_s, compute_s = done.left_s - done.entered_s, done.entered_s - since_s
        metrics = np.empty(0) if done.metrics is None else done.metrics
        if not np.isfinite(metrics.sum()):  # a sum is faster than a check of each metric
            metrics = metrics[np.isfinite(metrics)]
        first = int(done.members[0])
        self.recorder.event(
            first,
            float(done.left_s.max()),
            "round",
            {
                "iteration": done.iteration,
                "alive": len(done.members),
                "died": len(done.died),
                "replaced": 0 if done.decision is None else len(done.decision.replaced),
                "messages": done.messages,
                "bytes": done.nbytes,
                "compute_mean_s": float(compute_s.mean()),
                "compute_max_s": float(compute_s.max()),
                "wait_mean_s": float(wait_s.mean()),
                "wait_max_s": float(wait_s.max()),
                **({} if not metrics.size else _spread(metrics)),
            },
        )
        if done.decision is not None:
            self._replacements(done, done.decision)

    def _replacements(self, done: Round, decision: Decision) -> None:
        ends = np.cumsum(decision.counts)
        for index in np.flatnonzero(self._sampled[decision.replaced]).tolist():
            rank, edges = (
                int(decision.replaced[index]),
                slice(int(ends[index] - decision.counts[index]), int(ends[index])),
            )
            place = int(np.searchsorted(done.members, rank))
            donors, left_s = decision.donors[edges], float(done.left_s[place])
            own = {
                "iteration": done.iteration,
                "round": decision.round,
                "replaced": rank,
                "donors": donors,
                "weights": decision.weights[edges],
                "versions": [done.iteration] * len(donors),
                "asked": done.iteration,
                "metric": None if done.metrics is None else float(done.metrics[place]),
                "low": decision.low,
                "high": decision.high,
                "bytes": len(donors) * self._nbytes,
                "wait_s": left_s - float(done.entered_s[place]),
            }
            self.recorder.event(rank, left_s, self._kind, own | dict(self._how))

    def table(self) -> Table:
        """Return the rows, by rank."""
        if not self._columns:
            return Table({"rank": np.empty(0, np.int32), "time_s": np.empty(0)})
        columns = {name: np.concatenate([each[name] for each in self._columns]) for name in self._columns[0]}
        order = np.argsort(columns["rank"], kind="stable")
        return Table(columns).where(order)


def _how(policy: SpawnPolicy) -> Mapping[str, Any]:
    """Return the fields of replacement events that describe the policy."""
    if not isinstance(policy, AsyncSelectiveAveragingPolicy):
        return {}
    how = policy.replacement
    return {
        "served": "before", "strategy": how.strategy, "momentum": how.momentum, "rule": how.rule,
        "optimizer_state": how.travels.optimizer_state, "mode": policy.mode,
    }  # fmt: skip


def _spread(metrics: Floats) -> dict[str, float]:
    return {
        "metric_low": float(metrics.min()),
        "metric_mean": float(metrics.mean()),
        "metric_high": float(metrics.max()),
    }
