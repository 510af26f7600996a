"""The all-reduce of one group, as one member sees it: a state machine driven by words and the time it is told.

Every member reduces a range of the vector (`balance`): it collects that range's parts from all senders, averages them
in the members' order, and returns to each sender the average minus what that sender sent. Senders add these deltas, so
equal inputs stay bit for bit as they were under any compression. This room knows no communicator and no tensor: flat
arrays go in, deltas come out.

Failures. A sender that is silent for `sender_timeout_s` is banned: what it has sent counts, what comes later does not.
A reducer that is silent for `reducer_timeout_s` has failed: its range keeps local values. Each divides by the weights
that arrived.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from spawnsim.policies.codecs import Codec, pack, unpack
from spawnsim.policies.groups.balance import counts
from spawnsim.policies.groups.parts import Part, Values, Vector, average, difference
from spawnsim.policies.groups.words import Kind, Outgoing, Word


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


class Group(NamedTuple):
    """A formed group: its number, and its members in the order in which sums are taken."""

    number: int
    members: tuple[Member, ...]
    key: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks, in order."""
        return tuple(member.rank for member in self.members)


@dataclass(frozen=True, slots=True)
class Limits:
    """How an all-reduce is cut and how long it waits; None waits as long as the all-reduce may last."""

    part_size_bytes: int = 2**19
    min_vector_size: int = 0
    sender_timeout_s: float = math.inf
    reducer_timeout_s: float = math.inf
    allreduce_timeout_s: float = math.inf


def shares(group: Group, length: int, min_size: int) -> list[int]:
    """Return how many elements each member reduces; all 0 if nobody can."""
    rates = [0.0 if member.role is Role.CLIENT else member.bandwidth for member in group.members]
    if not any(rate is None or rate > 0 for rate in rates):
        rates = [0.0 if member.role is Role.CLIENT else 1.0 for member in group.members]
    return counts(length, rates, min_size) if any(rates) or None in rates else [0] * len(rates)


class Reducer:
    """The range that this member averages: what has come from whom."""

    def __init__(self, senders: Sequence[int], parts: Sequence[Part]) -> None:
        self.parts, self.done = parts, 0
        self.live = set(senders)
        self._order = list(senders)
        self._came: list[dict[int, tuple[Values, float]]] = [{} for _ in parts]
        self.progress = dict.fromkeys(senders, 0)

    @property
    def finished(self) -> bool:
        """Whether all parts are averaged."""
        return self.done == len(self.parts)

    def take(self, sender: int, index: int, values: Values, weight: float) -> bool:
        """Keep one part; parts of one sender come in order, others (and those of the banned) are refused."""
        if sender not in self.live or index != self.progress[sender]:
            return False
        self._came[index][sender] = (values, weight)
        self.progress[sender] += 1
        return True

    def ready(self) -> Iterator[tuple[int, dict[int, Values]]]:
        """Yield (part, delta of each sender that gave it) for the parts that nobody is awaited for any more."""
        while not self.finished and all(self.progress[sender] > self.done for sender in self.live):
            came = {
                sender: self._came[self.done][sender]
                for sender in self._order
                if sender in self._came[self.done]
            }
            self._came[self.done] = {}
            self.done += 1
            if came:
                mean, total = average(
                    [values for values, _ in came.values()], [weight for _, weight in came.values()]
                )
                yield (
                    self.done - 1,
                    {
                        s: difference(mean, values) if total else np.zeros_like(values)
                        for s, (values, _) in came.items()
                    },
                )


