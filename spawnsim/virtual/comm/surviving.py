"""Going on without the dead: MPI's fault-tolerance calls under mpi4py's names, and `recover`.

Agreements are meetings of the living: a member known to be dead is not awaited, and a death while others wait ends
their wait. This room knows deaths; when they happen is the business of the fault plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.group import Group
from spawnsim.comm.recovery import Capabilities, Recovery
from spawnsim.errors import Revoked, UnsupportedError
from spawnsim.virtual.comm.context import Context, Member
from spawnsim.virtual.completion import Completion
from spawnsim.virtual.requests import Request
from spawnsim.virtual.waiting import Waiting, await_one


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
        """End if all who live are here: two sweeps over a tree of the members."""
        world = self.context.world
        if self.over or any(
            rank not in self.parts and rank not in world.failed for rank in self.context.everyone
        ):
            return
        self.over, self.result = True, self.make(self.parts)
        everyone = self.context.everyone
        flight_s = world.network.cost(everyone[0], everyone[-1], 8)[2]
        end_s = (
            max(self.latest_s, world.kernel.env.now)
            + 2 * math.ceil(math.log2(max(len(everyone), 2))) * flight_s
        )
        for completion in self.waits:
            completion.complete(end_s)


class Surviving(Member):
    """Calls that work although members have died."""

    __slots__ = ()

    def capabilities(self) -> Capabilities:
        """Return what this communicator can do."""
        progress = self._world.platform.progress
        return Capabilities(
            backend="virtual",
            library="spawnsim",
            survives=True,
            ulfm=True,
            progress=progress,
            threads="multiple",
        )

    def recover(self, step: int | None = None) -> Recovery:
        """Meet all survivors; return their new communicator, and the smallest `step` that any of them gave."""
        old = self._members

        def make(parts: dict[int, Any]) -> tuple[Context, int | None]:
            steps = [each for each in parts.values() if each is not None]
            return self._living(parts), min(steps, default=None)

        context, agreed = self._agree_alive("recover", step, make)
        living = context.sides[0]
        ranks = {old.index(rank): place for place, rank in enumerate(living)}
        dead = tuple(place for place, rank in enumerate(old) if rank not in living)
        return Recovery(self._survivor(context), ranks, agreed, dead)

    def Revoke(self) -> None:
        """Make every call of every member on this communicator end in `Revoked`, now or when it is next made."""
        world, context = self._world, self._context
        now_s = world.kernel.current.clock
        if context.revoked_s is None:
            context.revoked_s = now_s
            world.kernel.env.at(
                max(now_s, world.kernel.env.now), self._rank.id, lambda: _interrupt(context, self._label)
            )

    def Is_revoked(self) -> bool:
        """Return whether the communicator was revoked."""
        return (
            self._context.revoked_s is not None
            and self._context.revoked_s <= self._world.kernel.current.clock
        )

    is_revoked = property(Is_revoked)

    def Get_failed(self) -> Group:
        """Return the group of the members known to have died."""
        self._world.kernel.observe()
        return Group.of(self._dead(), self._rank.id)

    def Ack_failed(self, num_to_ack: int | None = None) -> int:
        """Acknowledge failures: receives from anybody go on without these dead. Return how many are acknowledged."""
        dead = self._dead()[: None if num_to_ack is None else max(num_to_ack, 0)]
        self._context.notes["acknowledged", self._rank.id] = frozenset(dead)
        return len(dead)

    def Agree(self, flag: int) -> int:
        """Return the bitwise and of all survivors' flags; the same for all."""
        return int(self._agree_alive("Agree", flag, _all_flags))

    def Iagree(self, flag: Any) -> Request:
        """Start Agree on a buffer of one integer, which receives the result."""
        own = as_buffer(flag, writable=True)
        agreement, completion = self._enter_agreement(int(own.pack()[0]), _all_flags)

        def deliver(_: Any) -> None:
            own.unpack(np.array([agreement.result], own.dtype))

        return Request.start(self._world, completion, self._wait_for("Iagree"), deliver)

    def Shrink(self) -> Any:
        """Return a communicator of the survivors."""
        return self._survivor(self._agree_alive("Shrink", None, self._living))

    def Ishrink(self) -> tuple[Any, Request]:
        """Start Shrink: refused, since the communicator could not be handed out before the agreement."""
        raise UnsupportedError("Comm.Ishrink: who survives is known when the survivors have met; use Shrink")

    # -- how -------------------------------------------------------------------------------------------------

    def _dead(self) -> list[int]:
        return [rank for rank in self._context.everyone if self._world.known_dead(rank)]

    def _living(self, parts: dict[int, Any]) -> Context:
        return Context(
            self._world, tuple(tuple(rank for rank in side if rank in parts) for side in self._context.sides)
        )

    def _survivor(self, context: Context) -> Any:
        new = type(self).enter(context, self._rank.id)
        new._own, new._errhandler = self._own, self._errhandler
        return new

    def _wait_for(self, name: str) -> Waiting:
        return Waiting(name, self._label, self._context.everyone, -1, 0, "from")

    def _enter_agreement(
        self, part: Any, make: Callable[[dict[int, Any]], Any]
    ) -> tuple[Agreement, Completion]:
        context, rank = self._context, self._rank
        number = context.notes[rank.id, "agreements"] = context.notes.get((rank.id, "agreements"), -1) + 1
        agreement = context.notes.get(("agreement", number))
        if agreement is None:
            agreement = context.notes["agreement", number] = Agreement(context, make)
            self._world.on_death.append(agreement.check)
        return agreement, agreement.join(rank.id, part)

    def _agree_alive(self, name: str, part: Any, make: Callable[[dict[int, Any]], Any]) -> Any:
        agreement, completion = self._enter_agreement(part, make)
        await_one(self._world, completion, AgreementWait(self._wait_for(name), agreement))
        return agreement.result


def _all_flags(parts: dict[int, int]) -> int:
    return int(np.bitwise_and.reduce(list(parts.values())))


def _is_on(wait: Any, label: str) -> bool:
    """Whether a wait is a call on the communicator with this label."""
    parts = getattr(wait, "parts", (wait,))
    return any(
        label in (getattr(part, "comm", None), getattr(getattr(part, "meeting", None), "comm", None))
        for part in parts
    )


def _interrupt(context: Context, label: str) -> None:
    """Wake who waits on a revoked communicator."""
    for task in context.world.kernel.tasks:
        wait = task.wait
        if task.parked and wait is not None and _is_on(wait, label):
            task.clock = max(task.clock, context.world.kernel.env.now)
            context.world.kernel.resume(
                task, Revoked(f"{task.name} was in {wait.describe()} when it was revoked")
            )


@dataclass(frozen=True, slots=True)
class AgreementWait:
    """A wait for the living members. The dead do not doom it."""

    inner: Waiting
    agreement: Agreement

    def describe(self) -> str:
        """Return the call."""
        return f"{self.inner.operation} on {self.inner.comm}"

    def peers(self) -> list[int]:
        """Return the world ranks still awaited."""
        world = self.agreement.context.world
        everyone = self.agreement.context.everyone
        return [rank for rank in everyone if rank not in self.agreement.parts and rank not in world.failed]

    def missing(self, by_s: float = math.inf) -> list[int]:
        """Return the ranks still awaited, as ranks of the communicator."""
        return [self.agreement.context.everyone.index(rank) for rank in self.peers()]

    def doomed(self, dead: Any) -> tuple[int, ...]:
        """Return nobody."""
        return ()

    def sequence(self) -> int:
        """Return -1."""
        return -1
