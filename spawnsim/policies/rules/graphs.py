"""Mixing matrices of averaging graphs, fixed or changing from round to round.

A graph is a function of (ranks, round, seed) that returns a `Mixing`: x_i ← Σ_j W_ij x_j. Each rank computes the same
matrix from these three numbers alone, so it is never sent. W is doubly stochastic: rows sum to 1, so each result is a
weighted mean; columns sum to 1, so the mean of all ranks is preserved. `mixing` checks these properties.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError
from spawnsim.random import WORLD, generator

Ranks = NDArray[np.int64]
Weights = NDArray[np.float64]
Weighted = tuple[tuple[int, float], ...]  # ranks and their weights, by rank
TOLERANCE = 1e-12


@dataclass(frozen=True, eq=False)
class Mixing:
    """A sparse matrix W of one round: `weights[e]` is W at row `receivers[e]` and column `senders[e]`.

    Args:
        size: number of ranks n.
        receivers: rows, int64 (edges,); each pair at most once, including a rank's own weight.
        senders: columns, int64 (edges,).
        weights: float64 (edges,).
    """

    size: int
    receivers: Ranks
    senders: Ranks
    weights: Weights

    def __call__(self, values: Weights) -> Weights:
        """Return W·values.

        Args:
            values: one number per rank, float64 (n,).

        Returns:
            float64 (n,).
        """
        return _sums(self.receivers, self.weights * values[self.senders], self.size)

    def matrix(self) -> Weights:
        """Return W in full, float64 (n, n)."""
        full = np.zeros((self.size, self.size))
        full[self.receivers, self.senders] = self.weights
        return full

    def incoming(self, rank: int) -> Weighted:
        """Return the ranks from which a rank receives, and their weights, without the rank itself."""
        return self._rows[rank]

    def outgoing(self, rank: int) -> Weighted:
        """Return the ranks that receive from a rank, and the weights that they give it, without the rank itself."""
        return self._columns[rank]

    def own(self, rank: int) -> float:
        return float(self._diagonal[rank])

    @cached_property
    def _diagonal(self) -> Weights:
        own = self.receivers == self.senders
        return _sums(self.receivers[own], self.weights[own], self.size)

    @cached_property
    def _rows(self) -> list[Weighted]:
        return _by_rank(self.size, self.receivers, self.senders, self.weights)

    @cached_property
    def _columns(self) -> list[Weighted]:
        return _by_rank(self.size, self.senders, self.receivers, self.weights)


def _sums(places: Ranks, values: Weights, size: int) -> Weights:
    return np.bincount(places, values, size).astype(np.float64, copy=False)


def _by_rank(size: int, key: Ranks, others: Ranks, weights: Weights) -> list[Weighted]:
    found: list[list[tuple[int, float]]] = [[] for _ in range(size)]
    order = np.lexsort((others, key))
    for rank, other, weight in zip(*(each[order].tolist() for each in (key, others, weights)), strict=True):
        if rank != other:
            found[rank].append((other, weight))
    return [tuple(each) for each in found]


class Graph(Protocol):
    """Defines which ranks average with each other; a plain function also works."""

    def __call__(self, size: int, round_: int, seed: int, /) -> Mixing:
        """Return the weights of one round.

        Args:
            size: number of ranks, at least 1.
            round_: the round, from 0.
            seed: seed of the run, for random graphs.

        Returns:
            The weights, the same on every rank.
        """


def mixing(graph: Graph, size: int, round_: int, seed: int = 0, *, rows: bool = True) -> Mixing:
    """Return a graph's weights of one round, after checks of the properties that averaging relies on.

    Args:
        graph: the graph.
        size: number of ranks.
        round_: the round, from 0.
        seed: seed of the run.
        rows: whether rows must sum to 1, too. Push-sum does not need that: columns that sum to 1 preserve the mean.

    Returns:
        The weights: non-negative; all columns (and rows) sum to 1 within 1e-12.

    Raises:
        ParameterError: the graph has an edge to a nonexistent rank, or W is not doubly (column) stochastic.
    """
    known: Any = graph  # functions and frozen dataclasses: hashable
    return _checked(known, size, round_, seed, rows)


# Cached: virtual ranks of one process request the same round, one after the other.
@lru_cache(maxsize=64)
def _checked(graph: Any, size: int, round_: int, seed: int, rows: bool) -> Mixing:
    found: Mixing = graph(size, round_, seed)
    named = getattr(graph, "__name__", repr(graph))
    ends = np.concatenate([found.receivers, found.senders])
    if found.size != size or not ((ends >= 0) & (ends < size)).all():
        raise ParameterError(f"graph {named} of {size} ranks has an edge to a rank that does not exist")
    for what, key in (("column", found.senders), ("row", found.receivers))[: 1 + rows]:
        sums = np.bincount(key, found.weights, size)
        off = int(np.abs(sums - 1).argmax())
        if abs(sums[off] - 1) > TOLERANCE or (found.weights < 0).any():
            wanted = "doubly" if rows else "column"
            raise ParameterError(
                f"graph {named} of {size} ranks is not {wanted} stochastic in round {round_}: {what} {off} sums to "
                f"{sums[off]:.6g}; give weights >= 0 whose columns{' and rows' * rows} sum to 1"
            )
    return found


def metropolis(neighbours: Sequence[Iterable[int]]) -> Mixing:
    """Return weights for any undirected graph: 1/(1 + the larger degree) per edge, the rest for the rank itself.

    Args:
        neighbours: neighbours of each rank; both ends of an edge list each other.

    Returns:
        The weights: symmetric, so doubly stochastic (Xiao, Boyd 2004).

    Raises:
        ParameterError: only one end of an edge lists the other, or an edge leads from a rank to itself.

    >>> metropolis([[1], [0, 2], [1]]).matrix().round(3).tolist()
    [[0.667, 0.333, 0.0], [0.333, 0.333, 0.333], [0.0, 0.333, 0.667]]
    """
    near = [set(each) for each in neighbours]
    edges = [(rank, other) for rank, others in enumerate(near) for other in sorted(others)]
    for rank, other in edges:
        if not (0 <= other < len(near)) or other == rank or rank not in near[other]:
            raise ParameterError(
                f"rank {rank} has neighbour {other}: give edges between two ranks, both ways"
            )
    weights = [1 / (1 + max(len(near[rank]), len(near[other]))) for rank, other in edges]
    return _with_own(len(near), edges, weights)


def _with_own(
    size: int, edges: Sequence[tuple[int, int]] | Ranks, weights: Sequence[float] | Weights
) -> Mixing:
    """Return a mixing of (receiver, sender) edges, with the remainder to 1 as each rank's own weight."""
    rows, columns = np.asarray(edges, np.int64).reshape(-1, 2).T
    given, everyone = np.asarray(weights, np.float64), np.arange(size)
    own = 1 - np.bincount(rows, given, size)
    return Mixing(
        size,
        np.concatenate([rows, everyone]),
        np.concatenate([columns, everyone]),
        np.concatenate([given, own]),
    )


