"""One collective of a group as it is going to be carried out: algorithm, schedule, lengths, root.

This room knows schedules, arrival times and networks. It must not know how algorithms are chosen, buffers or events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from spawnsim.virtual.collectives import catalogue
from spawnsim.virtual.collectives.amounts import Amounts, Lengths
from spawnsim.virtual.collectives.dataflow import Finish, run
from spawnsim.virtual.collectives.faulty import Judge, Struck, run_struck
from spawnsim.virtual.collectives.schedule import Schedule
from spawnsim.virtual.network.cost import Floats, Ints, Network


class Step(NamedTuple):
    """One round of one rank: it sends (dest, nbytes) in this order, then takes (source, nbytes, reduced bytes).

    `numbers` tell its sends to one rank apart: those of their lanes, counted over all rounds; of edges, how many edges
    to the same rank come before.
    """

    sends: tuple[tuple[int, float], ...]
    receives: tuple[tuple[int, float, float], ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """One collective of a group: an algorithm, its schedule, the lengths of its messages, its root.

    Attributes:
        operation: "allreduce" and so on.
        algorithm: "ring" and so on.
        schedule: Its rounds, in ranks relative to the root.
        amounts: The lengths of its messages.
        root: The root's rank in the group; 0 where there is none.
    """

    operation: str
    algorithm: str
    schedule: Schedule
    amounts: Amounts
    root: int = 0

    def depends(self, rank: int) -> frozenset[int] | None:
        """Return the ranks on whose arrival the leaving of `rank` depends; None stands for all."""
        return heard(self.operation, self.schedule, self.root, rank)

    def finish(
        self,
        arrivals: Floats,
        network: Network,
        ranks: Ints | None = None,
        *,
        out_free: Floats | None = None,
    ) -> Finish:
        """Return when each rank leaves; a rank that has not arrived is NaN (see `finish`)."""
        world = np.arange(self.schedule.size) if ranks is None and self.root else ranks
        turned, world, free = self._from_root(arrivals, world, out_free)
        found = run(self.schedule, self.amounts, turned, network, ranks=world, out_free=free)
        return self._in_group(found)

    def struck(
        self,
        arrivals: Floats,
        network: Network,
        ranks: Ints,
        *,
        judge: Judge,
        out_free: Floats | None = None,
    ) -> Struck:
        """Return when each rank leaves, and what the faults that `judge` knows have done.

        Its times are in the order of the group; its other ranks are relative to the root.
        """
        turned, world, free = self._from_root(arrivals, ranks, out_free)
        found = run_struck(
            self.schedule, self.amounts, turned, network, ranks=world, judge=judge, out_free=free
        )
        return found._replace(finish=self._in_group(found.finish))

    def _from_root(self, *values: Any) -> Any:
        """Return vectors in the order of the group from the root on; None stays."""
        return [v if v is None or not self.root else np.roll(v, -self.root) for v in values]

    def _in_group(self, found: Finish) -> Finish:
        """Return times that begin at the root in the order of the group."""
        root = self.root
        if not root:
            return found
        return found._replace(times=np.roll(found.times, root), out_free=np.roll(found.out_free, root))

    def rounds_of(self, rank: int) -> Iterator[Step]:
        """Yield the rounds in which one rank has a part, with absolute ranks of the group."""
        own, size, number = (rank - self.root) % self.schedule.size, self.schedule.size, -1
        for each in self.schedule.rounds:
            sends, receives, numbers = [], [], []
            for lane in each.lanes:
                number += 1
                pattern, nbytes = lane.pattern, self.amounts.of(lane)
                sent, taken = pattern.message_from.get(own), pattern.message_to.get(own)
                if sent is not None:
                    dest = (int(pattern.dest[sent]) + self.root) % size
                    sends.append((dest, _length(nbytes, sent)))
                    again = sum(other == dest for other, _ in sends[:-1])
                    numbers.append(again if self.schedule.cut == "edges" else number)
                if taken is not None:
                    source, length = (int(pattern.source[taken]) + self.root) % size, _length(nbytes, taken)
                    receives.append((source, length, length * each.reduces))
            if sends or receives:
                yield Step(tuple(sends), tuple(receives), tuple(numbers))


def _length(nbytes: Lengths, message: int) -> float:
    return nbytes[message].item() if isinstance(nbytes, np.ndarray) else nbytes


def heard(operation: str, schedule: Schedule, root: int, rank: int) -> frozenset[int] | None:
    """Return the ranks on whose arrival the leaving of `rank` depends; None stands for all."""
    if operation in catalogue.SYNCHRONISING:
        return None
    heard = schedule.heard((rank - root) % schedule.size)
    if heard is None or not root:
        return heard
    return frozenset((other + root) % schedule.size for other in heard)
