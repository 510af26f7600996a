"""How a message travels: eager, rendezvous, synchronous; one NIC per rank. Where messages meet: `contention`.

An eager message leaves at once and its arrival is known when it is sent. A rendezvous asks first: its data start when
the receive is posted and the answer is back, and travel on a lane of their own, so that a small message does not wait
behind bulk data. Costs come from the platform's network (α, β, L, o, g, G live there).

Ranks, messages and costs are known here; buffers and communicators' calls are not.
"""

from __future__ import annotations

from enum import Enum
from heapq import heappop, heappush
from zlib import crc32

from spawnsim.virtual.digest import SEND, SHORT_NBYTES
from spawnsim.virtual.engine.completion import Completion, Message
from spawnsim.virtual.engine.event_queue import DECIDING
from spawnsim.virtual.engine.matching import Mailbox
from spawnsim.virtual.engine.world import Rank, World


class Mode(Enum):
    """MPI's send modes, as far as they differ on the wire."""

    STANDARD = "standard"
    SYNCHRONOUS = "synchronous"
    LOCAL = "local"  # buffered and ready sends: complete at once


STANDARD, SYNCHRONOUS, LOCAL = Mode.STANDARD, Mode.SYNCHRONOUS, Mode.LOCAL


class Transfer(Completion):
    """A send in progress. Complete when the sender may go on."""

    __slots__ = ("dest", "message", "source", "world")

    def __init__(self, world: World, source: Rank, dest: Rank) -> None:
        super().__init__(world.kernel)
        self.world, self.source, self.dest = world, source, dest
        self.message: Message

    @property
    def pair(self) -> tuple[int, int]:
        """The world ranks of sender and receiver."""
        return self.source.id, self.dest.id


class Acknowledged(Transfer):
    """An eager synchronous send: complete when the answer of the matching receive is back."""

    __slots__ = ()

    def matched(self, message: Message, posted_s: float) -> None:
        """The acknowledgement starts when message and receive have met."""
        back = self.world.cost(self.dest.id, self.source.id, 0)
        self.complete(max(message.envelope_s, posted_s) + back[2])


class Rendezvous(Transfer):
    """A large send: request to send, clear to send, data."""

    __slots__ = ("number",)

    def __init__(self, world: World, source: Rank, dest: Rank) -> None:
        super().__init__(world, source, dest)
        self.number = (
            source.messages
        )  # of the sender's messages: the order of those that may start at one time

    def matched(self, message: Message, posted_s: float) -> None:
        """Schedule the data: they start when the clear-to-send is back at the sender."""
        back = self.world.cost(self.dest.id, self.source.id, 0)
        start_s = max(message.envelope_s, posted_s) + back[2]
        heappush(self.source.cleared, (start_s, self.number, self))
        self.kernel.env.at(start_s, DECIDING + self.source.id, self._start_first)

    def _start_first(self) -> None:
        """Start what was cleared first; of those cleared at one time, what was sent first."""
        start_s, _, transfer = heappop(self.source.cleared)
        transfer._start(start_s)

    def _start(self, start_s: float) -> None:
        _, inject_s, flight_s, _, drain_s = self.world.cost(self.source.id, self.dest.id, self.message.nbytes)
        self.message.drain_s = drain_s
        if self.dest is not self.source:
            start_s = max(start_s, self.source.bulk_free_s)
            self.source.bulk_free_s = start_s + inject_s
        if self.source.death_s < start_s + inject_s:
            return  # its memory, from which the data come, ends before they have left
        if self.world.contention is not None:
            self.world.contention.stream(self, start_s + inject_s, start_s + flight_s)
        else:
            self.complete(start_s + inject_s)
            self.message.land(start_s + flight_s)


def send(world: World, mailbox: Mailbox, message: Message, mode: Mode = STANDARD) -> Transfer | None:
    """Send a message from the running task to the owner of a mailbox.

    Returns what to wait for, or None if the send is complete already.
    """
    kernel, dest, nbytes = world.kernel, mailbox.rank, message.nbytes
    task = kernel.current
    if world.instant and task.clock > kernel.env.now:  # a look has just cost time
        kernel.observe()
    source = world.ranks[task.rank]
    now_s = task.clock
    rendezvous = nbytes > world.network.eager_bytes and mode is not LOCAL
    onto_wire = 0 if rendezvous else nbytes
    send_s, inject_s, flight_s, receive_s, drain_s = world.cost(task.rank, dest, onto_wire)
    begin_s = now_s
    if dest != task.rank:  # a message to oneself meets no NIC
        if source.nic_free_s > now_s:
            begin_s = source.nic_free_s
        source.nic_free_s = begin_s + inject_s
    message.envelope_s = begin_s + flight_s
    message.receive_s = receive_s
    message.drain_s = drain_s
    source.messages += 1
    source.nbytes += nbytes
    digest, payload = source.digest, message.payload
    digest.note((now_s, SEND, dest, nbytes, message.tag))
    if nbytes <= SHORT_NBYTES and type(payload) is bytes:  # `digest.cover`, without the calls
        digest.contents = crc32(payload, digest.contents)
    else:
        digest.cover(payload)
    transfer: Transfer | None = None
    if rendezvous:
        transfer = Rendezvous(world, source, world.ranks[dest])
    else:
        message.arrival_s = message.envelope_s
        if mode is SYNCHRONOUS:
            transfer = Acknowledged(world, source, world.ranks[dest])
    if transfer is not None:
        transfer.message, message.sender = message, transfer  # type: ignore[assignment]
    kernel.idle = 0  # `kernel.effect()`, without the call
    task.budget -= 1
    if task.budget <= 0:
        kernel.observe()
    if send_s:
        source.advance_to(task, task.clock + send_s)
    if world.links is not None:
        world.links.carry(task.rank, mailbox, message)
    elif world.contention is not None:
        world.contention.carry(message, mailbox, task.rank)
    else:
        mailbox.deliver(message)
    if send_s and source.observers:
        kernel.observe()
    return transfer


def set_out(world: World, message: Message, mailbox: Mailbox, source: int) -> None:
    """Let a message from a world rank go its way, with whatever it meets there."""
    if world.contention is None:
        mailbox.deliver(message)
    else:
        world.contention.carry(message, mailbox, source)
