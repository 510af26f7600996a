"""The steps of one averager: the one under way, and the words that came before it was ready for them.

This room knows which words belong to which step; the averager gives it a desk, and itself as the steps' home.
"""

from __future__ import annotations

import math
from collections import Counter, deque

from spawnsim.errors import UsageError
from spawnsim.policies.groups.desk import Desk
from spawnsim.policies.groups.rounds import Home, Round
from spawnsim.policies.groups.search import declined
from spawnsim.policies.groups.seeking import round_of
from spawnsim.policies.groups.words import Kind, Reply, Word

EARLY_AT_MOST = 4096  # words kept for groups and rounds that this rank has not come to yet


class Steps:
    """At most one step is under way."""

    def __init__(self, home: Home, desk: Desk) -> None:
        self.home, self.desk = home, desk
        self.counts: Counter[str] = Counter()
        self._step: Round | None = None
        self._early: deque[tuple[int, Word]] = deque(maxlen=EARLY_AT_MOST)

    @property
    def current(self) -> Round | None:
        """The step under way, if any."""
        return self._step if self._step is not None and not self._step.control.done() else None

    def check_free(self) -> None:
        """Raise `UsageError` if a step is under way."""
        if self.current is not None:
            raise UsageError(
                f"rank {self.home.rank}: step() while another step is under way: cancel() or result() it first"
            )

    def begin(self, step: Round, now_s: float) -> None:
        """Take up a new step, and hand it what came before it began."""
        self._step = step
        early, self._early = self._early, deque(maxlen=EARLY_AT_MOST)
        for source, word in early:
            self.handle(source, word, now_s)

    def early(self, number: int) -> list[tuple[int, Word]]:
        """Return, and forget, the words of a group that came before the group was known here."""
        found = [item for item in self._early if item[1].number == number]
        if found:
            left = (item for item in self._early if item[1].number != number)
            self._early = deque(left, maxlen=EARLY_AT_MOST)
        return found

    def handle(self, source: int, word: Word, now_s: float) -> None:
        """Hand a word to the step it belongs to, keep it for the next one, or say that nobody is looking."""
        step = self.current
        if word.kind is Kind.JOIN and self._is_ahead(word, step):
            self._early.append((source, word))
        elif step is None or not step.handle(source, word, now_s):
            self._unexpected(source, word)

    def _is_ahead(self, word: Word, step: Round | None) -> bool:
        """Whether a join request is for a static round that this rank has not come to yet."""
        if self.home.settings.matchmaking is None or not isinstance(word.meta, tuple) or len(word.meta) != 4:
            return False
        round_ = round_of(str(word.meta[1]), self.home.settings.prefix)
        return round_ > self.home.round or (round_ == self.home.round and step is None)

    def _unexpected(self, source: int, word: Word) -> None:
        if word.kind is Kind.JOIN:
            self.desk.send([(source, Word(Kind.REPLY, word.number, Reply.NOT_LOOKING_FOR_GROUP))])
        elif word.kind is Kind.LEAVE:
            kept = [item for item in self._early if (item[0], item[1].number) != (source, word.number)]
            self._early = deque(kept, maxlen=EARLY_AT_MOST)
        elif word.kind in (Kind.PART, Kind.ABSENT):  # others of the group may begin before its BEGIN is here
            self._early.append((source, word))
        else:
            self.desk.send(declined(self.home.rank, source, word))

    def tick(self, now_s: float, dead: set[int], changed: set[str]) -> None:
        """Let the step do what is due."""
        step = self.current
        if step is None:
            return
        if step.seeking is not None:
            step.seeking.keepers_changed(changed, now_s)
        for rank in sorted(dead):
            step.lost(rank, now_s)
        step.tick(now_s)
        self.desk.send(step.out)
        step.out.clear()
        if step.control.done():
            self.home.round += 1
            self.counts.update(step.counts)
            self.counts["steps"] += 1
            self.counts["failed steps"] += step.control.exception() is not None

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        step = self.current
        if step is None:
            return math.inf
        return -math.inf if step.sending else step.wake_s()
