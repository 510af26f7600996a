"""The steps of one averager: the one under way, those that wait for it, and the words that came before their time.

This room knows which words belong to which step; the averager gives it a desk, and itself as the steps' home.
"""

from __future__ import annotations

import math
from collections import Counter, deque

from spawnsim.policies.groups.control import Cancelled, StepControl
from spawnsim.policies.groups.desk import Desk
from spawnsim.policies.groups.rounds import Home, Round, Wish
from spawnsim.policies.groups.seeking import round_of
from spawnsim.policies.groups.terms import Position, declined
from spawnsim.policies.groups.words import Kind, Reply, Word

EARLY_AT_MOST = 4096  # words kept for groups and rounds that this rank has not come to yet
GROUPS_AT_MOST = 64  # that are remembered


class Steps:
    """At most one step is under way; the others begin in the order in which they were asked for."""

    def __init__(self, home: Home, desk: Desk) -> None:
        self.home, self.desk = home, desk
        self.counts: Counter[str] = Counter()
        self._step: Round | None = None
        self._waiting: deque[tuple[StepControl, Wish]] = deque()
        self._early: deque[tuple[int, Word, float]] = deque(
            maxlen=EARLY_AT_MOST
        )  # source, word, when it came
        self._groups: deque[int] = deque(maxlen=GROUPS_AT_MOST)  # numbers of the latest groups
        self._missed: set[int] = set()  # ranks that asked for the next static round, and did not wait
        self._formed = -1  # the last static round in which this rank was in a group

    @property
    def current(self) -> Round | None:
        """The step under way, if any."""
        return self._step if self._step is not None and not self._step.control.done() else None

    def ask(self, control: StepControl, wish: Wish) -> None:
        """Take up a step; it begins when those before it have ended."""
        self._waiting.append((control, wish))

    def cancel_all(self) -> None:
        """Ask all steps to end without a result."""
        step = self.current
        for control in [*([step.control] if step is not None else []), *(each for each, _ in self._waiting)]:
            control.cancel_requested = True

    def _begin_next(self, now_s: float) -> None:
        """Begin the next step that waits, and hand it what came before it began."""
        while self.current is None and self._waiting:
            control, wish = self._waiting.popleft()
            if control.cancel_requested:
                control.finish(error=Cancelled(f"rank {self.home.rank}: the averaging step was cancelled"))
                continue
            missed, self._missed = bool(self._missed), set()
            step = self._step = Round(self.home, control, wish, now_s, missed=missed)
            if control.done():  # nobody else will come to its round
                self._end(step)
                continue
            early, self._early = self._early, deque(maxlen=EARLY_AT_MOST)
            for source, word, came_s in early:
                if word.kind is Kind.JOIN:
                    self.handle(source, word, now_s)
                elif now_s - came_s < wish.patience_s:
                    self._early.append((source, word, came_s))

    def note_group(self, number: int) -> None:
        """Take note that this rank is in a group of the round under way."""
        self._groups.append(number)
        self._formed = max(self._formed, self.home.round)

    def early(self, number: int) -> list[tuple[int, Word]]:
        """Return, and forget, the words of a group that came before the group was known here."""
        found = [(source, word) for source, word, _ in self._early if word.number == number]
        if found:
            left = (item for item in self._early if item[1].number != number)
            self._early = deque(left, maxlen=EARLY_AT_MOST)
        return found

    # ---------------------------------------------------------------------------------------------------- words
    def handle(self, source: int, word: Word, now_s: float) -> None:
        """Hand a word to the step it belongs to, keep it for the next one, or say that nobody is looking."""
        step = self.current
        if word.kind is Kind.LEAVE and self._left(source, word):
            return
        if word.kind in (Kind.JOIN, Kind.CALL) and self.home.settings.matchmaking is not None:
            self._static(source, word, now_s)
        elif step is None or not step.handle(source, word, now_s):
            self._unexpected(source, word, now_s)

    def _static(self, source: int, word: Word, now_s: float) -> None:
        """Take a JOIN or CALL for a round: keep it if this rank has not come so far, else tell how far it is."""
        step = self.current
        round_ = round_of(str(word.meta[1]), self.home.settings.prefix)
        if round_ > self.home.round or (round_ == self.home.round and step is None):
            if word.kind is Kind.JOIN:
                self._early.append((source, word, now_s))
                if step is not None:
                    step.told(source, Position(round_, True, -1), now_s)
        elif step is None or round_ < self.home.round or not step.handle(source, word, now_s):
            self.desk.send(
                [(source, Word(Kind.REPLY, word.number, Reply.NOT_LOOKING_FOR_GROUP, meta=self._position()))]
            )

    def _position(self) -> Position:
        step = self.current
        if step is not None and step.group is not None:
            return Position(step.next_round, False, self.home.round)
        return Position(self.home.round, step is not None, self._formed)

    def _unexpected(self, source: int, word: Word, now_s: float) -> None:
        if word.kind is Kind.JOIN:
            self.desk.send([(source, Word(Kind.REPLY, word.number, Reply.NOT_LOOKING_FOR_GROUP))])
        elif word.kind in (Kind.PART, Kind.ABSENT, Kind.BEGIN) and self._is_over(word):
            if word.kind is Kind.PART:  # its sender may still wait for an answer, if one was lost
                self.desk.send([(source, Word(Kind.ABSENT, word.number))])
        elif word.kind in (Kind.PART, Kind.ABSENT):  # others of the group may begin before its BEGIN is here
            self._early.append((source, word, now_s))
        else:
            self.desk.send(declined(self.home.rank, source, word))

    def _is_over(self, word: Word) -> bool:
        return (word.meta.number if word.kind is Kind.BEGIN else word.number) in self._groups

    def _left(self, source: int, word: Word) -> bool:
        """Forget a request that was kept, if there is one: its rank has waited long enough."""
        kept = [item for item in self._early if (item[0], item[1].number) != (source, word.number)]
        if len(kept) == len(self._early):
            return False
        self._missed.add(source)
        self._early = deque(kept, maxlen=EARLY_AT_MOST)
        return True

    # ----------------------------------------------------------------------------------------------------- time
    def tick(self, now_s: float, dead: set[int], changed: set[str]) -> None:
        """Let the step do what is due, and begin the next one when it has ended."""
        self._begin_next(now_s)
        step = self.current
        if step is None:
            return
        if step.seeking is not None:
            step.seeking.keepers_changed(changed, now_s)
        for rank in sorted(dead):
            step.lost(rank, now_s)
        step.tick(now_s)
        self._send(step)
        if step.control.done():
            self._end(step)
            self._begin_next(now_s)

    def _send(self, step: Round) -> None:
        self.desk.send(step.out)
        step.out.clear()

    def _end(self, step: Round) -> None:
        """Keep what a step leaves behind, and drop what came for its groups."""
        self._send(step)
        self.home.round = step.next_round
        self._early = deque(
            (item for item in self._early if item[1].number not in self._groups), maxlen=EARLY_AT_MOST
        )
        self.counts.update(step.counts)
        self.counts["steps"] += 1
        self.counts["failed steps"] += step.control.exception() is not None

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        step = self.current
        if step is None:
            return -math.inf if self._waiting else math.inf
        return -math.inf if step.sending else step.wake_s()
