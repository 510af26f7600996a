"""The times at which models move from rank to rank: a round's messages as columns, with the NICs' queues.

`exchange`: each replaced rank sends a short request to each of its donors, in order. Each donor receives requests in
the order of their arrival, and answers each with its model. No rank is both donor and replaced. `swap`: each rank sends
its model to some ranks, unasked. In both a rank continues when it has all models for which it waits. Messages obey the
rules of virtual ranks: eager up to the platform's threshold, rendezvous above; a NIC sends one message at a time and
receives one at a time. Tests compare the times with the same round in real messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spawnsim.models.network.cost import Floats, Ints, Network
from spawnsim.policies.exchange.messages import HEADER_NBYTES
from spawnsim.policies.rules.donors import Decision
from spawnsim.virtual.engine.completion import KEPT, SLACK

FEW = 64  # queues up to this length advance together, one item each; longer queues are computed one by one
Booked = Floats  # begins and ends of intervals, (2, NICs, intervals), in any order; inf: none


class Queues:
    """Items in queues, one queue after the other.

    Args:
        queue: number of each item's queue, int64 (items,), ascending.
    """

    def __init__(self, queue: Ints) -> None:
        self.count = len(queue)
        self.starts = (
            np.flatnonzero(np.r_[True, queue[1:] != queue[:-1]]) if self.count else np.empty(0, np.int64)
        )
        self.lengths = np.diff(np.r_[self.starts, self.count])

    def served(self, ready: Floats, service_s: Floats) -> Floats:
        """Return when the service of each item begins: when it is ready and the item before it has been served.

        Args:
            ready: when each item is ready, float64 (items,), seconds.
            service_s: service time of each item, float64 (items,).

        Returns:
            float64 (items,), seconds.
        """
        begins = ready.copy()
        short = self.lengths <= FEW
        starts, lengths = self.starts[short], self.lengths[short]
        for place in range(1, int(lengths.max(initial=0))):
            at = starts[lengths > place] + place
            begins[at] = np.maximum(ready[at], begins[at - 1] + service_s[at - 1])
        for start, length in zip(self.starts[~short].tolist(), self.lengths[~short].tolist(), strict=True):
            # One donor of 100,000 ranks: minus the service times of earlier items, they are a running maximum.
            item = slice(start, start + length)
            before = np.cumsum(service_s[item]) - service_s[item]
            begins[item] = before + np.maximum.accumulate(ready[item] - before)
        return begins

    def last(self, values: Floats) -> Floats:
        """Return the last item's value of each queue."""
        ends: Floats = values[self.starts + self.lengths - 1]
        return ends

    def largest(self, values: Floats) -> Floats:
        """Return the largest value of each queue."""
        most: Floats = np.maximum.reduceat(values, self.starts)
        return most


class Moved(NamedTuple):
    """Total messages and bytes of an exchange."""

    messages: int
    nbytes: int


@dataclass
class Cards:
    """The ranks' clocks and NICs: columns over all ranks, changed in place.

    Attributes:
        clock: float64 (ranks,), seconds.
        out_free: when each NIC can begin to inject, float64 (ranks,), seconds.
        booked: when each NIC receives messages of earlier rounds that later messages may meet; None: never.
    """

    clock: Floats
    out_free: Floats
    booked: Booked | None = None


def exchange(cards: Cards, decision: Decision, network: Network, nbytes: int) -> Moved:
    """Exchange the requests of replaced ranks and the models of their donors.

    Args:
        cards: clocks and NICs of all ranks at the beginning; updated in place.
        decision: the replaced ranks and their donors.
        network: cost model of messages.
        nbytes: size of one model.

    Returns:
        The number of messages sent, and their size.
    """
    donor, receiver = decision.donors, decision.receivers
    if not len(donor):
        return Moved(0, 0)
    posted = cards.clock[receiver]
    ask, come = _ask(cards, Queues(receiver), network, donor=donor, receiver=receiver)
    # The order in which a donor receives requests: by arrival, ties by rank. `lexsort` is stable.
    order = np.lexsort((receiver, come, donor))
    arrived = np.empty(len(donor))
    drain_s, receive_s = np.empty(len(donor)), np.empty(len(donor))
    given = _give(
        cards, _taken(ask, come, order), network, nbytes=nbytes, donor=donor[order], receiver=receiver[order]
    )
    arrived[order], drain_s[order], receive_s[order] = given
    _take(
        cards,
        Queues(receiver),
        posted,
        arrived=arrived,
        drain_s=drain_s,
        receive_s=receive_s,
        receiver=receiver,
    )
    return Moved(2 * len(donor), len(donor) * (HEADER_NBYTES + nbytes))


