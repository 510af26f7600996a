"""Waits for completions, their descriptions, and operations that continue without a wait.

This module handles completions, deadlines and dead ranks, and must not depend on buffers. A wait ends early when a
death or a revocation dooms it. Deadlock reports and timeouts quote its description.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.comm.failures import RankFailed, Revoked
from spawnsim.comm.status import Status
from spawnsim.virtual.engine.completion import AllOf, Completion
from spawnsim.virtual.engine.event_queue import LATE
from spawnsim.virtual.engine.kernel import Task, timeout
from spawnsim.virtual.engine.world import World


@dataclass(slots=True)  # frozen would cost a microsecond a call
class Waiting:
    """One pending operation. `members` are the world ranks of the communicator's peers, `peer` a rank among them."""

    operation: str
    comm: str
    members: Sequence[int]
    peer: int
    tag: int = 0
    keyword: str = "source"
    acknowledged: Collection[int] = ()  # world ranks whose death ends no wait
    context: Any = None  # a revocation of it ends the wait; it records which of its members are dead

    def describe(self) -> str:
        """Return the call with its peer and tag."""
        asked = f"{self.keyword}={self._who()}"
        if self.keyword != "target":  # an access to a window has no tag
            asked += f", tag={'ANY_TAG' if self.tag == ANY_TAG else self.tag}"
        return f"{self.operation}({asked}) on {self.comm}"

    def _who(self) -> str:
        if self.peer == ANY_SOURCE:
            return "ANY_SOURCE"
        world = self.members[self.peer]
        return str(self.peer) if world == self.peer else f"{self.peer} (rank {world} of the world)"

    def peers(self) -> Sequence[int]:
        return self.members if self.peer == ANY_SOURCE else (self.members[self.peer],)

    def missing(self, by_s: float = math.inf) -> Sequence[int]:
        return () if self.peer == ANY_SOURCE else (self.peer,)

    def doomed(self, by_s: float) -> Sequence[int]:
        """Return the ranks of the communicator, known to be dead by a time, that end this wait with `RankFailed`."""
        if self.peer != ANY_SOURCE:
            return (self.peer,) if self.context.death_known_s(self.members[self.peer]) <= by_s else ()
        gone = [rank for rank in self.context.dead(by_s) if rank not in self.acknowledged]
        return [self.members.index(rank) for rank in sorted(gone) if rank in self.members]

    def contexts(self) -> Sequence[Any]:
        return () if self.context is None else (self.context,)

    def sequence(self) -> int:
        """Return -1: the call is not a collective."""
        return -1


class Unbroken:
    """Base of the waits that neither a death nor a revocation ends."""

    __slots__ = ()

    def doomed(self, by_s: float) -> Sequence[int]:
        return ()

    def contexts(self) -> Sequence[Any]:
        return ()

    def sequence(self) -> int:
        """Return -1: the call is not a collective."""
        return -1


@dataclass(slots=True)
class Assured(Waiting):
    """A pending operation with a known end: no death changes it any more, but a revocation does."""

    def doomed(self, by_s: float) -> Sequence[int]:
        return ()


@dataclass(frozen=True, slots=True)
class WaitingForAny:
    """Several pending operations, any of which ends the wait."""

    operation: str
    parts: Sequence[Any]

    def describe(self) -> str:
        """Return the call with the operations that it waits for."""
        shown = ", ".join(part.describe() for part in self.parts[:3])
        more = f", and {len(self.parts) - 3} more" if len(self.parts) > 3 else ""
        return f"{self.operation}[{shown}{more}]"

    def peers(self) -> Sequence[int]:
        return sorted({rank for part in self.parts for rank in part.peers()})

    def missing(self, by_s: float = math.inf) -> Sequence[int]:
        return sorted({rank for part in self.parts for rank in part.missing(by_s)})

    def doomed(self, by_s: float) -> Sequence[int]:
        return sorted({rank for part in self.parts for rank in part.doomed(by_s)})

    def contexts(self) -> Sequence[Any]:
        return [context for part in self.parts for context in part.contexts()]

    def sequence(self) -> int:
        """Return -1: the call is not a collective."""
        return -1


@contextmanager
def limited(task: Task, seconds: float, *, explicit: bool) -> Iterator[None]:
    """Limit the waits of a task to `seconds`. An explicit limit is an event; a default one only means "too late"."""
    before = task.deadline_s, task.explicit
    if explicit or not task.explicit:
        task.deadline_s, task.explicit = min(seconds, before[0]), explicit
    try:
        yield
    finally:
        task.deadline_s, task.explicit = before


