"""The state of a virtual cluster: its ranks with their clocks, and their shared state."""

from __future__ import annotations

import hashlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from spawnsim.models.collectives import Timing
from spawnsim.models.network import Network
from spawnsim.random import Streams
from spawnsim.virtual.digest import RankDigest
from spawnsim.virtual.engine.completion import ReceivingNic
from spawnsim.virtual.engine.contention import model_of
from spawnsim.virtual.engine.kernel import Kernel, Task

BATCHED = "batched-"  # begins the digest of a run whose training steps were executed together


class Recorder(Protocol):
    """The interface through which a backend records; see `spawnsim.record`."""

    def row(self, rank: int, time_s: float, values: Any) -> None: ...

    def event(self, rank: int, time_s: float, kind: str, fields: Any) -> None:
        """Record one event."""
        ...


@dataclass(eq=False, slots=True)
class Rank:
    """The state of one rank. `id` is its rank in the world."""

    id: int
    kernel: Kernel
    digest: RankDigest
    streams: Streams
    incarnation: int = 0  # number of restarts
    death_s: float = math.inf
    dead: bool = False
    ended_s: float = math.inf  # when its program ended
    nic_free_s: float = 0.0  # when its NIC can start the next message
    bulk_free_s: float = 0.0  # the same for rendezvous data, which do not queue behind small messages
    # A heap of rendezvous data that may start: time, number, transfer.
    cleared: list[Any] = field(default_factory=list)
    # The number of observers that could see this rank's actions between two calls: background tasks, exposed windows,
    # and one more if the plan has deaths or pauses. With any observer the rank does not run ahead, because its stores
    # must happen at their own time: one event per block is the price of exact one-sided access.
    observers: int = 0
    busy: Sequence[tuple[float, float]] = ()  # computing intervals (from, to); kept while exposed
    waited: Sequence[Callable[[], None]] = ()  # accesses that wait for a block with an unknown end
    messages: int = 0
    nbytes: int = 0
    compute_s: float = 0.0
    tasks: list[Task] = field(default_factory=list)
    awake: Callable[[float], float] | None = None  # if the fault plan pauses it: the time of its next wake-up
    skews: Sequence[Any] = ()  # faults of its clock
    outside: bool = False  # restarted, and yet to join the other ranks
    evicted: bool = False  # given up by a recovery: all its calls end in Revoked
    late: Counter[int] | None = None  # see `dropped`
    generators: Any = None  # `reproducibility.Generators`, after its first draw from a global generator
    open_receives: int = 0  # of Irecv and irecv, that the program has yet to wait for
    last_receive: Any = None  # the last of them: arguments of `Member._waiting`
    attachments: dict[Any, Any] = field(default_factory=dict)  # per-rank objects of other modules

    def advance_to(self, task: Task, time_s: float) -> None:
        """Move a task's clock forward to `time_s`, but not past the rank's own death."""
        if self.awake is not None:  # a paused rank reacts to nothing until it wakes
            time_s = self.awake(max(time_s, task.clock))
        if time_s > task.clock:
            task.clock = time_s
        if task.clock >= self.death_s:
            task.clock = self.death_s
            raise self.kernel.die()

    def dead_at(self, time_s: float) -> bool:
        """Return whether it is dead at a time: a rank that runs ahead is marked before its time of death."""
        return self.dead and not time_s < self.death_s < math.inf

    @property
    def dropped(self) -> Counter[int]:
        """The number of messages that arrived too late, by sender."""
        if self.late is None:
            self.late = Counter()
        return self.late

    def shown_s(self, time_s: float) -> float:
        """Return the time that the rank's own clock shows: it differs where the fault plan skews the clock."""
        if not self.skews:
            return time_s
        wrong_s: float = sum(fault.error_s(time_s) for fault in self.skews)
        return max(time_s + wrong_s, 0.0)

    def compute_from(self, begin_s: float, end_s: float) -> None:
        """Keep a computing interval while other ranks may query it; drop past intervals."""
        now_s = self.kernel.env.now
        busy = [interval for interval in self.busy if interval[1] > now_s]
        busy.append((begin_s, end_s))
        self.busy = busy

    def answers_at(self, time_s: float) -> float:
        """Return when the rank next enters MPI, at or after `time_s`: at once, except during a block."""
        for begin_s, end_s in self.busy:
            if begin_s < time_s < end_s:
                return end_s
        return time_s


