"""Cores that the ranks of a node share: with k computing blocks on c cores, each runs at min(1, c/k) of its speed.

A waiting rank does not compute, and leaves its core to the other ranks. The end of a block is known only when it ends,
since other ranks may begin a block; so on a node with more ranks than cores the end of a block is an event. A paused
rank leaves its core to the other ranks; a slowed rank keeps its share, and does less with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from spawnsim.virtual.engine.completion import Completion
from spawnsim.virtual.engine.event_queue import UNDER_WAY, WAITED
from spawnsim.virtual.engine.kernel import Kernel
from spawnsim.virtual.engine.waiting import Unbroken, await_one
from spawnsim.virtual.engine.world import Rank, World


class Computing(Unbroken):
    """A block of computing, which ends regardless of other ranks' actions."""

    def describe(self) -> str:
        return "comm.compute()"

    def peers(self) -> tuple[int, ...]:
        """Return (): no rank is awaited."""
        return ()

    def missing(self, by_s: float = math.inf) -> tuple[int, ...]:
        """Return (): no rank is awaited."""
        return ()


@dataclass(slots=True, eq=False)
class Block:
    """A block in progress. `work_s`: its remaining work at full speed, when it took its present speed."""

    rank: Rank
    over: Completion
    work_s: float
    speed: float
    until_s: float


class Node:
    """The blocks in progress on one node. `done_s` is the progress of a block that began at 0."""

    def __init__(self, kernel: Kernel, cores: int, plan: Any) -> None:
        self._kernel, self._cores, self._plan = kernel, cores, plan
        self._done_s = self._since_s = 0.0
        self._blocks: list[tuple[float, int, Block]] = []  # a heap: `_done_s` at the end, number, block
        self._paused: list[Block] = []
        self._begun = 0
        self._alarm_s = math.inf

    def begin(self, rank: Rank, work_s: float) -> Completion:
        """Begin a block now; it ends after `work_s` on a core, or later if its rank is slowed."""
        self._advance()
        over = Completion(self._kernel)
        self._continue(rank, over, work_s)
        self._set_alarm()
        return over

    def leave(self, over: Completion) -> None:
        """Remove an unfinished block of a rank that has died, and release its core."""
        self._advance()
        self._take_out([block for block in self._under_way() if block.over is over])
        self._set_alarm()

    def _continue(self, rank: Rank, over: Completion, work_s: float) -> None:
        """Continue a block from now on at the speed of its rank."""
        speed, until_s = self._plan.speed(rank.id, self._since_s) if self._plan else (1.0, math.inf)
        block = Block(rank, over, work_s, speed, until_s)
        if speed:
            self._begun += 1
            heappush(self._blocks, (self._done_s + work_s / speed, self._begun, block))
        elif until_s < math.inf:
            self._paused.append(block)
        else:
            over.complete(math.inf)

    def _under_way(self) -> list[Block]:
        return [*(block for *_, block in self._blocks), *self._paused]

    def _take_out(self, gone: Sequence[Block]) -> None:
        self._blocks = [each for each in self._blocks if each[2] not in gone]
        heapify(self._blocks)
        self._paused = [block for block in self._paused if block not in gone]

    def _share(self) -> float:
        return min(1.0, self._cores / len(self._blocks)) if self._blocks else 1.0

    def _advance(self) -> None:
        now_s = self._kernel.env.now
        self._done_s += (now_s - self._since_s) * self._share()
        self._since_s = now_s

    def _set_alarm(self) -> None:
        left_s = max(self._blocks[0][0] - self._done_s, 0.0) if self._blocks else math.inf
        end_s = self._since_s + left_s / self._share()
        change_s = (
            min((block.until_s for block in self._under_way()), default=math.inf) if self._plan else math.inf
        )
        self._alarm_s = alarm_s = min(end_s, change_s)
        if alarm_s < math.inf:
            self._kernel.env.at(alarm_s, UNDER_WAY, lambda: self._ring(alarm_s, ends=end_s <= change_s))

    def _ring(self, alarm_s: float, *, ends: bool) -> None:
        if alarm_s != self._alarm_s:
            return  # a block has begun or ended since
        self._advance()
        if ends:
            self._end()
        changed = {block.over: block for block in self._under_way() if block.until_s <= self._since_s}
        left_s = {block.over: (done_s - self._done_s) * block.speed for done_s, _, block in self._blocks}
        self._take_out([*changed.values()])
        for over, block in changed.items():
            self._continue(block.rank, over, max(left_s.get(over, block.work_s), 0.0))
        self._set_alarm()

    def _end(self) -> None:
        """End the completed blocks."""
        env = self._kernel.env
        # Equal blocks that began together end together, regardless of rounding.
        last_s = max(self._blocks[0][0], self._done_s)
        while self._blocks and self._blocks[0][0] <= last_s * (1 + 1e-14):
            *_, block = heappop(self._blocks)
            rank = block.rank
            rank.busy = [interval for interval in rank.busy if interval[1] < math.inf]
            waited, rank.waited = rank.waited, ()
            for serve in waited:
                env.at(env.now, WAITED, serve)
            block.over.complete(env.now)


class Cores:
    """The nodes of a run with ranks that share cores.

    Args:
        world: The world.
        places: The node number of each rank.
        count: The number of cores of each node.
    """

    def __init__(self, world: World, places: Sequence[int], count: int) -> None:
        self._world, self._places = world, places
        self._nodes = {place: Node(world.kernel, count, world.plan) for place in dict.fromkeys(places)}

    def spend(self, rank: Rank, work_s: float) -> float:
        """Let the running task compute for `work_s` of a core at its rank's full speed. Returns the end time."""
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
            rank.waited = ()  # these accesses are no longer answered
            raise
        finally:
            task.deadline_s, task.explicit = limits
        return task.clock
