"""Messages and completions: operations that take time between two ranks.

The receiving side of a rank's NIC admits one message at a time, in the order in which the rank takes them. A message
that is taken books the NIC for its drain, from the arrival of its first bytes on or, if that time is booked already, in
the first gap that is long enough. Therefore many messages to one rank take as long as all their bytes, messages that
arrived long ago cost nothing, and no event is needed: the order is the receiving program's order, as in the dataflow of
collectives. Where the order of arrival must decide instead, use `contention.Ingress`, at the price of events.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from typing import Any, Protocol

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.virtual.engine.kernel import Kernel, Task

# The minimum number of remembered busy intervals; the NIC counts as free before them. A message books a gap further
# back only if its rank took more than 64 later messages first. Without a bound, each search would scan all messages of
# a run.
KEPT = 64
SLACK = 1e-9  # of a drain: a smaller overlap is a rounding error, not contention


class ReceivingNic:
    """When one NIC was or will be busy receiving: intervals in seconds, increasing and disjoint."""

    __slots__ = ("_busy", "_free_s")

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []
        self._free_s = -math.inf  # free from this time on

    def admit(self, arrival_s: float, drain_s: float) -> float:
        """Book the NIC for a message with the uncontended arrival `arrival_s`. Return its actual arrival time."""
        begin_s = arrival_s - drain_s
        if begin_s + SLACK * drain_s < self._free_s:
            return self._squeeze_in(begin_s, arrival_s)
        # Nearly always behind all other messages: programs take messages in about the order of their arrival.
        self._busy.append((begin_s, arrival_s))
        self._free_s = arrival_s
        if len(self._busy) > 2 * KEPT:
            del self._busy[:KEPT]
        return arrival_s

    def _squeeze_in(self, begin_s: float, end_s: float) -> float:
        """Book the first long enough gap from `begin_s` on; return its end."""
        drain_s = end_s - begin_s
        for from_s, to_s in self._busy:
            if to_s <= begin_s + SLACK * drain_s:
                continue
            if from_s >= end_s - SLACK * drain_s:
                break
            begin_s, end_s = to_s, to_s + drain_s
        insort(self._busy, (begin_s, end_s))
        self._join()
        self._free_s = self._busy[-1][1]
        return end_s

    def _join(self) -> None:
        """Merge intervals that touch."""
        joined = self._busy[:1]
        for from_s, to_s in self._busy[1:]:
            if from_s <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(to_s, joined[-1][1]))
            else:
                joined.append((from_s, to_s))
        self._busy = joined[-KEPT:]


class Sender(Protocol):
    """A send that must learn when its message is matched: a rendezvous or a synchronous send."""

    def matched(self, message: Message, posted_s: float) -> None:
        """Handle the match of the message with its receive, which was posted at `posted_s`."""
        ...


class Message:
    """One message. `source` is a rank of the communicator; times are absolute virtual seconds."""

    # Slots, all assigned: Python reads a class default four times slower than a slot.
    __slots__ = (
        "arrival_s", "drain_s", "dtype", "envelope_s", "nbytes", "number", "origin", "payload", "queued", "receive",
        "receive_s", "sender", "sequence", "source", "stamp", "tag",
    )  # fmt: skip
    stamp: Any  # of the send, from `causality`: set only in runs that order events
    # Rank, call and time of the send: set only in traced runs.
    origin: tuple[int, int, float] | None

    def __init__(self, source: int, tag: int, payload: Any, nbytes: int) -> None:
        self.source, self.tag, self.payload, self.nbytes = source, tag, payload, nbytes
        self.envelope_s = 0.0  # when the receiver can first see it
        self.arrival_s: float | None = None  # when its data have arrived; None: not known yet
        self.receive_s = 0.0  # the receiver's cost of taking it
        self.drain_s = 0.0  # how long it will still occupy the receiver's NIC
        self.number = 0  # position in the mailbox's order
        self.sequence = 0  # position in the order sent; set only by `contention.Ingress`
        self.dtype: Any = None  # numpy dtype of the sender's elements, if known
        self.queued = False  # unexpected: waits for its receive
        # The sender that waits for the match; None: no sender waits, or it has been notified.
        self.sender: Sender | None = None
        # The paired receive, while there is an event of which to notify it.
        self.receive: Receive | None = None

    def hold_back(self, envelope_s: float) -> None:
        """Delay the arrival to `envelope_s` at the earliest: the time of the sender's previous message."""
        self.envelope_s = envelope_s
        if self.arrival_s is not None and self.arrival_s < envelope_s:
            self.arrival_s = envelope_s

    def meet(self) -> None:
        """Notify the waiting sender if message and receive have met."""
        sender, receive = self.sender, self.receive
        if sender is not None and receive is not None:
            self.sender = None
            if self.arrival_s is not None:
                self.receive = None
            sender.matched(self, receive.posted_s)

    def land(self, arrival_s: float) -> None:
        """Fix the arrival of the data, and complete the paired receive."""
        self.arrival_s = arrival_s
        receive, self.receive = self.receive, None
        if receive is not None:
            receive.settle(self, arrival_s)


