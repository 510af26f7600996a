"""The directory of declarations, sharded over the ranks: the keeper's side and the asker's side.

Driven by words and the time they are told; they know no communicator. Each key is kept by two ranks (`keys.keepers`).
A declaration names its rank, its place (earlier places lead) and a value, and runs out by itself: a keeper that dies
takes only copies, and the next renewal goes to the keepers that are left.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from spawnsim.policies.groups.keys import keepers
from spawnsim.policies.groups.words import Kind, Outgoing, Word

LISTED_AT_MOST = 64  # entries in one answer: the earliest places
SUSPICION = 8.0  # a keeper that did not answer is left out for so many request time-outs


class Entry(NamedTuple):  # as all that is pickled often: four times as fast as a frozen dataclass
    """One rank's declaration under a key: earlier places lead; it holds until `until_s`."""

    rank: int
    place: float
    until_s: float
    value: Any = None


class Shard:
    """The declarations that this rank keeps."""

    def __init__(self) -> None:
        self._keys: dict[str, dict[int, Entry]] = {}

    def handle(self, source: int, word: Word, now_s: float) -> list[Outgoing]:
        """Take a DECLARE; return the answer if one is wanted (`part`), and news for those who declared before.

        The news is an entry before all others: they should ask it, and they cannot have heard of it.
        """
        key, entry = word.meta
        kept = self._keys.setdefault(key, {})
        out: list[Outgoing] = []
        if isinstance(entry, Entry):
            others = self.find(key, now_s)
            first = (entry.place, entry.rank)
            if others and first < (others[0].place, others[0].rank) and source not in kept:
                news = Word(Kind.LISTED, word.number, meta=(key, [entry]))
                out = [(other.rank, news) for other in others]
            self._keys.setdefault(key, kept)[source] = entry
        elif entry is False:  # taken back; None only asks
            kept.pop(source, None)
        if word.part:
            out.append((source, Word(Kind.LISTED, word.number, meta=(key, self.find(key, now_s)))))
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


class Asker:
    """Declares under keys and collects answers. One question at a time for each key."""

    def __init__(self, rank: int, size: int, request_timeout_s: float) -> None:
        self.rank, self.size, self.request_timeout_s = rank, size, request_timeout_s
        self.counts: Counter[str] = Counter()
        self.suspects: dict[int, float] = {}  # rank → until when it is left out
        self.entries: dict[str, dict[int, Entry]] = {}
        self._asked: dict[tuple[str, int], float] = {}  # (key, keeper) → when it must have answered
        self._told: dict[str, list[int]] = {}  # key → keepers that have a declaration of this rank

    def ask(self, key: str, now_s: float, declaration: Entry | None = None) -> list[Outgoing]:
        """Declare under a key (or only ask) and ask for all entries; return the words to send."""
        ranks = self.keepers(key, now_s)
        for keeper in ranks:
            self._asked.setdefault((key, keeper), now_s + self.request_timeout_s)
        if declaration is not None:
            self._told[key] = ranks
        return [(keeper, Word(Kind.DECLARE, 0, 1, meta=(key, declaration))) for keeper in ranks]

    def renew(self, key: str, declaration: Entry) -> list[Outgoing]:
        """Return the words that tell the keepers of a declaration that it has changed; they do not answer."""
        return [
            (keeper, Word(Kind.DECLARE, 0, 0, meta=(key, declaration))) for keeper in self._told.get(key, [])
        ]

    def take_back(self, key: str) -> list[Outgoing]:
        """Return the words that withdraw this rank's declaration."""
        self.entries.pop(key, None)
        for pair in [pair for pair in self._asked if pair[0] == key]:
            del self._asked[pair]
        return [(keeper, Word(Kind.DECLARE, 0, 0, meta=(key, False))) for keeper in self._told.pop(key, [])]

    def handle(self, source: int, word: Word) -> str | None:
        """Take a LISTED; return its key if it was asked for, or is of use."""
        key, entries = word.meta
        self.suspects.pop(source, None)
        if self._asked.pop((key, source), None) is None and key not in self._told:
            self.counts["late"] += 1
            return None
        self.entries.setdefault(key, {}).update((entry.rank, entry) for entry in entries)
        return str(key)

    def answered(self, key: str) -> bool:
        """Whether no keeper of a key owes an answer."""
        return not any(asked == key for asked, _ in self._asked)

    def known(self, key: str, now_s: float) -> list[Entry]:
        """Return all entries heard of that have not run out, without this rank's own, earliest first."""
        entries = [e for e in self.entries.get(key, {}).values() if e.until_s > now_s and e.rank != self.rank]
        return sorted(entries, key=lambda entry: (entry.place, entry.rank))

    def tick(self, now_s: float) -> set[str]:
        """Suspect the keepers that are late; return the keys whose keepers have changed thereby."""
        late = [pair for pair, due_s in self._asked.items() if due_s <= now_s]
        for pair in late:
            del self._asked[pair]
            self.suspect(pair[1], now_s)
        return {key for key, _ in late}

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        return min(self._asked.values(), default=float("inf"))

    def keepers(self, key: str, now_s: float) -> list[int]:
        """Return the ranks that keep a key, without those that have been silent lately."""
        return keepers(key, self.size, self._distrusted(now_s))

    def suspect(self, rank: int, now_s: float) -> None:
        """Leave a keeper out for a while: it did not answer."""
        self.counts["silent keepers"] += 1
        self.suspects[rank] = now_s + SUSPICION * self.request_timeout_s

    def _distrusted(self, now_s: float) -> set[int]:
        self.suspects = {rank: until_s for rank, until_s in self.suspects.items() if until_s > now_s}
        return set(self.suspects)


class Question:
    """One question to the keepers of a key: what is declared now. Their answers name its number."""

    def __init__(self, asker: Asker, key: str, number: int, now_s: float) -> None:
        self.asker, self.key, self.number = asker, key, number
        self.due_s = now_s + asker.request_timeout_s
        self.awaited = set(asker.keepers(key, now_s))
        self.heard = False  # whether any keeper has answered
        self._entries: dict[int, Entry] = {}

    def words(self) -> list[Outgoing]:
        """Return the words that ask."""
        return [
            (keeper, Word(Kind.DECLARE, self.number, 1, meta=(self.key, None)))
            for keeper in sorted(self.awaited)
        ]

    def handle(self, source: int, word: Word) -> None:
        """Take a LISTED; of two declarations of one rank the later one holds."""
        if word.number != self.number or source not in self.awaited:
            return
        self.awaited.discard(source)
        self.asker.suspects.pop(source, None)
        self.heard = True
        for entry in word.meta[1]:
            known = self._entries.get(entry.rank)
            if known is None or known.until_s < entry.until_s:
                self._entries[entry.rank] = entry

    def over(self, now_s: float) -> bool:
        """Whether all have answered; those that have not in time are suspected."""
        if self.awaited and now_s >= self.due_s:
            for keeper in sorted(self.awaited):
                self.asker.suspect(keeper, now_s)
            self.awaited.clear()
        return not self.awaited

    def entries(self, now_s: float) -> list[Entry]:
        """Return what was declared by others and has not run out."""
        return [
            entry
            for rank, entry in sorted(self._entries.items())
            if entry.until_s > now_s and rank != self.asker.rank
        ]
