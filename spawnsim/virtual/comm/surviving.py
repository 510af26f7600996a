"""Going on without the dead: MPI's fault-tolerance calls under mpi4py's names, and `recover`.

This room knows MPI's calls. Who is awaited is the business of `agreements`, what ends that of `revoking`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.failures import Revoked
from spawnsim.comm.group import Group
from spawnsim.comm.recovery import Capabilities, Recovery
from spawnsim.errors import Timeout, UnsupportedError
from spawnsim.virtual.comm.agreements import Agreement, Regrouping, WaitingForLiving
from spawnsim.virtual.comm.context import GIVEN_UP, Context, Member
from spawnsim.virtual.comm.revoking import family, revoke
from spawnsim.virtual.requests import Request
from spawnsim.virtual.waiting import await_one


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

        A rank that has begun again joins so: the others' calls end in `Revoked`, and they meet it in their recovery.
        Its own `step` does not count, and it gives nobody up: it waits until its deadline, and then raises `Timeout`.

        Raises `Revoked` on a rank that the others have given up meanwhile (it was paused): it must leave.
        """
        self._world.kernel.observe()
        self._check_given_up()
        now, rank = self._context, self._rank
        joins = not now.takes(rank.id)
        while joins and now.successor is not None and not now.takes(rank.id):
            now = now.successor
        revoke(family(now))
        context, agreed = self._regroup(now, step)
        places = {member: place for place, member in enumerate(context.sides[0])}
        stay = {member for member in places if context.life(member) == self._context.life(member)}
        ranks = {old: places[member] for old, member in enumerate(self._members) if member in stay}
        dead = tuple(old for old in range(len(self._members)) if old not in ranks)
        rank.outside = False
        joined = tuple(places[member] for member in places if context.life(member) != now.life(member))
        return Recovery(self._survivor(context), ranks, agreed, dead, joined)

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
        self._world.charge_poll()
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
        agreement = self._agreement(_all_flags)
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
        dead = self._world.known_dead(self._world.kernel.current.clock)
        return [rank for rank in self._context.everyone if self._context.is_dead(rank, dead)]

    def _living(self, parts: dict[int, Any]) -> Context:
        """Return a context of those who have come. It stands beside the old one, and does not end with it."""
        return self._context.succeed({rank: self._context.life(rank) for rank in parts})

    def _survivor(self, context: Context) -> Any:
        new = type(self).enter(context, self._rank.id)
        new._own, new._errhandler = self._own, self._errhandler
        return new

    def _check_life(self) -> None:
        if not self._context.takes(self._rank.id):
            self._need()

    def _check_given_up(self) -> None:
        if self._rank.given_up:
            raise Revoked(f"{self._world.kernel.current.name}: {GIVEN_UP}")

    def _agreement(self, make: Callable[[dict[int, Any]], Any]) -> Agreement:
        """Return the agreement that is this rank's next one on the communicator."""
        self._check_given_up()
        self._check_life()
        notes, rank = self._context.notes, self._rank.id
        number = notes[rank, "agreements"] = notes.get((rank, "agreements"), -1) + 1
        agreement = notes.get(("agreement", number))
        if agreement is None:
            agreement = notes["agreement", number] = Agreement(self._context, make)
        assert isinstance(agreement, Agreement)
        return agreement

    def _agree_alive(self, name: str, part: Any, make: Callable[[dict[int, Any]], Any]) -> Any:
        agreement = self._agreement(make)
        completion = agreement.join(self._rank.id, part)
        await_one(self._world, completion, WaitingForLiving(name, self._label, agreement))
        return agreement.result

    def _regroup(self, context: Context, step: int | None) -> Any:
        """Agree with those who come in time. Members need no deadline of their own; who joins them does."""
        task, rank = self._world.kernel.current, self._rank.id
        if context.regrouping is None:
            context.regrouping = Regrouping(context)
        agreement, before = context.regrouping, task.deadline_s
        joins = not context.takes(rank)
        completion = agreement.come(rank, step, math.inf if joins else before)
        task.deadline_s = before if joins else math.inf
        try:
            await_one(self._world, completion, WaitingForLiving("recover", self._label, agreement))
        except Timeout:
            agreement.withdraw(rank)
            raise
        finally:
            task.deadline_s = before
        return agreement.result


def _all_flags(parts: dict[int, int]) -> int:
    return int(np.bitwise_and.reduce(list(parts.values())))
