"""What a straggler is: something that stretches the durations of a rank's compute blocks.

This room knows durations, keyed streams and a rank's clock reading. It must not know the kernel, communicators
or networks: a straggler is opened once per rank and is a plain function from then on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from spawnsim import random
from spawnsim.errors import ParameterError

FloatArray = NDArray[np.float64]

Stretch = Callable[[float, float], float]
"""`stretch(duration_s, now_s) -> duration_s`: the time of a block that starts at `now_s` on the rank's clock."""


@dataclass(frozen=True)
class StreamKey:
    """Names one random stream: the seed of the run, the rank, and what is drawn."""

    seed: int
    rank: int
    purpose: str

    def generator(self) -> np.random.Generator:
        """Return a fresh generator at the start of the stream."""
        return random.generator(self.seed, self.rank, self.purpose)

    def world(self, part: str) -> np.random.Generator:
        """Return a fresh generator that all ranks share, for what is decided among several ranks."""
        return random.generator(self.seed, -1, f"{self.purpose}.{part}")


class Straggler(ABC):
    """One cause of uneven compute times. Causes multiply; those that follow the clock come last.

    The text form (`str(straggler)`) is what `parse_stragglers` reads.
    """

    follows_clock: ClassVar[bool] = False
    """Whether the stretch depends on when the block starts, and so has to be applied to the final duration."""

    @abstractmethod
    def open(self, key: StreamKey) -> Stretch:
        """Return the stretch of one rank, at the start of its stream."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """Mean factor on the duration of a block, over blocks and ranks."""


def number(what: str, value: float, *, above: float = -math.inf, below: float = math.inf) -> None:
    """Raise ParameterError unless `value` is a finite number in the open interval (above, below)."""
    if not (math.isfinite(value) and above < value < below):
        bounds = [f"above {above:g}"] * (above > -math.inf) + [f"below {below:g}"] * (below < math.inf)
        raise ParameterError(f"{what}={value}: give a finite number {' and '.join(bounds)}".rstrip())


def probability(what: str, value: float) -> None:
    """Raise ParameterError unless `value` lies in [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ParameterError(f"{what}={value}: give a probability from 0 to 1")