def swap(cards: Cards, sender: Ints, receiver: Ints, network: Network, *, nbytes: int) -> Moved:
    """Exchange models between neighbours: each rank posts its receives, sends, then waits for its receives and sends.

    Args:
        cards: clocks and NICs of all ranks at the beginning; updated in place.
        sender: the sender of each message, int64 (messages,), by sender and receiver.
        receiver: the receiver of each message; it takes its messages in the order of their senders.
        network: cost model of messages.
        nbytes: size of one model.

    Returns:
        The number of messages sent, and their size.
    """
    if not len(sender):
        return Moved(0, 0)
    posted, sends = cards.clock[receiver], Queues(sender)
    short_nbytes = nbytes if nbytes <= network.eager_bytes else 0
    ready = sends.served(cards.clock[sender], _costs(network, sender, receiver, short_nbytes).send_s)
    given = _send(cards, ready, posted, network, nbytes=nbytes, donor=sender, receiver=receiver)
    order = np.lexsort((sender, receiver))
    arrived, drain_s, receive_s = (each[order] for each in given)
    taken = receiver[order]
    there = _take(
        cards,
        Queues(taken),
        posted[order],
        arrived=arrived,
        drain_s=drain_s,
        receive_s=receive_s,
        receiver=taken,
    )
    # Data above the threshold begin to arrive after their receive was posted: they meet nothing of earlier rounds.
    if short_nbytes and drain_s.any():
        _book(cards, taken, there - drain_s, there)
    return Moved(len(sender), len(sender) * nbytes)


def _book(cards: Cards, receiver: Ints, begins: Floats, ends: Floats) -> None:
    """Remember when messages occupied NICs, except for the time before all clocks, which no later message can meet."""
    queues = Queues(receiver)
    place = np.arange(len(receiver)) - np.repeat(queues.starts, queues.lengths)
    found = np.full((2, len(cards.clock), int(queues.lengths.max())), np.inf)
    found[:, receiver, place] = begins, ends
    if cards.booked is not None:
        found = np.concatenate([cards.booked, found], 2)
    found[:, found[1] <= cards.clock.min()] = np.inf
    found = found[:, :, np.isfinite(found[1]).any(0)][:, :, -KEPT:]
    cards.booked = found if found.shape[2] else None


class _Each(NamedTuple):
    """`Costs`, each field an array (messages,)."""

    send_s: Floats
    inject_s: Floats
    flight_s: Floats
    receive_s: Floats
    drain_s: Floats


def _costs(network: Network, source: Ints, dest: Ints, nbytes: int) -> _Each:
    """Return the costs of messages, one entry per message."""
    costs = network.costs(source, dest, nbytes)
    return _Each(*(np.broadcast_to(np.asarray(cost, np.float64), len(source)) for cost in costs))


def _ask(
    cards: Cards, asks: Queues, network: Network, *, donor: Ints, receiver: Ints
) -> tuple[_Each, Floats]:
    """Send the requests of the replaced ranks. Returns their costs and arrival times."""
    costs = _costs(network, receiver, donor, HEADER_NBYTES)
    ready = asks.served(cards.clock[receiver], costs.send_s)
    who = receiver[asks.starts]
    cards.clock[who] = asks.last(ready + costs.send_s)
    begins = asks.served(np.maximum(ready, cards.out_free[receiver]), costs.inject_s)
    cards.out_free[who] = asks.last(begins + costs.inject_s)
    return costs, begins + costs.flight_s


class _Asks(NamedTuple):
    """Requests in the order in which donors receive them: arrival times and costs of reception."""

    come: Floats
    drain_s: Floats
    receive_s: Floats


def _taken(costs: _Each, come: Floats, order: Ints) -> _Asks:
    return _Asks(come[order], costs.drain_s[order], costs.receive_s[order])


def _give(
    cards: Cards, asks: _Asks, network: Network, *, nbytes: int, donor: Ints, receiver: Ints
) -> tuple[Floats, Floats, Floats]:
    """Answer requests. Returns the models' arrival times, the times that they occupy a NIC, and the receive costs."""
    queues = Queues(donor)
    # The NIC admits one message at a time: reception begins `drain_s` before its end, or when the NIC is free.
    there = queues.served(asks.come - asks.drain_s, asks.drain_s) + asks.drain_s
    short_nbytes = nbytes if nbytes <= network.eager_bytes else 0
    send_s = _costs(network, donor, receiver, short_nbytes).send_s
    ready = np.maximum(there, cards.clock[donor]) + asks.receive_s
    # A donor sends between two requests: it receives the next one, in `receive_s`, once it has sent.
    sends = queues.served(ready, send_s + np.r_[asks.receive_s[1:], 0.0])
    # The receive was posted before the request was sent, so the request to send is answered at once.
    posted = np.full(len(donor), -np.inf)
    return _send(cards, sends, posted, network, nbytes=nbytes, donor=donor, receiver=receiver)


