"""How long a rank that has finished waits for the others: as long as they train, and no longer.

A rank may be any time behind, so no time-out ends such a wait. What ends it is knowledge: all have come, a rank has
died, or the communicator says that one has ended its program or does not answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from spawnsim.comm import Comm, Request
from spawnsim.comm.objects import SILENT
from spawnsim.errors import RankFailed, Timeout

FIRST = 1 / 32  # of the patience, after which absent ranks are first looked for
# Each look comes later than the one before, without limit: once the time to the next one is infinite, ranks that wait
# for each other, of which one waits here, are a deadlock, which virtual ranks report.
GROWTH = 1.25
LEAST_S = 1e-6
SHOWN = 4


class Absences:
    """Looks now and then for ranks of a communicator that are not to be waited for any more.

    Args:
        comm: the communicator.
        patience_s: how long a rank that does not answer is waited for. One that has died or has ended its program is
            not waited for.
    """

    def __init__(self, comm: Comm, patience_s: float) -> None:
        self._comm, self._patience_s, self._slice_s = comm, patience_s, FIRST * patience_s
        self._began_s = comm.clock.now()
        self._due_s = self._began_s + self._slice_s

    def wait_s(self) -> float:
        """Return how long it is until the next look."""
        return max(self._due_s - self._comm.clock.now(), LEAST_S)

    def is_due(self) -> bool:
        """Return whether it is time to look again, which is not so until later if it is."""
        now_s = self._comm.clock.now()
        if now_s < self._due_s:
            return False
        self._slice_s *= GROWTH
        self._due_s = now_s + self._slice_s
        return True

    def look(self) -> dict[int, str]:
        """Return by rank why it is not to be waited for. A look costs time: see `is_due`."""
        late = self._comm.clock.now() >= self._began_s + self._patience_s
        return {rank: why for rank, why in self._comm.absent().items() if late or why != SILENT}


class Attendance:
    """One rank's wait for all ranks of a communicator. Making it is collective, and does not wait."""

    def __init__(self, comm: Comm, patience_s: float) -> None:
        self._comm, self.absences = comm, Absences(comm, patience_s)
        self._everyone: Request | None = None
        with suppress(RankFailed):  # `complete` says so; until then a rank may have others to serve
            self._everyone = comm.Ibarrier()

    def all_here(self) -> bool:
        """Return whether all ranks have come."""
        with suppress(RankFailed):
            return self._everyone is not None and self._everyone.Test()
        return False

    def complete(self) -> dict[int, str]:
        """Wait until all ranks have come; return by rank why it will not.

        Raises:
            RankFailed: a rank has died.
        """
        if self._everyone is None:
            self._everyone = self._comm.Ibarrier()
        while True:
            try:
                with self._comm.clock.deadline(self.absences.wait_s()):
                    self._everyone.Wait()
                    return {}
            except Timeout:
                if self.absences.is_due() and (absent := self.absences.look()):
                    return absent


def shown(absent: Mapping[int, str]) -> str:
    """Say which ranks are absent, and why."""
    more = f", and {len(absent) - SHOWN} more like it" if len(absent) > SHOWN else ""
    return ", ".join(f"rank {rank} {absent[rank]}" for rank in sorted(absent)[:SHOWN]) + more
