"""When a target serves a one-sided access, in which order, and how the data travel there and back.

Passive-target progress is a parameter of the platform. With "poll" a target that computes serves an access only when
its block ends; with "async" or "hardware" at once. A rank that exposes memory does not run ahead: what it stores is
stored at its own time. Data go through the sender's card, the wire and the receiver's card, and meet other traffic
there as messages do; what one rank sends to one target arrives in the order sent, as on a reliable connection. Where
the network has a `window`, ranks of one node copy instead, each with its own processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spawnsim.comm.constants import LOCK_EXCLUSIVE
from spawnsim.comm.deferred import WAITING
from spawnsim.virtual.digest import ONE_SIDED
from spawnsim.virtual.engine.completion import Message, ReceivingNic, Uncertain
from spawnsim.virtual.engine.event_queue import ARRIVING, WAITED
from spawnsim.virtual.engine.kernel import Kernel
from spawnsim.virtual.engine.world import Rank, World
from spawnsim.virtual.faults import DELIVERED, Verdict
from spawnsim.virtual.faults.injection import ANSWER, REQUEST, can_be_damaged, damaged

OnArrival = Callable[[float], None]


class Packet(Message):
    """Data on their way between two ranks; to a model of contention, what the data of a rendezvous are."""

    def __init__(self, source: Rank, dest: Rank, nbytes: int, landed: OnArrival) -> None:
        super().__init__(source.id, 0, None, nbytes)
        self.message: Message = self
        self.pair, self._landed = (source.id, dest.id), landed

    def complete(self, finish_s: float) -> None:
        """Do nothing: nobody waits until the data have left."""

    def land(self, arrival_s: float) -> None:
        """Take note of the arrival."""
        self._landed(arrival_s)


class TransferTimes(NamedTuple):
    """What it takes to send data from a time on: see `network.cost`."""

    send_s: float
    left_s: float
    arrival_s: float
    drain_s: float


def inject(world: World, link: tuple[Rank, Rank], nbytes: int, now_s: float) -> TransferTimes:
    """Put data on the NIC of a link's source, behind what it sends already."""
    source, dest = link
    send_s, inject_s, flight_s, _, drain_s = world.cost(source.id, dest.id, nbytes)
    begin_s = now_s
    # Loopback uses no NIC: booking it would let a rank's access to its own part delay its messages.
    if source is dest:
        pass  # a copy in its own memory
    # Large data have a channel of their own, as the data of a rendezvous have: small ones that are sent later need
    # not wait for them.
    else:
        large = nbytes > world.network.eager_bytes
        begin_s = max(now_s, source.bulk_free_s if large else source.nic_free_s)
        if world.cost_at is not None:
            _, inject_s, flight_s, _, drain_s = world.cost_at(source.id, dest.id, nbytes, begin_s)
        if large:
            source.bulk_free_s = begin_s + inject_s
        else:
            source.nic_free_s = begin_s + inject_s
    return TransferTimes(send_s, begin_s + inject_s, begin_s + flight_s, drain_s)


class RoundTrip(Uncertain):
    """What is over when an answer is back at the origin. Its NIC lets the answer in as the program takes it."""

    __slots__ = ("drain_s", "nic")

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.nic: ReceivingNic | None = None
        self.drain_s = 0.0

    def final(self) -> float:
        """Return the end; the NIC is booked now, if it has not been yet."""
        assert self.finish_s is not None
        # Booked once, when the program takes the answer: under "serial" the order in which a program takes things
        # is the order on its NIC.
        if self.nic is not None and self.drain_s:
            self.finish_s, self.drain_s = self.nic.admit(self.finish_s, self.drain_s), 0.0
        return self.finish_s


