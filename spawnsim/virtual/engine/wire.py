"""How a message travels: eager, rendezvous, synchronous; one NIC per rank. Where messages meet: `contention`.

An eager message leaves at once and its arrival is known when it is sent. A rendezvous asks first: its data start when
the receive is posted and the answer is back. Costs come from the platform's network (α, β, L, o, g, G live there).
"""

from __future__ import annotations

from enum import Enum
from heapq import heappop, heappush

from spawnsim.phantoms import PhantomArray
from spawnsim.virtual.digest import SEND, SHORT_NBYTES, crc32, packed
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
        return self.source.id, self.dest.id

    def answered_s(self, message: Message, posted_s: float) -> float:
        """Return when an answer without data is back that starts when message and receive have met."""
        world, met_s = self.world, max(message.envelope_s, posted_s)
        if world.cost_at is None:
            return met_s + world.cost(self.dest.id, self.source.id, 0)[2]
        return met_s + world.cost_at(self.dest.id, self.source.id, 0, met_s)[2]


class Acknowledged(Transfer):
    """An eager synchronous send: complete when the answer of the matching receive is back."""

    __slots__ = ()

    def matched(self, message: Message, posted_s: float) -> None:
        self.complete(self.answered_s(message, posted_s))


class Rendezvous(Transfer):
    """A large send: request to send, clear to send, data."""

    __slots__ = ("number",)

    def __init__(self, world: World, source: Rank, dest: Rank) -> None:
        super().__init__(world, source, dest)
        # Of the sender's messages: the order of those that may start at one time.
        self.number = source.messages

    def matched(self, message: Message, posted_s: float) -> None:
        """Schedule the data: they start when the clear-to-send is back at the sender."""
        start_s = self.answered_s(message, posted_s)
        # Several rendezvous of one sender may be cleared for the same time, by receivers that ran in any order. They
        # start in the order sent, so the choice waits until all ranks have acted at that time (DECIDING).
        heappush(self.source.cleared, (start_s, self.number, self))
        self.kernel.env.at(start_s, DECIDING + self.source.id, self._start_first)

    def _start_first(self) -> None:
        """Start what was cleared first; of those cleared at one time, what was sent first."""
        start_s, _, transfer = heappop(self.source.cleared)
        transfer._start(start_s)

    def _start(self, start_s: float) -> None:
        key = self.source.id, self.dest.id, self.message.nbytes
        _, inject_s, flight_s, _, drain_s = self.world.cost(*key)
        # Bulk data queue behind bulk data alone (`bulk_free_s`), not behind small messages (`nic_free_s`). When they
        # start depends on the receiver; a small message that is sent later and starts earlier would otherwise have to
        # wait for a decision that has not been taken yet. Real NICs interleave packets of both, too.
        if self.dest is not self.source:
            start_s = max(start_s, self.source.bulk_free_s)
            if self.world.cost_at is not None:
                _, inject_s, flight_s, _, drain_s = self.world.cost_at(*key, start_s)
            self.source.bulk_free_s = start_s + inject_s
        self.message.drain_s = drain_s
        # The data come from the sender's memory: if it dies before the last byte has left, they never arrive.
        if self.source.death_s < start_s + inject_s:
            return
        if self.world.contention is not None:
            self.world.contention.stream(self, start_s + inject_s, start_s + flight_s)
        else:
            self.complete(start_s + inject_s)
            self.message.land(start_s + flight_s)


def send(world: World, mailbox: Mailbox, message: Message, mode: Mode = STANDARD) -> Transfer | None:
    """Send a message from the running task to the owner of a mailbox.

    Returns:
        What to wait for, or None if the send is complete already.
    """
    # A send is an effect: it runs ahead of SimPy's clock. What it costs and when it arrives depend on this rank's own
    # past alone (its clock, its NIC), so they are known now and no event is needed; who receives it, and when, is the
    # mailbox's business. This is the hottest function of a run, hence the calls written out below.
    kernel, dest, nbytes = world.kernel, mailbox.rank, message.nbytes
    task = kernel.current
    sender = task.rank
    # On a network without latency a message can be seen at the time of its send, so nothing may run ahead there. A look
    # has just cost time without waiting for it.
    if world.instant and task.clock > kernel.env.now:
        kernel.observe()
    source = world.ranks[sender]
    now_s = begin_s = task.clock
    # A buffered or ready send completes locally (MPI 4.1, 3.4), so it never asks first, whatever its size.
    rendezvous = nbytes > world.network.eager_bytes and mode is not LOCAL
    onto_wire = 0 if rendezvous else nbytes
    send_s, inject_s, flight_s, receive_s, drain_s = world.cost(sender, dest, onto_wire)
    if dest != sender:  # a message to oneself meets no NIC
        if source.nic_free_s > now_s:
            begin_s = source.nic_free_s
        if world.cost_at is not None:
            _, inject_s, flight_s, _, drain_s = world.cost_at(sender, dest, onto_wire, begin_s)
        source.nic_free_s = begin_s + inject_s
    message.envelope_s, message.receive_s, message.drain_s = begin_s + flight_s, receive_s, drain_s
    source.messages += 1
    source.nbytes += nbytes
    digest, payload = source.digest, message.payload
    digest.count += 1  # `digest.note`, without the call
    digest.update(packed(now_s, SEND, dest, nbytes, message.tag))
    if nbytes <= SHORT_NBYTES and type(payload) is bytes:  # `digest.cover`, without the calls
        digest.contents = crc32(payload, digest.contents)
    elif type(payload) is not PhantomArray:  # which has none
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
    # The sender's clock moves before the message is delivered: if the sender dies while it sends (`advance_to` raises),
    # its message never leaves.
    kernel.idle = 0  # `kernel.effect()`, without the call
    task.budget -= 1
    if task.budget <= 0:
        kernel.spent(task)
    if send_s:
        source.advance_to(task, task.clock + send_s)
    if world.links is not None:
        world.links.carry(sender, mailbox, message)
    elif world.contention is not None:
        world.contention.carry(message, mailbox, sender)
    else:
        mailbox.deliver(message)
    # Others may look at this rank's memory while its processor was busy sending: what it does next happens after that.
    if send_s and source.observers:
        kernel.observe()
    return transfer


def set_out(world: World, message: Message, mailbox: Mailbox, source: int) -> None:
    """Let a message from a world rank go its way, with whatever it meets there."""
    if world.contention is None:
        mailbox.deliver(message)
    else:
        world.contention.carry(message, mailbox, source)
