"""How long to wait for a group: fixed, or learnt from how late others have come so far.

This room knows numbers of seconds; it reads no clock.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from spawnsim.errors import ParameterError


class Deadline(Protocol):
    """Says how long a wait may last, and is told how late each arrival was."""

    def limit_s(self, share: float) -> float:
        """Return the seconds that a wait may last, of which this share of those awaited has come."""

    def observe(self, late_s: float) -> None:
        """Take note of one arrival, `late_s` after the wait began."""

    def paced(self, period_s: float) -> None:
        """Take note of the time between the beginnings of two waits."""


class Fixed:
    """Always the same limit.

    >>> Fixed(2.0).limit_s(share=0.0)
    2.0
    """

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise ParameterError(f"deadline {seconds!r}: give seconds above 0")
        self.seconds = float(seconds)

    def limit_s(self, share: float) -> float:
        """Return the limit."""
        return self.seconds

    def observe(self, late_s: float) -> None:
        """Learn nothing."""

    def paced(self, period_s: float) -> None:
        """Learn nothing."""


class Adaptive:
    """median + k · MAD of the last arrivals, times `slack`; `initial_s` until `enough` arrivals were seen.

    The median absolute deviation is scaled by 1.4826, so that k counts standard deviations of normal arrivals.
    Never less than the median time between waits: who polls rarely sees all arrivals at once, and must not take
    that for punctuality. Nor is it applied before half have come: the first arrivals say nothing of the rest.
    """

    def __init__(
        self, k: float = 6.0, *, initial_s: float = 30.0, slack: float = 2.0, enough: int = 8
    ) -> None:
        if not (k >= 0 and initial_s > 0 and slack >= 1 and enough >= 1):
            raise ParameterError(
                f"Adaptive(k={k!r}, initial_s={initial_s!r}, slack={slack!r}, enough={enough!r}): "
                "give k >= 0, initial_s > 0, slack >= 1, enough >= 1"
            )
        self.k, self.initial_s, self.slack, self.enough = k, initial_s, slack, enough
        self._seen: deque[float] = deque(maxlen=512)
        self._periods: deque[float] = deque(maxlen=16)
        self._limit_s: float | None = None

    def observe(self, late_s: float) -> None:
        """Take note of one arrival."""
        self._seen.append(late_s)
        self._limit_s = None

    def paced(self, period_s: float) -> None:
        """Take note of the time between two waits."""
        self._periods.append(period_s)
        self._limit_s = None

    def limit_s(self, share: float) -> float:
        """Return the limit for what was seen so far; `initial_s` before half of those awaited have come."""
        if share < 0.5 or len(self._seen) < self.enough:
            return self.initial_s
        if self._limit_s is None:
            seen = np.asarray(self._seen)
            middle = float(np.median(seen))
            spread = 1.4826 * float(np.median(np.abs(seen - middle)))
            pace = float(np.median(self._periods)) if self._periods else 0.0
            self._limit_s = min(max(self.slack * (middle + self.k * spread), pace), self.initial_s)
        return self._limit_s


def as_deadline(limit: float | Deadline | None) -> Deadline:
    """Return a deadline object: a number is fixed seconds, None learns."""
    if limit is None:
        return Adaptive()
    return Fixed(limit) if isinstance(limit, (int, float)) else limit
