"""Vector clocks: which events of a run happen before which, whatever the schedule.

Every rank has a clock with an entry for each rank. A rank's own entry counts its events; the entry of another rank is
the number of its events that happen before. A *stamp* is a copy of a rank's clock at one of its events. This module
knows no calls: `spawnsim.virtual.ordering` moves stamps along messages, collectives and locks.

An event of rank `a` that was the `n`-th there happens before an event with a stamp `s` if and only if `s[a] >= n`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Stamp = Any  # numpy array of int64, never changed
# The number of a rank's latest event, and the entries of its stamp for the other ranks.
Known = tuple[int, list[int]]


class Clocks:
    """The vector clocks of all ranks."""

    __slots__ = ("_clocks", "_known", "_latest", "_numbers", "_rows")

    def __init__(self, ranks: int) -> None:
        self._clocks = np.zeros((ranks, ranks), np.int64)
        self._rows = [*self._clocks]  # of the same numbers; a rank's entry for itself is set when it is read
        self._numbers = [0] * ranks  # of each rank's latest event
        self._latest: list[Stamp] = [None] * ranks  # what each rank has learned last
        self._known: list[list[int] | None] = [None] * ranks

    def count(self, rank: int) -> int:
        """Begin a new event of a rank; return its number, from 1 on."""
        number = self._numbers[rank] = self._numbers[rank] + 1
        return number

    def stamp(self, rank: int) -> Stamp:
        """Return a stamp of a rank's latest event, for a message or a release."""
        own = self._rows[rank]
        own[rank] = self._numbers[rank]
        return own.copy()

    def known(self, rank: int) -> Known:
        """Return the number of a rank's latest event, and the entries of its stamp for the other ranks.

        The list is never changed. It is made once for all events until the rank learns something.
        """
        known = self._known[rank]
        if known is None:
            known = self._known[rank] = self._rows[rank].tolist()
        return self._numbers[rank], known

    def learn(self, rank: int, stamp: Stamp) -> None:
        """Order everything before a stamp before the rank's next event: it received a message, or acquired a lock."""
        if stamp is not self._latest[rank]:
            own = self._rows[rank]
            np.maximum(own, stamp, out=own)
            self._latest[rank], self._known[rank] = stamp, None

    def known_to_all(self, rank: int) -> int:
        """Return the number of the latest event of a rank that happens before every rank's next event."""
        self._rows[rank][rank] = self._numbers[rank]
        return int(self._clocks[:, rank].min())


def before(rank: int, number: int, stamp: Stamp) -> bool:
    """Whether the event of a rank with this number happens before the event of a stamp."""
    return bool(stamp[rank] >= number)


def concurrent(one: tuple[int, Stamp], other: tuple[int, Stamp]) -> bool:
    """Whether neither of two events, each a rank and its stamp, happens before the other."""
    (a, ours), (b, theirs) = one, other
    return not before(a, int(ours[a]), theirs) and not before(b, int(theirs[b]), ours)


def joined(stamps: Iterable[Stamp | None]) -> Stamp | None:
    """Return the stamp after all of these, or None for none."""
    found: Stamp | None = None
    for stamp in stamps:
        if stamp is not None:
            found = stamp if found is None else np.maximum(found, stamp)
    return found
