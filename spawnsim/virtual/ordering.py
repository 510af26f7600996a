"""Moves vector clocks along the messages and collectives of a run, while something follows it.

A receive happens after its send; what leaves a collective happens after the arrivals on which its result depends (all;
the root's, from `Bcast` and `Scatter`; lower ranks', from `Scan`; for the root of `Reduce` and `Gather` all, for the
other ranks none). Probes and polls order nothing. Runs without vector clocks are not instrumented.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from spawnsim.virtual.engine.causality import Clocks, Stamp, joined
from spawnsim.virtual.engine.completion import Message
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.interpreter import Patches, Put
from spawnsim.virtual.mpi import context as members
from spawnsim.virtual.mpi.context import Member
from spawnsim.virtual.mpi.instance import Call, CollectiveInstance

FROM_ROOT = ("bcast", "scatter")
WHOLE = -1  # key of the stamp after all arrivals
TO_ROOT = ("reduce", "gather", "gatherv")


class Ordering:
    """The vector clocks of one world, as `World.ordering`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.clocks = Clocks(len(world.ranks))
        self._arrived: dict[CollectiveInstance, dict[int, Stamp]] = {}
        self._left: dict[CollectiveInstance, int] = {}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Keep the clocks while the block runs."""
        self._world.ordering = self
        with moving_clocks():
            yield

    def event(self, rank: int) -> Stamp:
        """Begin an event of a rank that later events of other ranks may follow; return its stamp."""
        self.clocks.count(rank)
        return self.clocks.stamp(rank)

    def received(self, rank: int, message: Message) -> None:
        """Order the send of a message before a rank's next event."""
        stamp = getattr(message, "stamp", None)
        if stamp is not None:
            self.clocks.learn(rank, stamp)

    def arrived(self, instance: CollectiveInstance, me: int) -> None:
        """Keep the stamp of member `me` at its arrival."""
        self._arrived.setdefault(instance, {})[me] = self.event(instance.members[me])

    def leaves(self, instance: CollectiveInstance, me: int) -> None:
        """Order the arrivals on which a member's result depends before its next event."""
        stamps, call = self._arrived.get(instance), instance.calls[me]
        if stamps is None or call is None:
            return
        needed = _needed(instance, call, me)
        size = len(instance.members)
        if len(needed) == size and len(stamps) == size:  # joined once for all members
            stamps[WHOLE] = joined([*stamps.values()])
        if len(needed) == size and WHOLE in stamps:
            found = stamps[WHOLE]
        else:
            found = joined(stamps.get(each) for each in needed)
        if found is not None:
            self.clocks.learn(instance.members[me], found)
        self._left[instance] = self._left.get(instance, 0) + 1
        if self._left[instance] == len(instance.members):
            del self._left[instance], self._arrived[instance]


def _needed(instance: CollectiveInstance, call: Call, me: int) -> Sequence[int]:
    if call.needs is not None:
        return call.needs
    everyone = range(len(instance.members))
    if (
        instance.context is not None and len(instance.context.groups) > 1
    ):  # roots are numbered in the other group
        return everyone
    if call.timing in FROM_ROOT:
        return (call.root,)
    if call.timing in TO_ROOT:
        return everyone if me == call.root else ()
    if call.timing in ("scan", "exscan"):
        return range(me)
    return everyone


def _move_clocks(put: Put) -> None:
    # As `Member` looks it up: a timeline may have replaced it.
    send, accept, taken = vars(members)["send"], Member._accept, Member._taken
    join, outcome = CollectiveInstance.join, CollectiveInstance.outcome

    @functools.wraps(send)
    def sending(world: World, mailbox: Any, message: Message, *mode: Any) -> Any:
        if world.ordering is not None:
            message.stamp = world.ordering.event(world.kernel.current.rank)
        return send(world, mailbox, message, *mode)

    @functools.wraps(accept)
    def accepting(member: Member, *given: Any) -> Message:
        message = accept(member, *given)
        if member._world.ordering is not None:
            member._world.ordering.received(member._rank.id, message)
        return message

    @functools.wraps(taken)
    def taking(member: Member, message: Message, into: Any) -> Any:
        result = taken(member, message, into)
        if member._world.ordering is not None:
            member._world.ordering.received(member._rank.id, message)
        return result

    @functools.wraps(join)
    def joining(instance: CollectiveInstance, me: int, call: Call) -> Any:
        if instance.world.ordering is not None:
            instance.world.ordering.arrived(instance, me)
        return join(instance, me, call)

    @functools.wraps(outcome)
    def leaving(instance: CollectiveInstance, me: int) -> Any:
        result = outcome(instance, me)
        if instance.world.ordering is not None:
            instance.world.ordering.leaves(instance, me)
        return result

    put(members, "send", sending)  # where `Member` looks it up
    put(Member, "_accept", accepting)
    put(Member, "_taken", taking)
    put(CollectiveInstance, "join", joining)
    put(CollectiveInstance, "outcome", leaving)


moving_clocks = Patches(_move_clocks).in_place
