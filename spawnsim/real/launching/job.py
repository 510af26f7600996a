"""What is known of a job while its launcher runs: whether it must end, and at last why it has.

Knows the roll, what the launcher has said, and which processes it has; signals nobody.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from spawnsim.real.launching.filtering import Ended, Filter
from spawnsim.real.launching.keeper import name
from spawnsim.real.launching.orphans import children
from spawnsim.real.launching.roll import WORLD, Roll

LAST_WORDS_S = 6.0  # for a launcher whose job has lost a rank: most end the job themselves
NO_WORDS_S = 1.0  # where not all programs have begun, nobody has recorded anything
UNSURVIVED = ": no job survives that"
STARTING_S = 3.0  # how much later than the first rank's program a launcher may start the last rank


@dataclass
class Job:
    """What is known of a job's ranks while it runs. `ranks`: how many are on this node, 0 if that is not known."""

    roll: Roll
    ranks: int
    survive: bool
    filters: tuple[Filter, Filter] = field(default_factory=lambda: (Filter(), Filter()))  # of both streams
    _lost_s: float = 0.0  # since when it is known that the job must end
    _unkept: Ended | None = None
    _alone_s: float = field(default_factory=time.monotonic)  # since when all ranks there are have keepers

    def doomed(self) -> bool:
        """Whether the job has lost a rank, and its launcher has had the time to end it."""
        now_s = time.monotonic()
        if not self._lost_s and self._first() is not None:
            self._lost_s = now_s
        patience_s = LAST_WORDS_S if len(self.roll.begun) >= self.ranks else NO_WORDS_S
        return self._lost_s > 0.0 and now_s - self._lost_s > patience_s

    def ended(self, status: int) -> Ended:
        """Return how the job has ended, whose launcher has left with a status. The first end is the one that counts."""
        first, found = self._first(), max(self.filters, key=lambda each: each.signal)
        told = first is not None and first.status == 128 + signal.SIGTERM  # which may be the launcher's work
        if first is not None and not (told and found.rank >= 0 and found.signal):
            return first
        if found.signal:
            which = UNSURVIVED if self.survive and self._unkept_ranks() else ""
            return Ended(128 + found.signal, f"{self._who(found)} was killed by {name(found.signal)}{which}")
        if status == 0 and self.survive and not self.roll.ended_well:
            return Ended(WORLD, "no rank has lived to the end")
        if status == 0:
            return Ended(0)
        how = f"has ended with status {status}" if status > 0 else f"was killed by {name(-status)}"
        unkept = self._unkept_ranks()
        why = f"{_ranks(unkept)} died at {_their(unkept)} start" if unkept else "no rank has said why"
        return Ended(status if status > 0 else 128 - status, f"the launcher {how}: {why}")

    def _first(self) -> Ended | None:
        if recorded := self.roll.first_end():
            return Ended(*recorded)
        return next((each.spoken for each in self.filters if each.spoken), None) or self._unkept_death()

    def _unkept_death(self) -> Ended | None:
        """Return the death of a rank that had no keeper yet, which nobody else may see: all others have one by now."""
        launchers, unkept, now_s = self.roll.launchers, self._unkept_ranks(), time.monotonic()
        if self._unkept is not None:
            return self._unkept
        if len(launchers) != 1 or not unkept or len(unkept) != self.ranks - len(children(launchers[0])):
            self._alone_s = now_s
        elif now_s - self._alone_s > STARTING_S:
            which = UNSURVIVED if self.survive else ""
            self._unkept = Ended(WORLD, f"{_ranks(unkept)} died at {_their(unkept)} start{which}")
        return self._unkept

    def _unkept_ranks(self) -> list[int]:
        return sorted(set(range(self.ranks)) - self.roll.ranks)

    def _who(self, found: Filter) -> str:
        """Return whom the launcher means; of ranks with keepers MPICH's may name any."""
        unkept = self._unkept_ranks()
        if found.process < 0 and unkept:  # MPICH's says no more than the signal where ranks are survived
            return f"{'one of ' if len(unkept) > 1 else ''}{_ranks(unkept)}, at {_their(unkept)} start,"
        process = f"process {found.process} on {found.node}" if found.process >= 0 else "a process"
        rank = str(found.rank) if found.rank >= 0 else ""
        if not (rank or self.roll.launchers):
            rank = self.roll.rank_of(found.process)
        if not rank and len(unkept) == 1:
            rank = str(unkept[0])
        if rank:
            return f"rank {rank} ({process})"
        if unkept:
            return f"one of {_ranks(unkept)} ({process}), at their start,"
        return "a rank's keeper" if self.roll.launchers else process


def _ranks(ranks: Sequence[int]) -> str:
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _their(ranks: Sequence[int]) -> str:
    return "their" if len(ranks) > 1 else "its"
