"""Which rank coordinates the averaging over all ranks, as one rank sees it; and what it knows of the others.

Epoch e is coordinated by rank e mod size, and a higher epoch replaces a lower one wherever the two meet. A rank moves
on to the next epoch when the coordinator is dead, or does not answer a question. Pure state and times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from spawnsim.policies.averaging.gossip import Pace

_EPOCH = 1 << 32
ASKED = 3  # how often a coordinator is asked before it counts as failed
REMINDERS = 5  # how often the time between two reminders of the missing doubles


def first_of(epoch: int) -> int:
    """Return the number of an epoch's round 0, which is never held: rounds of later epochs have higher numbers."""
    return epoch * _EPOCH


def epoch_of(number: int) -> int:
    """Return the epoch of a round."""
    return number // _EPOCH


def is_no_round(number: int) -> bool:
    """Whether a number stands for no round."""
    return number % _EPOCH == 0


# There is no election: any two ranks that know the same epoch agree on its coordinator, whatever messages were lost,
# and a rank that is wrong about the epoch learns so from its first message to one that is not. Silence alone proves
# nothing, since a rank that trains looks at its messages only between its steps; so it is asked before it is given up.
class Leadership:
    """One rank's view: the epoch, which ranks are dead or gone, and when to ask a silent coordinator."""

    def __init__(self, rank: int, size: int, pace: Pace) -> None:
        self.rank, self.size, self.pace = rank, size, pace
        self.epoch = 0
        self.away: set[int] = set()  # dead, or gone for good
        self._ask_s = self._answer_s = math.inf

    @property
    def coordinator(self) -> int:
        """The rank that coordinates this epoch."""
        return self.epoch % self.size

    def next_epoch(self) -> int:
        """Return the next epoch whose coordinator may be there."""
        epoch = self.epoch + 1
        while epoch % self.size in self.away and epoch % self.size != self.rank:
            epoch += 1
        return epoch

    def epoch_led_by(self, rank: int) -> int:
        """Return the next epoch that another rank coordinates."""
        return self.epoch + 1 + (rank - self.epoch - 1) % self.size

    def heard(self, now_s: float) -> None:
        """Note a sign of life of the coordinator."""
        self._ask_s = now_s + max(2 * self.pace.interval_s, self.pace.patience_s / 2)
        self._answer_s = math.inf

    def asked(self, now_s: float) -> None:
        """Note that the coordinator was sent something that it answers; a message may be lost, so ask again."""
        self._ask_s = now_s + self.pace.patience_s / ASKED
        self._answer_s = min(self._answer_s, now_s + self.pace.patience_s)

    def expects_nothing(self) -> None:
        """Expect no answer: the rank that was asked is not the coordinator any more."""
        self._ask_s = self._answer_s = math.inf

    def should_ask(self, now_s: float) -> bool:
        """Whether the coordinator has been silent for so long that it should be asked."""
        return now_s >= self._ask_s

    def has_failed(self, now_s: float) -> bool:
        """Whether the coordinator has not answered."""
        return now_s >= self._answer_s

    def wake_s(self) -> float:
        """Return when one of the two above is next due."""
        return min(self._ask_s, self._answer_s)


@dataclass
class Roster:
    """What the coordinator of an epoch knows: which ranks average (`present`), pause (`idle`), or have left (`gone`).

    `number` is the last round opened, `members` are its ranks while it is under way.
    """

    number: int
    pace: Pace
    due_s: float = -math.inf  # when the next round opens; -inf: an interval after the first rank is here
    remind_s: float = math.inf
    present: set[int] = field(default_factory=set)
    idle: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    members: tuple[int, ...] = ()
    _reminders: int = 0

    def note(self, rank: int, part: int, now_s: float) -> None:
        """Note what a rank says of itself: it averages (1), does not (0), or leaves for good (-1)."""
        if self.due_s == -math.inf:
            self.due_s = now_s + self.pace.interval_s
            self.remind_s = min(self.remind_s, now_s + self.pace.patience_s)
        self.forget(rank)
        {1: self.present, 0: self.idle, -1: self.gone}[part].add(rank)

    def forget(self, rank: int) -> None:
        """Take a rank from all lists."""
        for each in (self.present, self.idle, self.gone):
            each.discard(rank)

    def drop(self, silent: Iterable[int], now_s: float) -> None:
        """Count on silent ranks no more, until they say that they are there; they are reminded of it."""
        self.present.difference_update(silent)
        self._reminders, self.remind_s = 0, min(self.remind_s, now_s + self.pace.patience_s)

    def close(self, now_s: float) -> None:
        """Note that the round is over."""
        self.members, self.due_s = (), now_s + self.pace.interval_s

    def missing(self, size: int, away: set[int]) -> list[int]:
        """Return the ranks that have said nothing."""
        return sorted(set(range(size)) - self.present - self.idle - self.gone - away)

    def reminded(self, now_s: float) -> None:
        """Note that the missing were reminded: the next time comes later and later."""
        self.remind_s = now_s + self.pace.patience_s * 2**self._reminders
        self._reminders = min(self._reminders + 1, REMINDERS)

    def wake_s(self) -> float:
        """Return when the coordinator next has something to do of its own accord."""
        open_s = self.due_s if not self.members and len(self.present) > 1 else math.inf
        return min(open_s, self.remind_s)
