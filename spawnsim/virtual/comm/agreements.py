"""Meetings of the living, and who is no longer awaited at a recovery.

A member known to be dead is not awaited, and a death while others wait ends their wait. A recovery waits neither for
those whose program has ended, nor for ever: who is paused for `SILENT_S`, or lives and does not come in time, is given
up, as on real ranks. This room knows contexts, deaths and pauses; what is agreed upon is up to its callers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spawnsim.virtual.comm.context import Context
from spawnsim.virtual.comm.revoking import close, family, give_up
from spawnsim.virtual.engine.completion import Completion
from spawnsim.virtual.waiting import Unbroken

SILENT_S = 3.0  # a paused rank is given up after this time; real ranks, which must ask, take as long


@dataclass(eq=False)
class Agreement:
    """A meeting of those members of a communicator who live."""

    context: Context
    make: Callable[[dict[int, Any]], Any]
    parts: dict[int, Any] = field(default_factory=dict)  # by world rank
    waits: list[Completion] = field(default_factory=list)
    latest_s: float = 0.0
    result: Any = None
    over: bool = False

    def __post_init__(self) -> None:
        self.context.world.on_death.append(self.check)

    def join(self, rank: int, part: Any) -> Completion:
        """Arrive, at the running task's clock."""
        kernel = self.context.world.kernel
        completion = Completion(kernel)
        self.parts[rank], self.latest_s = part, max(self.latest_s, kernel.current.clock)
        self.waits.append(completion)
        kernel.effect()
        self.check()
        return completion

    def check(self) -> None:
        """End if all who are awaited are here: two sweeps over a tree of the members."""
        world = self.context.world
        now_s = max(self.latest_s, world.kernel.env.now)
        if self.over or self.awaited(now_s):
            return
        self.over, self.result = True, self.conclude(now_s)
        world.on_death.remove(self.check)
        everyone = self.context.everyone
        flight_s = world.network.cost(everyone[0], everyone[-1], 8)[2]
        end_s = now_s + 2 * math.ceil(math.log2(max(len(everyone), 2))) * flight_s
        for completion in self.waits:
            completion.complete(end_s)

    def awaited(self, now_s: float) -> list[int]:
        """Return the world ranks still awaited."""
        context = self.context
        return [
            rank
            for rank in context.everyone
            if rank not in self.parts and context.death_known_s(rank) > now_s
        ]

    def conclude(self, now_s: float) -> Any:
        """Return what is agreed upon."""
        return self.make(self.parts)


@dataclass(eq=False)
class Regrouping(Agreement):
    """The agreement of a recovery. The lowest member that has come decides when it has waited for long enough.

    Ranks that have begun again may come as well: they are no members, and join them. They decide nothing. The result is
    the context of all who are here, and the smallest step of those who were members.
    """

    make: Callable[[dict[int, Any]], Any] = field(init=False)
    lives: dict[int, int] = field(default_factory=dict)  # by world rank, of those who have come
    limits: dict[int, tuple[float, float]] = field(
        default_factory=dict
    )  # by world rank: (came, gives others up)
    _alarm_s: float = math.inf

    def come(self, rank: int, part: Any, limit_s: float) -> Completion:
        """Arrive; who lives and does not come is given up after `limit_s`."""
        world = self.context.world
        now_s, self.lives[rank] = world.kernel.current.clock, world.ranks[rank].life
        self.limits[rank] = now_s, now_s + max(limit_s, SILENT_S)
        return self.join(rank, part)

    def awaited(self, now_s: float) -> list[int]:
        """Return the world ranks still awaited; an alarm stands at the time at which nobody will be."""
        here = self._here(now_s)
        if not here:  # they have all died meanwhile
            return list(self.context.everyone)
        members = [rank for rank in here if self._is_member(rank)]
        began_s, due_s = self.limits[min(members or here)]
        free_s = {
            rank: self._free_s(rank, began_s, now_s) if members else self._gone_s(rank)
            for rank in self.context.everyone
            if rank not in self.parts
        }
        awaited = [rank for rank, until_s in free_s.items() if min(until_s, due_s) > now_s]
        if awaited:
            self._set_alarm(min(max(free_s[rank] for rank in awaited), due_s))
        return awaited

    def conclude(self, now_s: float) -> Any:
        """Give up who has not come, and drop what was on its way."""
        context, world = self.context, self.context.world
        here = self._here(now_s)
        for rank in context.everyone:
            if rank not in here and context.takes(rank) and world.ranks[rank].ended_s > now_s:
                give_up(world, rank)
        members = {rank for rank in here if self._is_member(rank)}
        close(family(context), members, now_s)
        steps = [self.parts[rank] for rank in members or here if self.parts[rank] is not None]
        context.regrouping = None
        context.successor = context.succeed({rank: self.lives[rank] for rank in here})
        return context.successor, min(steps, default=None)

    def withdraw(self, rank: int) -> None:
        """Wait no longer with the others."""
        del self.parts[rank], self.lives[rank]

    def _is_member(self, rank: int) -> bool:
        return rank in self.context.everyone and self.lives[rank] == self.context.life(rank)

    def _here(self, now_s: float) -> set[int]:
        failed = self.context.world.failed
        return {rank for rank, life in self.lives.items() if failed.get((rank, life), math.inf) > now_s}

    def _free_s(self, rank: int, began_s: float, now_s: float) -> float:
        """Return when a rank is no longer awaited, as far as that is known by now."""
        world, owner = self.context.world, self.context.world.ranks[rank]
        silent_s = max(began_s, world.plan.paused_s(rank, now_s)) + SILENT_S if owner.awake else math.inf
        return min(self._gone_s(rank), silent_s)

    def _gone_s(self, rank: int) -> float:
        """Return when a rank has died or ended, as far as that is known."""
        ended_s = self.context.world.ranks[rank].ended_s if self.context.takes(rank) else math.inf
        return min(self.context.death_known_s(rank), ended_s)

    def _set_alarm(self, time_s: float) -> None:
        env = self.context.world.kernel.env
        if time_s < self._alarm_s:
            self._alarm_s = time_s
            env.at(time_s, self.context.everyone[0], lambda: self._ring(time_s))

    def _ring(self, time_s: float) -> None:
        if time_s == self._alarm_s:
            self._alarm_s = math.inf
            self.check()


@dataclass(frozen=True, slots=True)
class WaitingForLiving(Unbroken):
    """A wait for the living members: survivors of a revocation must agree."""

    operation: str
    comm: str
    agreement: Agreement

    def describe(self) -> str:
        """Return the call."""
        return f"{self.operation} on {self.comm}"

    def peers(self) -> list[int]:
        """Return the world ranks still awaited."""
        context = self.agreement.context
        return [
            rank
            for rank in context.everyone
            if rank not in self.agreement.parts and context.death_known_s(rank) == math.inf
        ]

    def missing(self, by_s: float = math.inf) -> list[int]:
        """Return the ranks still awaited, as ranks of the communicator."""
        return [self.agreement.context.everyone.index(rank) for rank in self.peers()]
