"""The all-reduce of one group, as one member sees it: a state machine driven by messages and the time it is given.

Every member reduces a range of the vector (`vector.py`): it collects that range's parts from all senders, averages
them in the members' order, and returns to each sender the average minus what that sender sent. No communicator and no
tensor: flat arrays go in, deltas come out.

Failures. A sender that is awaited and silent for `sender_timeout_s` is banned: parts that it has sent count, later ones
do not. A reducer that is silent for `reducer_timeout_s` has failed: its range keeps local values. A part that
was lost or damaged is averaged without its sender, which keeps its local values there. Each average divides by the
weights that arrived, and every member learns whose values are not in it. Senders get less time than reducers: one that
waits for a slow sender must not itself seem to have failed to all the others.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from spawnsim.policies.averaging.vector import Part, Values, Vector, average, difference, element_counts
from spawnsim.policies.exchange.messages import Kind, Message, Outgoing
from spawnsim.policies.state.codecs import pack

AHEAD = 32  # parts without an answer, over all reducers ...
AHEAD_EACH = 2  # ... but at least so many for each


class PartSender:
    """What this member sends. `counts`: parts for each reducer; `order`: whose turn is next, the sender itself last.

    Each member begins with the next one in the group. If all began with the first, its card would be the bottleneck
    while the others were idle.
    """

    def __init__(self, order: Sequence[int], counts: Mapping[int, int]) -> None:
        self.counts = {rank: counts[rank] for rank in order if counts[rank]}
        self.window = max(AHEAD // max(len(self.counts) - 1, 1), AHEAD_EACH)
        self.failed: set[int] = set()
        self._sent = dict.fromkeys(self.counts, 0)
        self.answers = Counter[int]()  # parts that each reducer has answered, or passed over
        self._turn = deque(self.counts)  # reducers that have not been sent all their parts

    def next(self) -> tuple[int, int] | None:
        """Return the next part as (reducer, index), None if none may be sent now."""
        for _ in range(len(self._turn)):
            rank = self._turn.popleft()
            if not self._has_room(rank):
                self._turn.append(rank)
                continue
            index, self._sent[rank] = self._sent[rank], self._sent[rank] + 1
            if self._sent[rank] < self.counts[rank]:
                self._turn.append(rank)
            return rank, index
        return None

    def _has_room(self, rank: int) -> bool:
        return self._sent[rank] - self.answers[rank] < self.window

    @property
    def can_send(self) -> bool:
        return any(map(self._has_room, self._turn))

    def awaits(self, rank: int) -> bool:
        return rank not in self.failed and self.answers[rank] < self._sent.get(rank, 0)

    def answered(self, rank: int, index: int) -> bool:
        """Note the answer to a part (and that those before it are lost); false if none is expected."""
        if rank in self.failed or not self.answers[rank] <= index < self.counts.get(rank, 0):
            return False
        self.answers[rank] = index + 1
        if self._sent[rank] <= index:  # it does not wait for the part: it has averaged without this sender
            self._sent[rank] = index + 1
            if self._sent[rank] == self.counts[rank]:
                self._turn.remove(rank)
        return True

    def fail(self, rank: int) -> bool:
        """Give a reducer up; return whether anything was expected of it."""
        if rank in self.failed or self.answers[rank] >= self.counts.get(rank, 0):
            return False
        self.failed.add(rank)
        if rank in self._turn:
            self._turn.remove(rank)
        return True

    @property
    def finished(self) -> bool:
        """Whether all parts were sent and answered, but for the failed reducers'."""
        return all(rank in self.failed or self.answers[rank] == count for rank, count in self.counts.items())


class ReducedPart(NamedTuple):
    """One averaged part: the delta of each sender that is in it, their total weight, and the senders that are not."""

    part: int
    deltas: dict[int, Values]
    weight: float
    missing: tuple[int, ...]


