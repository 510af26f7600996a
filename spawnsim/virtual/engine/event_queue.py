"""SimPy's environment as a queue of events at absolute times.

It knows events and their order, and neither tasks nor ranks' clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappush
from typing import Any

import simpy

from spawnsim.errors import InternalError

# They stand for a rank in the order of what happens at one time. What has waited for that time at its target, or is on
# its way to a NIC, comes first; then all arrivals, for what comes at that very time is seen; then the ranks; then
# decisions among all that the ranks have done; then deadlines, for what comes at that very time is in time.
# Of rank r: DECIDING + r, LATE + r.
WAITED, UNDER_WAY, ARRIVING, DECIDING, LATE = -(3 << 40), -(2 << 40), -(1 << 40), 1 << 40, 2 << 40


class ScheduledCall:
    """A SimPy event at an absolute time. SimPy itself schedules by delay, and now + (t - now) is not always t.

    It has what `simpy.Environment.step` asks of an event, and no more.
    """

    __slots__ = ("action", "callbacks")
    _ok = True

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action
        self.callbacks: list[Callable[[Any], None]] | None = [_act]

    def cancel(self) -> None:
        """Do nothing when the time comes. SimPy cannot take an event out of its heap."""
        self.action = None


def _act(event: Any) -> None:
    if event.action is not None:
        event.action()


class EventQueue(simpy.Environment):
    """SimPy's environment with absolute times; equal times are ordered by (rank, sequence)."""

    def at(self, time_s: float, rank: int, action: Callable[[], None]) -> ScheduledCall:
        """Call `action` when the clock reads `time_s`."""
        if time_s < self._now:
            raise InternalError(f"an event at {time_s!r} s was asked for when the clock read {self._now!r} s")
        scheduled_call = ScheduledCall(action)
        heappush(self._queue, (time_s, rank, next(self._eid), scheduled_call))  # type: ignore[misc]
        return scheduled_call

    def jump(self, time_s: float, rank: int) -> bool:
        """Set the clock forward if nothing is scheduled before (time, rank); say whether it was done."""
        if self._queue and self._queue[0][:2] <= (time_s, rank):
            return False
        if time_s > self._now:
            self._now = time_s
        return True

    def events(self) -> Iterator[ScheduledCall]:
        """Yield the events in the heap, in no order."""
        return (entry[-1] for entry in self._queue)  # type: ignore[misc]

    @property
    def scheduled(self) -> int:
        """Number of events in the heap."""
        return len(self._queue)
