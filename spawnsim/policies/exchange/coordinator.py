"""The state machines of the asynchronous protocol: the coordinator, a replaced rank's inbox, and their options.

They are driven by messages and the time they are told, and know neither communicator nor clock, so that losses,
duplicates and any order of arrival are tested on them directly. A round is the iteration whose metrics the coordinator
compares. It is decided once a quorum has reported or its deadline has passed, whichever comes first; deciding a round
closes it and all older ones. What comes for a closed round is counted, and stands for its rank in the next decision
unless that has a report of its own: a rank that has fallen behind by more than a deadline (it was paused, it is slow)
would come too late for every round, and be neither replaced nor a donor ever again. A replaced rank has one assignment
at a time, which ends when all donors have given, or when the deadline has passed, with those that have given whole
snapshots.
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
    # Booleans are integers to Python: quorum=True would mean one rank.
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

    `counts` says how many reports were `late` (their round was closed) or `duplicate`, and how many rounds met their
    `deadline` short of the quorum or fell into the `cooldown`.
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
        self._assigned: dict[int, tuple[int, float]] = {}  # rank → (round, when to give it up)

    @property
    def waiting(self) -> bool:
        return bool(self._open)

    @property
    def assigned(self) -> dict[int, int]:
        """By rank that is not known to be through with its replacement, the round of that."""
        return {rank: round_ for rank, (round_, _) in self._assigned.items()}

    def report(self, round_: int, report: Report, now_s: float, settled: int = -1) -> None:
        """Take a rank's report; `settled` is the last round whose replacement it finished or gave up."""
        # A replaced rank says in its next report that it is through. Until then it is busy: replaced again, it would be
        # judged by weights that are gone. Should that report be lost, `_busy` gives it up after four deadlines.
        if settled >= self._assigned.get(report.rank, (math.inf, 0))[0]:
            del self._assigned[report.rank]
        # A successor learns of the rounds before its time. Not of this one, where it is held again: it was cut short.
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
        """Return how many reports decide a round before its deadline."""
        here = self.size - len(self._left)
        # Of the ranks that are still there: a quorum of all would never be reached once some have left.
        wanted = math.ceil(self.quorum * here) if isinstance(self.quorum, float) else self.quorum
        return max(1, min(wanted, here))

    def due(self, now_s: float) -> list[Decision]:
        """Return the decisions that can be taken now, oldest round first; rounds without a replacement included."""
        decisions = []
        # A copy of the keys in order, because deciding a round closes older ones and changes the table.
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
        # A late report stands in for one that is missing, but never replaces one of this round, which is newer.
        told = self._late | self._open[round_].reports
        reports = [report for rank, report in told.items() if rank not in self._left]
        self.closed, self._late = round_, {}
        # Older rounds are closed with it: their metrics are of weights that may be replaced by now.
        self._open = {other: entry for other, entry in self._open.items() if other > round_}
        if round_ - self.last_trigger < self.cooldown:
            self.counts["cooldown"] += 1
            return Decision(round_, len(reports))
        decision = decide(round_, reports, self.rules, self._rng, busy=self._busy(now_s))
        if decision.assignments:
            self.trigger_before, self.last_trigger = self.last_trigger, round_
            # Four deadlines: the replaced rank itself waits for one, and its report comes a round later.
            give_up_s = now_s + 4 * self.deadline.limit_s(share=1.0)
            self._assigned.update((rank, (round_, give_up_s)) for rank in decision.assignments)
        return decision

    def _busy(self, now_s: float) -> set[int]:
        return {rank for rank, (_, give_up_s) in self._assigned.items() if now_s < give_up_s}


@dataclass(frozen=True, slots=True)
class ExchangeOptions:
    """How the exchange waits and sends.

    Args:
        quorum: how many reports decide a round at once: a share of the group (float) or a number of ranks (int).
        deadline: seconds until a round is decided with those that have reported, and until a replaced rank goes on with
            what its donors have sent; None learns both from past arrivals (`Adaptive`); a function makes a deadline.
        coordinator: which rank of the group decides (it takes part like any other); in a smaller group, as recoveries
            leave it, the last rank.
        tag: of every message of the policy; two policies at once need two.
        part_nbytes: larger snapshots travel in several messages.
        checksum: check the weights too, at about 4 GB/s (control messages always are).
        poll_interval_s: seconds between polls while `shutdown` waits.
        shutdown_timeout_s: seconds for which `shutdown` waits for a rank that does not answer, and for messages that do
            not arrive. A rank that still trains is waited for as long as it takes.

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
        """Make a deadline for one endpoint.

        Returns:
            One that has seen nothing yet.
        """
        return self.deadline() if callable(self.deadline) else as_deadline(self.deadline)


Wiring = ExchangeOptions  # the name that it had first


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an assignment ended: the bytes of each donor that gave a whole snapshot, in order of arrival."""

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
    parts: dict[int, dict[int, Message]] = field(default_factory=dict)  # of those that are not whole
    given: dict[int, int] = field(default_factory=dict)  # bytes of those that are
    unseen: int = 0  # parts that came since the latest look at the time


class Inbox:
    """Keeps the open assignment. `settled` is the last round that was finished or given up."""

    def __init__(self, deadline: Deadline, settled: int = -1) -> None:
        self.deadline, self.settled = deadline, settled
        self.counts: Counter[str] = Counter()
        self._pending: _OpenAssignment | None = None

    @property
    def waiting(self) -> bool:
        return self._pending is not None

    def assign(self, assignment: Assignment, now_s: float) -> bool:
        """Take an assignment; return whether its donors are to be asked."""
        # One at a time: a second replacement would mix donors of two rounds.
        if self._pending is not None or assignment.round <= self.settled:
            self.counts["refused"] += 1
            return False
        self._pending = _OpenAssignment(assignment, now_s)
        return True

    def part(self, donor: int, message: Message) -> list[Message]:
        """Take one part of a donor's snapshot; return all its parts, in order, if it was the last one."""
        # Answers to an earlier round may come after its deadline, from donors that were slow.
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
            # answers to an asking that was repeated: parts of two snapshots never mix
            if message.iteration < first.iteration:
                self.counts["late"] += 1
                return []
            got.clear()
        got[message.part] = message
        pending.unseen += 1
        # Complete by count: parts come in any order, and each says how many there are.
        if len(got) < message.parts:
            return []
        whole = [got[index] for index in sorted(got)]
        pending.given[donor] = sum(part.body.size for part in whole)
        got.clear()  # handed over: what becomes of it is not the inbox's to keep
        return whole

    def outcome(self, now_s: float) -> Outcome | None:
        """Return how the open assignment ended, or None while it has not; after that nothing is open."""
        pending = self._pending
        if pending is None:
            return None
        given, asked = pending.given, len(pending.assignment.donors)
        missing, wait_s = asked - len(given), now_s - pending.asked_s
        for _ in range(pending.unseen):
            self.deadline.observe(wait_s)
        pending.unseen = 0
        # Donors that do not come are done without: those that gave whole snapshots share the weight (`normalized`).
        if missing and wait_s < self.deadline.limit_s(len(given) / asked):
            return None
        self.counts["missing"] += missing
        self._end(pending)
        return Outcome(pending.assignment, given, wait_s)

    def give_up(self) -> None:
        """Close the open assignment without result."""
        if self._pending is not None:
            self.counts["given up"] += 1
            self._end(self._pending)

    def _end(self, pending: _OpenAssignment) -> None:
        # Settled even without a result, or the coordinator would take this rank for busy.
        self.settled, self._pending = pending.assignment.round, None
