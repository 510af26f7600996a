"""Larger networks: fat tree, torus, dragonfly, regions joined by wide-area links.

Ranks are numbered along the topology: neighbours first. Distance costs latency per hop; what many flows share costs a
fixed share of bandwidth, as under full load (`sharing` holds the exact model). This room knows places and links.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.virtual.network.cost import FREE, Cost, Ints
from spawnsim.virtual.network.fabric import GIFT, Fabric, Index
from spawnsim.virtual.network.links import Hockney, Link, at_least

_SENDERS = 4096  # rows of kinds that are kept: two bytes a pair


@dataclass(frozen=True)
class Bounded(Fabric):
    """A fabric with room for so many ranks: the kinds of a sender's pairs are looked up, not worked out each time."""

    @cached_property
    def _rows(self) -> dict[int, Sequence[int]]:
        return {}

    def cost(self, source: int, dest: int, nbytes: int) -> Cost:
        """Return the cost of one message between two world ranks."""
        try:
            return self._memo[self._rows[source][dest], nbytes] if source != dest else FREE
        except KeyError:
            if source not in self._rows:
                if len(self._rows) >= _SENDERS:
                    self._rows.clear()
                room = self.capacity() or 0
                kinds = self.kind(np.full(room, source), np.arange(room))
                self._rows[source] = array("H", kinds.tolist())
            return self._remember((self._rows[source][dest], nbytes))

    def price(self, source: int, dest: int, nbytes: int) -> tuple[float, float, float, float, float]:
        """Return the five fields of `Costs` for one message: `cost` and `drain` in one look."""
        try:
            return self._prices[self._rows[source][dest], nbytes] if source != dest else GIFT
        except KeyError:
            return super().price(source, dest, nbytes)


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
        """Return how many levels above their own switches two ranks meet."""
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
        """Return how many ranks fit."""
        return math.prod(self.radices)


@dataclass(frozen=True)
class Torus(Bounded):
    """A grid that wraps around in every dimension, with minimal routes.

    Args:
        link: The link between two nodes one hop apart.
        shape: Nodes along each dimension.
        hop_latency_s: Latency of each further hop.
        ranks_per_node: How many consecutive ranks share a node.
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
        most = sum(length // 2 for length in self.shape)
        away = (self.link.farther(hop * self.hop_latency_s) for hop in range(most))
        return (self.intra or self.link, *away)

    def node(self, rank: Index) -> Index:
        """Return the number of the node on which a rank lives."""
        return rank // self.ranks_per_node

    def capacity(self) -> int:
        """Return how many ranks fit."""
        return math.prod(self.shape) * self.ranks_per_node


@dataclass(frozen=True)
class Dragonfly(Bounded):
    """Groups of routers, all-to-all within a group and between groups; minimal routes: local, global, local.

    Args:
        link: The link through one router.
        ranks_per_router: How many consecutive ranks hang on a router.
        routers_per_group: How many routers make a group.
        groups: How many groups there are.
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
        """Return how many ranks fit."""
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
        """Return R times the region of the source plus that of the destination."""
        if isinstance(source, np.ndarray):
            return self._region[source] * len(self.members) + self._region[dest]
        return self._region_list[source] * len(self.members) + self._region_list[dest]

    def links(self) -> tuple[Link, ...]:
        """Return all links, row by row."""
        return tuple(link for row in self.joins for link in row)

    def capacity(self) -> int:
        """Return how many ranks fit."""
        return sum(self.members)
