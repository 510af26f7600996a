"""Networks whose pairs of ranks fall into a few kinds, each kind with its own link; and the two simplest ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar, get_args

import numpy as np

from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.models.network.changing import Capacity, Changing
from spawnsim.models.network.cost import FREE, Contention, Cost, Costs, Floats, Ints, SharedLinks
from spawnsim.models.network.links import Link, Piece, at_least, bandwidth_Bps, evaluate

Index = TypeVar("Index", int, Ints)
_MEMO = 1 << 16  # remembered costs; a program with more different sizes pays for each again
_FAR = np.iinfo(np.int64).max  # begin of pieces that a link lacks


class CostTable:
    """The pieces of all kinds of links as two tables: the costs of many messages are two look-ups and a product."""

    # The costs of one message and of many must be equal to the last bit, or a collective would differ from the
    # messages that it represents. Both therefore add fixed + n * slope in this order, and columns that are zero for
    # all pieces are skipped, which changes no bit and saves two of five operations on a Hockney link.

    def __init__(self, links: tuple[Link, ...], drains: bool = True) -> None:
        pieces = [link.pieces() if drains else tuple(map(Piece.undrained, link.pieces())) for link in links]
        counts = [len(own) for own in pieces]
        self.fixed = np.array([piece.fixed for own in pieces for piece in own]).T
        self.per_byte = np.array([piece.per_byte for own in pieces for piece in own]).T
        self.used = np.flatnonzero(self.fixed.any(axis=1) | self.per_byte.any(axis=1)).tolist()
        self.begin = np.cumsum([0, *counts[:-1]])
        self.starts = np.full((len(links), max(counts)), _FAR)
        for kind, own in enumerate(pieces):
            self.starts[kind, : len(own)] = [piece.from_bytes for piece in own]
        self.links = pieces

    def least_head_s(self) -> float:
        """Return the least time from the start of injection until a NIC can begin to receive a message, in seconds."""
        # The first byte of a message is at the receiver's NIC drain_s before its last. Over the sizes of a piece that
        # is affine; if it decreases with the size, the only certain lower bound is 0.
        heads = []
        for piece in (piece for own in self.links for piece in own):
            slope = piece.per_byte.flight_s - piece.per_byte.drain_s
            at_first = piece.fixed.flight_s - piece.fixed.drain_s + piece.from_bytes * slope
            heads.append(at_first if slope >= 0.0 else 0.0)
        return max(0.0, float(min(heads)))

    def same(self, kind: int, nbytes: Ints | Floats | float) -> Costs:
        """Return the costs of messages on links of one kind."""
        if not isinstance(nbytes, np.ndarray):
            return evaluate(self.links[kind], nbytes)
        if not nbytes.size:
            return Costs(0.0, 0.0, 0.0, 0.0, 0.0)
        piece = self.begin[kind]
        if self.starts.shape[1] > 1:
            least, most = (int((self.starts[kind] <= n).sum()) - 1 for n in (nbytes.min(), nbytes.max()))
            if least != most:
                return self.mixed(np.full(nbytes.shape, kind), nbytes)
            piece += least
        columns: list[Floats | float] = [0.0] * 5
        for i in self.used:
            columns[i] = self.fixed[i, piece] + nbytes * self.per_byte[i, piece]
        return Costs(*columns)

    def mixed(self, kinds: Ints, nbytes: Ints | Floats | float) -> Costs:
        """Return the costs of messages on links of several kinds."""
        piece = self.begin[kinds]
        if self.starts.shape[1] > 1:
            piece = piece + (np.asarray(nbytes)[..., None] >= self.starts[kinds]).sum(axis=1) - 1
        columns: list[Floats | float] = [0.0] * 5
        for i in self.used:
            columns[i] = self.fixed[i, piece] + nbytes * self.per_byte[i, piece]
        return Costs(*columns)

    def slopes(self, kind: int, nbytes: Ints | Floats | float) -> Costs:
        """Return the cost per byte of messages on links of one kind."""
        at_least = np.searchsorted(self.starts[kind], nbytes, side="right") - 1
        return Costs(*self.per_byte[:, self.begin[kind] + at_least])


DTYPES = (
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)  # fmt: skip
"""The names that `gamma_of` may use: numpy's, and bfloat16."""


