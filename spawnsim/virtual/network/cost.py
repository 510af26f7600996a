"""What a message costs, and what every network can be asked.

A message sent at sender clock t starts injection at s = max(t, nic_free[source]). Then nic_free[source] =
s + inject_s, the message arrives at s + flight_s, and the sender goes on at t + send_s. The receiver takes it at
max(own clock, arrival) + receive_s. Where several messages meet at one receiver, its network card lets them in one by
one, in the order in which they are taken: the arrival of each becomes max(arrival, in_free[dest] + drain_s), and
in_free[dest] is then that time. A message with drain_s = 0 neither waits for others nor holds them up.

This room knows seconds and bytes. It must not know ranks' clocks, events or collectives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from spawnsim.virtual.network.sharing import SharedLinks

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


Contention = Literal["serial", "fifo", "fair", "none"]
"""Where messages meet.

"serial": a card sends one message after the other, and takes them in one after the other, in the order in which the
receiving program takes them. "fifo": likewise, but in the order in which their first bytes come, which needs events.
"fair": all messages under way share the links' bandwidths (max-min), exact at event times. "none": a card sends one
after the other, and takes in any number at once. Collectives know "serial" and "none"; the others are "serial" to them.
"""


class Cost(NamedTuple):
    """The cost of one message, in seconds."""

    send_s: float  # the sender's processor is busy
    inject_s: float  # from the start of injection until the sender's card may start the next message
    flight_s: float  # from the start of injection until arrival
    receive_s: float  # the receiver's processor is busy on taking it


class Costs(NamedTuple):
    """The costs of many messages, in seconds: each field an array of float64, or one number for them all."""

    send_s: Floats | float
    inject_s: Floats | float
    flight_s: Floats | float
    receive_s: Floats | float
    drain_s: Floats | float  # the receiver's card is busy


FREE = Cost(0.0, 0.0, 0.0, 0.0)  # a message to oneself


@runtime_checkable
class Network(Protocol):
    """All that the kernel and the collectives ask of a platform's network."""

    @property
    def call_overhead_s(self) -> float:
        """Seconds that an observation (a probe, a test) costs: more than 0, so that polling moves time on."""
        ...

    @property
    def eager_bytes(self) -> int:
        """Longest message that leaves without asking the receiver first."""
        ...

    @property
    def contention(self) -> Contention:
        """What happens where messages between pairs of ranks meet: see `Contention`."""
        ...

    @property
    def lookahead_s(self) -> float:
        """Seconds from the sending of any message until its first byte can be at its receiver's card, at least."""
        ...

    def shared_links(self, ranks: int) -> SharedLinks:
        """Return the links that messages share where contention is "fair"."""
        ...

    @property
    def gamma_s_per_B(self) -> float:
        """Seconds of arithmetic per byte that a reduction combines."""
        ...

    def cost(self, source: int, dest: int, nbytes: int) -> Cost:
        """Return the cost of one message between two world ranks."""
        ...

    def price(self, source: int, dest: int, nbytes: int) -> tuple[float, float, float, float, float]:
        """Return the five fields of `Costs` for one message: `cost` and `drain` in one look."""
        ...

    def drain(self, source: int, dest: int, nbytes: int) -> float:
        """Return how long one message occupies the receiver's network card, in seconds."""
        ...

    def costs(self, source: Ints, dest: Ints, nbytes: Ints | Floats | float) -> Costs:
        """Return the costs of many messages; `source` and `dest` are int arrays of one shape (M,)."""
        ...

    def place(self, ranks: Ints) -> Ints:
        """Return the number of the node on which each world rank lives."""
        ...

    def check(self, ranks: int) -> None:
        """Raise `ParameterError` if so many ranks do not fit."""
        ...
