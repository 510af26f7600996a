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
from spawnsim.virtual.completion import Completion
from spawnsim.virtual.world import Rank, World

FIRST = -1  # the "rank" of a service in the order of ties: before the target's own next step
Serve = Callable[[], None]


@dataclass(eq=False)
class Target:
    """The part of one rank in a window: its memory and its lock."""

    rank: Rank
    memory: Any  # flat uint8 array
    disp_unit: int
    regions: list[Any] = field(default_factory=list)  # attached memory of a dynamic window
    exclusive: int | None = None  # who holds the lock alone, as a world rank
    sharers: set[int] = field(default_factory=set)
    queue: deque[tuple[int, bool, bool, Serve]] = field(default_factory=deque)  # (who, alone, keep, then)

    def free_for(self, who: int, alone: bool) -> bool:
        """Whether an access of `who` can be served now."""
        if self.exclusive is not None:
            return self.exclusive == who
        return not (alone and self.sharers - {who})

    def acquire(self, who: int, alone: bool, keep: bool, then: Serve) -> None:
        """Serve `then` as soon as the lock lets `who` in, first come, first served; `keep` holds the lock after it."""
        if self.free_for(who, alone) and (not self.queue or who in self.sharers or who == self.exclusive):
            self._admit(who, alone, keep, then)
        else:
            self.queue.append((who, alone, keep, then))

    def _admit(self, who: int, alone: bool, keep: bool, then: Serve) -> None:
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


@dataclass(eq=False)
class Windows:
    """What all members of a window share. `targets` are in the order of the communicator."""

    world: World
    targets: list[Target]
    flavor: int
    shared: Any = None  # the memory of Allocate_shared

    def answers_at(self, target: Target, time_s: float) -> float:
        """Return when a target serves what reaches it at `time_s`."""
        if self.world.platform.progress == "poll":
            return target.rank.answers_at(time_s)
        return time_s

    def request(
        self, origin: Rank, place: int, nbytes: tuple[int, int], serve: Serve, **how: Any
    ) -> Completion:
        """Send an access from the running task. `nbytes` are those there and back.

        `serve` runs at the target's time of service; the completion is over when its answer is back at the origin.
        """
        world, target, task = self.world, self.targets[place], self.world.kernel.current
        there, back = nbytes
        send_s, inject_s, flight_s, _ = world.network.cost(origin.id, target.rank.id, there)
        begin_s = max(task.clock, origin.nic_free_s)
        origin.nic_free_s = begin_s + inject_s
        origin.messages += 1
        origin.nbytes += there + back
        origin.trace.note((task.clock, 6, target.rank.id, there + back, 0))
        completion = Completion(world.kernel)
        self._on_arrival(
            begin_s + flight_s,
            target,
            lambda: self._serve(origin, target, back, serve, completion=completion, **how),
        )
        world.kernel.effect()
        origin.reach(task, task.clock + send_s)
        return completion

    def _on_arrival(self, time_s: float, target: Target, then: Serve) -> None:
        """Call `then` when the target serves what reaches it at `time_s`."""
        env = self.world.kernel.env

        def arrive() -> None:
            serve_s = self.answers_at(target, time_s)
            if serve_s > env.now:
                env.at(serve_s, FIRST, then)
            else:
                then()

        env.at(max(time_s, env.now), target.rank.id, arrive)

    def _serve(
        self, origin: Rank, target: Target, back: int, serve: Serve,
        *, completion: Completion, lock: int = 0, keep: bool = False,
    ) -> None:  # fmt: skip
        def go() -> None:
            serve()
            flight_s = self.world.network.cost(target.rank.id, origin.id, back)[2]
            completion.complete(self.world.kernel.env.now + flight_s)

        target.acquire(origin.id, lock == LOCK_EXCLUSIVE and keep, keep, go)

    def release(self, origin: Rank, place: int) -> None:
        """Send the end of a lock."""
        target, task = self.targets[place], self.world.kernel.current
        flight_s = self.world.network.cost(origin.id, target.rank.id, 0)[2]
        self._on_arrival(task.clock + flight_s, target, lambda: target.release(origin.id))