def check_alive(world: World, waiting: Any) -> None:
    """Raise `Revoked` if the wait's communicator was revoked, `RankFailed` if known deaths doom the wait."""
    if world.revoked:
        check_revoked(world, waiting)
    if world.failed:
        doomed = waiting.doomed(world.kernel.current.clock)
        if doomed:
            raise rank_failed(world.kernel.current, waiting, doomed)


def check_revoked(world: World, waiting: Any, finish_s: float = math.inf) -> None:
    """Raise `Revoked` if a communicator of the wait was revoked by now, and before `finish_s`."""
    task = world.kernel.current
    for context in waiting.contexts():
        why = context.why_revoked(task.rank, task.clock)
        if why and min(context.revoked_s, task.clock) < finish_s:
            raise Revoked(f"{task.name} was in {waiting.describe()}, which {why}")


def rank_failed(task: Task, waiting: Any, doomed: Sequence[int]) -> RankFailed:
    """Return the error of a wait that dead ranks have ended."""
    names = ", ".join(map(str, doomed))
    dead = f"rank {names} has" if len(doomed) == 1 else f"ranks {names} have"
    message = f"{task.name} was in {waiting.describe()} at {task.clock:.6g} s, and {dead} failed"
    return RankFailed(doomed, message)


def over_by_itself(world: World, completion: Completion) -> bool:
    """Whether an operation is complete, or has a known end and no earlier event matters to the running task.

    The task's clock then moves to the end: nothing is awaited, as in most waits of a ring.
    """
    finish_s = completion.finish_s
    if finish_s is None:
        return False
    task = world.kernel.current
    now_s = task.clock
    if finish_s <= now_s:
        finish_s = completion.final()
        if finish_s <= now_s:
            return True
    rank, due_s = world.ranks[task.rank], now_s + task.deadline_s
    if rank.observers or finish_s > due_s:
        return False
    finish_s = completion.final()
    if finish_s > due_s:
        return False
    if rank.awake is None and finish_s < rank.death_s:  # `advance_to`, without the call
        task.clock = finish_s
    else:
        rank.advance_to(task, finish_s)
    return True


def poll_ahead(world: World, completion: Completion) -> bool:
    """Poll a completion before the running task's time; return whether it is certainly complete.

    It is, if it is complete now and no action of other ranks can change that.
    """
    task, plan = world.kernel.current, world.plan
    if world.ranks[task.rank].observers or (plan is not None and plan.mortal):
        return False
    if not completion.over(task.clock):
        return False
    world.kernel.run_ahead()
    world.charge_poll()
    return True


def settled(world: World, completions: Iterable[Completion | None]) -> bool:
    """Whether no action of other ranks can change which of these are complete at the running task's time."""
    if not world.is_settled():
        return False
    time_s = world.kernel.current.clock
    for each in completions:  # noqa: SIM110 - half the time that `all` takes
        if each is not None and not each.is_settled(time_s):
            return False
    return True


def await_one(world: World, completion: Completion, waiting: Any) -> None:
    """Wait until `completion` is complete; the running task's clock moves to its end."""
    kernel = world.kernel
    task = kernel.current
    rank, due_s = world.ranks[task.rank], task.clock + task.deadline_s
    # With a known end, the clock may simply move there, unless earlier events matter: accesses to memory that this rank
    # exposes, or (in a plan with deaths) a revocation. Only then does the wait proceed in steps.
    revocable = world.plan is not None and world.plan.mortal and isinstance(waiting, Waiting)
    while completion.finish_s is None or (
        rank.observers
        and task.clock < completion.finish_s
        and (completion.finish_s <= due_s or (revocable and task.clock < due_s))
    ):
        if completion.finish_s is None:
            if world.failed or world.revoked:
                check_alive(world, waiting)
            completion.waiter = task
            try:
                kernel.block(waiting, lost=completion.lost)
            finally:
                completion.waiter = None
        elif revocable:
            _await_end(world, min(completion.finish_s, due_s), waiting)
        else:  # its NIC lets in requests to its window as they arrive: their order is known only at that time
            rank.advance_to(task, completion.finish_s)
            kernel.observe()
    finish_s = completion.finish_s if completion.finish_s > due_s else completion.final()
    if finish_s > task.clock:
        if (
            rank.awake is None and finish_s <= due_s and finish_s < rank.death_s
        ):  # `advance_to`, without the call
            task.clock = finish_s
        else:
            rank.advance_to(task, min(finish_s, due_s))
        if rank.observers:  # its memory is exposed: its next action must happen at its own time
            kernel.observe(LATE if finish_s > due_s else 0)
        if finish_s > due_s:
            raise timeout(task, waiting)


