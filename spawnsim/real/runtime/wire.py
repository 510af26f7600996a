"""The transport of messages between ranks, and the matching of messages with receives.

A backend provides a `Wire`, which sends parcels and delivers arriving parcels. On top of it, the `Mailbox` matches
messages with receives as MPI does, by context, source and tag, in order, and answers probes. One lock guards it; a
thread that waits for an arrival waits on its condition.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.real.runtime.services import Counters

Bytes = NDArray[np.uint8]
INLINE_NBYTES = 1 << 16  # a payload up to this size is copied when it is sent


def as_payload(data: Any) -> Bytes:
    """Return bytes-like data as an array of bytes."""
    return np.frombuffer(data, np.uint8)


@dataclass(slots=True)
class Parcel:
    """The header of a payload: `kind` selects the receiver, which defines the meaning of the other numbers."""

    kind: int
    context: int = 0
    tag: int = 0
    nbytes: int = 0
    ident: int = 0
    first: int = 0
    second: int = 0
    third: int = 0
    source: int = -1
    token: Any = None  # for the receiver, between `begin` and `done`


class Receiver:
    """Takes parcels of one kind; called by the wire's thread (or the sender's, for parcels to its own rank)."""

    def begin(self, parcel: Parcel) -> Bytes | None:
        """Return memory of `parcel.nbytes` bytes for the payload, or None for new memory."""
        return None

    def done(self, parcel: Parcel, payload: Bytes) -> None:
        raise NotImplementedError


class Sent:
    """A payload in transit; once its memory may be reused, it is `complete` and `then` is called."""

    __slots__ = ("complete", "then")

    def __init__(self, complete: bool, then: Callable[[], object] | None = None) -> None:
        self.complete, self.then = complete, then

    def finish(self) -> None:
        self.complete = True
        if self.then is not None:
            self.then()


class Wire:
    """Parcels from any thread of a rank to any rank, in order between two ranks: what a backend provides.

    Attributes:
        receivers: the receiver of arriving parcels, by kind.
        fault: the reason why receiving has failed for good; "" while it works.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.receivers: dict[int, Receiver] = {}
        self.fault = ""
        self.idents = itertools.count(1)

    # ------------------------------------------------------------------------------------------ of each backend
    def carry(self, to: int, parcel: Parcel, payload: Bytes | None, sent: Sent) -> None:
        """Send to another rank, without waiting for its program; `sent.finish()` when the payload has left.

        A payload of up to `INLINE_NBYTES` has left when this returns (`sent` is already complete). The other side calls
        `receive`, in one thread. If the rank has gone, this raises `RankFailed`.
        """
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """End receiving. Collective, once no rank has anything more to send."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------------- for its users
    def send(
        self, to: int, parcel: Parcel, payload: Bytes | None = None, then: Callable[[], object] | None = None
    ) -> Sent:
        """Send a parcel; the payload's memory must not change until the result is complete.

        `then` is called when a payload above `INLINE_NBYTES` to another rank has left, by any thread.
        """
        parcel.nbytes = 0 if payload is None else payload.nbytes
        if to == self.rank:
            parcel.source = self.rank
            self.receive(parcel, payload)
            return Sent(True)
        sent = Sent(parcel.nbytes <= INLINE_NBYTES, then)
        self.carry(to, parcel, payload, sent)
        return sent

    def receive(self, parcel: Parcel, payload: Bytes | None) -> None:
        """Deliver an arrived parcel with its payload, which is copied."""
        receiver = self.receivers[parcel.kind]
        memory = receiver.begin(parcel)
        if memory is None:
            memory = np.empty(parcel.nbytes, np.uint8)
        if payload is not None:
            memory[:] = payload
        receiver.done(parcel, memory)


MESSAGE, ACK = 1, 2


@dataclass(eq=False, slots=True)
class InboundMessage:
    """A message to this rank: known once its header has arrived, readable once its data have."""

    source: int
    tag: int
    nbytes: int
    ack: int = 0  # the number that the sender of a synchronous message waits for
    data: Bytes | None = None
    direct: bool = False  # the data lie in the receive's own memory


@dataclass(eq=False, slots=True)
class PostedReceive:
    """A posted receive: its source and tag, optional memory for the data, and the matched message."""

    source: int
    tag: int
    memory: Bytes | None = None
    message: InboundMessage | None = None

    def takes(self, message: InboundMessage) -> bool:
        return self.source in (ANY_SOURCE, message.source) and self.tag in (ANY_TAG, message.tag)


@dataclass
class MatchQueues:
    """One communicator's open receives and unclaimed messages, each in order."""

    posted: list[PostedReceive] = field(default_factory=list)
    unexpected: list[InboundMessage] = field(default_factory=list)


