"""Recovery from dead ranks: MPI's fault-tolerance calls (revoke, shrink, agree) under mpi4py's names, and `recover`.

From the time of a revocation on, every call ends in `Revoked`, and waiting ranks are woken. No rank waits for a member
that is known to be dead; a death during a wait ends that wait. A recovery does not wait for ranks whose program has
ended, and it does not wait forever: it gives up a rank that is paused for `SILENT_S`, or that lives but does not arrive
in time, as real ranks do. Messages not received by then are dropped and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.failures import ERR_COUNT, ArgumentError, Revoked
from spawnsim.comm.objects import DIED, ENDED, SILENT
from spawnsim.comm.protocols import Recovery
from spawnsim.errors import Timeout
from spawnsim.virtual.engine.completion import Completion, Message
from spawnsim.virtual.engine.matching import Mailbox, undelivered
from spawnsim.virtual.engine.waiting import Unbroken, await_one
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.mpi.context import GIVEN_UP, Context, Member
from spawnsim.virtual.mpi.requests import Request, request_for


def family(context: Context) -> list[Context]:
    """Return a context and all contexts derived from it, in the order of their creation."""
    found = [each for each in context.world.open_contexts if each.within(context)]
    return sorted(found, key=lambda each: each.number)


def revoke(contexts: Sequence[Context]) -> None:
    """Make every call on these contexts end in `Revoked` from the running task's time on."""
    world = contexts[0].world
    task, env = world.kernel.current, world.kernel.env
    fresh = {each for each in contexts if each.revoked_s is None or each.revoked_s > task.clock}
    if fresh:
        world.revoked = True
        for context in fresh:
            context.revoked_s = task.clock
        env.at(max(task.clock, env.now), task.rank, lambda: _interrupt(world, fresh))


def _interrupt(world: World, contexts: Collection[Context]) -> None:
    for task in world.kernel.tasks:
        wait = task.wait
        if task.parked and wait is not None and not contexts.isdisjoint(wait.contexts()):  # type: ignore[attr-defined]
            world.kernel.throw(task, Revoked(f"{task.name} was in {wait.describe()} when it was revoked"))


def give_up(world: World, rank: int) -> None:
    """Shut a rank out: all its calls end in `Revoked` on every communicator, should it return."""
    world.revoked = True
    world.ranks[rank].evicted = True
    for context in world.open_contexts:
        context.shut_out(rank)


def close(contexts: Sequence[Context], survivors: set[int], time_s: float) -> None:
    """Drop all messages to survivors on these contexts: messages not received yet, and later ones."""
    for context in contexts:
        for rank in sorted(survivors.intersection(context.everyone)):
            side = next(side for side, places in enumerate(context.places) if rank in places)
            senders = context.groups[-1 - side] if len(context.groups) > 1 else context.groups[0]
            # Created here if it does not exist, so that later messages find it closed.
            mailbox = context.mailbox(rank)
            mailbox.__class__ = ClosedMailbox  # senders hold this object and need no check
            assert isinstance(mailbox, ClosedMailbox)
            mailbox.close(context.world, () if context.inner else senders, time_s)


class ClosedMailbox(Mailbox):
    """A mailbox from which no rank receives any more."""

    def close(self, world: World, senders: Sequence[int], time_s: float) -> None:
        """Drop the queued messages. `senders`: world ranks by communicator rank; empty for a window's."""
        self._world, self._senders, self._closed_s = world, senders, time_s
        left = [*undelivered(self)]
        self.unexpected, self._flying, self._arrived = {}, None, type(self._arrived)()
        for message in sorted(left, key=lambda each: (each.envelope_s, each.source, each.number)):
            self._admit(message)

    def _admit(self, message: Message) -> None:
        """Drop and count a message."""
        message.queued = False
        if self._senders:
            source, time_s = self._senders[message.source], max(message.envelope_s, self._closed_s)
            self._world.ranks[self.rank].dropped[source] += 1
            self._world.recorder.event(
                self.rank, time_s, "late_message", {"source": source, "nbytes": message.nbytes}
            )

    def _put_back(self, message: Message) -> None:
        """Discard a message whose receive was given up."""