# ----------------------------------------------------------------------------------------------------------- graphs
def ring(size: int, round_: int = 0, seed: int = 0) -> Mixing:
    """Each rank averages with its two neighbours: weights of 1/3, or 1/2 for two ranks.

    >>> ring(4).matrix()[0].round(3).tolist()
    [0.333, 0.333, 0.0, 0.333]
    """
    return _circulant(size, sorted({1, size - 1} - {0, size}))


def torus(size: int, round_: int = 0, seed: int = 0) -> Mixing:
    """Each rank averages with four neighbours on a periodic grid, as square as the number of ranks allows."""
    rows = next(each for each in range(math.isqrt(size), 0, -1) if size % each == 0)
    columns = size // rows
    row, column = np.divmod(np.arange(size), columns)
    near = [(row + step) % rows * columns + column for step in sorted({1, rows - 1} - {0, rows})]
    near += [row * columns + (column + step) % columns for step in sorted({1, columns - 1} - {0, columns})]
    return _equal_shares(size, near)


def complete(size: int, round_: int = 0, seed: int = 0) -> Mixing:
    """All ranks average with all ranks: the mean, in one round."""
    return _circulant(size, list(range(1, size)))


def exponential(size: int, round_: int = 0, seed: int = 0) -> Mixing:
    """Each rank receives from the ranks 1, 2, 4, … before it, all with the same weight (Ying et al. 2021)."""
    return _circulant(size, [2**power for power in range((size - 1).bit_length())])


