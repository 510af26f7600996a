"""Messages between all ranks over gloo: framed parcels received by one thread, and MPI's matching on top.

A parcel is a header with a small payload behind it (gloo takes messages shorter than the receive's memory), or a
header and one more message with the payload. The thread always receives, so no send waits for a receiver's program;
each kind of parcel has its receiver. The mailbox is the receiver of messages: which one belongs to which receive, by
context, source and tag, in order. One lock guards it; who waits for something to arrive waits on its condition.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.comm.failures import ERR_TYPE, CallError
from spawnsim.errors import RankFailed, SpawnsimError
from spawnsim.real.runtime.services import Counters

Bytes = NDArray[np.uint8]

FIELDS = struct.Struct("<8q")
INLINE_NBYTES = 1 << 16  # copied behind the header: cheaper than a second message, which waits for the first
HEADER_TAG, PAYLOAD_TAG = 1, 2
STOP = 0
KEPT = 128  # finished sends are reaped once this many are pending


@dataclass(slots=True)
class Parcel:
    """A header and what follows it: `kind` names the receiver, which gives the other numbers their meaning."""

    kind: int
    context: int = 0
    tag: int = 0
    nbytes: int = 0
    ident: int = 0
    first: int = 0
    second: int = 0
    third: int = 0
    source: int = -1
    token: Any = None  # between `begin` and `done`, the receiver's

    def pack_into(self, memory: Bytes) -> None:
        """Write the numbers as they travel."""
        where = (self.kind, self.context, self.tag, self.nbytes)
        FIELDS.pack_into(memory.data, 0, *where, self.ident, self.first, self.second, self.third)


class Receiver:
    """Takes parcels of one kind; called by the wire's thread (or the sender's, for parcels to its own rank)."""

    def begin(self, parcel: Parcel) -> Bytes | None:
        """Return memory of `parcel.nbytes` bytes for the payload, or None for new memory."""
        return None

    def done(self, parcel: Parcel, payload: Bytes) -> None:
        """Take the payload."""
        raise NotImplementedError


class Sent:
    """A payload on its way; `complete` once its memory may be used again, and then `then` is called."""

    __slots__ = ("complete", "then")

    def __init__(self, complete: bool, then: Callable[[], object] | None = None) -> None:
        self.complete, self.then = complete, then


class Wire:
    """One per rank: `send` from any thread, receivers by kind."""

    def __init__(self, group: Any, *, rank: int, size: int, wake: Callable[[], None]) -> None:
        self.rank, self.size = rank, size
        self.receivers: dict[int, Receiver] = {}
        self.fault = ""
        self.closing = False
        self.idents = itertools.count(1)
        self._group, self._wake = group, wake
        self._order = [threading.Lock() for _ in range(size)]  # header and payload stay together
        self._kept: deque[tuple[list[Any], Any, Sent]] = deque()
        self._reap = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to receive."""
        if self.size > 1:
            for name, run in (("wire", self._receive_all), ("reaper", self._reap_all)):
                self._threads.append(threading.Thread(target=run, name=f"spawnsim-{name}", daemon=True))
                self._threads[-1].start()

    # ------------------------------------------------------------------------------------------------ sending
    def send(
        self, to: int, parcel: Parcel, payload: Bytes | None = None, then: Callable[[], object] | None = None
    ) -> Sent:
        """Send a parcel; the payload's memory must stay as it is until the result is complete.

        `then` is called by another thread when a payload above `INLINE_NBYTES` to another rank has left. To one
        that has gone it raises `RankFailed`.
        """
        parcel.nbytes = 0 if payload is None else payload.nbytes
        if to == self.rank:
            self._deliver_here(parcel, payload)
            return Sent(True)
        small = parcel.nbytes <= INLINE_NBYTES
        memory = np.empty(FIELDS.size + (parcel.nbytes if small else 0), np.uint8)
        parcel.pack_into(memory)
        if small and payload is not None:
            memory[FIELDS.size :] = payload
        header, sent = torch.from_numpy(memory), Sent(small, then)
        self._put(to, [header] if small else [header, tensor_of(payload)], sent)
        return sent

    # Headers are received from any rank, a payload from the rank that its header came from, each in the order in which
    # they were sent. Hence a lock per receiving rank: two threads that send to one rank must not send their headers in
    # one order and their payloads in the other.

    def _put(self, to: int, tensors: list[torch.Tensor], sent: Sent) -> None:
        with self._order[to]:
            tags = (HEADER_TAG, PAYLOAD_TAG)
            try:
                works = [
                    self._group.send([tensor], to, tag) for tensor, tag in zip(tensors, tags, strict=False)
                ]
            except RuntimeError as error:
                raise rank_gone(f"send to rank {to} of the world", error) from None
        self._kept.append((works, tensors, sent))
        if len(tensors) > 1 or len(self._kept) > KEPT:
            self._reap.release()

    def _deliver_here(self, parcel: Parcel, payload: Bytes | None) -> None:
        parcel.source = self.rank
        receiver = self.receivers[parcel.kind]
        memory = receiver.begin(parcel)
        if memory is None:
            memory = np.empty(parcel.nbytes, np.uint8)
        if payload is not None:
            memory[:] = payload
        receiver.done(parcel, memory)

    def _reap_all(self) -> None:
        """Wait for sends, in order."""
        # In a thread, because gloo reports that a send is complete only to a caller that waits for it. Large payloads
        # are waited for at once, since a request depends on each; small ones were copied, so it is enough to let go of
        # their works from time to time. A work must not be dropped before it is complete: gloo then loses the message.
        while True:
            self._reap.acquire()
            while self._kept:
                works, _, sent = self._kept.popleft()
                try:
                    for work in works:
                        work.wait()
                    sent.complete = True
                    if sent.then is not None:
                        sent.then()
                except (RuntimeError, RankFailed) as error:
                    self._broken(error)
                    return
                self._wake()
            if self.closing:
                return

    # ---------------------------------------------------------------------------------------------- receiving
    def _receive_all(self) -> None:
        header = torch.empty(FIELDS.size + INLINE_NBYTES, dtype=torch.uint8)
        memory = header.numpy()
        try:
            while True:
                work = self._group.recv_anysource([header], HEADER_TAG)
                work.wait()
                parcel = Parcel(*FIELDS.unpack_from(memory.data))
                parcel.source = work._source_rank()
                if parcel.kind == STOP:
                    return
                self._take(parcel, memory)
        except (RuntimeError, RankFailed) as error:  # of what it receives, and of what it answers
            self._broken(error)

    def _take(self, parcel: Parcel, header: Bytes) -> None:
        receiver = self.receivers[parcel.kind]
        memory = receiver.begin(parcel)
        if memory is None:
            memory = torch.empty(parcel.nbytes, dtype=torch.uint8).numpy()  # torch aligns for every dtype
        if parcel.nbytes <= INLINE_NBYTES:
            memory[:] = header[FIELDS.size : FIELDS.size + parcel.nbytes]
        else:
            self._group.recv([tensor_of(memory)], parcel.source, PAYLOAD_TAG).wait()
        receiver.done(parcel, memory)

    def _broken(self, error: Exception) -> None:
        if not self.closing:
            self.fault = _reason(error)
        self._wake()

    # ------------------------------------------------------------------------------------------------ the end
    def stop(self) -> None:
        """End both threads. Collective: each rank tells the next one, once all have nothing more to send."""
        # The receiving thread is inside of a receive that gloo cannot cancel, so a message must end it; the group must
        # not be destroyed before, since a thread that is inside of gloo then ends the process by `terminate`.
        self.closing = True
        if self.size > 1 and not self.fault:
            # It was killed at its very end: it hears nothing, and its monitor tells of it.
            with suppress(RankFailed):
                self.send((self.rank + 1) % self.size, Parcel(STOP))
        self._reap.release()
        for thread in self._threads:
            thread.join()


