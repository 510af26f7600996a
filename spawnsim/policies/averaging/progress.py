"""One rank's endpoint on one communicator, and the engines that make progress on it, now or in the background.

`Endpoint`: sends never wait, a wait for messages is bounded, the messages of one rank stay in order, one to the own
rank takes no wire, and ranks that are found dead are in `failed`. The communicator keeps the buffers of sends until
they have gone (`Comm` promises it). `AveragerEngine` serves an averager and both sides of the directory;
`ProgressEngine` serves averaging at intervals of the clock. Both poll when they are called, or from a background task;
what messages mean, and what is due when, is their owner's business. Nothing here waits without bound. A task that
meets the end of its communicator (`Revoked`) ends quietly: the rank's program learns the same from its own next call,
recovers, and begins with a new engine.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from spawnsim.comm import ANY_SOURCE, Comm, Status, Task
from spawnsim.errors import RankFailed, Timeout, WorldError
from spawnsim.policies.averaging.gossip import Pace
from spawnsim.policies.averaging.grouping import DirectoryClient, DirectoryShard
from spawnsim.policies.averaging.interface import Settings
from spawnsim.policies.averaging.messages import (
    Bytes,
    Foreign,
    Kind,
    Message,
    Outgoing,
    Unreadable,
    decode,
    encode,
)
from spawnsim.policies.averaging.vector import Vector

if TYPE_CHECKING:
    from spawnsim.comm import Request


AT_ONCE_NBYTES = 4096  # every MPI delivers so little with the envelope: a receive after a probe does not wait
SLICE_S = 0.05  # how long a wait looks at one large message before it looks at the others again


@dataclass(slots=True)
class _Receive:
    """A message that has been matched; `request` is None once all of it is here."""

    source: int
    buffer: Bytes
    request: Request | None


class Endpoint:
    """One rank's post on one communicator and tag; words of another `channel` are dropped and counted."""

    def __init__(self, comm: Comm, tag: int, poll_interval_s: float = 0.01, channel: int = 0) -> None:
        self.comm, self.tag, self.rank, self.channel = comm, tag, comm.Get_rank(), channel
        self.poll_interval_s = poll_interval_s
        self.counts: Counter[str] = Counter()
        self.failed: set[int] = set()
        self._status = Status()
        self._own: deque[Message] = deque()
        self._receives: list[_Receive] = []  # in the order in which they were matched
        self._any: Any = comm  # the protocol lists the calls of every building; Probe is mpi4py's too

    def send(self, rank: int, word: Message) -> None:
        """Send a word to a rank of the communicator."""
        if rank == self.rank:
            self._own.append(word)
            return
        buffer = encode(word, self.channel)
        try:
            self.comm.Isend(buffer, rank, self.tag)
        except RankFailed:
            self.failed.add(rank)
            self.counts["undeliverable"] += 1
            return
        self.counts["words_sent"] += 1
        self.counts["bytes_sent"] += buffer.size

    def poll(self) -> list[tuple[int, Message]]:
        """Return (source, word) of everything that has arrived; never waits."""
        arrived = [(self.rank, self._own.popleft()) for _ in range(len(self._own))]
        try:
            while self.comm.Iprobe(ANY_SOURCE, self.tag, self._status):
                self._receive()
        except RankFailed as error:
            self.failed.update(error.ranks)
        for source, buffer in self._in_order():
            try:
                word = decode(buffer, self.channel)
            except Unreadable as error:
                self.counts["foreign" if isinstance(error, Foreign) else "unreadable"] += 1
            else:
                self.counts["damaged"] += word.damaged
                arrived.append((source, word))
        return arrived

    def _receive(self) -> None:
        """Receive the message that was probed, or begin to."""
        source, nbytes = self._status.Get_source(), self._status.Get_count()
        buffer: Bytes = np.empty(nbytes, np.uint8)
        self.counts["bytes_received"] += nbytes
        request = None
        if nbytes <= AT_ONCE_NBYTES:
            self.comm.Recv(buffer, source, self.tag)
        else:
            request = self.comm.Irecv(buffer, source, self.tag)
        self._receives.append(_Receive(source, buffer, request))

    def _in_order(self) -> list[tuple[int, Bytes]]:
        """Return what is complete. A small message often is before a large one that was sent earlier: it waits."""
        complete: list[tuple[int, Bytes]] = []
        incomplete: list[_Receive] = []
        held: set[int] = set()  # sources with an earlier message under way
        for receive in self._receives:
            if receive.source in held or not self._is_complete(receive):
                held.add(receive.source)
                incomplete.append(receive)
            elif receive.buffer.size:
                complete.append((receive.source, receive.buffer))
        self._receives = incomplete
        return complete

    def _is_complete(self, receive: _Receive) -> bool:
        return receive.request is None or self._ended(receive, receive.request.Test)

    def _ended(self, receive: _Receive, call: Callable[[], bool]) -> bool:
        """Return whether a receive is over, as `call` of its request says."""
        try:
            if not call():
                return False
        except RankFailed as error:  # it died while sending: nothing of this message will be used
            self.failed.update(error.ranks)
            receive.buffer = receive.buffer[:0]
        receive.request = None
        return True

    def wait(self, seconds: float) -> None:
        """Return as soon as something is here, or after `seconds`."""
        if seconds <= 0 or self._own:
            return
        try:
            if self._receives:
                self._wait_for(self._receives[0], min(seconds, SLICE_S))
            elif self.failed:  # a wait for anybody would end at once: some of them will never write
                self.comm.clock.sleep(min(seconds, self.poll_interval_s))
            else:
                with self.comm.clock.deadline(seconds):
                    self._any.Probe(ANY_SOURCE, self.tag)
        except Timeout:
            pass
        except RankFailed as error:
            self.failed.update(error.ranks)

    def _wait_for(self, receive: _Receive, seconds: float) -> None:
        if receive.request is not None:
            with self.comm.clock.deadline(seconds):
                self._ended(receive, receive.request.Wait)


