"""Which ranks may form a group: keys, rules that need no protocol, and the directory of declarations.

A key is `prefix.0b` and a string of bits; peers with equal keys may form a group, and bits change so that members
scatter next time (Moshpit). A static rule is any object with `members(rank, size, round)`, which returns the sorted
ranks of the group, `rank` included; each partitions the ranks in every round, the same on every rank.

The directory is sharded over the ranks: each key has replicas on two of them. A declaration names its rank, its place
(earlier places lead) and a value, and expires by itself. It is driven by messages and the time it is told.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.policies.exchange.messages import Kind, Message, Outgoing
from spawnsim.random import generator

REPLICAS = 2  # ranks that hold each key: one may die, compute or sleep


def digest(text: str) -> int:
    """Return a 63-bit number for a text, the same on every rank."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def check_bits(bits: str) -> str:
    """Return the bits, or raise `ParameterError`."""
    if set(bits) - {"0", "1"}:
        raise ParameterError(f"group bits {bits!r}: give a string of 0 and 1, such as '0110', or ''")
    return bits


def group_key(prefix: str, bits: str) -> str:
    """Return the key under which peers with these bits look for each other.

    >>> group_key("run", "01")
    'run.0b01'
    """
    return f"{prefix}.0b{bits}"


def replicas(key: str, size: int, suspects: Collection[int] = ()) -> list[int]:
    """Return the ranks of a communicator of `size` that keep a key: the first of its order that are no suspects.

    Every key has an order of all ranks, drawn from its digest and the same on every rank. If all are suspects, the
    first of them are asked all the same: suspicion is a guess, and a directory that is not asked finds nothing.
    """
    order = (
        np.random.Generator(np.random.PCG64(digest(key))).permutation(size)
        if size < 64
        else _probed(key, size)
    )
    ranks = [int(rank) for rank in order]
    trusted = [rank for rank in ranks if rank not in suspects]
    return (trusted or ranks)[:REPLICAS]


def _probed(key: str, size: int, count: int = 32) -> list[int]:
    """Return the first ranks of a long order: enough for `REPLICAS` even if many are suspects."""
    draws = np.random.Generator(np.random.PCG64(digest(key))).integers(0, size, count).tolist()
    return list(dict.fromkeys(draws))


def next_bits(bits: str, group: int, *, index: int, group_size: int, target: int | None) -> str:
    """Return a member's bits after its group has formed, so that its members scatter next time (Moshpit).

    All members draw the same distinct buckets from the group's number, one each; the bucket's bits are appended and
    the oldest fall out. There are `target` buckets, rounded up to a power of two (by default the group's size, so).
    Source: Ryabinin et al., "Moshpit SGD" (2021), section 3.
    """
    if not bits:
        return ""
    count = max(int(target or group_size), group_size, 2)
    width = (count - 1).bit_length()
    stream = np.random.Generator(np.random.PCG64(group))
    bucket = int(stream.permutation(count)[index])
    return (bits + format(bucket, f"0{width}b"))[-len(bits) :]


class Matchmaking(Protocol):
    """A static rule: which ranks average with each other in a round."""

    def members(self, rank: int, size: int, round_: int) -> tuple[int, ...]:
        """Return the sorted ranks of this rank's group, itself included."""


def _check_group_size(size: int) -> None:
    if int(size) != size or size < 2:
        raise ParameterError(f"group size {size!r}: give a whole number of at least 2")


@dataclass(frozen=True, slots=True)
class Everyone:
    """All ranks, in every round."""

    def members(self, rank: int, size: int, round_: int) -> tuple[int, ...]:
        return tuple(range(size))


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranks are coordinates; round t averages along axis t mod d. N = M₁·…·M_d ranks agree exactly after d rounds.

    `shape` names the sides; None takes the most nearly square pair. Where the ranks do not fill the grid, its last
    lines are short.
    """

    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.shape is not None and (not self.shape or min(self.shape) < 1):
            raise ParameterError(f"shape={self.shape!r}: give at least one side, each of at least 1")

    def sides(self, size: int) -> tuple[int, ...]:
        """Return the sides for so many ranks."""
        if self.shape is None:
            side = math.isqrt(size - 1) + 1 if size > 1 else 1
            return (-(-size // side), side)
        if math.prod(self.shape) < size:
            raise ParameterError(
                f"a grid of {self.shape} has {math.prod(self.shape)} places for {size} ranks"
            )
        return self.shape

    def members(self, rank: int, size: int, round_: int) -> tuple[int, ...]:
        sides = self.sides(size)
        axis = len(sides) - 1 - round_ % len(sides)
        stride = math.prod(sides[axis + 1 :])
        first = rank - (rank // stride % sides[axis]) * stride
        line = range(first, first + stride * sides[axis], stride)
        return tuple(member for member in line if member < size)


@dataclass(frozen=True, slots=True)
class RandomGroups:
    """Fresh random groups of `size` in each round; the ranks left over form a smaller one.

    Variance contracts by (N/M − 1)/(N − 1) a round in expectation.
    """

    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check_group_size(self.size)

    def members(self, rank: int, size: int, round_: int) -> tuple[int, ...]:
        order = generator(self.seed, -1, f"groups.{round_}.{size}").permutation(size)
        place = int(np.flatnonzero(order == rank)[0]) // self.size * self.size
        return tuple(sorted(int(member) for member in order[place : place + self.size]))


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs by distance: round t pairs the ranks of the lower half with those of the upper, shifted by t.

    With an odd number of ranks another one sits out each round.
    """

    def members(self, rank: int, size: int, round_: int) -> tuple[int, ...]:
        skipped = round_ % size if size % 2 else None
        if rank == skipped or size < 2:
            return (rank,)
        half = size // 2
        place = rank - (skipped is not None and rank > skipped)
        other = (place + round_) % half + half if place < half else (place - half - round_) % half
        peer = other + (skipped is not None and other >= skipped)
        return tuple(sorted((rank, peer)))


