"""One averaging step: search, wait for the trigger, all-reduce; again after a failure while its deadline allows.

A state machine over the search and the butterfly, driven by words and time. This room knows how a step goes on; the
averager that owns it holds the communicator, the tensors and what survives a step (group bits, round, residuals).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from spawnsim.policies.groups.butterfly import Butterfly, Group, Member
from spawnsim.policies.groups.codecs import as_codec
from spawnsim.policies.groups.control import AveragingFailed, Cancelled, Stage, StepControl
from spawnsim.policies.groups.directory import Asker, Entry
from spawnsim.policies.groups.keys import group_key
from spawnsim.policies.groups.parts import Values, Vector
from spawnsim.policies.groups.search import Place, Search, Terms
from spawnsim.policies.groups.settings import Settings
from spawnsim.policies.groups.words import Kind, Outgoing, Word

REFRESHES = 5  # times that a seeker looks into the directory again within min_matchmaking_time


class Home(Protocol):
    """What a step needs of its averager."""

    settings: Settings
    vector: Vector
    asker: Asker
    rank: int
    size: int
    bits: str
    round: int
    residuals: list[Values] | None

    def number(self) -> int:
        """Draw a number that nobody else draws."""

    def shuffled(self, members: list[Member]) -> list[Member]:
        """Return the members in a random order."""

    def formed(self, group: Group, led: bool) -> None:
        """Take note of a formed group."""

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
        self.search: Search | None = None
        self.butterfly: Butterfly | None = None
        self.group: Group | None = None
        self.key = ""
        self.failures: list[str] = []
        self._early: list[tuple[int, Word]] = []  # words of the group that came before the trigger
        self._refresh_s = math.inf
        self._look(now_s)

    # ------------------------------------------------------------------------------------------ matchmaking
    def _look(self, now_s: float) -> None:
        """Begin a search."""
        home, settings = self.home, self.home.settings
        self.control.stage = Stage.LOOKING_FOR_GROUP
        self.group = self.butterfly = None
        expires_s = max(self.control.scheduled_time, now_s + settings.min_matchmaking_time)
        expires_s = min(expires_s, self.wish.deadline_s)
        if settings.matchmaking is None:
            self.key = group_key(settings.prefix, home.bits)
            place, size, others = (expires_s, home.rank), settings.target_group_size, []
        else:
            self.key = static_key(settings.prefix, home.round)
            place, others = self._static_places()
            size = len(others) + 1
        if settings.client_mode:
            place = (math.inf, home.rank)
        self.search = Search(self._terms(place, expires_s, size))
        if size == 1:
            self._joined(Group(home.number(), (self.search.terms.member,), self.key), led=True)
        elif settings.matchmaking is None:
            self._declare(now_s)
        else:
            self.search.offer(others, now_s)

    def _static_places(self) -> tuple[Place, list[Place]]:
        """Return the own place and the others' in this round's group: leadership goes round."""
        home = self.home
        assert home.settings.matchmaking is not None
        members = home.settings.matchmaking.members(home.rank, home.size, home.round)
        shift = home.round % len(members)
        order = members[shift:] + members[:shift]
        places = [(float(index), rank) for index, rank in enumerate(order)]
        return places[order.index(home.rank)], [place for place in places if place[1] != home.rank]

    def _terms(self, place: Place, expires_s: float, size: int | None) -> Terms:
        home, settings = self.home, self.home.settings
        shuffle: Callable[[list[Member]], list[Member]] = home.shuffled
        if settings.matchmaking is not None:
            shuffle = _by_rank
        return Terms(
            self.key, home.vector.schema, place,
            Member(home.rank, settings.role, settings.bandwidth, self.wish.gathered),
            expires_s, settings.request_timeout, home.number, shuffle, size,
            min(settings.min_group_size, size or settings.min_group_size), not settings.client_mode,
        )  # fmt: skip

    def _declare(self, now_s: float) -> None:
        assert self.search is not None
        terms, settings = self.search.terms, self.home.settings
        entry = Entry(self.home.rank, terms.place[0], terms.expires_s) if terms.may_lead else None
        self.out.extend(self.home.asker.ask(self.key, now_s, entry))
        self._refresh_s = now_s + settings.min_matchmaking_time / REFRESHES

    def listed(self, now_s: float) -> None:
        """Take up what the directory answered."""
        if self.search is not None and not self.search.ended:
            entries = self.home.asker.known(self.key, now_s)
            self.search.offer([(entry.place, entry.rank) for entry in entries], now_s)

    def _joined(self, group: Group, led: bool) -> None:
        self.group, self.search = group, None
        self.control.rank_count = len(group.members)
        self.control.stage = Stage.AWAITING_TRIGGER
        if self.home.settings.matchmaking is None:
            self.out.extend(self.home.asker.take_back(self.key))
        self.home.formed(group, led)

    # ----------------------------------------------------------------------------------------------- words
    def handle(self, source: int, word: Word, now_s: float) -> bool:
        """Take a word of this step's search or group; return whether it was one."""
        if self.group is not None and word.number == self.group.number:
            if self.butterfly is None:
                self._early.append((source, word))
            else:
                self.butterfly.handle(source, word, now_s)
            return True
        if self.search is None or word.kind not in (
            Kind.JOIN,
            Kind.REPLY,
            Kind.LEAVE,
            Kind.DISBAND,
            Kind.BEGIN,
        ):
            return False
        self.search.handle(source, word, now_s)
        return True

    def lost(self, rank: int, now_s: float) -> None:
        """Note that a rank is dead."""
        if self.search is not None:
            self.search.lost(rank, now_s)
        if self.butterfly is not None:
            self.butterfly.lost(rank, now_s)

    # ------------------------------------------------------------------------------------------------ time
    def tick(self, now_s: float) -> None:
        """Go on as far as words and time allow."""
        if self.control.cancel_requested:
            self._cancel()
        elif now_s >= self.wish.deadline_s and not (self.butterfly and self.butterfly.finished):
            self._overdue(now_s)
        elif self.search is not None:
            self._tick_search(now_s)
        if self.group is not None and self.butterfly is None and self.control.triggered:
            self._begin(now_s)
        if self.butterfly is not None and not self.control.done():
            self._tick_butterfly(now_s)
        self._collect()

    def _tick_search(self, now_s: float) -> None:
        search = self.search
        assert search is not None
        search.tick(now_s)
        if now_s >= self._refresh_s and not search.ended and search.leader is None:
            self._declare(now_s)
        self._collect()
        if search.group is not None:
            self._joined(search.group, search.led)
        elif search.over:
            self._failed(f"too few peers under {self.key} by {search.terms.expires_s:.6g} s", now_s)

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
        self.control.received = butterfly.received
        self.control.finish({member.rank: member.gathered for member in group.members})

    @property
    def sending(self) -> bool:
        """Whether there are parts that can be sent now."""
        return self.butterfly is not None and not self.butterfly.sent_all

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        times = [self.wish.deadline_s]
        if self.search is not None:
            times += [self.search.wake_s(), self._refresh_s if self.search.leader is None else math.inf]
        if self.butterfly is not None:
            times.append(self.butterfly.wake_s())
        return min(times)

    # ---------------------------------------------------------------------------------------------- endings
    def _failed(self, why: str, now_s: float) -> None:
        """Try again, or end."""
        self.failures.append(why)
        self._withdraw()
        if self.wish.retry and now_s < self.wish.deadline_s:
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
        if self.search is not None:
            self.search.leave()
        if self.group is not None:
            absent = Word(Kind.ABSENT, self.group.number)
            self.out.extend((rank, absent) for rank in self.group.ranks if rank != self.home.rank)
        if self.home.settings.matchmaking is None:
            self.out.extend(self.home.asker.take_back(self.key))
        self._collect()
        self.search = self.butterfly = self.group = None
        self._early.clear()

    def _collect(self) -> None:
        for machine in (self.search, self.butterfly):
            if machine is not None:
                self.out.extend(machine.out)
                machine.out.clear()


def _by_rank(members: Iterable[Member]) -> list[Member]:
    return sorted(members, key=lambda member: member.rank)


def static_key(prefix: str, round_: int) -> str:
    """Return the key of a round of a static matchmaking."""
    return f"{prefix}.round{round_}"
