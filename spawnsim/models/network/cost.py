"""The costs of messages, the interface of every network, and links whose bandwidth several messages share.

A message sent at sender clock t starts injection at s = max(t, nic_free[source]). Then nic_free[source] = s +
inject_s, the message arrives at s + flight_s, and the sender continues at t + send_s. The receiver takes it at max(own
clock, arrival) + receive_s. If several messages meet at one receiver, its NIC admits them one by one, in the order in
which they are received: the arrival of each becomes max(arrival, in_free[dest] + drain_s), and in_free[dest] is then
that time. A message with drain_s = 0 neither waits for other messages nor delays them.

With "fair" contention, messages are flows that cross links. Each link shares its capacity fairly (max-min) among the
flows that no other link restricts further. Rates change only when a flow starts or ends, so a few numbers per flow
describe everything until then: the exact model of contention between events.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


Contention = Literal["serial", "fifo", "fair", "none"]
"""How messages contend.

"serial": a NIC sends one message after the other, and admits them one after the other, in the order in which the
receiving program receives them. "fifo": the same, but in the order in which their first bytes arrive, which needs
events. "fair": all messages in transit share the links' bandwidths (max-min), exact at event times. "none": a NIC
sends one after the other, and admits any number at once. Collectives support "serial" and "none"; they treat the other
two as "serial".
"""


class Cost(NamedTuple):
    """The cost of one message, in seconds."""

    send_s: float  # the sender's processor is busy
    inject_s: float  # from the start of injection until the sender's NIC may start the next message
    flight_s: float  # from the start of injection until arrival
    receive_s: float  # the receiver's processor is busy with receiving it
    drain_s: float  # the receiver's NIC is busy


class Costs(NamedTuple):
    """The costs of many messages: the fields of `Cost`, each an array of float64, or one number for all messages."""

    send_s: Floats | float
    inject_s: Floats | float
    flight_s: Floats | float
    receive_s: Floats | float
    drain_s: Floats | float


class Share(Protocol):
    """The remaining share of links, as a function of time: see `changing.Capacity`."""

    def share_at(self, time_s: float) -> float: ...

    def next_change(self, time_s: float) -> float:
        """Return when the share changes next; inf if it does not."""
        ...

    def lasts(self, begin_s: float, work_s: float) -> float:
        """Return the duration of work that begins at `begin_s` and would take `work_s` on the whole link."""
        ...


FREE = Cost(0.0, 0.0, 0.0, 0.0, 0.0)  # a message to oneself


@runtime_checkable
class Network(Protocol):
    """The interface that the kernel and the collectives use of a platform's network."""

    @property
    def call_overhead_s(self) -> float:
        """Seconds that an observation (a probe, a test) costs: more than 0, so that polling advances time."""
        ...

    @property
    def eager_bytes(self) -> int:
        """Longest message that leaves without asking the receiver first."""
        ...

    @property
    def collective_rendezvous(self) -> bool:
        """Whether long messages of collectives ask the receiver first, too."""
        ...

    @property
    def contention(self) -> Contention:
        """How messages of different pairs of ranks contend: see `Contention`."""
        ...

    @property
    def lookahead_s(self) -> float:
        """Seconds from the sending of any message until its first byte can be at its receiver's NIC, at least."""
        ...

    def shared_links(self, ranks: int) -> SharedLinks: ...

    @property
    def gamma_s_per_B(self) -> float:
        """Seconds of arithmetic per byte that a reduction combines."""
        ...

    @property
    def gamma_beyond(self) -> tuple[int, float] | None:
        """(bytes, seconds per byte) of operands from this length on; None: one speed for all."""
        ...

    @property
    def gamma_of(self) -> tuple[tuple[str, float], ...]:
        """(dtype, seconds per byte) of dtypes with a speed of their own."""
        ...

    def reduce_s(self, nbytes: Ints | Floats | float, dtype: str = "") -> Floats | float:
        """Return the seconds of arithmetic with which a rank combines operands of these lengths."""
        ...

    @property
    def copy_s_per_B(self) -> float:
        """Seconds per byte of a rank's own block that a collective copies."""
        ...

    def cost(self, source: int, dest: int, nbytes: int) -> Cost: ...

    def costs(self, source: Ints, dest: Ints, nbytes: Ints | Floats | float) -> Costs:
        """Return the costs of many messages; `source` and `dest` are int arrays of one shape (M,)."""
        ...

    @property
    def changes(self) -> bool: ...

    def cost_at(self, source: int, dest: int, nbytes: int, begin_s: float) -> Cost: ...

    def costs_at(self, source: Ints, dest: Ints, nbytes: Ints | Floats | float, *, begin_s: Floats) -> Costs:
        """Return the costs of many messages; `begin_s` is float64 (M,), NaN if not sent yet."""
        ...

    def place(self, ranks: Ints) -> Ints: ...

    def copy_s(self, source: int, dest: int, nbytes: int) -> float | None:
        """Return how long a rank copies to or from another's window in memory that both map; None: it uses messages."""
        ...

    def check(self, ranks: int) -> None:
        """Raise `ParameterError` if `ranks` ranks do not fit."""
        ...


