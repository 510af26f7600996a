"""How the ranks of a job that survives deaths part: each tells all others how far it has come, and awaits their word.

A barrier of the library would wait for the dead, and so would the library's own end: ranks leave without it. Knows
small messages between watchdogs and who has died; knows no communicator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spawnsim.real.rank.ending import Ending


class Farewell:
    """One rank's side. `gone()`: world ranks that are dead or given up; `fence()` raises if this one is."""

    def __init__(self, ending: Ending, gone: Callable[[], set[int]], fence: Callable[[], None]) -> None:
        self._watchdog, self._gone, self._fence = ending.watchdog, gone, fence
        self._met = 0  # how many times this rank has come to a meeting
        self._others: dict[int, int] = {}  # the same of others
        self._watchdog.heard["parting"] = self._heard

    def meet(self) -> Callable[[], bool]:
        """Begin to wait for all who live."""
        self._met += 1
        number, channel = self._met, self._watchdog.channel
        others = set(range(channel.size)) - {channel.rank}
        self._watchdog.do(lambda: self._watchdog.tell_all({"kind": "parting", "met": number}))

        def all_here() -> bool:
            self._fence()
            missing = {rank for rank in others if self._others.get(rank, 0) < number}
            return not missing or missing <= self._gone()

        return all_here

    def lowest(self) -> int:
        """Return the lowest rank that has come to the last meeting, and may have left since."""
        came = {rank for rank, met in self._others.items() if met >= self._met}
        return min({self._watchdog.channel.rank, *came})

    def _heard(self, sender: int, message: dict[str, Any]) -> None:
        self._others[sender] = message["met"]
