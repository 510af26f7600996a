"""Timing of operations on a communicator, real or virtual alike.

Each sample starts at a barrier and takes what the slowest rank took; a point is the lower quartile of its samples. A
virtual platform measured by this room must give back what it was made of: that is how the room is tested.

This room knows a `Comm` and its clock. It must not know models or what the times are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spawnsim.calibrate.operations import OPERATIONS, Action
from spawnsim.comm import Comm
from spawnsim.errors import ParameterError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """One operation at one size: the lower quartile of its samples in seconds, their inter-quartile range and number.

    The lower quartile, since whatever else a machine does only ever adds to a sample.
    """

    operation: str
    nbytes: int
    seconds: float
    spread_s: float
    samples: int


@dataclass(frozen=True)
class Effort:
    """How much is measured: `budget_s` of samples per point and pass, but at least `least` and at most `most` of them.

    Each point is sampled in several `passes` over all points, so that no point is measured in one bad moment alone.
    """

    budget_s: float = 0.01
    least: int = 3
    most: int = 30
    passes: int = 5
    largest_nbytes: int = 16 << 20

    def __post_init__(self) -> None:
        if not (
            self.budget_s > 0.0
            and 1 <= self.least <= self.most
            and self.passes >= 1
            and self.largest_nbytes >= 1
        ):
            raise ParameterError(f"{self}: all must be above 0, and least at most most")

    def samples(self, one_s: float) -> int:
        """Return how many samples to take of an operation that takes `one_s`."""
        return int(np.clip(self.budget_s / max(one_s, 1e-9), self.least, self.most))

    def sizes(self, least: int = 1) -> list[int]:
        """Return the sizes to measure: powers of two. Every other one is held out of the fit; see `held_out`."""
        return [1 << k for k in range(self.largest_nbytes.bit_length()) if 1 << k >= least]


def held_out(nbytes: int) -> bool:
    """Whether points of this size are kept for judging the fit."""
    return nbytes.bit_length() % 2 == 0


def measure_points(comm: Comm, wanted: Sequence[tuple[str, int]], effort: Effort) -> tuple[Point, ...]:
    """Measure (operation, nbytes) pairs. Collective; all ranks get the same points."""
    taken: dict[tuple[str, int], list[FloatArray]] = {pair: [] for pair in wanted}
    for _ in range(effort.passes):
        for operation, nbytes in taken:
            taken[operation, nbytes].append(_sampled(comm, operation, nbytes, effort))
    return tuple(_point(*pair, np.concatenate(parts)) for pair, parts in taken.items())


def _point(operation: str, nbytes: int, samples_s: FloatArray) -> Point:
    quarter, three = np.quantile(samples_s, (0.25, 0.75))
    return Point(operation, nbytes, float(quarter), float(three - quarter), samples_s.size)


def _sampled(comm: Comm, operation: str, nbytes: int, effort: Effort) -> FloatArray:
    prepare, share = OPERATIONS[operation]
    with prepare(comm, nbytes) as action:
        warm_s = float(np.median(_samples(comm, action, 2)))
        count = effort.samples(comm.bcast(warm_s))
        return _samples(comm, action, count) * share


def _samples(comm: Comm, action: Action, count: int) -> FloatArray:
    """Return how long the slowest rank took, for each of `count` samples."""
    own_s = np.empty(count)
    for sample in range(count):
        comm.Barrier()
        own_s[sample] = action()
    slowest_s: FloatArray = np.max(comm.allgather(own_s), axis=0)
    return slowest_s
