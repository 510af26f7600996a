"""Which algorithms there are for which operation.

This room knows names. It must not know sizes in bytes, networks or times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.virtual.collectives import doubling, levels, rings, trees
from spawnsim.virtual.collectives.schedule import Schedule

Builder = Callable[[int], Schedule]

_ALLREDUCE: dict[str, Builder] = {
    "recursive_doubling": doubling.recursive_doubling_allreduce,
    "ring": rings.ring_allreduce,
    "rabenseifner": doubling.rabenseifner_allreduce,
    "reduce_bcast": trees.reduce_then_bcast,
}
_SCAN: dict[str, Builder] = {"recursive_doubling": doubling.doubling_scan, "linear": rings.linear_scan}

ALGORITHMS: Mapping[str, Mapping[str, Builder]] = MappingProxyType(
    {
        "barrier": {"dissemination": doubling.dissemination_barrier, "tree": trees.tree_barrier},
        "bcast": {
            "binomial": trees.binomial_bcast,
            "linear": trees.linear_bcast,
            "scatter_ring": lambda size: rings.ring_after_scatter(size, trees.binomial_scatter(size)),
            "scatter_doubling": lambda size: doubling.doubling_after_scatter(
                size, trees.binomial_scatter(size)
            ),
        },
        "reduce": {
            "binomial": trees.binomial_reduce,
            "linear": trees.linear_reduce,
            "rabenseifner": doubling.rabenseifner_reduce,
        },
        "allreduce": _ALLREDUCE,
        "gather": {"binomial": trees.binomial_gather, "linear": trees.linear_gather},
        "scatter": {"binomial": trees.binomial_scatter, "linear": trees.linear_scatter},
        "allgather": {
            "ring": rings.ring_allgather,
            "recursive_doubling": doubling.doubling_allgather,
            "bruck": doubling.bruck_allgather,
        },
        "alltoall": {
            "pairwise": rings.pairwise_alltoall,
            "linear": rings.linear_alltoall,
            "bruck": doubling.bruck_alltoall,
        },
        "reduce_scatter": {
            "recursive_halving": doubling.halving_reduce_scatter,
            "pairwise": rings.pairwise_reduce_scatter,
            "ring": rings.ring_reduce_scatter,
        },
        "scan": _SCAN,
        "exscan": _SCAN,
    }
)
"""Operation -> algorithm -> builder from the number of ranks. Besides these: bcast "chain", allreduce "two_level"
(also "two_level:ring" and so on, naming the algorithm among the leaders), and the neighbour exchange."""

SYNCHRONISING = frozenset({"barrier", "allreduce", "allgather", "alltoall", "reduce_scatter"})
"""Operations whose every rank waits for every other."""


def names(operation: str) -> tuple[str, ...]:
    """Return the names of an operation's algorithms."""
    special = {"bcast": ("chain",), "allreduce": ("two_level",), "neighbor": ("linear",)}
    return (*ALGORITHMS.get(operation, {}), *special.get(operation, ()))


def check(operation: str, algorithm: str) -> str:
    """Return the name of an algorithm, or raise `ParameterError` if there is none of that name."""
    known = names(operation)
    if not known:
        raise ParameterError(
            f"no collective is called {operation!r}: there are {', '.join(ALGORITHMS)}, neighbor"
        )
    if algorithm.partition(":")[0] not in known:
        raise ParameterError(
            f"{operation} knows no algorithm {algorithm!r}: choose one of {', '.join(known)}"
        )
    return algorithm


@lru_cache(maxsize=256)
def schedule(operation: str, algorithm: str, size: int) -> Schedule:
    """Return the schedule of a named algorithm among `size` ranks, the root being rank 0."""
    check(operation, algorithm)
    if algorithm not in ALGORITHMS.get(operation, {}):
        raise ParameterError(f"{operation} {algorithm!r} needs more than the number of ranks to be laid out")
    return ALGORITHMS[operation][algorithm](size)


@lru_cache(maxsize=64)
def chain(size: int, segments: int) -> Schedule:
    """Return the pipelined chain broadcast in so many segments."""
    return trees.chain_bcast(size, segments)


@lru_cache(maxsize=64)
def two_level(places: bytes, inner: str) -> Schedule:
    """Return the two-level allreduce; `places` are the ranks' nodes, the bytes of an int64 array."""
    nodes = np.frombuffer(places, np.int64)
    return levels.two_level_allreduce(nodes, schedule("allreduce", inner, len(np.unique(nodes))))


@lru_cache(maxsize=64)
def neighbours(size: int, source: bytes, dest: bytes) -> Schedule:
    """Return the neighbour exchange along these edges, the bytes of two int64 arrays."""
    return levels.neighbour_exchange(size, np.frombuffer(source, np.int64), np.frombuffer(dest, np.int64))