def answer(world: World, source: Rank, dest: Rank, nbytes: int, *, delay_s: float, to: RoundTrip) -> None:
    """Send an answer, from now on; `to` is over when it is there."""
    _, left_s, arrival_s, drain_s = inject(world, (source, dest), nbytes, world.kernel.env.now)
    if world.contention is not None and nbytes:
        packet = Packet(source, dest, nbytes, to.complete)
        packet.drain_s = drain_s
        world.contention.stream(packet, left_s, arrival_s + delay_s)
    else:
        # Without a model the receiver's NIC is asked when the answer is taken (`RoundTrip.final`), which needs no
        # event.
        to.nic, to.drain_s = world.nic(dest.id), drain_s
        to.complete(arrival_s + delay_s)


@dataclass(eq=False, slots=True)
class AccessRequest:
    """A request under way to a target. `then` is called when it is there, and all sent before it are."""

    then: Callable[[], Any]
    here: bool = False
    lost: bool = False


@dataclass(eq=False, slots=True)
class Connection:
    """From one origin to one target."""

    world: World
    origin: Rank
    target: Rank
    sent: int = 0
    # A list, as there are few: a deque is ten times as large, even empty.
    _coming: list[AccessRequest] = field(default_factory=list)

    def send(
        self, request: AccessRequest, nbytes: int, *, copy_s: float | None, delay_s: float = 0.0
    ) -> TransferTimes:
        """Send a request with so many bytes, from the running task's clock on; `copy_s`: how long it copies instead."""
        world, origin, target = self.world, self.origin, self.target
        self.sent += 1
        now_s = world.kernel.current.clock
        if copy_s is None:
            passage = inject(world, (origin, target), nbytes, now_s)
        else:  # what is there when the copy ends is what it has read
            passage = TransferTimes(copy_s, now_s + copy_s, now_s + copy_s, 0.0)
        # A reliable connection hands nothing out behind what is lost, so what follows a lost request is lost with it.
        request.lost = request.lost or (bool(self._coming) and self._coming[-1].lost)
        # Queued although it is lost, for the next ones to see. It never arrives, so nothing behind it is served.
        self._coming.append(request)
        if request.lost:
            return passage
        arrival_s, drain_s = passage.arrival_s + delay_s, passage.drain_s
        if copy_s is None and world.contention is not None and nbytes:
            packet = Packet(origin, target, nbytes, lambda time_s: self._at(time_s, request))
            packet.drain_s = drain_s
            world.contention.stream(packet, passage.left_s, arrival_s)
        # An event, not a booking at once: requests are taken by no program, so the NIC lets them in in the order of
        # time.
        elif drain_s and world.nic(target.id) is not None:
            self._event(arrival_s, lambda: self._let_in(arrival_s, drain_s, request))
        else:
            self._at(arrival_s, request)
        return passage

    def _event(self, time_s: float, action: Callable[[], None]) -> None:
        env = self.world.kernel.env
        env.at(max(time_s, env.now), ARRIVING + self.origin.id, action)

    def _at(self, time_s: float, request: AccessRequest) -> None:
        self._event(time_s, lambda: self._arrive(request))

    def _let_in(self, arrival_s: float, drain_s: float, request: AccessRequest) -> None:
        """The last byte would be there if the NIC had nothing else to let in."""
        # Asked at the time of the event: requests of other ranks that came meanwhile have been booked before.
        nic = self.world.nic(self.target.id)
        assert nic is not None
        let_in_s = nic.admit(arrival_s, drain_s)
        if let_in_s > arrival_s:
            self._at(let_in_s, request)
        else:
            self._arrive(request)

    def _arrive(self, request: AccessRequest) -> None:
        request.here = True
        # MPI: accumulates of one origin to one target are ordered. A small request may be complete before a large
        # one that was sent earlier, so it is held back here.
        while self._coming and self._coming[0].here:
            self._coming.pop(0).then()


Action = Callable[[], None]
Serve = Callable[[Any], Any]  # from the data that came to those of the answer


