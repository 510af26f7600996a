"""State machines of the asynchronous protocol: the coordinator, a replaced rank's inbox, and their options.

They receive messages and the current time as arguments, and use neither communicator nor clock, so that tests can apply
losses, duplicates and any order of arrival directly. A round is the iteration whose metrics the coordinator compares.
It is decided when a quorum has reported or its deadline has passed, whichever comes first; deciding a round closes it
and all older ones. A report for a closed round is counted, and represents its rank in the next decision unless the rank
has reported for that decision's round: otherwise a rank that is more than a deadline behind (paused or slow) would be
too late for every round, and never be replaced or donate again. A replaced rank has one assignment at a time. It ends
when all donors have sent their snapshots, or at the deadline, with the donors whose snapshots are complete.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.policies.exchange.messages import Message
from spawnsim.policies.rules.cadence import Deadline, Fixed, as_deadline
from spawnsim.policies.rules.donors import Assignment, Decision, Rules, decide
from spawnsim.policies.rules.selection import Report

Quorum = int | float


def check_quorum(quorum: Quorum) -> Quorum:
    """Return the quorum, or raise `ParameterError`."""
    share = isinstance(quorum, float)
    # Booleans are integers in Python: quorum=True would mean one rank.
    if isinstance(quorum, bool) or quorum <= 0 or (share and quorum > 1):
        raise ParameterError(
            f"quorum={quorum!r}: give a share of the group in (0, 1] or a whole number of ranks"
        )
    return quorum


@dataclass(slots=True)
class _Round:
    opened_s: float
    reports: dict[int, Report] = field(default_factory=dict)


class Coordinator:
    """Collects reports round by round and decides.

    `counts` counts reports that were `late` (their round was closed) or `duplicate`, and rounds that reached their
    `deadline` without a quorum or fell into the `cooldown`.
    """

    def __init__(
        self, size: int, rules: Rules, rng: np.random.Generator, *, deadline: Deadline, quorum: Quorum = 1.0,
        cooldown: int = 0,
    ) -> None:  # fmt: skip
        self.size, self.rules, self.deadline = size, rules, deadline
        self.quorum, self.cooldown = check_quorum(quorum), cooldown
        self.counts: Counter[str] = Counter()
        self.closed = -1
        # The last two rounds in which ranks were replaced.
        self.last_trigger = self.trigger_before = -cooldown
        self._rng = rng
        self._open: dict[int, _Round] = {}
        self._late: dict[int, Report] = {}  # by rank, since the latest decision
        self._last_opened_s: float | None = None
        self._left: set[int] = set()
        self._assigned: dict[int, tuple[int, float]] = {}  # rank → (round, time at which it is given up)

    @property
    def waiting(self) -> bool:
        return bool(self._open)

    @property
    def assigned(self) -> dict[int, int]:
        """The rounds of replacements that are not known to be complete, by rank."""
        return {rank: round_ for rank, (round_, _) in self._assigned.items()}

    def report(self, round_: int, report: Report, now_s: float, settled: int = -1) -> None:
        """Record a rank's report; `settled` is the last round whose replacement it finished or gave up."""
        # A replaced rank announces in its next report that its replacement is complete. Until then it is busy: a second
        # replacement would judge weights that no longer exist. If that report is lost, `_busy` expires after four
        # deadlines.
        if settled >= self._assigned.get(report.rank, (math.inf, 0))[0]:
            del self._assigned[report.rank]
        # A new coordinator learns of earlier rounds from `settled`. A repeated round does not count: it was
        # interrupted.
        if 0 <= settled < round_:
            self.last_trigger = max(self.last_trigger, settled)
        if round_ <= self.closed:
            self.counts["late"] += 1
            self._late[report.rank] = report
            return
        entry = self._open.get(round_)
        if entry is None:
            entry = self._opened(round_, now_s)
        if report.rank in entry.reports:
            self.counts["duplicate"] += 1
            return
        self.deadline.observe(now_s - entry.opened_s)
        entry.reports[report.rank] = report

    def _opened(self, round_: int, now_s: float) -> _Round:
        if self._last_opened_s is not None:
            self.deadline.paced(now_s - self._last_opened_s)
        self._last_opened_s = now_s
        entry = self._open[round_] = _Round(now_s)
        return entry

    def leave(self, rank: int) -> None:
        self._left.add(rank)

    @property
    def alone(self) -> bool:
        return len(self._left) == self.size

    def needed(self) -> int:
        """Return the number of reports that decides a round before its deadline."""
        here = self.size - len(self._left)
        # A share of the remaining ranks: a quorum of all ranks would never be reached once some have left.
        wanted = math.ceil(self.quorum * here) if isinstance(self.quorum, float) else self.quorum
        return max(1, min(wanted, here))

    def due(self, now_s: float) -> list[Decision]:
        """Return the decisions that are due, oldest round first, including rounds without a replacement."""
        decisions = []
        # A sorted copy of the keys, because deciding a round closes older ones and changes the table.
        for round_ in sorted(self._open):
            entry = self._open.get(round_)
            if entry is None:  # closed by a younger round
                continue
            full = len(entry.reports) >= self.needed()
            if full or now_s >= entry.opened_s + self.deadline.limit_s(len(entry.reports) / self.size):
                self.counts["deadline"] += not full
                decisions.append(self._decide(round_, now_s))
        return decisions

    def _decide(self, round_: int, now_s: float) -> Decision:
        # A late report substitutes a missing one, but never replaces a report of this round, which is newer.
        known = self._late | self._open[round_].reports
        reports = [report for rank, report in known.items() if rank not in self._left]
        self.closed, self._late = round_, {}
        # Older rounds are closed too: their metrics belong to weights that may have been replaced since.
        self._open = {other: entry for other, entry in self._open.items() if other > round_}
        if round_ - self.last_trigger < self.cooldown:
            self.counts["cooldown"] += 1
            return Decision(round_, len(reports))
        decision = decide(round_, reports, self.rules, self._rng, busy=self._busy(now_s))
        if decision.assignments:
            self.trigger_before, self.last_trigger = self.last_trigger, round_
            # Four deadlines: the replaced rank itself waits for one, and its report follows a round later.
            give_up_s = now_s + 4 * self.deadline.limit_s(share=1.0)
            self._assigned.update((rank, (round_, give_up_s)) for rank in decision.assignments)
        return decision

    def _busy(self, now_s: float) -> set[int]:
        return {rank for rank, (_, give_up_s) in self._assigned.items() if now_s < give_up_s}