@dataclass(frozen=True)
class Overheads:
    """The properties of every network besides its links.

    Args:
        call_overhead_s: Seconds that a probe or a test costs; above 0.
        eager_bytes: Longest message that leaves without asking the receiver.
        collective_rendezvous: Whether longer messages of collectives ask first, too, as in MPI libraries;
            False: they leave at once, as in the closed forms of textbooks.
        gamma_s_per_B: Seconds of arithmetic per reduced byte.
        gamma_beyond: (bytes, seconds per byte) of operands from this length on, which exceed the caches; None: one
            speed for all.
        gamma_of: (dtype, seconds per byte) of dtypes with a speed of their own, such as ("bfloat16", 5e-10); then
            `gamma_s_per_B` is that of all others.
        contention: How messages contend: "serial", "fifo", "fair" or "none": see `cost.Contention`.
        copy_s_per_B: Seconds per byte to copy a rank's own block in gather, scatter, allgather and alltoall.
        window: The cost of an access to a window between ranks that map the same memory: the origin's processor
            copies, and no message is sent. None: all accesses are messages.

    Raises:
        ParameterError: A value is out of its range.
    """

    call_overhead_s: float = field(default=1e-6, kw_only=True)
    contention: Contention = field(default="serial", kw_only=True)
    eager_bytes: int = field(default=65536, kw_only=True)
    collective_rendezvous: bool = field(default=False, kw_only=True)
    gamma_s_per_B: float = field(default=0.0, kw_only=True)  # noqa: N815
    gamma_beyond: tuple[int, float] | None = field(default=None, kw_only=True)
    gamma_of: tuple[tuple[str, float], ...] = field(default=(), kw_only=True)
    copy_s_per_B: float = field(default=0.0, kw_only=True)  # noqa: N815
    window: Link | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        at_least(self.call_overhead_s, 0.0, "call_overhead_s", above=True)
        at_least(self.eager_bytes, 0, "eager_bytes")
        at_least(self.gamma_s_per_B, 0.0, "gamma_s_per_B")
        for value in self.gamma_beyond or ():
            at_least(value, 0.0, "gamma_beyond")
        if self.gamma_of:
            self._check_dtypes()
        at_least(self.copy_s_per_B, 0.0, "copy_s_per_B")
        if self.contention not in get_args(Contention):
            raise ParameterError(
                f"contention={self.contention!r}: give one of {', '.join(get_args(Contention))}"
            )

    def _check_dtypes(self) -> None:
        """Raise ParameterError for a dtype that does not exist, or speeds that `gamma_of` cannot have."""
        if self.gamma_beyond is not None:
            raise ParameterError("reductions have speeds by dtype or by size: give one of the two")
        for dtype, gamma in (*self.gamma_of, ("default", self.gamma_s_per_B)):
            at_least(gamma, 0.0, f"seconds per byte of {dtype}", above=True)
            if dtype not in DTYPES and dtype != "default":
                raise ParameterError(f"{dtype!r} is not a dtype: give {', '.join(DTYPES)}")

    def reduce_s(self, nbytes: Ints | Floats | float, dtype: str = "") -> Floats | float:
        """Return the seconds of arithmetic with which a rank combines operands of these lengths."""
        gamma: Floats | float = dict(self.gamma_of).get(dtype, self.gamma_s_per_B)
        if self.gamma_beyond is not None:
            from_bytes, beyond = self.gamma_beyond
            if isinstance(nbytes, np.ndarray):
                gamma = np.where(nbytes >= from_bytes, beyond, gamma)
            elif nbytes >= from_bytes:
                gamma = beyond
        work_s: Floats | float = np.multiply(nbytes, gamma)
        return work_s

    def shared_links(self, ranks: int) -> SharedLinks:
        """Return the links that messages share with "fair" contention."""
        raise ParameterError(
            f'contention="fair" is modelled on a switch, on nodes and at home, not on a {type(self).__name__}'
        )

    @property
    def changes(self) -> bool:
        return False

    def cost_at(self, source: int, dest: int, nbytes: int, begin_s: float) -> Cost:
        raise UnsupportedError(f"the links of a {type(self).__name__} do not change with time")

    def costs_at(self, source: Ints, dest: Ints, nbytes: Ints | Floats | float, *, begin_s: Floats) -> Costs:
        raise UnsupportedError(f"the links of a {type(self).__name__} do not change with time")

    def capacity(self) -> int | None:
        """Return how many ranks fit; None if any number does."""
        return None

    def node(self, rank: Index) -> Index:
        """Return the number of the node on which a rank is: one node per rank, unless a subclass differs."""
        return rank

    def place(self, ranks: Ints) -> Ints:
        return self.node(ranks)

    def maps(self, source: int, dest: int) -> bool:
        return self.node(source) == self.node(dest)

    def copy_s(self, source: int, dest: int, nbytes: int) -> float | None:
        """Return how long a rank copies to or from another's window in memory that both map; None: it uses messages."""
        if self.window is None or source == dest or not self.maps(source, dest):
            return None
        return float(evaluate(self.window.pieces(), nbytes).flight_s)

    def check(self, ranks: int) -> None:
        """Raise `ParameterError` if `ranks` ranks do not fit."""
        most = self.capacity()
        if most is not None and ranks > most:
            name = type(self).__name__
            raise ParameterError(
                f"{ranks} ranks do not fit on this {name}: it has room for {most}; enlarge it"
            )