@dataclass(eq=False)
class World:
    """A virtual cluster while it runs."""

    kernel: Kernel
    ranks: list[Rank]
    platform: Any
    network: Network
    timing: Timing
    recorder: Recorder
    seed: int
    plan: Any = None
    links: Any = None  # `injection.FaultyLinks`, if the plan has faults of links
    # (rank, incarnation) -> when the other ranks learn of its death. A dead incarnation never returns: a restarted rank
    # is a different member, which no earlier communicator includes.
    failed: dict[tuple[int, int], float] = field(default_factory=dict)
    ended: int = 0  # programs that have ended
    # Agreements of survivors, to be checked again after a death.
    on_death: list[Callable[[], None]] = field(default_factory=list)
    revoked: bool = False  # whether any was ever revoked: only then do waits check
    operations: list[Any] = field(default_factory=list)  # `operations.Operation`, by beginning
    leaks: dict[str, str] = field(default_factory=dict)  # irreproducible values read: kind -> a sentence
    private: frozenset[str] = frozenset()  # installed packages of which each rank has a separate copy
    # (kind, line) -> a sentence, for actions of the program that MPI leaves undefined, and for faults that came too
    # late or left no survivor.
    mistakes: dict[tuple[str, str], str] = field(default_factory=dict)
    contexts: int = 0  # communicators created so far
    predefined: int = (
        0  # of them, the first: COMM_WORLD, and COMM_SELF of each rank that was there at the start
    )
    open_contexts: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    resource_leaks: Any = None  # is notified when requests and communicators open and close, if a script runs
    watchers: list[Any] = field(default_factory=list)  # of the ranks' calls: see `calls`
    timeline: Any = None  # `timeline.Timeline`, if the run is traced
    attachments: dict[Any, Any] = field(default_factory=dict)  # objects of other modules that all ranks share
    ordering: Any = None  # `ordering.Ordering`, if the run has vector clocks
    races: Any = None  # `races.detector.Races`, if the run looks for them
    properties: Any = None  # `properties.Properties`, if the program states any
    choices: Any = None  # `choices.Choices`, if the run records its decisions
    around_threads: Callable[[], Any] = nullcontext  # entered while a thread of a rank runs
    checkpoints: Any = None  # `checkpoints.Checkpoints`
    crashes: Any = None  # `injection.Crashes`
    cores: Any = None  # `cores.Cores`, if ranks share them
    sums: str = "mpi"  # the order in which communicators sum: one of `comm.ops.ORDERS`
    batching: Any = None  # `batching.BatchedCalls`

    def __post_init__(self) -> None:
        self.contention = model_of(self.kernel.env, self.network, len(self.ranks))
        self.cost = self.network.cost if self.contention is None else self.contention.cost
        # None on constant links: earlier costs then stay valid.
        changing = self.network if self.contention is None else self.contention
        self.cost_at = changing.cost_at if self.network.changes else None
        # A message is visible at the time of its send: no rank may run ahead.
        self.instant = self.network.lookahead_s == 0.0
        self.kernel.in_turn = self.instant
        # How far ahead of SimPy's clock a rank's view is settled: no message sent from now on can arrive earlier. Times
        # are rounded sums, so the horizon is slightly reduced.
        settled = self.plan is None and self.contention is None and self.cost_at is None
        self._horizon_s = self.network.lookahead_s * (1.0 - 1e-9) if settled else 0.0
        serial = self.network.contention == "serial"
        self._nics: dict[int, ReceivingNic] | None = {} if serial else None

    def observers_of(self, rank: int) -> int:
        """Return the initial number of observers of a rank: 1 without latency, or if the plan has deaths or pauses it.

        Deaths, revocations and joins concern every rank, so no rank may be ahead of them.
        """
        return int(self.instant or (self.plan is not None and (self.plan.mortal or rank in self.plan.paused)))

    def nic(self, rank: int) -> ReceivingNic | None:
        """Return the receiving side of a rank's NIC, if it lets in one message at a time."""
        nics = self._nics
        if nics is None:
            return None
        found = nics.get(rank)
        if found is None:
            found = nics[rank] = ReceivingNic()
        return found

    def is_settled(self) -> bool:
        """Return whether later actions of other ranks are invisible at the running task's time."""
        # Every task that may still run is at SimPy's clock or later, and so are its sends. If a program itself revokes
        # a communicator meanwhile, the rank's next call detects it.
        task = self.kernel.current
        return task.clock < self.kernel.env.now + self._horizon_s and not self.ranks[task.rank].observers

    def charge_poll(self) -> None:
        """Charge the running task the call overhead of a poll."""
        task = self.kernel.current
        rank = self.ranks[task.rank]
        time_s = task.clock + self.network.call_overhead_s
        if rank.awake is None and time_s < rank.death_s:  # `advance_to`, without the call
            task.clock = time_s
        else:
            rank.advance_to(task, time_s)
        if rank.observers:
            self.kernel.observe()

    def next_context(self) -> int:
        """Return a fresh context number."""
        self.contexts += 1
        return self.contexts

    def here(self) -> Rank:
        return self.ranks[self.kernel.current.rank]

    def digest(self) -> str:
        """Return the digest of the whole run: the digest of all ranks' digests, in rank order."""
        whole = hashlib.blake2b(digest_size=16)
        for rank in self.ranks:
            whole.update(rank.digest.value())
        # Training steps that are executed together differ from single steps in the last bits of their sums.
        return BATCHED * (self.batching is not None and self.batching.batched) + whole.hexdigest()
