"""The algorithms of each operation, and the choice among them: by size, as an MPI library decides, or by name.

Thresholds in bytes, re-stated from the libraries' own documents:

* MPICH: R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19 (2005) 49-66, and the defaults of its control variables
  MPIR_CVAR_{ALLREDUCE,REDUCE}_SHORT_MSG_SIZE (2048), BCAST_{SHORT 12288, LONG 524288}_MSG_SIZE, BCAST_MIN_PROCS (8),
  ALLGATHER_{SHORT 81920, LONG 524288}_MSG_SIZE, ALLTOALL_{SHORT 256, MEDIUM 32768}_MSG_SIZE,
  REDSCAT_COMMUTATIVE_LONG_MSG_SIZE (524288). Without its node-aware layer: select "two_level" by name.
* gloo: allreduce.cc and its neighbours, as torch calls them. Its reduce is replaced by the nearest one here,
  rabenseifner.
* NCCL: see `nccl`. Operations that NCCL lacks run MPICH's algorithms.
* Open MPI: the fixed decision rules of coll/tuned up to release 4.0 (coll_tuned_decision_fixed.c). Three of its
  algorithms are replaced by the nearest one here: split binary tree bcast by scatter_ring, pipelined reduce
  by rabenseifner, neighbour-exchange allgather by ring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.models.collectives import algorithms
from spawnsim.models.collectives.nccl import Nccl
from spawnsim.models.collectives.schedule import Schedule

Builder = Callable[[int], Schedule]

_ALLREDUCE: dict[str, Builder] = {
    "recursive_doubling": algorithms.recursive_doubling_allreduce,
    "ring": algorithms.ring_allreduce,
    "rabenseifner": algorithms.rabenseifner_allreduce,
    "reduce_bcast": algorithms.reduce_then_bcast,
}
_SCAN: dict[str, Builder] = {"recursive_doubling": algorithms.doubling_scan, "linear": algorithms.linear_scan}

ALGORITHMS: Mapping[str, Mapping[str, Builder]] = MappingProxyType(
    {
        "barrier": {"dissemination": algorithms.dissemination_barrier, "tree": algorithms.tree_barrier},
        "bcast": {
            "binomial": algorithms.binomial_bcast,
            "linear": algorithms.linear_bcast,
            "scatter_ring": lambda size: algorithms.ring_after_scatter(
                size, algorithms.binomial_scatter(size)
            ),
            "scatter_doubling": lambda size: algorithms.doubling_after_scatter(
                size, algorithms.binomial_scatter(size)
            ),
        },
        "reduce": {
            "binomial": algorithms.binomial_reduce,
            "linear": algorithms.linear_reduce,
            "rabenseifner": algorithms.rabenseifner_reduce,
        },
        "allreduce": _ALLREDUCE,
        "gather": {"binomial": algorithms.binomial_gather, "linear": algorithms.linear_gather},
        "scatter": {"binomial": algorithms.binomial_scatter, "linear": algorithms.linear_scatter},
        "allgather": {
            "ring": algorithms.ring_allgather,
            "recursive_doubling": algorithms.doubling_allgather,
            "bruck": algorithms.bruck_allgather,
        },
        "alltoall": {
            "pairwise": algorithms.pairwise_alltoall,
            "linear": algorithms.linear_alltoall,
            "bruck": algorithms.bruck_alltoall,
        },
        "reduce_scatter": {
            "recursive_halving": algorithms.halving_reduce_scatter,
            "pairwise": algorithms.pairwise_reduce_scatter,
            "ring": algorithms.ring_reduce_scatter,
        },
        "scan": _SCAN,
        "exscan": _SCAN,
    }
)
"""Operation -> algorithm -> builder from the number of ranks. Besides these: bcast "chain", allreduce "segmented_ring"
(of segments of at most 1 MiB, and at least two in each block, as in gloo), "double_tree" and "two_level"
(also "two_level:ring" and so on, naming the algorithm among the leaders), and the neighbour exchange."""

SYNCHRONISING = frozenset({"barrier", "allreduce", "allgather", "alltoall", "reduce_scatter"})
"""Operations in which every rank waits for every other rank."""


OWN_BLOCK = frozenset({"gather", "scatter", "allgather", "alltoall"})
"""Operations in which ranks (with a root, the root alone) copy their own block."""


def names(operation: str) -> tuple[str, ...]:
    """Return the names of an operation's algorithms."""
    special = {
        "bcast": ("chain",), "allreduce": ("two_level", "segmented_ring", "double_tree"), "neighbor": ("linear",),
    }  # fmt: skip
    return (*ALGORITHMS.get(operation, {}), *special.get(operation, ()))


