"""One-sided accesses: when and in which order a target serves them, and how their data travel there and back.

Passive-target progress is a parameter of the platform. With "poll", a computing target serves an access only when its
block ends; with "async" or "hardware" it serves at once. A rank that exposes memory does not run ahead: its stores
happen at their own time. Data pass through the sender's NIC, the wire and the receiver's NIC, and contend with other
traffic as messages do. Data from one rank to one target arrive in the order sent, as on a reliable connection. Where
the network has a `window`, ranks of one node copy instead, each with its own processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from spawnsim.comm.constants import LOCK_EXCLUSIVE
from spawnsim.models.faults import DELIVERED, Verdict
from spawnsim.virtual.digest import ONE_SIDED
from spawnsim.virtual.engine.completion import Message, ReceivingNic, Uncertain
from spawnsim.virtual.engine.event_queue import ARRIVING, WAITED
from spawnsim.virtual.engine.injection import ANSWER, REQUEST, can_be_damaged, damaged
from spawnsim.virtual.engine.kernel import Kernel
from spawnsim.virtual.engine.world import Rank, World

OnArrival = Callable[[float], None]


class Packet(Message):
    """Data on their way between two ranks; a model of contention treats them as the data of a rendezvous."""

    def __init__(self, source: Rank, dest: Rank, nbytes: int, landed: OnArrival) -> None:
        super().__init__(source.id, 0, None, nbytes)
        self.message: Message = self
        self.pair, self._landed = (source.id, dest.id), landed

    def complete(self, finish_s: float) -> None:
        """Do nothing: no rank waits until the data have left."""

    def land(self, arrival_s: float) -> None:
        self._landed(arrival_s)


# How long the sender is busy, when the data have left it, when they arrive, how long they then occupy the receiver's
# NIC.
TransferTimes = tuple[float, float, float, float]


def inject(world: World, link: tuple[Rank, Rank], nbytes: int, now_s: float) -> TransferTimes:
    """Put data on the NIC of a link's source, behind its earlier data."""
    source, dest = link
    send_s, inject_s, flight_s, _, drain_s = world.cost(source.id, dest.id, nbytes)
    begin_s = now_s
    # Loopback uses no NIC: booking it would let a rank's access to its own part delay its messages.
    if source is dest:
        pass  # a copy in its own memory
    # Large data have a separate channel, as the data of a rendezvous have: later small data do not wait for them.
    else:
        large = nbytes > world.network.eager_bytes
        begin_s = max(now_s, source.bulk_free_s if large else source.nic_free_s)
        if world.cost_at is not None:
            _, inject_s, flight_s, _, drain_s = world.cost_at(source.id, dest.id, nbytes, begin_s)
        if large:
            source.bulk_free_s = begin_s + inject_s
        else:
            source.nic_free_s = begin_s + inject_s
    return send_s, begin_s + inject_s, begin_s + flight_s, drain_s


class RoundTrip(Uncertain):
    """Complete when an answer is back at the origin. The origin's NIC lets the answer in when the program takes it."""

    __slots__ = ("drain_s", "nic")

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.nic: ReceivingNic | None = None
        self.drain_s = 0.0

    def final(self) -> float:
        """Return the end; books the NIC, unless it is booked already."""
        assert self.finish_s is not None
        # Booked once, when the program takes the answer: under "serial", the order in which a program takes data is the
        # order on its NIC.
        if self.nic is not None and self.drain_s:
            self.finish_s, self.drain_s = self.nic.admit(self.finish_s, self.drain_s), 0.0
        return self.finish_s


def answer(world: World, source: Rank, dest: Rank, nbytes: int, *, delay_s: float, to: RoundTrip) -> None:
    """Send an answer, from now on; `to` completes when it arrives."""
    _, left_s, arrival_s, drain_s = inject(world, (source, dest), nbytes, world.kernel.env.now)
    if world.contention is not None and nbytes:
        packet = Packet(source, dest, nbytes, to.complete)
        packet.drain_s = drain_s
        world.contention.stream(packet, left_s, arrival_s + delay_s)
    else:
        # Without a model, the receiver's NIC is booked when the answer is taken (`RoundTrip.final`), which needs no
        # event.
        to.nic, to.drain_s = world.nic(dest.id), drain_s
        to.complete(arrival_s + delay_s)