Ranks = tuple[int, ...]

SILENT_S = 3.0  # a paused rank is given up after this time; real ranks, which must ask, take as long


@dataclass(eq=False)
class Agreement:
    """A collective of the living members of a communicator: a death ends the wait for that member."""

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
        """Complete the agreement if all awaited ranks have arrived: two sweeps over a tree of the members."""
        world = self.context.world
        now_s = max(self.latest_s, world.kernel.env.now)
        if self.over or self.awaited(now_s):
            return
        self.over, self.result = True, self.conclude(now_s)
        world.on_death.remove(self.check)
        # Two sweeps over a binary tree with messages of 8 bytes: the contributions go up, the result goes down.
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
        return self.make(self.parts)


@dataclass(eq=False)
class RecoveryAgreement(Agreement):
    """The agreement of a recovery. The lowest member that has arrived decides when to stop waiting.

    Restarted ranks may arrive too: they are not members, but join the members. They decide nothing. The result is the
    context of all ranks that have arrived, and the smallest step of the members among them.
    """

    make: Callable[[dict[int, Any]], Any] = field(init=False)
    incarnations: dict[int, int] = field(default_factory=dict)  # by world rank; only arrived ranks
    # By world rank: (arrival time, time at which it gives up absent ranks).
    limits: dict[int, tuple[float, float]] = field(default_factory=dict)
    _alarm_s: float = math.inf
    # The rank that decides, and a rank awaited without limit. While both are valid, no other rank needs a check.
    _decides: int | None = None
    _unbounded: int | None = None

    def come(self, rank: int, part: Any, limit_s: float) -> Completion:
        """Arrive. Living ranks that do not arrive are given up after `limit_s`."""
        world = self.context.world
        now_s, self.incarnations[rank] = world.kernel.current.clock, world.ranks[rank].incarnation
        self.limits[rank] = now_s, now_s + max(limit_s, SILENT_S)
        if self._decides is not None and rank <= self._decides:
            self._decides = rank if self._is_member(rank) else None
        return self.join(rank, part)

    def awaited(self, now_s: float) -> list[int]:
        """Return the awaited world ranks, or one of them; set an alarm for the end of the wait."""
        if self._decides is not None and self._unbounded not in self.parts:
            assert self._unbounded is not None
            began_s, due_s = self.limits[self._decides]
            alive = (
                self.context.world.failed.get((self._decides, self.incarnations[self._decides]), math.inf)
                > now_s
            )
            if alive and due_s > now_s and self._free_s(self._unbounded, began_s, now_s) == math.inf:
                self._set_alarm(due_s)
                return [self._unbounded]
        return self._all_awaited(now_s)

    def _all_awaited(self, now_s: float) -> list[int]:
        """Return all awaited ranks: too expensive to repeat at each arrival among a thousand ranks."""
        self._decides = None
        here = self._here(now_s)
        if not here:  # all of them have died since
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
            # The last one, since ranks mostly arrive in rank order.
            self._unbounded = next((rank for rank in reversed(awaited) if free_s[rank] == math.inf), None)
            self._decides = min(members, default=None) if self._unbounded is not None else None
        return awaited

    def conclude(self, now_s: float) -> Any:
        """Give up absent ranks, and drop messages on their way."""
        context, world = self.context, self.context.world
        here = self._here(now_s)
        for rank in context.everyone:
            if rank not in here and context.takes(rank) and world.ranks[rank].ended_s > now_s:
                give_up(world, rank)
        members = {rank for rank in here if self._is_member(rank)}
        close(family(context), members, now_s)
        steps = [self.parts[rank] for rank in members or here if self.parts[rank] is not None]
        context.regrouping = None
        context.successor = context.succeed({rank: self.incarnations[rank] for rank in here})
        return context.successor, min(steps, default=None)

    def withdraw(self, rank: int) -> None:
        """Withdraw a rank after its wait timed out."""
        del self.parts[rank], self.incarnations[rank]
        self._decides = None

    def _is_member(self, rank: int) -> bool:
        inside = any(rank in places for places in self.context.places)
        return inside and self.incarnations[rank] == self.context.incarnation(rank)

    def _here(self, now_s: float) -> set[int]:
        failed = self.context.world.failed
        return {came[0] for came in self.incarnations.items() if failed.get(came, math.inf) > now_s}

    def _free_s(self, rank: int, began_s: float, now_s: float) -> float:
        world, owner = self.context.world, self.context.world.ranks[rank]
        silent_s = max(began_s, world.plan.paused_s(rank, now_s)) + SILENT_S if owner.awake else math.inf
        return min(self._gone_s(rank), silent_s)

    def _gone_s(self, rank: int) -> float:
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
    """A wait for the living members, as survivors of a revocation must agree."""

    operation: str
    comm: str
    agreement: Agreement

    def describe(self) -> str:
        return f"{self.operation} on {self.comm}"

    def peers(self) -> list[int]:
        """Return the awaited world ranks."""
        context = self.agreement.context
        return [
            rank
            for rank in context.everyone
            if rank not in self.agreement.parts and context.death_known_s(rank) == math.inf
        ]

    def missing(self, by_s: float = math.inf) -> list[int]:
        return [self.agreement.context.everyone.index(rank) for rank in self.peers()]