LONGEST_WAIT_S = 1.0  # the longest wait between two looks at the time


class EngineOwner(Protocol):
    """Who sits at the engine."""

    def handle(self, source: int, word: Message, now_s: float) -> None:
        """Take a word."""

    def listed(self, key: str, now_s: float) -> None:
        """Take note that the directory has answered for a key."""

    def tick(self, now_s: float, dead: set[int], changed: set[str]) -> None:
        """Do what is due; `dead` ranks are newly known, keys that `changed` have lost a keeper."""

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""


class AveragerEngine:
    """One averager's engine."""

    def __init__(self, comm: Comm, settings: Settings, owner: EngineOwner) -> None:
        self.comm, self.settings, self.owner = comm, settings, owner
        self.post = Endpoint(comm, settings.tag_or_default, settings.poll_interval_s, settings.channel)
        self.asker = DirectoryClient(comm.Get_rank(), comm.Get_size(), settings.request_timeout)
        self.shard = DirectoryShard()
        self._known_dead: set[int] = set()
        self._busy = Lock()
        self._task: Task | None = None
        self._stopping, self._began = False, False

    def send(self, words: Iterable[Outgoing]) -> None:
        """Send words."""
        for rank, word in words:
            self.post.send(rank, word)

    def progress(self) -> bool:
        """Handle all that has arrived and all that is due; never waits. False if another thread is at it."""
        if not self._busy.acquire(blocking=False):
            return False
        try:
            self._progress()
        finally:
            self._busy.release()
        return True

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep progress from being made elsewhere: what the background uses may be changed inside the block."""
        while not self._busy.acquire(blocking=False):
            self.comm.clock.sleep(self.settings.poll_interval_s)
        try:
            yield
        finally:
            self._busy.release()

    def _progress(self) -> None:
        arrived = self.post.poll()
        now_s = self.comm.clock.now()
        for source, word in arrived:
            self._route(source, word, now_s)
        dead, self._known_dead = self.post.failed - self._known_dead, set(self.post.failed)
        self.owner.tick(now_s, dead, self.asker.tick(now_s))

    def _route(self, source: int, word: Message, now_s: float) -> None:
        if word.kind is Kind.DECLARE:
            self.send(self.shard.handle(source, word, now_s))
        elif word.kind is Kind.LISTED and not word.number:  # a number names a question of the owner's own
            key = self.asker.handle(source, word)
            if key is not None:
                self.owner.listed(key, now_s)
        else:
            self.owner.handle(source, word, now_s)

    def drive(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Make progress until `done()`, at most `timeout_s`; return whether it came."""
        clock = self.comm.clock
        end_s = clock.now() + timeout_s
        while True:
            self.progress()
            if done():
                return True
            now_s = clock.now()
            if now_s >= end_s:
                return False
            self._pause(now_s, end_s)

    def _pause(self, now_s: float, end_s: float) -> None:
        left_s = min(end_s - now_s, LONGEST_WAIT_S)
        if self._task is not None and self._task.alive:
            self.comm.clock.sleep(min(self.settings.poll_interval_s, left_s))
        else:
            self._nap(now_s, left_s)

    def _nap(self, now_s: float, most_s: float) -> None:
        due_s = min(self.owner.wake_s(), self.asker.wake_s())
        if due_s > now_s:
            self.post.wait(min(due_s - now_s, most_s))

    # ---------------------------------------------------------------------------------------------- background
    def run_in_background(self) -> None:
        """Make progress beside the rank's program until `stop`. Doing it twice does no harm."""
        if self._task is None or not self._task.alive:
            self._stopping, self._began = False, False
            self._task = self.comm.background(self._go_on)

    def await_ready(self, timeout_s: float) -> bool:
        """Wait until the background has made progress once, at most `timeout_s`; return whether it has."""
        end_s = self.comm.clock.now() + timeout_s
        while not self._began and (left_s := end_s - self.comm.clock.now()) > 0:
            self.comm.clock.sleep(min(self.settings.poll_interval_s, left_s))
        return self._began

    def _go_on(self) -> None:
        while not self._stopping:
            if self.progress():
                self._began = True
                self._nap(self.comm.clock.now(), self.settings.poll_interval_s * 10)
            else:
                self.comm.clock.sleep(self.settings.poll_interval_s)

    def stop(self, timeout_s: float) -> bool:
        """End the background's progress; return whether it ended in time."""
        self._stopping = True
        return self._task is None or self._task.join(timeout_s)


