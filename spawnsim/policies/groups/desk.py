"""Where a rank's words come in and go out, now or in the background.

This room knows the communicator's clock and background, the post, and both sides of the directory. What other words
mean, and what is due when, is its owner's business. Nothing here waits without bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Protocol

from spawnsim.comm import Comm, Task
from spawnsim.policies.groups.directory import Asker, Shard
from spawnsim.policies.groups.post import Post
from spawnsim.policies.groups.settings import Settings
from spawnsim.policies.groups.words import Kind, Outgoing, Word

NAP_S = 1.0  # the longest wait between two looks at the time


class Owner(Protocol):
    """Who sits at the desk."""

    def handle(self, source: int, word: Word, now_s: float) -> None:
        """Take a word."""

    def listed(self, key: str, now_s: float) -> None:
        """Take note that the directory has answered for a key."""

    def tick(self, now_s: float, dead: set[int], changed: set[str]) -> None:
        """Do what is due; `dead` ranks are newly known, keys that `changed` have lost a keeper."""

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""


class Desk:
    """One averager's desk."""

    def __init__(self, comm: Comm, settings: Settings, owner: Owner) -> None:
        self.comm, self.settings, self.owner = comm, settings, owner
        self.post = Post(comm, settings.tag_or_default, settings.poll_interval_s, settings.channel)
        self.asker = Asker(comm.Get_rank(), comm.Get_size(), settings.request_timeout)
        self.shard = Shard()
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

    def _route(self, source: int, word: Word, now_s: float) -> None:
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
        left_s = min(end_s - now_s, NAP_S)
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
