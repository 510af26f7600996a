"""The compute model of a run: how long each compute block of each rank takes.

    seconds = (stated duration | the model's own) × stragglers, drawn from (seed, rank, cause)

This room knows durations, stragglers and traces. It must not know the kernel that asks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

from spawnsim.errors import ParameterError
from spawnsim.virtual.compute.straggler import Straggler, StreamKey, Stretch
from spawnsim.virtual.compute.trace import Trace

Sampler = Callable[[float | None, float], float]
"""`sampler(stated_s, now_s) -> seconds`: the duration of a rank's next block; `stated_s` None means none stated."""


class Base(Protocol):
    """Where durations come from before stragglers: an iterator of seconds for each rank."""

    def open(self, key: StreamKey) -> Iterator[float]:
        """Return the durations of one rank in order."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Each block whose duration the program does not state takes `duration_s`. Zero is allowed, when it is said."""

    duration_s: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.duration_s < math.inf:
            raise ParameterError(f"compute duration {self.duration_s} s: give a finite time of at least 0 s")

    def open(self, key: StreamKey) -> Iterator[float]:
        """Return the durations of one rank in order."""
        return repeat(self.duration_s)

    def __str__(self) -> str:
        return f"{self.duration_s:g}s"


@dataclass(frozen=True)
class ComputeModel:
    """A base and what stretches it.

    `base`: `Fixed` (unless the program states a duration), a `Trace` (whatever the program states), or None: then a
    block that states no duration is a ParameterError, never a silent zero. `stragglers` multiply; those that follow
    the clock are applied last, to the final duration.
    """

    base: Base | None = None
    stragglers: tuple[Straggler, ...] = ()

    def open(self, seed: int, rank: int) -> Sampler:
        """Return the sampler of one rank, at the start of all its streams."""
        base = self._open_base(StreamKey(seed, rank, "compute.base"))
        stretches = tuple(self._open_stragglers(seed, rank))
        if not stretches:
            return lambda stated_s, _now_s: base(stated_s)
        if len(stretches) == 1:
            only = stretches[0]
            return lambda stated_s, now_s: only(base(stated_s), now_s)

        def sample(stated_s: float | None, now_s: float) -> float:
            duration_s = base(stated_s)
            for stretch in stretches:
                duration_s = stretch(duration_s, now_s)
            return duration_s

        return sample

    def _open_stragglers(self, seed: int, rank: int) -> Iterator[Stretch]:
        """Open each straggler with a stream of its own, also when one kind comes twice."""
        seen: Counter[str] = Counter()
        for straggler in sorted(self.stragglers, key=lambda straggler: straggler.follows_clock):
            kind = type(straggler).__name__.lower()
            yield straggler.open(StreamKey(seed, rank, f"compute.{kind}.{seen[kind]}"))
            seen[kind] += 1

    def _open_base(self, key: StreamKey) -> Callable[[float | None], float]:
        if isinstance(self.base, Trace):
            recorded = self.base.open(key)
            return lambda _stated_s: next(recorded)
        own = self.base.open(key) if self.base is not None else None

        def base(stated_s: float | None) -> float:
            if stated_s is None:
                return _own(own, key.rank)
            if not 0.0 <= stated_s < math.inf:
                raise ParameterError(
                    f"rank {key.rank}: comm.compute({stated_s}): give a finite time of at least 0 s"
                )
            return stated_s

        return base


def _own(durations_s: Iterator[float] | None, rank: int) -> float:
    if durations_s is None:
        raise ParameterError(
            f"rank {rank}: comm.compute() states no duration and the run has no compute model: write "
            'comm.compute(0.01), give the run one (compute="10 ms", --compute 10ms), or name a platform that has one'
        )
    return next(durations_s)