POLL_S = 1e-3  # between two looks at weights that another holds
BACKGROUND_WAIT_S = 0.25  # the longest wait of the background task
REFUSED = ("unreadable", "damaged")  # counts of the post
GAPS = 5
DEATH_CHECKS = 8  # for deaths, in an interval


class Exchanges(Protocol):
    """What the machines of all modes have in common (`Swaps`, `TreeAverage`)."""

    out: Any
    counts: Counter[str]
    pace: Pace

    @property
    def settled(self) -> bool:
        """Whether nothing is under way that counts on this rank."""

    @property
    def relied_on(self) -> bool:
        """Whether others rely on this rank for more than its weights."""

    def set_active(self, active: bool, now_s: float, *, for_good: bool = False) -> None:
        """Take part from now on, or not; `for_good`: never again."""

    def handle(self, source: int, word: Message, now_s: float, vector: Vector) -> bool:
        """Take a word; return whether the weights have changed."""

    def tick(self, now_s: float, vector: Vector) -> Any:
        """Do what is due."""

    def note_step(self, step_s: float) -> None:
        """Note how long this rank usually does not look at its messages."""

    def lost(self, rank: int, now_s: float) -> None:
        """Note that a rank is dead."""

    def forget(self) -> None:
        """Give up what is under way."""

    def leave(self) -> None:
        """Hand over what others rely on."""

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""


