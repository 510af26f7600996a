"""Asks a run's choices at each of its decisions: wildcards, probes, requests, windows. See `choices`.

The functions below replace those of the virtual MPI while a run with choices is in place; other runs are not
instrumented.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from spawnsim.comm.constants import ANY_SOURCE, PROC_NULL
from spawnsim.comm.handles import integer
from spawnsim.virtual.choices import DONE, PROBE, RECEIVE, Choices, Outcome
from spawnsim.virtual.engine import kernel, waiting
from spawnsim.virtual.engine.completion import Completion, Message
from spawnsim.virtual.engine.event_queue import Priorities
from spawnsim.virtual.engine.kernel import Task, current_task
from spawnsim.virtual.engine.waiting import await_one, poll_ahead
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.interpreter import Patches, Put
from spawnsim.virtual.mpi import context as members
from spawnsim.virtual.mpi import requests as requested
from spawnsim.virtual.mpi.context import Member
from spawnsim.virtual.mpi.point_to_point import PointToPoint
from spawnsim.virtual.mpi.requests import Reception
from spawnsim.virtual.mpi.rma import Epochs
from spawnsim.virtual.mpi.rma_service import Access, Target, WindowState
from spawnsim.virtual.ordering import moving_clocks


def _of_caller() -> Choices | None:
    task = current_task()
    found: Choices | None = None if task is None else task.kernel.owner.choices
    return found


def _chosen(raw: Callable[..., Any], instead: Callable[..., Any]) -> Any:
    """Return a function that calls `instead(choices, raw, ...)` in a run with choices, and else the original."""

    @functools.wraps(raw)
    def choosing(*args: Any, **kwargs: Any) -> Any:
        # Targets act in events, outside all tasks.
        choices = args[0].rank.kernel.owner.choices if type(args[0]) is Target else _of_caller()
        return raw(*args, **kwargs) if choices is None else instead(choices, raw, *args, **kwargs)

    return choosing


def _send(choices: Choices, raw: Any, world: World, mailbox: Any, message: Message, *mode: Any) -> Any:
    choices.boxes[mailbox].messages.append(message)
    if (task := current_task()) is not None:
        choices.acts(task.rank)
    return raw(world, mailbox, message, *mode)


def _accept(choices: Choices, raw: Any, member: Member, source: int, tag: int, operation: str) -> Message:
    posting = choices.post(member, source, tag, takes=True)
    if source == ANY_SOURCE:
        source = choices.ask_source(RECEIVE, member, posting)
    message: Message = raw(member, source, tag, operation)
    choices.met(posting, message, member._rank.id)
    return message


def _irecv(
    choices: Choices, raw: Any, member: Member, source: int, tag: int, operation: str, into: Any = None
) -> Any:
    source, tag = integer(source), integer(tag)
    if source == PROC_NULL:
        return raw(member, source, tag, operation, into)
    posting = choices.post(member, source, tag, takes=True)
    if source == ANY_SOURCE:
        source = choices.ask_source(RECEIVE, member, posting)
    request = raw(member, source, tag, operation, into)
    posting.receive = request._completion
    choices.receives[request._completion] = posting
    return request


def _collected(choices: Choices, raw: Any, receive: Reception, status: Any) -> Any:
    message, posting = receive.message, choices.receives.get(receive)
    result = raw(receive, status)
    if posting is not None and message is not None:
        choices.met(posting, message, posting.receive.owner._rank.id)  # type: ignore[union-attr]
    return result


def _probe(
    choices: Choices, raw: Any, member: Member, source: int, tag: int, status: Any, operation: str, *,
    hold: bool = False,
) -> Message:  # fmt: skip
    source, tag = integer(source), integer(tag)
    posting = choices.post(member, source, tag, takes=hold)
    if source == ANY_SOURCE:
        source = choices.ask_source(PROBE, member, posting)
    message: Message = raw(member, source, tag, status, operation, hold=hold)
    choices.met(posting, message, member._rank.id)
    return message


def _iprobe(
    choices: Choices, raw: Any, member: Any, source: int, tag: int, status: Any, *, hold: bool = False
) -> Message | None:
    source, tag = integer(source), integer(tag)
    if source == PROC_NULL:
        found: Message | None = raw(member, source, tag, status, hold=hold)
        return found
    posting = choices.post(member, source, tag, takes=hold)
    chosen = choices.ask_source(PROBE, member, posting)
    decision = posting.decision
    assert decision is not None
    if decision.forced is None:
        found = raw(member, source, tag, status, hold=hold)
    elif decision.forced:
        found = PointToPoint._probe.__wrapped__(member, chosen, tag, status, "Iprobe", hold=hold)  # type: ignore[attr-defined]
    else:
        choices.put_off(member._rank.id, [member._visible(source, tag)])
        choices.world.charge_poll()
        found = None
    sources = decision.others
    late_too = choices.may_be_late(member._rank.id, [found])
    decision.others = lambda: (*sources(), *([()] if late_too else ()))
    if found is None:
        posting.ended = choices.clocks.count(member._rank.id)
        choices.conclude(decision, ())
    else:
        choices.met(posting, found, member._rank.id)
    return found


def _await_each(choices: Choices, requests: Sequence[Any], places: Outcome) -> list[int]:
    for place in places:
        if not 0 <= place < len(requests) or requests[place]._completion is None:
            choices.impossible = True  # a request that no call can find complete
            continue
        await_one(choices.world, requests[place]._completion, requests[place]._waiting)
    return list(places)


def _await_some(choices: Choices, raw: Any, requests: Sequence[Any], operation: str) -> list[int]:
    completions = [getattr(each, "_completion", None) for each in requests]
    if len(completions) - completions.count(None) < 2:  # nothing to choose
        found: list[int] = raw(requests, operation)
        return found
    decision = choices.ask(DONE, choices.world.kernel.current.rank)
    single = operation == "Waitany"
    found = (
        raw(requests, operation)
        if decision.forced is None
        else _await_each(choices, requests, decision.forced)
    )
    choices.found(decision, completions, tuple(found[:1] if single else found))
    decision.others = lambda: choices.positions(
        decision, completions, lambda size: size == 1 if single else size > 0
    )
    return found


def _done_now(
    choices: Choices, raw: Any, world: World, requests: Sequence[Any], *, every: bool = False
) -> list[int]:
    completions = [each._completion for each in requests]
    decision = choices.ask(DONE, world.kernel.current.rank)
    if decision.forced is None:
        found: list[int] = raw(world, requests, every=every)
    elif decision.forced:
        found = _await_each(choices, requests, decision.forced)
        world.charge_poll()
    else:
        world.kernel.observe()
        now_s = world.kernel.current.clock
        choices.put_off(
            decision.key[1],
            (each for each in completions if each is not None and (each.finish_s or now_s + 1.0) <= now_s),
        )
        world.charge_poll()
        found = []
    active = len(completions) - completions.count(None)
    if every and len(found) < active:
        found = []
    late_too = choices.may_be_late(decision.key[1], (completions[place] for place in found))
    choices.found(decision, completions, tuple(found))
    decision.others = lambda: choices.positions(
        decision, completions, lambda size: late_too if size == 0 else not every or size == active
    )
    return found


def _over_now(choices: Choices, raw: Any, world: World, request: Any) -> bool:
    return bool(_done_now(choices, lambda *_, **__: [0] * raw(world, request), world, (request,)))


def _request(choices: Choices, raw: Any, window: Any, origin: Any, *what: Any) -> Access:
    choices.clocks.count(origin.id)
    choices.requested[what[-1]] = choices.clocks.stamp(origin.id)
    result: Access = raw(window, origin, *what)
    return result


def _taken(choices: Choices, raw: Any, window: Epochs, pending: tuple[int, Access, Any]) -> Any:
    choices.complete[pending[1]] = choices.clocks.count(window._comm._rank.id)
    return raw(window, pending)


def _waited(choices: Choices, raw: Any, window: Epochs, completion: Completion, *about: Any) -> None:
    raw(window, completion, *about)
    if isinstance(completion, Access):
        choices.complete[completion] = choices.clocks.count(window._comm._rank.id)


def _acquire(choices: Choices, raw: Any, target: Target, access: Access) -> None:
    if choices.admits(target, access):
        raw(target, access)


def _admit(choices: Choices, raw: Any, target: Target, access: Access) -> None:
    choices.admitted(target, access)
    raw(target, access)
    choices.resubmit(target)


def _release(choices: Choices, raw: Any, target: Target, who: int, dead: Any) -> None:
    if dead:
        raw(target, who, dead)
        return
    waiting, target.queue = target.queue, []
    if not target._is_held_by(who):  # it gives up the request for the lock
        waiting = [each for each in waiting if not each.lock or each.connection.origin.id != who]
    raw(target, who, dead)
    for access in waiting:
        target.acquire(access)
    choices.resubmit(target)


def _expiring(raw: Callable[..., Any]) -> Any:
    @functools.wraps(raw)
    def expiring(task: Task, wait: Any) -> Any:
        choices = task.kernel.owner.choices
        if choices is not None:
            choices.expire(task.rank)
        return raw(task, wait)

    return expiring


def _install(put: Put) -> None:
    for owner, name, instead in (
        (members, "send", _send), (Member, "_accept", _accept), (Member, "_irecv", _irecv),
        (Reception, "deliver", _collected), (PointToPoint, "_probe", _probe), (PointToPoint, "_iprobe", _iprobe),
        (requested, "_await_some", _await_some), (requested, "done_now", _done_now),
        (requested, "over_now", _over_now), (Target, "acquire", _acquire), (Target, "_admit", _admit),
        (Target, "release", _release), (WindowState, "request", _request), (Epochs, "_take", _taken),
        (Epochs, "_wait", _waited),
    ):  # fmt: skip
        put(owner, name, _chosen(getattr(owner, name), instead))
    for owner in (kernel, waiting):
        put(owner, "timeout", _expiring(kernel.timeout))
    put(requested, "poll_ahead", lambda *args: _of_caller() is None and poll_ahead(*args))


_choosing = Patches(_install).in_place


@contextmanager
def chosen() -> Iterator[None]:
    """Let worlds with `World.choices` choose while the block runs."""
    with ExitStack() as stack:
        stack.enter_context(moving_clocks())
        stack.enter_context(_choosing())
        yield


def _stepping(raw: Callable[..., Any]) -> Any:
    """Return a call that is a step of its rank: ranks with higher priorities act before it."""

    @functools.wraps(raw)
    def stepping(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        order = None if task is None else task.kernel.env.place
        if task is not None and isinstance(order, Priorities):
            order.step(task.rank)
            task.kernel.observe()
        return raw(*args, **kwargs)

    return stepping


def _install_steps(put: Put) -> None:
    for owner, name in (
        (members, "send"), (Member, "_accept"), (Member, "_irecv"), (PointToPoint, "_probe"),
        (PointToPoint, "_iprobe"), (Member, "_join"), (WindowState, "request"), (requested, "_await_some"),
        (requested, "done_now"), (requested, "over_now"),
    ):  # fmt: skip
        put(owner, name, _stepping(getattr(owner, name)))


stepped = Patches(_install_steps).in_place
"""Let the calls of worlds with `Priorities` be steps while the block runs."""
