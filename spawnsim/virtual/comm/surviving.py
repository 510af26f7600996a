"""Going on without the dead: MPI's fault-tolerance calls under mpi4py's names, and `recover`.

This room knows MPI's calls. Who is awaited is the business of `agreements`, what ends that of `revoking`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.group import Group
from spawnsim.comm.recovery import Capabilities, Recovery
from spawnsim.errors import Revoked, UnsupportedError
from spawnsim.virtual.comm.agreements import Agreement, Regrouping, WaitingForLiving
from spawnsim.virtual.comm.context import GIVEN_UP, Context, Member
from spawnsim.virtual.comm.revoking import family, revoke
from spawnsim.virtual.requests import Request
from spawnsim.virtual.waiting import await_one

A = TypeVar("A", bound=Agreement)


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
        """Meet all survivors; return their new communicator, and the smallest `step` that any of them gave.

        It ends this communicator and all that was made of it (communicators, windows, open requests): calls on them
        raise `Revoked`. Those who live and do not come within the deadline are given up, like the dead.

        Raises `Revoked` on a rank that the others have given up meanwhile (it was paused): it must leave.
        """
        self._world.kernel.observe()
        self._check_given_up()
        revoke(family(self._context))
        old = self._members

        def make(parts: dict[int, Any]) -> tuple[Context, int | None]:
            steps = [each for each in parts.values() if each is not None]
            return self._living(parts), min(steps, default=None)

        context, agreed = self._regroup(step, make)
        living = context.sides[0]
        ranks = {old.index(rank): place for place, rank in enumerate(living)}
        dead = tuple(place for place, rank in enumerate(old) if rank not in living)
        return Recovery(self._survivor(context), ranks, agreed, dead)

    def Revoke(self) -> None:
        """Make every call of every member on this communicator end in `Revoked`, now or when it is next made."""
        revoke([self._context])

    def Is_revoked(self) -> bool:
        """Return whether the communicator was revoked."""
        return bool(self._why_revoked())

    is_revoked = property(Is_revoked)

    def Get_failed(self) -> Group:
        """Return the group of the members known to have died."""
        kernel = self._world.kernel
        kernel.observe()
        dead = self._dead()
        self._rank.reach(kernel.current, kernel.current.clock + self._world.network.call_overhead_s)
        if not dead:
            kernel.fruitless()
        return Group.of(dead, self._rank.id)

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
        agreement = self._agreement(Agreement, _all_flags)
        completion = agreement.join(self._rank.id, int(own.pack()[0]))

        def deliver(_: Any) -> None:
            own.unpack(np.array([agreement.result], own.dtype))

        return Request.start(
            self._world, completion, WaitingForLiving("Iagree", self._label, agreement), deliver
        )

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
        """Return a context of those who have come. It stands beside the old one, and does not end with it."""
        sides = tuple(tuple(rank for rank in side if rank in parts) for side in self._context.sides)
        return Context(self._world, sides, ancestors=self._context.ancestors)

    def _survivor(self, context: Context) -> Any:
        new = type(self).enter(context, self._rank.id)
        new._own, new._errhandler = self._own, self._errhandler
        return new

    def _check_given_up(self) -> None:
        if self._rank.given_up:
            raise Revoked(f"{self._world.kernel.current.name}: {GIVEN_UP}")

    def _agreement(self, kind: type[A], make: Callable[[dict[int, Any]], Any]) -> A:
        """Return the agreement that is this rank's next one on the communicator."""
        self._check_given_up()
        notes, rank = self._context.notes, self._rank.id
        number = notes[rank, "agreements"] = notes.get((rank, "agreements"), -1) + 1
        agreement = notes.get(("agreement", number))
        if agreement is None:
            agreement = notes["agreement", number] = kind(self._context, make)
        return agreement

    def _agree_alive(self, name: str, part: Any, make: Callable[[dict[int, Any]], Any]) -> Any:
        agreement = self._agreement(Agreement, make)
        completion = agreement.join(self._rank.id, part)
        await_one(self._world, completion, WaitingForLiving(name, self._label, agreement))
        return agreement.result

    def _regroup(self, step: int | None, make: Callable[[dict[int, Any]], Any]) -> Any:
        """Agree with those who come in time: the wait needs no deadline of its own."""
        task, agreement = self._world.kernel.current, self._agreement(Regrouping, make)
        completion = agreement.come(self._rank.id, step, task.deadline_s)
        before, task.deadline_s = task.deadline_s, math.inf
        try:
            await_one(self._world, completion, WaitingForLiving("recover", self._label, agreement))
        finally:
            task.deadline_s = before
        return agreement.result


def _all_flags(parts: dict[int, int]) -> int:
    return int(np.bitwise_and.reduce(list(parts.values())))