class ProgressEngine:
    """Drives the exchanges of one rank on one communicator. `weights` is held while they are read or changed."""

    def __init__(self, comm: Comm, tag: int, exchanges: Exchanges, weights: Lock) -> None:
        self.comm, self.exchanges, self.post = comm, exchanges, Endpoint(comm, tag)
        self.vector: Vector | None = None
        self._weights = weights
        self._any: Any = comm  # the protocol lists the calls of every building; Get_failed is MPI's too
        self._group, self._survives = comm.Get_group(), comm.capabilities().survives
        self._dead: set[int] = set()
        self._look_s = -math.inf
        self._refused = 0
        self._looked_s = comm.clock.now()
        self._gaps: deque[float] = deque(
            maxlen=GAPS
        )  # between the last looks; one that is longer for once is no rule
        self._task: Task | None = None
        self._stopping = False

    @property
    def averagings(self) -> int:
        """How often the weights were averaged."""
        return self.exchanges.counts["exchanges"]

    @property
    def counts(self) -> Counter[str]:
        """What the exchanges met."""
        refused = {name: self.post.counts[name] for name in REFUSED if self.post.counts[name]}
        return self.exchanges.counts + Counter(refused)

    def progress(self) -> bool:
        """Handle all that has arrived and all that is due, without waiting; False if the weights are held."""
        vector = self.vector
        if vector is None or not self._weights.acquire(blocking=False):
            return False
        try:
            arrived = self.post.poll()
            now_s = self.comm.clock.now()
            self._gaps.append(now_s - self._looked_s)
            self._looked_s = now_s
            self.exchanges.note_step(median(self._gaps))
            for rank in self._deaths(now_s):
                self.exchanges.lost(rank, now_s)
            for source, word in arrived:
                self.exchanges.handle(source, word, now_s, vector)
            self.exchanges.tick(now_s, vector)
            while self.exchanges.out:
                self.post.send(*self.exchanges.out.popleft())
        finally:
            self._weights.release()
        self._tell_refused()
        return True

    def _deaths(self, now_s: float) -> list[int]:
        """Return who is newly known to be dead, also of those that nobody writes to."""
        if self._survives and now_s >= self._look_s:
            self._look_s = now_s + self.exchanges.pace.interval_s / DEATH_CHECKS
            failed = self._any.Get_failed()
            if failed.Get_size():
                self.post.failed.update(
                    rank for rank in failed.Translate_ranks(None, self._group) if rank >= 0
                )
        fresh = self.post.failed - self._dead
        if fresh:
            self._dead |= fresh
            self._acknowledge()
        return sorted(fresh)

    def _acknowledge(self) -> None:
        """Hear the living again where a death spoils every probe of anybody (ULFM)."""
        try:
            self.comm.Iprobe(ANY_SOURCE, self.post.tag)
        except RankFailed:
            self._any.Ack_failed()

    def _tell_refused(self) -> None:
        refused = sum(self.post.counts[name] for name in REFUSED)
        if refused > self._refused:
            self.comm.record.event("refused_messages", tag=self.post.tag, count=refused - self._refused)
            self._refused = refused

    # ------------------------------------------------------------------------------------------------- waiting
    def drive(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Make progress until `done()`, at most `limit_s`; return whether it came."""
        clock = self.comm.clock
        end_s = clock.now() + limit_s
        while True:
            self.progress()
            if done():
                return True
            left_s = end_s - clock.now()
            if left_s <= 0:
                return False
            self._wait(left_s)

    def _wait(self, seconds: float) -> None:
        if self._task is not None and self._task.alive:
            self.comm.clock.sleep(min(seconds, POLL_S))
        else:
            due_s = self.exchanges.wake_s() - self.comm.clock.now()
            self.post.wait(min(max(due_s, POLL_S), seconds))

    # ---------------------------------------------------------------------------------------------- background
    def run_in_background(self) -> None:
        """Make progress beside the rank's program until `stop`, or until the communicator ends."""
        self._task = self.comm.background(self._go_on)

    def _go_on(self) -> None:
        try:
            while not self._stopping:
                if self.progress():
                    due_s = self.exchanges.wake_s() - self.comm.clock.now()
                    self.post.wait(min(max(due_s, POLL_S), self.exchanges.pace.interval_s, BACKGROUND_WAIT_S))
                else:
                    self.comm.clock.sleep(POLL_S)
        except WorldError:  # revoked: the program hears of it in its own next call, and recovers
            self._stopping = True

    def stop(self, timeout_s: float = 0.0) -> bool:
        """End the background task, if there is one; return whether it ended in time."""
        self._stopping = True
        return self._task is None or timeout_s <= 0 or self._task.join(timeout_s)