class Mailbox(Receiver):
    """One per rank. `members[context]`: the wire's ranks of a communicator; `ranks[context]`: the inverse mapping.

    Contexts are numbers of communicators. Messages with an odd context belong to a collective, which is counted itself.
    """

    def __init__(self, condition: threading.Condition, wire: Wire, counters: Counters) -> None:
        self._condition, self._wire, self._counters = condition, wire, counters
        self._queues: dict[int, MatchQueues] = defaultdict(MatchQueues)
        self.ranks: dict[int, dict[int, int]] = {}
        self.members: dict[int, tuple[int, ...]] = {}
        self._acks: dict[int, Sent] = {}
        wire.receivers[MESSAGE] = self
        wire.receivers[ACK] = AckReceiver(self._acks, condition)

    def open(self, context: int, members: tuple[int, ...]) -> None:
        self.members[context] = members
        self.ranks[context] = {member: rank for rank, member in enumerate(members)}

    # ------------------------------------------------------------------------------------------------ sending
    def send(self, context: int, dest: int, tag: int, data: Bytes, *, synchronous: bool = False) -> Sent:
        """Send bytes; synchronously, the result is complete when a receive has been found."""
        if not context & 1:
            self._counters.access(data)
        ident = next(self._wire.idents) if synchronous else 0
        waiting = Sent(False)
        if synchronous:
            self._acks[ident] = waiting
        # The sender's rank is sent too, since a message may arrive before its context is open here.
        me = self.ranks[context][self._wire.rank]
        parcel = Parcel(MESSAGE, context, tag, ident=ident, first=me)
        sent = self._wire.send(self.members[context][dest], parcel, data)
        return waiting if synchronous else sent

    # ---------------------------------------------------------------------------------- called by the wire's thread
    def begin(self, parcel: Parcel) -> Bytes | None:
        """Find the receive for an incoming message; the data go directly to that receive's memory if they fit."""
        # Matching happens here, once per message and in the order of arrival: gloo delivers the messages of one sender
        # in order, so this is MPI's order. The data may still be in transit when a receive is matched.
        message = InboundMessage(parcel.first, parcel.tag, parcel.nbytes, parcel.ident)
        with self._condition:
            queues = self._queues[parcel.context]
            receive = next((receive for receive in queues.posted if receive.takes(message)), None)
            if receive is None:
                queues.unexpected.append(message)
            else:
                queues.posted.remove(receive)
                receive.message = message
            if parcel.nbytes > INLINE_NBYTES:  # else the data are here already, and `done` wakes for both
                self._condition.notify_all()
        parcel.token = message
        if receive is None:
            return None
        self._acknowledge(message, parcel.source)
        if receive.memory is None or receive.memory.nbytes < parcel.nbytes:
            return None
        message.direct = True
        return receive.memory[: parcel.nbytes]

    def done(self, parcel: Parcel, payload: Bytes) -> None:
        with self._condition:
            parcel.token.data = payload
            self._condition.notify_all()

    def _acknowledge(self, message: InboundMessage, sender: int) -> None:
        if message.ack:
            self._wire.send(sender, Parcel(ACK, ident=message.ack))
            message.ack = 0

    # ---------------------------------------------------------------------------------------------- receiving
    def post(self, context: int, receive: PostedReceive) -> None:
        """Open a receive; it takes the first unclaimed message that matches."""
        if not context & 1:
            self._counters.received += 1
        with self._condition:
            queues = self._queues[context]
            message = next((message for message in queues.unexpected if receive.takes(message)), None)
            if message is None:
                queues.posted.append(receive)
                return
            queues.unexpected.remove(message)
            receive.message = message
        self._acknowledge(message, self.members[context][message.source])

    def peek(self, context: int, source: int, tag: int) -> InboundMessage | None:
        """Return the first unclaimed message that such a receive would get, and leave it in the queue."""
        wanted = PostedReceive(source, tag)
        with self._condition:
            return next(
                (message for message in self._queues[context].unexpected if wanted.takes(message)), None
            )

    def claim(self, context: int, source: int, tag: int) -> PostedReceive | None:
        """Return a receive with the first matching message, or None if no message matches."""
        receive = PostedReceive(source, tag)
        with self._condition:  # re-entrant, which makes lookup and claim one step
            if self.peek(context, source, tag) is None:
                return None
            self.post(context, receive)
        return receive

    def clear(self) -> int:
        """Drop the program's unclaimed messages whose data are there; return how many. Synchronous sends complete.

        Messages of collectives stay: a faster rank may already be in a collective that follows the end of the programs.
        """
        dropped: list[tuple[InboundMessage, int]] = []
        with self._condition:
            for context, queues in self._queues.items():
                if context & 1:
                    continue
                whole = [message for message in queues.unexpected if message.data is not None]
                queues.unexpected = [message for message in queues.unexpected if message.data is None]
                dropped += [(message, self.members[context][message.source]) for message in whole]
        for message, sender in dropped:
            self._acknowledge(message, sender)
        return len(dropped)

    def cancel(self, context: int, receive: PostedReceive) -> bool:
        """Close a receive that has no message; return whether it had none."""
        with self._condition:
            posted = self._queues[context].posted
            if receive not in posted:
                return False
            posted.remove(receive)
            return True


class AckReceiver(Receiver):
    """Receiver of the acknowledgements of synchronous sends."""

    def __init__(self, waiting: dict[int, Sent], condition: threading.Condition) -> None:
        self._waiting, self._condition = waiting, condition

    def done(self, parcel: Parcel, payload: Bytes) -> None:
        with self._condition:
            sent = self._waiting.pop(parcel.ident, None)
            if sent is not None:
                sent.complete = True
            self._condition.notify_all()
