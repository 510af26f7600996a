"""Runs over columns: in each iteration all ranks compute, then meet if the policy's cadence is due.

Experiments share nothing but the training of their models: it happens at turns, for all experiments that meet in an
iteration at once.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from spawnsim.columnar.durations import Durations
from spawnsim.columnar.experiment import Experiment
from spawnsim.columnar.meetings import Group, Turn
from spawnsim.columnar.models import Models, Numbers, RandomWalk, Sizes
from spawnsim.columnar.records import Kept, Round
from spawnsim.columnar.rows import Members
from spawnsim.columnar.saving import Saved
from spawnsim.columnar.supported import InTurn, name_of
from spawnsim.columnar.training import Trained, train_together, trained
from spawnsim.columnar.turns import turn_of
from spawnsim.errors import ParameterError
from spawnsim.models.network.cost import Ints
from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    Every,
    SpawnPolicy,
    StateScope,
)
from spawnsim.policies.outer_optimizer import GlobalWeightsPolicy
from spawnsim.policies.rules.selection import selection_for
from spawnsim.record import folder, manifest
from spawnsim.record.recorder import document, vars_of
from spawnsim.run.process_setup import one_thread
from spawnsim.run.result import Run, ordered
from spawnsim.virtual.digest import checksum

if TYPE_CHECKING:
    from spawnsim.comm import Comm

WAIT_S = 7 * 86_400.0  # how long a process waits for others, which may train more slowly


def run(policy: SpawnPolicy, *, comm: Comm | None = None, **given: Any) -> Run:
    """Run a policy over columns: times and decisions of very many ranks, with numbers as models or models that train.

    In each iteration every rank computes; if the policy's cadence is due, all living ranks then take its turn together.
    docs/columnar.md lists the policies that have a turn, and the differences from the ordinary mode.

    Args:
        policy: a policy with the same parameters as on virtual ranks; the run does not change it.
        comm: see `run_all`.
        given: the other arguments of `Experiment`; `ranks` and `iterations` are required.

    Returns:
        Rows of the sample, events, and totals over all ranks; see `Run`.

    Raises:
        ParameterError: a parameter is invalid; nothing ran.
        UnsupportedError: the policy, a fault or a straggler has no form over columns.
        UsageError: the policy's rules refuse their input.
    """
    return run_all([Experiment(policy=policy, **given)], comm=comm)[0]


def run_all(experiments: Sequence[Experiment], *, comm: Comm | None = None) -> list[Run]:
    """Run experiments over columns at once: the steps of models that can train together become one step.

    The results are those of separate runs: equal clocks, decisions, messages and streams, and equal weights where
    torch computes a batch of models independently of its size.

    Args:
        experiments: the experiments, which may differ in everything. Models train together if their structure,
            optimizer, loss, scores and `max_norm` are equal, and their batches have equal shapes.
        comm: real processes that make this call together: each trains a part of the models of every experiment, and
            the first one writes the run folders. None: this process alone.

    Returns:
        The run of each experiment; `wall_seconds` is its share of the time of all.

    Raises:
        SpawnsimError: as for `run`; of several experiments a note names the one at fault.
    """
    began_s = time.perf_counter()
    places = [None if each.out is None else folder.named(each.out) for each in experiments]
    for place, each in zip(places, experiments, strict=True):
        if place is not None:
            folder.require_free(place, overwrite=each.overwrite or each.resume)
    if comm is not None and any(each.training is None for each in experiments):
        raise ParameterError(
            "columnar: processes share models that train: without `training`, start one process"
        )
    with one_thread(), nullcontext() if comm is None else comm.clock.deadline(WAIT_S):
        runs = [_Running(each) for each in experiments]
        for own, models in zip(runs, _models(experiments, comm), strict=True):
            own.begin(models)
        _go(runs)
        wall_s = (time.perf_counter() - began_s) / max(len(runs), 1)
        found = [own.result(wall_s) for own in runs]
    for place, made in zip(places, found, strict=True):
        if place is not None and (comm is None or comm.Get_rank() == 0):
            made.save(place)
    return found


def _models(experiments: Sequence[Experiment], comm: Comm | None) -> list[Models]:
    given = [
        (each.training, each.ranks, each.seed, each.policy)
        for each in experiments
        if each.training is not None
    ]
    of_training = iter(trained(given, comm))
    return [
        _saved(next(of_training), each)
        if each.training is not None
        else Numbers(each.quality if each.quality is not None else RandomWalk(), each.ranks, each.seed)
        for each in experiments
    ]


def _saved(models: Trained, how: Experiment) -> Models:
    if how.out is None or not (how.checkpoint_every or how.resume):
        return models
    models.require_savable()
    saved = Saved(models, folder.named(how.out), every=how.checkpoint_every, resume=how.resume)
    return cast(Models, saved)


def _go(runs: Sequence[_Running]) -> None:
    """Run experiments until their last iteration, or until all ranks have died."""
    active = [*runs]
    while active:
        meeting = []
        for own in active:
            with own.named(len(runs)):
                if own.compute():
                    meeting.append(own)
        train_together([own.order() for own in meeting if own.group.size])
        for own in meeting:
            with own.named(len(runs)):
                own.meet()
        active = [own for own in active if not own.ended]


class _Running:
    """An experiment in progress."""

    def __init__(self, how: Experiment) -> None:
        platform, self._plan, self._model = how.parts()
        self.how = how
        self.group = Group(how.ranks, platform, self._plan)
        # This may refuse the policy; building models may take long.
        nbytes = 1 if how.model_nbytes is None else how.model_nbytes
        self.turn = self._turn(lambda _: (nbytes, None))

    def begin(self, models: Models) -> None:
        """Take the models; open the streams of compute times."""
        how, self.models = self.how, models
        if how.model_nbytes is None:
            self.turn = self._turn(models.sizes)
        self.durations = Durations(
            self._model, self._plan, how.ranks, blocks=how.iterations, seed=how.seed, streams=how.streams
        )
        self.deaths_s = how.deaths_s(self._plan)
        self.iteration = -1
        self.trained = 0  # iterations trained so far
        self.left_s = np.zeros(how.ranks)  # departure from the latest turn
        self.kept = Kept(how.policy, how.ranks, how.sample, self.turn.nbytes)
        self.blocks = self.replaced = self.lost = 0
        self.digest = hashlib.blake2b(digest_size=16)
        self.ended = False
        if isinstance(models, Saved):
            models.begin(self._described())

    def _turn(self, sizes: Callable[[SpawnPolicy], Sizes]) -> Turn:
        draws: dict[str, Any] = {"seed": self.how.seed, "streams": self.how.streams}
        return turn_of(self.how.policy, self.group, sizes, **draws)

    @contextmanager
    def named(self, count: int) -> Iterator[None]:
        """Add a note to errors of one of several experiments."""
        try:
            yield
        except Exception as error:
            if count > 1:
                error.add_note(
                    f"in the experiment with {type(self.how.policy).__name__}, {self.how.ranks} ranks, "
                    f"seed {self.how.seed}, iteration {self.iteration}"
                )
            raise

    def compute(self) -> bool:
        """Execute the next iteration's blocks; return whether the ranks meet, or end."""
        self.iteration += 1
        clock = self.group.cards.clock
        clock[:] = self.durations.ends(clock)
        self.blocks += self.group.size
        self.turn.tick()
        self._due, last = self.turn.due(self.iteration), self.iteration + 1 == self.how.iterations
        if not self._due and not last:
            return False
        self._died = self._bury()
        self.ended = last or not self.group.size
        return True

    def order(self) -> tuple[Models, int, int, Members]:
        """Return the steps up to the present iteration, inclusive, as arguments of `train_together`."""
        first, self.trained = self.trained, self.iteration + 1
        return self.models, first, self.trained - first, self.group.at

    def meet(self) -> None:
        """Take the turn if it is due, and keep rows of the last iteration."""
        if self._due and self.group.size:
            self._meet()
        if self.ended:
            self._bury()
            if self.group.size and self.kept.last != self.iteration:
                clock = self.group.cards.clock
                self.kept.rows(self.iteration, clock, self.left_s, None, more=self.models.columns())

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

    def _meet(self) -> None:
        group, cards, iteration, died = self.group, self.group.cards, self.iteration, self._died
        at = group.at
        entered_s = cards.clock.copy()
        if len(died) and self.how.detection_s:
            cards.clock[at] = cards.clock[at].max() + self.how.detection_s
        metrics, more, mean = self.models.metrics(iteration), self.models.columns(), self.models.of_mean()
        before = group.traffic.messages, group.traffic.nbytes
        decision = self.turn.act(iteration, metrics, self.models)
        self.replaced += 0 if decision is None else len(decision.replaced)
        done = Round(
            iteration, group.world(), entered_s[at], cards.clock[at].copy(), metrics[at], decision, died,
            group.traffic.messages - before[0], group.traffic.nbytes - before[1],
        )  # fmt: skip
        self.kept.round(done, self.left_s[at], mean)
        self.kept.rows(iteration, entered_s, self.left_s, (cards.clock, metrics, decision), more=more)
        self.left_s[:] = cards.clock
        parts = [cards.clock] if decision is None else [cards.clock, decision.replaced, decision.donors]
        self.digest.update(str([checksum(part) for part in parts]).encode())
        if self.how.on_round is not None and not self.models.replays:
            self.how.on_round(done)

    def result(self, wall_s: float) -> Run:
        """Return the run; it took `wall_s` seconds."""
        cards, traffic = self.group.cards, self.group.traffic
        self.digest.update(str([checksum(cards.clock), self.models.checksum()]).encode())
        known = {
            "ranks": self.how.ranks,
            "iterations": self.iteration + 1,
            "virtual_seconds": float(cards.clock.max()),
            "wall_seconds": wall_s,
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
        own = {"policy": name_of(self.how.policy)} | _made_of(self.how.policy)
        about: dict[str, Any] = {"file": None, "main": "columnar", "parameters": own}
        about |= {"backend": "virtual", "columnar": True} | self.models.described()
        about |= self.how.described() | {"model_nbytes": self.turn.nbytes}
        about |= {"notes": list(self.turn.notes), "reproducible": True, "leaks": []}
        return about | {"versions": manifest.versions(), "made": manifest.made()}


NO_PARAMETERS = {"timing", "wiring"}  # they do not affect decisions
# The default scopes of policies; for every other policy the whole state travels.
USUAL: dict[type[SpawnPolicy], StateScope] = {
    AsyncSelectiveAveragingPolicy: StateScope(optimizer_state="reset"),
    GlobalWeightsPolicy: StateScope(frozen=False, buffers=False),
}


def _made_of(policy: SpawnPolicy) -> dict[str, Any]:
    """Return the parameters of a policy by name, read from the policy itself, its rules and its other parts."""
    if isinstance(policy, InTurn):
        own: dict[str, Any] = {"report_every": policy.report_every}
        for number, each in enumerate(policy.policies, 1):
            own |= {f"{name} {number}": value for name, value in _made_of(each).items()}
        return own
    own = dict(vars(policy))
    held = [own, *[vars_of(each) for each in own.values() if is_dataclass(each)]]
    # Only its declared parameters: a policy also holds counters.
    kinds = [kind for kind in type(policy).__mro__ if issubclass(kind, SpawnPolicy)]
    found = {name: part[name] for name in policy.parameters() for part in reversed(held) if name in part}
    # None, the default, where other parameters determine the value: comparisons ignore values that only one run has.
    if policy.cadence == Every(policy.average_every, at_zero=isinstance(policy, AverageAllPolicy)):
        found["cadence"] = None
    if isinstance(policy, AsyncSelectiveAveragingPolicy) and found.get("selection") == selection_for(
        policy.replacement_mode, ratio=policy.replacement_ratio, threshold=policy.threshold, mode=policy.mode
    ):
        found["selection"] = None
    if found.get("travels") == next((USUAL[each] for each in kinds if each in USUAL), StateScope()):
        found["travels"] = None
    if "lr" in found:
        found.pop("rule", None)
    return {name: document(value) for name, value in found.items() if name not in NO_PARAMETERS}