@dataclass(frozen=True, slots=True)
class Exponential:
    """Round t pairs ranks whose numbers differ in bit t mod k. N = 2ᵏ ranks agree exactly after k rounds.

    Ranks without a partner (N no power of two) sit out.
    """

    def members(self, rank: int, size: int, round_: int) -> tuple[int, ...]:
        bits = max((size - 1).bit_length(), 1)
        peer = rank ^ (1 << round_ % bits)
        return tuple(sorted((rank, peer))) if peer < size else (rank,)


LISTED_AT_MOST = 64  # entries in one answer: the earliest places
SUSPECTED_TIMEOUTS = 8.0  # a replica that did not answer is not asked for so many request time-outs


class Entry(NamedTuple):
    """One rank's declaration under a key: earlier places lead; it holds until `until_s`."""

    rank: int
    place: float
    until_s: float
    value: Any = None


# Declarations expire, and are renewed several times before they do. So the directory needs no repair and no agreement:
# with a rank that dies only copies are lost, the next renewal goes to other replicas, and an entry of a dead rank goes
# by itself. Answers may be stale or incomplete; the search then asks a rank in vain, which costs one request.
class DirectoryShard:
    """The declarations that this rank keeps."""

    def __init__(self) -> None:
        self._keys: dict[str, dict[int, Entry]] = {}

    def handle(self, source: int, message: Message, now_s: float) -> list[Outgoing]:
        """Take a DECLARE; return the answer if one is wanted (`part`), and news for ranks that declared before.

        The news is an entry with the earliest place of all: they should ask its rank, and cannot know of it yet.
        """
        key, declared = message.meta
        kept = self._keys.setdefault(key, {})
        out: list[Outgoing] = []
        if declared:
            entry = Entry(*declared)
            others = self.find(key, now_s)
            first = (entry.place, entry.rank)
            if others and first < (others[0].place, others[0].rank) and source not in kept:
                news = Message(Kind.LISTED, message.number, meta=(key, [tuple(entry)]))
                out = [(other.rank, news) for other in others]
            self._keys.setdefault(key, kept)[source] = entry
        elif declared is False:  # withdrawn; None only asks
            kept.pop(source, None)
        if message.part:
            entries = [tuple(each) for each in self.find(key, now_s)]
            out.append((source, Message(Kind.LISTED, message.number, meta=(key, entries))))
        return out

    def find(self, key: str, now_s: float) -> list[Entry]:
        """Return the earliest entries of a key that have not run out; forget those that have."""
        kept = self._keys.get(key, {})
        for rank in [rank for rank, entry in kept.items() if entry.until_s <= now_s]:
            del kept[rank]
        if not kept:
            self._keys.pop(key, None)
        return sorted(kept.values(), key=lambda entry: (entry.place, entry.rank))[:LISTED_AT_MOST]

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))