Action = Callable[[], None]
Serve = Callable[[Any], Any]  # from the received data to the data of the answer
# The sharers of a lock that was never used, as most are: a set takes 0.2 kB, even empty.
NOBODY: Any = frozenset()


@dataclass(eq=False, slots=True)
class Target:
    """The part of one rank in a window: its memory and its lock."""

    rank: Rank
    memory: Any  # flat uint8 array
    disp_unit: int
    regions: Sequence[Any] = ()  # attached memory of a dynamic window
    exclusive: int | None = None  # the world rank that holds the lock alone
    sharers: set[int] = NOBODY
    queue: list[Access] = field(default_factory=list)  # accesses that the lock has yet to admit

    def free_for(self, access: Access) -> bool:
        """Whether an access can be served now."""
        who = access.connection.origin.id
        if self.exclusive is not None:
            return self.exclusive == who
        return not (access.lock == LOCK_EXCLUSIVE and self.sharers - {who})

    def acquire(self, access: Access) -> None:
        """Serve an access as soon as the lock admits its origin, first come, first served."""
        # Behind a queue only holders of the lock are admitted: admitting new sharers would starve a waiting exclusive
        # lock, and queueing a holder's access behind it would deadlock both.
        if (self.queue and not self._is_held_by(access.connection.origin.id)) or not self.free_for(access):
            self.queue.append(access)
            windows = access.connection.windows
            dead = windows.dead()
            if dead and not dead.isdisjoint(self.holding_up(access.connection.origin.id)):
                windows.world.crashes.end_waits()  # their waits began before this access arrived
        else:
            self._admit(access)

    def holding_up(self, who: int) -> list[int]:
        """Return the world ranks whose lock delays a rank's access; empty if it waits for something else."""
        if all(access.connection.origin.id != who for access in self.queue):
            return []
        return sorted(({self.exclusive} if self.exclusive is not None else self.sharers) - {who})

    def _is_held_by(self, who: int) -> bool:
        return who in self.sharers or who == self.exclusive

    def _admit(self, access: Access) -> None:
        who = access.connection.origin.id
        if access.lock == LOCK_EXCLUSIVE:
            self.exclusive = who
        elif access.lock:
            self.sharers = self.sharers or set()
            self.sharers.add(who)
        # The lock is recorded before the access is served: serving may send an answer and so trigger further requests.
        access.connection.windows.serve(access)

    def release(self, who: int, dead: Set[int]) -> None:
        """Give up the lock, or the request for it, and admit the next accesses."""
        # A lock granted to a dead rank is never returned.
        if dead or not self._is_held_by(who):
            gone = {who, *dead}
            self.queue = [
                each for each in self.queue if not each.lock or each.connection.origin.id not in gone
            ]
        if self.exclusive == who:
            self.exclusive = None
        if who in self.sharers:
            self.sharers.remove(who)
        # In order, and only as long as the head fits: skipping a waiting exclusive lock would starve it.
        while self.queue and self.free_for(self.queue[0]):
            self._admit(self.queue.pop(0))


