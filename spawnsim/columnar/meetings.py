"""Communication over columns: the collectives of a group, and the turns of policies that consist of them.

A turn advances all clocks from the arrival of the ranks to their departure, and returns its decision and its traffic.
Each turn class lists the collectives of its policy in order. Tests compare the times with the policy itself
(averaging) or with a program that makes the same calls (selective replacement in lockstep).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from spawnsim import random
from spawnsim.columnar.durations import Streams
from spawnsim.columnar.models import Models
from spawnsim.columnar.transfers import Cards, Moved, exchange
from spawnsim.errors import UnsupportedError
from spawnsim.models.collectives import Finish, Timing
from spawnsim.models.collectives.catalogue import CallSize
from spawnsim.models.faults import FaultPlan
from spawnsim.models.network.cost import Floats, Ints
from spawnsim.models.platform import Platform
from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    SPARTAPolicy,
    SpawnPolicy,
    StreamingDiLoCoPolicy,
)
from spawnsim.policies.exchange.messages import HEADER_NBYTES
from spawnsim.policies.outer_optimizer import GlobalWeightsPolicy
from spawnsim.policies.rules.donors import Decision, decide, how_many
from spawnsim.policies.rules.selection import Mask, Reports
from spawnsim.policies.state.difference_codecs import RandomMask

# Algorithms with one step per rank: with a million ranks, a million steps of a million ranks take too long.
STEPWISE = ("ring", "pairwise", "linear", "chain", "scatter_ring")
MOST_STEPS = 32_768
PLACE_NBYTES = (
    24  # sent by each rank of a group with global weights: steps, the last round, a digest of the settings
)
DIGEST_NBYTES = 16  # compared by averaging ranks before they sum: a checksum and its complement


@dataclass
class Traffic:
    """The messages sent so far.

    Attributes:
        messages: number of messages.
        nbytes: their size in bytes.
    """

    messages: int = 0
    nbytes: int = 0

    def add(self, sent: Moved | Finish) -> None:
        """Add the messages of an exchange, or of a collective."""
        self.messages += sent.messages
        self.nbytes += sent.nbytes


@dataclass
class Group:
    """The ranks that are alive, their clocks, and their traffic.

    Args:
        ranks: number of ranks in the world.
        platform: network and collective algorithms.
        plan: fault plan; only its pauses are used.
    """

    ranks: int
    platform: Platform
    plan: FaultPlan = field(default_factory=FaultPlan)
    members: Ints | None = None
    """World ranks that are alive, ascending; None: all."""
    cards: Cards = field(init=False)
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self.cards = Cards(np.zeros(self.ranks), np.full(self.ranks, -np.inf))
        self._timing = Timing(self.platform.network, self.platform.collectives)

    @property
    def size(self) -> int:
        """Number of ranks that are alive."""
        return self.ranks if self.members is None else len(self.members)

    @property
    def at(self) -> Ints | slice:
        """Index of the living ranks into columns over all ranks."""
        return slice(None) if self.members is None else self.members

    def world(self) -> Ints:
        """Return the world ranks that are alive, ascending.

        Returns:
            int64 (size,).
        """
        return np.arange(self.ranks) if self.members is None else self.members

    def feasible(self, operation: str, nbytes: int) -> bool:
        """Return whether the algorithm for a call has few enough steps to be simulated.

        Args:
            operation: name of the collective.
            nbytes: see `meet`.

        Returns:
            Whether `meet` accepts the call.
        """
        return self.size <= MOST_STEPS or self._algorithm(operation, nbytes).split(":")[-1] not in STEPWISE

    def _algorithm(self, operation: str, nbytes: int) -> str:
        return self.platform.collectives.algorithm(operation, CallSize(self.size, nbytes))

    def meet(self, operation: str, nbytes: int, root: int = 0) -> None:
        """Execute one collective call of all living ranks; see `start`."""
        self.cards.clock[self.at] = self.start(operation, nbytes, root)
        self.wake()

    def start(self, operation: str, nbytes: int, root: int = 0) -> Floats:
        """Start one collective call of all living ranks.

        Args:
            operation: name of the collective, such as "allreduce".
            nbytes: size of the vector, or of a rank's block.
            root: rank of the root in the group.

        Returns:
            When it ends on each rank, float64 (size,), seconds.

        Raises:
            UnsupportedError: the algorithm takes one step per rank, and there are too many ranks.
        """
        if self.size == 1:
            return self.cards.clock[self.at].copy()
        if not self.feasible(operation, nbytes):
            algorithm = self._algorithm(operation, nbytes)
            raise UnsupportedError(
                f"columnar: {operation} of {nbytes:,} bytes would run as {algorithm!r}, a step for each of "
                f"{self.size:,} ranks: name another algorithm in the platform's [collectives], such as {operation} = "
                f'"{_OTHERS.get(operation, "binomial")}"'
            )
        at, cards = self.at, self.cards
        arrivals, free = cards.clock[at], cards.out_free[at]
        busy = free > arrivals
        out_free = np.where(busy, free, -np.inf) if busy.any() else None
        found = self._timing.finish(operation, arrivals, nbytes, root, ranks=self.members, out_free=out_free)
        if out_free is not None:  # else no NIC is busy after its rank has left
            cards.out_free[at] = np.maximum(free, found.out_free)
        self.traffic.add(found)
        return found.times

    def count(self, moved: Moved) -> None:
        """Count the messages of an exchange that has advanced the clocks."""
        self.wake()
        self.traffic.add(moved)

    def wake(self) -> None:
        """Defer ranks that would continue during a pause to the end of the pause."""
        clock = self.cards.clock
        for rank in sorted(self.plan.paused):
            clock[rank] = self.plan.awake_s(rank, float(clock[rank]))


_OTHERS = {"allreduce": "rabenseifner", "allgather": "bruck", "bcast": "binomial"}


class Turn(ABC):
    """A policy's turn over columns.

    Args:
        policy: the policy.
        group: the ranks.
        nbytes: size of one model on the wire.
    """

    def __init__(self, policy: SpawnPolicy, group: Group, nbytes: int) -> None:
        self.cadence, self.group, self.nbytes = policy.cadence, group, nbytes
        self.notes: dict[str, None] = {}  # notes for the user; a dict keeps their order

    def due(self, iteration: int) -> bool:
        """Return whether ranks meet in an iteration."""
        return self.cadence.due(iteration)

    def tick(self) -> None:  # noqa: B027  most policies do nothing in calls that are not due
        """Count one call of the policy on all ranks."""

    def _meet_once(self, operation: str, nbytes: int, what: str) -> None:
        """Execute a call of a new group; if its algorithm has too many steps, skip its time and add a note."""
        if self.group.feasible(operation, nbytes):
            self.group.meet(operation, nbytes)
            return
        self.notes[
            f"the first meeting of {self.group.size:,} ranks {what}, which takes a step for each rank: its time is not "
            f'included; {operation} = "{_OTHERS[operation]}" in [collectives] includes it'
        ] = None

    @abstractmethod
    def act(self, iteration: int, metrics: Floats, models: Models) -> Decision | None:
        """Take the turn of an iteration: advance the clocks and change the models.

        Args:
            iteration: the iteration of all ranks.
            metrics: the metrics of all ranks, by world rank.
            models: the models of all ranks.

        Returns:
            The decision; None for policies that decide nothing.
        """


def take_mean(
    group: Group, models: Models, policy: AverageAllPolicy, *, nbytes: int, mask: RandomMask | None = None
) -> None:
    """Execute the calls of `GroupMean` on backends that survive deaths, such as virtual ranks.

    Args:
        group: the ranks.
        models: their models, whose mean is taken.
        policy: what is averaged, and how.
        nbytes: size of the sum.
        mask: the weights that are averaged; None: all.
    """
    equal = group.size == 1
    # If rounding could change the mean of equal models, ranks compare digests first: three if they agree, else one.
    if group.size & (group.size - 1):
        equal = models.are_equal(group.at, policy, mask)
        for _ in range(3 if equal else 1):
            group.meet("allreduce", DIGEST_NBYTES)
    if not equal:
        group.meet("allreduce", nbytes)
    models.average(group.at, policy, equal=equal, mask=mask)


class AveragingTurn(Turn):
    """`AverageAllPolicy`: one mean per turn."""

    def __init__(self, policy: AverageAllPolicy, group: Group, nbytes: int) -> None:
        super().__init__(policy, group, nbytes)
        self._policy = policy
        self._agreed = 0  # ranks of the group that has agreed on the layout of its models

    def act(self, iteration: int, metrics: Floats, models: Models) -> Decision | None:
        self._agree()
        take_mean(self.group, models, self._policy, nbytes=self.nbytes)
        return None

    def _agree(self) -> None:
        """Let a new group compare the layouts of its models, once."""
        if self._agreed != self.group.size:
            self._agreed = self.group.size
            self._meet_once("allgather", DIGEST_NBYTES, "compares layouts in an Allgather")


class OuterTurn(Turn):
    """Policies with global weights of one fragment: `OuterOptimizerPolicy`, `EASGDPolicy`.

    The ranks of a new group exchange their progress (`Allgather`, 24 bytes) and compare layouts. At the beginning all
    ranks adopt the whole model of the lowest rank (`Bcast`). A round is one `Allreduce`, or an `Allgather` of codes.
    """

    def __init__(self, policy: GlobalWeightsPolicy, group: Group, nbytes: int, whole_nbytes: int) -> None:
        super().__init__(policy, group, nbytes)
        self._policy, self._whole_nbytes = policy, whole_nbytes
        self._met = 0  # ranks of the group that has met

    def due(self, iteration: int) -> bool:
        return not iteration or self.cadence.due(iteration)

    def act(self, iteration: int, metrics: Floats, models: Models) -> Decision | None:
        begin = not self._met
        if self._met != self.group.size:
            self._join(models)
        if not begin:
            self._round(iteration, models)
        return None

    def _join(self, models: Models) -> None:
        """Let a new group meet."""
        for nbytes in (PLACE_NBYTES, DIGEST_NBYTES):
            self._meet_once(
                "allgather", nbytes, "compares how far all are, and layouts, in an Allgather each"
            )
        if not self._met:
            self._meet_once("bcast", self._whole_nbytes, "copies the first rank's model in a Bcast")
            models.begin_together(self.group.at, self._policy)
        self._met = self.group.size

    def _round(self, iteration: int, models: Models) -> None:
        models.send_difference(self.group.at, self._policy)
        self.group.meet("allreduce" if self._policy.outer.feedback is None else "allgather", self.nbytes)
        models.step_together(self.group.at, self._policy, iteration)


class StreamingTurn(OuterTurn):
    """`StreamingDiLoCoPolicy`: a fragment's mean starts at its turn, and is applied `overlap` iterations later."""

    def __init__(
        self, policy: StreamingDiLoCoPolicy, group: Group, nbytes: list[int], whole_nbytes: int
    ) -> None:
        super().__init__(policy, group, sum(nbytes), whole_nbytes)
        self._streaming, self._nbytes = policy, nbytes
        self._under_way: deque[tuple[int, int, Floats]] = deque()  # fragment, iteration of the send, ends

    def due(self, iteration: int) -> bool:
        return super().due(iteration) or self._arrives(iteration)

    def _arrives(self, iteration: int) -> bool:
        return bool(self._under_way) and iteration >= self._under_way[0][1] + self._streaming.overlap

    def _join(self, models: Models) -> None:
        if self._met and self._under_way:
            raise UnsupportedError(
                "columnar: StreamingDiLoCoPolicy with overlap, whose ranks die while means are under way, has no form "
                "over columns: run it on virtual ranks"
            )
        super()._join(models)

    def _round(self, iteration: int, models: Models) -> None:
        policy, group = self._streaming, self.group
        while self._arrives(iteration):
            self._apply(models, iteration)
        if not self.cadence.due(iteration):
            return
        place = policy.place_at(iteration)
        models.send_difference(group.at, policy, place)
        operation = "allreduce" if policy.outer.feedback is None else "allgather"
        self._under_way.append((place, iteration, group.start(operation, self._nbytes[place])))
        if not policy.overlap:
            self._apply(models, iteration)

    def _apply(self, models: Models, iteration: int) -> None:
        place, _, ends = self._under_way.popleft()
        clock, at = self.group.cards.clock, self.group.at
        clock[at] = np.maximum(clock[at], ends)
        self.group.wake()
        models.step_together(at, self._streaming, iteration, place)


