"""How one rank leaves a collective, and what it waits for until then.

This room knows one rank's end of a meeting. It must not know buffers or algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spawnsim.virtual.engine.completion import Uncertain
from spawnsim.virtual.engine.kernel import Kernel
from spawnsim.virtual.engine.world import Rank
from spawnsim.virtual.waiting import Dead

if TYPE_CHECKING:
    from spawnsim.virtual.meeting import Meeting


class Departure(Uncertain):
    """The end of a collective for one rank. Its card stays busy with what it sent until `nic_free_s`."""

    __slots__ = ("nic_free_s", "rank")

    def __init__(self, kernel: Kernel, rank: Rank) -> None:
        self.kernel, self.rank, self.nic_free_s = kernel, rank, -math.inf
        self.finish_s: float | None = None
        self.waiter = self.heirs = None
        self.lost = False

    def leave(self, time_s: float) -> None:
        """Let the rank go at a time; NaN: a message that it needs is lost.

        Where lengths differ, only a late rank may show that this one could have left before: then it goes now.
        """
        if time_s == time_s:
            self.complete(max(time_s, self.kernel.env.now))
        else:
            self.lose()

    def final(self) -> float:
        """Return the end; what the rank sends from now on waits for its messages of the collective."""
        if self.nic_free_s > self.rank.nic_free_s:
            self.rank.nic_free_s = self.nic_free_s
        return self.finish_s  # type: ignore[return-value]

    def is_over(self, by_s: float) -> bool:
        """Whether the rank has left by a time, or will have."""
        return self.finish_s is not None and self.finish_s <= by_s


@dataclass(slots=True)
class WaitingForCollective:
    """A rank that waits for a collective to end."""

    meeting: Meeting
    me: int

    def describe(self) -> str:
        """Return the call, its number and its communicator."""
        call = self.meeting.calls[self.me]
        name = call.describe() if call is not None else "collective"
        return f"{name}, number {self.meeting.number} on {self.meeting.comm}"

    def missing(self, by_s: float = math.inf) -> Sequence[int]:
        """Return the ranks that had not arrived by a time, and those whose messages had not come through."""
        meeting, departure = self.meeting, self.meeting.gone[self.me]
        found = {rank for rank, arrival_s in enumerate(meeting.arrivals.tolist()) if not arrival_s <= by_s}
        if meeting.strikes is not None and departure is not None and not departure.is_over(by_s):
            found |= set(meeting.strikes.late(self.me))
        return sorted(found)

    def peers(self) -> Sequence[int]:
        """Return the world ranks that have not arrived, or cannot be heard."""
        return [self.meeting.members[rank] for rank in self.missing()]

    def doomed(self, dead: Dead) -> Sequence[int]:
        """Return the dead who will never arrive, or be heard."""
        members, context = self.meeting.members, self.meeting.context
        return [rank for rank in self.missing() if context.is_dead(members[rank], dead)]

    def contexts(self) -> Sequence[Any]:
        """Return what ends the wait when it is revoked."""
        return (self.meeting.context,)

    def sequence(self) -> int:
        """Return the number of the collective on its communicator."""
        return self.meeting.number