def one_peer_exponential(size: int, round_: int = 0, seed: int = 0) -> Mixing:
    """Each rank averages with the rank 1, 2, 4, … before it, in turn: the mean after log2 n rounds for n = 2^k ranks.

    Source: Assran et al. 2019 (SGP), Ying et al. 2021.
    """
    return _circulant(size, [2 ** (round_ % (size - 1).bit_length())] if size > 1 else [])


def _circulant(size: int, steps: Sequence[int]) -> Mixing:
    return _equal_shares(size, [(np.arange(size) - step) % size for step in steps])


def _equal_shares(size: int, near: Sequence[Ranks]) -> Mixing:
    """Return a mixing of all ranks with the same number of neighbours; each entry has one neighbour of every rank."""
    senders = np.concatenate([*near, np.empty(0, np.int64)])
    edges = np.stack([np.tile(np.arange(size), len(near)), senders], 1)
    return _with_own(size, edges, np.full(len(edges), 1 / (1 + len(near))))


def random_pairs(size: int, round_: int, seed: int) -> Mixing:
    """Random pairs in each round, with weights of 1/2; if the number of ranks is odd, one rank has no partner."""
    order = generator(seed, WORLD, f"random pairs {round_}").permutation(size)
    pairs = order[: size // 2 * 2].reshape(-1, 2)
    edges = np.concatenate([pairs, pairs[:, ::-1]])
    return _with_own(size, edges, np.full(len(edges), 0.5))


def butterfly_group(rank: int, size: int, wanted: int, round_: int, seed: int) -> list[int]:
    """Return the group of a rank in a round, a power of two of ranks, in the order of their places in a butterfly.

    If `size` is a power of two, a group consists of the ranks whose numbers differ in log₂ `wanted` bits, other bits in
    each round: after log₂ `size` bits every rank has the mean (Li et al. 2020). Otherwise the ranks are shuffled in
    each round and cut into groups of `wanted`; the remaining ranks form smaller groups.

    >>> [butterfly_group(5, 8, 2, round_, seed=0) for round_ in range(4)]
    [[4, 5], [5, 7], [1, 5], [4, 5]]
    """
    wanted = min(wanted, 1 << (size.bit_length() - 1))
    if size & (size - 1) == 0:
        bits, taken = size.bit_length() - 1, wanted.bit_length() - 1
        places = [(round_ * taken + phase) % bits for phase in range(taken)]
        base = rank & ~sum(1 << place for place in places)
        return [
            base | sum((member >> phase & 1) << place for phase, place in enumerate(places))
            for member in range(wanted)
        ]
    order = generator(seed, WORLD, f"groups of round {round_}").permutation(size).tolist()
    place, begin = order.index(rank), 0
    while True:
        count = min(wanted, 1 << ((size - begin).bit_length() - 1))
        if place < begin + count:
            return order[begin : begin + count]  # type: ignore[no-any-return]
        begin += count


@dataclass(frozen=True, slots=True)
class BaseGraph(Graph):
    """The Base-(k+1) graph: at most k neighbours per round, and the exact mean after finitely many rounds, for any n.

    The rounds repeat. With k = 1 each rank exchanges with one other rank per round, as in `one_peer_exponential`, whose
    mean is exact only for powers of two. Source: Takezawa et al. 2023, algorithms 1 to 3 (arXiv 2305.11420).

    Args:
        degree: k, at least 1.

    Raises:
        ParameterError: `degree` is out of range.

    >>> [len(BaseGraph(1).rounds(ranks)) for ranks in (2, 5, 6, 8)]
    [1, 5, 4, 3]
    """

    degree: int = 1

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise ParameterError(f"degree={self.degree!r}: give a whole number of at least 1")

    def __call__(self, size: int, round_: int, seed: int = 0) -> Mixing:
        rounds = self.rounds(size)
        return rounds[round_ % len(rounds)]

    def rounds(self, size: int) -> list[Mixing]:
        """Return the rounds after which all ranks have the mean.

        Args:
            size: number of ranks.

        Returns:
            At least one round.
        """
        return _base_rounds(size, self.degree + 1)


Exchanges = list[tuple[Ranks, Ranks, Weights]]  # (rows, columns, weights) of one round, without own weights


@lru_cache(maxsize=16)
def _base_rounds(size: int, base: int) -> list[Mixing]:
    """Return the shorter of two graphs: the simple one over all ranks, or one over equal parts that are then joined."""
    everyone = np.arange(size)
    simple = _simple_rounds(everyone, base)
    parts = smooth = _smooth_part(size, base)
    if 1 < smooth < size:
        rows = everyone.reshape(parts, size // parts)
        within = [_together(each) for each in zip(*(_simple_rounds(row, base) for row in rows), strict=True)]
        across = [_together(each) for each in zip(*(_cube_rounds(row, base) for row in rows.T), strict=True)]
        if len(within) + len(across) <= len(simple):
            simple = within + across
    return [_stochastic(size, each) for each in simple or [[]]]


def _together(parts: Iterable[Exchanges]) -> Exchanges:
    return [each for part in parts for each in part]


def _stochastic(size: int, exchanges: Exchanges) -> Mixing:
    if not exchanges:
        return _with_own(size, [], [])
    rows, columns, weights = (np.concatenate(each) for each in zip(*exchanges, strict=True))
    return _with_own(size, np.stack([rows, columns], 1), weights)


def _factors(number: int, base: int) -> list[int]:
    """Return factors of `number` of at most `base`, ascending; empty if `number` has no such factorization."""
    found = []
    for factor in range(base, 1, -1):
        while number % factor == 0:
            found.append(factor)
            number //= factor
    return found[::-1] if number == 1 else []


def _smooth_part(number: int, base: int) -> int:
    """Return the largest divisor whose prime factors are all at most `base`."""
    rest = number
    for factor in range(2, base + 1):
        while rest % factor == 0:
            rest //= factor
    return number // rest


def _cube_rounds(ranks: Ranks, base: int) -> list[Exchanges]:
    """Return the rounds of a hyper-hypercube: ranks as mixed-base digits, the mean over one digit in each round."""
    rounds, stride, places = [], 1, np.arange(len(ranks))
    for factor in _factors(len(ranks), base):
        digit = places // stride % factor
        first = places - digit * stride
        others = [first + (digit + step) % factor * stride for step in range(1, factor)]
        rounds.append([(ranks, ranks[other], np.full(len(ranks), 1 / factor)) for other in others])
        stride *= factor
    return rounds


def _simple_rounds(ranks: Ranks, base: int) -> list[Exchanges]:
    """Return the rounds of the simple Base-(k+1) graph.

    n is written in base k + 1, and the ranks are cut into one set of a_l·(k+1)^p_l ranks for each digit a_l. First each
    set computes its mean. Then, set by set, each rank of the later sets exchanges with one rank of each of the set's
    a_l parts, so that the average over each part is the mean of all ranks; then each part computes its mean.
    """
    size = len(ranks)
    if size == 1 or _factors(size, base):
        return _cube_rounds(ranks, base)
    sets: list[Ranks] = []  # each (parts, ranks per part)
    begin, power = 0, base ** int(math.log(size, base) + 1e-9)
    while begin < size:
        parts = (size - begin) // power
        if parts:
            sets.append(ranks[begin : begin + parts * power].reshape(parts, power))
            begin += parts * power
        power //= base
    first = [_cube_rounds(each.reshape(-1), base) for each in sets]
    rounds = [_together(each[time % len(each)] for each in first if each) for time in range(len(first[0]))]
    inner = [[_cube_rounds(part, base) for part in each] for each in sets]
    for time in range(1 + len(inner[0][0])):
        exchanges = _hand_over(sets[time:], base) if time < len(sets) - 1 else []
        for place, each in enumerate(inner[:time]):
            done = time - 1 - place
            exchanges += _together(part[done] for part in each if done < len(part))
        rounds.append(exchanges)
    return rounds


def _hand_over(sets: Sequence[Ranks], base: int) -> Exchanges:
    """Return the round in which the first set exchanges with all ranks of the later sets."""
    giving, later = sets[0], np.concatenate([each.reshape(-1) for each in sets[1:]])
    share = giving.size / (giving.size + len(later)) / len(giving)
    weights = np.full(len(later), share)
    exchanges: Exchanges = []
    for part in giving:
        exchanges += [(later, part[: len(later)], weights), (part[: len(later)], later, weights)]
    # The rest of the first set would be idle: it mixes in groups, which helps training; the mean does not need it.
    idle = giving[:, len(later) :].reshape(-1)
    for begin in range(0, len(idle) - 1, base):
        group = idle[begin : begin + base]
        exchanges += [
            (group, np.roll(group, step), np.full(len(group), 1 / len(group)))
            for step in range(1, len(group))
        ]
    return exchanges
