"""Averaging over all by the clock: one rank's side, a state machine driven by words and time.

A coordinator keeps who averages and opens a round when the interval is over: means rise through a tree of the
members, and the mean of all comes down it. Each member adds (mean − what it had sent), so that steps taken meanwhile
survive. To leave is negotiated: the coordinator answers with the last round that counts on the leaver, who sees that
one through; later rounds do not count on it. A branch that is silent is left out after a while. This room knows flat
arrays and no communicator.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from spawnsim.policies.groups.parts import Values, Vector, average, difference
from spawnsim.policies.groups.peers import tree
from spawnsim.policies.groups.swaps import Pace, as_body, from_body
from spawnsim.policies.groups.words import Kind, Outgoing, Word

FANOUT = 4


@dataclass(slots=True)
class _Branch:
    """This rank's place in the round under way."""

    number: int
    members: tuple[int, ...]
    parent: int | None
    awaited: set[int]
    children: tuple[int, ...]
    until_s: float
    sent: list[Values]
    means: dict[int, tuple[list[Values], float]] = field(default_factory=dict)
    risen: bool = False


class Tide:
    """One rank's part in the mode "all"; on the coordinator, the coordinator's as well."""

    def __init__(self, ranks: tuple[int, int], pace: Pace, coordinator: int = 0) -> None:
        (self.rank, self.size), self.pace, self.coordinator = ranks, pace, coordinator
        self.out: deque[Outgoing] = deque()
        self.counts: Counter[str] = Counter()
        self.rounds = 0
        self.active = False
        self._branch: _Branch | None = None
        self._joined_s = math.inf
        self._last_round: int | None = (
            None  # the last one that counts on this rank, once the coordinator has said so
        )
        self._leaving = False
        self._present: set[int] = set()
        self._open: tuple[int, float] | None = None  # round under way, when it is given up
        self._due_s = -math.inf
        self._number = 0

    # ------------------------------------------------------------------------------------------- coming, going
    def set_active(self, active: bool, now_s: float) -> None:
        """Take part from now on, or negotiate to leave."""
        self.active, self._leaving, self._last_round = active, not active, None
        self.out.append((self.coordinator, Word(Kind.PRESENT, 0, int(active), meta=self.rank)))

    @property
    def settled(self) -> bool:
        """Whether no round counts on this rank any more (after it has left)."""
        if not self._leaving:
            return True
        return self._last_round is not None and self._last_round <= self.rounds and self._branch is None

    def forget(self) -> None:
        """Take part in nothing that is under way."""
        self._branch, self._leaving = None, False

    def leave(self) -> None:
        """Hand the coordinator's work over, if it is this rank's."""
        self._present.discard(self.rank)
        if self.rank == self.coordinator and self._present:
            heir, self._due_s = min(self._present), math.inf
            members = tuple(sorted(self._present))
            self.out.extend(
                (member, Word(Kind.HANDOVER, self._number, heir, meta=members)) for member in members
            )
            self._present.clear()

    # --------------------------------------------------------------------------------------------- coordinating
    def _coordinate(self, now_s: float) -> None:
        if self._open is not None and now_s >= self._open[1]:
            self.counts["rounds given up"] += 1
            self._close(now_s)
        if self._open is None and now_s >= self._due_s and len(self._present) > 1:
            self._number += 1
            members = tuple(sorted(self._present))
            self._open = (self._number, now_s + 2 * self.pace.patience_s)
            self.out.append((members[0], Word(Kind.OPEN, self._number, meta=members)))

    def _close(self, now_s: float) -> None:
        self._open, self._due_s = None, now_s + self.pace.interval_s

    def _presence(self, word: Word, now_s: float) -> None:
        if self.rank != self.coordinator:
            self.out.append((self.coordinator, word))  # the work was handed over
            return
        source = int(word.meta)
        if self._due_s == -math.inf:
            self._due_s = now_s + self.pace.interval_s
        if word.part:
            self._present.add(source)
        else:
            self._present.discard(source)
            self.out.append((source, Word(Kind.SETTLED, 0, self._number if self._open else 0)))

    # ------------------------------------------------------------------------------------------------- a round
    def _opened(self, word: Word, now_s: float, vector: Vector) -> None:
        members = word.meta
        if self._branch is not None or word.number <= self.rounds or self.rank not in members:
            self.counts["late"] += 1
            return
        if not self.active and not self._leaving:
            return  # it left without waiting for the negotiation: its branch is left out
        parent, children = tree(members, self.rank, FANOUT)
        height = _height(len(members), members.index(self.rank))
        share = height / max(_height(len(members), 0), 1)
        until_s = now_s + self.pace.patience_s * share
        sent = vector.read()
        self._branch = _Branch(word.number, members, parent, set(children), children, until_s, sent)
        for child in children:
            self.out.append((child, Word(Kind.OPEN, word.number, meta=members)))
        self._rise(now_s, vector)

    def _rise(self, now_s: float, vector: Vector) -> bool:
        """Pass the branch's mean on once all (or all but the silent) children have given theirs."""
        branch = self._branch
        if branch is None or branch.risen or (branch.awaited and now_s < branch.until_s):
            return False
        self.counts["silent branches"] += len(branch.awaited)
        branch.risen = True
        given = [
            (branch.sent, 1.0),
            *(branch.means[child] for child in branch.children if child in branch.means),
        ]
        weights = [weight for _, weight in given]
        means = [
            average([values[index] for values, _ in given], weights)[0] for index in range(len(branch.sent))
        ]
        if branch.parent is None:
            return self._fall(means, sum(weights), vector)
        up = Word(Kind.UP, branch.number, value=sum(weights), body=as_body(means))
        self.out.append((branch.parent, up))
        branch.until_s = now_s + 2 * self.pace.patience_s
        return False

    def _fall(self, means: list[Values], weight: float, vector: Vector) -> bool:
        """Take the mean of all, and pass it on."""
        branch = self._branch
        assert branch is not None
        down = Word(Kind.DOWN, branch.number, value=weight, body=as_body(means))
        self.out.extend((child, down) for child in branch.children)
        if branch.parent is None:
            self.out.append((self.coordinator, Word(Kind.CLOSED, branch.number)))
        vector.add([difference(mean, own) for mean, own in zip(means, branch.sent, strict=True)])
        self.rounds, self._branch = branch.number, None
        self.counts["exchanges"] += 1
        return True

    def handle(self, source: int, word: Word, now_s: float, vector: Vector) -> bool:
        """Take a word; return whether the weights have changed."""
        branch = self._branch if self._branch is not None and self._branch.number == word.number else None
        if word.kind is Kind.PRESENT:
            self._presence(word, now_s)
        elif word.kind is Kind.SETTLED:
            self._last_round = word.part
        elif word.kind is Kind.OPEN:
            self._opened(word, now_s, vector)
        elif word.kind is Kind.CLOSED:
            if self._open is not None and self._open[0] == word.number:
                self._close(now_s)
        elif word.kind is Kind.HANDOVER:
            self._inherit(word, now_s)
        elif branch is None or (values := from_body(word.body, vector)) is None:
            self.counts["late"] += 1
        elif word.kind is Kind.UP and source in branch.awaited and not branch.risen:
            branch.awaited.discard(source)
            branch.means[source] = (values, word.value)
            return self._rise(now_s, vector)
        elif word.kind is Kind.DOWN and source == branch.parent:
            return self._fall(values, word.value, vector)
        return False

    def _inherit(self, word: Word, now_s: float) -> None:
        self.coordinator = word.part
        if self.rank == self.coordinator:
            self._present.update(word.meta)
            self._number = max(self._number, word.number)
            self._open, self._due_s = None, now_s + self.pace.interval_s
        if self._leaving:
            self.out.append((self.coordinator, Word(Kind.PRESENT, 0, 0, meta=self.rank)))

    # --------------------------------------------------------------------------------------------------- time
    def tick(self, now_s: float, vector: Vector) -> bool:
        """Do what is due; return whether the weights have changed."""
        if self.rank == self.coordinator:
            self._coordinate(now_s)
        branch = self._branch
        if branch is not None and now_s >= branch.until_s:
            if branch.risen:
                self.counts["rounds without answer"] += 1
                self.rounds, self._branch = branch.number, None
            else:
                return self._rise(now_s, vector)
        return False

    def lost(self, rank: int) -> None:
        """Note that a rank is dead."""
        self._present.discard(rank)
        if self._branch is not None:
            self._branch.awaited.discard(rank)
        if rank == self.coordinator:  # everyone settles on the next one; who averages tells it again
            self.coordinator = (rank + 1) % self.size
            self.out.append((self.coordinator, Word(Kind.PRESENT, 0, int(self.active), meta=self.rank)))

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        times = [self._branch.until_s] if self._branch is not None else []
        if self.rank == self.coordinator:
            idle_s = self._due_s if len(self._present) > 1 else math.inf
            times.append(self._open[1] if self._open is not None else idle_s)
        return min((time_s for time_s in times if time_s != -math.inf), default=math.inf)


def _height(count: int, place: int) -> int:
    """Return how many levels lie below a place of a tree of `count` members."""
    height, first = 0, place * FANOUT + 1
    while first < count:
        height, first = height + 1, first * FANOUT + 1
    return height
