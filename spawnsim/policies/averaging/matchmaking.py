"""Finding a group: one rank's search, a state machine driven by messages and time, and the source of its candidates.

Every searching rank has a place (a number, then its rank) that is fixed during a search; the earliest place leads. A
rank sends join requests to candidates with earlier places, one at a time, the earliest first, and meanwhile accepts
requests of later ranks. `Search` does not know the directory: `Matchmaker` passes it candidates, from the directory or
from a static rule.

With a static rule, a search knows the expected members. It is complete when each of them has joined or will not come,
and it ends at once when a group of its round has been formed without this rank.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from spawnsim.policies.averaging.butterfly import Group, Member
from spawnsim.policies.averaging.directory import Entry
from spawnsim.policies.averaging.interface import Matchmaking
from spawnsim.policies.averaging.vector import digest
from spawnsim.policies.exchange.messages import Kind, Message, Outgoing

if TYPE_CHECKING:
    from spawnsim.policies.averaging.averager import DecentralizedAverager

Place = tuple[float, int]


@dataclass(frozen=True, slots=True)
class SearchTerms:
    """The parameters of a search. `place`: this rank's place; `member`: its description for the group.

    `size` members make the group complete; at `expires_s` a leader assembles with at least `least` members. `expected`
    lists the other members if they are known, and `round_` is their round. `may_lead` is False for clients. `number`
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


class Reply(IntEnum):
    """A leader's answer to a join request: the `part` of a REPLY."""

    ACCEPTED = 1
    NOT_LOOKING_FOR_GROUP = 2
    PROTOCOL_VIOLATION = 3
    BAD_SCHEMA_HASH = 4
    BAD_GROUP_KEY = 5
    NOT_DECLARED = 6
    BAD_EXPIRATION_TIME = 7
    NOT_A_LEADER = 8
    GROUP_IS_FULL = 9


class Position(NamedTuple):
    """Progress of a rank in a static matchmaking: its current or next round, and the last round with a group."""

    round_: int
    searching: bool
    formed: int


def declined(rank: int, source: int, message: Message) -> list[Outgoing]:
    """Return the answers to ranks that expect this rank although it does not, or no longer, search for their group."""
    if message.kind is Kind.REPLY and message.part == Reply.ACCEPTED:
        return [(source, Message(Kind.LEAVE, message.number))]
    if message.kind is Kind.BEGIN:
        group = Group.of(message.meta)
        return [(member, Message(Kind.ABSENT, group.number)) for member in group.ranks if member != rank]
    return []


@dataclass(slots=True)
class _Request:
    leader: int
    number: int
    due_s: float
    accepted: bool = False


class _Follower(NamedTuple):
    number: int
    member: Member