@dataclass(eq=False, slots=True)
class Connection:
    """The connection from one origin to one target."""

    windows: WindowState
    origin: Rank
    target: Target
    sent: int = 0
    # A list, as there are few: a deque is ten times as large, even empty.
    coming: list[Access] = field(default_factory=list)

    def send(self, access: Access, *, copy_s: float | None, delay_s: float) -> float:
        """Send an access, from the running task's clock on. `copy_s` is the time of a copy within a node, if it
        replaces the transfer.

        Returns how long the task is busy.
        """
        world, origin, target = self.windows.world, self.origin, self.target.rank
        self.sent += 1
        now_s, nbytes = world.kernel.current.clock, access.nbytes[0]
        if copy_s is None:
            send_s, left_s, arrival_s, drain_s = inject(world, (origin, target), nbytes, now_s)
        else:  # a copy reads the data that are present when it ends
            send_s, left_s, arrival_s, drain_s = copy_s, now_s + copy_s, now_s + copy_s, 0.0
        # A reliable connection delivers nothing behind lost data, so everything that follows a lost request is lost
        # with it.
        if self.coming and self.coming[-1].lost:
            access.lose()
        # Queued although it is lost, so that later accesses find it. It never arrives, so nothing behind it is served.
        self.coming.append(access)
        if access.lost:
            return send_s
        arrival_s += delay_s
        if copy_s is None and world.contention is not None and nbytes:
            packet = Packet(origin, target, nbytes, lambda time_s: self._at(time_s, access.arrive))
            packet.drain_s = drain_s
            world.contention.stream(packet, left_s, arrival_s)
        # An event instead of an immediate booking: no program takes requests, so the NIC lets them in in the order of
        # time.
        elif drain_s and (nic := world.nic(target.id)) is not None:
            self._at(arrival_s, lambda: self._let_in(nic, arrival_s, drain_s, access))
        else:
            self._at(arrival_s, access.arrive)
        return send_s

    def _at(self, time_s: float, action: Action) -> None:
        env = self.windows.world.kernel.env
        env.at(max(time_s, env.now), ARRIVING + self.origin.id, action)

    def _let_in(self, nic: ReceivingNic, arrival_s: float, drain_s: float, access: Access) -> None:
        """Let in a request that would arrive at `arrival_s` if the NIC were idle."""
        # Booked at the time of the event: requests of other ranks that arrived meanwhile have been booked before.
        let_in_s = nic.admit(arrival_s, drain_s)
        if let_in_s > arrival_s:
            self._at(let_in_s, access.arrive)
        else:
            access.arrive()


class Access(RoundTrip):
    """One access and its answer; complete when the answer is back at the origin."""

    __slots__ = (
        "answer", "call", "connection", "copy_s", "data", "here", "lock", "nbytes", "number", "serve",
    )  # fmt: skip
    connection: Connection  # on which it was sent
    answer: Any
    serve: Any  # None: already served

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
        """Prepare an access of `nbytes` bytes (there, back); `serve(data)` returns the answer's payload."""
        # Inlines `RoundTrip`, which saves three calls.
        self.kernel, self.nic, self.drain_s = world.kernel, None, 0.0
        self.finish_s = self.waiter = self.dependents = None
        self.lost = False
        self.call, self.nbytes, self.serve, self.data, self.lock = call, nbytes, serve, data, lock
        self.number, self.answer = 0, None
        self.here = False  # whether it is at its target, possibly before accesses that were sent earlier
        self.copy_s: float | None = None

    def arrive(self) -> None:
        """Mark the access as arrived, and process the arrived accesses at the head of the connection."""
        self.here = True
        # MPI: accumulates of one origin to one target are ordered. A small request may arrive before a large one that
        # was sent earlier, so it is held back here.
        connection = self.connection
        coming = connection.coming
        while coming and coming[0].here:
            # Two steps: first the target must make progress, then the lock must admit the access. A lock taken on
            # arrival would be held during a block of computing.
            connection.windows.when_polling(connection.target, coming.pop(0).ask)

    def ask(self) -> None:
        self.connection.target.acquire(self)


class Release(Access):
    """The end of a lock, or of a wait for it, on its way to the target; no answer is sent back."""

    __slots__ = ()

    def ask(self) -> None:
        """Give up the lock."""
        connection = self.connection
        connection.target.release(connection.origin.id, connection.windows.dead())


