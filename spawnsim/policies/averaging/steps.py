"""The averaging steps of one averager: search, wait for the trigger, all-reduce; again while the deadline allows.

`Step` is a state machine over the search and the all-reduce, driven by messages and time. Its deadline bounds the
search alone: an all-reduce ends by itself, since its members wait for each other's messages only so long. `StepQueue`
holds the step under way, those that wait for it, and the messages that came before their time. The averager that owns
them holds the communicator, the tensors and what survives a step (group bits, round, residuals).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Protocol

from spawnsim.policies.averaging.butterfly import Butterfly, Group
from spawnsim.policies.averaging.interface import (
    Averaged,
    AveragingFailed,
    Cancelled,
    Stage,
    StepControl,
    result_of,
    why_no_average,
)
from spawnsim.policies.averaging.matchmaking import (
    Matchmaker,
    Position,
    Search,
    SearchContext,
    declined,
    round_of,
)
from spawnsim.policies.averaging.messages import Kind, Message, Outgoing, Reply
from spawnsim.policies.averaging.progress import AveragerEngine
from spawnsim.policies.averaging.vector import Values

SEARCH_KINDS = (Kind.JOIN, Kind.REPLY, Kind.LEAVE, Kind.DISBAND, Kind.BEGIN, Kind.CALL)


class StepContext(SearchContext, Protocol):
    """What a step needs of its averager."""

    residuals: list[Values] | None

    def formed(self, group: Group, led: bool) -> None:
        """Take note of a formed group."""

    def early(self, number: int) -> list[tuple[int, Message]]:
        """Return the words of a group that came before the group was known here."""

    def averaged(self, result: Averaged) -> None:
        """Take note of a result."""

    def borrow(self) -> bool:
        """Take the tensors if nobody else has them; `hand_back` afterwards."""

    def hand_back(self) -> None:
        """Give the tensors back."""


@dataclass(frozen=True, slots=True)
class StepRequest:
    """What the caller of `step` asked for. `patience_s`: how long to wait for a message if no time-out says it."""

    gathered: Any
    deadline_s: float
    retry: bool
    patience_s: float = math.inf


class Step:
    """One step under way. `missed`: members of its static group have looked for this rank before it came."""

    def __init__(
        self,
        home: StepContext,
        control: StepControl,
        wish: StepRequest,
        now_s: float,
        *,
        missed: bool = False,
    ) -> None:
        self.home, self.control, self.wish = home, control, wish
        self.out: deque[Outgoing] = deque()
        self.matchmaker: Matchmaker | None = None
        self.butterfly: Butterfly | None = None
        self.group: Group | None = None
        self.led = False
        self.next_round = home.round + 1
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self._early: list[tuple[int, Message]] = []  # words of the group that came before the trigger
        self._look(now_s, missed)

    # ------------------------------------------------------------------------------------------ matchmaking
    def _look(self, now_s: float, missed: bool = False) -> None:
        """Begin a search."""
        self.control.stage = Stage.LOOKING_FOR_GROUP
        until_s = max(self.control.scheduled_time, now_s + self.home.settings.min_matchmaking_time)
        until_s = min(until_s, self.wish.deadline_s)
        self.matchmaker = Matchmaker(self.home, self.wish.gathered, until_s, now_s, missed=missed)
        self._go_on_seeking(now_s)

    def _go_on_seeking(self, now_s: float) -> None:
        """Join the group that the search has found, or do without one."""
        self._collect()
        search = self.matchmaker.search if self.matchmaker is not None else None
        if search is not None and search.group is not None:
            self._retire()
            self._joined(search.group, search.led)
        elif search is not None and search.over:
            self._found_none(search, now_s)

    def _found_none(self, search: Search, now_s: float) -> None:
        """Look again if that may help. Who is late for a round joins a later one or goes on: so it catches up."""
        terms, ahead = search.terms, search.ahead
        again, why = True, f"too few peers under {terms.key} by {terms.expires_s:.6g} s"
        if search.late:
            why = f"the group of {terms.key} was formed before this rank came"
            self.counts["rounds missed"] += 1
        elif terms.expected and now_s < terms.expires_s:
            again, why = False, f"no other member of {terms.key} will come"
        if ahead is not None and ahead.round_ > self.home.round:
            again, self.home.round, self.next_round = ahead.looking, ahead.round_, ahead.round_
        elif search.late:
            again = False
        if search.mismatched:
            why += f" (rank {sorted(search.mismatched)[0]} has other tensors, compression or part sizes)"
        self._failed(why, now_s, again=again)

    def _joined(self, group: Group, led: bool) -> None:
        self.group, self.led = group, led
        self.control.rank_count = len(group.members)
        self.control.stage = Stage.AWAITING_TRIGGER
        self.next_round = self.home.round + 1
        self.home.formed(group, led)
        self._early += self.home.early(group.number)

    # ----------------------------------------------------------------------------------------------- words
    def handle(self, source: int, word: Message, now_s: float) -> bool:
        """Take a word of this step's search or group; return whether it was one."""
        if self.group is not None:
            return self._handle_member(self.group, source, word, now_s)
        if self.matchmaker is None or word.kind not in SEARCH_KINDS:
            return False
        self.matchmaker.search.handle(source, word, now_s)
        if self.matchmaker.search.ended:
            self._go_on_seeking(now_s)
        return True

    def _handle_member(self, group: Group, source: int, word: Message, now_s: float) -> bool:
        """Take a word once the group is formed."""
        if word.kind is Kind.BEGIN and isinstance(word.meta, Group) and word.meta.number == group.number:
            return True  # it came twice
        if word.kind is Kind.JOIN and self.led and source in group.ranks and word.meta[1] == group.key:
            self.out.append((source, Message(Kind.BEGIN, word.number, meta=group)))  # the first was lost
            return True
        if word.number != group.number or word.kind not in (Kind.PART, Kind.DELTA, Kind.ABSENT):
            return False
        if self.butterfly is None:
            self._early.append((source, word))
        else:
            self.butterfly.handle(source, word, now_s)
        return True

    def told(self, rank: int, position: Position, now_s: float) -> None:
        """Learn how far a rank is that is not where this one is."""
        if self.matchmaker is not None:
            self.matchmaker.search.told(rank, position, now_s)

    def lost(self, rank: int, now_s: float) -> None:
        """Note that a rank is dead."""
        if self.matchmaker is not None:
            self.matchmaker.search.gone(rank, now_s)
        if self.butterfly is not None:
            self.butterfly.lost(rank, now_s)

    # ------------------------------------------------------------------------------------------------ time
    def tick(self, now_s: float) -> None:
        """Do what is due."""
        if self.control.cancel_requested:
            self._cancel()
        elif self.matchmaker is not None:
            self._tick_search(self.matchmaker, now_s)
        if self.group is not None and self.butterfly is None and self.control.triggered:
            self._begin(self.group, now_s)
        if self.butterfly is not None and not self.control.done():
            self._tick_butterfly(self.butterfly, now_s)
        self._collect()

    def _tick_search(self, matchmaker: Matchmaker, now_s: float) -> None:
        matchmaker.tick(now_s)
        if now_s >= self.wish.deadline_s and not matchmaker.search.ended:
            matchmaker.search.leave()
        self._go_on_seeking(now_s)

    def _begin(self, group: Group, now_s: float) -> None:
        home = self.home
        if not home.borrow():
            return
        self.control.stage, self.control.began_allreduce = Stage.RUNNING_ALLREDUCE, True
        self.butterfly = Butterfly(
            home.rank, group, home.vector, weight=self.control.weight,
            limits=home.settings.limits(self.wish.patience_s), now_s=now_s, residuals=home.residuals,
        )  # fmt: skip
        home.hand_back()
        for rank in sorted(home.failed & set(group.ranks)):
            self.butterfly.lost(rank, now_s)
        early, self._early = self._early, []
        for source, word in early:
            self.butterfly.handle(source, word, now_s)

    def _tick_butterfly(self, butterfly: Butterfly, now_s: float) -> None:
        butterfly.send_some(self.home.settings.burst, now_s)
        butterfly.tick(now_s)
        if not butterfly.finished:
            return
        nothing = why_no_average(butterfly)
        if nothing is not None:
            self._collect()
            self._failed(nothing, now_s)
        elif self.home.borrow():
            self._apply(butterfly)

    def _apply(self, butterfly: Butterfly) -> None:
        home = self.home
        alpha = home.settings.averaging_alpha
        deltas = (
            butterfly.deltas
            if alpha == 1
            else [delta * delta.dtype.type(alpha) for delta in butterfly.deltas]
        )
        home.vector.add(deltas)
        home.hand_back()
        self._collect()
        self._retire()
        averaged = result_of(butterfly)
        self.counts["partial steps"] += not averaged.complete
        home.averaged(averaged)
        self.control.finish(averaged)

    @property
    def sending(self) -> bool:
        """Whether there are parts that can be sent now."""
        return self.butterfly is not None and self.butterfly.sending.can_send

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        if self.matchmaker is not None:
            return min(self.wish.deadline_s, self.matchmaker.wake_s())
        return self.butterfly.wake_s() if self.butterfly is not None else math.inf

    # ---------------------------------------------------------------------------------------------- endings
    def _failed(self, why: str, now_s: float, again: bool = True) -> None:
        """Try again, or end."""
        self.failures.append(why)
        gone_on = self.group is not None and self.home.settings.matchmaking is not None  # the others have
        self._withdraw()
        if self.wish.retry and again and not gone_on and now_s < self.wish.deadline_s:
            self._look(now_s)
        else:
            shown = self.failures if len(self.failures) < 4 else [*self.failures[:2], "…", self.failures[-1]]
            self.control.finish(error=AveragingFailed(f"rank {self.home.rank}: {'; '.join(shown)}"))

    def _cancel(self) -> None:
        self._withdraw()
        self.control.finish(error=Cancelled(f"rank {self.home.rank}: the averaging step was cancelled"))

    def _withdraw(self) -> None:
        """Tell everybody who counts on this rank."""
        if self.matchmaker is not None:
            self.matchmaker.search.leave()
        if self.group is not None:
            absent = Message(Kind.ABSENT, self.group.number)
            self.out.extend((rank, absent) for rank in self.group.ranks if rank != self.home.rank)
        self._collect()
        self._retire()
        self.group = None
        self._early.clear()

    def _retire(self) -> None:
        """Let go of the machines, and keep what they counted."""
        if self.matchmaker is not None:
            self.matchmaker.end()
        for machine in (self.matchmaker, self.butterfly):
            if machine is not None:
                self.out.extend(machine.out)
                self.counts.update(machine.counts)
        self.matchmaker = self.butterfly = None

    def _collect(self) -> None:
        for machine in (self.matchmaker, self.butterfly):
            if machine is not None:
                self.out.extend(machine.out)
                machine.out.clear()


