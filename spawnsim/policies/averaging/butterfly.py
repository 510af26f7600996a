"""The all-reduce of one group, from the view of one member: a state machine driven by messages and time.

Every member reduces a range of the vector (`vector.py`): it collects that range's parts from all senders, averages
them in the members' order, and returns to each sender the average minus the sender's values. Inputs are flat arrays,
outputs are deltas. Must not know communicators or tensors.

Failures. An awaited sender that is silent for `sender_timeout_s` is banned: parts that it has sent count, later ones
do not. A reducer that is silent for `reducer_timeout_s` has failed: its range keeps local values. A lost or damaged
part is averaged without its sender, which keeps its local values there. Each average divides by the weights that
arrived, and every member learns which senders are missing. Senders have shorter time-outs than reducers: a reducer
that waits for a slow sender must not appear to have failed itself.
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
AHEAD_EACH = 2  # ... but at least this many per reducer


class PartSender:
    """The parts that this member sends. `counts`: parts per reducer; `order`: the reducers, the sender itself last.

    Each member begins with the next member of the group. If all began with the first member, its network card would be
    the bottleneck while all other cards were idle.
    """

    def __init__(self, order: Sequence[int], counts: Mapping[int, int]) -> None:
        self.counts = {rank: counts[rank] for rank in order if counts[rank]}
        self.window = max(AHEAD // max(len(self.counts) - 1, 1), AHEAD_EACH)
        self.failed: set[int] = set()
        self._sent = dict.fromkeys(self.counts, 0)
        self.answers = Counter[int]()  # parts that each reducer has answered or skipped
        self._turn = deque(self.counts)  # reducers with unsent parts

    def next(self) -> tuple[int, int] | None:
        """Return the next part as (reducer, index), or None if no part may be sent now."""
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
        """Record the answer to a part (earlier unanswered parts are lost); return False if it was not expected."""
        if rank in self.failed or not self.answers[rank] <= index < self.counts.get(rank, 0):
            return False
        self.answers[rank] = index + 1
        if self._sent[rank] <= index:  # the reducer has averaged the part without this sender
            self._sent[rank] = index + 1
            if self._sent[rank] == self.counts[rank]:
                self._turn.remove(rank)
        return True

    def fail(self, rank: int) -> bool:
        """Mark a reducer as failed; return whether any answer was expected from it."""
        if rank in self.failed or self.answers[rank] >= self.counts.get(rank, 0):
            return False
        self.failed.add(rank)
        if rank in self._turn:
            self._turn.remove(rank)
        return True

    @property
    def finished(self) -> bool:
        """Whether all parts were sent and answered, except the parts of failed reducers."""
        return all(rank in self.failed or self.answers[rank] == count for rank, count in self.counts.items())


class ReducedPart(NamedTuple):
    """One averaged part: the delta of each included sender, their total weight, and the missing senders."""

    part: int
    deltas: dict[int, Values]
    weight: float
    missing: tuple[int, ...]


class PartReducer:
    """The range that this member averages, in parts. It awaits `live` senders, not banned ones."""

    def __init__(self, senders: Sequence[int], parts: Sequence[Part]) -> None:
        self.senders, self.parts, self.done = list(senders), parts, 0
        self.live = set(senders)
        self.progress = dict.fromkeys(senders, 0)  # sender → its next part
        self._came: list[dict[int, tuple[Values, float]]] = [{} for _ in parts]

    @property
    def finished(self) -> bool:
        return self.done == len(self.parts)

    def awaits(self, sender: int) -> bool:
        # `<=`: the next part to average is still to come from this sender.
        return not self.finished and sender in self.live and self.progress[sender] <= self.done

    def take(self, sender: int, index: int, values: Values | None, weight: float) -> bool:
        """Store one part (None: damaged). Refuse duplicates, skipped parts, and parts of banned senders."""
        # A skipped part has been averaged already: if it were accepted now, its sender would learn that it counts
        # although no mean contains it.
        if sender not in self.live or index < self.progress[sender]:
            return False
        if values is not None:
            self._came[index][sender] = (values, weight)
        self.progress[sender] = index + 1
        return True

    def ready(self) -> Iterator[ReducedPart]:
        """Yield the parts that no longer await a sender, in order."""
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
    """Role of a member: NODE sends and reduces, CLIENT only sends, AUX only reduces."""

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
        """Return plain data for messages: pickled classes of this package would include their module paths."""
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
    """Part sizes and time limits of an all-reduce: per message of a member, and in total."""

    part_size_bytes: int = 2**19
    min_vector_size: int = 0
    sender_timeout_s: float = math.inf
    reducer_timeout_s: float = math.inf
    allreduce_timeout_s: float = math.inf


def shares(group: Group, length: int, min_size: int) -> list[int]:
    """Return how many elements each member reduces; 0 for all if no member can."""
    rates = [0.0 if member.role is Role.CLIENT else member.bandwidth for member in group.members]
    if not any(rate is None or rate > 0 for rate in rates):
        # If no possible reducer has bandwidth, all share the work equally: a group without reducers would fail.
        rates = [0.0 if member.role is Role.CLIENT else 1.0 for member in group.members]
    return element_counts(length, rates, min_size) if any(rates) or None in rates else [0] * len(rates)


# Deltas travel back instead of averages, for two reasons. The delta of equal inputs is exactly zero, and every codec
# preserves zeros, so ranks that agree stay unchanged to the bit under any compression. And training may continue
# meanwhile: a delta added later preserves the steps taken since, while an average would overwrite them.
#
# Sums are computed in the members' order, as the result must not depend on the order of arrivals.
# Each reducer receives its parts in order and answers in order, so a skipped part was lost. The number of parts in
# flight is limited (`AHEAD`): a large vector would keep the sender's wire busy for minutes, and its answers to waiting
# members would queue behind it.
class Butterfly:
    """One member's side of an all-reduce. Until `finished`, feed it messages and time, and send `out`."""

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
        self._alive_s = dict.fromkeys(group.ranks, now_s)
        self._reduced_s = now_s  # when the last part was averaged
        # Number of elements that came back; by sender, the number of these that lack its values.
        self._returned, self._lacking = 0, Counter[int]()
        self._reduce(now_s)  # without senders it is complete at once

    # ------------------------------------------------------------------------------------------------ sending
    def send_some(self, limit: int, now_s: float) -> None:
        """Put up to `limit` more parts into `out`; parts of this member's own range are handled at once."""
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
                # The time-out of an idle reducer begins now, not at its last message.
                self._alive_s[rank] = max(self._alive_s[rank], now_s)

    def _message(self, part: Part, index: int) -> Message:
        codec = self.vector.segments[part.segment].codec
        raw, body = pack(codec, self._values[part.segment][part.start : part.stop])
        return Message(Kind.PART, self.group.number, part=index, value=self.weight, body=body, raw=raw)

    # ---------------------------------------------------------------------------------------------- receiving
    def handle(self, source: int, message: Message, now_s: float) -> None:
        """Handle a PART, DELTA or ABSENT of this group."""
        if source not in self._alive_s:
            self.counts["strangers"] += 1
        elif message.kind is Kind.ABSENT:
            self.lost(source, now_s)
        elif message.kind is Kind.PART:
            self._part(source, message, now_s)
        elif message.kind is Kind.DELTA:
            self._delta(source, message, now_s)

    def _unpacked(self, part: Part, message: Message) -> Values | None:
        """Return the values in a message, or None if it has no valid values or was damaged."""
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
        self._alive_s[source] = now_s
        self._reduce(now_s)

    def _reduce(self, now_s: float) -> None:
        """Average complete parts; send each sender its delta, or a notice that its part was not averaged."""
        for reduced in self.reducer.ready():
            self._reduced_s = now_s
            for sender in self.reducer.senders:
                delta = reduced.deltas.get(sender)
                if sender == self.rank:
                    self._answered(self.rank, reduced.part, delta, reduced.missing)
                # An answer to a lost member would delay answers to living members on the wire.
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
            self._alive_s[source] = now_s
        else:
            self.counts["refused deltas"] += 1

    def _answered(self, reducer: int, index: int, delta: Values | None, missing: Sequence[int]) -> bool:
        """Accept a reducer's answer; without a delta, or if it is not awaited, local values stay."""
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
        """Remove a member: it is banned as a sender and has failed as a reducer."""
        self._lost.add(rank)
        self._ban(rank, now_s)
        self.counts["failed reducers"] += self.sending.fail(rank)

    def _ban(self, rank: int, now_s: float) -> None:
        if rank in self.reducer.live:
            self.counts["banned"] += not self.reducer.finished
            self.reducer.live.discard(rank)
            self._reduce(now_s)

    def _late(self) -> Iterator[tuple[float, bool, int]]:
        """Yield (due time, whether as sender, rank) for each awaited member."""
        limits, end_s = self.limits, self.began_s + self.limits.allreduce_timeout_s
        for rank in self.group.ranks:
            if rank != self.rank and self.reducer.awaits(rank):
                # Silence begins no earlier than the last average: before it, this reducer may have waited for another
                # sender.
                since_s = max(self._alive_s[rank], self._reduced_s)
                yield min(since_s + limits.sender_timeout_s, end_s), True, rank
            if rank != self.rank and self.sending.awaits(rank):
                yield min(self._alive_s[rank] + limits.reducer_timeout_s, end_s), False, rank

    def tick(self, now_s: float) -> None:
        # Copied to a list, since a ban may average parts and so change the awaited members.
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
        """Return, for each member that is missing in a part of the result, the share of elements without its values.

        For an auxiliary, the share refers to the parts that it averaged itself.
        """
        lacking, returned = self._lacking, self._returned
        return {rank: lacking[rank] / returned for rank in self.group.ranks if lacking[rank]}
