"""A collective over links with faults: the same dataflow, with a verdict for each message.

A late message arrives later. A lost message never arrives, and its receiver waits for ever. Damage in a message
persists in all data derived from it: it is tracked block by block, from rank to rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from spawnsim.models.collectives.dataflow import Evaluation, Finish
from spawnsim.models.collectives.schedule import Lane, Lengths, MessageSizes, Pattern, Schedule
from spawnsim.models.faults import Verdict
from spawnsim.models.network.cost import Floats, Ints, Network


class Judge(Protocol):
    """Decides what happens to messages: see `spawnsim.virtual.engine.injection`."""

    def strikes(
        self, source: Ints, dest: Ints, sent_s: Floats, numbers: Ints
    ) -> Iterable[tuple[int, Verdict, float]]:
        """Yield the messages of a lane that a fault strikes: index, verdict, place of the damage.

        Args:
            source: World ranks of the senders, int (M,).
            dest: World ranks of the receivers, int (M,).
            sent_s: When each is sent, float64 (M,), seconds; NaN: never.
            numbers: Numbers that distinguish the messages of a pair of ranks, int (M,).
        """
        ...


class Strike(NamedTuple):
    """A fault that struck a message; ranks are relative to the root."""

    source: int
    dest: int
    sent_s: float
    number: int
    verdict: Verdict


class Damage(NamedTuple):
    """The damage of one message: a place (from 0 to 1) in a block that it carried from `source` to `dest`.

    Ranks and blocks are relative to the root; `number` distinguishes messages of one pair of ranks.
    """

    source: int
    dest: int
    number: int
    block: int
    place: float


class Struck(NamedTuple):
    """A collective under faults. Ranks are relative to the root.

    Attributes:
        finish: When each rank leaves: NaN for ranks that wait for a lost message.
        strikes: What happened to messages, in the order of the schedule.
        late: By rank, the ranks whose messages it received late or never: bit r stands for rank r.
        damage: By rank, the damage in the data that reached it.
    """

    finish: Finish
    strikes: list[Strike]
    late: dict[int, int]
    damage: dict[int, set[Damage]]


class Cargo(NamedTuple):
    """The contents of the messages of one lane besides time: by message, late senders and damage."""

    late: dict[int, int]
    damage: dict[int, set[Damage]]


class FaultyEvaluation(Evaluation):
    """The vectors of one collective, and the effects of faults on its messages."""

    def __init__(
        self, arrivals: Floats, network: Network, world: Ints, out_free: Floats | None,
        *, schedule: Schedule, judge: Judge,
    ) -> None:  # fmt: skip
        super().__init__(arrivals, network, world, out_free)
        self.separate()  # faults strike single ranks
        self.world, self.judge = world, judge
        self.total = schedule.parts if schedule.cut == "vector" else schedule.size
        # Otherwise a block goes to its receiver and no further: its damage spreads no further.
        self.passed_on = schedule.cut in ("vector", "blocks")
        self.lanes = 0  # lanes completed so far
        self.edges = _turns(schedule) if schedule.cut == "edges" else None
        self.strikes: list[Strike] = []
        self.late: dict[int, int] = {}
        self.damage: dict[int, set[Damage]] = {}

    def faulty_round(self, lanes: tuple[Lane, ...], amounts: MessageSizes, *, reduces: bool) -> None:
        """Execute one round."""
        flying = []
        self.meet()
        for lane in lanes:
            nbytes = amounts.of(lane)
            costs = self.costs(lane.pattern, nbytes)
            arrival, costs = self.send(lane.pattern, costs, nbytes)
            cargo = self.load(lane, nbytes, arrival)
            self.lanes += 1
            flying.append((lane, costs, arrival, self.work_s(nbytes, reduces, amounts.dtype), cargo))
        for lane, costs, arrival, work_s, cargo in flying:
            self.take(lane.pattern, costs, arrival, work_s)
            self.unload(lane, cargo, reduces)

    # -- on the way ------------------------------------------------------------------------------------------

    def load(self, lane: Lane, nbytes: Lengths, arrival: Floats) -> Cargo:
        """Let faults strike the messages of a lane: change their arrivals; return their contents."""
        pattern = lane.pattern
        cargo = Cargo(
            {pattern.message_from[rank]: late for rank, late in self.late.items() if _sends(pattern, rank)},
            {
                pattern.message_from[rank]: self.carried(lane, pattern.message_from[rank], known)
                for rank, known in self.damage.items()
                if _sends(pattern, rank) and self.passed_on
            },
        )
        sent_s = self.clock[pattern.senders]
        source, dest = self.world[pattern.source], self.world[pattern.dest]
        numbers = np.full(len(source), self.lanes) if self.edges is None else self.edges[lane.first]
        for index, verdict, place in self.judge.strikes(source, dest, sent_s, numbers):
            if not _of(nbytes, index):  # an empty message: nothing to damage
                verdict = verdict._replace(corrupt=False)
            self.strike(lane, index, verdict, cargo=cargo, place=place, number=int(numbers[index]))
            # A lost message is NaN, like an absent rank: everything that depends on it becomes NaN
            # automatically.
            arrival[index] += np.nan if verdict.lost else verdict.delay_s
        return cargo

    def strike(
        self, lane: Lane, index: int, verdict: Verdict, *, cargo: Cargo, place: float, number: int
    ) -> None:
        """Let a fault strike one message."""
        source, dest = int(lane.pattern.source[index]), int(lane.pattern.dest[index])
        if verdict.describe():
            self.strikes.append(Strike(source, dest, float(self.clock[source]), number, verdict))
        if verdict.lost or verdict.delay_s:
            cargo.late[index] = cargo.late.get(index, 0) | 1 << source
        if verdict.corrupt and not verdict.lost:
            first, blocks = int(_of(lane.first, index)), int(_of(lane.blocks, index))
            block = (first + int(place * blocks)) % self.total
            damage = Damage(source, dest, number, block, place * blocks % 1.0)
            cargo.damage[index] = cargo.damage.get(index, set()) | {damage}

    def carried(self, lane: Lane, index: int, known: set[Damage]) -> set[Damage]:
        """Return the part of a sender's damage that lies in the blocks of its message."""
        first, blocks = int(_of(lane.first, index)), int(_of(lane.blocks, index))
        return {damage for damage in known if (damage.block - first) % self.total < blocks}

    # -- at the receiver -------------------------------------------------------------------------------------

    def unload(self, lane: Lane, cargo: Cargo, reduces: bool) -> None:
        """Deliver the contents of a lane's messages to their receivers."""
        pattern = lane.pattern
        for index, late in cargo.late.items():
            rank = int(pattern.dest[index])
            self.late[rank] = self.late.get(rank, 0) | late
        # An arriving block replaces the old one, so the damage there vanishes. A reduction combines the two, so both
        # damages remain.
        if self.passed_on and not reduces:
            for rank in [rank for rank in self.damage if rank in pattern.message_to]:
                self.damage[rank] -= self.carried(lane, pattern.message_to[rank], self.damage[rank])
        for index, damage in cargo.damage.items():
            rank = int(pattern.dest[index])
            self.damage[rank] = self.damage.get(rank, set()) | damage