EARLY_AT_MOST = 4096  # words kept for groups and rounds that this rank has not come to yet
GROUPS_AT_MOST = 64  # that are remembered


class StepQueue:
    """At most one step is under way; the others begin in the order in which they were asked for."""

    def __init__(self, home: StepContext, engine: AveragerEngine) -> None:
        self.home, self.engine = home, engine
        self.counts: Counter[str] = Counter()
        self._step: Step | None = None
        self._waiting: deque[tuple[StepControl, StepRequest]] = deque()
        self._early: deque[tuple[int, Message, float]] = deque(
            maxlen=EARLY_AT_MOST
        )  # source, word, when it came
        self._groups: deque[int] = deque(maxlen=GROUPS_AT_MOST)  # numbers of the latest groups
        self._missed: set[int] = set()  # ranks that asked for the next static round, and did not wait
        self._formed = -1  # the last static round in which this rank was in a group

    @property
    def current(self) -> Step | None:
        """The step under way, if any."""
        return self._step if self._step is not None and not self._step.control.done() else None

    def ask(self, control: StepControl, wish: StepRequest) -> None:
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
            step = self._step = Step(self.home, control, wish, now_s, missed=missed)
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

    def early(self, number: int) -> list[tuple[int, Message]]:
        """Return, and forget, the words of a group that came before the group was known here."""
        found = [(source, word) for source, word, _ in self._early if word.number == number]
        if found:
            left = (item for item in self._early if item[1].number != number)
            self._early = deque(left, maxlen=EARLY_AT_MOST)
        return found

    # ---------------------------------------------------------------------------------------------------- words
    def handle(self, source: int, word: Message, now_s: float) -> None:
        """Hand a word to the step it belongs to, keep it for the next one, or say that nobody is looking."""
        step = self.current
        if word.kind is Kind.LEAVE and self._left(source, word):
            return
        if word.kind in (Kind.JOIN, Kind.CALL) and self.home.settings.matchmaking is not None:
            self._static(source, word, now_s)
        elif step is None or not step.handle(source, word, now_s):
            self._unexpected(source, word, now_s)

    def _static(self, source: int, word: Message, now_s: float) -> None:
        """Take a JOIN or CALL for a round: keep it if this rank has not come so far, else tell how far it is."""
        step = self.current
        round_ = round_of(str(word.meta[1]), self.home.settings.prefix)
        if round_ > self.home.round or (round_ == self.home.round and step is None):
            if word.kind is Kind.JOIN:
                self._early.append((source, word, now_s))
                if step is not None:
                    step.told(source, Position(round_, True, -1), now_s)
        elif step is None or round_ < self.home.round or not step.handle(source, word, now_s):
            self.engine.send(
                [
                    (
                        source,
                        Message(Kind.REPLY, word.number, Reply.NOT_LOOKING_FOR_GROUP, meta=self._position()),
                    )
                ]
            )

    def _position(self) -> Position:
        step = self.current
        if step is not None and step.group is not None:
            return Position(step.next_round, False, self.home.round)
        return Position(self.home.round, step is not None, self._formed)

    def _unexpected(self, source: int, word: Message, now_s: float) -> None:
        if word.kind is Kind.JOIN:
            self.engine.send([(source, Message(Kind.REPLY, word.number, Reply.NOT_LOOKING_FOR_GROUP))])
        elif word.kind in (Kind.PART, Kind.ABSENT, Kind.BEGIN) and self._is_over(word):
            if word.kind is Kind.PART:  # its sender may still wait for an answer, if one was lost
                self.engine.send([(source, Message(Kind.ABSENT, word.number))])
        elif word.kind in (Kind.PART, Kind.ABSENT):  # others of the group may begin before its BEGIN is here
            self._early.append((source, word, now_s))
        else:
            self.engine.send(declined(self.home.rank, source, word))

    def _is_over(self, word: Message) -> bool:
        return (word.meta.number if word.kind is Kind.BEGIN else word.number) in self._groups

    def _left(self, source: int, word: Message) -> bool:
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
        if step.matchmaker is not None:
            step.matchmaker.keepers_changed(changed, now_s)
        for rank in sorted(dead):
            step.lost(rank, now_s)
        step.tick(now_s)
        self._send(step)
        if step.control.done():
            self._end(step)
            self._begin_next(now_s)

    def _send(self, step: Step) -> None:
        self.engine.send(step.out)
        step.out.clear()

    def _end(self, step: Step) -> None:
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
