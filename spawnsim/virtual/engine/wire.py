"""The protocols of a message: eager, rendezvous, synchronous; one NIC per rank. Contention: see `contention`.

An eager message leaves at once, and its arrival is known when it is sent. A rendezvous first sends a request: its data
start when the receive is posted and the answer has returned. Costs come from the platform's network (the parameters α,
β, L, o, g, G belong to it).
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
    """A send in progress; complete when the sender may continue."""

    __slots__ = ("dest", "message", "source", "world")

    def __init__(self, world: World, source: Rank, dest: Rank) -> None:
        super().__init__(world.kernel)
        self.world, self.source, self.dest = world, source, dest
        self.message: Message

    @property
    def pair(self) -> tuple[int, int]:
        return self.source.id, self.dest.id

    def answered_s(self, message: Message, posted_s: float) -> float:
        """Return the arrival time of an answer without data that starts when message and receive have met."""
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
        # Number of the sender's message: the order of transfers that may start at the same time.
        self.number = source.messages

    def matched(self, message: Message, posted_s: float) -> None:
        """Schedule the data: they start when the clear-to-send is back at the sender."""
        start_s = self.answered_s(message, posted_s)
        # Several rendezvous of one sender may be cleared for the same time, by receivers that ran in any order. They
        # start in the order sent, so the choice waits until all ranks have acted at that time (DECIDING).
        heappush(self.source.cleared, (start_s, self.number, self))
        self.kernel.env.at(start_s, DECIDING + self.source.id, self._start_first)

    def _start_first(self) -> None:
        """Start the transfer that was cleared first; of transfers cleared at the same time, the one sent first."""
        start_s, _, transfer = heappop(self.source.cleared)
        transfer._start(start_s)

    def _start(self, start_s: float) -> None:
        key = self.source.id, self.dest.id, self.message.nbytes
        _, inject_s, flight_s, _, drain_s = self.world.cost(*key)
        # Bulk data queue only behind bulk data (`bulk_free_s`), not behind small messages (`nic_free_s`). Their start
        # depends on the receiver; otherwise a small message that is sent later and starts earlier would have to wait
        # for a decision that is still open. Real NICs interleave packets of both, too.
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
        The transfer to wait for, or None if the send is already complete.
    """
    # A send is an effect: it runs ahead of SimPy's clock. Its cost and arrival depend only on this rank's past (its
    # clock, its NIC), so they are known now and no event is needed; the mailbox decides which receive takes it, and
    # when. This is the hottest function of a run, so some calls below are inlined.
    kernel, dest, nbytes = world.kernel, mailbox.rank, message.nbytes
    task = kernel.current
    sender = task.rank
    # On a network without latency a message is visible at the time of its send, so nothing may run ahead. A poll has
    # just advanced the clock without waiting for SimPy's.
    if world.instant and task.clock > kernel.env.now:
        kernel.observe()
    source = world.ranks[sender]
    now_s = begin_s = task.clock
    # A buffered or ready send completes locally (MPI 4.1, 3.4), so it never asks first, whatever its size.
    rendezvous = nbytes > world.network.eager_bytes and mode is not LOCAL
    onto_wire = 0 if rendezvous else nbytes
    send_s, inject_s, flight_s, receive_s, drain_s = world.cost(sender, dest, onto_wire)
    if dest != sender:  # a message to the sender itself uses no NIC
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
    elif type(payload) is not PhantomArray:  # a phantom has no contents
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
    # The sender's clock moves before the message is delivered: if the sender dies during the send (`advance_to`
    # raises), its message never leaves.
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
    # Other ranks may access this rank's memory while its processor is busy sending: its next action happens after that.
    if send_s and source.observers:
        kernel.observe()
    return transfer


def set_out(world: World, message: Message, mailbox: Mailbox, source: int) -> None:
    """Deliver a message from a world rank, through the contention model if there is one."""
    if world.contention is None:
        mailbox.deliver(message)
    else:
        world.contention.carry(message, mailbox, source)