def fair_share(flows: Sequence[Sequence[int]], capacities: Floats) -> Floats:
    """Return the max-min fair rate of each flow, by progressive filling.

    Args:
        flows: The links that each flow crosses, indices into `capacities`; a flow with none has rate inf.
        capacities: float64 (links,), bytes per second, above 0.

    Returns:
        float64 (flows,), bytes per second.

    D. Bertsekas, R. Gallager, Data Networks, 2nd ed., section 6.5.2.
    """
    links = np.array([link for flow in flows for link in flow], dtype=np.int64)
    owner = np.repeat(np.arange(len(flows)), [len(flow) for flow in flows])
    return _fill(links, owner, capacities, count=len(flows))


def _fill(links: Ints, owner: Ints, capacities: Floats, *, count: int) -> Floats:
    """Raise all rates together; freeze the flows of a link when it is full; continue with the rest."""
    # Each pass fills at least one link, so there are at most as many passes as links. Links that fill at the same
    # level up to rounding are filled in one pass. Otherwise equal flows would get rates that differ in the last bit,
    # and end at two different times.
    rates = np.full(count, math.inf)
    left = np.array(capacities, dtype=np.float64)
    while len(links):
        users = np.bincount(links, minlength=len(left))
        share = np.where(users > 0, left / np.maximum(users, 1), math.inf)
        level = share.min()
        full = share <= level * (1 + 1e-12)
        frozen = np.zeros(count, dtype=bool)
        frozen[owner[full[links]]] = True
        rates[frozen] = level
        going = ~frozen[owner]
        left = np.maximum(left - level * np.bincount(links[~going], minlength=len(left)), 0.0)
        links, owner = links[going], owner[going]
    return rates


@dataclass(frozen=True)
class Flow:
    """Bytes that cross links. `tag` belongs to the caller, and is returned with the flow."""

    links: tuple[int, ...]
    nbytes: float
    tag: object = None


class Completed(NamedTuple):
    """A flow whose last byte has gone through."""

    time_s: float
    flow: Flow


