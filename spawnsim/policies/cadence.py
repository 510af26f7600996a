"""When: at which iterations a policy acts.

This room knows iteration numbers and nothing of ranks, models or communicators. A cadence is any object with
`due(iteration) -> bool`; all ranks of a group that averages synchronously must have equal cadences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from spawnsim.errors import ParameterError


@runtime_checkable
class Cadence(Protocol):
    """Says whether a policy acts at an iteration."""

    def due(self, iteration: int) -> bool:
        """Return whether to act in the call of this iteration."""


@dataclass(frozen=True, slots=True)
class Every:
    """Act at the multiples of `period`, from `start` on.

    Iteration 0 is left out unless `period` is 1, as after a single step there are no metrics worth comparing, or
    `at_zero` says otherwise.

    >>> [i for i in range(12) if Every(5).due(i)]
    [5, 10]
    >>> [i for i in range(12) if Every(5, at_zero=True).due(i)]
    [0, 5, 10]
    >>> [i for i in range(3) if Every(1).due(i)]
    [0, 1, 2]
    """

    period: int
    start: int = 0
    at_zero: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.period, bool) or int(self.period) != self.period or self.period < 1:
            raise ParameterError(
                f"average_every={self.period!r}: give a whole number of iterations of at least 1"
            )
        if self.start < 0:
            raise ParameterError(f"start={self.start}: give an iteration of at least 0")

    @property
    def first(self) -> int:
        """The first iteration after 0 at which to act."""
        return -(-max(self.start, 1) // self.period) * self.period

    def due(self, iteration: int) -> bool:
        """Return whether `iteration` is a multiple of the period, not before `start`."""
        if iteration % self.period or iteration < self.start:
            return False
        return iteration > 0 or self.period == 1 or self.at_zero


@dataclass(frozen=True, slots=True)
class When:
    """Act where a function of the iteration says so.

    >>> When(lambda iteration: iteration in (3, 9)).due(9)
    True
    """

    says: Callable[[int], bool]

    def due(self, iteration: int) -> bool:
        """Return what the function says."""
        return bool(self.says(iteration))
