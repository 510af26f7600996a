"""What takes time between two ranks: messages, and completions that end when the time is known.

The receiving side of a rank's NIC lets in one message at a time, as the rank takes them. A message that is
taken books the NIC for its drain, from the arrival of its first bytes on or, where that is taken already, in the
first gap that is long enough. So many messages to one rank take as long as all their bytes, what came long ago
costs nothing, and no event is needed: the order is that of the receiving program, as in the dataflow of
collectives. Where the order of arrival must decide instead, there is `contention.Ingress`, at the price of events.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from typing import Any, Protocol

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.virtual.engine.kernel import Kernel, Task

# Busy intervals remembered, at least; the NIC counts as free before them. A message books a gap so far back only if its
# rank took more than 64 later ones first. Without a bound each look would go through all the messages of a run.
KEPT = 64
SLACK = 1e-9  # of a drain: an overlap as small as this is rounding, not contention


class ReceivingNic:
    """When one NIC was or will be busy receiving: intervals in seconds, rising and disjoint."""

    __slots__ = ("_busy", "_free_s")

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []
        self._free_s = -math.inf  # from then on it is free

    def admit(self, arrival_s: float, drain_s: float) -> float:
        """Book the NIC for a message that would arrive, alone, at `arrival_s`. Return when it has arrived."""
        begin_s = arrival_s - drain_s
        if begin_s + SLACK * drain_s < self._free_s:
            return self._squeeze_in(begin_s, arrival_s)
        # Behind all others, nearly always: programs take messages in about the order in which they come.
        self._busy.append((begin_s, arrival_s))
        self._free_s = arrival_s
        if len(self._busy) > 2 * KEPT:
            del self._busy[:KEPT]
        return arrival_s

    def _squeeze_in(self, begin_s: float, end_s: float) -> float:
        """Book the first gap from `begin_s` on that is long enough; return its end."""
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
        """Put intervals that touch together."""
        joined = self._busy[:1]
        for from_s, to_s in self._busy[1:]:
            if from_s <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(to_s, joined[-1][1]))
            else:
                joined.append((from_s, to_s))
        self._busy = joined[-KEPT:]


class Sender(Protocol):
    """A send that must learn that its message has been matched: a rendezvous or a synchronous one."""

    def matched(self, message: Message, posted_s: float) -> None:
        """Take note that the message has met its receive, which was posted at `posted_s`."""
        ...


class Message:
    """One message. `source` is a rank of the communicator; times are absolute virtual seconds."""

    # Slots, each set: to read a default of the class takes Python four times as long as to read a slot.
    __slots__ = (
        "arrival_s", "drain_s", "dtype", "envelope_s", "nbytes", "number", "origin", "payload", "queued", "receive",
        "receive_s", "sender", "sequence", "source", "tag",
    )  # fmt: skip
    # Rank, call and time of the send: known to the timeline of a traced run alone.
    origin: tuple[int, int, float] | None

    def __init__(self, source: int, tag: int, payload: Any, nbytes: int) -> None:
        self.source, self.tag, self.payload, self.nbytes = source, tag, payload, nbytes
        self.envelope_s = 0.0  # when the receiver can first see it
        self.arrival_s: float | None = None  # when its data are there; None: not known yet
        self.receive_s = 0.0  # what taking it costs the receiver
        self.drain_s = 0.0  # how long it has yet to keep the receiver's NIC busy
        self.number = 0  # in the mailbox's order
        self.sequence = 0  # in the order sent; kept by `contention.Ingress` alone
        self.dtype: Any = None  # numpy's, of the sender's numbers, where that is known
        self.queued = False  # waits, unexpected, for its receive
        # The sender that waits for the match; None: none does, or it has learned of it.
        self.sender: Sender | None = None
        # The receive with which it is paired, as long as there is something to tell it.
        self.receive: Receive | None = None

    def hold_back(self, envelope_s: float) -> None:
        """Let it arrive at `envelope_s` at the earliest: with the one that was sent before it."""
        self.envelope_s = envelope_s
        if self.arrival_s is not None and self.arrival_s < envelope_s:
            self.arrival_s = envelope_s

    def meet(self) -> None:
        """Tell a sender that waits for it that message and receive have met, if they have."""
        sender, receive = self.sender, self.receive
        if sender is not None and receive is not None:
            self.sender = None
            if self.arrival_s is not None:
                self.receive = None
            sender.matched(self, receive.posted_s)

    def land(self, arrival_s: float) -> None:
        """Fix the arrival of the data; completes the receive with which it is paired."""
        self.arrival_s = arrival_s
        receive, self.receive = self.receive, None
        if receive is not None:
            receive.settle(self, arrival_s)


class Completion:
    """Something that ends at a time that may not be known yet: the kernel side of every request."""

    __slots__ = ("dependents", "finish_s", "kernel", "waiter")
    lost: bool = False  # whether it is known that only a deadline ends a wait for it

    def __init__(self, kernel: Kernel, finish_s: float | None = None) -> None:
        self.kernel, self.finish_s = kernel, finish_s
        self.waiter: Task | None = None
        self.dependents: list[AllOf] | None = None

    def final(self) -> float:
        """Return the end of a completion whose end is known. A receive takes its message in now, if it has not yet."""
        assert self.finish_s is not None
        return self.finish_s

    def is_settled(self, time_s: float) -> bool:
        """Whether it is known now if it is over by a time, should nothing that is sent from now on come until then."""
        return self.finish_s is not None

    def over(self, now_s: float) -> bool:
        """Whether it is over at a time of its rank's clock; if so, what it takes is taken in."""
        return self.finish_s is not None and self.finish_s <= now_s and self.final() <= now_s

    def complete(self, finish_s: float) -> None:
        """Fix the end and wake the task that waits for it."""
        self.finish_s = finish_s
        if self.waiter is not None:
            self.kernel.resume(self.waiter)
        if self.dependents is not None:
            for dependent in self.dependents:
                dependent.part_over()

    def reopen(self) -> None:
        """Forget the end: a receive's match that lay in the future was undone (see `matching`)."""
        self.finish_s = None
        for dependent in self.dependents or ():
            dependent.reopen()


