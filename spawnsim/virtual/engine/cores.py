"""Cores that the ranks of a node share: with k blocks of computing on c cores each goes on at min(1, c/k) of its speed.

A rank that waits computes nothing, and leaves its core to others. When a block ends is known only when it ends, since
others may begin one; so on a node with more ranks than cores the end of a block is an event.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from spawnsim.virtual.engine.completion import Completion
from spawnsim.virtual.engine.event_queue import UNDER_WAY, WAITED
from spawnsim.virtual.engine.kernel import Kernel
from spawnsim.virtual.engine.waiting import Unbroken, await_one
from spawnsim.virtual.engine.world import Rank, World


class Computing(Unbroken):
    """A block of computing, which ends whatever others do."""

    def describe(self) -> str:
        """Return what goes on."""
        return "comm.compute()"

    def peers(self) -> tuple[int, ...]:
        """Return (): nobody is awaited."""
        return ()

    def missing(self, by_s: float = math.inf) -> tuple[int, ...]:
        """Return (): nobody is awaited."""
        return ()


class Node:
    """The blocks under way on one node. `done_s` is how far a block would be that had begun at 0."""

    def __init__(self, kernel: Kernel, cores: int) -> None:
        self._kernel, self._cores = kernel, cores
        self._done_s = self._since_s = 0.0
        self._blocks: list[
            tuple[float, int, Rank, Completion]
        ] = []  # a heap: `_done_s` at the end, number, who
        self._begun = 0
        self._alarm_s = math.inf

    def begin(self, rank: Rank, work_s: float) -> Completion:
        """Begin a block now; it is over when it has had `work_s` of a core."""
        self._advance()
        over = Completion(self._kernel)
        self._begun += 1
        heappush(self._blocks, (self._done_s + work_s, self._begun, rank, over))
        self._set_alarm()
        return over

    def leave(self, over: Completion) -> None:
        """Give up a block that has not ended, since its rank has died: its core is for the others from now on."""
        self._advance()
        self._blocks = [block for block in self._blocks if block[3] is not over]
        heapify(self._blocks)
        self._set_alarm()

    def _speed(self) -> float:
        return min(1.0, self._cores / len(self._blocks)) if self._blocks else 1.0

    def _advance(self) -> None:
        now_s = self._kernel.env.now
        self._done_s += (now_s - self._since_s) * self._speed()
        self._since_s = now_s

    def _set_alarm(self) -> None:
        if not self._blocks:
            self._alarm_s = math.inf
            return
        left_s = max(self._blocks[0][0] - self._done_s, 0.0)
        self._alarm_s = alarm_s = self._since_s + left_s / self._speed()
        self._kernel.env.at(alarm_s, UNDER_WAY, lambda: self._ring(alarm_s))

    def _ring(self, alarm_s: float) -> None:
        if alarm_s != self._alarm_s or not self._blocks:
            return  # a block has begun or ended since
        env = self._kernel.env
        self._advance()
        # Equal blocks that began together end together, whatever their sums were rounded to.
        last_s = max(self._blocks[0][0], self._done_s)
        while self._blocks and self._blocks[0][0] <= last_s * (1 + 1e-14):
            *_, rank, over = heappop(self._blocks)
            rank.busy = [interval for interval in rank.busy if interval[1] < math.inf]
            waited, rank.waited = rank.waited, ()
            for serve in waited:
                env.at(env.now, WAITED, serve)
            over.complete(env.now)
        self._set_alarm()


class Cores:
    """The nodes of a run whose ranks share cores.

    Args:
        world: The world.
        places: The number of the node of each rank.
        count: The cores of each node.
    """

    def __init__(self, world: World, places: Sequence[int], count: int) -> None:
        self._world, self._places = world, places
        self._nodes = {place: Node(world.kernel, count) for place in dict.fromkeys(places)}

    def spend(self, rank: Rank, work_s: float) -> float:
        """Let the running task compute for `work_s` of a core. Returns when that is over."""
        kernel = self._world.kernel
        kernel.observe()
        task = kernel.current
        if rank.observers:
            rank.compute_from(task.clock, math.inf)
        node = self._nodes[self._places[rank.id]]
        over = node.begin(rank, work_s)
        limits, task.deadline_s, task.explicit = (task.deadline_s, task.explicit), math.inf, False
        try:
            await_one(self._world, over, Computing())
        except BaseException:
            node.leave(over)
            rank.waited = ()  # nobody answers these accesses any more
            raise
        finally:
            task.deadline_s, task.explicit = limits
        return task.clock