class DirectoryClient:
    """Declares under keys and collects answers. One question at a time for each key."""

    def __init__(self, rank: int, size: int, request_timeout_s: float) -> None:
        self.rank, self.size, self.request_timeout_s = rank, size, request_timeout_s
        self.counts: Counter[str] = Counter()
        self.suspects: dict[int, float] = {}  # rank → until when it is left out
        self.entries: dict[str, dict[int, Entry]] = {}
        self._asked: dict[tuple[str, int], float] = {}  # (key, replica) → when it must have answered
        self._told: dict[str, list[int]] = {}  # key → replicas that have a declaration of this rank

    def ask(self, key: str, now_s: float, declaration: Entry | None = None) -> list[Outgoing]:
        """Declare under a key (or only ask) and ask for all entries; return the messages to send."""
        ranks = self.replicas(key, now_s)
        for replica in ranks:
            self._asked.setdefault((key, replica), now_s + self.request_timeout_s)
        if declaration is not None:
            self._told[key] = ranks
        plain = None if declaration is None else tuple(declaration)
        return [(replica, Message(Kind.DECLARE, 0, part=1, meta=(key, plain))) for replica in ranks]

    def renew(self, key: str, declaration: Entry) -> list[Outgoing]:
        """Return the messages that tell the replicas of a declaration that it has changed; they do not answer."""
        return [
            (replica, Message(Kind.DECLARE, 0, meta=(key, tuple(declaration))))
            for replica in self._told.get(key, [])
        ]

    def take_back(self, key: str) -> list[Outgoing]:
        """Return the messages that withdraw this rank's declaration."""
        self.entries.pop(key, None)
        for pair in [pair for pair in self._asked if pair[0] == key]:
            del self._asked[pair]
        return [(replica, Message(Kind.DECLARE, 0, meta=(key, False))) for replica in self._told.pop(key, [])]

    def handle(self, source: int, message: Message) -> str | None:
        """Take a LISTED; return its key if it was asked for, or is of use."""
        key, entries = message.meta
        self.suspects.pop(source, None)
        if self._asked.pop((key, source), None) is None and key not in self._told:
            self.counts["late"] += 1
            return None
        self.entries.setdefault(key, {}).update(
            (entry.rank, entry) for entry in (Entry(*each) for each in entries)
        )
        return str(key)

    def answered(self, key: str) -> bool:
        """Whether all replicas of a key have answered."""
        return not any(asked == key for asked, _ in self._asked)

    def known(self, key: str, now_s: float) -> list[Entry]:
        """Return all entries heard of that have not run out, without this rank's own, earliest first."""
        entries = [e for e in self.entries.get(key, {}).values() if e.until_s > now_s and e.rank != self.rank]
        return sorted(entries, key=lambda entry: (entry.place, entry.rank))

    def tick(self, now_s: float) -> set[str]:
        """Suspect the replicas that are late; return the keys whose replicas have changed by that."""
        late = [pair for pair, due_s in self._asked.items() if due_s <= now_s]
        for pair in late:
            del self._asked[pair]
            self.suspect(pair[1], now_s)
        return {key for key, _ in late}

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        return min(self._asked.values(), default=float("inf"))

    def replicas(self, key: str, now_s: float) -> list[int]:
        """Return the ranks that keep a key, without those that have been silent lately."""
        return replicas(key, self.size, self._distrusted(now_s))

    def suspect(self, rank: int, now_s: float) -> None:
        """Do not ask a replica for a while: it did not answer."""
        self.counts["silent replicas"] += 1
        self.suspects[rank] = now_s + SUSPECTED_TIMEOUTS * self.request_timeout_s

    def _distrusted(self, now_s: float) -> set[int]:
        self.suspects = {rank: until_s for rank, until_s in self.suspects.items() if until_s > now_s}
        return set(self.suspects)


class DirectoryQuery:
    """One question to the replicas of a key: what is declared now. Their answers name its number."""

    def __init__(self, directory: DirectoryClient, key: str, number: int, now_s: float) -> None:
        self.directory, self.key, self.number = directory, key, number
        self.due_s = now_s + directory.request_timeout_s
        self.awaited = set(directory.replicas(key, now_s))
        self.heard = False  # whether any replica has answered
        self._entries: dict[int, Entry] = {}

    def messages(self) -> list[Outgoing]:
        """Return the messages that ask."""
        return [
            (replica, Message(Kind.DECLARE, self.number, part=1, meta=(self.key, None)))
            for replica in sorted(self.awaited)
        ]

    def handle(self, source: int, message: Message) -> None:
        """Take a LISTED; of two declarations of one rank the later one holds."""
        if message.number != self.number or source not in self.awaited:
            return
        self.awaited.discard(source)
        self.directory.suspects.pop(source, None)
        self.heard = True
        for entry in (Entry(*each) for each in message.meta[1]):
            known = self._entries.get(entry.rank)
            if known is None or known.until_s < entry.until_s:
                self._entries[entry.rank] = entry

    def over(self, now_s: float) -> bool:
        """Whether all have answered; those that have not in time are suspected."""
        if self.awaited and now_s >= self.due_s:
            for replica in sorted(self.awaited):
                self.directory.suspect(replica, now_s)
            self.awaited.clear()
        return not self.awaited

    def entries(self, now_s: float) -> list[Entry]:
        """Return what was declared by others and has not run out."""
        return [
            entry
            for rank, entry in sorted(self._entries.items())
            if entry.until_s > now_s and rank != self.directory.rank
        ]