# There are no deadlocks or cycles: a request from an earlier place is refused, so "follows" points to an earlier
# place, and the order of places is total. Every request is answered at once, even by a rank that waits itself, so
# there is no chain of ranks that wait for answers. A leader that joins another leader redirects its followers to it
# (DISBAND with a hint) instead of bringing them along: groups never merge, and each leader has checked a request of
# every member. Only one request is open at a time: with two acceptances this rank would be in two groups, and
# one of them would wait for it until a time-out. For the same reason a full group is formed only after the answer to
# the open request. A group that is not full is formed when its search expires. It may still lack a member whose LEAVE
# and the leader's BEGIN have crossed: its average is then partial, and marked as such.
class Search:
    """One search. Feed it messages, candidates and time; send the content of `out`. It ends with `group` or `over`."""

    def __init__(self, terms: SearchTerms) -> None:
        self.terms = terms
        self.rank = terms.place[1]
        self.out: deque[Outgoing] = deque()
        self.counts: Counter[str] = Counter()
        self.group: Group | None = None
        self.over = False  # ended without a group
        self.led = False
        self.followers: dict[int, _Follower] = {}
        self._request: _Request | None = None
        self._candidates: dict[int, Place] = {}
        self._refused: dict[int, Place] = {}
        self._hint: int | None = None  # the rank to which another rank has redirected this one
        self.awaited = set(terms.expected)  # members that may still join
        self.late = False  # whether a group of this round was formed without this rank
        self.ahead: Position | None = None  # position of the most advanced member
        self.mismatched: set[int] = set()  # ranks with other tensors

    @property
    def ended(self) -> bool:
        return self.over or self.group is not None

    @property
    def leader(self) -> int | None:
        return self._request.leader if self._request and self._request.accepted else None

    # --------------------------------------------------------------------------------------------- candidates
    def offer(self, candidates: Iterable[Place], now_s: float) -> None:
        """Add candidates; send a request to the earliest one that has not refused, unless a request is open."""
        for place in candidates:
            # Only earlier places: see above the class. A refusal applies to one place, as a new search has a new place.
            if place < self.terms.place and self._refused.get(place[1]) != place:
                self._candidates[place[1]] = place
        self._ask_next(now_s)

    def _ask_next(self, now_s: float) -> None:
        if self._request is not None or self.ended:
            return
        leader, self._hint = self._hint, None
        if leader is None:
            leader = min(self._candidates, key=lambda rank: self._candidates[rank], default=None)
        if leader is None or now_s >= self.terms.expires_s:
            return
        terms = self.terms
        self._request = _Request(leader, terms.number(), now_s + terms.request_timeout_s)
        meta = (terms.place, terms.key, terms.schema, terms.member.plain())
        self.out.append((leader, Message(Kind.JOIN, self._request.number, meta=meta)))

    def _give_up(self, now_s: float, *, notify: bool, hint: int | None = None) -> None:
        """End the open request: mark that place as refused, and send a request to the next candidate."""
        request, self._request = self._request, None
        if request is None:
            return
        # Cleared first: late answers of the leader are then recognised by their number and declined.
        if notify:
            self.out.append((request.leader, Message(Kind.LEAVE, request.number)))
        place = self._candidates.pop(request.leader, None)
        if place is not None:
            self._refused[request.leader] = place
        if hint is not None and hint not in (self.rank, request.leader):
            self._hint = hint
        self._assemble_if_complete()
        self._ask_next(now_s)

    # -------------------------------------------------------------------------------------------------- messages
    def handle(self, source: int, message: Message, now_s: float) -> None:
        """Handle a JOIN, REPLY, LEAVE, DISBAND, BEGIN or CALL."""
        request = self._request
        if self.ended and message.kind is Kind.JOIN:
            self.out.append((source, Message(Kind.REPLY, message.number, part=Reply.NOT_LOOKING_FOR_GROUP)))
        elif self.ended:
            self.out.extend(declined(self.rank, source, message))
        elif message.kind is Kind.JOIN:
            self._join(source, message)
        elif message.kind is Kind.CALL:
            # Send a request to a member that begins late; a member with a later place sends one itself. An earlier
            # refusal meant that its search was still to begin, so it no longer applies.
            self._refused.pop(message.meta[0][1], None)
            self.offer([message.meta[0]], now_s)
        elif message.kind is Kind.REPLY and isinstance(message.meta, tuple):
            self.on_position(source, Position(*message.meta), now_s)
        elif message.kind is Kind.LEAVE:
            follower = self.followers.get(source)
            if follower is not None and follower.number == message.number:
                del self.followers[source]
        elif request is None or (source, message.number) != (request.leader, request.number):
            self.counts["late answers"] += 1
            # A late acceptance must be declined, or that leader expects this rank.
            self.out.extend(declined(self.rank, source, message))
        elif message.kind is Kind.REPLY:
            self._replied(request, message, now_s)
        elif message.kind is Kind.DISBAND:
            self._give_up(now_s, notify=False, hint=message.meta)
        elif message.kind is Kind.BEGIN:
            self.group = Group.of(message.meta)
            self._dismiss(None)

    def _join(self, source: int, message: Message) -> None:
        reply, meta = self._judge(source, message.meta)
        self.counts[reply.name] += 1
        if reply is Reply.ACCEPTED:
            self.followers[source] = _Follower(message.number, Member.of(message.meta[3]))
        self.out.append((source, Message(Kind.REPLY, message.number, part=reply, meta=meta)))
        self._assemble_if_complete()

    def _assemble_if_complete(self) -> None:
        """Form the group as soon as no other member will join, or the group is full."""
        terms = self.terms
        here = len(self.followers) + 1
        complete = bool(terms.expected) and not self.awaited - set(self.followers)
        # The order matters: a group that is complete but too small ends the search for all at once.
        # Not while a request is open: its leader may have accepted this rank just now, and would begin without it.
        full = terms.size is not None and here >= terms.size
        if (complete and here >= terms.least) or (full and self._request is None):
            self.assemble()
        elif complete:
            self.leave()

    # ---------------------------------------------------------------------------------------- expected members
    def on_position(self, source: int, position: Position, now_s: float) -> None:
        """Handle the position of a rank: it is beyond this round, or has formed a group of it without this rank."""
        if source not in self.awaited:
            return
        if self.ahead is None or position > self.ahead:
            self.ahead = position
        # A follower stays: its leader may still form a group of this round.
        if position.formed >= self.terms.round_ and self.leader is None:
            self.leave()
            self.late = True
        else:
            self.gone(source, now_s)

    def gone(self, rank: int, now_s: float) -> None:
        """Record that a rank will not join."""
        self.followers.pop(rank, None)
        self.awaited.discard(rank)
        if self._request is not None and self._request.leader == rank:
            self._give_up(now_s, notify=False)
        self._candidates.pop(rank, None)
        if self.terms.expected and not self.ended and self.leader is None:
            self._assemble_if_complete()

    def call(self) -> None:
        """Ask the missing members whether they will join."""
        here = set(self.followers) | ({self._request.leader} if self._request else set())
        if self.leader is None and not self.ended:
            meta = (self.terms.place, self.terms.key)
            self.out.extend((rank, Message(Kind.CALL, 0, meta=meta)) for rank in sorted(self.awaited - here))

    def _judge(self, source: int, request: object) -> tuple[Reply, float | int | None]:
        """Return the answer to a join request, with the rank to ask instead, or the end of the search if accepted."""
        terms = self.terms
        if not (isinstance(request, tuple) and len(request) == 4 and isinstance(request[3], tuple)):
            return Reply.PROTOCOL_VIOLATION, None
        place, key, schema, member = request
        if Member.of(member).rank != source or place[1] != source:
            return Reply.PROTOCOL_VIOLATION, None
        if schema != terms.schema:
            return Reply.BAD_SCHEMA_HASH, None
        if key != terms.key:
            return Reply.BAD_GROUP_KEY, None
        if not terms.may_lead:
            return Reply.NOT_DECLARED, None
        if place <= terms.place:
            return Reply.BAD_EXPIRATION_TIME, None
        if self.leader is not None:
            return Reply.NOT_A_LEADER, self.leader
        # Answered again: otherwise one lost reply would cost the follower its place.
        if source in self.followers:  # repeated: the request or its answer was lost or duplicated
            return Reply.ACCEPTED, terms.expires_s
        if terms.size is not None and len(self.followers) + 1 >= terms.size:
            return Reply.GROUP_IS_FULL, None
        return Reply.ACCEPTED, terms.expires_s

    def _replied(self, request: _Request, message: Message, now_s: float) -> None:
        if message.part == Reply.ACCEPTED:
            request.accepted = True
            request.due_s = float(message.meta) + self.terms.request_timeout_s
            # A leader need not answer before its own search expires, so its silence counts from then on.
            self._dismiss(request.leader)
        elif message.part == Reply.NOT_A_LEADER:
            self._give_up(now_s, notify=False, hint=message.meta)
        else:
            if message.part == Reply.BAD_SCHEMA_HASH:
                self.mismatched.add(request.leader)
            self._give_up(now_s, notify=False)

    def _dismiss(self, instead: int | None) -> None:
        for rank, follower in self.followers.items():
            # A hint, so that followers need not ask the directory again.
            self.out.append((rank, Message(Kind.DISBAND, follower.number, meta=instead)))
        self.followers.clear()

    # --------------------------------------------------------------------------------------------------- time
    def tick(self, now_s: float) -> None:
        """Give up on a silent leader; assemble or end when the search expires."""
        if self.ended:
            return
        if self._request is not None and now_s >= self._request.due_s:
            self.counts["silent leaders"] += 1
            self._give_up(now_s, notify=True)
        if now_s >= self.terms.expires_s and self.leader is None:
            self._expire()

    def _expire(self) -> None:
        """Assemble with the present followers; else wait for the answer to an open request, or end."""
        # With too few followers, wait for the open request: its leader may have room, and answers within the request
        # time-out. With enough followers, form the group at once, as they wait for this rank.
        here, least = len(self.followers) + 1, self.terms.least
        if here >= least and (self.followers or self._request is None):
            self.assemble()
        elif self._request is None:
            self.leave()

    def wake_s(self) -> float:
        due_s = self._request.due_s if self._request is not None else math.inf
        waits = self._request is not None and len(self.followers) + 1 < max(self.terms.least, 2)
        return due_s if self.leader is not None or waits else min(due_s, self.terms.expires_s)

    def _withdraw(self) -> None:
        """Withdraw the open request: a later acceptance would put this rank into two groups."""
        if self._request is not None:
            self.out.append((self._request.leader, Message(Kind.LEAVE, self._request.number)))
            self._request = None

    def leave(self) -> None:
        """End the search without a group, and notify leader and followers."""
        if not self.ended:
            self._withdraw()
            self._dismiss(None)
            self.over = True

    def assemble(self) -> None:
        """Form the group of this rank and its followers."""
        self._withdraw()
        members = self.terms.shuffle([self.terms.member, *(f.member for f in self.followers.values())])
        self.group, self.led = Group(self.terms.number(), tuple(members), self.terms.key), True
        for rank, follower in self.followers.items():
            self.out.append((rank, Message(Kind.BEGIN, follower.number, meta=self.group.plain())))


