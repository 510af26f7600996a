"""SimPy's environment as a queue of events at absolute times, ordered by time, then rank, then sequence.

The order of ranks at one time is the simulator's choice, not MPI's: `tie_order` provides other orders, under which a
program must also be correct.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any

import simpy

from spawnsim.errors import InternalError, ParameterError

# The order of events at one time; each event has the place of a rank. First come one-sided accesses that have waited
# for that time at their target, and messages on their way to a NIC. Then all arrivals, so that a probe sees a message
# that arrives at that very time. Then the ranks. Then decisions that depend on the actions of all ranks (which of
# several rendezvous starts). Then training steps that are executed together. Deadlines come last, so that a message
# that arrives at that very time is in time. The place of rank r is DECIDING + r, LATE + r and so on. The distances
# leave room for a trillion ranks between two kinds.
_ROOM = 1 << 40
WAITED, UNDER_WAY, ARRIVING, DECIDING, BATCHED, LATE = (
    -3 * _ROOM, -2 * _ROOM, -_ROOM, _ROOM, 2 * _ROOM, 3 * _ROOM,
)  # fmt: skip

TIES = "fifo, reverse, random:SEED or pct:SEED:DEPTH:STEPS"
PCT = "pct"
Place = Callable[[int, float], int]
"""Returns a rank's place among the events of a time; an event stays among its own kind."""


class Priorities:
    """Randomized priorities of ranks (PCT: Burckhardt et al., ASPLOS 2010), as an order of ranks at one time.

    Each rank has a random priority. At `depth - 1` steps, drawn from the first `steps` of the run, the rank that takes
    the step falls behind all others. `choosing` counts the steps.
    """

    def __init__(self, seed: int, depth: int, steps: int) -> None:
        self._seed, self._lowered = seed, dict[int, int]()
        self._changes = Counter(1 + hash((seed, ~number)) % max(steps, 1) for number in range(depth - 1))
        self.taken = 0  # steps so far

    def __call__(self, rank: int, _time_s: float) -> int:
        """Return the place of a rank: the first half for its first priority, the second half for later ones."""
        kind, rank = divmod(rank, _ROOM)
        place = self._lowered.get(rank)
        half = _ROOM // 2
        return kind * _ROOM + (hash((self._seed, rank)) % half if place is None else half + place)

    def step(self, rank: int) -> None:
        """Count a step of a rank."""
        self.taken += 1
        if self.taken in self._changes:
            self.lower(rank)

    def lower(self, rank: int) -> None:
        """Put a rank behind all others."""
        self._lowered[rank] = 1 + max(self._lowered.values(), default=0)


def tie_order(text: str) -> Place | None:
    """Return the order of ranks at one time: "fifo" (by rank: None), "reverse", "random:SEED", or `Priorities`.

    Raises:
        ParameterError: `text` is not one of these.
    """
    order, _, seed = text.partition(":")
    if text == "fifo":
        return None
    if text == "reverse":
        return lambda rank, _time_s: (rank // _ROOM + 1) * _ROOM - 1 - rank % _ROOM
    if order == "random" and seed.isdigit():
        # Hashes of numbers are the same in every process. One rank's events at one time keep their order: the key
        # consists of the rank and the time, without the event.
        key = int(seed)
        return lambda rank, time_s: rank // _ROOM * _ROOM + hash((key, rank, time_s)) % _ROOM
    numbers = seed.split(":")
    if order == PCT and len(numbers) == 3 and all(map(str.isdigit, numbers)) and int(numbers[1]):
        return Priorities(*map(int, numbers))
    raise ParameterError(f"ties={text!r}: write {TIES}")


class ScheduledCall:
    """A call at an absolute time, in place of a SimPy event. Its owner may schedule it again."""

    # SimPy's own Timeout takes a delay, and now + (t - now) is not always t in floating point: two events meant for one
    # time would happen at two times, in an order that depends on when they were scheduled. A simpy.Event would also
    # carry callbacks, a value and a success flag that nothing reads.
    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Make the call do nothing at its time: SimPy cannot remove an event from its heap."""
        self.action = None


# Entry of the heap: time in seconds, place among the events of that time, sequence, event.
Entry = tuple[float, int, int, ScheduledCall]


class EventQueue(simpy.Environment):
    """SimPy's environment with absolute times; equal times are ordered by (rank, sequence).

    Attributes:
        scheduled: Function that returns the number of events in the heap.
        happening: Whether an event is running: on the stack of some task that has left, which must not be parked.
        place: Order of ranks at one time; None: by rank.
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
        """Schedule a call that is not scheduled at present."""
        if time_s < self._now:
            raise InternalError(f"an event at {time_s!r} s was requested when the clock read {self._now!r} s")
        if self.place is not None:
            rank = self.place(rank, time_s)
        heappush(self._queue, (time_s, rank, next(self._eid), scheduled_call))  # type: ignore[misc]

    def entry(self, time_s: float, rank: int, scheduled_call: ScheduledCall) -> Entry:
        """Return the next entry at a time that is not past, for `enter` or only for `reach`."""
        if self.place is not None:
            rank = self.place(rank, time_s)
        return time_s, rank, next(self._eid), scheduled_call

    def enter(self, entry: Entry) -> None:
        heappush(self._queue, entry)  # type: ignore[misc]

    def reach(self, entry: Entry) -> bool:
        """Advance the clock if no event in the heap precedes an entry; return whether it did."""
        if self._queue and self._queue[0] < entry:  # type: ignore[operator]
            return False
        if entry[0] > self._now:
            self._now = entry[0]
        return True

    def step(self) -> None:
        """Run the next event."""
        event: Any = self._queue[0][3] if self._queue else None
        if type(event) is not ScheduledCall:  # SimPy's own event, or an empty heap
            super().step()
            return
        # Like SimPy's step, without the callbacks of SimPy's events: they cost a third of a poll.
        self._now = heappop(self._queue)[0]
        if event.action is not None:
            self.happening = True
            event.action()
            self.happening = False

    def jump(self, time_s: float, rank: int) -> bool:
        """Advance the clock if nothing is scheduled before (time, rank); return whether it did."""
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
        """Yield the events in the heap, in arbitrary order."""
        return (entry[-1] for entry in self._queue)  # type: ignore[misc]