def _send(
    cards: Cards, sends: Floats, posted: Floats, network: Network, *, nbytes: int, donor: Ints, receiver: Ints
) -> tuple[Floats, Floats, Floats]:
    """Send models at given times to receives posted at given times; returns the same as `_give`."""
    queues = Queues(donor)
    who = donor[queues.starts]
    data = _costs(network, donor, receiver, nbytes)
    eager = nbytes <= network.eager_bytes
    first = data if eager else _costs(network, donor, receiver, 0)
    cards.clock[who] = queues.last(sends + first.send_s)
    begins = queues.served(np.maximum(sends, cards.out_free[donor]), first.inject_s)
    cards.out_free[who] = queues.last(begins + first.inject_s)
    if eager:
        return begins + data.flight_s, data.drain_s, data.receive_s
    # Data messages queue behind data messages only, in the order in which they may start.
    cleared = np.maximum(begins + first.flight_s, posted) + _costs(network, receiver, donor, 0).flight_s
    order = np.lexsort((cleared, donor))
    starts = np.empty(len(donor))
    starts[order] = queues.served(cleared[order], data.inject_s[order])
    cards.clock[who] = np.maximum(cards.clock[who], queues.largest(starts + data.inject_s))
    return starts + data.flight_s, data.drain_s, first.receive_s


def _take(
    cards: Cards, models: Queues, posted: Floats, *, arrived: Floats, drain_s: Floats, receive_s: Floats,
    receiver: Ints,
) -> Floats:  # fmt: skip
    """Receive models, in order; each rank continues when it has all of its own. Returns when each was received."""
    there = np.empty(len(arrived))
    for length in np.unique(models.lengths).tolist():
        rows = models.starts[models.lengths == length][:, None] + np.arange(length)
        own = receiver[rows[:, 0]]
        booked = None if cards.booked is None else cards.booked[:, own]
        there[rows] = admitted(arrived[rows], drain_s[rows], booked)
    ends = np.maximum(posted, there) + receive_s
    who = receiver[models.starts]
    cards.clock[who] = np.maximum(cards.clock[who], models.largest(ends))
    return there


def admitted(arrived: Floats, drain_s: Floats, booked: Booked | None = None) -> Floats:
    """Return when NICs complete the reception of messages that their programs receive in a given order.

    `completion.ReceivingNic.admit` for many NICs: each message books the first gap from its first byte on.

    Args:
        arrived: arrival time of each message on an idle NIC, in the order of the receives, float64 (NICs, messages).
        drain_s: time that each message occupies the NIC, same shape.
        booked: when the NICs receive earlier messages.

    Returns:
        The completion times, same shape.
    """
    begins, ends = arrived - drain_s, arrived.copy()
    if not drain_s.any():
        return ends
    booked_from, booked_to = np.full((2, *arrived.shape), np.inf)
    known = 0 if booked is None else booked.shape[2]
    if booked is not None:
        booked = np.take_along_axis(booked, np.argsort(booked[:1], axis=2, kind="stable"), 2)
        booked_from, booked_to = (
            np.concatenate(pair, 1) for pair in zip(booked, (booked_from, booked_to), strict=True)
        )
    for place in range(arrived.shape[1]):
        begin, end, drain = begins[:, place].copy(), ends[:, place].copy(), drain_s[:, place]
        settled = np.zeros(len(begin), np.bool_)
        for other in range(known + place):  # in order of booked time
            from_s, to_s = booked_from[:, other], booked_to[:, other]
            ahead = ~settled & (to_s > begin + SLACK * drain)
            fits = ahead & (from_s >= end - SLACK * drain)
            settled |= fits
            pushed = ahead & ~fits
            begin, end = np.where(pushed, to_s, begin), np.where(pushed, to_s + drain, end)
        ends[:, place] = end
        booked_from[:, known + place], booked_to[:, known + place] = begin, end
        order = np.argsort(booked_from, axis=1, kind="stable")
        booked_from = np.take_along_axis(booked_from, order, 1)
        booked_to = np.take_along_axis(booked_to, order, 1)
    return ends