class Completion:
    """An operation with an end that may still be unknown: the kernel side of every request."""

    __slots__ = ("dependents", "finish_s", "kernel", "waiter")
    lost: bool = False  # whether only a deadline can end a wait for it

    def __init__(self, kernel: Kernel, finish_s: float | None = None) -> None:
        self.kernel, self.finish_s = kernel, finish_s
        self.waiter: Task | None = None
        self.dependents: list[AllOf] | None = None

    def final(self) -> float:
        """Return the known end of a completion. A receive admits its message now, unless it has done so already."""
        assert self.finish_s is not None
        return self.finish_s

    def is_settled(self, time_s: float) -> bool:
        """Whether it is known now if it completes by a time, unless a later send arrives by then."""
        return self.finish_s is not None

    def over(self, now_s: float) -> bool:
        """Whether it is complete at a time of its rank's clock; if so, a receive admits its message."""
        return self.finish_s is not None and self.finish_s <= now_s and self.final() <= now_s

    def complete(self, finish_s: float) -> None:
        """Fix the end and wake the waiting task."""
        self.finish_s = finish_s
        if self.waiter is not None:
            self.kernel.resume(self.waiter)
        if self.dependents is not None:
            for dependent in self.dependents:
                dependent.part_over()

    def reopen(self) -> None:
        """Discard the end: a receive's match in the future was undone (see `matching`)."""
        self.finish_s = None
        for dependent in self.dependents or ():
            dependent.reopen()


class Uncertain(Completion):
    """A completion that may never end, because a link fault has lost a message that it depends on."""

    __slots__ = ("lost",)

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.lost = False

    def lose(self) -> None:
        """Record the loss of a message that it depends on: only the deadline ends a wait for it."""
        self.lost = True
        if self.waiter is not None:
            self.kernel.bound(self.waiter)


class AllOf(Completion):
    """Complete when all its parts are."""

    __slots__ = ("parts",)

    def __init__(self, kernel: Kernel, parts: Sequence[Completion]) -> None:
        super().__init__(kernel)
        self.parts = parts
        for part in parts:
            part.dependents = [*(part.dependents or ()), self]
        self.part_over()

    def part_over(self) -> None:
        """Complete if this was the last part."""
        ends = [part.finish_s for part in self.parts]
        if self.finish_s is None and None not in ends:
            self.complete(max((end for end in ends if end is not None), default=0.0))

    def final(self) -> float:
        """Return the latest end of the parts."""
        self.finish_s = max([part.final() for part in self.parts], default=0.0)
        return self.finish_s


class Receive(Completion):
    """A posted receive, complete once its message's data have arrived."""

    __slots__ = ("message", "nic", "number", "posted_s", "source", "stays_s", "tag")

    def __init__(self, kernel: Kernel, source: int, tag: int, posted_s: float) -> None:
        self.kernel, self.source, self.tag, self.posted_s = kernel, source, tag, posted_s
        self.finish_s = self.waiter = self.dependents = None
        self.stays_s = posted_s  # not withdrawn before this time
        self.message: Message | None = None
        self.nic: ReceivingNic | None = None  # must admit the message; None: admits all messages at once
        self.number = 0

    @property
    def matched_s(self) -> float:
        """When it meets the paired message."""
        if self.message is None:
            return self.posted_s
        return max(self.posted_s, self.message.envelope_s)

    def accepts(self, message: Message) -> bool:
        """Whether source and tag match."""
        return (self.source == message.source or self.source == ANY_SOURCE) and (
            self.tag == message.tag or self.tag == ANY_TAG
        )

    def take(self, message: Message) -> None:
        """Pair with a message: permanently, once the two have met."""
        self.message, arrival_s = message, message.arrival_s
        if arrival_s is None or message.sender is not None:
            message.receive = self
        if arrival_s is not None:
            self.settle(message, arrival_s)

    def release(self) -> Message:
        """Undo the pairing; return the message."""
        message = self.message
        assert message is not None
        self.message = message.receive = None
        self.reopen()
        return message

    def settle(self, message: Message, arrival_s: float) -> None:
        """Complete, now that the arrival of the message's data is known."""
        if self.finish_s is None:
            posted_s = self.posted_s
            finish_s = (arrival_s if arrival_s > posted_s else posted_s) + message.receive_s
            if self.waiter is None and self.dependents is None:  # `complete`, without notifications
                self.finish_s = finish_s
            else:
                self.complete(finish_s)

    def final(self) -> float:
        """Return when the program has the data; books the NIC for them."""
        finish_s, message = self.finish_s, self.message
        # The NIC is booked when the program takes the message, not when the message arrives: the receiving program
        # determines the order of overlapping messages. So no event is needed to decide it, and the rank may still run
        # ahead.
        if message is not None and message.drain_s and self.nic is not None:
            arrival_s, posted_s = message.arrival_s, self.posted_s
            assert arrival_s is not None
            message.arrival_s = arrival_s = self.nic.admit(arrival_s, message.drain_s)
            message.drain_s = 0.0
            self.finish_s = finish_s = (arrival_s if arrival_s > posted_s else posted_s) + message.receive_s
        assert finish_s is not None
        return finish_s
