"""A search and where its candidates come from: the directory, or a static matchmaking.

This room knows keys and places; it sends nothing and knows no clock but the time it is told.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from spawnsim.policies.groups.butterfly import Member
from spawnsim.policies.groups.directory import Asker, Entry
from spawnsim.policies.groups.keys import digest, group_key
from spawnsim.policies.groups.parts import Vector
from spawnsim.policies.groups.search import Search
from spawnsim.policies.groups.settings import Settings
from spawnsim.policies.groups.terms import Place, Terms
from spawnsim.policies.groups.words import Outgoing

REFRESHES = 5  # times that a seeker looks into the directory again within min_matchmaking_time


class Seat(Protocol):
    """What a search needs of its averager."""

    settings: Settings
    vector: Vector
    asker: Asker
    rank: int
    size: int
    bits: str
    round: int

    @property
    def failed(self) -> set[int]:
        """The ranks that are known to be dead."""

    def number(self) -> int:
        """Draw a number that nobody else draws."""

    def shuffled(self, members: list[Member]) -> list[Member]:
        """Return the members in a random order."""


class Seeking:
    """One search, until `expires_s`. It has ended when `search.ended`; then call `end`.

    `missed`: whether members of a static group have asked for this rank already, and have given it up.
    """

    def __init__(
        self, seat: Seat, gathered: Any, expires_s: float, now_s: float, *, missed: bool = False
    ) -> None:
        self.seat, self.settings = seat, seat.settings
        self._gathered, self._expires_s = gathered, expires_s
        self._news: deque[Outgoing] = deque()
        self._refresh_s = self._call_s = math.inf
        if self.settings.matchmaking is None:
            self.key = group_key(self.settings.prefix, seat.bits)
            self.search = self._begin((expires_s, seat.rank), self.settings.target_group_size, seat.shuffled)
            self._declare(now_s)
        else:
            self.key = static_key(self.settings.prefix, seat.round)
            self._begin_round(now_s, missed)

    def _begin_round(self, now_s: float, missed: bool) -> None:
        """Begin the search for the group that the static matchmaking says."""
        place, others = self._static_places()
        expected = tuple(rank for _, rank in others)
        self.search = self._begin(place, len(others) + 1, _by_rank, expected)
        if not others:
            self.search.assemble()
            return
        self._call_s = now_s if missed else now_s + self.settings.request_timeout
        self.search.offer([each for each in others if each[1] not in self.seat.failed], now_s)
        for rank in expected:
            if rank in self.seat.failed and not self.search.ended:
                self.search.gone(rank, now_s)

    def _begin(
        self, place: Place, size: int | None, shuffle: Callable[[list[Member]], list[Member]],
        expected: tuple[int, ...] = (),
    ) -> Search:  # fmt: skip
        seat, settings = self.seat, self.settings
        if settings.client_mode:
            place = (math.inf, seat.rank)
        member = Member(seat.rank, settings.role, settings.bandwidth, self._gathered)
        least = min(settings.min_group_size, size or settings.min_group_size)
        schema = digest(repr((seat.vector.schema, settings.part_size_bytes, settings.min_vector_size)))
        return Search(
            Terms(
                self.key, schema, place, member, self._expires_s, settings.request_timeout,
                seat.number, shuffle, size, least, not settings.client_mode, expected, seat.round,
            )
        )  # fmt: skip

    def _static_places(self) -> tuple[Place, list[Place]]:
        """Return the own place and the others' in this round's group: leadership goes round."""
        seat = self.seat
        assert self.settings.matchmaking is not None
        members = self.settings.matchmaking.members(seat.rank, seat.size, seat.round)
        shift = seat.round % len(members)
        order = members[shift:] + members[:shift]
        places = [(float(index), rank) for index, rank in enumerate(order)]
        return places[order.index(seat.rank)], [place for place in places if place[1] != seat.rank]

    # ------------------------------------------------------------------------------------------- the directory
    def _declare(self, now_s: float) -> None:
        terms = self.search.terms
        entry = Entry(self.seat.rank, terms.place[0], terms.expires_s) if terms.may_lead else None
        self._news.extend(self.seat.asker.ask(self.key, now_s, entry))
        self._refresh_s = now_s + self.settings.min_matchmaking_time / REFRESHES

    def listed(self, now_s: float) -> None:
        """Take up what the directory answered."""
        if not self.search.ended:
            entries = self.seat.asker.known(self.key, now_s)
            self.search.offer([(entry.place, entry.rank) for entry in entries], now_s)

    def keepers_changed(self, keys: Collection[str], now_s: float) -> None:
        """Declare again if a keeper of the own key did not answer."""
        if self.key in keys and not self.search.ended and self.search.leader is None:
            self._declare(now_s)

    # ---------------------------------------------------------------------------------------------------- time
    def tick(self, now_s: float) -> None:
        """Do what is due."""
        self.search.tick(now_s)
        if now_s >= self._refresh_s and not self.search.ended and self.search.leader is None:
            self._declare(now_s)
        if now_s >= self._call_s and not self.search.ended:
            self.search.call()
            self._call_s = now_s + self.settings.request_timeout

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        return min(
            self.search.wake_s(),
            math.inf if self.search.leader is not None else min(self._refresh_s, self._call_s),
        )

    def end(self) -> None:
        """Take back what was declared."""
        if self.settings.matchmaking is None:
            self._news.extend(self.seat.asker.take_back(self.key))

    @property
    def out(self) -> deque[Outgoing]:
        """What is to be sent."""
        self._news.extend(self.search.out)
        self.search.out.clear()
        return self._news

    @property
    def counts(self) -> Counter[str]:
        """What the search met."""
        return self.search.counts


def _by_rank(members: Iterable[Member]) -> list[Member]:
    return sorted(members, key=lambda member: member.rank)


def static_key(prefix: str, round_: int) -> str:
    """Return the key of a round of a static matchmaking."""
    return f"{prefix}.round{round_}"


def round_of(key: str, prefix: str) -> int:
    """Return the round that a static key names, -1 if it names none."""
    head, _, number = key.rpartition(".round")
    return int(number) if head == prefix and number.isdigit() else -1
