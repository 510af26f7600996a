"""Moves vector clocks along the messages and collectives of a run, while something follows it.

A receive happens after its send; what leaves a collective happens after the arrivals on which its result depends (all;
the root's, from `Bcast` and `Scatter`; lower ranks', from `Scan`; for the root of `Reduce` and `Gather` all, for the
other ranks none). Probes and polls order nothing. Runs without vector clocks are not instrumented.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from spawnsim.virtual.engine import wire
from spawnsim.virtual.engine.causality import Clocks, Stamp, joined
from spawnsim.virtual.engine.completion import Message
from spawnsim.virtual.engine.kernel import Task, current_task
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


Note = Callable[[Ordering, Task, Any, Any], None]


def noted(raw: Callable[..., Any], note: Note, *, after: bool = False) -> Any:
    """Return a function of spawnsim that also calls `note(ordering, task, arguments, result)`, before or after it."""

    @functools.wraps(raw)
    def noting(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        ordering = None if task is None else task.kernel.owner.ordering
        if ordering is None or task is None:
            return raw(*args, **kwargs)
        if not after:
            note(ordering, task, args, None)
            return raw(*args, **kwargs)
        result = raw(*args, **kwargs)
        note(ordering, task, args, result)
        return result

    return noting


def _sent(ordering: Ordering, task: Task, given: tuple[World, Any, Message], _none: None) -> None:
    given[2].stamp = ordering.event(task.rank)


def _accepted(ordering: Ordering, _task: Task, given: tuple[Member], message: Message) -> None:
    ordering.received(given[0]._rank.id, message)


def _taken(ordering: Ordering, _task: Task, given: tuple[Member, Message], _none: None) -> None:
    ordering.received(given[0]._rank.id, given[1])


def _arrived(
    ordering: Ordering, _task: Task, given: tuple[CollectiveInstance, int, Call], _none: None
) -> None:
    ordering.arrived(given[0], given[1])


def _left(ordering: Ordering, _task: Task, given: tuple[CollectiveInstance, int], _result: Any) -> None:
    ordering.leaves(given[0], given[1])


def _move_clocks(put: Put) -> None:
    put(members, "send", noted(wire.send, _sent))  # where `Member` looks it up
    put(Member, "_accept", noted(Member._accept, _accepted, after=True))
    put(Member, "_taken", noted(Member._taken, _taken, after=True))
    put(CollectiveInstance, "join", noted(CollectiveInstance.join, _arrived))
    put(CollectiveInstance, "outcome", noted(CollectiveInstance.outcome, _left, after=True))


moving_clocks = Patches(_move_clocks).in_place
