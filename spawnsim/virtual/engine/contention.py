"""Contention of messages on their way to a rank: NICs take turns ("fifo"), or flows share the links ("fair").

Networks with the contention "serial" or "none" need neither: see `completion.ReceivingNic`.

*First come, first served* (`Ingress`, "fifo"): NICs admit messages one by one, in the order in which their first bytes
arrive. A message occupies a NIC for `drain_s`; it has arrived at max(arrival, free + drain_s), where free is the time
at which the NIC finished the previous message. The order is known only when no earlier message can be sent any more:
admission is an observation. But no message sent from now on reaches a NIC before now + lookahead, the smallest latency.
So one event settles all messages with first bytes before that time, on all NICs. A thousand ranks in step pay for one
event per round, not one per message.

*Sharing* (`Sharing`): after its latency each message is a flow, with its max-min fair share of the links that it
crosses. Rates change when a flow begins or ends, and those times are events: exact, and more expensive than NICs in
turn. A single message takes the time that the link model gives. Messages between two ranks do not overtake each other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Protocol, cast

import numpy as np

from spawnsim.models.network import Cost, Flow, FlowNetwork, Network
from spawnsim.models.network.cost import Floats
from spawnsim.virtual.engine.completion import Message
from spawnsim.virtual.engine.event_queue import UNDER_WAY, EventQueue
from spawnsim.virtual.engine.matching import Mailbox


class Bulk(Protocol):
    """The data of a rendezvous, with a sender that waits until they have left."""

    message: Message

    @property
    def pair(self) -> tuple[int, int]: ...

    def complete(self, finish_s: float) -> None:
        """Let the sender continue at `finish_s`."""
        ...


class Model(Protocol):
    """Decides when concurrent messages arrive."""

    def cost(self, source: int, dest: int, nbytes: int) -> Cost: ...

    def cost_at(self, source: int, dest: int, nbytes: int, begin_s: float) -> Cost:
        """Return the cost on links that change with time, for a message whose injection begins at `begin_s`."""
        ...

    def carry(self, message: Message, mailbox: Mailbox, source: int) -> None:
        """Take a message from a world rank that, by its cost, would arrive at its `envelope_s`.

        Deliver it with its final times. Without `arrival_s` it is the envelope of a rendezvous, which has no bytes.
        """
        ...

    def stream(self, bulk: Bulk, left_s: float, arrival_s: float) -> None:
        """Take data that, by their cost, have left at `left_s` and arrive at `arrival_s`; land their message."""
        ...


# first bytes at the NIC, sender, sequence; NIC, (drain, uncontended arrival), message, mailbox (None: delivered before)
Coming = tuple[float, int, int, int, tuple[float, float], Message, Mailbox | None]


class Ingress:
    """The receiving sides of all NICs. `free_s`, by world rank, is when a NIC has admitted all messages given to it."""

    def __init__(self, env: EventQueue, network: Network) -> None:
        self._env, self.cost, self.cost_at = env, network.cost, network.cost_at
        self._lookahead_s = network.lookahead_s
        self.free_s: dict[int, float] = {}
        self._coming: list[Coming] = []  # a heap
        self._number = 0
        self._alarm_s = math.inf
        self._settled_s = -math.inf  # no message arrives before this any more

    def carry(self, message: Message, mailbox: Mailbox, source: int) -> None:
        """Take a message with the uncontended arrival `envelope_s`; it is delivered in its turn."""
        self._number += 1
        message.sequence = self._number
        drain_s, message.drain_s = message.drain_s, 0.0
        arrival_s, heads = message.envelope_s, mailbox.lanes
        head_s = arrival_s - drain_s
        # Messages of one sender may not overtake each other at the NIC either: otherwise an empty message sent behind a
        # large one would have its first (and last) byte there first.
        last_s = heads.get(message.source)
        if last_s is not None and last_s >= self._settled_s:  # an earlier message may not be overtaken
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
        """Take the data of a rendezvous, with the uncontended arrival `arrival_s`.

        They precede later messages of the rank that arrive at the same time.
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
        """Admit all messages whose turn is certain."""
        if alarm_s != self._alarm_s:
            return  # an earlier one has been set since
        # Messages sent from now on reach a NIC after the lookahead at the earliest, so the order of all earlier
        # arrivals is final: one event settles it, on all NICs. Sums of times are rounded, so the limit is reduced by a
        # few units in the last place; but it must be later than the alarm, or a network without latency would never
        # advance.
        coming, limit_s = self._coming, self._env.now + self._lookahead_s
        self._settled_s = limit_s = max(limit_s - 4 * math.ulp(limit_s), math.nextafter(alarm_s, math.inf))
        while coming and coming[0][0] < limit_s:
            _, _, _, nic, times, message, mailbox = heappop(coming)
            arrival_s = self._admit(nic, *times)
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

    def _admit(self, nic: int, drain_s: float, arrival_s: float) -> float:
        """Return when a message with the uncontended arrival `arrival_s` has been admitted."""
        if not drain_s:
            return arrival_s
        after_s = self.free_s.get(nic, -math.inf) + drain_s
        self.free_s[nic] = arrival_s = arrival_s if arrival_s > after_s else after_s
        return arrival_s