class PartReducer:
    """The range that this member averages, in parts. `live` senders are waited for; the banned are not."""

    def __init__(self, senders: Sequence[int], parts: Sequence[Part]) -> None:
        self.senders, self.parts, self.done = list(senders), parts, 0
        self.live = set(senders)
        self.progress = dict.fromkeys(senders, 0)  # sender → the part that comes next from it
        self._came: list[dict[int, tuple[Values, float]]] = [{} for _ in parts]

    @property
    def finished(self) -> bool:
        return self.done == len(self.parts)

    def awaits(self, sender: int) -> bool:
        # `<=`: the sender has not passed the part that is to be averaged next.
        return not self.finished and sender in self.live and self.progress[sender] <= self.done

    def take(self, sender: int, index: int, values: Values | None, weight: float) -> bool:
        """Keep one part (None: it came damaged). Refuse parts of the banned, or those that came or were passed over."""
        # A part that was passed over is averaged already: taken now it would be in no mean, and its sender would learn
        # otherwise.
        if sender not in self.live or index < self.progress[sender]:
            return False
        if values is not None:
            self._came[index][sender] = (values, weight)
        self.progress[sender] = index + 1
        return True

    def ready(self) -> Iterator[ReducedPart]:
        """Yield the parts for which no sender is awaited any more, in order."""
        while not self.finished and not any(map(self.awaits, self.live)):
            self.done += 1
            yield self._reduce(self.done - 1)

    def _reduce(self, index: int) -> ReducedPart:
        came, self._came[index] = self._came[index], {}
        # Sums are taken in the members' order.
        present = [sender for sender in self.senders if sender in came]
        missing = tuple(sender for sender in self.senders if sender not in came)
        if not present:
            return ReducedPart(index, {}, 0.0, missing)
        parts, weights = zip(*(came[sender] for sender in present), strict=True)
        mean, total = average(parts, weights)
        if total == 0:
            return ReducedPart(index, {}, 0.0, tuple(self.senders))
        deltas = {sender: difference(mean, part) for sender, part in zip(present, parts, strict=True)}
        return ReducedPart(index, deltas, total, missing)


class Role(Enum):
    """What a member does: NODE sends and reduces, CLIENT only sends, AUX only reduces."""

    NODE = "node"
    CLIENT = "client"
    AUX = "aux"


class Member(NamedTuple):
    """One member of a group, as its leader announced it."""

    rank: int
    role: Role = Role.NODE
    bandwidth: float | None = None
    gathered: Any = None

    def plain(self) -> tuple[int, str, float | None, Any]:
        """Return what travels: no class of this package, whose module path would be pickled with it."""
        return self.rank, self.role.value, self.bandwidth, self.gathered

    @classmethod
    def of(cls, plain: tuple[int, str, float | None, Any]) -> Member:
        rank, role, bandwidth, gathered = plain
        return cls(rank, Role(role), bandwidth, gathered)


class Group(NamedTuple):
    """A formed group: its number, and its members in the order in which sums are taken."""

    number: int
    members: tuple[Member, ...]
    key: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(member.rank for member in self.members)

    def plain(self) -> tuple[int, list[Any], str]:
        return self.number, [member.plain() for member in self.members], self.key

    @classmethod
    def of(cls, plain: tuple[int, list[Any], str]) -> Group:
        number, members, key = plain
        return cls(number, tuple(map(Member.of, members)), key)


@dataclass(frozen=True, slots=True)
class Limits:
    """How an all-reduce is cut, and how long it waits: for a message of a member, and altogether."""

    part_size_bytes: int = 2**19
    min_vector_size: int = 0
    sender_timeout_s: float = math.inf
    reducer_timeout_s: float = math.inf
    allreduce_timeout_s: float = math.inf


def shares(group: Group, length: int, min_size: int) -> list[int]:
    """Return how many elements each member reduces; all 0 if no member can."""
    rates = [0.0 if member.role is Role.CLIENT else member.bandwidth for member in group.members]
    if not any(rate is None or rate > 0 for rate in rates):
        # If no member that may reduce has bandwidth, all share the work equally: a group that nobody serves would fail.
        rates = [0.0 if member.role is Role.CLIENT else 1.0 for member in group.members]
    return element_counts(length, rates, min_size) if any(rates) or None in rates else [0] * len(rates)


