"""Larger networks: fat tree, torus, dragonfly, regions joined by wide-area links, ranks behind home lines.

Ranks are numbered along the topology: neighbours first. Distance costs latency per hop; links that many flows share
cost a fixed share of bandwidth, as under full load (`cost.FlowNetwork` is the exact model). At home every rank has its
own upload and its own, larger, download bandwidth.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spawnsim.columns import MOST_RANKS
from spawnsim.errors import ParameterError
from spawnsim.models.network.cost import FREE, Cost, Costs, Floats, Ints, SharedLinks
from spawnsim.models.network.fabric import Fabric, Index, Overheads
from spawnsim.models.network.links import Hockney, Link, at_least

MOST_HOPS = 10_000  # of a torus: the fabric keeps a link for each distance
_SENDERS = 4096  # cached rows of kinds: two bytes per pair


@dataclass(frozen=True)
class Bounded(Fabric):
    """A fabric for a fixed number of ranks: the kinds of a sender's pairs are looked up, not computed each time.

    Raises:
        ParameterError: Room for more than `MOST_RANKS` ranks.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if (most := self.capacity() or 0) > MOST_RANKS:
            raise ParameterError(
                f"the network has room for {most:,} ranks: give one for {MOST_RANKS:,} at most"
            )

    @cached_property
    def _rows(self) -> dict[int, Sequence[int]]:
        return {}

    def cost(self, source: int, dest: int, nbytes: int) -> Cost:
        """Return the cost of one message between two world ranks."""
        try:
            return self._memo[self._rows[source][dest], nbytes] if source != dest else FREE
        except (KeyError, IndexError):
            if dest >= len(self._rows.get(source, ())):
                if len(self._rows) >= _SENDERS:
                    self._rows.clear()
                # Computed for many pairs at once: the kind of a pair on a torus is numpy arithmetic, too slow for
                # single pairs. A row extends to the largest receiver so far, as a small run on a large machine needs
                # only a small part.
                most = min(1 << dest.bit_length(), self.capacity() or 0)
                kinds = self.kind(np.full(most, source), np.arange(most))
                self._rows[source] = array("H" if kinds.max() < 1 << 16 else "I", kinds.tolist())
            return self._remember((self._rows[source][dest], nbytes))


