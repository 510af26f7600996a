"""One averaging step: search, wait for the trigger, all-reduce; again after a failure while its deadline allows.

A state machine over the search and the butterfly, driven by words and time. The deadline bounds the search alone: an
all-reduce ends by itself, since its members wait for each other's messages only so long. This room knows how a step
goes on; the averager that owns it holds the communicator, the tensors and what survives a step (group bits, round,
residuals).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Protocol

from spawnsim.policies.groups.butterfly import Butterfly, Group
from spawnsim.policies.groups.control import AveragingFailed, Cancelled, Stage, StepControl
from spawnsim.policies.groups.parts import Values
from spawnsim.policies.groups.results import Averaged, result_of, why_nothing
from spawnsim.policies.groups.search import Search
from spawnsim.policies.groups.seeking import Seat, Seeking
from spawnsim.policies.groups.terms import Position
from spawnsim.policies.groups.words import Kind, Outgoing, Word

SEEKING = (Kind.JOIN, Kind.REPLY, Kind.LEAVE, Kind.DISBAND, Kind.BEGIN, Kind.CALL)


class Home(Seat, Protocol):
    """What a step needs of its averager."""

    residuals: list[Values] | None

    def formed(self, group: Group, led: bool) -> None:
        """Take note of a formed group."""

    def early(self, number: int) -> list[tuple[int, Word]]:
        """Return the words of a group that came before the group was known here."""

    def averaged(self, result: Averaged) -> None:
        """Take note of a result."""

    def borrow(self) -> bool:
        """Take the tensors if nobody else has them; `hand_back` afterwards."""

    def hand_back(self) -> None:
        """Give the tensors back."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the caller of `step` asked for. `patience_s`: how long to wait for a message if no time-out says it."""

    gathered: Any
    deadline_s: float
    retry: bool
    patience_s: float = math.inf


class Round:
    """One step under way. `missed`: members of its static group have looked for this rank before it came."""

    def __init__(
        self, home: Home, control: StepControl, wish: Wish, now_s: float, *, missed: bool = False
    ) -> None:
        self.home, self.control, self.wish = home, control, wish
        self.out: deque[Outgoing] = deque()
        self.seeking: Seeking | None = None
        self.butterfly: Butterfly | None = None
        self.group: Group | None = None
        self.led = False
        self.next_round = home.round + 1
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self._early: list[tuple[int, Word]] = []  # words of the group that came before the trigger
        self._look(now_s, missed)

    # ------------------------------------------------------------------------------------------ matchmaking
    def _look(self, now_s: float, missed: bool = False) -> None:
        """Begin a search."""
        self.control.stage = Stage.LOOKING_FOR_GROUP
        until_s = max(self.control.scheduled_time, now_s + self.home.settings.min_matchmaking_time)
        until_s = min(until_s, self.wish.deadline_s)
        self.seeking = Seeking(self.home, self.wish.gathered, until_s, now_s, missed=missed)
        self._go_on_seeking(now_s)

    def _go_on_seeking(self, now_s: float) -> None:
        """Join the group that the search has found, or do without one."""
        self._collect()
        search = self.seeking.search if self.seeking is not None else None
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
    def handle(self, source: int, word: Word, now_s: float) -> bool:
        """Take a word of this step's search or group; return whether it was one."""
        if self.group is not None:
            return self._handle_member(self.group, source, word, now_s)
        if self.seeking is None or word.kind not in SEEKING:
            return False
        self.seeking.search.handle(source, word, now_s)
        if self.seeking.search.ended:
            self._go_on_seeking(now_s)
        return True

    def _handle_member(self, group: Group, source: int, word: Word, now_s: float) -> bool:
        """Take a word once the group is formed."""
        if word.kind is Kind.BEGIN and isinstance(word.meta, Group) and word.meta.number == group.number:
            return True  # it came twice
        if word.kind is Kind.JOIN and self.led and source in group.ranks and word.meta[1] == group.key:
            self.out.append((source, Word(Kind.BEGIN, word.number, meta=group)))  # the first was lost
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
        if self.seeking is not None:
            self.seeking.search.told(rank, position, now_s)

    def lost(self, rank: int, now_s: float) -> None:
        """Note that a rank is dead."""
        if self.seeking is not None:
            self.seeking.search.gone(rank, now_s)
        if self.butterfly is not None:
            self.butterfly.lost(rank, now_s)

    # ------------------------------------------------------------------------------------------------ time
    def tick(self, now_s: float) -> None:
        """Do what is due."""
        if self.control.cancel_requested:
            self._cancel()
        elif self.seeking is not None:
            self._tick_search(self.seeking, now_s)
        if self.group is not None and self.butterfly is None and self.control.triggered:
            self._begin(self.group, now_s)
        if self.butterfly is not None and not self.control.done():
            self._tick_butterfly(self.butterfly, now_s)
        self._collect()

    def _tick_search(self, seeking: Seeking, now_s: float) -> None:
        seeking.tick(now_s)
        if now_s >= self.wish.deadline_s and not seeking.search.ended:
            seeking.search.leave()
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
        nothing = why_nothing(butterfly)
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
        if self.seeking is not None:
            return min(self.wish.deadline_s, self.seeking.wake_s())
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
        if self.seeking is not None:
            self.seeking.search.leave()
        if self.group is not None:
            absent = Word(Kind.ABSENT, self.group.number)
            self.out.extend((rank, absent) for rank in self.group.ranks if rank != self.home.rank)
        self._collect()
        self._retire()
        self.group = None
        self._early.clear()

    def _retire(self) -> None:
        """Let go of the machines, and keep what they counted."""
        if self.seeking is not None:
            self.seeking.end()
        for machine in (self.seeking, self.butterfly):
            if machine is not None:
                self.out.extend(machine.out)
                self.counts.update(machine.counts)
        self.seeking = self.butterfly = None

    def _collect(self) -> None:
        for machine in (self.seeking, self.butterfly):
            if machine is not None:
                self.out.extend(machine.out)
                machine.out.clear()
