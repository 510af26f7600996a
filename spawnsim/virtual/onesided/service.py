"""One-sided access: when a target serves it, in which order, and what it does to the target's memory.

Passive-target progress is a parameter of the platform. With "poll" a target that computes serves an access only when
its block ends; with "async" or "hardware" at once. A rank that exposes memory keeps company: it does not run ahead,
so what it stores is stored at its own time.

This room knows targets, locks and service times. It must not know MPI's calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spawnsim.comm.constants import LOCK_EXCLUSIVE
from spawnsim.virtual.engine.event_queue import WAITED
from spawnsim.virtual.engine.world import Rank, World
from spawnsim.virtual.faults import DELIVERED, Verdict
from spawnsim.virtual.faults.injection import ANSWER, REQUEST, can_be_damaged, damaged
from spawnsim.virtual.onesided.transfers import Answered, Connection, Request, answer

Then = Callable[[], None]
Serve = Callable[[Any], Any]  # from the data that came to those of the answer


@dataclass(eq=False)
class Target:
    """The part of one rank in a window: its memory and its lock."""

    rank: Rank
    memory: Any  # flat uint8 array
    disp_unit: int
    regions: list[Any] = field(default_factory=list)  # attached memory of a dynamic window
    exclusive: int | None = None  # who holds the lock alone, as a world rank
    sharers: set[int] = field(default_factory=set)
    queue: deque[tuple[int, bool, bool, Then]] = field(default_factory=deque)  # (who, alone, keep, then)

    def free_for(self, who: int, alone: bool) -> bool:
        """Whether an access of `who` can be served now."""
        if self.exclusive is not None:
            return self.exclusive == who
        return not (alone and self.sharers - {who})

    def acquire(self, who: int, alone: bool, keep: bool, then: Then) -> None:
        """Serve `then` as soon as the lock lets `who` in, first come, first served; `keep` holds the lock after it."""
        if self.free_for(who, alone) and (not self.queue or who in self.sharers or who == self.exclusive):
            self._admit(who, alone, keep, then)
        else:
            self.queue.append((who, alone, keep, then))

    def _admit(self, who: int, alone: bool, keep: bool, then: Then) -> None:
        if keep and alone:
            self.exclusive = who
        elif keep:
            self.sharers.add(who)
        then()

    def release(self, who: int) -> None:
        """Give up the lock and let the next ones in."""
        if self.exclusive == who:
            self.exclusive = None
        self.sharers.discard(who)
        while self.queue and self.free_for(self.queue[0][0], self.queue[0][1]):
            self._admit(*self.queue.popleft())


class Access(Answered):
    """One access under way; over when its answer is back at the origin."""

    __slots__ = ("answer", "call", "data", "lock", "nbytes", "number", "serve", "target")

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


@dataclass(eq=False)
class Windows:
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
        origin.trace.note((self.world.kernel.current.clock, 6, access.target.rank.id, there + back, 0))
        origin.trace.cover(access.data)
        self._send(origin, place, access, lambda: self._arrived(origin, access))
        return access

    def release(self, origin: Rank, place: int) -> None:
        """Send the end of a lock."""
        target = self.targets[place]
        end = Access(self.world, "Unlock", (0, 0), lambda data: None)
        self._send(origin, place, end, lambda: self._soon(target, lambda: target.release(origin.id)))

    def _send(self, origin: Rank, place: int, access: Access, then: Then) -> None:
        """Send a request."""
        connection = self._connections.get((origin.id, place))
        if connection is None:
            connection = Connection(self.world, origin, self.targets[place].rank)
            self._connections[origin.id, place] = connection
        access.number = connection.sent
        verdict = DELIVERED
        if self.world.links is not None:
            now_s = self.world.kernel.current.clock
            verdict = self._judge((origin, connection.target), now_s, access, REQUEST)
        request = Request(then, lost=verdict.lost)
        passage = connection.send(request, access.nbytes[0], delay_s=verdict.delay_s)
        if request.lost:
            access.lose()
        kernel = self.world.kernel
        kernel.effect()
        origin.reach(kernel.current, kernel.current.clock + passage.send_s)
        if passage.send_s or connection.target is origin:  # what it stores next comes behind
            kernel.observe()

    def _judge(self, link: tuple[Rank, Rank], now_s: float, access: Access, kind: int) -> Verdict:
        """Return what the link makes of one direction of an access; what it carries may be damaged."""
        links, (source, dest) = self.world.links, (link[0].id, link[1].id)
        key = kind, self.number, access.number
        verdict: Verdict = links.judge(source, dest, now_s, *key)
        payload = access.data if kind == REQUEST else access.answer
        if verdict.corrupt and can_be_damaged(payload):
            payload = damaged(payload, self.world.plan.chance(*key, source, dest))
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
        self._soon(
            target,
            lambda: target.acquire(
                origin.id, alone, access.lock != 0, lambda: self._serve(target.rank, origin, access)
            ),
        )

    def _serve(self, target: Rank, origin: Rank, access: Access) -> None:
        access.answer, verdict = access.serve(access.data), DELIVERED
        if self.world.links is not None:
            verdict = self._judge((target, origin), self.world.kernel.env.now, access, ANSWER)
        if verdict.lost:
            access.lose()
        else:
            answer(self.world, target, origin, access.nbytes[1], delay_s=verdict.delay_s, to=access)

    def _soon(self, target: Target, then: Then) -> None:
        """Call `then` when the target serves what has reached it now."""
        env = self.world.kernel.env
        serve_s = self.answers_at(target, env.now)
        if serve_s > env.now:
            env.at(serve_s, WAITED, then)
        else:
            then()
