"""Crashes of ranks, what the others learn of them and when, and restarts.

A restarted rank runs its program from the beginning at its time of restart, with nothing but its number. It is another
member than the one that died: no communicator made before takes it, however soon it is back, and the others learn of
the death as of any other. Only `recover()` lets it join them. (ULFM, too, has no way back into a communicator.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from spawnsim.random import Streams
from spawnsim.virtual.digest import CRASH, RESTART
from spawnsim.virtual.engine.kernel import RankDied, Task
from spawnsim.virtual.engine.waiting import rank_failed
from spawnsim.virtual.engine.world import Rank, World

DETECTION_S = 0.01  # from a rank's death until the others know (measured with ULFM on one node)


class Crashes:
    """Ends ranks at their time of death and begins them again, as the fault plan says."""

    def __init__(self, world: World, renew: Callable[[int], None]) -> None:
        """`renew(rank)` gives a restarted rank new services and communicators."""
        self._world, self._renew = world, renew
        self._programs: dict[int, Callable[[], Any]] = {}

    def begin(self, rank: Rank, program: Callable[[], Any], clock_s: float = 0.0) -> None:
        """Run a rank's program from a time on, and end it at its time of death."""
        world = self._world
        self._programs[rank.id], rank.ended_s = program, math.inf
        rank.tasks = [world.kernel.spawn(rank.id, program, clock=clock_s)]
        if rank.death_s < math.inf:
            death_s = rank.death_s
            world.kernel.env.at(death_s, rank.id, lambda: self._expire(rank, death_s))

    def ended(self, task: Task) -> None:
        """Take note that a task of a rank has ended; it may have reached the rank's death by itself."""
        rank = self._world.ranks[task.rank]
        if task.clock >= rank.death_s and not rank.dead:
            self._mark_dead(rank)
        elif task is rank.tasks[0] and not rank.dead:
            rank.ended_s = task.clock
        self._check_agreements()

    def _expire(self, rank: Rank, death_s: float) -> None:
        """End the tasks of a rank that is waiting at its time of death."""
        if rank.death_s != death_s or rank.dead or not any(task.alive for task in rank.tasks):
            return
        self._mark_dead(rank)
        for task in rank.tasks:
            if task.alive:
                self._world.kernel.throw(task, RankDied())

    def _mark_dead(self, rank: Rank) -> None:
        world, env = self._world, self._world.kernel.env
        # The rank's own clock knows its death exactly (`Rank.advance_to` stops there). The others learn of it later,
        # all at one time, so that what each does about it does not depend on the order in which they run.
        rank.dead = True
        rank.digest.note((rank.death_s, CRASH, -1, 0, 0))
        known_s = max(rank.death_s, env.now) + DETECTION_S
        world.failed[rank.id, rank.incarnation] = known_s
        if rank.death_s < math.inf:  # else it is paused for ever
            world.recorder.event(rank.id, rank.death_s, "crash", {})
        env.at(known_s, rank.id, self._announce)
        again_s = world.plan.restart_s(rank.id, rank.death_s)
        if again_s < math.inf:
            env.at(max(again_s, env.now), rank.id, lambda: self._restart(rank, again_s))

    def _announce(self) -> None:
        """Wake the tasks that wait for ranks that are now known to be dead."""
        self._check_agreements()
        kernel, now_s = self._world.kernel, self._world.kernel.env.now
        dead = self._world.known_dead(now_s)
        for task in kernel.tasks:
            doomed = task.wait.doomed(dead) if task.parked and task.wait is not None else ()  # type: ignore[attr-defined]
            if doomed:
                task.clock = max(task.clock, now_s)  # the message says when
                kernel.throw(task, rank_failed(task, task.wait, doomed))

    def _check_agreements(self) -> None:
        for check in list(self._world.on_death):
            check()

    def _restart(self, rank: Rank, time_s: float) -> None:
        """Begin a rank's program again: it keeps its place and its machine, and nothing else."""
        # A restarted process has lost its memory: its NIC is idle, its random streams start anew, and so do its own
        # communicators. `revoked` and `shut_out` let its calls on any communicator made before end in `Revoked`, since
        # the messages of one incarnation must not be taken for those of another.
        world = self._world
        rank.incarnation, rank.dead, rank.outside, rank.evicted = rank.incarnation + 1, False, True, False
        rank.observers, rank.busy, rank.cleared = world.observers_of(rank.id), [], []
        rank.death_s = world.plan.death_s(rank.id, time_s)
        rank.nic_free_s = rank.bulk_free_s = max(time_s, 0.0)
        rank.streams, rank.generators = Streams(world.seed, rank.id), None
        rank.attachments.clear()
        world.revoked = True
        for context in world.open_contexts:
            context.shut_out(rank.id)
        self._renew(rank.id)
        rank.digest.note((time_s, RESTART, -1, 0, 0))
        world.recorder.event(rank.id, time_s, "restart", {})
        self.begin(rank, self._programs[rank.id], time_s)
