"""One rank's place in one round of averaging over a tree of ranks.

Means rise from the leaves to the root, weighted by how many ranks are in them; the mean of all comes down to those who
gave something. This module knows flat arrays and words; who opens rounds, and what becomes of silent ranks, is the
business of `tree_average`.
"""

from __future__ import annotations

from collections.abc import Iterator

from spawnsim.policies.groups.parts import Values, Vector, average, difference
from spawnsim.policies.groups.peers import tree
from spawnsim.policies.groups.swaps import Pace, as_body
from spawnsim.policies.groups.words import Kind, Outgoing, Word

FANOUT = 4

Mean = tuple[list[Values], float]  # each segment's, and how many ranks are in it


class TreeRound:
    """What one rank holds of a round. `word` is the OPEN that told it; its `meta` lists the members, the root first."""

    def __init__(self, word: Word, rank: int, pace: Pace, began_s: float, sent: list[Values]) -> None:
        self.word, self.number, self.pace, self.sent = word, word.number, pace, sent
        members: tuple[int, ...] = tuple(word.meta)
        self.parent, self.children = tree(members, rank, FANOUT)
        self.awaited, self.silent = set(self.children), set[int]()
        # Whoever is nearer to the leaves gives a silent rank up earlier: it is told upwards in time.
        self._levels, below = _height(len(members), 0), _height(len(members), members.index(rank))
        self.until_s = began_s + pace.patience_for(self._levels) * below / max(self._levels, 1)
        self.risen = False
        self.step_s = 0.0  # the longest that ranks below have told
        self._means: dict[int, Mean] = {}

    def opening(self) -> Iterator[Outgoing]:
        """Return the words that tell the children."""
        return ((child, self.word) for child in self.children)

    def give(self, child: int, word: Word, values: list[Values] | None) -> None:
        """Take what a child's branch has given; nothing, if it came damaged."""
        self.awaited.discard(child)
        silent, step_s = word.meta
        self.silent.update(silent)
        self.step_s = max(self.step_s, step_s)
        if values is not None:
            self._means[child] = (values, word.value)

    def is_ready(self, now_s: float) -> bool:
        """Whether the branch's mean can rise: all children (or all but the silent ones) have given theirs."""
        return not self.risen and (not self.awaited or now_s >= self.until_s)

    def rise(self, now_s: float) -> Mean:
        """Return the mean of the branch. From now on the mean of all is awaited."""
        self.risen, self.silent = True, self.silent | self.awaited
        self.until_s = now_s + 2 * self.pace.patience_for(self._levels)
        given = [(self.sent, 1.0), *(self._means[child] for child in self.children if child in self._means)]
        weights = [weight for _, weight in given]
        columns = zip(*(values for values, _ in given), strict=True)
        return [average(parts, weights)[0] for parts in columns], sum(weights)

    def rising(self, mean: Mean, own_step_s: float) -> Word:
        """Return the word that takes the branch's mean to the parent."""
        told = sorted(self.silent), max(self.step_s, own_step_s)
        return Word(Kind.UP, self.number, value=mean[1], meta=told, body=as_body(mean[0]))

    def falling(self, mean: Mean) -> Iterator[Outgoing]:
        """Return the words that take the mean of all to those children whose own is in it."""
        word = Word(Kind.DOWN, self.number, value=mean[1], body=as_body(mean[0]))
        return ((child, word) for child in self.children if child in self._means)

    def apply(self, mean: Mean, vector: Vector) -> None:
        """Move the weights by as much as the mean is away from what was sent."""
        vector.add([difference(there, here) for there, here in zip(mean[0], self.sent, strict=True)])


def _height(count: int, place: int) -> int:
    """Return how many levels lie below a place of a tree of `count` members."""
    height, first = 0, place * FANOUT + 1
    while first < count:
        height, first = height + 1, first * FANOUT + 1
    return height