@dataclass(frozen=True)
class Fabric(Overheads, ABC):
    """A network whose pairs of ranks fall into kinds. Subclasses define the kinds and their links."""

    @abstractmethod
    def kind(self, source: Index, dest: Index) -> Index:
        """Return the kind of a pair: ints for ints, an int array for arrays."""

    @abstractmethod
    def links(self) -> tuple[Link, ...]:
        """Return the link of each kind."""

    @cached_property
    def table(self) -> CostTable:
        return CostTable(self.links(), drains=self.contention != "none")

    @cached_property
    def lookahead_s(self) -> float:
        """Seconds from the sending of any message until its first byte can be at its receiver's NIC, at least."""
        return self.table.least_head_s()

    @cached_property
    def _memo(self) -> dict[tuple[int, int], Cost]:
        return {}

    def cost(self, source: int, dest: int, nbytes: int) -> Cost:
        """Return the cost of one message between two world ranks."""
        # Called once for each message, so a repeated query must take well under a microsecond. Subclasses that know
        # the kind of a pair without arithmetic look it up themselves, and therefore repeat these lines.
        key = (self.kind(source, dest), nbytes)
        try:
            return self._memo[key] if source != dest else FREE
        except KeyError:
            return self._remember(key)

    def _remember(self, key: tuple[int, int]) -> Cost:
        if len(self._memo) > _MEMO:
            self._memo.clear()
        cost = self._memo[key] = Cost(*map(float, self.table.same(*key)))
        return cost

    def costs(self, source: Ints, dest: Ints, nbytes: Ints | Floats | float) -> Costs:
        """Return the costs of many messages. No message may go to its own sender."""
        # Most rounds of most collectives use links of one kind. One affine expression then covers all messages,
        # without looking up pieces message by message.
        if len(self.table.links) == 1:
            return self.table.same(0, nbytes)
        kinds = np.asarray(self.kind(source, dest))
        first = int(kinds.flat[0]) if kinds.size else 0
        if (kinds == first).all():
            return self.table.same(first, nbytes)
        return self.table.mixed(kinds, nbytes)

    @cached_property
    def capacities(self) -> tuple[Capacity | None, ...]:
        """How the link of each kind changes; None: constant."""
        return tuple(
            link.open(kind) if isinstance(link, Changing) else None for kind, link in enumerate(self.links())
        )

    @cached_property
    def changes(self) -> bool:
        return any(self.capacities)

    def cost_at(self, source: int, dest: int, nbytes: int, begin_s: float) -> Cost:
        """Return the cost of one message whose injection begins at a time: the time of its bytes depends on it."""
        cost = self.cost(source, dest, nbytes)
        capacity = self.capacities[self.kind(source, dest)]
        if capacity is None or source == dest:
            return cost
        _, inject, flight, _, drain = map(float, self.table.slopes(self.kind(source, dest), nbytes))
        more_s = capacity.lasts(begin_s, nbytes * flight) - nbytes * flight
        return cost._replace(
            inject_s=cost.inject_s + more_s * bool(inject),
            flight_s=cost.flight_s + (more_s + capacity.latency_at(begin_s)),
            drain_s=cost.drain_s + more_s * bool(drain),
        )

    def costs_at(self, source: Ints, dest: Ints, nbytes: Ints | Floats | float, *, begin_s: Floats) -> Costs:
        """Return the costs of many messages, each begun at its own time."""
        found = [np.broadcast_to(column, len(source)).copy() for column in self.costs(source, dest, nbytes)]
        sizes = np.broadcast_to(nbytes, len(source))
        kinds = np.broadcast_to(np.asarray(self.kind(source, dest)), len(source))
        for kind in np.unique(kinds).tolist():
            capacity, who = self.capacities[kind], np.flatnonzero(kinds == kind)
            if capacity is None:
                continue
            _, inject, flight, _, drain = self.table.slopes(kind, sizes[who])
            more_s = capacity.all_last(begin_s[who], sizes[who] * flight) - sizes[who] * flight
            found[1][who] += more_s * (np.asarray(inject) > 0.0)
            found[2][who] += more_s + capacity.all_latencies(begin_s[who])
            found[4][who] += more_s * (np.asarray(drain) > 0.0)
        return Costs(*found)


