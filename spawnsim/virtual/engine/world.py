"""The state of a virtual cluster: its ranks, what each owns and how its clock may move, and what they share."""

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
    """What a backend calls to record; see `spawnsim.record`."""

    def row(self, rank: int, time_s: float, values: Any) -> None: ...

    def event(self, rank: int, time_s: float, kind: str, fields: Any) -> None:
        """Keep one event."""
        ...


@dataclass(eq=False, slots=True)
class Rank:
    """What one rank owns. `id` is its rank in the world."""

    id: int
    kernel: Kernel
    digest: RankDigest
    streams: Streams
    incarnation: int = 0  # how often it was restarted
    death_s: float = math.inf
    dead: bool = False
    ended_s: float = math.inf  # when its program came to its end
    nic_free_s: float = 0.0  # when its NIC can start the next message
    bulk_free_s: float = 0.0  # the same for rendezvous data, which do not queue behind small messages
    # A heap of rendezvous data that may start: when, number, what.
    cleared: list[Any] = field(default_factory=list)
    # How many could see what this rank does between two calls: background tasks, exposed windows, and one for all if
    # the plan has deaths or pauses. With any, a rank does not run ahead, for what it stores next must be stored at its
    # own time: one event a block, the price of exact one-sided access.
    observers: int = 0
    busy: Sequence[tuple[float, float]] = ()  # computing from, to; kept while exposed
    waited: Sequence[Callable[[], None]] = ()  # for the end of a block that is not known yet
    messages: int = 0
    nbytes: int = 0
    compute_s: float = 0.0
    tasks: list[Task] = field(default_factory=list)
    awake: Callable[[float], float] | None = None  # if the fault plan pauses it: when it next is awake
    skews: Sequence[Any] = ()  # faults of its clock
    outside: bool = False  # it was restarted, and has not joined the others yet
    evicted: bool = False  # the others have recovered without it: whatever it calls ends in Revoked
    late: Counter[int] | None = None  # see `dropped`
    generators: Any = None  # `reproducibility.Generators`, once it draws from a global generator
    open_receives: int = 0  # by Irecv and irecv, that nobody has waited for
    last_receive: Any = None  # the last of them, as `Member._waiting` takes it
    attachments: dict[Any, Any] = field(default_factory=dict)  # per-rank objects of other modules

    def advance_to(self, task: Task, time_s: float) -> None:
        """Move a task's clock forward to `time_s`, but not past the rank's own death."""
        if self.awake is not None:  # a paused rank takes note of nothing until it wakes
            time_s = self.awake(max(time_s, task.clock))
        if time_s > task.clock:
            task.clock = time_s
        if task.clock >= self.death_s:
            task.clock = self.death_s
            raise self.kernel.die()

    @property
    def dropped(self) -> Counter[int]:
        """The number of messages that came too late, by sender."""
        if self.late is None:
            self.late = Counter()
        return self.late

    def shown_s(self, time_s: float) -> float:
        """Return what the rank's own clock shows at a time: another where the fault plan skews it."""
        if not self.skews:
            return time_s
        wrong_s: float = sum(fault.error_s(time_s) for fault in self.skews)
        return max(time_s + wrong_s, 0.0)

    def compute_from(self, begin_s: float, end_s: float) -> None:
        """Keep a computing interval while others may ask for it; forget those that are past."""
        now_s = self.kernel.env.now
        busy = [interval for interval in self.busy if interval[1] > now_s]
        busy.append((begin_s, end_s))
        self.busy = busy

    def answers_at(self, time_s: float) -> float:
        """Return when the rank next enters MPI, at or after `time_s`: at once, unless that is amid a block."""
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
    links: Any = None  # `faults.injection.FaultyLinks`, if the plan has faults of links
    # (rank, incarnation) -> when the others know of its death. A dead incarnation never comes back: a restarted rank is
    # another member, which no communicator made before takes.
    failed: dict[tuple[int, int], float] = field(default_factory=dict)
    ended: int = 0  # programs that have come to their end
    # Agreements of survivors, to be checked again.
    on_death: list[Callable[[], None]] = field(default_factory=list)
    revoked: bool = False  # whether any communicator ever was: only then need waits look
    leaks: dict[str, str] = field(default_factory=dict)  # what no seed repeats: kind -> a sentence
    private: frozenset[str] = frozenset()  # installed packages of which each rank has its own
    # Kind and line -> a sentence, of what MPI leaves undefined and the program has done, and of faults that came late
    # or left nobody.
    mistakes: dict[tuple[str, str], str] = field(default_factory=dict)
    contexts: int = 0  # communicators made so far
    open_contexts: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    resource_leaks: Any = None  # told of requests and communicators as they come and go, if a script runs
    torch_seed: int | None = None  # where torch's generator starts on all ranks; None: each has its own start
    watchers: list[Any] = field(default_factory=list)  # of the ranks' calls: see `calls`
    timeline: Any = None  # `timeline.Timeline`, if the run is traced
    attachments: dict[Any, Any] = field(default_factory=dict)  # objects of other modules that all ranks share
    around_threads: Callable[[], Any] = nullcontext  # is entered while a thread runs that a rank has started
    checkpoints: Any = None  # `checkpoints.Checkpoints`
    crashes: Any = None  # `faults.injection.Crashes`
    cores: Any = None  # `cores.Cores`, if ranks share them
    sums: str = "mpi"  # in whose order communicators sum: one of `comm.ops.ORDERS`
    batching: Any = None  # `batching.BatchedCalls`

    def __post_init__(self) -> None:
        self.contention = model_of(self.kernel.env, self.network, len(self.ranks))
        self.cost = self.network.cost if self.contention is None else self.contention.cost
        # None on links that do not change: then what was asked before holds.
        changing = self.network if self.contention is None else self.contention
        self.cost_at = changing.cost_at if self.network.changes else None
        # A send can be seen at the time of the send: none runs ahead.
        self.instant = self.network.lookahead_s == 0.0
        self.kernel.in_turn = self.instant
        # How far ahead of SimPy's clock what a rank sees is settled: nothing that is sent from now on is there earlier.
        # Times are sums, which are rounded: hence a little less.
        settled = self.plan is None and self.contention is None and self.cost_at is None
        self._horizon_s = self.network.lookahead_s * (1.0 - 1e-9) if settled else 0.0
        serial = self.network.contention == "serial"
        self._nics: dict[int, ReceivingNic] | None = {} if serial else None

    def observers_of(self, rank: int) -> int:
        """Return how many observe a rank that begins: 1 if the network has no latency or the plan a death or its pause.

        Deaths, revocations and joins concern every rank, so none may be ahead of them.
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
        """Return whether nothing that others still do can be seen at the running task's time."""
        # All that may still run stands at SimPy's clock or later, and so do their sends. A communicator that a program
        # itself revokes meanwhile is then found at the rank's next call.
        task = self.kernel.current
        return task.clock < self.kernel.env.now + self._horizon_s and not self.ranks[task.rank].observers

    def charge_poll(self) -> None:
        """Let a look cost the running task the call overhead."""
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
        """Return the digest of the whole run: that of all ranks' digests, in rank order."""
        whole = hashlib.blake2b(digest_size=16)
        for rank in self.ranks:
            whole.update(rank.digest.value())
        # Steps that were executed together have other sums in the last bits than steps one by one.
        return BATCHED * (self.batching is not None and self.batching.batched) + whole.hexdigest()