@dataclass(eq=False, slots=True)
class Target:
    """The part of one rank in a window: its memory and its lock."""

    rank: Rank
    memory: Any  # flat uint8 array
    disp_unit: int
    regions: list[Any] = field(default_factory=list)  # attached memory of a dynamic window
    exclusive: int | None = None  # who holds the lock alone, as a world rank
    sharers: set[int] = field(default_factory=set)
    queue: list[tuple[int, bool, bool, Action]] = field(default_factory=list)  # (who, alone, keep, then)

    def free_for(self, who: int, alone: bool) -> bool:
        """Whether an access of `who` can be served now."""
        if self.exclusive is not None:
            return self.exclusive == who
        return not (alone and self.sharers - {who})

    def acquire(self, who: int, alone: bool, keep: bool, then: Action) -> None:
        """Serve `then` as soon as the lock lets `who` in, first come, first served; `keep` holds the lock after it."""
        # Behind a queue only holders of the lock get in: letting new sharers pass would starve a waiting exclusive
        # lock, and queueing a holder's access behind it would deadlock both.
        if self.free_for(who, alone) and (not self.queue or who in self.sharers or who == self.exclusive):
            self._admit(who, alone, keep, then)
        else:
            self.queue.append((who, alone, keep, then))

    def _admit(self, who: int, alone: bool, keep: bool, then: Action) -> None:
        if keep and alone:
            self.exclusive = who
        elif keep:
            self.sharers.add(who)
        # The lock is noted before the action runs, since that may send an answer and so let others ask.
        then()

    def release(self, who: int) -> None:
        """Give up the lock and let the next ones in."""
        if self.exclusive == who:
            self.exclusive = None
        self.sharers.discard(who)
        # In order, and only as long as the head fits: skipping a waiting exclusive lock would starve it.
        while self.queue and self.free_for(self.queue[0][0], self.queue[0][1]):
            self._admit(*self.queue.pop(0))


class Access(RoundTrip):
    """One access under way; over when its answer is back at the origin."""

    __slots__ = ("answer", "call", "copy_s", "data", "lock", "nbytes", "number", "serve", "target")

    def __init__(
        self,
        world: World,
        call: str,
        nbytes: tuple[int, int],
        serve: Serve,
        *,
        data: Any = None,
        lock: int = 0,
    ) -> None:
        """Prepare an access of so many bytes (there, back); `serve(data)` returns the answer's payload."""
        super().__init__(world.kernel)
        self.call, self.nbytes, self.serve, self.data, self.lock = call, nbytes, serve, data, lock
        self.number, self.answer = 0, None
        self.target: Target
        self.copy_s: float | None = None