class SharesTurn(OuterTurn):
    """`SPARTAPolicy`: ranks begin together; a round is the mean of a few weights, at places that all ranks draw."""

    def __init__(
        self, policy: SPARTAPolicy, group: Group, nbytes: int, whole_nbytes: int, *, seed: int
    ) -> None:
        super().__init__(policy, group, nbytes, whole_nbytes)
        self._share, self._seed = policy.share, seed
        self._mean = AverageAllPolicy(1, travels=policy.travels)

    def _join(self, models: Models) -> None:
        super()._join(models)
        self._meet_once("allgather", DIGEST_NBYTES, "compares the layouts of its means in an Allgather")

    def _round(self, iteration: int, models: Models) -> None:
        mask = RandomMask(self._share, self._seed, iteration)
        take_mean(self.group, models, self._mean, nbytes=self.nbytes, mask=mask)


class SelectiveTurn(Turn):
    """`AsyncSelectiveAveragingPolicy` in lockstep: gather, decide, scatter, request, send.

    Each rank sends its report to the coordinator (`Gather`, 64 bytes). The coordinator decides, and sends each rank the
    number of requests to expect, and its donors with their weights (`Scatter`, 8 bytes + 16 per possible donor). Then
    models move (`transfers.exchange`). Ranks that neither request a model nor donate continue at once.
    """

    def __init__(
        self, policy: AsyncSelectiveAveragingPolicy, group: Group, nbytes: int, *, seed: int, streams: Streams
    ) -> None:
        super().__init__(policy, group, nbytes)
        self.rules, self._policy = policy.rules, policy
        self._cooldown, self._coordinator = policy.cooldown, policy.wiring.coordinator
        self._last_trigger = -self._cooldown
        self._seed, self._bulk = seed, streams == "bulk"
        self._donors: dict[int, np.random.Generator] = {}
        by_age = policy.replacement_mode == "age"
        self._ages = Ages(policy.age_range, group.ranks, seed, bulk=self._bulk) if by_age else None
        self._expired: Mask = np.zeros(group.ranks, np.bool_)

    def tick(self) -> None:
        if self._ages is not None:
            self._expired = self._ages.tick()

    def act(self, iteration: int, metrics: Floats, models: Models) -> Decision | None:
        group, world = self.group, self.group.world()
        # If recoveries have made the group smaller than that, its last rank coordinates.
        leader = min(self._coordinator, group.size - 1)
        group.meet("gather", HEADER_NBYTES, leader)
        reports = Reports(world, metrics[group.at], self._expired[group.at])
        decision = self._decide(iteration, reports, int(world[leader]))
        group.meet(
            "scatter", 8 + 16 * how_many(getattr(self.rules.donors, "count", None), group.size), leader
        )
        moved = exchange(group.cards, decision, group.platform.network, self.nbytes)
        group.count(moved)
        if len(decision.replaced):
            models.replace(decision, self._policy)
        if self._ages is not None:
            self._ages.reset(decision.replaced)
        return decision

    def _decide(self, iteration: int, reports: Reports, leader: int) -> Decision:
        if iteration - self._last_trigger < self._cooldown:
            return Decision(iteration, len(reports))
        rng = self._donors.get(leader)
        if rng is None:
            rng = self._donors[leader] = random.generator(self._seed, leader, "donors")
        decision = decide(iteration, reports, self.rules, rng, bulk=self._bulk)
        if len(decision.replaced):
            self._last_trigger = iteration
        return decision


