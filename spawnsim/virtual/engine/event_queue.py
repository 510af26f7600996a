"""SimPy's environment as a queue of events at absolute times, ordered by time, then rank, then sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappush
from typing import Any

import simpy

from spawnsim.errors import InternalError

# The order of what happens at one time: each stands in the place of a rank. One-sided accesses that have waited for
# that time at their target, and messages on their way to a NIC, come first; then all arrivals, so that a probe sees
# what arrives at that very time; then the ranks; then decisions among all that ranks have done (which of several
# rendezvous starts); then deadlines, so that what arrives at that very time is in time. Of rank r: DECIDING + r, LATE +
# r. The distances leave room for a trillion ranks between two kinds.
WAITED, UNDER_WAY, ARRIVING, DECIDING, LATE = -(3 << 40), -(2 << 40), -(1 << 40), 1 << 40, 2 << 40


class ScheduledCall:
    """A SimPy event at an absolute time: what `simpy.Environment.step` asks of an event, and no more."""

    # SimPy's own Timeout takes a delay, and now + (t - now) is not always t in floating point: two events meant for one
    # time would come at two, in an order that depends on when they were scheduled. A simpy.Event would also
    # carry a value and a success that nothing reads.
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
