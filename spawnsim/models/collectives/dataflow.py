"""Completion times of a collective: the rounds of its schedule, applied to the vector of arrival times.

Every rank's clock, and the two directions of its NIC, are one vector each; a round is a few operations on them. A rank
that is absent is NaN, and NaN spreads to exactly the ranks that wait for it. Message by message, a ring
allreduce at 1,000 ranks would take two million steps; here it takes two thousand rounds of a few array operations.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np

from spawnsim.models.collectives.schedule import Lane, Lengths, MessageSizes, Pattern, Schedule
from spawnsim.models.network.cost import Costs, Floats, Flow, FlowNetwork, Ints, Network, SharedLinks


class Finish(NamedTuple):
    """When each rank completes a collective, its total traffic, and until when the collective keeps the NICs busy.

    `times` is float64 (P,), seconds; NaN for a rank that waits for an absent rank. `out_free` is float64 (P,),
    seconds: when each NIC has injected the rank's last message; -inf if it was idle before and sends none. It exceeds
    `times` only if a NIC was busy at the beginning: see `run`. `loads`, float64 (links,), is the number of bytes that
    cross each shared link, in the order of `SharedLinks`; None without shared links.
    """

    times: Floats
    messages: int
    nbytes: int
    out_free: Floats
    loads: Floats | None = None


def _some(seconds: Floats | float) -> bool:
    """Whether there is anything to add; saves one operation per round on the most common networks."""
    return isinstance(seconds, np.ndarray) or seconds != 0.0


def _is_one(value: Floats | Ints | float) -> bool:
    return not isinstance(value, np.ndarray)


class Evaluation:
    """The vectors of one collective, as its rounds proceed.

    As long as all ranks are alike (they arrived together, and each has sent and received the same), one number
    represents them: the rounds of a ring among 100,000 ranks that arrived together then need no long vectors.
    """

    def __init__(
        self, arrivals: Floats, network: Network, ranks: Ints | None, out_free: Floats | None
    ) -> None:
        self.size = len(arrivals)
        alike = out_free is None and self.size > 1 and bool((arrivals == arrivals[0]).all())
        alike = alike and not network.changes
        self.clock = arrivals[: 1 if alike else None].copy()
        self.out_free = np.full(len(self.clock), -np.inf) if out_free is None else out_free.copy()
        self.eager_bytes, self.asks = network.eager_bytes, network.collective_rendezvous
        # Until when ranks stay. If all NICs were idle at the beginning, each rank stays until its NIC is idle again,
        # and the two vectors are one. Otherwise earlier work of the NIC does not keep its rank, so the two vectors
        # must be distinct. They must also be distinct if messages ask first: a NIC can serve other messages meanwhile.
        one = out_free is None and not self.asks
        self.stays = self.out_free if one else np.full(len(self.clock), -np.inf)
        self.posted = self.clock  # when each rank reached the round, and posted its receives
        self.in_free = np.full(len(self.clock), -np.inf)
        self.network, self.ranks = network, ranks
        self.changes = network.changes
        self.known: dict[tuple[Pattern, float], Costs] = {}
        self.wide: tuple[Ints, Floats, Floats, Floats, Floats] | None = None  # see `narrow`
        self.messages, self.nbytes = 0, 0.0
        self.shared: SharedLinks | None = None
        if network.contention == "fair":
            self.shared = network.shared_links(int(self.world.max(initial=-1)) + 1)
            self.loads = np.zeros(len(self.shared.capacities))
            self.out, self.into = np.asarray(self.shared.out), np.asarray(self.shared.into)
            self.crowds: dict[tuple[Pattern, float], Lengths] = {}

    @cached_property
    def world(self) -> Ints:
        return np.arange(self.size) if self.ranks is None else self.ranks

    @property
    def alike(self) -> bool:
        return len(self.clock) == 1 < self.size

    def separate(self) -> None:
        """Give each rank its own numbers from here on."""
        if self.alike:
            one = self.stays is self.out_free
            self.clock, self.in_free = np.repeat(self.clock, self.size), np.repeat(self.in_free, self.size)
            self.out_free, stays = np.repeat(self.out_free, self.size), np.repeat(self.stays, self.size)
            self.stays = self.out_free if one else stays

    def costs(self, pattern: Pattern, nbytes: Lengths) -> Costs:
        """Return the costs of a lane, in the order of its senders, and count its messages."""
        # A ring repeats one pattern with one size P-1 times: query the network once.
        self.messages += len(pattern.source)
        if self.shared is not None:
            self._load(pattern, nbytes)
        if isinstance(nbytes, np.ndarray):
            self.nbytes += float(nbytes.sum())
            return self._ask(pattern, nbytes)
        self.nbytes += nbytes * len(pattern.source)
        costs = self.known.get((pattern, nbytes))
        if costs is None:
            costs = self.known[pattern, nbytes] = self._ask(pattern, nbytes)
        return costs

    def _load(self, pattern: Pattern, nbytes: Lengths) -> None:
        """Count the bytes that a lane sends over each shared link."""
        out, into = self.out[self.world[pattern.source]], self.into[self.world[pattern.dest]]
        crosses = out != self.out[self.world[pattern.dest]]
        sizes = np.broadcast_to(nbytes, len(out)) * crosses
        np.add.at(self.loads, out, sizes)
        np.add.at(self.loads, into, sizes)

    def crowded(self, pattern: Pattern, nbytes: Lengths) -> Lengths:
        """Return the apparent lengths of a lane's messages on shared links: a third of a link triples the length."""
        # As if all messages began together, which holds if ranks are in step. The hub of a star sends or receives its
        # messages one after the other, which takes the same total time.
        source, dest = self.world[pattern.source], self.world[pattern.dest]
        star = len(source) < 2 or (source == source[0]).all() or (dest == dest[0]).all()
        if self.shared is None or star:
            return nbytes
        sizes = np.broadcast_to(np.asarray(nbytes, np.float64), len(source))
        paths = [self.shared.path(*pair) for pair in zip(source.tolist(), dest.tolist(), strict=True)]
        flows = FlowNetwork(self.shared.capacities)
        whole = zip(paths, sizes.tolist(), range(len(paths)), strict=True)
        flows.start(0.0, *(Flow(path, size, index) for path, size, index in whole if path and size))
        found = sizes.copy()
        for end_s, flow in flows.advance(math.inf):
            found[cast(int, flow.tag)] = end_s * min(self.shared.capacities[link] for link in flow.links)
        return nbytes if np.allclose(found, sizes, rtol=1e-12, atol=0.0) else found

    def _crowded(self, pattern: Pattern, nbytes: Lengths) -> Lengths:
        if self.shared is None:
            return nbytes
        if isinstance(nbytes, np.ndarray):
            return self.crowded(pattern, nbytes)
        if (pattern, nbytes) not in self.crowds:
            self.crowds[pattern, nbytes] = self.crowded(pattern, nbytes)
        return self.crowds[pattern, nbytes]

    def _ask(self, pattern: Pattern, nbytes: Lengths) -> Costs:
        nbytes = self._crowded(pattern, nbytes)
        if self.ranks is None:
            return self.network.costs(pattern.source, pattern.dest, nbytes)
        return self.network.costs(self.ranks[pattern.source], self.ranks[pattern.dest], nbytes)

    def send(self, pattern: Pattern, costs: Costs, nbytes: Lengths) -> tuple[Floats, Costs]:
        """Let all ranks of a lane send. Returns when their messages arrive, and their costs at those times."""
        # The arithmetic of `wire.send`, equal to the last bit for each rank without contention: begin when the clock
        # and the NIC are both free, keep the NIC for inject_s, arrive after flight_s.
        who = pattern.senders if self.wide is None else slice(None)
        begin: Floats = np.maximum(self.clock[who], self.out_free[who])
        if self.changes:
            costs = self._later(pattern, nbytes, begin)
        arrival, asking_s = self.asked(pattern, nbytes, costs, begin)
        left = self.out_free[who] = begin + costs.inject_s
        if self.stays is not self.out_free:
            alone = np.maximum(self.clock[who], self.stays[who]) + costs.inject_s
            self.stays[who] = np.where(np.asarray(nbytes) > self.eager_bytes, left + asking_s, alone)
        if _some(costs.send_s):
            self.clock[who] += costs.send_s
        return arrival, costs

    def asked(
        self, pattern: Pattern, nbytes: Lengths, costs: Costs, begin: Floats
    ) -> tuple[Floats, Floats | float]:
        """Return when messages of a lane arrive, and how long their senders ask before: long messages, if any, ask.

        An empty message goes to the receiver and, once the receiver has reached the round, one returns; then the data
        leave (`wire.Rendezvous`). A sender does not stay for a receiver that arrives later: the dependencies between
        ranks stay the same as without asking.
        """
        if not self.asks or not (long := np.asarray(nbytes) > self.eager_bytes).any():
            return begin + costs.flight_s, 0.0
        trip_s = self._ask(pattern, 0).flight_s
        start = np.maximum(begin + trip_s, self._receivers(pattern)) + trip_s
        return np.where(long, start, begin) + costs.flight_s, 2.0 * trip_s

    def _receivers(self, pattern: Pattern) -> Floats:
        """Return when the receivers of a lane reached the round, in the order of its senders."""
        if self.alike or len(self.posted) == 1:
            return self.posted
        if self.wide is None:
            return self.posted[pattern.dest]
        posted = np.empty_like(self.posted)
        posted[pattern.among_senders] = self.posted
        return posted

    def meet(self) -> None:
        """Record when each rank reaches a round."""
        if self.asks:
            self.posted = self.clock.copy()

    def _later(self, pattern: Pattern, nbytes: Lengths, begin: Floats) -> Costs:
        source, dest = self.world[pattern.source], self.world[pattern.dest]
        begin_s = np.broadcast_to(begin, len(source))
        return self.network.costs_at(source, dest, self._crowded(pattern, nbytes), begin_s=begin_s)

    def take(self, pattern: Pattern, costs: Costs, arrival: Floats, work_s: Floats | float) -> None:
        """Let all ranks of a lane receive their messages, and process them for `work_s`."""
        # Messages are admitted in the order in which the algorithm receives them, not in the order of arrival. This is
        # the rule of `completion.ReceivingNic`, so collectives and messages agree, and it needs no event. Costs and
        # arrivals are in the order of senders; `turn` reorders them for the receivers.
        who, turn = pattern.takers, None if self.alike else pattern.turn
        if self.wide is not None:
            who, turn = slice(None), pattern.among_senders
        busy_s, drain_s = costs.receive_s + work_s, costs.drain_s
        if turn is not None:
            arrival = arrival[turn]
            busy_s = busy_s[turn] if isinstance(busy_s, np.ndarray) else busy_s
            drain_s = drain_s[turn] if isinstance(drain_s, np.ndarray) else drain_s
        if _some(drain_s):
            free = self.in_free[who]
            drained = np.maximum(arrival, free + drain_s)
            if isinstance(drain_s, np.ndarray) and not drain_s.all():
                slow = drain_s > 0.0  # other messages (within a node, say) neither wait nor block
                self.in_free[who] = np.where(slow, drained, free)
                arrival = np.where(slow, drained, arrival)
            else:
                self.in_free[who] = arrival = drained
        self.clock[who] = np.maximum(self.clock[who], arrival) + busy_s

    def fan_out(self, pattern: Pattern, costs: Costs, nbytes: Lengths) -> tuple[Floats, Costs]:
        """Let one rank send all messages of a star, in order. Returns when they arrive, and their costs."""
        # begin[i] = max(ready[i], begin[i-1] + inject[i-1]), a recurrence. After subtracting the sum of earlier
        # injections it is a running maximum, so a star of P-1 messages is a few array operations and not P-1 rounds.
        hub, count = pattern.source[0], len(pattern.source)
        inject_s, send_s = (np.broadcast_to(cost, count) for cost in (costs.inject_s, costs.send_s))
        before = np.cumsum(inject_s) - inject_s
        ready = self.clock[hub] + np.cumsum(send_s) - send_s
        idle, ready[0] = ready.tolist(), np.maximum(ready[0], self.out_free[hub])
        begin: Floats = before + np.maximum.accumulate(ready - before)
        if self.changes:  # each begins when the previous message has left, which depends on its own begin
            sizes, free_s = np.broadcast_to(nbytes, count), -np.inf
            for at, dest in enumerate(self.world[pattern.dest].tolist()):
                begin[at] = begin_s = max(float(ready[at]), free_s)
                cost = self.network.cost_at(int(self.world[hub]), dest, int(sizes[at]), begin_s)
                free_s = begin_s + cost.inject_s
            costs = self._later(pattern, nbytes, begin)
            inject_s = np.broadcast_to(costs.inject_s, count)
        arrival, asking_s = self.asked(pattern, nbytes, costs, begin)
        left = begin + inject_s
        self.out_free[hub] = left[-1]
        if self.stays is not self.out_free:
            long = np.broadcast_to(np.asarray(nbytes) > self.eager_bytes, count)
            for ready_s, inject, left_s, stay in zip(idle, inject_s, left + asking_s, long, strict=True):
                self.stays[hub] = left_s if stay else max(ready_s, self.stays[hub]) + inject
        self.clock[hub] += send_s.sum()
        return arrival, costs

    def fan_in(self, pattern: Pattern, costs: Costs, arrival: Floats, work_s: Floats | float) -> None:
        """Let one rank receive all messages of a star, in order."""
        # Two such recurrences: the NIC admits one message after the other, drained[i] = max(arrival[i], drained[i-1] +
        # drain[i]); and the processor receives one after the other, clock = max(clock, arrival) + busy.
        hub, count = pattern.dest[0], len(pattern.dest)
        drain_s, busy_s = (np.broadcast_to(cost, count) for cost in (costs.drain_s, costs.receive_s + work_s))
        slow = drain_s > 0.0
        if slow.any():
            within = np.cumsum(drain_s[slow])
            drained = within + np.maximum(np.maximum.accumulate(arrival[slow] - within), self.in_free[hub])
            self.in_free[hub], arrival[slow] = drained[-1], drained
        after = np.cumsum(busy_s)
        self.clock[hub] = after[-1] + np.maximum(self.clock[hub], (arrival - (after - busy_s)).max())

    def work_s(self, nbytes: Lengths, reduces: bool, dtype: str) -> Floats | float:
        """Return the seconds for which the receivers of messages combine them."""
        return self.network.reduce_s(nbytes, dtype) if reduces else 0.0

    def star(self, star: Lane, amounts: MessageSizes, reduces: bool) -> None:
        """Execute the one round of a star."""
        self.separate()
        self.meet()
        pattern, nbytes = star.pattern, amounts.of(star)
        costs, work_s = self.costs(pattern, nbytes), self.work_s(nbytes, reduces, amounts.dtype)
        if pattern.source[0] == pattern.source[-1]:
            arrival, costs = self.fan_out(pattern, costs, nbytes)
            self.take(pattern, costs, arrival, work_s)
        else:
            arrival, costs = self.send(pattern, costs, nbytes)
            self.fan_in(pattern, costs, arrival, work_s)

    def round(self, lanes: tuple[Lane, ...], amounts: MessageSizes, reduces: bool) -> None:
        """Execute one round."""
        # All lanes are sent before any is received: a rank first does all its sends of a round. Otherwise, in an
        # exchange, each of two ranks would wait for the other's message before sending its own.
        asked = []
        for pattern, nbytes in ((lane.pattern, amounts.of(lane)) for lane in lanes):
            costs = self.costs(pattern, nbytes)
            if self.alike and not (pattern.whole and _is_one(nbytes) and all(map(_is_one, costs))):
                self.separate()
            asked.append((pattern, nbytes, costs))
        self.meet()
        sent = [self.send(pattern, costs, nbytes) for pattern, nbytes, costs in asked]
        for (pattern, nbytes, _), (arrival, costs) in zip(asked, sent, strict=True):
            self.take(pattern, costs, arrival, self.work_s(nbytes, reduces, amounts.dtype))

    def narrow(self, ranks: Ints) -> None:
        """Keep the vectors of these ranks alone, until `widen`: rounds among them need no gathering and scattering."""
        self.separate()
        one = self.stays is self.out_free
        self.wide = (ranks, self.clock, self.out_free, self.stays, self.in_free)
        self.clock, self.out_free, self.in_free = self.clock[ranks], self.out_free[ranks], self.in_free[ranks]
        self.stays = self.out_free if one else self.stays[ranks]

    def widen(self) -> None:
        """Restore the vectors of all ranks."""
        if self.wide is None:
            return
        ranks, clock, out_free, stays, in_free = self.wide
        clock[ranks], out_free[ranks], in_free[ranks] = self.clock, self.out_free, self.in_free
        if stays is not out_free:
            stays[ranks] = self.stays
        self.clock, self.out_free, self.stays, self.in_free = clock, out_free, stays, in_free
        self.wide = None

    def among(self, lanes: tuple[Lane, ...]) -> None:
        """Restrict the vectors to the ranks of a round if it is closed among them; otherwise keep all ranks."""
        # If P is not a power of two, recursive doubling and halving continue among one fixed set of ranks.
        closed = len(lanes) == 1 and lanes[0].pattern.among_senders is not None
        ranks = lanes[0].pattern.source if closed else None
        if self.wide is not None and ranks is not self.wide[0]:
            self.widen()
        if self.wide is None and ranks is not None:
            self.narrow(ranks)

    def finish(self) -> Finish:
        """Return the result, after all rounds."""
        self.separate()
        times = np.maximum(self.clock, self.stays)
        loads = None if self.shared is None else self.loads
        return Finish(times, self.messages, round(self.nbytes), self.out_free, loads)


def run(
    schedule: Schedule,
    amounts: MessageSizes,
    arrivals: Floats,
    network: Network,
    *,
    ranks: Ints | None,
    out_free: Floats | None = None,
) -> Finish:
    """Return when each rank leaves. Ranks are relative to the root.

    A rank is done when it has received its last message and its NIC has injected its own last one. If a NIC was busy
    at the beginning, its rank does not stay for earlier sends: its messages up to the eager threshold are buffered,
    and count as if the NIC had been idle; longer messages must have left.

    Args:
        schedule: The messages.
        amounts: The lengths of the messages.
        arrivals: When each rank enters, float64 (P,), seconds; NaN if it has not.
        network: The costs of messages.
        ranks: The world ranks of the members, int (P,); None if they are 0 to P-1.
        out_free: When each NIC can begin to inject, float64 (P,), seconds; None: all are idle.
    """
    evaluation = Evaluation(arrivals, network, ranks, out_free)
    for each in schedule.rounds:
        if each.star is not None:
            evaluation.widen()
            evaluation.star(each.star, amounts, each.reduces)
        else:
            evaluation.among(each.lanes)
            evaluation.round(each.lanes, amounts, each.reduces)
    evaluation.widen()
    return evaluation.finish()
