"""The parts that one member sends: to whom, how far ahead of their answers, and what has come back.

Pure: ranks and numbers; no communicator, no values. Each reducer gets its parts in order and answers in order, so an
answer that is passed over was lost. Only so many parts are under way at once: the rest of a large vector would keep
the sender's wire busy for minutes, and the answers that others wait for would queue behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

AHEAD = 32  # parts without an answer, over all reducers ...
AHEAD_EACH = 2  # ... but at least so many for each


class Sending:
    """The own parts. `counts`: how many each reducer gets; `order`: whose turn is next, the sender itself last."""

    def __init__(self, order: Sequence[int], counts: Mapping[int, int]) -> None:
        self.counts = {rank: counts[rank] for rank in order if counts[rank]}
        self.window = max(AHEAD // max(len(self.counts) - 1, 1), AHEAD_EACH)
        self.failed: set[int] = set()
        self._sent = dict.fromkeys(self.counts, 0)
        self._answered = dict.fromkeys(self.counts, 0)
        self._turn = deque(self.counts)  # those that have not got all their parts

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
        return self._sent[rank] - self._answered[rank] < self.window

    @property
    def can_send(self) -> bool:
        """Whether `next` has something to send."""
        return any(map(self._has_room, self._turn))

    def awaits(self, rank: int) -> bool:
        """Whether a reducer owes an answer."""
        return rank not in self.failed and self._answered.get(rank, 0) < self._sent.get(rank, 0)

    def answered(self, rank: int, index: int) -> bool:
        """Note the answer to a part (and that those before it are lost); false if none is expected."""
        if rank in self.failed or not self._answered.get(rank, 0) <= index < self.counts.get(rank, 0):
            return False
        self._answered[rank] = index + 1
        if self._sent[rank] <= index:  # it does not wait for the part: it has averaged without this sender
            self._sent[rank] = index + 1
            if self._sent[rank] == self.counts[rank]:
                self._turn.remove(rank)
        return True

    def answers(self, rank: int) -> int:
        """Return how many parts a reducer has answered."""
        return self._answered.get(rank, 0)

    def fail(self, rank: int) -> bool:
        """Give a reducer up; return whether anything was expected of it."""
        if rank in self.failed or self._answered.get(rank, 0) >= self.counts.get(rank, 0):
            return False
        self.failed.add(rank)
        if rank in self._turn:
            self._turn.remove(rank)
        return True

    @property
    def finished(self) -> bool:
        """Whether all parts were sent and answered, but for the failed reducers'."""
        return all(
            rank in self.failed or self._answered[rank] == count for rank, count in self.counts.items()
        )