class Ages:
    """The ages of all ranks: `rules.selection.Age` as columns.

    Args:
        age_range: lowest and highest age at which a rank is replaced.
        ranks: number of ranks.
        seed: seed of the run.
        bulk: whether ages are drawn for all ranks from one stream.
    """

    def __init__(self, age_range: tuple[int, int], ranks: int, seed: int, *, bulk: bool) -> None:
        self._low, self._high = age_range
        self._seed, self._bulk = seed, random.generator(seed, random.WORLD, "columnar.age") if bulk else None
        self._streams: dict[int, np.random.Generator] = {}
        self._age = np.zeros(ranks, np.int64)
        self._most = self._drawn(np.arange(ranks), first=True)

    def tick(self) -> Mask:
        """Count one call of every rank.

        Returns:
            Which ranks have expired, bool (ranks,).
        """
        expired: Mask = self._age >= self._most
        self._age += ~expired
        return expired

    def reset(self, replaced: Ints) -> None:
        """Reset the ages of replaced ranks, and draw their next limits.

        Args:
            replaced: the replaced ranks, int64.
        """
        self._age[replaced] = 0
        self._most[replaced] = self._drawn(replaced, first=False)

    def _drawn(self, ranks: Ints, *, first: bool) -> Ints:
        if self._low == self._high or not len(ranks):
            return np.full(len(ranks), self._low)
        if self._bulk is not None:
            return self._bulk.integers(self._low, self._high + 1, len(ranks))
        if first:
            streams = random.generators(self._seed, len(ranks), "age")
            return np.asarray([stream.integers(self._low, self._high + 1) for stream in streams])
        return np.asarray([self._next_of(rank) for rank in ranks.tolist()])

    def _next_of(self, rank: int) -> int:
        stream = self._streams.get(rank)
        if stream is None:
            # Streams are kept from a rank's first replacement on; its one earlier draw is repeated here.
            stream = self._streams[rank] = random.generator(self._seed, rank, "age")
            stream.integers(self._low, self._high + 1)
        return int(stream.integers(self._low, self._high + 1))
