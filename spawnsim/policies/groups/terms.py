"""What a search for a group is for, and what ranks tell each other that are not in the same one.

This room knows words; how a search goes on is `search`'s business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from spawnsim.policies.groups.butterfly import Group, Member
from spawnsim.policies.groups.words import Kind, Outgoing, Reply, Word

Place = tuple[float, int]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a search is for. `place` is the own one; `member` what the leader will announce of this rank.

    `size` members make the group complete; at `expires_s` a leader assembles with at least `least`. `expected` names
    the other members if they are known, and `round_` is what they meet for. `may_lead` is false for clients. `number`
    draws request and group numbers, `shuffle` the members' order.
    """

    key: str
    schema: int
    place: Place
    member: Member
    expires_s: float
    request_timeout_s: float
    number: Callable[[], int]
    shuffle: Callable[[list[Member]], list[Member]]
    size: int | None = None
    least: int = 2
    may_lead: bool = True
    expected: tuple[int, ...] = ()
    round_: int = -1


class Position(NamedTuple):
    """How far a rank is in a static matchmaking: the round that it looks for (or will), and the last that it was in."""

    round_: int
    looking: bool
    formed: int


def declined(rank: int, source: int, word: Word) -> list[Outgoing]:
    """Return what to tell those who count on this rank although it is not looking for their group (any more)."""
    if word.kind is Kind.REPLY and word.part == Reply.ACCEPTED:
        return [(source, Word(Kind.LEAVE, word.number))]
    if word.kind is Kind.BEGIN and isinstance(word.meta, Group):
        absent = Word(Kind.ABSENT, word.meta.number)
        return [(member, absent) for member in word.meta.ranks if member != rank]
    return []