@dataclass(eq=False)
class WindowState:
    """The state that all members of a window share. `targets` are in the order of the communicator."""

    world: World
    targets: list[Target]
    flavor: int
    context: Any  # the window's context: its number keys the draws of faults, and it records dead members
    shared: Any = None  # the memory of Allocate_shared
    _connections: dict[tuple[int, int], Connection] = field(default_factory=dict)  # by origin and place

    def dead(self) -> Set[int]:
        """Return the world ranks of the members that are known to have died."""
        dead: Set[int] = self.context.dead(self.world.kernel.env.now) if self.world.failed else NOBODY
        return dead

    def answers_at(self, target: Target, time_s: float) -> float:
        """Return when a target serves what reaches it at `time_s`."""
        if self.world.platform.progress == "poll":
            return target.rank.answers_at(time_s)
        return time_s

    def request(self, origin: Rank, place: int, access: Access) -> Access:
        """Send an access from the running task. It is complete when its answer is back at the origin."""
        there, back = access.nbytes
        origin.messages += 1
        origin.nbytes += there + back
        origin.digest.note(
            (self.world.kernel.current.clock, ONE_SIDED, self.targets[place].rank.id, there + back, 0)
        )
        # The digest covers the origin's data when they leave it, as for a send. It covers the answer when it is taken.
        if access.data is not None:
            origin.digest.cover(access.data)
        self._send(origin, place, access)
        return access

    def release(self, origin: Rank, place: int) -> None:
        # Through the same connection: a release that overtook earlier accesses would admit the next holder too soon.
        self._send(origin, place, Release(self.world, "Unlock", (0, 0), lambda data: None))

    def _send(self, origin: Rank, place: int, access: Access) -> None:
        # Created when first used: a window of 1,000 ranks has a million pairs, most of which never communicate.
        connection = self._connections.get((origin.id, place))
        if connection is None:
            connection = Connection(self, origin, self.targets[place])
            self._connections[origin.id, place] = connection
        access.connection, target = connection, connection.target.rank
        # Numbered per connection: the number keys a fault's draw, which then does not depend on other ranks.
        access.number = connection.sent
        verdict = DELIVERED
        if self.world.links is not None:
            verdict = self._judge((origin, target), self.world.kernel.current.clock, access, REQUEST)
            if verdict.lost:
                access.lose()
        there, back = access.nbytes
        access.copy_s = self.world.network.copy_s(origin.id, target.id, there + back)
        send_s = connection.send(access, copy_s=access.copy_s, delay_s=verdict.delay_s)
        kernel = self.world.kernel
        kernel.effect()
        origin.advance_to(kernel.current, kernel.current.clock + send_s)
        if send_s or target is origin:  # its next store happens after the access
            kernel.observe()

    def _judge(self, link: tuple[Rank, Rank], now_s: float, access: Access, kind: int) -> Verdict:
        """Return the link's verdict on one direction of an access; damages the payload if the verdict says so."""
        links, (source, dest) = self.world.links, (link[0].id, link[1].id)
        key = kind, self.context.number, access.number
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
        links.record(verdict, source, dest, now_s, call=access.call, number=access.number)
        return verdict

    def serve(self, access: Access) -> None:
        """Execute an access at its target, and send the answer."""
        target, origin = access.connection.target.rank, access.connection.origin
        # Served before the link is judged: the memory is changed even if the answer is then lost.
        access.answer, verdict = access.serve(access.data), DELIVERED
        access.serve = access.data = None  # a program may keep the request for a long time
        if self.world.links is not None:
            verdict = self._judge((target, origin), self.world.kernel.env.now, access, ANSWER)
        if verdict.lost:
            access.lose()
        elif access.copy_s is not None:
            access.complete(self.world.kernel.env.now + verdict.delay_s)
        else:
            answer(self.world, target, origin, access.nbytes[1], delay_s=verdict.delay_s, to=access)

    def when_polling(self, target: Target, then: Action) -> None:
        """Call `then` when the target serves the requests that have reached it by now."""
        env = self.world.kernel.env
        serve_s = self.answers_at(target, env.now)
        if serve_s == math.inf:  # in a block that ends at a time unknown so far
            target.rank.waited = (*target.rank.waited, then)
        elif serve_s > env.now:
            env.at(serve_s, WAITED, then)
        else:
            then()
