"""Averaging over all ranks at intervals of the clock, up and down a tree: one rank's side, a state machine.

Means rise from the leaves to the root, weighted by their numbers of ranks; the mean of all ranks descends to branches
that contributed. Each member adds (mean − the weights that it sent), which preserves steps taken meanwhile. The
coordinator keeps the list of averaging ranks, opens a round after each interval, and is the root of the round's tree.
Rank e mod size coordinates epoch e, and a higher epoch replaces a lower one wherever the two meet. A rank enters the
next epoch when the coordinator is dead or does not answer. Works on flat arrays; must not know communicators.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from spawnsim.policies.averaging.gossip import Pace, as_body, from_body, scaled
from spawnsim.policies.averaging.vector import Values, Vector, average, difference
from spawnsim.policies.exchange.messages import Kind, Message, Outgoing

FANOUT = 4

Mean = tuple[list[Values], float]  # the mean of each segment, and the number of ranks in it


def tree(members: tuple[int, ...], rank: int, fanout: int) -> tuple[int | None, tuple[int, ...]]:
    """Return (parent, children) of a rank in the tree of the given fan-out over `members`; the first is the root.

    >>> tree((3, 5, 7, 9), 5, 2)
    (3, (9,))
    """
    place = members.index(rank)
    parent = members[(place - 1) // fanout] if place else None
    first = place * fanout + 1
    return parent, members[first : first + fanout]


class TreeRound:
    """One rank's state of a round; `message` is the OPEN that began it, whose `meta` lists members, root first."""

    def __init__(self, message: Message, rank: int, pace: Pace, began_s: float, sent: list[Values]) -> None:
        self.number, self.pace, self.sent = message.number, pace, sent
        members: tuple[int, ...] = tuple(message.meta)
        self.parent, self.children = tree(members, rank, FANOUT)
        self.awaited, self.silent = set(self.children), set[int]()
        # A node closer to the leaves gives up on a silent child earlier. With equal time-outs, its parent would give up
        # on the whole branch just before the branch rises without the one silent rank.
        self._levels, below = _height(len(members), 0), _height(len(members), members.index(rank))
        self.until_s = began_s + pace.patience_for(self._levels) * below / max(self._levels, 1)
        self.risen = False
        self.step_s = 0.0  # the longest step of the ranks below
        self.means: dict[int, Mean] = {}

    def give(self, child: int, message: Message, values: list[Values] | None) -> None:
        """Store the mean of a child's branch; None if it was damaged."""
        self.awaited.discard(child)
        silent, step_s = message.meta
        self.silent.update(silent)
        self.step_s = max(self.step_s, step_s)
        if values is not None:
            self.means[child] = (values, message.value)

    def is_ready(self, now_s: float) -> bool:
        """Return whether the branch's mean can rise: all children have sent theirs, or the time-out has passed."""
        return not self.risen and (not self.awaited or now_s >= self.until_s)

    def rise(self, now_s: float) -> Mean:
        """Return the mean of the branch. From now on this rank awaits the mean of all ranks."""
        # Silent are awaited children, and the silent ranks that children reported: the root drops all of them.
        self.risen, self.silent = True, self.silent | self.awaited
        # Twice, as the mean must rise through the rest of the tree and descend again.
        self.until_s = now_s + 2 * self.pace.patience_for(self._levels)
        given = [(self.sent, 1.0), *(self.means[child] for child in self.children if child in self.means)]
        weights = [weight for _, weight in given]
        columns = zip(*(values for values, _ in given), strict=True)
        return [average(parts, weights)[0] for parts in columns], sum(weights)


def _height(count: int, place: int) -> int:
    """Return how many levels lie below a place of a tree of `count` members."""
    height, first = 0, place * FANOUT + 1
    while first < count:
        height, first = height + 1, first * FANOUT + 1
    return height


_EPOCH = 1 << 32
ASKED = 3  # requests to a coordinator before it counts as failed
REMINDERS = 5  # how often the time between two reminders of missing ranks doubles


def first_of(epoch: int) -> int:
    """Return the number of an epoch's round 0, which never takes place: later epochs have higher round numbers."""
    return epoch * _EPOCH


def epoch_of(number: int) -> int:
    """Return the epoch of a round."""
    return number // _EPOCH


