"""One averaging step: search, wait for the trigger, all-reduce; again after a failure while its deadline allows.

A state machine over the search and the butterfly, driven by words and time. This room knows how a step goes on; the
averager that owns it holds the communicator, the tensors and what survives a step (group bits, round, residuals).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Protocol

from spawnsim.policies.codecs import as_codec
from spawnsim.policies.groups.butterfly import Butterfly, Group
from spawnsim.policies.groups.control import AveragingFailed, Cancelled, Stage, StepControl
from spawnsim.policies.groups.parts import Values
from spawnsim.policies.groups.seeking import Seat, Seeking
from spawnsim.policies.groups.words import Kind, Outgoing, Word

SEEKING = (Kind.JOIN, Kind.REPLY, Kind.LEAVE, Kind.DISBAND, Kind.BEGIN)


class Home(Seat, Protocol):
    """What a step needs of its averager."""

    residuals: list[Values] | None

    def formed(self, group: Group, led: bool) -> None:
        """Take note of a formed group."""

    def early(self, number: int) -> list[tuple[int, Word]]:
        """Return the words of a group that came before the group was known here."""

    def borrow(self) -> bool:
        """Take the tensors if nobody else has them; `hand_back` afterwards."""

    def hand_back(self) -> None:
        """Give the tensors back."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the caller of `step` asked for."""

    gathered: Any
    deadline_s: float
    retry: bool


class Round:
    """One step under way."""

    def __init__(self, home: Home, control: StepControl, wish: Wish, now_s: float) -> None:
        self.home, self.control, self.wish = home, control, wish
        self.out: deque[Outgoing] = deque()
        self.seeking: Seeking | None = None
        self.butterfly: Butterfly | None = None
        self.group: Group | None = None
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self._early: list[tuple[int, Word]] = []  # words of the group that came before the trigger
        self._look(now_s)

    # ------------------------------------------------------------------------------------------ matchmaking
    def _look(self, now_s: float) -> None:
        """Begin a search."""
        self.control.stage = Stage.LOOKING_FOR_GROUP
        until_s = max(self.control.scheduled_time, now_s + self.home.settings.min_matchmaking_time)
        self.seeking = Seeking(self.home, self.wish.gathered, min(until_s, self.wish.deadline_s), now_s)
        self._go_on_seeking()

    def _go_on_seeking(self) -> None:
        """Join the group that the search has found."""
        self._collect()
        seeking = self.seeking
        if seeking is not None and seeking.search.group is not None:
            self._retire()
            self._joined(seeking.search.group, seeking.search.led)

    def _joined(self, group: Group, led: bool) -> None:
        self.group = group
        self.control.rank_count = len(group.members)
        self.control.stage = Stage.AWAITING_TRIGGER
        self.home.formed(group, led)
        self._early += self.home.early(group.number)

    # ----------------------------------------------------------------------------------------------- words
    def handle(self, source: int, word: Word, now_s: float) -> bool:
        """Take a word of this step's search or group; return whether it was one."""
        if self.group is not None and word.number == self.group.number:
            if self.butterfly is None:
                self._early.append((source, word))
            else:
                self.butterfly.handle(source, word, now_s)
            return True
        if self.seeking is None or word.kind not in SEEKING:
            return False
        self.seeking.search.handle(source, word, now_s)
        return True

    def lost(self, rank: int, now_s: float) -> None:
        """Note that a rank is dead."""
        if self.seeking is not None:
            self.seeking.search.lost(rank, now_s)
        if self.butterfly is not None:
            self.butterfly.lost(rank, now_s)

    # ------------------------------------------------------------------------------------------------ time
    def tick(self, now_s: float) -> None:
        """Go on as far as words and time allow."""
        if self.control.cancel_requested:
            self._cancel()
        elif now_s >= self.wish.deadline_s and not (self.butterfly and self.butterfly.finished):
            self._overdue(now_s)
        elif self.seeking is not None:
            self._tick_search(now_s)
        if self.group is not None and self.butterfly is None and self.control.triggered:
            self._begin(now_s)
        if self.butterfly is not None and not self.control.done():
            self._tick_butterfly(now_s)
        self._collect()

    def _tick_search(self, now_s: float) -> None:
        seeking = self.seeking
        assert seeking is not None
        seeking.tick(now_s)
        self._go_on_seeking()
        if seeking.search.over:
            self._failed(
                f"too few peers under {seeking.key} by {seeking.search.terms.expires_s:.6g} s", now_s
            )

    def _begin(self, now_s: float) -> None:
        home = self.home
        if not home.borrow():
            return
        assert self.group is not None
        self.control.stage, self.control.began_allreduce = Stage.RUNNING_ALLREDUCE, True
        settings = home.settings
        self.butterfly = Butterfly(
            home.rank, self.group, home.vector, weight=self.control.weight, codec=as_codec(settings.compression),
            limits=settings.limits(max(self.wish.deadline_s - now_s, 0.0)), now_s=now_s, residuals=home.residuals,
        )  # fmt: skip
        home.hand_back()
        early, self._early = self._early, []
        for source, word in early:
            self.butterfly.handle(source, word, now_s)

    def _tick_butterfly(self, now_s: float) -> None:
        butterfly = self.butterfly
        assert butterfly is not None
        butterfly.send_some(self.home.settings.burst, now_s)
        butterfly.tick(now_s)
        if butterfly.finished:
            if butterfly.received == 0:
                self._collect()
                self._failed("no reducer answered", now_s)
            elif self.home.borrow():
                self._apply(butterfly)

    def _apply(self, butterfly: Butterfly) -> None:
        home, group = self.home, self.group
        assert group is not None
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
        self.control.received = butterfly.received
        self.control.finish({member.rank: member.gathered for member in group.members})

    @property
    def sending(self) -> bool:
        """Whether there are parts that can be sent now."""
        return self.butterfly is not None and not self.butterfly.sent_all

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        times = [self.wish.deadline_s]
        if self.seeking is not None:
            times.append(self.seeking.wake_s())
        if self.butterfly is not None:
            times.append(self.butterfly.wake_s())
        return min(times)

    # ---------------------------------------------------------------------------------------------- endings
    def _failed(self, why: str, now_s: float) -> None:
        """Try again, or end."""
        self.failures.append(why)
        gone_on = self.group is not None and self.home.settings.matchmaking is not None  # the others have
        self._withdraw()
        if self.wish.retry and not gone_on and now_s < self.wish.deadline_s:
            self._look(now_s)
        else:
            self.control.finish(error=AveragingFailed(f"rank {self.home.rank}: {'; '.join(self.failures)}"))

    def _overdue(self, now_s: float) -> None:
        if self.butterfly is not None:
            self.butterfly.tick(math.inf)  # what has come so far is the result
            if self.butterfly.finished and self.butterfly.received > 0:
                return
        self.wish = Wish(self.wish.gathered, now_s, retry=False)
        stage = self.control.stage.value
        self._failed(f"the step met its deadline at {now_s:.6g} s while {stage}", now_s)

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