@dataclass(frozen=True, slots=True)
class ExchangeOptions:
    """Options of the exchange: quorum, deadlines and transport.

    Args:
        quorum: number of reports that decides a round immediately: a share of the group (float) or a number of ranks
            (int).
        deadline: seconds until a round is decided by the reports that have arrived, and until a replaced rank continues
            with the snapshots that have arrived; None learns both from past arrivals (`Adaptive`); a function creates a
            deadline.
        coordinator: the rank of the group that decides (it also trains like any other); in a smaller group, as after a
            recovery, the last rank.
        tag: tag of all messages of the policy; two policies on one communicator need two tags.
        part_nbytes: larger snapshots are split into several messages.
        checksum: check the weights too, at about 4 GB/s (control messages are always checked).
        poll_interval_s: seconds between polls while `shutdown` waits.
        shutdown_timeout_s: seconds for which `shutdown` waits for a rank that does not answer, and for messages that do
            not arrive. It waits without limit for a rank that still trains.

    Raises:
        ParameterError: an argument is out of range.
    """

    quorum: Quorum = 1.0
    deadline: float | Callable[[], Deadline] | None = None
    coordinator: int = 0
    tag: int = 7001
    part_nbytes: int = 2**26
    checksum: bool = True
    poll_interval_s: float = 0.01
    shutdown_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        check_quorum(self.quorum)
        if isinstance(self.deadline, (int, float)):
            Fixed(self.deadline)
        for name in ("part_nbytes", "poll_interval_s", "shutdown_timeout_s"):
            if not getattr(self, name) > 0:
                raise ParameterError(f"{name}={getattr(self, name)!r}: give a number above 0")
        if self.coordinator < 0 or self.tag < 0:
            raise ParameterError(
                f"coordinator={self.coordinator}, tag={self.tag}: give numbers of at least 0"
            )

    def new_deadline(self) -> Deadline:
        """Create a deadline for one endpoint.

        Returns:
            A deadline without observations.
        """
        return self.deadline() if callable(self.deadline) else as_deadline(self.deadline)