def check(operation: str, algorithm: str) -> str:
    """Return the name of an algorithm, or raise `ParameterError` if the operation lacks it."""
    known = names(operation)
    if not known:
        raise ParameterError(
            f"no collective is called {operation!r}: there are {', '.join(ALGORITHMS)}, neighbor"
        )
    if algorithm.partition(":")[0] not in known:
        raise ParameterError(f"{operation} has no algorithm {algorithm!r}: choose one of {', '.join(known)}")
    return algorithm


@lru_cache(maxsize=256)
def schedule(operation: str, algorithm: str, size: int) -> Schedule:
    """Return the schedule of a named algorithm among `size` ranks, with rank 0 as the root."""
    check(operation, algorithm)
    if algorithm not in ALGORITHMS.get(operation, {}):
        raise ParameterError(f"{operation} {algorithm!r} cannot be laid out from the number of ranks alone")
    return ALGORITHMS[operation][algorithm](size)


@lru_cache(maxsize=64)
def chain(size: int, segments: int) -> Schedule:
    """Return the pipelined chain broadcast in `segments` segments."""
    return algorithms.chain_bcast(size, segments)


@lru_cache(maxsize=64)
def segmented_ring(size: int, segments: int) -> Schedule:
    """Return the ring allreduce whose blocks travel in `segments` segments."""
    return algorithms.segmented_ring_allreduce(size, segments)


@lru_cache(maxsize=64)
def double_tree(size: int, segments: int) -> Schedule:
    """Return the double binary tree, each half of the vector in `segments` segments."""
    return algorithms.double_tree_allreduce(size, segments)


@lru_cache(maxsize=64)
def two_level(places: bytes, inner: str) -> Schedule:
    """Return the two-level allreduce; `places` are the ranks' nodes, the bytes of an int64 array."""
    nodes = np.frombuffer(places, np.int64)
    return algorithms.two_level_allreduce(nodes, schedule("allreduce", inner, len(np.unique(nodes))))


@lru_cache(maxsize=64)
def neighbours(size: int, source: bytes, dest: bytes) -> Schedule:
    """Return the neighbour exchange along these edges, the bytes of two int64 arrays."""
    return algorithms.neighbour_exchange(size, np.frombuffer(source, np.int64), np.frombuffer(dest, np.int64))


class CallSize(NamedTuple):
    """The inputs of a decision. `block` is the mean block in bytes, or the vector if there are no blocks."""

    size: int
    block: int
    equal: bool = True

    @property
    def total(self) -> int:
        return self.block * self.size

    @property
    def power(self) -> bool:
        return self.size & (self.size - 1) == 0


def _mpich_bcast(call: CallSize) -> str:
    if call.block < 12288 or call.size < 8:
        return "binomial"
    return "scatter_doubling" if call.block < 524288 and call.power else "scatter_ring"


def _mpich_allgather(call: CallSize) -> str:
    if call.total < 524288 and call.power:
        return "recursive_doubling"
    return "bruck" if call.total < 81920 else "ring"


def _mpich_alltoall(call: CallSize) -> str:
    if not call.equal:
        return "linear"
    if call.block <= 256 and call.size >= 8:
        return "bruck"
    return "linear" if call.block <= 32768 else "pairwise"


_MPICH: dict[str, Callable[[CallSize], str]] = {
    "barrier": lambda call: "dissemination",
    "bcast": _mpich_bcast,
    "reduce": lambda call: "binomial" if call.block <= 2048 else "rabenseifner",
    "allreduce": lambda call: "recursive_doubling" if call.block <= 2048 else "rabenseifner",
    "gather": lambda call: "binomial" if call.equal else "linear",
    "scatter": lambda call: "binomial" if call.equal else "linear",
    "allgather": _mpich_allgather,
    "alltoall": _mpich_alltoall,
    "reduce_scatter": lambda call: "recursive_halving" if call.total < 524288 else "pairwise",
    "scan": lambda call: "recursive_doubling",
    "exscan": lambda call: "recursive_doubling",
    "neighbor": lambda call: "linear",
}


def _openmpi_bcast(call: CallSize) -> str:
    if call.block < 2048:
        return "binomial"
    return (
        "chain"
        if call.block >= 370728 and (call.size < 1.6134e-6 * call.block + 2.1102 or call.size >= 13)
        else "scatter_ring"
    )


def _openmpi_reduce(call: CallSize) -> str:
    if call.size < 8 and call.block < 512:
        return "linear"
    small = call.block < 2048 or (call.size < 8 and call.block < 20480)
    return "binomial" if small or call.size > 0.6016 / 1024 * call.block + 1.3496 else "rabenseifner"


