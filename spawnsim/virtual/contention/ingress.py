"""Network cards that let messages in one by one, in the order in which their first bytes reach them.

A card is busy for `drain_s` with a message; the message has arrived at max(arrival, free + drain_s), free being when
the card was done with the one before. Who comes before can be said only when nobody can send anything earlier any
more: letting in is an observation. But nothing sent from now on reaches a card before now + lookahead, the least
latency there is; so one event settles all messages whose first bytes come within it, on all cards. A thousand ranks in
step pay one event a round, not one a message.

This room knows times, cards and mailboxes. It must not know who waits for what.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from spawnsim.virtual.clockwork import UNDER_WAY, Clockwork
from spawnsim.virtual.completion import Message
from spawnsim.virtual.contention.model import Bulk
from spawnsim.virtual.matching import Mailbox
from spawnsim.virtual.network import Network

# first bytes at the card, sender, sequence; card, (drain, arrival if alone), message, its mailbox unless it is there
Coming = tuple[float, int, int, int, tuple[float, float], Message, Mailbox | None]


class Ingress:
    """The receiving sides of all cards. `free_s` is when each has let in all that it has been given, by world rank."""

    def __init__(self, env: Clockwork, network: Network) -> None:
        self._env, self.price = env, network.price
        self._lookahead_s = network.lookahead_s
        self.free_s: dict[int, float] = {}
        self._coming: list[Coming] = []  # a heap
        self._number = 0
        self._alarm_s = math.inf
        self._settled_s = -math.inf  # nothing comes before this any more

    def carry(self, message: Message, mailbox: Mailbox, source: int) -> None:
        """Take a message that would arrive, alone, at its `envelope_s`; it is delivered in its turn."""
        self._number += 1
        message.sequence = self._number
        drain_s, message.drain_s = message.drain_s, 0.0
        arrival_s, heads = message.envelope_s, mailbox.lanes
        head_s = arrival_s - drain_s
        last_s = heads.get(message.source)
        if last_s is not None and last_s >= self._settled_s:  # one is before it, and may not be overtaken
            if head_s < last_s:
                head_s, arrival_s = last_s, max(arrival_s, last_s + drain_s)
        elif not drain_s:
            mailbox.deliver(message)
            return
        heads[message.source] = head_s
        times = (drain_s, arrival_s)
        heappush(self._coming, (head_s, source, message.sequence, mailbox.rank, times, message, mailbox))
        if head_s < self._alarm_s:
            self._set_alarm()

    def stream(self, bulk: Bulk, left_s: float, arrival_s: float) -> None:
        """Take the data of a rendezvous, which would arrive alone at `arrival_s`.

        They go before what the rank has sent since and comes at the same time.
        """
        bulk.complete(left_s)
        message, (source, dest) = bulk.message, bulk.pair
        drain_s, message.drain_s = message.drain_s, 0.0
        if not drain_s:
            message.land(arrival_s)
            return
        self._number += 1
        sequence, times = message.sequence or self._number, (drain_s, arrival_s)
        heappush(self._coming, (arrival_s - drain_s, source, sequence, dest, times, message, None))
        if arrival_s - drain_s < self._alarm_s:
            self._set_alarm()

    def _set_alarm(self) -> None:
        self._alarm_s = alarm_s = max(self._coming[0][0], self._env.now)
        self._env.at(alarm_s, UNDER_WAY, lambda: self._settle(alarm_s))

    def _settle(self, alarm_s: float) -> None:
        """Let in all before whom nobody can come any more."""
        if alarm_s != self._alarm_s:
            return  # an earlier one was set since
        coming, limit_s = self._coming, self._env.now + self._lookahead_s
        self._settled_s = limit_s = max(limit_s - 4 * math.ulp(limit_s), math.nextafter(alarm_s, math.inf))
        while coming and coming[0][0] < limit_s:
            _, _, _, card, times, message, mailbox = heappop(coming)
            arrival_s = self._let_in(card, *times)
            if mailbox is None:
                message.land(arrival_s)
                continue
            message.envelope_s = arrival_s
            if message.arrival_s is not None:
                message.arrival_s = arrival_s
            mailbox.deliver(message)
        self._alarm_s = math.inf
        if coming:
            self._set_alarm()

    def _let_in(self, card: int, drain_s: float, arrival_s: float) -> float:
        """Return when a message has been let in that would arrive alone at `arrival_s`."""
        if not drain_s:
            return arrival_s
        after_s = self.free_s.get(card, -math.inf) + drain_s
        self.free_s[card] = arrival_s = arrival_s if arrival_s > after_s else after_s
        return arrival_s
