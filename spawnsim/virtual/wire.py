"""How a message travels: eager, rendezvous, synchronous; one network card per rank.

An eager message leaves at once and its arrival is known when it is sent. A rendezvous asks first: its data start when
the receive is posted and the answer is back, and travel on a lane of their own, so that a small message does not wait
behind bulk data. Costs come from the platform's network (α, β, L, o, g, G live there).

This room knows ranks, messages and costs. It must not know buffers or communicators' calls.
"""

from __future__ import annotations

from enum import Enum

from spawnsim.virtual.matching import Completion, Mailbox, Message
from spawnsim.virtual.world import Rank, World


class Mode(Enum):
    """MPI's send modes, as far as they differ on the wire."""

    STANDARD = "standard"
    SYNCHRONOUS = "synchronous"
    LOCAL = "local"  # buffered and ready sends: complete at once


class Transfer(Completion):
    """A send in progress. Complete when the sender may go on."""

    __slots__ = ("dest", "message", "source", "world")

    def __init__(self, world: World, source: Rank, dest: Rank) -> None:
        super().__init__(world.kernel)
        self.world, self.source, self.dest = world, source, dest
        self.message: Message


class Acknowledged(Transfer):
    """An eager synchronous send: complete when the answer of the matching receive is back."""

    __slots__ = ()

    def matched(self, message: Message, posted_s: float) -> None:
        """The acknowledgement starts when message and receive have met."""
        back = self.world.network.cost(self.dest.id, self.source.id, 0)
        self.complete(max(message.envelope_s, posted_s) + back[2])


class Rendezvous(Transfer):
    """A large send: request to send, clear to send, data."""

    __slots__ = ()

    def matched(self, message: Message, posted_s: float) -> None:
        """Schedule the data: they start when the clear-to-send is back at the sender."""
        back = self.world.network.cost(self.dest.id, self.source.id, 0)
        start_s = max(message.envelope_s, posted_s) + back[2]
        self.kernel.env.at(start_s, self.source.id, lambda: self._start(start_s))

    def _start(self, start_s: float) -> None:
        _, inject_s, flight_s, _ = self.world.network.cost(self.source.id, self.dest.id, self.message.nbytes)
        start_s = max(start_s, self.source.bulk_free_s)
        self.source.bulk_free_s = start_s + inject_s
        self.complete(start_s + inject_s)
        self.message.land(start_s + flight_s)


def send(
    world: World, dest: Rank, mailbox: Mailbox, message: Message, mode: Mode = Mode.STANDARD
) -> Transfer | None:
    """Send a message from the running task. Returns what to wait for, or None if the send is complete already."""
    kernel = world.kernel
    task = kernel.current
    source = world.ranks[task.rank]
    rendezvous = message.nbytes > world.network.eager_bytes and mode is not Mode.LOCAL
    send_s, inject_s, flight_s, message.receive_s = world.network.cost(
        source.id, dest.id, 0 if rendezvous else message.nbytes
    )
    begin_s = task.clock if task.clock > source.nic_free_s else source.nic_free_s
    source.nic_free_s = begin_s + inject_s
    message.envelope_s = begin_s + flight_s
    source.messages += 1
    source.nbytes += message.nbytes
    source.trace.note((task.clock, 1, dest.id, message.nbytes, message.tag))
    transfer: Transfer | None = None
    if rendezvous:
        transfer = Rendezvous(world, source, dest)
    else:
        message.arrival_s = message.envelope_s
        if mode is Mode.SYNCHRONOUS:
            transfer = Acknowledged(world, source, dest)
    if transfer is not None:
        transfer.message, message.sender = message, transfer  # type: ignore[assignment]
    kernel.effect()
    if send_s:
        source.reach(task, task.clock + send_s)
        if source.company:
            kernel.observe()
    mailbox.deliver(message)
    return transfer