def _await_end(world: World, finish_s: float, waiting: Waiting) -> None:
    """Wait for a known end or deadline, unless the communicator is revoked before."""
    kernel = world.kernel
    task = kernel.current
    wait = Assured(*(getattr(waiting, name.name) for name in fields(Waiting)))
    kernel.env.at(finish_s, task.rank, lambda: kernel.resume(task) if task.wait is wait else None)
    kernel.block(wait)
    world.ranks[task.rank].advance_to(task, finish_s)
    kernel.observe()


def finished(completions: Sequence[Completion | None], now_s: float) -> list[int]:
    """Return the positions of the completions that are complete by `now_s`, the earliest first."""
    known = [
        (each.finish_s, index)
        for index, each in enumerate(completions)
        if each is not None and each.finish_s is not None and each.finish_s <= now_s
    ]
    if not known:  # as in most polls
        return []
    over = [(completions[index].final(), index) for _, index in sorted(known)]  # type: ignore[union-attr]
    return [index for finish_s, index in sorted(over) if finish_s <= now_s]


def await_any(world: World, completions: Sequence[Completion | None], waiting: Any) -> list[int]:
    """Wait until at least one is complete; return the positions of all complete ones, the earliest first."""
    kernel = world.kernel
    task = kernel.current
    rank = world.ranks[task.rank]
    due_s = task.clock + task.deadline_s
    kernel.observe()
    while True:
        rank.advance_to(task, kernel.env.now)
        over = finished(completions, task.clock)
        if over:
            return over
        check_alive(world, waiting)
        _park_until_any(world, completions, waiting, due_s)


def _park_until_any(
    world: World, completions: Sequence[Completion | None], waiting: Any, due_s: float
) -> None:
    """Park until a completion's end becomes known, or the earliest known end is reached."""
    kernel = world.kernel
    task = kernel.current
    pending = [each for each in completions if each is not None]
    first_s = _earliest(pending)
    if first_s > due_s and math.isfinite(first_s):
        rank = world.ranks[task.rank]
        rank.advance_to(task, due_s)
        if rank.observers:
            kernel.observe(LATE)
        raise timeout(task, waiting)
    alarm = kernel.env.at(first_s, task.rank, lambda: kernel.resume(task)) if math.isfinite(first_s) else None
    for each in pending:
        each.waiter = task
    try:
        kernel.block(waiting, lost=any(each.lost for each in pending))
    finally:
        for each in pending:
            each.waiter = None
        if alarm is not None:
            alarm.cancel()


def _earliest(completions: Iterable[Completion]) -> float:
    return min((each.finish_s for each in completions if each.finish_s is not None), default=math.inf)


class FreedOperation(AllOf):
    """Runs the delivery of a completion at its end, in place of the freed request."""

    __slots__ = ("_deliver", "_part", "_rank")

    def __init__(self, world: World, part: Completion, deliver: Callable[[Status], Any]) -> None:
        self._part, self._deliver, self._rank = part, deliver, world.here()
        self._rank.observers += 1
        super().__init__(world.kernel, (part,))

    def part_over(self) -> None:
        """Deliver at the end that is now known; the end may still be withdrawn, or turn out to be later."""
        end_s, env = self._part.finish_s, self.kernel.env
        if end_s is not None and self.finish_s is None:
            env.at(max(end_s, env.now), self._rank.id, self._arrive)

    def reopen(self) -> None:
        """Keep waiting: the part is pending again."""

    def _arrive(self) -> None:
        now_s, part = self.kernel.env.now, self._part
        if self.finish_s is not None or part.finish_s is None or self._rank.dead:
            return
        if part.final() > now_s:
            self.part_over()
            return
        self.finish_s = now_s
        self._rank.observers -= 1
        try:
            self._deliver(Status())
        except Exception as error:  # noqa: BLE001 - it is the program's fault, and ends the run like an error of the program
            self.kernel.fail(error, self._rank.tasks[0])
