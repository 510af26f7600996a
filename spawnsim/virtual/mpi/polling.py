"""Polls of requests: which requests are complete by now, and the cost of a poll.

All kinds of tests use them. This module handles the completions of requests, and must not depend on their outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spawnsim.errors import RankFailed
from spawnsim.virtual.engine.completion import Completion
from spawnsim.virtual.engine.waiting import check_alive, finished, settled
from spawnsim.virtual.engine.world import World

if TYPE_CHECKING:
    from spawnsim.virtual.mpi.requests import Request


def poll(world: World, requests: Sequence[Request]) -> list[Completion | None]:
    """Observe; return the present completions of the requests. The caller charges for the poll afterwards.

    Raises `Revoked` if one of the requests was pending when its communicator was revoked.
    """
    completions = [request._completion for request in requests]
    # The second poll in a row need not wait for the other ranks: their next messages cannot be here yet.
    if settled(world, completions):
        world.kernel.run_ahead()
    else:
        world.kernel.observe()
        completions = [request._completion for request in requests]
    # Revocation is checked after that, since it may have happened while this rank was parked.
    if world.revoked:
        for request in requests:
            request._check_revoked()
    return completions


def _check_alive(world: World, requests: Sequence[Request], completions: Sequence[Completion | None]) -> None:
    """Raise `RankFailed` if a pending request needs a rank known to be dead: tests of it would never succeed."""
    for request, completion in zip(requests, completions, strict=True):
        if completion is not None and completion.finish_s is None and request._waiting is not None:
            try:
                check_alive(world, request._waiting)
            except RankFailed:
                request._close()  # the program has tested this request
                raise


def done_now(world: World, requests: Sequence[Request], *, every: bool = False) -> list[int]:
    """Observe; return the positions of the completed requests.

    Reports a fruitless poll to the kernel if no request is complete (with `every`: not all are) and the end of no other
    request is known. Raises `RankFailed` if one of them will never complete.
    """
    completions = poll(world, requests)
    done = finished(completions, world.kernel.current.clock)
    if every or not done:
        if world.failed:
            _check_alive(world, requests, completions)
        ends = [each.finish_s for each in completions if each is not None]
        # Only a poll without any progress is fruitless. If the end of a pending request is known, it will be reached,
        # and a loop of polls is not a livelock.
        if len(ends) - ends.count(None) == len(done) < len(ends):
            world.kernel.fruitless()
    # Charged after the poll: charged before, the poll would see messages that arrive during its own overhead.
    world.charge_poll()
    return done


def over_now(world: World, request: Request) -> bool:
    """Observe; return whether one request is complete, as `done_now` does for several."""
    (completion,) = poll(world, (request,))
    if world.failed:
        _check_alive(world, (request,), (completion,))
    over = completion is not None and completion.over(world.kernel.current.clock)
    if completion is not None and completion.finish_s is None:
        world.kernel.fruitless()
    world.charge_poll()
    return over