# Deltas and not averages travel back, for two reasons. The delta of equal inputs is exactly zero, and every codec keeps
# zeros, so ranks that agree stay bit for bit as they were under any compression. And training may continue meanwhile: a
# delta added later keeps the steps that were taken since, where an average would overwrite them.
#
# Sums are taken in the members' order: the result must not depend on the order in which messages arrive.
# Each reducer gets its parts in order and answers in order, so a part that is passed over was lost. Only so many parts
# are under way at once (`AHEAD`): the rest of a large vector would keep the sender's wire busy for minutes, and its
# answers to others, which those wait for, would queue behind it.
class Butterfly:
    """One member's part in one all-reduce. Feed it messages and time, send what is in `out`, until `finished`."""

    def __init__(
        self, rank: int, group: Group, vector: Vector, *, weight: float, limits: Limits, now_s: float
    ) -> None:
        self.rank, self.group, self.vector, self.limits = rank, group, vector, limits
        self.weight, self.began_s = weight, now_s
        self.out: deque[Outgoing] = deque()
        self.counts: Counter[str] = Counter()
        self.deltas = vector.zeros()
        own = shares(group, vector.count, limits.min_vector_size)
        cuts = vector.cut(own, limits.part_size_bytes)
        self.parts = {member.rank: cut for member, cut in zip(group.members, cuts, strict=True)}
        senders = [member.rank for member in group.members if member.role is not Role.AUX]
        self.sends = rank in senders
        self.reducer = PartReducer(senders, self.parts[rank])
        at = group.ranks.index(rank) + 1
        order = group.ranks[at:] + group.ranks[:at] if self.sends else ()
        self.sending = PartSender(order, {each: len(parts) for each, parts in self.parts.items()})
        self._values = vector.read() if self.sends else []
        self._lost: set[int] = set()
        self._heard_s = dict.fromkeys(group.ranks, now_s)
        self._reduced_s = now_s  # when the last part was averaged
        # How many elements came back; and of these, by sender, how many are without its values.
        self._returned, self._lacking = 0, Counter[int]()
        self._reduce(now_s)  # without senders there is nothing to wait for

    # ------------------------------------------------------------------------------------------------ sending
    def send_some(self, limit: int, now_s: float) -> None:
        """Put up to `limit` more parts into `out`; those for this member's own range are taken at once."""
        for _ in range(limit):
            found = self.sending.next()
            if found is None:
                return
            rank, index = found
            message = self._message(self.parts[rank][index], index)
            if rank == self.rank:
                self.handle(rank, message, now_s)
            else:
                self.out.append((rank, message))
                # A reducer that was idle owes its answer from now on, not from its last message.
                self._heard_s[rank] = max(self._heard_s[rank], now_s)

    def _message(self, part: Part, index: int) -> Message:
        codec = self.vector.segments[part.segment].codec
        raw, body = pack(codec, self._values[part.segment][part.start : part.stop])
        return Message(Kind.PART, self.group.number, part=index, value=self.weight, body=body, raw=raw)

    # ---------------------------------------------------------------------------------------------- receiving
    def handle(self, source: int, message: Message, now_s: float) -> None:
        """Take a PART, DELTA or ABSENT of this group."""
        if source not in self._heard_s:
            self.counts["strangers"] += 1
        elif message.kind is Kind.ABSENT:
            self.lost(source, now_s)
        elif message.kind is Kind.PART:
            self._part(source, message, now_s)
        elif message.kind is Kind.DELTA:
            self._delta(source, message, now_s)

    def _unpacked(self, part: Part, message: Message) -> Values | None:
        """Return the values in a message, None if it holds none, or was damaged."""
        if not message.damaged:
            with suppress(ValueError):
                return self.vector.unpacked(part, message.raw, message.body)
        self.counts["damaged parts"] += 1
        return None

    def _part(self, source: int, message: Message, now_s: float) -> None:
        parts, weight = self.reducer.parts, message.value
        known = 0 <= message.part < len(parts) and weight >= 0 and math.isfinite(weight)
        values = self._unpacked(parts[message.part], message) if known else None
        if not (known and self.reducer.take(source, message.part, values, weight)):
            self.counts["refused parts"] += 1
            return
        self._heard_s[source] = now_s
        self._reduce(now_s)

    def _reduce(self, now_s: float) -> None:
        """Average complete parts; each sender gets its delta, or learns that its part was not averaged."""
        for reduced in self.reducer.ready():
            self._reduced_s = now_s
            for sender in self.reducer.senders:
                delta = reduced.deltas.get(sender)
                if sender == self.rank:
                    self._answered(self.rank, reduced.part, delta, reduced.missing)
                # A lost member's answer would stay on the wire in front of those for the living.
                elif sender not in self._lost:
                    self.out.append((sender, self._answer(reduced, delta)))
            if not self.sends:
                self._count(self.reducer.parts[reduced.part], reduced.missing)

    def _answer(self, reduced: ReducedPart, delta: Values | None) -> Message:
        number, index, missing = self.group.number, reduced.part, reduced.missing or None
        if delta is None:
            return Message(Kind.DELTA, number, part=index, meta=missing)
        raw, body = pack(self.vector.segments[self.reducer.parts[index].segment].codec, delta)
        return Message(Kind.DELTA, number, part=index, value=reduced.weight, meta=missing, body=body, raw=raw)

    def _delta(self, source: int, message: Message, now_s: float) -> None:
        parts, index = self.parts[source], message.part
        known = self.sends and 0 <= index < len(parts)
        delta = self._unpacked(parts[index], message) if known and message.value > 0 else None
        if known and self._answered(source, index, delta, message.meta or ()):
            self._heard_s[source] = now_s
        else:
            self.counts["refused deltas"] += 1

    def _answered(self, reducer: int, index: int, delta: Values | None, missing: Sequence[int]) -> bool:
        """Take a reducer's answer; without a delta, or if none is awaited, the local values stay."""
        if not self.sending.answered(reducer, index):
            return False
        if delta is not None:
            part = self.parts[reducer][index]
            self.deltas[part.segment][part.start : part.stop] = delta
            self._count(part, missing)
        return True

    def _count(self, part: Part, missing: Sequence[int]) -> None:
        self._returned += part.stop - part.start
        for sender in missing:
            self._lacking[sender] += part.stop - part.start

    # ----------------------------------------------------------------------------------------------- failures
    def lost(self, rank: int, now_s: float) -> None:
        """Note that a member takes no part any more: it is banned as a sender and has failed as a reducer."""
        self._lost.add(rank)
        self._ban(rank, now_s)
        self.counts["failed reducers"] += self.sending.fail(rank)

    def _ban(self, rank: int, now_s: float) -> None:
        if rank in self.reducer.live:
            self.counts["banned"] += not self.reducer.finished
            self.reducer.live.discard(rank)
            self._reduce(now_s)

    def _late(self) -> Iterator[tuple[float, bool, int]]:
        """Yield (due, whether as sender, rank) for each member that is awaited."""
        limits, end_s = self.limits, self.began_s + self.limits.allreduce_timeout_s
        for rank in self.group.ranks:
            if rank != self.rank and self.reducer.awaits(rank):
                # Silence begins no earlier than the last average: until then the reducer was not waiting for this
                # sender alone.
                since_s = max(self._heard_s[rank], self._reduced_s)
                yield min(since_s + limits.sender_timeout_s, end_s), True, rank
            if rank != self.rank and self.sending.awaits(rank):
                yield min(self._heard_s[rank] + limits.reducer_timeout_s, end_s), False, rank

    def tick(self, now_s: float) -> None:
        # A list first, since a ban may average parts and so change which members are awaited.
        for due_s, as_sender, rank in list(self._late()):
            if due_s <= now_s and as_sender:
                self._ban(rank, now_s)
            elif due_s <= now_s:
                self.counts["failed reducers"] += self.sending.fail(rank)

    def wake_s(self) -> float:
        return min((due_s for due_s, _, _ in self._late()), default=math.inf)

    # ---------------------------------------------------------------------------------------------- the result
    @property
    def finished(self) -> bool:
        return self.sending.finished and self.reducer.finished

    @property
    def received(self) -> float:
        """The share of this member's elements that came back averaged; 1 for an auxiliary."""
        return self._returned / self.vector.count if self.sends and self.vector.count else 1.0

    def missing(self) -> dict[int, float]:
        """Return, for each member whose values are not in all that came back, the share in which they are not.

        An auxiliary knows it of the parts that it has averaged itself.
        """
        lacking, returned = self._lacking, self._returned
        return {rank: lacking[rank] / returned for rank in self.group.ranks if lacking[rank]}
