"""Failures of machines over time: drawn from a mean time between failures, or read from a recorded trace.

A machine is a unit: a rank, a node, a rack, a region, or the whole job. When it fails, all its ranks crash at once.
They begin again when it is repaired, or when a spare machine has replaced it. The results are plain faults, `Crash`
and `Restart`, so a plan of them is as exact as one written by hand.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from io import StringIO
from typing import Any

from spawnsim import random, units
from spawnsim.errors import ParameterError
from spawnsim.models.faults.events import Crash, Fault, Restart, hold

MOST = 10**6  # faults in a plan: more indicate a mistyped number
DOMAINS = ("node", "rack", "region")


@dataclass(frozen=True)
class Failures:
    """Machines fail at random; their ranks begin again after a repair, or on a spare.

    Attributes:
        at_s: start of the period with failures, virtual seconds.
        for_s: its length.
        mtbf_s: mean time between failures of one machine; the times are exponential (a Poisson process).
        repair_s: from a failure until the machine is usable again; inf: never.
        spares: identical standby machines. With spares, a broken machine's ranks move to a spare, and the machine
            becomes a spare when it is repaired; if no spare is free, its ranks wait in a queue.
        swap_s: from the time when a spare is free until the ranks run there.

    Raises:
        ParameterError: a time is out of range.
    """

    at_s: float
    for_s: float
    mtbf_s: float
    repair_s: float = math.inf
    spares: int = 0
    swap_s: float = 0.0

    def __post_init__(self) -> None:
        hold(self)
        if not (0.0 <= self.at_s < math.inf and 0.0 < self.for_s < math.inf):
            raise ParameterError(f"{self}: give a begin of at least 0 s and a finite length above 0 s")
        if not (self.mtbf_s > 0.0 and self.repair_s > 0.0 and 0.0 <= self.swap_s < math.inf):
            raise ParameterError(f"{self}: give mtbf_s and repair_s above 0 s, a swap_s of at least 0 s")
        if not 0 <= self.spares <= MOST:
            raise ParameterError(f"{self}: give from 0 to {MOST:,} spares")

    def faults(
        self, machines: Sequence[Sequence[int]], seed: int = 0, *, job: Sequence[int] = ()
    ) -> tuple[Fault, ...]:
        """Draw the failures of a run.

        Args:
            machines: the ranks of each machine. No rank is on two.
            seed: seed of the draws; machine k has the stream (seed, k, "faults.mtbf").
            job: ranks that any failure ends, all at once; they begin again together when the machine has been repaired,
                or a spare has replaced it. No machine fails meanwhile. (): a failure ends only its machine's ranks.

        Returns:
            Crashes and restarts, by time.

        Raises:
            ParameterError: more failures than `MOST`.
        """
        if len(machines) * self.for_s / self.mtbf_s > MOST:
            raise ParameterError(f"{self}: that is more than {MOST:,} failures")
        streams = [random.generator(seed, number, "faults.mtbf") for number in range(len(machines))]
        end_s = self.at_s + self.for_s
        failing = [
            (self.at_s + self.mtbf_s * float(s.standard_exponential()), k) for k, s in enumerate(streams)
        ]
        heapify(failing)
        free_s = [0.0] * self.spares  # a heap: the time from which each spare is usable
        found: list[Fault] = []
        idle_s = 0.0  # end of the job's downtime
        while failing and failing[0][0] < end_s and idle_s < math.inf:
            time_s, number = heappop(failing)
            again_s = idle_s
            if time_s >= idle_s:
                hit, again_s = job or machines[number], self._again_s(time_s, free_s)
                found += [Crash(rank, time_s) for rank in hit]
                found += [Restart(rank, again_s) for rank in hit] if again_s < math.inf else []
                idle_s = again_s if job else 0.0
            if again_s < math.inf:
                heappush(
                    failing, (again_s + self.mtbf_s * float(streams[number].standard_exponential()), number)
                )
        return tuple(sorted(found, key=lambda fault: fault.at_s))  # type: ignore[attr-defined]

    def _again_s(self, time_s: float, free_s: list[float]) -> float:
        """Return when the ranks of a machine that fails run again; take a spare if there are any."""
        if not self.spares:
            return time_s + self.repair_s
        again_s = max(heappop(free_s), time_s) + self.swap_s  # first come, first served
        heappush(free_s, time_s + self.repair_s)
        return again_s


def machines(where: str, ranks: int | None, network: Any = None) -> list[tuple[int, ...]]:
    """Return the units that a text names, as the ranks of each unit.

    "3", "0-3,8": single ranks; "*": all ranks, each as a unit; "node2", "rack0", "region1": all ranks there as one
    unit; "node*": each node as one unit; "job": all ranks as one unit.

    Args:
        where: the text.
        ranks: number of ranks of the run; None: unknown so far.
        network: network of the run's platform.

    Returns:
        Their ranks.

    Raises:
        ParameterError: the text is invalid, or the platform has no such part.
    """
    word = where.strip()
    domain = next((name for name in DOMAINS if word.startswith(name)), None)
    if word in ("*", "job") or domain is not None:
        if ranks is None:
            raise ParameterError(f"{where!r}: only a run determines which ranks these are")
        if domain is None:
            return [tuple(range(ranks))] if word == "job" else [(rank,) for rank in range(ranks)]
        units = _units(domain, ranks, network)
        chosen = word.removeprefix(domain)
        if chosen != "*" and not (chosen.isdecimal() and int(chosen) < len(units)):
            raise ParameterError(f"{where!r}: give {domain}0 to {domain}{len(units) - 1}, or {domain}*")
        return units if chosen == "*" else [units[int(chosen)]]
    found = list(_numbers(word))
    twice = [rank for rank, times in Counter(found).items() if times > 1]
    if twice:
        raise ParameterError(f"{where!r} names rank {twice[0]} more than once")
    return [(rank,) for rank in found]


def _numbers(words: str) -> Iterator[int]:
    for word in words.split(","):
        first, dash, last = (part.strip() for part in word.partition("-"))
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ParameterError(
                f"{word.strip()!r} is not a rank: write 3, 0-3,8 (from the lower to the higher) or *"
            )
        if int(last) - int(first) > MOST:
            raise ParameterError(f"{word}: more than {MOST:,} ranks")
        yield from range(int(first), int(last) + 1)


def _units(domain: str, ranks: int, network: Any) -> list[tuple[int, ...]]:
    """Return the nodes, racks or regions of a network, that have ranks."""
    each: list[int] = []
    if domain == "node":
        per = getattr(network, "ranks_per_node", None) or getattr(network, "ranks_per_router", None)
        each = [per] * -(-ranks // per) if per else []
    elif domain == "rack":
        per = next(iter(getattr(network, "radices", ())), None)
        if hasattr(network, "routers_per_group"):
            per = network.ranks_per_router * network.routers_per_group
        each = [per] * -(-ranks // per) if per else []
    elif hasattr(network, "joins"):
        each = list(network.members)
    if not each:
        kind = type(network).__name__
        raise ParameterError(
            f"{domain}: this platform ({kind}) has no {domain}s. The topologies nodes, torus and dragonfly have nodes; "
            "fat-tree and dragonfly have racks; regions has regions"
        )
    found, begin = [], 0
    for size in each:
        found.append(tuple(range(begin, min(begin + size, ranks))))
        begin += size
    return [unit for unit in found if unit]


def recorded(text: str, source: str) -> tuple[Fault, ...]:
    """Return the faults of a recorded trace: lines of "rank,down_s,up_s", the last one empty if it stayed down.

    Args:
        text: contents of the file, in CSV, with this line on top.
        source: its name, for errors.

    Returns:
        Crashes and restarts.

    Raises:
        ParameterError: a line is invalid.
    """
    lines = csv.reader(StringIO(text))
    found: list[Fault] = []
    try:
        head = [word.strip() for word in next(lines, [])]
        if head != ["rank", "down_s", "up_s"]:
            raise ParameterError("write rank,down_s,up_s on top")
        for words in lines:
            if not words:
                continue
            if len(words) != len(head):
                raise ParameterError(
                    "write a rank, when it went down, and when it was up again (empty: never)"
                )
            rank, down, up = (word.strip() for word in words)
            found.append(Crash(units.whole(rank), units.seconds(down)))
            found += [Restart(units.whole(rank), units.seconds(up))] if up else []
            if len(found) > MOST:
                raise ParameterError(f"more than {MOST:,} failures")
    except (ValueError, csv.Error) as error:
        raise ParameterError(f"failure trace {source}, line {lines.line_num}: {str(error)[:200]}") from error
    return tuple(found)
