"""The receiving side of one rank's network card: it lets in one message at a time, as the rank takes them.

A message that is taken books the card for its drain, from the arrival of its first bytes on or, where that is taken
already, in the first gap that is long enough. So many messages to one rank take as long as all their bytes, what came
long ago costs nothing, and no event is needed: the order is that of the receiving program, as in the dataflow of
collectives. Where the order of arrival must decide instead, there is `contention.Ingress`, at the price of events.

This room knows intervals of time. It must not know messages or ranks.
"""

from __future__ import annotations

import math
from bisect import insort

KEPT = 64  # busy intervals remembered, at least; what was before them is taken to be free
SLACK = 1e-9  # overlap, in drains, that is rounding and no contention


class Card:
    """When one card was or will be busy letting messages in: intervals in seconds, rising, apart."""

    __slots__ = ("_busy", "_free_s")

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []
        self._free_s = -math.inf  # from then on

    def let_in(self, arrival_s: float, drain_s: float) -> float:
        """Book the card for a message that would arrive, alone, at `arrival_s`. Return when it has arrived."""
        begin_s = arrival_s - drain_s
        if begin_s + SLACK * drain_s < self._free_s:
            return self._squeeze_in(begin_s, arrival_s)
        self._busy.append((begin_s, arrival_s))  # behind all others: nearly always so
        self._free_s = arrival_s
        if len(self._busy) > 2 * KEPT:
            del self._busy[:KEPT]
        return arrival_s

    def _squeeze_in(self, begin_s: float, end_s: float) -> float:
        """Book the first gap from `begin_s` on that is long enough; return its end."""
        drain_s = end_s - begin_s
        for from_s, to_s in self._busy:
            if to_s <= begin_s + SLACK * drain_s:
                continue
            if from_s >= end_s - SLACK * drain_s:
                break
            begin_s, end_s = to_s, to_s + drain_s
        insort(self._busy, (begin_s, end_s))
        self._join()
        self._free_s = self._busy[-1][1]
        return end_s

    def _join(self) -> None:
        """Put intervals that touch together."""
        joined = self._busy[:1]
        for from_s, to_s in self._busy[1:]:
            if from_s <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(to_s, joined[-1][1]))
            else:
                joined.append((from_s, to_s))
        self._busy = joined[-KEPT:]