REFUSALS = ("scalar type", "data type", "cannot use reduceop", "unsupported", "not supported")
"""Of a type or an op that a library has not, in lower case."""


def rank_gone(what: str, error: Exception) -> SpawnsimError:
    """Return spawnsim's error for one of gloo's or NCCL's: another rank's end of a connection is closed.

    Unless the library has refused the call as it is: then that is the program's error.
    """
    reason = _reason(error)
    if any(words in reason.lower() for words in REFUSALS):
        return CallError(ERR_TYPE, f"{what}: {reason}")
    return RankFailed((), f"{what}: a rank has gone: {reason}")


def _reason(error: Exception) -> str:
    """Return an error of gloo's without the place in its source, and without its advice."""
    return str(error).split("] ", 1)[-1].split(". ")[0]


def tensor_of(memory: Bytes | None) -> torch.Tensor:
    """Return bytes as a tensor over the same memory; read-only memory is copied."""
    if memory is None:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(memory if memory.flags.writeable else memory.copy())


MESSAGE, ACK = 1, 2
SYNCHRONOUS = 1


@dataclass(eq=False, slots=True)
class InboundMessage:
    """A message of this rank: known from its header on, readable once it has arrived."""

    source: int
    tag: int
    nbytes: int
    ack: int = 0  # the number that the sender of a synchronous message waits for
    data: Bytes | None = None
    direct: bool = False  # the data lie in the receive's own memory


