"""The coordinator's books: reports come in, decisions go out.

A state machine driven by messages and the time it is told; it knows no communicator and no clock, so that losses,
duplicates and any order of arrival can be tested on it directly. A round is the iteration whose metrics it compares.
It is decided once a quorum has reported or its deadline has passed, whichever comes first; deciding a round closes
it and all older ones. What comes for a closed round is counted, and stands for its rank in the next decision unless
that has a report of its own: a rank that has fallen behind by more than a deadline (it was paused, it is slow) would
come too late for every round, and be neither replaced nor a donor ever again.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.policies.deadlines import Deadline
from spawnsim.policies.deciding import Decision, Rules, decide
from spawnsim.policies.selection import Report

Quorum = int | float


def check_quorum(quorum: Quorum) -> Quorum:
    """Return the quorum, or raise `ParameterError`."""
    share = isinstance(quorum, float)
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
        self.last_trigger = -cooldown
        self._rng = rng
        self._open: dict[int, _Round] = {}
        self._late: dict[int, Report] = {}  # by rank, since the latest decision
        self._last_opened_s: float | None = None
        self._left: set[int] = set()
        self._assigned: dict[int, tuple[int, float]] = {}  # rank → (round, when to give it up)

    @property
    def waiting(self) -> bool:
        """Whether any round is open."""
        return bool(self._open)

    def report(self, round_: int, report: Report, now_s: float, settled: int = -1) -> None:
        """Take a rank's report; `settled` is the last round whose replacement it finished or gave up."""
        if settled >= self._assigned.get(report.rank, (math.inf, 0))[0]:
            del self._assigned[report.rank]
        if settled >= 0:  # a successor learns of the rounds before its time
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
        """Note that a rank neither reports nor gives any more."""
        self._left.add(rank)

    @property
    def alone(self) -> bool:
        """Whether all ranks have left."""
        return len(self._left) == self.size

    def needed(self) -> int:
        """Return how many reports decide a round before its deadline."""
        here = self.size - len(self._left)
        wanted = math.ceil(self.quorum * here) if isinstance(self.quorum, float) else self.quorum
        return max(1, min(wanted, here))

    def due(self, now_s: float) -> list[Decision]:
        """Return the decisions that can be taken now, oldest round first; rounds without a replacement included."""
        decisions = []
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
        told = self._late | self._open[round_].reports
        reports = [told[rank] for rank in sorted(told) if rank not in self._left]
        self.closed, self._late = round_, {}
        self._open = {other: entry for other, entry in self._open.items() if other > round_}
        if round_ - self.last_trigger < self.cooldown:
            self.counts["cooldown"] += 1
            return Decision(round_, len(reports))
        decision = decide(round_, reports, self.rules, self._rng, busy=self._busy(now_s))
        if decision.assignments:
            self.last_trigger = round_
            give_up_s = now_s + 4 * self.deadline.limit_s(share=1.0)
            self._assigned.update((rank, (round_, give_up_s)) for rank in decision.assignments)
        return decision

    def _busy(self, now_s: float) -> set[int]:
        return {rank for rank, (_, give_up_s) in self._assigned.items() if now_s < give_up_s}
