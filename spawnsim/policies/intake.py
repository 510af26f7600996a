"""What a replaced rank waits for: the snapshots of its donors.

A state machine driven by messages and the time it is told; it knows no communicator and no model. One assignment at
a time: while one is open, others are refused and counted. It ends when all donors have given, or when the deadline
has passed, with those that have given whole snapshots; late parts and duplicates are counted and dropped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from spawnsim.policies.deadlines import Deadline
from spawnsim.policies.messages import Assignment, Message


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an assignment ended: the parts of each donor that gave a whole snapshot, in order of donor rank."""

    assignment: Assignment
    given: dict[int, list[Message]]
    wait_s: float

    @property
    def nbytes(self) -> int:
        """Bytes that the donors have sent."""
        return sum(part.body.size for parts in self.given.values() for part in parts)

    @property
    def fresh_start(self) -> bool:
        """Whether the assignment named no donors: the rank is to start afresh."""
        return not self.assignment.donors


@dataclass(slots=True)
class _Pending:
    assignment: Assignment
    asked_s: float
    parts: dict[int, dict[int, Message]] = field(default_factory=dict)

    def whole(self) -> dict[int, list[Message]]:
        return {
            donor: [got[index] for index in sorted(got)]
            for donor in self.assignment.donors
            if (got := self.parts.get(donor)) and len(got) == next(iter(got.values())).parts
        }


class Intake:
    """Keeps the open assignment. `settled` is the last round that was finished or given up."""

    def __init__(self, deadline: Deadline, settled: int = -1) -> None:
        self.deadline, self.settled = deadline, settled
        self.counts: Counter[str] = Counter()
        self._pending: _Pending | None = None

    @property
    def waiting(self) -> bool:
        """Whether an assignment is open."""
        return self._pending is not None

    def assign(self, assignment: Assignment, now_s: float) -> bool:
        """Take an assignment; return whether its donors are to be asked."""
        if self._pending is not None or assignment.round <= self.settled:
            self.counts["refused"] += 1
            return False
        self._pending = _Pending(assignment, now_s)
        return True

    def part(self, donor: int, message: Message, now_s: float) -> None:
        """Take one part of a donor's snapshot."""
        pending = self._pending
        if (
            pending is None
            or message.round != pending.assignment.round
            or donor not in pending.assignment.donors
        ):
            self.counts["late"] += 1
            return
        got = pending.parts.setdefault(donor, {})
        if message.part in got:
            self.counts["duplicate"] += 1
            return
        if got and (first := next(iter(got.values()))).iteration != message.iteration:
            # answers to an asking that was repeated: parts of two snapshots never mix
            if message.iteration < first.iteration:
                self.counts["late"] += 1
                return
            got.clear()
        got[message.part] = message
        self.deadline.observe(now_s - pending.asked_s)

    def outcome(self, now_s: float) -> Outcome | None:
        """Return how the open assignment ended, or None while it has not; after that nothing is open."""
        pending = self._pending
        if pending is None:
            return None
        given = pending.whole()
        asked = len(pending.assignment.donors)
        missing, wait_s = asked - len(given), now_s - pending.asked_s
        if missing and wait_s < self.deadline.limit_s(len(given) / asked):
            return None
        self.counts["missing"] += missing
        return self._end(Outcome(pending.assignment, given, wait_s))

    def give_up(self) -> None:
        """Close the open assignment without result."""
        if self._pending is not None:
            self.counts["given up"] += 1
            self._end(Outcome(self._pending.assignment, {}, 0.0))

    def _end(self, outcome: Outcome) -> Outcome:
        self.settled, self._pending = outcome.assignment.round, None
        return outcome
