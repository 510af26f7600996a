"""The range of the vector that one member averages: what has come from whom, and when a part can be averaged.

Pure: flat arrays and ranks; no communicator, no clock. The parts of one sender come in order, so a part that is
passed over was lost or damaged on its way, and is averaged without that sender.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spawnsim.policies.groups.parts import Part, Values, average, difference


class Reduced(NamedTuple):
    """One averaged part: the delta of each sender that is in it, their total weight, and who is not in it."""

    part: int
    deltas: dict[int, Values]
    weight: float
    missing: tuple[int, ...]


class Reducer:
    """The range that this member averages, in parts. `live` senders are waited for; the banned are not."""

    def __init__(self, senders: Sequence[int], parts: Sequence[Part]) -> None:
        self.senders, self.parts, self.done = list(senders), parts, 0
        self.live = set(senders)
        self.progress = dict.fromkeys(senders, 0)  # sender → the part that comes next from it
        self._came: list[dict[int, tuple[Values, float]]] = [{} for _ in parts]

    @property
    def finished(self) -> bool:
        """Whether all parts are averaged."""
        return self.done == len(self.parts)

    def awaits(self, sender: int) -> bool:
        """Whether the next average waits for a part of this sender."""
        return not self.finished and sender in self.live and self.progress[sender] <= self.done

    def take(self, sender: int, index: int, values: Values | None, weight: float) -> bool:
        """Keep one part (None: it came damaged). Refuse those of the banned, and what has come or was passed over."""
        if sender not in self.live or index < self.progress[sender]:
            return False
        if values is not None:
            self._came[index][sender] = (values, weight)
        self.progress[sender] = index + 1
        return True

    def ban(self, sender: int) -> None:
        """Wait for a sender no more: what it has sent counts, what comes later does not."""
        self.live.discard(sender)

    def ready(self) -> Iterator[Reduced]:
        """Yield the parts that nobody is awaited for any more, in order."""
        while not self.finished and not any(map(self.awaits, self.live)):
            self.done += 1
            yield self._reduce(self.done - 1)

    def _reduce(self, index: int) -> Reduced:
        came, self._came[index] = self._came[index], {}
        present = [
            sender for sender in self.senders if sender in came
        ]  # sums are taken in the members' order
        missing = tuple(sender for sender in self.senders if sender not in came)
        if not present:
            return Reduced(index, {}, 0.0, missing)
        mean, total = average(
            [came[sender][0] for sender in present], [came[sender][1] for sender in present]
        )
        if total == 0:
            return Reduced(index, {}, 0.0, tuple(self.senders))
        return Reduced(
            index, {sender: difference(mean, came[sender][0]) for sender in present}, total, missing
        )
