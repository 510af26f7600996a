"""Messages that share links: each is a flow from its latency on, with its max-min fair share of what it crosses.

Rates change when a flow begins or ends, and those times are events: exact, and dearer than cards in turn. A message
alone takes what the link model says. Between a pair of ranks messages do not overtake.

This room knows flows, times and mailboxes. It must not know who waits for what.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import cast

from spawnsim.virtual.clockwork import UNDER_WAY, Clockwork
from spawnsim.virtual.completion import Message
from spawnsim.virtual.contention.model import Bulk
from spawnsim.virtual.matching import Mailbox
from spawnsim.virtual.network import Flow, FlowNetwork, Network

Over = Callable[[float], None]


class Sharing:
    """All flows of a run. A message costs latency and processors before its flow begins, and no bytes."""

    def __init__(self, env: Clockwork, network: Network, ranks: int) -> None:
        links = network.shared_links(ranks)
        self._env, self._network, self._path = env, network, links.path
        self._flows = FlowNetwork(links.capacities)
        self._beginning: list[tuple[float, int, int, Flow]] = []  # a heap: when, sender, number
        self._numbers = count()
        self._alarm_s = math.inf

    def price(self, source: int, dest: int, nbytes: int) -> tuple[float, float, float, float, float]:
        """Return the cost of one message without the time of its bytes, which the flow takes."""
        whole, empty = self._network.cost(source, dest, nbytes), self._network.cost(source, dest, 0)
        flight_s = min(whole.flight_s, empty.flight_s) if self._path(source, dest) else whole.flight_s
        return whole.send_s, 0.0, flight_s, whole.receive_s, 0.0

    def carry(self, message: Message, mailbox: Mailbox, source: int) -> None:
        """Take a message whose flow begins at its `envelope_s`; it is delivered when the flow is over."""
        queue: deque[Message] = mailbox.lanes.setdefault(message.source, deque())
        queue.append(message)

        def over(time_s: float) -> None:
            message.queued = True  # here, meaning that its flow is over
            while queue and queue[0].queued:
                self._deliver(queue.popleft(), mailbox, time_s)

        nbytes = 0 if message.arrival_s is None else message.nbytes
        self._begin(message.envelope_s, (source, mailbox.rank), nbytes, over)

    def _deliver(self, message: Message, mailbox: Mailbox, time_s: float) -> None:
        message.queued, message.envelope_s = False, time_s
        if message.arrival_s is not None:
            message.arrival_s = time_s
        mailbox.deliver(message)

    def stream(self, bulk: Bulk, left_s: float, arrival_s: float) -> None:
        """Take the data of a rendezvous, whose flow begins at `arrival_s`: its cost has latency alone."""

        def over(time_s: float) -> None:
            bulk.complete(time_s)
            bulk.message.land(time_s)

        self._begin(arrival_s, bulk.pair, bulk.message.nbytes, over)

    def _begin(self, begin_s: float, pair: tuple[int, int], nbytes: int, over: Over) -> None:
        flow = Flow(self._path(*pair), float(nbytes), over)
        heappush(self._beginning, (begin_s, pair[0], next(self._numbers), flow))
        self._set_alarm()

    def _set_alarm(self) -> None:
        """See that an event stands at the next beginning or end of a flow."""
        next_s = self._flows.next_change()
        if self._beginning:
            next_s = min(next_s, self._beginning[0][0])
        if next_s != self._alarm_s:
            self._alarm_s = next_s
            if next_s < math.inf:
                self._env.at(max(next_s, self._env.now), UNDER_WAY, lambda: self._ring(next_s))

    def _ring(self, alarm_s: float) -> None:
        if alarm_s != self._alarm_s:
            return  # something has begun or ended since
        self._alarm_s = math.inf
        now_s, beginning = self._env.now, self._beginning
        done = self._flows.advance(now_s)
        flows = []
        while beginning and beginning[0][0] <= now_s:
            flows.append(heappop(beginning)[3])
        if flows:
            self._flows.start(now_s, *flows)
            done += self._flows.advance(now_s)  # what crosses nothing, or is empty
        self._set_alarm()
        for each in done:
            cast(Over, each.flow.tag)(each.time_s)
