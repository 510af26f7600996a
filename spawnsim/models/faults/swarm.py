"""Random fault plans, for tests that search: a swarm.

Each plan first draws which kinds of fault it has, then how many of each: runs that lack a kind explore the other kinds
more deeply (Groce et al., "Swarm testing", ISSTA 2012).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spawnsim import random
from spawnsim.errors import ParameterError
from spawnsim.models.faults.events import (
    KINDS,
    Clog,
    Corrupt,
    Crash,
    Delay,
    Drop,
    Duplicate,
    Fault,
    LinkDown,
    Partition,
    Pause,
    Reorder,
    Restart,
    Skew,
    SlowDown,
)
from spawnsim.models.faults.plan import FaultPlan


@dataclass(frozen=True)
class Swarm:
    """A family of random plans for runs of `ranks` ranks and about `horizon_s` virtual seconds.

    `kinds`: which faults may occur. `most`: the largest number of faults of one kind. All faults end by the horizon
    (except crashes), so that the rest of a run can show whether the survivors recover; at least one rank never
    crashes. If "restart" may occur, most ranks that crash begin again, usually soon.
    """

    ranks: int
    horizon_s: float
    kinds: Sequence[str] = ("crash", "pause", "slow", "down", "drop", "delay", "duplicate", "partition")
    most: int = 3

    def __post_init__(self) -> None:
        unknown = set(self.kinds) - {*_DRAWS, Restart.kind}
        if unknown:
            raise ParameterError(f"no random faults of kind {min(unknown)!r}: choose from {', '.join(KINDS)}")
        if self.ranks < 1 or not self.horizon_s > 0.0 or self.most < 1:
            raise ParameterError(f"{self}: ranks, horizon_s and most must be above 0")

    def plan(self, seed: int) -> FaultPlan:
        """Return the plan of a seed."""
        # Kinds in the order of `_DRAWS`, whatever the order of `kinds`: the plan of a seed depends only on which kinds
        # may occur.
        stream = random.generator(seed, -1, "faults.swarm")
        faults: list[Fault] = []
        for kind in (kind for kind in _DRAWS if kind in self.kinds):
            if stream.random() < 0.5 and (kind != "partition" or self.ranks > 1):
                faults += [_DRAWS[kind](self, stream) for _ in range(int(stream.integers(1, self.most + 1)))]
        # Crashes are thinned after all is drawn, so that the other faults of a seed do not depend on the number of
        # survivors.
        faults = _survivable(faults, self.ranks)
        if Restart.kind in self.kinds:
            faults += [
                self.restart(fault, stream)
                for fault in faults
                if isinstance(fault, Crash) and stream.random() < 0.8
            ]
        return FaultPlan(tuple(faults), seed)

    def window(self, stream: np.random.Generator) -> tuple[float, float]:
        """Draw a start and a length; both in milliseconds, so that plans are short to read."""
        start_s, end_s = np.sort(stream.random(2)) * self.horizon_s
        return round(float(start_s), 3), max(round(float(end_s - start_s), 3), 1e-3)

    def restart(self, crash: Crash, stream: np.random.Generator) -> Restart:
        """Draw when a rank that has crashed begins again: often before other ranks know of its death."""
        left_s = max(self.horizon_s - crash.at_s, 0.0)
        return Restart(crash.rank, round(crash.at_s + 1e-3 + left_s * float(stream.random()) ** 3, 3))

    def rank(self, stream: np.random.Generator) -> int:
        return int(stream.integers(self.ranks))

    def link(self, stream: np.random.Generator) -> tuple[int | None, int | None]:
        """Draw a link; in one case of four an end is any rank."""
        ends = [None if stream.random() < 0.25 else self.rank(stream) for _ in range(2)]
        if ends[0] is not None and ends[0] == ends[1]:  # this link does not exist
            ends[1] = None
        return ends[0], ends[1]


def _survivable(faults: list[Fault], ranks: int) -> list[Fault]:
    """Keep one crash per rank, and no crash for the last rank alive."""
    dead: set[int] = set()
    kept = []
    for fault in faults:
        if isinstance(fault, Crash):
            if fault.rank in dead or len(dead) == ranks - 1:
                continue
            dead.add(fault.rank)
        kept.append(fault)
    return kept


def _partition(swarm: Swarm, stream: np.random.Generator) -> Partition:
    size = int(stream.integers(1, max(swarm.ranks // 2, 1) + 1))
    members = stream.choice(swarm.ranks, size, replace=False).tolist()
    return Partition(tuple(members), *swarm.window(stream))


def _tenths(stream: np.random.Generator) -> float:
    return int(stream.integers(1, 10)) / 10


_DRAWS: dict[str, Callable[[Swarm, np.random.Generator], Fault]] = {
    "crash": lambda swarm, stream: Crash(swarm.rank(stream), swarm.window(stream)[0]),
    "pause": lambda swarm, stream: Pause(swarm.rank(stream), *swarm.window(stream)),
    "slow": lambda swarm, stream: SlowDown(
        swarm.rank(stream), *swarm.window(stream), int(stream.integers(2, 11))
    ),
    "down": lambda swarm, stream: LinkDown(*swarm.link(stream), *swarm.window(stream)),
    "drop": lambda swarm, stream: Drop(*swarm.link(stream), *swarm.window(stream), _tenths(stream)),
    "duplicate": lambda swarm, stream: Duplicate(*swarm.link(stream), *swarm.window(stream), _tenths(stream)),
    "corrupt": lambda swarm, stream: Corrupt(*swarm.link(stream), *swarm.window(stream), _tenths(stream)),
    "delay": lambda swarm, stream: Delay(
        *swarm.link(stream), *swarm.window(stream), 0.01 * _tenths(stream), 0.1 * _tenths(stream)
    ),
    "partition": _partition,
    "clog": lambda swarm, stream: Clog((swarm.rank(stream),), *swarm.window(stream)),
    "reorder": lambda swarm, stream: Reorder(
        *swarm.link(stream), *swarm.window(stream), 0.1 * _tenths(stream)
    ),
    "skew": lambda swarm, stream: Skew(swarm.rank(stream), *swarm.window(stream), _tenths(stream) - 0.5),
}
