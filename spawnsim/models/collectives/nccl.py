"""NCCL's collectives: α and β of each algorithm and protocol, and the choice among them, as NCCL's tuner computes them.

A collective of n bytes takes α + n/B. The tuner computes α from the steps within and between nodes, and B from the
bandwidth of the rings (or trees) of all channels together, for each algorithm (ring, double binary tree) and each
protocol (LL, LL128, Simple); NCCL runs the pair with the least estimate. A machine's times deviate from the
estimates; `Factor`s, which `spawnsim calibrate --from` fits, correct α and 1/B of a pair. They do not change the
choice, since NCCL does not know them either.

Source of the constants and formulas: src/graph/tuning.cc of NCCL 2.28. Not modelled: CollNet, NVLS, PAT, PCI without
NVLink, and more than one kind of GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from spawnsim.errors import ParameterError

PROTOCOLS = ("LL", "LL128", "Simple")
GPUS = ("volta", "ampere", "hopper", "blackwell")
CPUS = ("intel", "amd")
OPERATIONS = ("allreduce", "allgather", "reduce_scatter")

# In µs: the launch of a kernel, a hop over NVLink, and a hop over the network, for LL, LL128 and Simple.
_BASE_US = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
_NVLINK_US = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)}
_NET_US = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)}
_POST_US = {"intel": 1.0, "amd": 2.0}  # posting to the NIC; three times with Simple
# In GB/s, for one, two and more nodes.
_MOST_LL_ALONE = {"volta": 39.0, "ampere": 87.7, "hopper": 141.0, "blackwell": 282.0}
_MOST_LL = {"intel": (39.0, 20.4), "amd": (22.5, 19.0)}
_MOST_LL128_RING = {"volta": 20.0, "ampere": 20.0, "hopper": 36.7, "blackwell": 40.0}  # of one channel
_MOST_LL128_TREE = {
    "volta": (20.0, 20.0, 20.0), "ampere": (20.0, 20.0, 20.0), "hopper": (36.7, 36.7, 29.0),
    "blackwell": (55.6, 31.67, 20.0),
}  # fmt: skip
_MOST_TREE = {
    "volta": (26.5, 18.5, 10.0), "ampere": (24.0, 23.6, 17.8), "hopper": (38.7, 41.4, 36.0),
    "blackwell": (70.0, 42.8, 24.0),
}  # fmt: skip
# The share of a tree's bandwidth by size: 64 B, 128 B, … The tuner multiplies by it; beyond the table the share is 1.
_TREE_SHARE = (
    (1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0),
    (1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)  # fmt: skip
_PLATEAU_BYTES = 64  # per channel and rank: from here on a ring of Simple has a longer latency
ONE_CHUNK_BYTES = 768  # the least chunk of LL: 96 threads, 8 bytes each


class Estimate(NamedTuple):
    """The tuner's α, in seconds, and β, in seconds per byte, of one algorithm with one protocol."""

    algorithm: str
    protocol: str
    alpha_s: float
    beta_s_per_B: float  # noqa: N815

    def seconds(self, nbytes: float) -> float:
        return self.alpha_s + nbytes * self.beta_s_per_B