def _turns(schedule: Schedule) -> Ints:
    """Return for each edge of a neighbour exchange the number of earlier edges of the same two ranks."""
    edges = sorted(
        (edge, source, dest)
        for each in schedule.rounds
        for lane in each.lanes
        for edge, source, dest in zip(
            np.asarray(lane.first).tolist(),
            lane.pattern.source.tolist(),
            lane.pattern.dest.tolist(),
            strict=True,
        )
    )
    turns = np.zeros(edges[-1][0] + 1 if edges else 0, np.int64)
    seen: Counter[tuple[int, int]] = Counter()
    for edge, source, dest in edges:
        turns[edge] = seen[source, dest]
        seen[source, dest] += 1
    return turns


def _sends(pattern: Pattern, rank: int) -> bool:
    return rank in pattern.message_from


def _of(values: Ints | Floats | float, index: int) -> float:
    return float(values[index]) if isinstance(values, np.ndarray) else values


def run_struck(
    schedule: Schedule,
    amounts: MessageSizes,
    arrivals: Floats,
    network: Network,
    *,
    ranks: Ints,
    judge: Judge,
    out_free: Floats | None = None,
) -> Struck:
    """Return when each rank leaves, and the effects of faults: as `dataflow.run`, with a judge of messages."""
    found = FaultyEvaluation(arrivals, network, ranks, out_free, schedule=schedule, judge=judge)
    for each in schedule.rounds:
        found.faulty_round(each.lanes, amounts, reduces=each.reduces)
    return Struck(found.finish(), found.strikes, found.late, found.damage)
