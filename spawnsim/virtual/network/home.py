"""Home connections: every rank has its own upload and its own, larger, download bandwidth.

This room knows numbers per rank. It must not know collectives or events.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.virtual.network.cost import FREE, Cost, Costs, Floats, Ints
from spawnsim.virtual.network.fabric import Overheads
from spawnsim.virtual.network.links import at_least
from spawnsim.virtual.network.sharing import SharedLinks


@dataclass(frozen=True)
class HomeLinks(Overheads):
    """Ranks on the internet: T(n) = α/2 at either end + n / min(up of the source, down of the destination).

    The sender's line is busy for n / up, the receiver's for n / down, so that a fast server can feed many.

    Args:
        latency_s: Round the corner and through the backbone, per pair: half of each end's, one number per rank.
        up_Bps: Upload bandwidth of each rank, bytes per second.
        down_Bps: Download bandwidth of each rank, bytes per second.

    Raises:
        ParameterError: Tables of different lengths, a negative latency, or a bandwidth not above 0.
    """

    latency_s: tuple[float, ...]
    up_Bps: tuple[float, ...]  # noqa: N815
    down_Bps: tuple[float, ...]  # noqa: N815

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = len(self.latency_s), len(self.up_Bps), len(self.down_Bps)
        if len(set(lengths)) > 1 or not lengths[0]:
            raise ParameterError(
                f"latency_s, up_Bps, down_Bps hold {lengths} ranks: give each of them every rank"
            )
        for rank, (latency, up, down) in enumerate(
            zip(self.latency_s, self.up_Bps, self.down_Bps, strict=True)
        ):
            at_least(latency, 0.0, f"latency_s[{rank}]")
            at_least(up, 0.0, f"up_Bps[{rank}]", above=True)
            at_least(down, 0.0, f"down_Bps[{rank}]", above=True)

    @classmethod
    def alike(cls, ranks: int, latency_s: float, up_Bps: float, down_Bps: float) -> HomeLinks:
        """Return as many equal connections."""
        return cls((latency_s,) * ranks, (up_Bps,) * ranks, (down_Bps,) * ranks)

    @cached_property
    def _half(self) -> Floats:
        return np.array(self.latency_s) / 2

    @cached_property
    def _up(self) -> Floats:
        return np.array(self.up_Bps)

    @cached_property
    def _down(self) -> Floats:
        return np.array(self.down_Bps)

    def capacity(self) -> int:
        """Return how many ranks there are connections for."""
        return len(self.up_Bps)

    def cost(self, source: int, dest: int, nbytes: int) -> Cost:
        """Return the cost of one message between two world ranks."""
        if source == dest:
            return FREE
        up, down = self.up_Bps[source], self.down_Bps[dest]
        alpha = self.latency_s[source] / 2 + self.latency_s[dest] / 2
        return Cost(0.0, nbytes / up, alpha + nbytes / (up if up < down else down), 0.0)

    @cached_property
    def lookahead_s(self) -> float:
        """Seconds from the sending of any message until its first byte can be at its receiver's line, at least."""
        return min(self.latency_s)

    def shared_links(self, ranks: int) -> SharedLinks:
        """Return every rank's own upload and download."""
        return SharedLinks.switch(self.up_Bps[:ranks], self.down_Bps[:ranks])

    def price(self, source: int, dest: int, nbytes: int) -> tuple[float, float, float, float, float]:
        """Return the five fields of `Costs` for one message: `cost` and `drain` in one look."""
        return (*self.cost(source, dest, nbytes), self.drain(source, dest, nbytes))

    def drain(self, source: int, dest: int, nbytes: int) -> float:
        """Return how long one message occupies the receiver's line, in seconds."""
        return 0.0 if source == dest or self.contention == "none" else nbytes / self.down_Bps[dest]

    def costs(self, source: Ints, dest: Ints, nbytes: Ints | Floats | float) -> Costs:
        """Return the costs of many messages. No message may go to its own sender."""
        up, down = self._up[source], self._down[dest]
        flight = self._half[source] + self._half[dest] + nbytes / np.minimum(up, down)
        drain_s = 0.0 if self.contention == "none" else nbytes / down
        return Costs(0.0, nbytes / up, flight, 0.0, drain_s)