REFRESHES = 5  # queries of the directory within min_matchmaking_time


class Matchmaker:
    """One search, until `expires_s`. It has ended when `search.ended`; then call `end`.

    `missed`: whether members of a static group have already requested this rank, and given up.
    """

    def __init__(
        self, averager: DecentralizedAverager, gathered: Any, expires_s: float, now_s: float, *, missed: bool
    ) -> None:
        self.averager, self.settings = averager, averager.settings
        self._gathered, self._expires_s = gathered, expires_s
        self._out: deque[Outgoing] = deque()
        self._refresh_s = self._call_s = math.inf
        if self.settings.matchmaking is None:
            self.key = f"{self.settings.prefix}.0b{averager.bits}"
            self.search = self._begin((expires_s, averager.rank), self.settings.target_group_size)
            self._declare(now_s)
        else:
            self.key = f"{self.settings.prefix}.round{averager.round}"
            self._begin_round(self.settings.matchmaking, now_s, missed)

    def _begin_round(self, rule: Matchmaking, now_s: float, missed: bool) -> None:
        """Begin the search for the group of a static rule; its members lead in turn."""
        averager, failed = self.averager, self.averager.endpoint.failed
        members = rule.members(averager.rank, averager.size, averager.round)
        # Leadership rotates with the round: a dead or slow rank leads only occasionally.
        shift = averager.round % len(members)
        places = {rank: (float(index), rank) for index, rank in enumerate(members[shift:] + members[:shift])}
        self.search = self._begin(places.pop(averager.rank), len(members), tuple(places))
        if not places:
            self.search.assemble()
            return
        self._call_s = now_s if missed else now_s + self.settings.request_timeout
        self.search.offer([place for rank, place in places.items() if rank not in failed], now_s)
        for rank in places:
            if rank in failed and not self.search.ended:
                self.search.gone(rank, now_s)

    def _begin(self, place: Place, size: int | None, expected: tuple[int, ...] = ()) -> Search:
        averager, settings = self.averager, self.settings
        if settings.client_mode:
            # An infinite place: clients never lead, as all other places are earlier.
            place = (math.inf, averager.rank)
        member = Member(averager.rank, settings.role, settings.bandwidth, self._gathered)
        least = min(settings.min_group_size, size or settings.min_group_size)
        schema = digest(repr((averager.vector.schema, settings.part_size_bytes, settings.min_vector_size)))
        shuffle = self._shuffled if settings.matchmaking is None else sorted
        return Search(
            SearchTerms(
                self.key, schema, place, member, self._expires_s, settings.request_timeout,
                averager.number, shuffle, size, least, not settings.client_mode, expected, averager.round,
            )
        )  # fmt: skip

    def _shuffled(self, members: list[Member]) -> list[Member]:
        order = self.averager.comm.rng("groups.order").permutation(len(members))
        return [members[index] for index in order]

    # ------------------------------------------------------------------------------------------- the directory
    def _declare(self, now_s: float) -> None:
        terms = self.search.terms
        entry = Entry(self.averager.rank, terms.place[0], terms.expires_s) if terms.may_lead else None
        self._out.extend(self.averager.directory.ask(self.key, now_s, entry))
        self._refresh_s = now_s + self.settings.min_matchmaking_time / REFRESHES

    def listed(self, now_s: float) -> None:
        """Add the candidates of the directory's answer."""
        if not self.search.ended:
            entries = self.averager.directory.known(self.key, now_s)
            self.search.offer([(entry.place, entry.rank) for entry in entries], now_s)

    def replicas_changed(self, keys: Collection[str], now_s: float) -> None:
        """Declare again if a replica of this search's key did not answer."""
        # A follower needs no entry in the directory, because ranks must find its leader.
        if self.key in keys and not self.search.ended and self.search.leader is None:
            self._declare(now_s)

    # ---------------------------------------------------------------------------------------------------- time
    def tick(self, now_s: float) -> None:
        self.search.tick(now_s)
        if now_s >= self._refresh_s and not self.search.ended and self.search.leader is None:
            self._declare(now_s)
        if now_s >= self._call_s and not self.search.ended:
            self.search.call()
            self._call_s = now_s + self.settings.request_timeout

    def wake_s(self) -> float:
        own_s = min(self._refresh_s, self._call_s) if self.search.leader is None else math.inf
        return min(self.search.wake_s(), own_s)

    def end(self) -> None:
        """Withdraw the declaration."""
        if self.settings.matchmaking is None:
            self._out.extend(self.averager.directory.take_back(self.key))

    @property
    def out(self) -> deque[Outgoing]:
        self._out.extend(self.search.out)
        self.search.out.clear()
        return self._out

    @property
    def counts(self) -> Counter[str]:
        return self.search.counts
