"""torchft's lighthouse on virtual ranks: it forms quorums, also after deaths and restarts.

It decides as torchft's does: at once if all members of the last quorum have asked, else when all replicas with a fresh
heartbeat have asked, or after `join_timeout` when more than half of them have. It is on the node of rank 0, and
survives that rank. A heartbeat costs nothing and is never lost, so a replica is given up `heartbeat_timeout` after its
last heartbeat; until then a dead replica that has asked counts as a member, as upstream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from spawnsim.virtual.engine.kernel import current_task
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.mpi.context import Context
from spawnsim.virtual.torch.stores import Shared

LIGHTHOUSE = "torchft.lighthouse"


@dataclass(eq=False)
class Replica:
    """The lighthouse's record of a replica; `place` is its rank and incarnation."""

    place: tuple[int, int]
    began_s: float
    every_s: float  # heartbeat interval
    ended_s: float = math.inf  # when it died or left
    asked_s: float | None = None  # the time since which it waits for a quorum
    step: int = 0
    shrink_only: bool = False  # whether its quorum may contain only members of the last one
    failures: int = 0  # consecutive steps that it could not commit
    quorum: Quorum | None = None  # its last quorum

    def gone_s(self, timeout_s: float) -> float:
        """Return the time at which the lighthouse gives it up."""
        if self.ended_s == math.inf:
            return math.inf
        beats = max(math.ceil((self.ended_s - self.began_s) / self.every_s) - 1, 0)
        return self.began_s + beats * self.every_s + timeout_s


@dataclass(frozen=True)
class Quorum:
    """Replicas that continue together. `number` counts changes of the members."""

    number: int
    members: tuple[tuple[int, int], ...]
    steps: tuple[int, ...]
    context: Context

    def sources(self, init_sync: bool) -> dict[int, int]:
        """Map each member that needs weights to its source: at step 0 with `init_sync`, the first member."""
        newest = max(self.steps)
        ahead = [each for each, step in enumerate(self.steps) if step == newest]
        if init_sync and newest == 0:
            ahead = ahead[:1]
        behind = [each for each in range(len(self.steps)) if each not in ahead]
        return {each: ahead[number % len(ahead)] for number, each in enumerate(behind)}