# There is no election: any two ranks that know the same epoch agree on its coordinator, even if messages were lost, and
# a rank with an old epoch learns the current one from the reply to its first message. Silence alone proves nothing,
# since a rank that trains polls only between its steps; so a rank asks a coordinator before it gives up on it.
class Leadership:
    """One rank's view of the epoch, of dead and absent ranks, and of the time-outs of a silent coordinator."""

    def __init__(self, rank: int, size: int, pace: Pace) -> None:
        self.rank, self.size, self.pace = rank, size, pace
        self.epoch = 0
        self.away: set[int] = set()  # dead, or left for good
        self.ask_s = self.answer_s = math.inf

    @property
    def coordinator(self) -> int:
        return self.epoch % self.size

    def next_epoch(self) -> int:
        """Return the next epoch whose coordinator is not known to be away."""
        epoch = self.epoch + 1
        while epoch % self.size in self.away and epoch % self.size != self.rank:
            epoch += 1
        return epoch

    def epoch_led_by(self, rank: int) -> int:
        return self.epoch + 1 + (rank - self.epoch - 1) % self.size

    def note_alive(self, now_s: float) -> None:
        """Record a sign of life of the coordinator."""
        self.ask_s = now_s + max(2 * self.pace.interval_s, self.pace.patience_s / 2)
        self.answer_s = math.inf

    def asked(self, now_s: float) -> None:
        """Record a request to the coordinator; it may be lost, so schedule another one."""
        self.ask_s = now_s + self.pace.patience_s / ASKED
        self.answer_s = min(self.answer_s, now_s + self.pace.patience_s)

    def enter(self, epoch: int) -> None:
        """Enter an epoch, and expect no answer: the rank with the open request is no longer the coordinator."""
        self.epoch, self.ask_s, self.answer_s = epoch, math.inf, math.inf


@dataclass
class Roster:
    """The coordinator's knowledge: the ranks that average (`present`), pause (`idle`), or have left (`gone`).

    `number` is the last round opened; `members` are its ranks during the round.
    """

    number: int
    pace: Pace
    due_s: float = -math.inf  # when the next round opens; -inf: an interval after the first report
    remind_s: float = math.inf
    present: set[int] = field(default_factory=set)
    idle: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    members: tuple[int, ...] = ()
    _reminders: int = 0

    def note(self, rank: int, part: int, now_s: float) -> None:
        """Record the report of a rank: it averages (1), pauses (0), or leaves for good (-1)."""
        if self.due_s == -math.inf:
            self.due_s = now_s + self.pace.interval_s
            self.remind_s = min(self.remind_s, now_s + self.pace.patience_s)
        self.forget(rank)
        {1: self.present, 0: self.idle, -1: self.gone}[part].add(rank)

    def forget(self, rank: int) -> None:
        for each in (self.present, self.idle, self.gone):
            each.discard(rank)

    def drop(self, silent: Iterable[int], now_s: float) -> None:
        """Exclude silent ranks until they report again; they receive reminders."""
        self.present.difference_update(silent)
        self._reminders, self.remind_s = 0, min(self.remind_s, now_s + self.pace.patience_s)

    def missing(self, size: int, away: set[int]) -> list[int]:
        return sorted(set(range(size)) - self.present - self.idle - self.gone - away)

    def reminded(self, now_s: float) -> None:
        """Record reminders to missing ranks: intervals between reminders double."""
        self.remind_s = now_s + self.pace.patience_s * 2**self._reminders
        self._reminders = min(self._reminders + 1, REMINDERS)

    def wake_s(self) -> float:
        open_s = self.due_s if not self.members and len(self.present) > 1 else math.inf
        return min(open_s, self.remind_s)


LEAVES, STANDS_BY, AVERAGES = -1, 0, 1  # reports of a rank