def _openmpi_alltoall(call: CallSize) -> str:
    if not call.equal:
        return "pairwise"
    if call.block < 200 and call.size > 12:
        return "bruck"
    return "linear" if call.block < 3000 else "pairwise"


def _openmpi_gather(call: CallSize) -> str:
    if not call.equal or call.block > 6000:
        return "linear"
    return "binomial" if call.size > 60 or (call.size > 10 and call.block < 1024) else "linear"


def _openmpi_allgather(call: CallSize) -> str:
    if call.total >= 50000:
        return "ring"
    return "recursive_doubling" if call.power and call.equal else "bruck"


def _openmpi_reduce_scatter(call: CallSize) -> str:
    total = call.total
    few = total <= 12288 or (total <= 262144 and call.power) or call.size >= 0.0012 * total + 8.0
    return "recursive_halving" if few else "ring"


_OPENMPI: dict[str, Callable[[CallSize], str]] = {
    "barrier": lambda call: "dissemination",
    "bcast": _openmpi_bcast,
    "reduce": _openmpi_reduce,
    "allreduce": lambda call: "recursive_doubling" if call.block < 10000 else "ring",
    "gather": _openmpi_gather,
    "scatter": lambda call: "binomial" if call.equal and call.block < 300 and call.size > 10 else "linear",
    "allgather": _openmpi_allgather,
    "alltoall": _openmpi_alltoall,
    "reduce_scatter": _openmpi_reduce_scatter,
    "scan": lambda call: "linear",
    "exscan": lambda call: "linear",
    "neighbor": lambda call: "linear",
}
_GLOO: dict[str, Callable[[CallSize], str]] = _MPICH | {
    "allreduce": lambda call: "segmented_ring",
    "allgather": lambda call: "ring",
    "bcast": lambda call: "binomial",
    "reduce": lambda call: "rabenseifner",
    "gather": lambda call: "linear",
    "scatter": lambda call: "linear",
    "alltoall": lambda call: "linear",
    "reduce_scatter": lambda call: "recursive_halving",
}
_LIBRARIES = {"mpich": _MPICH, "openmpi": _OPENMPI, "gloo": _GLOO, "nccl": _MPICH}


@dataclass(frozen=True)
class Selection:
    """Which algorithm runs.

    Args:
        library: "mpich", "openmpi", "gloo" or "nccl": the library whose thresholds decide.
        fixed: (operation, algorithm) pairs of fixed choices.
        segment_bytes: Length of the segments of the pipelined chain and of the double tree.
        nccl: The machine as NCCL sees it; None unless the library is "nccl".

    Raises:
        ParameterError: An unknown library, operation or algorithm, or NCCL without its machine.
    """

    library: str = "mpich"
    fixed: tuple[tuple[str, str], ...] = ()
    segment_bytes: int = 65536
    nccl: Nccl | None = None

    def __post_init__(self) -> None:
        if self.library not in _LIBRARIES:
            raise ParameterError(f"library={self.library!r}: choose one of {', '.join(_LIBRARIES)}")
        if self.segment_bytes < 1:
            raise ParameterError(f"segment_bytes={self.segment_bytes}: give at least 1")
        if (self.library == "nccl") != (self.nccl is not None):
            raise ParameterError(
                f"library={self.library!r}: the library nccl, and no other, needs the machine: give a platform file "
                "with [collectives.nccl] and its bus"
            )
        for operation, algorithm in self.fixed:
            check(operation, algorithm)

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Read "openmpi", "allreduce=ring, bcast=chain", or "ring": that algorithm wherever it exists.

        >>> Selection.parse("openmpi, allreduce=two_level").fixed
        (('allreduce', 'two_level'),)
        """
        library, fixed = "mpich", []
        for word in filter(None, (part.strip() for part in text.split(","))):
            operation, given, algorithm = word.partition("=")
            if given:
                fixed.append((operation.strip(), algorithm.strip()))
            elif word in _LIBRARIES:
                library = word
            else:
                fixed += _everywhere(word)
        return cls(library, tuple(fixed))

    def algorithm(self, operation: str, call: CallSize) -> str:
        """Return the name of the algorithm for a call."""
        rules: Mapping[str, Callable[[CallSize], str]] = _LIBRARIES[self.library]
        named = dict(self.fixed).get(operation)
        return named if named else rules[operation](call)


def _everywhere(algorithm: str) -> list[tuple[str, str]]:
    """Return the operations that have an algorithm of this name."""
    head = algorithm.partition(":")[0]
    found = [(operation, algorithm) for operation in _MPICH if head in names(operation)]
    if not found:
        raise ParameterError(f"no library and no algorithm is called {algorithm!r}")
    return found
