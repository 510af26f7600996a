"""State sharing at work: a donor's declarations and answers, and a newcomer's download as its caller sees it.

This room knows a desk and the clock's time as it is told; how states become words is `sharing`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from spawnsim.policies.groups.desk import Desk
from spawnsim.policies.groups.directory import Entry, Question
from spawnsim.policies.groups.keys import KEEPERS
from spawnsim.policies.groups.sharing import Download, Loaded, State, chunks, rebuild, state_key
from spawnsim.policies.groups.words import Kind, Word


class Donor:
    """What this rank gives to newcomers, and whether it does."""

    def __init__(self, desk: Desk, *, sharing: bool) -> None:
        self.desk, self.sharing, self.priority, self.given = desk, sharing, 0.0, 0
        self._key = state_key(desk.settings.prefix)
        self._declare_s, self._declared = -math.inf, 0.0
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
        if self.sharing:
            self.desk.send(self.desk.asker.ask(self._key, now_s, self._entry(now_s)))
        else:
            self.desk.send(self.desk.asker.take_back(self._key))
        self._declare_s = now_s + self.desk.settings.declare_state_period

    def _entry(self, now_s: float) -> Entry:
        self._declared = self.priority
        until_s = now_s + 2 * self.desk.settings.declare_state_period
        return Entry(self.desk.post.rank, -self.priority, until_s, self.priority)

    def renew(self, now_s: float) -> None:
        """Tell the keepers if the priority is not what they were told: after an average, others may look for it."""
        if self.sharing and self.priority != self._declared and now_s < self._declare_s:
            self.desk.send(self.desk.asker.renew(self._key, self._entry(now_s)))

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
        state = state_of() if self.sharing and fetches else None
        for source, word in fetches:
            if state is None:
                self.desk.send([(source, Word(Kind.STATE, word.number, value=-1.0))])
            else:
                packed = chunks(word.number, state, settings.state_compression, settings.part_size_bytes)
                self.desk.send((source, chunk) for chunk in packed)
                self.given += 1

    def wake_s(self) -> float:
        """Return when `declare` is next needed."""
        return self._declare_s


class Loading:
    """A download of state under way: `done()`, `result()`. Donors are those that declare themselves now."""

    def __init__(
        self, desk: Desk, download: Download, numbers: Callable[[], int], until_s: float | None
    ) -> None:
        self.desk, self.download, self._number = desk, download, numbers
        self._until_s = math.inf if until_s is None else until_s
        self._retry = until_s is not None
        self._key = state_key(desk.settings.prefix)
        self._question: Question | None = None
        self._unheard, self._ask_s = 0, -math.inf
        self._over = False

    def done(self) -> bool:
        """Whether the state is here, or will not come."""
        return self.download.complete or self._over

    def result(self) -> Loaded | None:
        """Wait for the end; return (metadata, tensors), or None if nobody gave a state in time."""
        self.desk.drive(self.done, math.inf)
        return rebuild(self.download.words) if self.download.complete else None

    def handle(self, source: int, word: Word, now_s: float) -> None:
        """Take a STATE, or the LISTED that answers this download's question."""
        if word.kind is Kind.STATE:
            self.download.handle(source, word, now_s)
        elif self._question is not None:
            self._question.handle(source, word)

    def tick(self, now_s: float, dead: set[int]) -> None:
        """Ask who gives its state, then go from donor to donor."""
        for rank in dead:
            self.download.lost(rank, now_s)
        self.download.tick(now_s)
        if self._question is not None:
            self._listed(self._question, now_s)
        if now_s >= self._until_s:
            self._over = True
        elif self._question is None and self.download.donor is None:
            self._ask(now_s)
        self.desk.send(self.download.out)
        self.download.out.clear()

    def _ask(self, now_s: float) -> None:
        """Ask for the donors again; without a time limit one list of donors is enough."""
        if self._ask_s > -math.inf and not self._retry:
            self._over = True
        elif now_s >= self._ask_s:
            question = self._question = Question(self.desk.asker, self._key, self._number(), now_s)
            question.due_s = min(question.due_s, (now_s + self._until_s) / 2)
            self._ask_s = now_s + self.desk.settings.request_timeout
            self.desk.send(question.words())

    def _listed(self, question: Question, now_s: float) -> None:
        if not question.over(now_s):
            return
        self._question = None
        if question.heard:
            self.download.offer(question.entries(now_s), now_s)
        elif self._unheard < KEEPERS:  # all its keepers are silent: others keep the key now
            self._unheard, self._ask_s = self._unheard + 1, -math.inf

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        if self._question is not None:
            return min(self._until_s, self._question.due_s)
        return min(self._until_s, self.download.wake_s() if self.download.donor is not None else self._ask_s)