@dataclass(eq=False)
class Lighthouse:
    """Forms quorums. Times in seconds; `torchft_lighthouse` has the same defaults."""

    world: World
    min_replicas: int = 1
    join_s: float = 60.0
    tick_s: float = 0.1
    heartbeat_s: float = 5.0
    shared: Shared = field(default_factory=lambda: Shared("the lighthouse", 0, served=True))
    replicas: dict[tuple[int, int], Replica] = field(default_factory=dict)
    members: tuple[tuple[int, int], ...] = ()
    number: int = 0
    context: Any = None
    due_s: float = math.inf  # the time of its next scheduled check

    def join(self, replica: Replica) -> None:
        self.replicas[replica.place] = replica

    def ask(self, replica: Replica) -> None:
        """Record that a replica waits for a quorum, and check whether there is one."""
        replica.asked_s, replica.quorum = self.world.kernel.current.clock, None
        self.check()

    def check(self) -> None:
        """Announce a quorum if there is one, else schedule the next check."""
        now_s = self.world.kernel.env.now
        healthy = [each for each in self.replicas.values() if self._gone_s(each) > now_s]
        asking = [each for each in healthy if each.asked_s is not None]
        if asking and self._enough(asking, healthy, now_s):
            if self.members and any(each.shrink_only for each in asking):
                asking = [each for each in asking if each.place in self.members]
                if not asking:  # only newcomers: they keep asking
                    return
            self._announce(sorted(asking, key=lambda each: each.place))
            self.shared.changed(now_s)
        elif asking:
            ends = [self._gone_s(each) for each in healthy if each.asked_s is None]
            ends.append(self._joined_s(asking))
            self._schedule_check(min((each for each in ends if each > now_s), default=math.inf))

    def _enough(self, asking: list[Replica], healthy: list[Replica], now_s: float) -> bool:
        here = {each.place for each in asking}
        if self.members and here.issuperset(self.members):
            return True
        if len(asking) < self.min_replicas or 2 * len(asking) <= len(healthy):
            return False
        return len(asking) == len(healthy) or now_s >= self._joined_s(asking)

    def _joined_s(self, asking: list[Replica]) -> float:
        return min(each.asked_s for each in asking if each.asked_s is not None) + self.join_s

    def _gone_s(self, replica: Replica) -> float:
        rank, incarnation = replica.place
        found = self.world.ranks[rank]
        if replica.ended_s == math.inf and found.incarnation != incarnation:
            replica.ended_s = self.world.kernel.env.now
        elif replica.ended_s == math.inf:
            replica.ended_s = min(found.death_s if found.dead else math.inf, found.ended_s)
        return replica.gone_s(self.heartbeat_s)

    def _schedule_check(self, time_s: float) -> None:
        """Schedule a check for the first tick at or after a time."""
        env = self.world.kernel.env
        time_s = max(math.ceil(time_s / self.tick_s) * self.tick_s if time_s < math.inf else time_s, env.now)
        if time_s < math.inf and not env.now < self.due_s <= time_s:
            self.due_s = time_s
            env.at(time_s, len(self.world.ranks), self.check)

    def _announce(self, asking: list[Replica]) -> None:
        places = tuple(each.place for each in asking)
        if places != self.members or any(each.failures for each in asking):
            self.number, self.members = self.number + 1, places
            again = {rank: incarnation for rank, incarnation in places if incarnation}
            self.context = Context(self.world, (tuple(rank for rank, _ in places),), incarnations=again)
            self.context.name, self.context.lasting, self.context.queue = f"quorum {self.number}", True, {}
            facts = {
                "number": self.number,
                "replicas": len(places),
                "step": max(each.step for each in asking),
            }
            self.world.recorder.event(places[0][0], self.world.kernel.env.now, "quorum", facts)
        quorum = Quorum(self.number, places, tuple(each.step for each in asking), self.context)
        for each in asking:
            each.asked_s, each.quorum = None, quorum
            self.world.ranks[each.place[0]].outside = False

    def count(self) -> tuple[int, int]:
        """Return the number of replicas that wait for a quorum, and of replicas with a fresh heartbeat."""
        healthy = [each for each in self.replicas.values() if self._gone_s(each) > self.world.kernel.env.now]
        return sum(each.asked_s is not None for each in healthy), len(healthy)

    def note_ends(self) -> None:
        """Record deaths before the dead ranks restart."""
        for each in self.replicas.values():
            self._gone_s(each)
        self.check()


def lighthouse() -> Lighthouse:
    """Return the lighthouse of the calling rank's world."""
    task = current_task()
    assert task is not None
    world: World = task.kernel.owner
    found: Lighthouse | None = world.attachments.get(LIGHTHOUSE)
    if found is None:
        found = world.attachments[LIGHTHOUSE] = Lighthouse(world)
        world.on_death.append(found.note_ends)
    return found


class LighthouseServer:
    """Sets the lighthouse's rules, for programs that start their own lighthouse. Times in milliseconds."""

    def __init__(
        self, bind: str = "", min_replicas: int = 1, join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None, heartbeat_timeout_ms: int | None = None,
    ) -> None:  # fmt: skip
        found = lighthouse()
        found.min_replicas = min_replicas
        found.join_s = (100 if join_timeout_ms is None else join_timeout_ms) / 1e3
        found.tick_s = (100 if quorum_tick_ms is None else quorum_tick_ms) / 1e3
        found.heartbeat_s = (5000 if heartbeat_timeout_ms is None else heartbeat_timeout_ms) / 1e3

    def address(self) -> str:
        """Return an address; nothing listens there."""
        return "http://lighthouse:29510"

    def shutdown(self) -> None:
        """Do nothing: the lighthouse ends with the run."""