Wiring = ExchangeOptions  # earlier name


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an assignment ended: the bytes of each donor with a complete snapshot, in order of arrival."""

    assignment: Assignment
    given: dict[int, int]
    wait_s: float

    @property
    def nbytes(self) -> int:
        return sum(self.given.values())

    @property
    def fresh_start(self) -> bool:
        return not self.assignment.donors


@dataclass(slots=True)
class _OpenAssignment:
    assignment: Assignment
    asked_s: float
    parts: dict[int, dict[int, Message]] = field(default_factory=dict)  # of incomplete snapshots
    given: dict[int, int] = field(default_factory=dict)  # bytes of complete snapshots
    unseen: int = 0  # parts since the latest look at the time


class Inbox:
    """Holds the open assignment. `settled` is the last round that was finished or given up."""

    def __init__(self, deadline: Deadline, settled: int = -1) -> None:
        self.deadline, self.settled = deadline, settled
        self.counts: Counter[str] = Counter()
        self._pending: _OpenAssignment | None = None

    @property
    def waiting(self) -> bool:
        return self._pending is not None

    def assign(self, assignment: Assignment, now_s: float) -> bool:
        """Accept an assignment; return whether to ask its donors."""
        # One at a time: a second replacement would mix donors of two rounds.
        if self._pending is not None or assignment.round <= self.settled:
            self.counts["refused"] += 1
            return False
        self._pending = _OpenAssignment(assignment, now_s)
        return True

    def part(self, donor: int, message: Message) -> list[Message]:
        """Record one part of a donor's snapshot; return all its parts, in order, if it was the last one."""
        # Answers of slow donors to an earlier round may arrive after its deadline.
        pending = self._pending
        if (
            pending is None
            or message.number != pending.assignment.round
            or donor not in pending.assignment.donors
        ):
            self.counts["late"] += 1
            return []
        got = pending.parts.setdefault(donor, {})
        if donor in pending.given or message.part in got:
            self.counts["duplicate"] += 1
            return []
        if got and (first := next(iter(got.values()))).iteration != message.iteration:
            # answers to a repeated request: parts of two snapshots never mix
            if message.iteration < first.iteration:
                self.counts["late"] += 1
                return []
            got.clear()
        got[message.part] = message
        pending.unseen += 1
        # Complete by count: parts arrive in any order, and each contains the number of parts.
        if len(got) < message.parts:
            return []
        whole = [got[index] for index in sorted(got)]
        pending.given[donor] = sum(part.body.size for part in whole)
        got.clear()  # handed over: the inbox keeps no reference
        return whole

    def outcome(self, now_s: float) -> Outcome | None:
        """Return how the open assignment ended, or None while it is open; afterwards none is open."""
        pending = self._pending
        if pending is None:
            return None
        given, asked = pending.given, len(pending.assignment.donors)
        missing, wait_s = asked - len(given), now_s - pending.asked_s
        for _ in range(pending.unseen):
            self.deadline.observe(wait_s)
        pending.unseen = 0
        # Missing donors are dropped: the donors with complete snapshots share the weight (`normalized`).
        if missing and wait_s < self.deadline.limit_s(len(given) / asked):
            return None
        self.counts["missing"] += missing
        self._end(pending)
        return Outcome(pending.assignment, given, wait_s)

    def give_up(self) -> None:
        """Close the open assignment without a result."""
        if self._pending is not None:
            self.counts["given up"] += 1
            self._end(self._pending)

    def _end(self, pending: _OpenAssignment) -> None:
        # Settled even without a result: otherwise the coordinator would consider this rank busy.
        self.settled, self._pending = pending.assignment.round, None