def recover(comm: Member, step: int | None) -> Recovery:
    """Meet all survivors of a communicator, or of the communicator that recoveries made of it; see `Comm.recover`."""
    comm._world.kernel.observe()
    _check_given_up(comm)
    now, rank = comm._context, comm._rank
    joins = not now.takes(rank.id)
    while joins and now.successor is not None and not now.takes(rank.id):
        now = now.successor
    revoke(family(now))
    context, agreed = _regroup(comm, now, step)
    ranks, dead, joined = _compared(context, comm, now)
    rank.outside = False
    survivors = comm._entered(context)
    # As real ranks record it: without ranks whose program had ended, and without restarted ranks.
    gone = [comm._world.ranks[comm._members[old]] for old in dead]
    lost = [each.id for each in gone if each.dead or each.evicted]
    survivors.record.event(
        "recovered", dead=lost, size=len(context.places[0]), step=-1 if agreed is None else agreed
    )
    return Recovery(survivors, dict(ranks), agreed, dead, joined)


def _compared(context: Context, comm: Member, now: Context) -> tuple[dict[int, int], Ranks, Ranks]:
    """Return (new rank by old rank, old ranks that are gone, new ranks that joined); computed once for all members."""
    key = ("recovery", comm._context.number, comm._members, now.number)
    found: tuple[dict[int, int], Ranks, Ranks] | None = context.notes.get(key)
    if found is None:
        places, before = context.places[0], comm._context
        stay = {member for member in places if context.incarnation(member) == before.incarnation(member)}
        ranks = {old: places[member] for old, member in enumerate(comm._members) if member in stay}
        dead = tuple(old for old in range(len(comm._members)) if old not in ranks)
        joined = tuple(
            places[member] for member in places if context.incarnation(member) != now.incarnation(member)
        )
        found = context.notes[key] = ranks, dead, joined
    return found


def dead_members(comm: Member) -> list[int]:
    """Return the world ranks of the members whose death the running task knows of."""
    dead = comm._context.dead(comm._world.kernel.current.clock)
    return [rank for rank in comm._context.everyone if rank in dead] if dead else []


def find_dead(comm: Member) -> list[int]:
    """Return the dead members, and charge for the poll: a loop of such polls counts as waiting."""
    kernel = comm._world.kernel
    kernel.observe()
    dead = dead_members(comm)
    comm._world.charge_poll()
    if not dead:
        kernel.fruitless()
    return dead


