"""SimPy's environment as a queue of events at absolute times, ordered by time, then rank, then sequence.

The order of ranks at one time is the simulator's choice, not MPI's: `tie_order` gives others, under which a program
must be right as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any

import simpy

from spawnsim.errors import InternalError, ParameterError

# The order of what happens at one time: each stands in the place of a rank. One-sided accesses that have waited for
# that time at their target, and messages on their way to a NIC, come first; then all arrivals, so that a probe sees
# what arrives at that very time; then the ranks; then decisions among all that ranks have done (which of several
# rendezvous starts); then training steps that are executed together; then deadlines, so that what arrives at that very
# time is in time. Of rank r: DECIDING + r, LATE + r. The distances leave room for a trillion ranks between two kinds.
_ROOM = 1 << 40
WAITED, UNDER_WAY, ARRIVING, DECIDING, BATCHED, LATE = (
    -3 * _ROOM, -2 * _ROOM, -_ROOM, _ROOM, 2 * _ROOM, 3 * _ROOM,
)  # fmt: skip

TIES = "fifo, reverse or random:SEED"
Place = Callable[[int, float], int]
"""The place, among all that happens at a time, of what stands in the place of a rank; it stays among its own kind."""


def tie_order(text: str) -> Place | None:
    """Return where ranks stand at one time: "fifo" (by their numbers: None), "reverse", or "random:SEED".

    Raises:
        ParameterError: it is none of these.
    """
    order, _, seed = text.partition(":")
    if text == "fifo":
        return None
    if text == "reverse":
        return lambda rank, _time_s: (rank // _ROOM + 1) * _ROOM - 1 - rank % _ROOM
    if order == "random" and seed.isdigit():
        # Hashes of numbers are the same in every process. What one rank does at one time keeps its order: the key is
        # the rank and the time, and not the event.
        key = int(seed)
        return lambda rank, time_s: rank // _ROOM * _ROOM + hash((key, rank, time_s)) % _ROOM
    raise ParameterError(f"ties={text!r}: write {TIES}")


class ScheduledCall:
    """A call at an absolute time, in the place of an event of SimPy's. Its owner may schedule it again."""

    # SimPy's own Timeout takes a delay, and now + (t - now) is not always t in floating point: two events meant for one
    # time would come at two, in an order that depends on when they were scheduled. A simpy.Event would also
    # carry callbacks, a value and a success that nothing reads.
    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Do nothing when the time comes. SimPy cannot take an event out of its heap."""
        self.action = None


# Of the heap: time in seconds, place among all that happens then, sequence, what happens.
Entry = tuple[float, int, int, ScheduledCall]


class EventQueue(simpy.Environment):
    """SimPy's environment with absolute times; equal times are ordered by (rank, sequence).

    Attributes:
        scheduled: Called, the number of events in the heap.
        happening: Whether an event is happening: on the stack of whichever task has left, which must not be parked.
        place: Where ranks stand at one time; None: by their numbers.
    """

    def __init__(self, ties: str = "fifo") -> None:
        super().__init__()
        self.place = tie_order(ties)
        self.scheduled: Callable[[], int] = self._queue.__len__
        self.happening = False

    def at(self, time_s: float, rank: int, action: Callable[[], None]) -> ScheduledCall:
        """Call `action` when the clock reads `time_s`."""
        scheduled_call = ScheduledCall(action)
        self.put(time_s, rank, scheduled_call)
        return scheduled_call

    def put(self, time_s: float, rank: int, scheduled_call: ScheduledCall) -> None:
        """Schedule a call that is not scheduled now."""
        if time_s < self._now:
            raise InternalError(f"an event at {time_s!r} s was asked for when the clock read {self._now!r} s")
        if self.place is not None:
            rank = self.place(rank, time_s)
        heappush(self._queue, (time_s, rank, next(self._eid), scheduled_call))  # type: ignore[misc]

    def entry(self, time_s: float, rank: int, scheduled_call: ScheduledCall) -> Entry:
        """Return the next entry at a time that is not past, for `enter`, or for `reach` alone."""
        if self.place is not None:
            rank = self.place(rank, time_s)
        return time_s, rank, next(self._eid), scheduled_call

    def enter(self, entry: Entry) -> None:
        heappush(self._queue, entry)  # type: ignore[misc]

    def reach(self, entry: Entry) -> bool:
        """Set the clock forward if nothing in the heap comes before an entry; say whether it was done."""
        if self._queue and self._queue[0] < entry:  # type: ignore[operator]
            return False
        if entry[0] > self._now:
            self._now = entry[0]
        return True

    def step(self) -> None:
        """Let the next event happen."""
        event: Any = self._queue[0][3] if self._queue else None
        if type(event) is not ScheduledCall:  # SimPy's own, or none
            super().step()
            return
        # As SimPy does it, without the callbacks of its own events: they cost a third of a poll.
        self._now = heappop(self._queue)[0]
        if event.action is not None:
            self.happening = True
            event.action()
            self.happening = False

    def jump(self, time_s: float, rank: int) -> bool:
        """Set the clock forward if nothing is scheduled before (time, rank); say whether it was done."""
        if self._queue:
            first = self._queue[0]
            if self.place is not None:
                rank = self.place(rank, time_s)
            if first[0] < time_s or (first[0] == time_s and first[1] <= rank):
                return False
        if time_s > self._now:
            self._now = time_s
        return True

    def events(self) -> Iterator[ScheduledCall]:
        """Yield the events in the heap, in no order."""
        return (entry[-1] for entry in self._queue)  # type: ignore[misc]