class FlowNetwork:
    """Flows in progress on shared links. Time only advances, from call to call.

    A kernel starts flows and queries `next_change`. When that time is reached and no flow has started or ended since,
    the kernel calls `advance` to collect the completed flows.

    Args:
        capacities: float64 (links,), bytes per second.
        left: The remaining share of all links, by time; None: always all of it.

    Raises:
        ParameterError: A capacity that is not above 0; a flow over a link that does not exist.
    """

    def __init__(self, capacities: Floats | Sequence[float], left: Share | None = None) -> None:
        self.capacities = np.array(capacities, dtype=np.float64)
        if not np.all(np.isfinite(self.capacities) & (self.capacities > 0)):
            raise ParameterError("capacities: give finite bytes per second above 0 for every link")
        self._of_all = left
        self.flows: list[Flow] = []
        self.time_s = -math.inf  # nothing may happen before
        self._since_s = 0.0  # start time of the current rates
        self._left: Floats = np.zeros(0)  # bytes, at that time
        self._rates: Floats = np.zeros(0)
        self._ends: Floats = np.zeros(0)

    def start(self, time_s: float, *flows: Flow) -> None:
        """Let flows begin. Flows that ended before must have been collected by `advance`."""
        for flow in flows:
            if any(not 0 <= link < len(self.capacities) for link in flow.links) or not flow.nbytes >= 0:
                raise ParameterError(
                    f"{flow}: there are links 0 to {len(self.capacities) - 1}; bytes are at least 0"
                )
        # Rates hold from change to change. A start after an uncollected end of a flow would share the link with a
        # completed flow.
        if time_s < self.time_s or time_s > self.next_change():
            raise ParameterError(
                f"a flow may start from {self.time_s} s on, and by {self.next_change()} s, when another ends; "
                f"not at {time_s} s: call advance first"
            )
        self.time_s = time_s
        left = self._left_at(time_s)
        self.flows.extend(flows)
        self._share(time_s, np.append(left, [flow.nbytes for flow in flows]))

    def rates(self) -> Floats:
        """Return the rate of each flow in `flows`, float64, bytes per second."""
        return self._rates.copy()

    def next_change(self) -> float:
        """Return when the next flow ends, or the links change, if none starts; inf if nothing will change."""
        if not len(self._ends):
            return math.inf
        end_s = float(self._ends.min())
        return end_s if self._of_all is None else min(end_s, self._of_all.next_change(self._since_s))

    def advance(self, time_s: float) -> list[Completed]:
        """Advance to `time_s`. Returns the flows that end by then, in order of (time, start)."""
        if time_s < self.time_s:
            raise ParameterError(f"time only moves forward: from {self.time_s} s to {time_s} s")
        done: list[Completed] = []
        while self.flows and (end := self.next_change()) <= time_s:
            over = self._ends <= end
            done += [Completed(end, flow) for flow, gone in zip(self.flows, over, strict=True) if gone]
            left = self._left_at(end)[~over]
            self.flows = [flow for flow, gone in zip(self.flows, over, strict=True) if not gone]
            self._share(end, left)
        self.time_s = time_s
        return done

    def _left_at(self, time_s: float) -> Floats:
        """Return the bytes that each flow has left; 0 for a flow that no link restricts."""
        held = np.isfinite(self._rates)
        gone = np.where(held, self._rates, 0.0) * (time_s - self._since_s)
        return np.where(held, np.maximum(self._left - gone, 0.0), 0.0)

    def _share(self, time_s: float, left: Floats) -> None:
        """Set the rates of all flows from now on."""
        self._since_s, self._left = time_s, left
        self._rates = fair_share([flow.links for flow in self.flows], self.capacities)
        if self._of_all is None:
            self._ends = time_s + left / self._rates
            return
        # All links change alike, so all shares do; while a link is down, its flows do not end. Flows that cross no
        # link have no bound, whatever happens to the links.
        bound = np.isfinite(self._rates)
        self._rates[bound] *= self._of_all.share_at(time_s)
        with np.errstate(divide="ignore", invalid="ignore"):
            self._ends = np.where(left > 0.0, time_s + left / self._rates, time_s)


@dataclass(frozen=True)
class SharedLinks:
    """The links that a message between two ranks crosses, and their capacities.

    Args:
        capacities: Bytes per second of each link.
        out: The link by which each rank sends.
        into: The link by which each rank receives.
        left: The remaining share of all links, by time; None: always all of it.
    """

    capacities: tuple[float, ...]
    out: tuple[int, ...]
    into: tuple[int, ...]
    left: Share | None = None

    @classmethod
    def switch(cls, up_Bps: Sequence[float], down_Bps: Sequence[float]) -> SharedLinks:
        """Return ranks on one switch, each with its own up and down link."""
        ranks = len(up_Bps)
        if ranks != len(down_Bps):
            raise ParameterError(
                f"{ranks} up links and {len(down_Bps)} down links: give every rank one of each"
            )
        return cls((*up_Bps, *down_Bps), tuple(range(ranks)), tuple(range(ranks, 2 * ranks)))

    @classmethod
    def nodes(cls, ranks: int, ranks_per_node: int, bandwidth_Bps: float) -> SharedLinks:
        """Return nodes whose ranks share one full-duplex NIC."""
        count = -(-ranks // ranks_per_node)
        node = [rank // ranks_per_node for rank in range(ranks)]
        return cls((bandwidth_Bps,) * (2 * count), tuple(node), tuple(count + own for own in node))

    def path(self, source: int, dest: int) -> tuple[int, ...]:
        """Return the links between two ranks; empty if they share their NIC."""
        if source == dest or self.out[source] == self.out[dest]:
            return ()
        return (self.out[source], self.into[dest])