def absent(comm: Member) -> dict[int, str]:
    """Return, by rank of the communicator, why the rank cannot respond at the running task's time."""
    world = comm._world
    world.kernel.observe()
    now_s, dead = world.kernel.current.clock, comm._context.dead(world.kernel.current.clock)
    if not (dead or world.ended or (world.plan is not None and world.plan.paused)):
        return {}  # without a loop over 100,000 ranks
    reasons: dict[int, str] = {}
    for place, member in enumerate(comm._members):
        rank = world.ranks[member]
        if member in dead:
            reasons[place] = DIED
        elif rank.ended_s <= now_s:
            reasons[place] = ENDED
        elif rank.awake is not None and world.plan.paused_s(member, now_s) < math.inf:
            reasons[place] = SILENT
    return reasons


def agree(comm: Member, flag: int) -> int:
    """Return the bitwise AND of all survivors' flags."""
    return int(_agree_alive(comm, "Agree", flag, _all_flags))


def start_agree(comm: Member, flag: Any) -> Request:
    """Start `agree` on a buffer of one integer, which receives the result."""
    own = as_buffer(flag, writable=True)
    if own.nbytes != 4:
        raise ArgumentError(ERR_COUNT, f"Iagree: a buffer of {own.nbytes} bytes: give one integer of 4 bytes")
    agreement = _agreement(comm, _all_flags)
    completion = agreement.join(comm._rank.id, int(own.pack()[0]))

    def deliver(_: Any) -> None:
        own.unpack(np.array([agreement.result], own.dtype))

    waiting = WaitingForLiving("Iagree", comm._label, agreement)
    return request_for(comm._world, completion, waiting, deliver)


def shrink(comm: Member) -> Context:
    """Return a context of the survivors. It is independent of the old context and does not end with it."""
    context = comm._context

    def living(parts: dict[int, Any]) -> Context:
        return context.succeed({rank: context.incarnation(rank) for rank in parts})

    made: Context = _agree_alive(comm, "Shrink", None, living)
    return made


def _check_given_up(comm: Member) -> None:
    if comm._rank.evicted:
        raise Revoked(f"{comm._world.kernel.current.name}: {GIVEN_UP}")


def _agreement(comm: Member, make: Callable[[dict[int, Any]], Any]) -> Agreement:
    """Return this rank's next agreement on the communicator."""
    _check_given_up(comm)
    if not comm._context.takes(comm._rank.id):
        comm._need()
    notes, rank = comm._context.notes, comm._rank.id
    number = notes[rank, "agreements"] = notes.get((rank, "agreements"), -1) + 1
    agreement = notes.get(("agreement", number))
    if agreement is None:
        agreement = notes["agreement", number] = Agreement(comm._context, make)
    assert isinstance(agreement, Agreement)
    return agreement


def _agree_alive(comm: Member, name: str, part: Any, make: Callable[[dict[int, Any]], Any]) -> Any:
    agreement = _agreement(comm, make)
    completion = agreement.join(comm._rank.id, part)
    await_one(comm._world, completion, WaitingForLiving(name, comm._label, agreement))
    return agreement.result


def _regroup(comm: Member, context: Context, step: int | None) -> Any:
    """Agree with the ranks that arrive in time. Only joining ranks need their own deadline; members need none."""
    task, rank = comm._world.kernel.current, comm._rank.id
    if context.regrouping is None:
        context.regrouping = RecoveryAgreement(context)
    agreement, before = context.regrouping, task.deadline_s
    joins = not context.takes(rank)
    completion = agreement.come(rank, step, math.inf if joins else before)
    task.deadline_s = before if joins else math.inf
    try:
        await_one(comm._world, completion, WaitingForLiving("recover", comm._label, agreement))
    except Timeout:
        agreement.withdraw(rank)
        raise
    finally:
        task.deadline_s = before
    return agreement.result


def _all_flags(parts: dict[int, int]) -> int:
    return int(np.bitwise_and.reduce(list(parts.values())))
