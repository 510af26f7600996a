"""How the data of one-sided accesses travel: through the sender's card, the wire, and the receiver's card.

They meet other traffic there as messages do, under each model of contention. Data above the eager threshold take the
lane of rendezvous data. What one rank sends to one target arrives in the order sent, as on a reliable connection.

This room knows ranks, cards and times. It must not know locks or what an access does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spawnsim.virtual.engine.completion import Message, ReceivingNic, Uncertain
from spawnsim.virtual.engine.event_queue import ARRIVING
from spawnsim.virtual.engine.kernel import Kernel
from spawnsim.virtual.engine.world import Rank, World

Landed = Callable[[float], None]


class Packet(Message):
    """Data on their way between two ranks; to a model of contention, what the data of a rendezvous are."""

    def __init__(self, source: Rank, dest: Rank, nbytes: int, landed: Landed) -> None:
        super().__init__(source.id, 0, None, nbytes)
        self.message: Message = self
        self.pair, self._landed = (source.id, dest.id), landed

    def complete(self, finish_s: float) -> None:
        """Do nothing: nobody waits until the data have left."""

    def land(self, arrival_s: float) -> None:
        """Take note of the arrival."""
        self._landed(arrival_s)


class Passage(NamedTuple):
    """What it takes to send data from a time on: see `network.cost`."""

    send_s: float
    left_s: float
    arrival_s: float
    drain_s: float


def inject(world: World, link: tuple[Rank, Rank], nbytes: int, now_s: float) -> Passage:
    """Put data on the card of a link's source, behind what it sends already."""
    source, dest = link
    send_s, inject_s, flight_s, _, drain_s = world.price(source.id, dest.id, nbytes)
    begin_s = now_s
    if source is dest:
        pass  # a copy in its own memory
    elif nbytes > world.network.eager_bytes:
        begin_s = max(now_s, source.bulk_free_s)
        source.bulk_free_s = begin_s + inject_s
    else:
        begin_s = max(now_s, source.nic_free_s)
        source.nic_free_s = begin_s + inject_s
    return Passage(send_s, begin_s + inject_s, begin_s + flight_s, drain_s)


class Answered(Uncertain):
    """What is over when an answer is back at the origin. Its card lets the answer in as the program takes it."""

    __slots__ = ("card", "drain_s")

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.card: ReceivingNic | None = None
        self.drain_s = 0.0

    def final(self) -> float:
        """Return the end; the card is booked now, if it has not been yet."""
        assert self.finish_s is not None
        if self.card is not None and self.drain_s:
            self.finish_s, self.drain_s = self.card.let_in(self.finish_s, self.drain_s), 0.0
        return self.finish_s


def answer(world: World, source: Rank, dest: Rank, nbytes: int, *, delay_s: float, to: Answered) -> None:
    """Send an answer, from now on; `to` is over when it is there."""
    _, left_s, arrival_s, drain_s = inject(world, (source, dest), nbytes, world.kernel.env.now)
    if world.contention is not None and nbytes:
        packet = Packet(source, dest, nbytes, to.complete)
        packet.drain_s = drain_s
        world.contention.stream(packet, left_s, arrival_s + delay_s)
    else:
        to.card, to.drain_s = world.cards.get(dest.id), drain_s
        to.complete(arrival_s + delay_s)


@dataclass(eq=False)
class Request:
    """A request under way to a target. `then` is called when it is there, and all sent before it are."""

    then: Callable[[], Any]
    here: bool = False
    lost: bool = False


@dataclass(eq=False)
class Connection:
    """From one origin to one target."""

    world: World
    origin: Rank
    target: Rank
    sent: int = 0
    _coming: deque[Request] = field(default_factory=deque)

    def send(self, request: Request, nbytes: int, *, delay_s: float = 0.0) -> Passage:
        """Send a request with so many bytes, from the running task's clock on."""
        world, origin, target = self.world, self.origin, self.target
        self.sent += 1
        passage = inject(world, (origin, target), nbytes, world.kernel.current.clock)
        request.lost = request.lost or (bool(self._coming) and self._coming[-1].lost)
        self._coming.append(request)
        if request.lost:
            return passage
        arrival_s, drain_s = passage.arrival_s + delay_s, passage.drain_s
        if world.contention is not None and nbytes:
            packet = Packet(origin, target, nbytes, lambda time_s: self._at(time_s, request))
            packet.drain_s = drain_s
            world.contention.stream(packet, passage.left_s, arrival_s)
        elif drain_s and world.cards:
            self._event(arrival_s, lambda: self._let_in(arrival_s, drain_s, request))
        else:
            self._at(arrival_s, request)
        return passage

    def _event(self, time_s: float, action: Callable[[], None]) -> None:
        env = self.world.kernel.env
        env.at(max(time_s, env.now), ARRIVING + self.origin.id, action)

    def _at(self, time_s: float, request: Request) -> None:
        self._event(time_s, lambda: self._arrive(request))

    def _let_in(self, arrival_s: float, drain_s: float, request: Request) -> None:
        """The last byte would be there if the card had nothing else to let in."""
        let_in_s = self.world.cards[self.target.id].let_in(arrival_s, drain_s)
        if let_in_s > arrival_s:
            self._at(let_in_s, request)
        else:
            self._arrive(request)

    def _arrive(self, request: Request) -> None:
        request.here = True
        while self._coming and self._coming[0].here:
            self._coming.popleft().then()
