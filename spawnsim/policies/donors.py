"""From whom: which ranks give to a replaced one.

This room knows reports, and a random generator that it is handed; no communicator, no model. A donor rule is any
callable `rule(rank, candidates, rng) -> donors`, where `candidates` are the reports of the ranks that may give:
sorted by rank, with finite metrics, without the rank itself and without any rank that is itself being replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.policies.mixing import softmax_weights
from spawnsim.policies.selection import Mode, Report, check_mode, worst_first

MOST = 8  # donors of one replaced rank by default, where averaging takes several: see `usual`

DonorRule = Callable[[int, Sequence[Report], np.random.Generator], Sequence[int]]
Count = int | float | None  # so many; that share of the candidates; all


def how_many(count: Count, available: int) -> int:
    """Return a count of donors: a whole number, or a share of those available; at least 1 and at most all.

    >>> [how_many(count, 10) for count in (None, 3, 99, 0.5, 0.01)]
    [10, 3, 10, 5, 1]
    """
    if count is None:
        return available
    wanted = int(count * available) if isinstance(count, float) else count
    return min(max(1, wanted), available)


def check_count(count: Count) -> Count:
    """Return the count, or raise `ParameterError`."""
    share = isinstance(count, float)
    if count is not None and (isinstance(count, bool) or count <= 0 or (share and count > 1)):
        raise ParameterError(
            f"count={count!r}: give a whole number above 0, a share in (0, 1] or None for all"
        )
    return count


@dataclass(frozen=True, slots=True)
class Uniform:
    """`count` of the candidates, all equally likely, without repetition."""

    count: Count = None

    def __post_init__(self) -> None:
        check_count(self.count)

    def __call__(self, rank: int, candidates: Sequence[Report], rng: np.random.Generator) -> list[int]:
        ranks, wanted = [report.rank for report in candidates], how_many(self.count, len(candidates))
        if wanted == len(ranks):
            return ranks
        return sorted(int(chosen) for chosen in rng.choice(ranks, wanted, replace=False))


@dataclass(frozen=True, slots=True)
class Best:
    """The `count` best candidates; ties go to the higher rank, as they are last to be replaced."""

    count: Count = 1
    mode: Mode = "max"

    def __post_init__(self) -> None:
        check_count(self.count)
        check_mode(self.mode)

    def __call__(self, rank: int, candidates: Sequence[Report], rng: np.random.Generator) -> list[int]:
        order = worst_first(candidates, self.mode)
        return sorted(report.rank for report in order[len(order) - how_many(self.count, len(order)) :])


@dataclass(frozen=True, slots=True)
class ByMetric:
    """`count` candidates drawn without repetition, the better the likelier (softmax of the standardised metric)."""

    count: Count = 1
    mode: Mode = "max"

    def __post_init__(self) -> None:
        check_count(self.count)
        check_mode(self.mode)

    def __call__(self, rank: int, candidates: Sequence[Report], rng: np.random.Generator) -> list[int]:
        chances = softmax_weights([report.metric for report in candidates], self.mode)
        wanted = how_many(self.count, len(candidates))
        ranks = [report.rank for report in candidates]
        return sorted(int(chosen) for chosen in rng.choice(ranks, wanted, replace=False, p=chances))


@dataclass(frozen=True, slots=True)
class Neighbours:
    """At most `count` of the rank's neighbours in a topology (rank → its neighbours), drawn uniformly.

    Where no neighbour may give, the best candidate of all does: a replaced rank never ends up with nothing.
    """

    topology: Mapping[int, Sequence[int]]
    count: Count = None
    mode: Mode = "max"

    def __post_init__(self) -> None:
        check_count(self.count)
        check_mode(self.mode)

    def __call__(self, rank: int, candidates: Sequence[Report], rng: np.random.Generator) -> list[int]:
        near = set(self.topology.get(rank, ()))
        close = [report for report in candidates if report.rank in near]
        if not close:
            return Best(1, self.mode)(rank, candidates, rng)
        return Uniform(self.count)(rank, close, rng)


def usual(strategy: str, mode: Mode, most: int | None) -> DonorRule:
    """Return the donors that a strategy has where none are named: for "best_only" the best alone, else `most`.

    "best_only" means the best of all, so one rank gives to all that are replaced in a round: it packs its model once,
    and its network card sends it as often as there are replaced ranks. A number of donors with "best_only" takes the
    best of so many drawn at random, which spreads that load. `most` drawn at random (None: all candidates) keeps the
    traffic of a round, and the memory of a replaced rank, from growing with the square of the group.
    """
    return Best(1, mode) if strategy == "best_only" else Uniform(most)