class Factor(NamedTuple):
    """A machine's α and β over the tuner's, of one algorithm with one protocol."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Nccl:
    """A machine as NCCL's tuner sees it.

    Args:
        bus_Bps: Bandwidth of the rings of all channels together, bytes per second; at most that of a node's NICs.
        channels: Number of channels.
        gpu: "volta", "ampere", "hopper" or "blackwell".
        cpu: "intel" or "amd".
        ll128: Whether LL128 is enabled; by default it is, on NVLink.
        algorithm: "ring" or "tree" for all-reduces, as NCCL_ALGO fixes it; "": the faster one.
        factors: ("ring-LL", alpha, beta): the machine's α and β over the tuner's; also "ring-LL-one-chunk", for
            at most 768 bytes. A pair without factors has the tuner's values.

    Raises:
        ParameterError: A value is out of its range.
    """

    bus_Bps: float  # noqa: N815
    channels: int = 8
    gpu: str = "hopper"
    cpu: str = "intel"
    ll128: bool = True
    algorithm: str = ""
    factors: tuple[tuple[str, float, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.bus_Bps > 0.0 or self.channels < 1:
            raise ParameterError(
                f"bus={self.bus_Bps:g} B/s, channels={self.channels}: give a bandwidth above 0 and at least 1 channel"
            )
        words = (
            ("gpu", self.gpu, GPUS), ("cpu", self.cpu, CPUS), ("algorithm", self.algorithm or "ring", ("ring", "tree")),
        )  # fmt: skip
        for name, value, known in words:
            if value not in known:
                raise ParameterError(f"{name}={value!r}: give one of {', '.join(known)}")
        for pair, alpha, beta in self.factors:
            if pair not in PAIRS or not alpha >= 0.0 or not beta >= 0.0:
                raise ParameterError(
                    f"factor {pair!r}, {alpha:g}, {beta:g}: give numbers of at least 0 for one of {', '.join(PAIRS)}"
                )

    def estimates(self, operation: str, nbytes: int, *, ranks: int, nodes: int) -> list[Estimate]:
        """Return the tuner's estimates, without `factors`; one for each enabled algorithm and protocol."""
        found = [self._ring(operation, nbytes, kind, ranks=ranks, nodes=nodes) for kind in self._kinds()]
        if operation == "allreduce":
            found += [self._tree(nbytes, kind, ranks=ranks, nodes=nodes) for kind in self._kinds()]
        return found

    def choice(self, operation: str, nbytes: int, *, ranks: int, nodes: int) -> Estimate:
        """Return the estimate of the algorithm and protocol that NCCL runs.

        Args:
            operation: One of `OPERATIONS`.
            nbytes: Bytes of the whole vector: for allgather and reduce_scatter, of all blocks together.
            ranks: Number of ranks.
            nodes: Number of nodes on which they are, evenly.
        """
        found = self.estimates(operation, nbytes, ranks=ranks, nodes=nodes)
        if operation == "allreduce" and self.algorithm:
            found = [each for each in found if each.algorithm == self.algorithm]
        return min(found, key=lambda each: each.seconds(nbytes))

    def seconds(self, operation: str, nbytes: int, *, ranks: int, nodes: int) -> float:
        """Return how long a collective takes once all ranks have arrived; arguments as for `choice`."""
        if ranks < 2:
            return 0.0
        chosen = self.choice(operation, nbytes, ranks=ranks, nodes=nodes)
        factor = self.factor(pair_of(chosen, nbytes))
        return factor.alpha * chosen.alpha_s + factor.beta * nbytes * chosen.beta_s_per_B

    def factor(self, pair: str) -> Factor:
        """Return the factors of a pair; "ring-LL-one-chunk" falls back on "ring-LL"."""
        known = {name: Factor(alpha, beta) for name, alpha, beta in self.factors}
        return known.get(pair) or known.get(pair.removesuffix(ONE_CHUNK), Factor(1.0, 1.0))

    def _kinds(self) -> Iterator[int]:
        return (kind for kind, protocol in enumerate(PROTOCOLS) if self.ll128 or protocol != "LL128")

    def _ring(self, operation: str, nbytes: int, kind: int, *, ranks: int, nodes: int) -> Estimate:
        bus, size = self.bus_Bps / 1e9, min(nodes, 3) - 1
        if PROTOCOLS[kind] == "LL":
            bus = min(bus * 0.5, _MOST_LL_ALONE[self.gpu] if nodes == 1 else _MOST_LL[self.cpu][size - 1])
        elif PROTOCOLS[kind] == "LL128":
            bus = min(bus * 0.92, self.channels * _MOST_LL128_RING[self.gpu])
        passes = 2 if operation == "allreduce" else 1
        hops, outer = passes * (ranks - 1), passes * (nodes - 1)
        between_us = (_NET_US["tree"] if ranks == nodes else _NET_US["ring"])[kind]
        inside_us = _NVLINK_US["ring"][kind]
        if nodes > 1:
            inside_us = max(inside_us, _POST_US[self.cpu] * (3.0 if PROTOCOLS[kind] == "Simple" else 1.0))
        alpha_us = _BASE_US["ring"][kind] + (hops - outer) * inside_us + outer * between_us
        plateau = operation == "allreduce" and nodes > 1 and PROTOCOLS[kind] == "Simple"
        if plateau and nbytes >= _PLATEAU_BYTES * self.channels * ranks:
            alpha_us *= 1.9 if self.gpu == "volta" else 1.4
        return Estimate("ring", PROTOCOLS[kind], 1e-6 * alpha_us, 1e-9 * hops / ranks / bus)

    def _tree(self, nbytes: int, kind: int, *, ranks: int, nodes: int) -> Estimate:
        size = min(nodes, 3) - 1
        bus = min(self.bus_Bps / 1e9 * 0.92, self.channels * _MOST_TREE[self.gpu][size])
        if PROTOCOLS[kind] == "LL":
            bus = min(bus / 3.8, _MOST_LL_ALONE[self.gpu] if nodes == 1 else _MOST_LL[self.cpu][size - 1])
        elif PROTOCOLS[kind] == "LL128":
            bus = min(
                bus * (7 / 9 if nodes == 1 else 120 / 128), self.channels * _MOST_LL128_TREE[self.gpu][size]
            )
        place = (nbytes >> 6).bit_length() - 1
        share = _TREE_SHARE[kind][place] if 0 <= place < len(_TREE_SHARE[kind]) else 1.0
        inner, outer = ranks // nodes - 1, nodes.bit_length() - 1
        hops_us = inner * _NVLINK_US["tree"][kind] + outer * _NET_US["tree"][kind]
        alpha_us = _BASE_US["tree"][kind] + 2 * hops_us
        return Estimate("tree", PROTOCOLS[kind], 1e-6 * alpha_us, 2e-9 / (bus * share))


ONE_CHUNK = "-one-chunk"


def pair_of(estimate: Estimate, nbytes: int) -> str:
    """Return the name by which `Nccl.factors` knows an estimate: "ring-LL", "tree-Simple", "ring-LL-one-chunk"."""
    pair = f"{estimate.algorithm}-{estimate.protocol}"
    # With one chunk, all hops but one have nothing to send: the ring is not in lockstep, and a hop is faster.
    return pair + ONE_CHUNK if pair == "ring-LL" and nbytes <= ONE_CHUNK_BYTES else pair


PAIRS = (
    *(f"{algorithm}-{protocol}" for algorithm in _BASE_US for protocol in PROTOCOLS),
    f"ring-LL{ONE_CHUNK}",
)
"""The names of `Nccl.factors`."""