Over = Callable[[float], None]


class Sharing:
    """All flows of a run ("fair"). Before its flow begins, a message costs latency and processor time, but no bytes."""

    def __init__(self, env: EventQueue, network: Network, ranks: int) -> None:
        links = network.shared_links(ranks)
        self._env, self._network, self._path = env, network, links.path
        self._left = links.left
        self._flows = FlowNetwork(links.capacities, links.left)
        self._beginning: list[tuple[float, int, int, Flow]] = []  # a heap: time, sender, number, flow
        self._numbers = count()
        self._alarm_s = math.inf

    def cost(self, source: int, dest: int, nbytes: int) -> Cost:
        """Return the cost of one message without the time of its bytes, which the flow takes."""
        # The flow carries the bytes of a message that crosses a shared link; the rest of its cost is latency. Without a
        # shared link (within a node), the whole cost applies.
        whole, empty = self._network.cost(source, dest, nbytes), self._network.cost(source, dest, 0)
        flight_s = min(whole.flight_s, empty.flight_s) if self._path(source, dest) else whole.flight_s
        return Cost(whole.send_s, 0.0, flight_s, whole.receive_s, 0.0)

    def cost_at(self, source: int, dest: int, nbytes: int, begin_s: float) -> Cost:
        """Return the cost on links that change with time: it adds latency; the flow adds the time of the bytes."""
        fixed = self.cost(source, dest, nbytes)
        asked = self._network.cost_at(source, dest, 0 if self._path(source, dest) else nbytes, begin_s)
        return fixed._replace(flight_s=asked.flight_s)

    def carry(self, message: Message, mailbox: Mailbox, source: int) -> None:
        """Take a message whose flow begins at its `envelope_s`; it is delivered when the flow is complete."""
        # Flows of one sender to one receiver may end in a different order, but messages may not overtake each other:
        # the queue delivers each message when its own flow and all earlier ones are complete.
        queue: deque[Message] = mailbox.lanes.setdefault(message.source, deque())
        queue.append(message)

        def over(time_s: float) -> None:
            message.queued = True  # here: its flow is complete
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
        """Take the data of a rendezvous, whose flow begins at `arrival_s`: its cost contains only latency."""

        def over(time_s: float) -> None:
            bulk.complete(time_s)
            bulk.message.land(time_s)

        self._begin(arrival_s, bulk.pair, bulk.message.nbytes, over)

    def collective(self, begin_s: float, lasts_s: float, first: int, *, loads: Floats, over: Over) -> float:
        """Let the bytes of a collective cross the links, as one flow through all links that it uses.

        Args:
            begin_s: When all its members have arrived.
            lasts_s: How long the collective takes alone from then on, at least as long as its flow.
            first: The world rank of one member.
            loads: How many bytes the collective sends over each link, float64 (links,).
            over: Called with the end of the flow.

        Returns:
            How long the flow takes alone, in seconds; 0 if it crosses no link, and then `over` is not called.
        """
        # The fullest link determines the time; a flow has one rate, the rate of its slowest link.
        used = np.flatnonzero(loads)
        if not len(used) or not lasts_s > 0.0:
            return 0.0
        capacities = self._flows.capacities[used]
        work_s = min(float((loads[used] / capacities).max()), lasts_s)
        flow = Flow(tuple(used.tolist()), work_s * float(capacities.min()), over)
        self._start(begin_s, first, flow)
        # On changing links a flow takes longer even alone: only the time beyond that is caused by other flows.
        return work_s if self._left is None else self._left.lasts(begin_s, work_s)

    def _begin(self, begin_s: float, pair: tuple[int, int], nbytes: int, over: Over) -> None:
        self._start(begin_s, pair[0], Flow(self._path(*pair), float(nbytes), over))

    def _start(self, begin_s: float, source: int, flow: Flow) -> None:
        heappush(self._beginning, (begin_s, source, next(self._numbers), flow))
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Ensure that an event exists for the next beginning or end of a flow."""
        next_s = self._flows.next_change()
        if self._beginning:
            next_s = min(next_s, self._beginning[0][0])
        if next_s != self._alarm_s:
            self._alarm_s = next_s
            if next_s < math.inf:
                self._env.at(max(next_s, self._env.now), UNDER_WAY, lambda: self._ring(next_s))

    def _ring(self, alarm_s: float) -> None:
        if alarm_s != self._alarm_s:
            return  # a flow has begun or ended since
        self._alarm_s = math.inf
        now_s, beginning = self._env.now, self._beginning
        done = self._flows.advance(now_s)
        flows = []
        while beginning and beginning[0][0] <= now_s:
            flows.append(heappop(beginning)[3])
        if flows:
            self._flows.start(now_s, *flows)
            done += self._flows.advance(now_s)  # flows that cross no link, or are empty
        self._set_alarm()
        for each in done:
            cast(Over, each.flow.tag)(each.time_s)


def model_of(env: EventQueue, network: Network, ranks: int) -> Model | None:
    """Return the model that a network needs; None: no contention."""
    if network.contention == "fair":
        return Sharing(env, network, ranks)
    return Ingress(env, network) if network.contention == "fifo" else None
