"""Looks at requests, which wait for nothing but their time: which are over by now, and what the look costs.

Tests of all kinds are made of them. Knows requests by what they are over; must not know what those deliver.
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


def look(world: World, requests: Sequence[Request]) -> list[Completion | None]:
    """Observe; return what the requests are over, as of now. The caller charges for the look once it has looked.

    Raises `Revoked` if one of the requests was open when its communicator was revoked.
    """
    completions = [request._completion for request in requests]
    # The second look in a row need not wait for all others: what they send from now on cannot be there yet.
    if settled(world, completions):
        world.kernel.run_ahead()
    else:
        world.kernel.observe()
        completions = [request._completion for request in requests]
    # Revocation is asked for after it, since it may have come while this rank was parked.
    if world.revoked:
        for request in requests:
            request._check_revoked()
    return completions


def _check_alive(world: World, requests: Sequence[Request], completions: Sequence[Completion | None]) -> None:
    """Raise `RankFailed` if a request that is open needs a rank known to be dead: tests of it would never end."""
    for request, completion in zip(requests, completions, strict=True):
        if completion is not None and completion.finish_s is None and request._waiting is not None:
            try:
                check_alive(world, request._waiting)
            except RankFailed:
                request._close()  # the program has looked at it
                raise


def done_now(world: World, requests: Sequence[Request], *, every: bool = False) -> list[int]:
    """Observe; return the positions of the requests that are over.

    The kernel is told of a look in vain: none is over (or not `every` one), and of no other the end is known. Raises
    `RankFailed` where one of these will never be over.
    """
    completions = look(world, requests)
    done = finished(completions, world.kernel.current.clock)
    if every or not done:
        if world.failed:
            _check_alive(world, requests, completions)
        ends = [each.finish_s for each in completions if each is not None]
        # Only a look without any news is fruitless. If the end of one that is still open is known, time will bring it,
        # and a loop of polls is no livelock.
        if len(ends) - ends.count(None) == len(done) < len(ends):
            world.kernel.fruitless()
    # Charged after the look: charged before, a poll would see what arrives during its own overhead.
    world.charge_poll()
    return done


def over_now(world: World, request: Request) -> bool:
    """Observe; return whether one request is over, as `done_now` does for several."""
    (completion,) = look(world, (request,))
    if world.failed:
        _check_alive(world, (request,), (completion,))
    over = completion is not None and completion.over(world.kernel.current.clock)
    if completion is not None and completion.finish_s is None:
        world.kernel.fruitless()
    world.charge_poll()
    return over