@dataclass(frozen=True)
class Switch(Fabric):
    """All ranks are connected to one full-duplex switch: every pair is joined by the same link."""

    link: Link

    def kind(self, source: Index, dest: Index) -> Index:
        return source * 0

    def links(self) -> tuple[Link, ...]:
        return (self.link,)

    def maps(self, source: int, dest: int) -> bool:
        """Return True: with `window` given, the switch represents the memory of one node."""
        return True

    def shared_links(self, ranks: int) -> SharedLinks:
        """Return one up and one down link per rank."""
        speed = bandwidth_Bps(self.link)
        return replace(SharedLinks.switch([speed] * ranks, [speed] * ranks), left=self.capacities[0])

    def cost(self, source: int, dest: int, nbytes: int) -> Cost:
        """Return the cost of one message between two world ranks."""
        try:
            return self._memo[0, nbytes] if source != dest else FREE
        except KeyError:
            return self._remember((0, nbytes))


@dataclass(frozen=True)
class Nodes(Fabric):
    """Nodes of `ranks_per_node` consecutive ranks: one link inside a node, another between nodes.

    Every rank has its own NIC, unless contention is "fair": then the ranks of a node share one. To model a shared NIC
    with other contention, give `inter` the bandwidth of one rank's share.

    Args:
        intra: Link between two ranks of one node.
        inter: Link between ranks of different nodes.
        ranks_per_node: Number of ranks per node.
        nodes: Number of nodes; None for as many as needed.

    Raises:
        ParameterError: A count below 1.
    """

    intra: Link
    inter: Link
    ranks_per_node: int
    nodes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self.ranks_per_node, 1, "ranks_per_node")
        at_least(1 if self.nodes is None else self.nodes, 1, "nodes")

    def kind(self, source: Index, dest: Index) -> Index:
        """Return 0 within a node, 1 between nodes."""
        apart: Index = (source // self.ranks_per_node != dest // self.ranks_per_node) * 1
        return apart

    def links(self) -> tuple[Link, ...]:
        return (self.intra, self.inter)

    def shared_links(self, ranks: int) -> SharedLinks:
        """Return one NIC for all ranks of a node; links within a node are not shared."""
        shared = SharedLinks.nodes(ranks, self.ranks_per_node, bandwidth_Bps(self.inter))
        return replace(shared, left=self.capacities[1])

    def capacity(self) -> int | None:
        """Return how many ranks fit; None if any number does."""
        return None if self.nodes is None else self.nodes * self.ranks_per_node

    def node(self, rank: Index) -> Index:
        return rank // self.ranks_per_node