@dataclass(eq=False, slots=True)
class PostedReceive:
    """A receive: what it takes, perhaps memory for the data, and the message that it was given."""

    source: int
    tag: int
    memory: Bytes | None = None
    message: InboundMessage | None = None

    def takes(self, message: InboundMessage) -> bool:
        """Whether a message may go to this receive."""
        return self.source in (ANY_SOURCE, message.source) and self.tag in (ANY_TAG, message.tag)

    @property
    def filled(self) -> bool:
        """Whether the message's data are there."""
        return self.message is not None and self.message.data is not None


@dataclass
class MatchQueues:
    """One communicator's open receives and unclaimed messages, each in order."""

    posted: list[PostedReceive] = field(default_factory=list)
    unexpected: list[InboundMessage] = field(default_factory=list)


class Mailbox(Receiver):
    """One per rank. `ranks[context]` maps the wire's ranks to the communicator's."""

    def __init__(self, condition: threading.Condition, wire: Wire, counters: Counters) -> None:
        self._condition, self._wire, self._counters = condition, wire, counters
        self._queues: dict[int, MatchQueues] = defaultdict(MatchQueues)
        self.ranks: dict[int, dict[int, int]] = {}
        self.members: dict[int, tuple[int, ...]] = {}
        self._acks: dict[int, Sent] = {}
        wire.receivers[MESSAGE] = self
        wire.receivers[ACK] = AckReceiver(self._acks, condition)

    def open(self, context: int, members: tuple[int, ...]) -> None:
        """Say who the ranks of a context are."""
        self.members[context] = members
        self.ranks[context] = {member: rank for rank, member in enumerate(members)}

    # ------------------------------------------------------------------------------------------------ sending
    def send(self, context: int, dest: int, tag: int, data: Bytes, *, synchronous: bool = False) -> Sent:
        """Send bytes; synchronously, the result is complete when a receive has been found."""
        if not context & 1:  # an exchange has counted itself, as one message
            self._counters.access(data)
        ident = next(self._wire.idents) if synchronous else 0
        waiting = Sent(False)
        if synchronous:
            self._acks[ident] = waiting
        # the sender's rank travels too, since a message may come before its context is open here
        me = self.ranks[context][self._wire.rank]
        parcel = Parcel(MESSAGE, context, tag, ident=ident, first=me)
        sent = self._wire.send(self.members[context][dest], parcel, data)
        return waiting if synchronous else sent

    # ---------------------------------------------------------------------------------- called by the wire's thread
    def begin(self, parcel: Parcel) -> Bytes | None:
        """Find the receive for a message that comes in; it goes straight to that receive's memory if it fits."""
        # Matching happens here, once per message and in the order of arrival: gloo delivers the messages of one sender
        # in order, so this is MPI's order. The data may still be under way when a receive is matched.
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
        """Hand over the data."""
        with self._condition:
            parcel.token.data = payload
            self._condition.notify_all()

    def _acknowledge(self, message: InboundMessage, sender: int) -> None:
        if message.ack:
            self._wire.send(sender, Parcel(ACK, ident=message.ack))
            message.ack = 0

    # ---------------------------------------------------------------------------------------------- receiving
    def post(self, context: int, receive: PostedReceive) -> None:
        """Open a receive; it takes the first unclaimed message that fits."""
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
        """Return the first unclaimed message that such a receive would get; it stays."""
        wanted = PostedReceive(source, tag)
        with self._condition:
            return next(
                (message for message in self._queues[context].unexpected if wanted.takes(message)), None
            )

    def claim(self, context: int, source: int, tag: int) -> PostedReceive | None:
        """Return a receive that was given the first fitting message, or None if there is none."""
        receive = PostedReceive(source, tag)
        with self._condition:  # re-entrant: nothing comes between the look and the claim
            if self.peek(context, source, tag) is None:
                return None
            self.post(context, receive)
        return receive

    def clear(self) -> int:
        """Drop all unclaimed messages whose data are there; return how many. Synchronous sends of them complete."""
        dropped: list[tuple[InboundMessage, int]] = []
        with self._condition:
            for context, queues in self._queues.items():
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
        """Complete the send."""
        with self._condition:
            sent = self._waiting.pop(parcel.ident, None)
            if sent is not None:
                sent.complete = True
            self._condition.notify_all()


def as_payload(data: Any) -> Bytes:
    """Return bytes-like data as an array of bytes."""
    return np.frombuffer(data, np.uint8)