class Butterfly:
    """One member's part in one all-reduce. Feed it words and time, send what is in `out`, until `finished`."""

    def __init__(
        self, rank: int, group: Group, vector: Vector, *, weight: float, codec: Codec, limits: Limits, now_s: float,
        residuals: list[Values] | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.group, self.vector, self.limits, self.codec = rank, group, vector, limits, codec
        self.weight, self.began_s, self.residuals = weight, now_s, residuals
        self.out: deque[Outgoing] = deque()
        self.counts: Counter[str] = Counter()
        self.deltas = vector.zeros()
        members = group.members
        own = shares(group, vector.count, limits.min_vector_size)
        cuts = vector.cut(own, codec, limits.part_size_bytes)
        self.parts = {member.rank: cut for member, cut in zip(members, cuts, strict=True)}
        senders = [member.rank for member in members if member.role is not Role.AUX]
        self.sends = rank in senders
        self.reducer = Reducer(senders, self.parts[rank])
        self.owed = {r: deque(parts) for r, parts in self.parts.items() if parts and self.sends}
        self.failed: set[int] = set()
        self._total = sum(map(len, self.owed.values()))
        self._heard = dict.fromkeys(group.ranks, now_s)
        self._unsent = self._outgoing(vector.read()) if self.sends else iter(())
        self.sent_all = not self.sends
        self._reduce()  # without senders there is nothing to wait for

    # ------------------------------------------------------------------------------------------------ sending
    def _outgoing(self, values: list[Values]) -> Iterator[Outgoing]:
        """Yield the parts, to all reducers in turn, each member beginning with its successor."""
        start = self.group.ranks.index(self.rank) + 1
        order = self.group.ranks[start:] + self.group.ranks[:start]
        for index in range(max((len(self.parts[rank]) for rank in order), default=0)):
            for rank in order:
                if index < len(self.parts[rank]):
                    yield rank, self._word(values, self.parts[rank][index], index)

    def _word(self, values: list[Values], part: Part, index: int) -> Word:
        codec = self.vector.codec(part.segment, self.codec)
        piece = values[part.segment][part.start : part.stop]
        if self.residuals is None:
            raw, body = pack(codec, piece)
        else:
            kept = self.residuals[part.segment][part.start : part.stop]
            piece = piece + kept
            raw, body = pack(codec, piece)
            kept[:] = difference(piece, self._values(part, raw, body))
        return Word(Kind.PART, self.group.number, index, self.weight, raw, None, body)

    def _values(self, part: Part, raw: bool, body: Any) -> Values:
        codec, segment = self.vector.codec(part.segment, self.codec), self.vector.segments[part.segment]
        return unpack(codec, body, raw=raw, dtype=segment.wide, count=part.stop - part.start)

    def send_some(self, limit: int, now_s: float) -> None:
        """Put up to `limit` more parts into `out`; those for the own range are taken at once."""
        for _ in range(limit):
            item = next(self._unsent, None)
            if item is None:
                self.sent_all = True
                return
            if item[0] == self.rank:
                self.handle(self.rank, item[1], now_s)
            elif item[0] not in self.failed:
                self.out.append(item)
                self._heard[item[0]] = max(self._heard[item[0]], now_s)

    # ---------------------------------------------------------------------------------------------- receiving
    def handle(self, source: int, word: Word, now_s: float) -> None:
        """Take a PART, DELTA or ABSENT of this group."""
        if source not in self._heard:
            self.counts["strangers"] += 1
        elif word.kind is Kind.ABSENT:
            self.lost(source, now_s)
        elif word.kind is Kind.PART:
            self._part(source, word, now_s)
        elif word.kind is Kind.DELTA:
            self._delta(source, word, now_s)

    def _part(self, source: int, word: Word, now_s: float) -> None:
        parts = self.reducer.parts
        try:
            known = 0 <= word.part < len(parts) and word.value >= 0 and math.isfinite(word.value)
            values = self._values(parts[word.part], word.raw, word.body) if known else None
        except ValueError:
            values = None
        if values is None or not self.reducer.take(source, word.part, values, word.value):
            self.counts["refused parts"] += 1
            return
        self._heard[source] = now_s
        self._reduce()

    def _reduce(self) -> None:
        for index, deltas in self.reducer.ready():
            part = self.reducer.parts[index]
            codec = self.vector.codec(part.segment, self.codec)
            for sender, delta in deltas.items():
                if sender == self.rank:
                    self._accept(self.rank, part, delta)
                else:
                    raw, body = pack(codec, delta)
                    self.out.append(
                        (sender, Word(Kind.DELTA, self.group.number, index, 0.0, raw, None, body))
                    )

    def _delta(self, source: int, word: Word, now_s: float) -> None:
        owed = self.owed.get(source)
        if not owed or source in self.failed or word.part != len(self.parts[source]) - len(owed):
            self.counts["refused deltas"] += 1
            return
        try:
            delta = self._values(owed[0], word.raw, word.body)
        except ValueError:
            self.counts["refused deltas"] += 1
            return
        self._heard[source] = now_s
        self._accept(source, owed[0], delta)

    def _accept(self, reducer: int, part: Part, delta: Values) -> None:
        self.deltas[part.segment][part.start : part.stop] = delta
        self.owed[reducer].popleft()

    # ----------------------------------------------------------------------------------------------- failures
    def lost(self, rank: int, now_s: float) -> None:
        """Note that a member takes no part any more: it is banned as a sender and has failed as a reducer."""
        self._ban(rank)
        self._fail(rank)

    def _ban(self, rank: int) -> None:
        if rank in self.reducer.live:
            self.reducer.live.discard(rank)
            self.counts["banned"] += not self.reducer.finished
            self._reduce()

    def _fail(self, rank: int) -> None:
        if rank not in self.failed and self.owed.get(rank):
            self.counts["failed reducers"] += 1
            self.failed.add(rank)

    def _late(self) -> Iterator[tuple[float, bool, int]]:
        """Yield (due, whether as sender, rank) for each member that is awaited."""
        limits, end_s = self.limits, self.began_s + self.limits.allreduce_timeout_s
        for rank in self.reducer.live if not self.reducer.finished else ():
            if self.reducer.progress[rank] <= self.reducer.done and rank != self.rank:
                yield min(self._heard[rank] + limits.sender_timeout_s, end_s), True, rank
        for rank, owed in self.owed.items():
            if owed and rank not in self.failed and rank != self.rank:
                yield min(self._heard[rank] + limits.reducer_timeout_s, end_s), False, rank

    def tick(self, now_s: float) -> None:
        """Ban and give up whom the time-outs say."""
        for due_s, as_sender, rank in list(self._late()):
            if due_s <= now_s:
                (self._ban if as_sender else self._fail)(rank)

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        return min((due_s for due_s, _, _ in self._late()), default=math.inf)

    # ---------------------------------------------------------------------------------------------- the result
    @property
    def finished(self) -> bool:
        """Whether this member has all it can get and has given all it owes."""
        settled = all(not owed or rank in self.failed for rank, owed in self.owed.items())
        return self.sent_all and settled and self.reducer.finished

    @property
    def received(self) -> float:
        """The share of the own parts that came back averaged; 1 for an auxiliary."""
        left = sum(map(len, self.owed.values()))
        return 1.0 - left / self._total if self._total else float(not self.sends)
