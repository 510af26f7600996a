"""The progress engine of averaging by the clock: one rank's messages, deaths and due times on one communicator.

It polls when it is called, or from a background task. A task that meets the end of its communicator (`Revoked`) ends
without a word: the rank's program learns the same from its own next call, recovers, and begins with a new engine. This
module knows a communicator, the post, and what all kinds of exchanges have in common; it knows no models.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from statistics import median
from threading import Lock
from typing import Any, Protocol

from spawnsim.comm import ANY_SOURCE, Comm, Task
from spawnsim.errors import RankFailed, WorldError
from spawnsim.policies.groups.parts import Vector
from spawnsim.policies.groups.post import Post
from spawnsim.policies.groups.swaps import Pace
from spawnsim.policies.groups.words import Word

POLL_S = 1e-3  # between two looks at weights that another holds
NAP_S = 0.25  # the longest wait of the background task
REFUSED = ("unreadable", "damaged")  # counts of the post
GAPS = 5
LOOKS = 8  # for deaths, in an interval


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

    def handle(self, source: int, word: Word, now_s: float, vector: Vector) -> bool:
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
        self.comm, self.exchanges, self.post = comm, exchanges, Post(comm, tag)
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
            self._look_s = now_s + self.exchanges.pace.interval_s / LOOKS
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
                    self.post.wait(min(max(due_s, POLL_S), self.exchanges.pace.interval_s, NAP_S))
                else:
                    self.comm.clock.sleep(POLL_S)
        except WorldError:  # revoked: the program hears of it in its own next call, and recovers
            self._stopping = True

    def stop(self, timeout_s: float = 0.0) -> bool:
        """End the background task, if there is one; return whether it ended in time."""
        self._stopping = True
        return self._task is None or timeout_s <= 0 or self._task.join(timeout_s)