class Uncertain(Completion):
    """A completion that may never come, because a fault of a link has lost what it depends on."""

    __slots__ = ("lost",)

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.lost = False

    def lose(self) -> None:
        """Take note that something is lost on which it depends: only the deadline ends a wait for it."""
        self.lost = True
        if self.waiter is not None:
            self.kernel.bound(self.waiter)


class AllOf(Completion):
    """Over when all its parts are."""

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
        """Return the last of the parts' ends."""
        self.finish_s = max([part.final() for part in self.parts], default=0.0)
        return self.finish_s


class Receive(Completion):
    """A posted receive, complete once its message's data have arrived."""

    __slots__ = ("message", "nic", "number", "posted_s", "source", "stays_s", "tag")

    def __init__(self, kernel: Kernel, source: int, tag: int, posted_s: float) -> None:
        self.kernel, self.source, self.tag, self.posted_s = kernel, source, tag, posted_s
        self.finish_s = self.waiter = self.dependents = None
        self.stays_s = posted_s  # until then it is sure not to be withdrawn
        self.message: Message | None = None
        self.nic: ReceivingNic | None = None  # that must let the message in; None: it lets in all at once
        self.number = 0

    @property
    def matched_s(self) -> float:
        """When it meets the message with which it is paired."""
        if self.message is None:
            return self.posted_s
        return max(self.posted_s, self.message.envelope_s)

    def accepts(self, message: Message) -> bool:
        """Whether source and tag fit."""
        return (self.source == message.source or self.source == ANY_SOURCE) and (
            self.tag == message.tag or self.tag == ANY_TAG
        )

    def take(self, message: Message) -> None:
        """Pair with a message: for good, once the two have met."""
        self.message, arrival_s = message, message.arrival_s
        if arrival_s is None or message.sender is not None:
            message.receive = self
        if arrival_s is not None:
            self.settle(message, arrival_s)

    def release(self) -> Message:
        """Undo the pair; return the message."""
        message = self.message
        assert message is not None
        self.message = message.receive = None
        self.reopen()
        return message

    def settle(self, message: Message, arrival_s: float) -> None:
        """Complete, now that the arrival of its message's data is known."""
        if self.finish_s is None:
            posted_s = self.posted_s
            finish_s = (arrival_s if arrival_s > posted_s else posted_s) + message.receive_s
            if self.waiter is None and self.dependents is None:  # `complete`, with nobody to be told
                self.finish_s = finish_s
            else:
                self.complete(finish_s)

    def final(self) -> float:
        """Return when the data are in the program's hands; the NIC is booked for them."""
        finish_s, message = self.finish_s, self.message
        # Not when the message arrives but when the program takes it: the order among messages that overlap is the
        # receiving program's own. So no event is needed to decide it, and the rank may still run ahead.
        if message is not None and message.drain_s and self.nic is not None:
            arrival_s, posted_s = message.arrival_s, self.posted_s
            assert arrival_s is not None
            message.arrival_s = arrival_s = self.nic.admit(arrival_s, message.drain_s)
            message.drain_s = 0.0
            self.finish_s = finish_s = (arrival_s if arrival_s > posted_s else posted_s) + message.receive_s
        assert finish_s is not None
        return finish_s