@dataclass(frozen=True)
class FatTree(Bounded):
    """A tree of switches: (2h+1) switches between two ranks whose paths meet h levels above their own.

    Args:
        link: The link through one switch.
        radices: Ranks per lowest switch, then switches per switch of the next level, and so on up.
        hop_latency_s: Latency of each further switch.
        oversubscription: Bandwidth into a level over bandwidth out of it; 1 for a full fat tree.

    Raises:
        ParameterError: No level, a count below 1, a negative latency or an oversubscription below 1.
    """

    link: Link
    radices: tuple[int, ...]
    hop_latency_s: float = 0.0
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.radices or min(self.radices) < 1:
            raise ParameterError(f"radices={self.radices}: give at least one level, each of at least 1")
        at_least(self.hop_latency_s, 0.0, "hop_latency_s")
        at_least(self.oversubscription, 1.0, "oversubscription")

    @cached_property
    def _blocks(self) -> tuple[int, ...]:
        return tuple(math.prod(self.radices[:level]) for level in range(1, len(self.radices)))

    def kind(self, source: Index, dest: Index) -> Index:
        """Return the number of levels above their own switches at which two ranks meet."""
        level = source * 0
        for block in self._blocks:
            level = level + (source // block != dest // block)
        return level

    def links(self) -> tuple[Link, ...]:
        """Return the links by level."""
        share = 1.0 / self.oversubscription
        return tuple(
            self.link.farther(2 * level * self.hop_latency_s, share**level)
            for level in range(len(self.radices))
        )

    def capacity(self) -> int:
        return math.prod(self.radices)


@dataclass(frozen=True)
class Torus(Bounded):
    """A grid that wraps around in every dimension, with minimal routes.

    Args:
        link: The link between two nodes one hop apart.
        shape: Nodes along each dimension.
        hop_latency_s: Latency of each further hop.
        ranks_per_node: Number of consecutive ranks per node.
        intra: The link within a node; `link` if None.

    Raises:
        ParameterError: No dimension, a count below 1, or a negative latency.
    """

    link: Link
    shape: tuple[int, ...]
    hop_latency_s: float = 0.0
    ranks_per_node: int = 1
    intra: Link | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shape or min(self.shape) < 1:
            raise ParameterError(f"shape={self.shape}: give at least one dimension, each of at least 1 node")
        at_least(self.hop_latency_s, 0.0, "hop_latency_s")
        at_least(self.ranks_per_node, 1, "ranks_per_node")
        if self._most_hops > MOST_HOPS:
            raise ParameterError(f"shape={self.shape}: {self._most_hops:,} hops; give {MOST_HOPS:,} at most")

    @property
    def _most_hops(self) -> int:
        return sum(length // 2 for length in self.shape)

    def kind(self, source: Index, dest: Index) -> Index:
        """Return the number of hops; 0 within a node."""
        a, b = source // self.ranks_per_node, dest // self.ranks_per_node
        hops = source * 0
        for length in reversed(self.shape):
            apart = abs(a % length - b % length)
            hops = hops + (length - abs(length - 2 * apart)) // 2  # the shorter way round
            a, b = a // length, b // length
        return hops

    def links(self) -> tuple[Link, ...]:
        """Return the links by number of hops."""
        away = (self.link.farther(hop * self.hop_latency_s) for hop in range(self._most_hops))
        return (self.intra or self.link, *away)

    def node(self, rank: Index) -> Index:
        return rank // self.ranks_per_node

    def capacity(self) -> int:
        return math.prod(self.shape) * self.ranks_per_node


@dataclass(frozen=True)
class Dragonfly(Bounded):
    """Groups of routers, all-to-all within a group and between groups; minimal routes: local, global, local.

    Args:
        link: The link through one router.
        ranks_per_router: Number of consecutive ranks per router.
        routers_per_group: Number of routers per group.
        groups: Number of groups.
        local_latency_s: Latency of a hop within a group.
        global_latency_s: Latency of a hop between groups.
        global_share: Share of the bandwidth that a flow between groups gets.

    Raises:
        ParameterError: A count below 1, a negative latency, or a share outside (0, 1].

    J. Kim, W. Dally, S. Scott, D. Abts, ISCA 2008.
    """

    link: Link
    ranks_per_router: int
    routers_per_group: int
    groups: int
    local_latency_s: float = 0.0
    global_latency_s: float = 0.0
    global_share: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ranks_per_router", "routers_per_group", "groups"):
            at_least(getattr(self, name), 1, name)
        at_least(self.local_latency_s, 0.0, "local_latency_s")
        at_least(self.global_latency_s, 0.0, "global_latency_s")
        if not 0.0 < self.global_share <= 1.0:
            raise ParameterError(f"global_share={self.global_share}: give a share above 0 and up to 1")

    def kind(self, source: Index, dest: Index) -> Index:
        """Return 0 on one router, 1 within a group, 2 between groups."""
        group = self.ranks_per_router * self.routers_per_group
        other_router = source // self.ranks_per_router != dest // self.ranks_per_router
        apart: Index = other_router * 1 + (source // group != dest // group)
        return apart

    def links(self) -> tuple[Link, ...]:
        """Return the three links."""
        across = 2 * self.local_latency_s + self.global_latency_s
        return (
            self.link,
            self.link.farther(self.local_latency_s),
            self.link.farther(across, self.global_share),
        )

    def capacity(self) -> int:
        return self.ranks_per_router * self.routers_per_group * self.groups


@dataclass(frozen=True)
class Regions(Bounded):
    """Regions joined by wide-area links.

    Args:
        members: Ranks in each of the R regions, consecutive.
        joins: R rows of R links, from region to region; the diagonal is inside a region.

    Raises:
        ParameterError: A region with no rank, or `joins` that is not R by R.
    """

    members: tuple[int, ...]
    joins: tuple[tuple[Link, ...], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        count = len(self.members)
        if not count or min(self.members) < 1:
            raise ParameterError(f"members={self.members}: give at least one region, each of at least 1 rank")
        if len(self.joins) != count or any(len(row) != count for row in self.joins):
            raise ParameterError(f"joins: {count} regions need {count} rows of {count} links")

    @classmethod
    def between(
        cls, members: tuple[int, ...], latency_s: list[list[float]], bandwidth_Bps: list[list[float]]
    ) -> Regions:
        """Return regions joined by Hockney links, from tables of latencies (s) and bandwidths (bytes/s)."""
        rows = zip(latency_s, bandwidth_Bps, strict=True)
        return cls(members, tuple(tuple(map(Hockney, alphas, bandwidths)) for alphas, bandwidths in rows))

    @cached_property
    def _region(self) -> Ints:
        return np.repeat(np.arange(len(self.members)), self.members)

    @cached_property
    def _region_list(self) -> list[int]:
        return list(map(int, self._region))

    def kind(self, source: Index, dest: Index) -> Index:
        """Return R times the region of the source plus the region of the destination."""
        if isinstance(source, np.ndarray):
            return self._region[source] * len(self.members) + self._region[dest]
        return self._region_list[source] * len(self.members) + self._region_list[dest]

    def links(self) -> tuple[Link, ...]:
        return tuple(link for row in self.joins for link in row)

    def capacity(self) -> int:
        return sum(self.members)


@dataclass(frozen=True)
class HomeLinks(Overheads):
    """Ranks on the internet: T(n) = α/2 at either end + n / min(up of the source, down of the destination).

    The sender's line is busy for n / up, the receiver's for n / down, so that a fast server can feed many.

    Args:
        latency_s: Latency through each rank's line and the backbone; a pair's is half of each end's; one per rank.
        up_Bps: Upload bandwidth of each rank, bytes per second.
        down_Bps: Download bandwidth of each rank, bytes per second.

    Raises:
        ParameterError: Tables of different lengths, a negative latency, or a bandwidth that is not above 0.
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
        return len(self.up_Bps)

    def cost(self, source: int, dest: int, nbytes: int) -> Cost:
        """Return the cost of one message between two world ranks."""
        if source == dest:
            return FREE
        up, down = self.up_Bps[source], self.down_Bps[dest]
        alpha = self.latency_s[source] / 2 + self.latency_s[dest] / 2
        drain_s = 0.0 if self.contention == "none" else nbytes / down
        return Cost(0.0, nbytes / up, alpha + nbytes / (up if up < down else down), 0.0, drain_s)

    @cached_property
    def lookahead_s(self) -> float:
        """Seconds from the sending of any message until its first byte can be at its receiver's line, at least."""
        return min(self.latency_s)

    def shared_links(self, ranks: int) -> SharedLinks:
        return SharedLinks.switch(self.up_Bps[:ranks], self.down_Bps[:ranks])

    def costs(self, source: Ints, dest: Ints, nbytes: Ints | Floats | float) -> Costs:
        """Return the costs of many messages. No message may go to its own sender."""
        up, down = self._up[source], self._down[dest]
        flight = self._half[source] + self._half[dest] + nbytes / np.minimum(up, down)
        drain_s = 0.0 if self.contention == "none" else nbytes / down
        return Costs(0.0, nbytes / up, flight, 0.0, drain_s)
