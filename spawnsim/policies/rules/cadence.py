"""When a policy acts, and how long it waits for other ranks: cadences and deadlines.

A cadence is any object with `due(iteration) -> bool`; all ranks of a group that averages synchronously must have equal
cadences. A deadline limits the wait for a group: to a fixed time, or to one learnt from earlier arrivals. Inputs are
iteration numbers and seconds; no clock is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np

from spawnsim.errors import ParameterError


@runtime_checkable
class Cadence(Protocol):
    """Decides whether a policy acts at an iteration."""

    def due(self, iteration: int) -> bool:
        """Decide whether to act.

        Args:
            iteration: iteration of the training loop, from 0.

        Returns:
            Whether to act in the call of this iteration.
        """


@dataclass(frozen=True, slots=True)
class Every(Cadence):
    """Act at the multiples of `period`, from `start` on.

    Iteration 0 is excluded unless `period` is 1 or `at_zero` is set: after a single step, metrics are not worth
    comparing.

    Args:
        period: number of iterations, at least 1.
        start: the first iteration that may be due, at least 0.
        at_zero: whether iteration 0 is due, whatever the period.

    Raises:
        ParameterError: `period` or `start` is out of range.

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
        given: Any = self.period
        is_number = isinstance(given, Real) and not isinstance(given, bool)  # includes numpy's numbers
        if not is_number or not given >= 1 or given % 1:
            raise ParameterError(
                f"average_every={self.period!r}: give a whole number of iterations of at least 1"
            )
        if self.start < 0:
            raise ParameterError(f"start={self.start}: give an iteration of at least 0")

    @property
    def first(self) -> int:
        return -(-max(self.start, 1) // self.period) * self.period

    def due(self, iteration: int) -> bool:
        if iteration % self.period or iteration < self.start:
            return False
        return iteration > 0 or self.period == 1 or self.at_zero


@dataclass(frozen=True, slots=True)
class When(Cadence):
    """Act at the iterations that a function selects.

    Args:
        says: function from an iteration to whether to act; pure, so that all ranks of a group agree.

    >>> When(lambda iteration: iteration in (3, 9)).due(9)
    True
    """

    says: Callable[[int], bool]

    def due(self, iteration: int) -> bool:
        return bool(self.says(iteration))


class Deadline(Protocol):
    """Limits the duration of waits; receives the lateness of each arrival."""

    def limit_s(self, share: float) -> float:
        """Return how long a wait may last.

        Args:
            share: share of the awaited ranks that have arrived, from 0 to 1.

        Returns:
            Seconds from the beginning of the wait.
        """

    def observe(self, late_s: float) -> None:
        """Record one arrival.

        Args:
            late_s: seconds from the beginning of the wait to the arrival.
        """

    def paced(self, period_s: float) -> None:
        """Record the beginning of a wait.

        Args:
            period_s: seconds since the beginning of the previous wait.
        """


class Fixed(Deadline):
    """A constant limit.

    Args:
        seconds: the limit, above 0.

    Raises:
        ParameterError: `seconds` is not above 0.

    >>> Fixed(2.0).limit_s(share=0.0)
    2.0
    """

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise ParameterError(f"deadline {seconds!r}: give seconds above 0")
        self.seconds = float(seconds)

    def limit_s(self, share: float) -> float:
        return self.seconds

    def observe(self, late_s: float) -> None:
        pass

    def paced(self, period_s: float) -> None:
        pass


class Adaptive(Deadline):
    """A limit of (median + k · MAD) of the latest arrivals, times `slack`.

    The median absolute deviation is scaled by 1.4826, so that k counts standard deviations of normal arrivals.

    Args:
        k: standard deviations by which an arrival may be later than the median, at least 0.
        initial_s: the limit in seconds before `enough` arrivals, and the upper bound of later limits.
        slack: factor of at least 1.
        enough: number of arrivals from which the limit is learnt.

    Raises:
        ParameterError: an argument is out of range.
    """

    __slots__ = ("_limit_s", "_periods", "_seen", "enough", "initial_s", "k", "slack")

    def __init__(
        self, k: float = 6.0, *, initial_s: float = 30.0, slack: float = 2.0, enough: int = 8
    ) -> None:
        if not (k >= 0 and initial_s > 0 and slack >= 1 and enough >= 1):
            raise ParameterError(
                f"Adaptive(k={k!r}, initial_s={initial_s!r}, slack={slack!r}, enough={enough!r}): "
                "give k >= 0, initial_s > 0, slack >= 1, enough >= 1"
            )
        self.k, self.initial_s, self.slack, self.enough = k, initial_s, slack, enough
        # Tuples: an empty deque takes 0.8 kB, and most of 100,000 ranks never observe an arrival.
        self._seen: tuple[float, ...] = ()
        self._periods: tuple[float, ...] = ()
        self._limit_s: float | None = None

    def observe(self, late_s: float) -> None:
        self._seen = (*self._seen[-511:], late_s)
        self._limit_s = None

    def paced(self, period_s: float) -> None:
        self._periods = (*self._periods[-15:], period_s)
        self._limit_s = None

    def limit_s(self, share: float) -> float:
        # The fast half of a group must not set the limit for the slow half before any slow rank has arrived.
        if share < 0.5 or len(self._seen) < self.enough:
            return self.initial_s
        if self._limit_s is None:
            seen = np.asarray(self._seen)
            middle = float(np.median(seen))
            spread = 1.4826 * float(np.median(np.abs(seen - middle)))
            # At least the time between waits: a rank that polls rarely observes all arrivals at once, so their spread
            # reflects its own polls and not the other ranks' lateness.
            pace = float(np.median(self._periods)) if self._periods else 0.0
            self._limit_s = min(max(self.slack * (middle + self.k * spread), pace), self.initial_s)
        return self._limit_s


def as_deadline(limit: float | Deadline | None) -> Deadline:
    """Return a deadline object: a number means fixed seconds, None an adaptive limit."""
    if limit is None:
        return Adaptive()
    return Fixed(limit) if isinstance(limit, (int, float)) else limit