@dataclass(eq=False)
class WindowState:
    """What all members of a window share. `targets` are in the order of the communicator."""

    world: World
    targets: list[Target]
    flavor: int
    number: int  # of the window's context
    shared: Any = None  # the memory of Allocate_shared
    _connections: dict[tuple[int, int], Connection] = field(default_factory=dict)  # by origin and place

    def answers_at(self, target: Target, time_s: float) -> float:
        """Return when a target serves what reaches it at `time_s`."""
        if self.world.platform.progress == "poll":
            return target.rank.answers_at(time_s)
        return time_s

    def request(self, origin: Rank, place: int, access: Access) -> Access:
        """Send an access from the running task. It is over when its answer is back at the origin."""
        access.target = self.targets[place]
        there, back = access.nbytes
        origin.messages += 1
        origin.nbytes += there + back
        origin.digest.note(
            (self.world.kernel.current.clock, ONE_SIDED, access.target.rank.id, there + back, 0)
        )
        # The origin's data count when they leave it, like a send's. The answer counts when it is taken.
        origin.digest.cover(access.data)
        self._send(origin, place, access, lambda: self._arrived(origin, access))
        return access

    def release(self, origin: Rank, place: int) -> None:
        """Send the end of a lock."""
        target = self.targets[place]
        end = Access(self.world, "Unlock", (0, 0), lambda data: None)
        # Through the same connection: a release that overtook the accesses before it would let the next holder in
        # too soon.
        self._send(origin, place, end, lambda: self._soon(target, lambda: target.release(origin.id)))

    def _send(self, origin: Rank, place: int, access: Access, then: Action) -> None:
        """Send a request."""
        # Made when first used: a window of 1,000 ranks has a million pairs, most of which never meet.
        connection = self._connections.get((origin.id, place))
        if connection is None:
            connection = Connection(self.world, origin, self.targets[place].rank)
            self._connections[origin.id, place] = connection
        # Numbered per connection: the draw of a fault is keyed by it and does not depend on what other ranks do.
        access.number = connection.sent
        verdict = DELIVERED
        if self.world.links is not None:
            now_s = self.world.kernel.current.clock
            verdict = self._judge((origin, connection.target), now_s, access, REQUEST)
        request = AccessRequest(then, lost=verdict.lost)
        there, back = access.nbytes
        access.copy_s = self.world.network.copy_s(origin.id, connection.target.id, there + back)
        passage = connection.send(request, there, copy_s=access.copy_s, delay_s=verdict.delay_s)
        if request.lost:
            access.lose()
        kernel = self.world.kernel
        kernel.effect()
        origin.advance_to(kernel.current, kernel.current.clock + passage.send_s)
        if passage.send_s or connection.target is origin:  # what it stores next comes behind
            kernel.observe()

    def _judge(self, link: tuple[Rank, Rank], now_s: float, access: Access, kind: int) -> Verdict:
        """Return what the link makes of one direction of an access; what it carries may be damaged."""
        links, (source, dest) = self.world.links, (link[0].id, link[1].id)
        key = kind, self.number, access.number
        verdict: Verdict = links.judge(source, dest, now_s, *key)
        payload = access.data if kind == REQUEST else access.answer
        if verdict.corrupt and can_be_damaged(payload):
            place = self.world.plan.chance(*key, source, dest)
            payload = damaged(payload, place, nan=verdict.nan)
        else:
            verdict = verdict._replace(corrupt=False)
        if kind == REQUEST:
            access.data = payload
        else:
            access.answer = payload
        links.tell(verdict, source, dest, now_s, call=access.call, number=access.number)
        return verdict

    def _arrived(self, origin: Rank, access: Access) -> None:
        target, alone = access.target, access.lock == LOCK_EXCLUSIVE
        # Two steps: the target must look first, then the lock must let the access in. The lock taken at arrival
        # would be held for a block of computing.
        self._soon(
            target,
            lambda: target.acquire(
                origin.id, alone, access.lock != 0, lambda: self._serve(target.rank, origin, access)
            ),
        )

    def _serve(self, target: Rank, origin: Rank, access: Access) -> None:
        if WAITING and self.world.deferred is not None:
            self.world.deferred.settle(target.id, wait=False)  # the window may be over its weights
        # Served before the link is judged, since the memory is changed even if the answer is then lost.
        access.answer, verdict = access.serve(access.data), DELIVERED
        if self.world.links is not None:
            verdict = self._judge((target, origin), self.world.kernel.env.now, access, ANSWER)
        if verdict.lost:
            access.lose()
        elif access.copy_s is not None:
            access.complete(self.world.kernel.env.now + verdict.delay_s)
        else:
            answer(self.world, target, origin, access.nbytes[1], delay_s=verdict.delay_s, to=access)

    def _soon(self, target: Target, then: Action) -> None:
        """Call `then` when the target serves what has reached it now."""
        env = self.world.kernel.env
        serve_s = self.answers_at(target, env.now)
        if serve_s == math.inf:  # amid a block whose end depends on who else computes
            target.rank.waited = (*target.rank.waited, then)
        elif serve_s > env.now:
            env.at(serve_s, WAITED, then)
        else:
            then()