# A later round replaces an unfinished earlier one. So a round broken by a death is opened again at once, without the
# dead rank, and no rank must find out which part of the tree still works. Leaving is negotiated: the coordinator's
# answer is the last round that includes the leaving rank, and the rank completes that round; otherwise its whole branch
# would wait for it until a time-out. A silent branch is excluded after a while, and a silent rank is included again
# only after it has reported.
class TreeAverage:
    """One rank's side of the mode "all", including the coordinator's tasks if it is the coordinator."""

    def __init__(self, ranks: tuple[int, int], pace: Pace, *, share: float = 1.0) -> None:
        (self.rank, self.size), self.pace, self._share = ranks, pace, share
        self.out: deque[Outgoing] = deque()
        self.counts: Counter[str] = Counter()
        self.rounds = 0  # the last round completed on this rank
        self._standing = STANDS_BY
        self._leaving = False
        self._last_round: int | None = None  # the last round with this rank, from the coordinator
        self._leadership = Leadership(*ranks, pace)
        self._roster = Roster(0, pace) if self._leadership.coordinator == self.rank else None
        self._step_s = 0.0  # this rank's own step; the longest of all ranks is in `pace`
        self._hand_over_s = math.inf  # when a coordinator that does not average hands over
        self._round: TreeRound | None = None

    @property
    def _takes_part(self) -> bool:
        return self._standing == AVERAGES or self._leaving

    # ------------------------------------------------------------------------------------------- coming, going
    def set_active(self, active: bool, now_s: float, *, for_good: bool = False) -> None:
        """Participate from now on, or negotiate to leave."""
        self._standing = AVERAGES if active else LEAVES if for_good else STANDS_BY
        self._leaving = not active
        self._report(now_s)

    def _report(self, now_s: float) -> None:
        """Report this rank's standing to the coordinator, which answers."""
        self._last_round, number = None, first_of(self._leadership.epoch)
        message = Message(Kind.PRESENT, number, part=self._standing, value=self._step_s)
        self.out.append((self._leadership.coordinator, message))
        self._leadership.asked(now_s)

    def note_step(self, step_s: float) -> None:
        self._step_s, self.pace.step_s = step_s, max(self.pace.step_s, step_s)

    @property
    def settled(self) -> bool:
        """Whether no open round includes this rank (after it has left)."""
        if not self._leaving:
            return True
        last = self._last_round
        return self._round is None and last is not None and (last % _EPOCH == 0 or last <= self.rounds)

    def _settle(self, last_round: int) -> None:
        self._last_round = last_round
        # Abandon a round after the last one that includes this rank: no rank waits for it there.
        if self._leaving and self._round is not None and self._round.number > last_round:
            self._round = None

    @property
    def relied_on(self) -> bool:
        return self._roster is not None and bool(self._roster.members or self._successors(self._roster))

    def _successors(self, roster: Roster) -> set[int]:
        present, idle = roster.present - {self.rank}, roster.idle - {self.rank}
        return present or (idle if self._standing == LEAVES else set())

    def forget(self) -> None:
        self._round, self._leaving = None, False
        if self._roster is not None:
            self._roster.members = ()

    def leave(self) -> None:
        """Hand over the coordination, if this rank is the coordinator and there is a successor."""
        roster = self._roster
        if roster is None or not (successors := self._successors(roster)):
            return
        # The lowest of the successors' next epochs, so that all ranks determine the same successor.
        self._roster = None
        self._leadership.enter(min(map(self._leadership.epoch_led_by, successors)))
        others = sorted((roster.present | roster.idle) - {self.rank})
        lists = tuple(map(sorted, (roster.present - {self.rank}, roster.idle, roster.gone)))
        message = Message(Kind.HANDOVER, first_of(self._leadership.epoch), meta=lists)
        self.out.extend((rank, message) for rank in others)

    # ------------------------------------------------------------------------------------------------- epochs
    def _adopt(self, epoch: int, now_s: float) -> None:
        deposed, self._roster = self._roster, None
        self._leadership.enter(epoch)
        self._give_up_round()
        if deposed is not None:
            # Notify the ranks that it led: they would still report to the former coordinator.
            self.out.extend((rank, self._epoch_message()) for rank in sorted(deposed.present - {self.rank}))
        if self._leadership.coordinator == self.rank:  # a first reminder requests reports of all other ranks
            self._roster = Roster(first_of(epoch), self.pace, now_s + self.pace.interval_s, remind_s=now_s)
            self._roster.note(self.rank, self._standing, now_s)
            self._last_round = first_of(epoch)
        elif self._takes_part:
            self._report(now_s)

    def _give_up_round(self) -> None:
        self.counts["rounds given up"] += self._round is not None
        self._round = None

    def _epoch_message(self) -> Message:
        gone = sorted(self._roster.gone) if self._roster is not None else []
        return Message(Kind.HANDOVER, first_of(self._leadership.epoch), meta=([], [], gone))

    def _inherit(self, source: int, message: Message, now_s: float) -> None:
        """Handle the beginning of an epoch, or a reminder of the coordinator, which lacks this rank's report."""
        present, idle, gone = message.meta
        self._leadership.away.update(gone)
        if self._roster is not None:
            self._roster.present.update(present)
            self._roster.idle.update(idle)
            self._roster.gone.update(gone)
            self._roster.note(self.rank, self._standing, now_s)
        elif source == self._leadership.coordinator:
            self._report(now_s)

    def _suspect(self, now_s: float) -> None:
        """Send a report to a silent coordinator, and enter the next epoch if it does not answer."""
        if now_s >= self._leadership.answer_s:
            self.counts["silent coordinators"] += 1
            self._adopt(self._leadership.next_epoch(), now_s)
        elif now_s >= self._leadership.ask_s:
            self._report(now_s)

    # --------------------------------------------------------------------------------------------- coordinating
    def _coordinate(self, roster: Roster, now_s: float, vector: Vector) -> None:
        if self._standing != AVERAGES:
            self._stand_by(roster, now_s)
            return
        self._hand_over_s = math.inf
        if not roster.members and now_s >= roster.due_s and len(roster.present) > 1:
            roster.number += 1
            roster.members = (self.rank, *sorted(roster.present - {self.rank}))
            message = Message(Kind.OPEN, roster.number, value=self.pace.step_s, meta=roster.members)
            self._opened(message, now_s, vector)
        if now_s >= roster.remind_s:
            missing = roster.missing(self.size, self._leadership.away)
            self.out.extend((rank, self._epoch_message()) for rank in missing)
            roster.reminded(now_s)

    def _stand_by(self, roster: Roster, now_s: float) -> None:
        """Hand the coordination to a rank that averages. Not at once: that rank may be about to stop as well."""
        if roster.members or not self._successors(roster):
            return
        if self._hand_over_s == math.inf:
            self._hand_over_s = now_s + self.pace.interval_s
        elif now_s >= self._hand_over_s:
            self.leave()

    def _presence(self, source: int, message: Message, now_s: float) -> None:
        roster = self._roster
        if roster is None or message.part not in (LEAVES, STANDS_BY, AVERAGES):
            self.counts["late"] += 1
            return
        self._leadership.away.discard(source)
        self.pace.step_s = max(self.pace.step_s, message.value)
        roster.note(source, message.part, now_s)
        # The current round still needs its members; all other ranks may leave at once.
        last = roster.number if source in roster.members else first_of(self._leadership.epoch)
        self.out.append((source, Message(Kind.SETTLED, last, part=message.part)))

    def _open_anew(self, roster: Roster, now_s: float) -> None:
        """Abandon a round broken by a death; the next one opens at once."""
        self._give_up_round()
        left = set(roster.members) - roster.present - self._leadership.away
        nothing = Message(Kind.SETTLED, first_of(self._leadership.epoch))
        self.out.extend((rank, nothing) for rank in sorted(left))
        roster.members, roster.due_s = (), now_s

    # ------------------------------------------------------------------------------------------------- a round
    def _opened(self, message: Message, now_s: float, vector: Vector) -> None:
        # OPEN may be duplicated, or late through a slow branch: each round is entered once.
        known = max(self.rounds, self._round.number if self._round is not None else 0)
        if message.number <= known or self.rank not in message.meta:
            self.counts["late"] += 1
            return
        if not self._takes_part:  # it left without waiting for the negotiation
            self._report(now_s)
            return
        self._give_up_round()
        # The coordinator's value is the longest known step; the patience of all levels depends on it.
        self.pace.step_s = max(message.value, self._step_s)
        self._round = TreeRound(message, self.rank, self.pace, now_s, vector.read())
        self.out.extend((child, message) for child in self._round.children)
        self._rise(now_s, vector)

    def _rise(self, now_s: float, vector: Vector) -> None:
        here = self._round
        if here is None or not here.is_ready(now_s):
            return
        self.counts["silent branches"] += len(here.awaited)
        mean = here.rise(now_s)
        if self._roster is None:
            assert here.parent is not None
            below = sorted(here.silent), max(here.step_s, self._step_s)
            up = Message(Kind.UP, here.number, value=mean[1], meta=below, body=as_body(mean[0]))
            self.out.append((here.parent, up))
            return
        self.pace.step_s = max(self._step_s, here.step_s)
        self._roster.drop(here.silent, now_s)
        self._roster.members, self._roster.due_s = (), now_s + self.pace.interval_s
        self._fall(mean, vector)

    def _fall(self, mean: Mean, vector: Vector) -> None:
        here, self._round = self._round, None
        assert here is not None
        self.rounds = here.number
        if mean[1] > 1:  # else it is a mean of this rank alone, unchanged
            down = Message(Kind.DOWN, here.number, value=mean[1], body=as_body(mean[0]))
            # A branch that contributed nothing does not get the mean: its members' own values are not in it.
            self.out.extend((child, down) for child in here.children if child in here.means)
            deltas = [difference(there, sent) for there, sent in zip(mean[0], here.sent, strict=True)]
            vector.add(deltas if self._share == 1 else scaled(deltas, self._share, vector))
            self.counts["exchanges"] += 1

    def _take(self, source: int, message: Message, now_s: float, vector: Vector) -> None:
        here = self._round
        values = from_body(message.body, vector)
        self.counts["other shapes"] += values is None  # a damaged body has no length
        if here is None or here.number != message.number:
            self.counts["late"] += 1
        elif message.kind is Kind.UP and source in here.awaited and not here.risen:
            here.give(source, message, values)
            self._rise(now_s, vector)
        elif message.kind is Kind.DOWN and source == here.parent and values is not None:
            self._fall((values, message.value), vector)

    # ------------------------------------------------------------------------------------------ messages, time
    def handle(self, source: int, message: Message, now_s: float, vector: Vector) -> None:
        epoch = epoch_of(message.number)
        if epoch < self._leadership.epoch:
            self.counts["late"] += 1
            # A sender in an earlier epoch must learn the current one, or it waits for a former coordinator.
            if message.kind in (Kind.PRESENT, Kind.OPEN, Kind.HANDOVER):
                self.out.append((source, self._epoch_message()))
            return
        if epoch > self._leadership.epoch:
            self._adopt(epoch, now_s)
        if source == self._leadership.coordinator or message.kind in (Kind.OPEN, Kind.DOWN):
            self._leadership.note_alive(now_s)
        if message.kind is Kind.PRESENT:
            self._presence(source, message, now_s)
        elif message.kind is Kind.SETTLED:
            self._settle(message.number)
        elif message.kind is Kind.OPEN:
            self._opened(message, now_s, vector)
        elif message.kind is Kind.HANDOVER:
            self._inherit(source, message, now_s)
        else:
            self._take(source, message, now_s, vector)

    def tick(self, now_s: float, vector: Vector) -> None:
        if self._roster is not None:
            self._coordinate(self._roster, now_s, vector)
        elif self._takes_part:
            self._suspect(now_s)
        here = self._round
        if here is not None and here.risen and now_s >= here.until_s:
            self.counts["rounds without answer"] += 1
            self.rounds, self._round = here.number, None
        self._rise(now_s, vector)

    def lost(self, rank: int, now_s: float) -> None:
        self._leadership.away.add(rank)
        if self._round is not None:
            self._round.awaited.discard(rank)
        if self._roster is not None:
            self._roster.forget(rank)
            if rank in self._roster.members:
                self._open_anew(self._roster, now_s)
        elif rank == self._leadership.coordinator:
            self._adopt(self._leadership.next_epoch(), now_s)

    def wake_s(self) -> float:
        times = [self._round.until_s] if self._round is not None else []
        if self._roster is not None:
            times += [self._roster.wake_s(), self._hand_over_s]
        elif self._takes_part:
            times += [self._leadership.ask_s, self._leadership.answer_s]
        return min((time_s for time_s in times if time_s != -math.inf), default=math.inf)
