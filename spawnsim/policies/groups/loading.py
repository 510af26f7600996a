"""State sharing at work: a donor's declarations and answers, and a newcomer's download as its caller sees it.

This room knows a desk and the clock's time as it is told; how states become words is `sharing`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from spawnsim.policies.codecs import as_codec
from spawnsim.policies.groups.desk import Desk
from spawnsim.policies.groups.directory import Entry
from spawnsim.policies.groups.sharing import Download, State, chunks, rebuild, state_key
from spawnsim.policies.groups.words import Kind, Word


class Donor:
    """What this rank gives to newcomers, and whether it does."""

    def __init__(self, desk: Desk, *, sharing: bool) -> None:
        self.desk, self.sharing, self.priority, self.given = desk, sharing, 0.0, 0
        self._key = state_key(desk.settings.prefix)
        self._declare_s = -math.inf
        self._fetches: list[tuple[int, Word]] = []

    def change(self, *, sharing: bool | None = None, priority: float | None = None) -> None:
        """Change what others are told, from now on."""
        self.sharing = self.sharing if sharing is None else sharing
        self.priority = self.priority if priority is None else priority
        self._declare_s = -math.inf

    def asked(self, source: int, word: Word) -> None:
        """Take a FETCH."""
        self._fetches.append((source, word))

    @property
    def waiting(self) -> bool:
        """Whether somebody has asked and not been answered."""
        return bool(self._fetches)

    def declare(self, now_s: float) -> None:
        """Renew the declaration if that is due."""
        if now_s < self._declare_s:
            return
        period_s = self.desk.settings.declare_state_period
        if self.sharing:
            entry = Entry(self.desk.post.rank, -self.priority, now_s + 2 * period_s, self.priority)
            self.desk.send(self.desk.asker.ask(self._key, now_s, entry))
        else:
            self.desk.send(self.desk.asker.take_back(self._key))
        self._declare_s = now_s + period_s

    def retire(self) -> None:
        """Give nothing any more."""
        self.change(sharing=False)
        self.desk.send(self.desk.asker.take_back(self._key))
        self.answer(lambda: (None, []))
        self._declare_s = math.inf

    def answer(self, state_of: Callable[[], State]) -> None:
        """Send the state to those who asked; who may not have it is told so."""
        fetches, self._fetches = self._fetches, []
        settings = self.desk.settings
        codec = as_codec(settings.state_compression)
        state = state_of() if self.sharing and fetches else None
        for source, word in fetches:
            if state is None:
                self.desk.send([(source, Word(Kind.STATE, word.number, value=-1.0))])
            else:
                packed = chunks(word.number, state, codec, settings.part_size_bytes)
                self.desk.send((source, chunk) for chunk in packed)
                self.given += 1

    def wake_s(self) -> float:
        """Return when `declare` is next needed."""
        return self._declare_s


class Loading:
    """A download of state under way: `done()`, `result()`."""

    def __init__(self, desk: Desk, download: Download, until_s: float) -> None:
        self.desk, self.download, self.until_s = desk, download, until_s
        self._key = state_key(desk.settings.prefix)
        self._ask_s = -math.inf
        self._over = False

    def done(self) -> bool:
        """Whether the state is here, or will not come."""
        return self.download.complete or self._over

    def result(self) -> State | None:
        """Wait for the end; return (metadata, tensors), or None if nobody gave a state in time."""
        self.desk.drive(self.done, math.inf)
        words = self.download.words
        if words is None or len(words) == 0 or not self.download.complete:
            return None
        settings = self.desk.settings
        ordered = [words[index] for index in sorted(words)]
        return rebuild(ordered, as_codec(settings.state_compression), settings.part_size_bytes)

    def tick(self, now_s: float, dead: set[int]) -> None:
        """Go on to the next donor, or ask the directory again."""
        for rank in dead:
            self.download.lost(rank)
        self.download.tick(now_s)
        if now_s >= self.until_s:
            self._over = True
        elif not self.download.asking():
            self.listed(now_s)
            if now_s >= self._ask_s and self.download.donor is None:
                self.download.tried.clear()
                self.desk.send(self.desk.asker.ask(self._key, now_s))
                self._ask_s = now_s + self.desk.settings.request_timeout
        self.desk.send(self.download.out)
        self.download.out.clear()

    def listed(self, now_s: float) -> None:
        """Take up the donors that the directory knows."""
        self.download.offer(self.desk.asker.known(self._key, now_s), now_s)

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        return min(self.until_s, self.download.wake_s(), math.inf if self.download.asking() else self._ask_s)
