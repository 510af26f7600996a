"""When a collective completes for each rank, and which ranks depend on which: the interface for the kernel.

A `CollectivePlan` is one collective of a group in executable form: algorithm, schedule, lengths, root. A `Planner`
chooses the algorithm and builds the plan. A `Timing` also caches results, so that ranks that arrive together leave
alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError
from spawnsim.models.collectives import catalogue
from spawnsim.models.collectives.catalogue import CallSize, Selection
from spawnsim.models.collectives.dataflow import Finish, run
from spawnsim.models.collectives.faulty import Judge, Struck, run_struck
from spawnsim.models.collectives.nccl import OPERATIONS
from spawnsim.models.collectives.schedule import MessageSizes, Schedule, Sizes
from spawnsim.models.network.cost import Floats, Ints, Network


@dataclass(frozen=True, eq=False)
class CollectivePlan:
    """One collective of a group: an algorithm, its schedule, the lengths of its messages, its root.

    Attributes:
        operation: "allreduce" and so on.
        algorithm: "ring" and so on.
        schedule: Its rounds, in ranks relative to the root.
        amounts: The lengths of its messages.
        root: The root's rank in the group; 0 without a root.
        seconds: How long it takes once all ranks have arrived, if that does not follow from its messages (NCCL).
    """

    operation: str
    algorithm: str
    schedule: Schedule
    amounts: MessageSizes
    root: int = 0
    seconds: float | None = None

    def depends(self, rank: int) -> frozenset[int] | None:
        """Return the ranks on whose arrival the departure of `rank` depends; None stands for all."""
        return _dependencies(self.operation, self.schedule, self.root, rank)

    def free_to_leave(self, here: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the ranks whose departure depends only on ranks that are `here`, bool (P,), in group order."""
        if self.operation in catalogue.SYNCHRONISING:
            return np.full(len(here), bool(here.all()))
        return np.roll(self.schedule.free_to_leave(np.roll(here, -self.root)), self.root)

    def finish(
        self,
        arrivals: Floats,
        network: Network,
        ranks: Ints | None = None,
        *,
        out_free: Floats | None = None,
    ) -> Finish:
        """Return when each rank leaves; an absent rank is NaN (see `finish`)."""
        if self.seconds is not None:
            return self._after_all(arrivals, out_free)
        world = np.arange(self.schedule.size) if ranks is None and self.root else ranks
        turned, world, free = self._from_root(arrivals, world, out_free)
        found = run(self.schedule, self.amounts, turned, network, ranks=world, out_free=free)
        return self._in_group(self._with_copies(found, network))

    def struck(
        self,
        arrivals: Floats,
        network: Network,
        ranks: Ints,
        *,
        judge: Judge,
        out_free: Floats | None = None,
    ) -> Struck:
        """Return when each rank leaves, and the effects of the faults that `judge` knows.

        Its times are in the order of the group; its other ranks are relative to the root. If faults strike messages of
        a collective of known duration, its messages determine its times.
        """
        turned, world, free = self._from_root(arrivals, ranks, out_free)
        found = run_struck(
            self.schedule, self.amounts, turned, network, ranks=world, judge=judge, out_free=free
        )
        if self.seconds is not None and not found.strikes:
            return found._replace(finish=self._after_all(arrivals, out_free))
        return found._replace(finish=self._in_group(self._with_copies(found.finish, network)))

    def _after_all(self, arrivals: Floats, out_free: Floats | None) -> Finish:
        """Return when each rank leaves a collective of known duration: `seconds` after the last arrival."""
        assert self.seconds is not None
        times = np.full(len(arrivals), arrivals.max(initial=-np.inf) + self.seconds)  # NaN if one is NaN
        free = np.full(len(arrivals), -np.inf) if out_free is None else out_free
        lanes = [lane for each in self.schedule.rounds for lane in each.lanes]
        sizes = [np.broadcast_to(self.amounts.of(lane), len(lane.pattern.source)) for lane in lanes]
        return Finish(times, sum(map(len, sizes)), round(sum(float(each.sum()) for each in sizes)), free)

    def _with_copies(self, found: Finish, network: Network) -> Finish:
        """Let ranks copy their own blocks, between two buffers of the caller."""
        if not network.copy_s_per_B or self.operation not in catalogue.OWN_BLOCK:
            return found
        nbytes = self.amounts.own(0 if self.operation in ("gather", "scatter") else None)
        return found._replace(times=found.times + np.multiply(nbytes, network.copy_s_per_B))

    def _from_root(self, *values: Any) -> Any:
        """Return vectors in the order of the group from the root on; None stays None."""
        return [v if v is None or not self.root else np.roll(v, -self.root) for v in values]

    def _in_group(self, found: Finish) -> Finish:
        root = self.root
        if not root:
            return found
        return found._replace(times=np.roll(found.times, root), out_free=np.roll(found.out_free, root))


def _dependencies(operation: str, schedule: Schedule, root: int, rank: int) -> frozenset[int] | None:
    """Return the ranks on whose arrival the departure of `rank` depends; None stands for all."""
    if operation in catalogue.SYNCHRONISING:
        return None
    known = schedule.depends((rank - root) % schedule.size)
    if known is None or not root:
        return known
    return frozenset((other + root) % schedule.size for other in known)


class Edges(NamedTuple):
    """The sizes of a neighbour exchange: edge i carries nbytes[i] from source[i] to dest[i] (ranks of the group)."""

    source: Ints
    dest: Ints
    nbytes: Ints | int


GLOO_SEGMENT = 1 << 20  # bytes
_BLOCKED = {"gather", "scatter", "allgather", "alltoall", "reduce_scatter"}


@cache
def base_name(operation: str) -> str:
    """Return the base operation of a variant: "alltoallv" is an alltoall.

    >>> base_name("gatherv"), base_name("reduce_scatter_block"), base_name("neighbor_alltoallv")
    ('gather', 'reduce_scatter', 'neighbor')
    """
    name = operation.lower()
    if name.startswith("neighbor"):
        return "neighbor"
    name = name.removesuffix("_block")
    trimmed = name.removesuffix("w").removesuffix("v")
    name = trimmed if trimmed in _BLOCKED else name
    if not catalogue.names(name):
        raise ParameterError(f"no collective is called {operation!r}")
    return name


def _even(sizes: Sizes | Edges) -> Sizes | Edges:
    if isinstance(sizes, np.ndarray) and sizes.size and (sizes == sizes.flat[0]).all():
        return int(sizes.flat[0])
    return sizes


def _call(operation: str, size: int, sizes: Sizes | Edges) -> CallSize:
    if isinstance(sizes, Edges):
        return CallSize(size, 0)
    # The algorithm of a gather must not depend on the lengths: its ranks leave before all of these are known.
    known = operation.lower() != "gatherv"
    if not isinstance(sizes, np.ndarray):
        return CallSize(size, int(sizes), equal=known)
    equal = known and bool((sizes == sizes.flat[:1]).all())
    return CallSize(size, int(sizes.mean()) if sizes.size else 0, equal=equal)


class Planner:
    """Chooses algorithms and builds plans.

    Args:
        network: The costs of messages, and each rank's node.
        selection: The choice of algorithms; MPICH's choice if None.
    """

    def __init__(self, network: Network, selection: Selection | None = None) -> None:
        self.network, self.selection = network, selection or Selection()

    def plan(
        self,
        operation: str,
        size: int,
        sizes: Sizes | Edges,
        root: int = 0,
        *,
        ranks: Ints | None = None,
        dtype: str = "",
    ) -> CollectivePlan:
        """Return the plan of one collective among `size` ranks.

        Args:
            operation: "barrier", "bcast", "allreduce", …, "alltoallv", "neighbor".
            size: Number of ranks in the group.
            sizes: Bytes: see `schedule`; `Edges` for a neighbour exchange.
            root: The root's rank in the group.
            ranks: World ranks of the members, int (P,); None if they are 0 to P-1.
            dtype: Name of the elements' type, for the speed of reductions; "" if it is not known.
        """
        name = base_name(operation)
        sizes = 0 if name == "barrier" else sizes
        if self._nccl(name) and not isinstance(sizes, Edges):
            return self._nccl_plan(name, size, sizes, ranks=ranks)
        algorithm = self.selection.algorithm(name, _call(operation, size, sizes))
        schedule = self._schedule(name, algorithm, sizes, size=size, ranks=ranks)
        nbytes = sizes.nbytes if isinstance(sizes, Edges) else sizes
        if root and isinstance(nbytes, np.ndarray):
            nbytes = np.roll(nbytes, -root)
        return CollectivePlan(name, algorithm, schedule, MessageSizes(schedule, nbytes, dtype), root)

    def _nccl(self, name: str) -> bool:
        """Return whether NCCL runs this operation."""
        selection = self.selection
        return selection.nccl is not None and name in OPERATIONS and name not in dict(selection.fixed)

    def _nccl_plan(self, name: str, size: int, sizes: Sizes, *, ranks: Ints | None) -> CollectivePlan:
        """Return the plan of one of NCCL's collectives: its duration, and the traffic of its ring or tree."""
        machine = self.selection.nccl
        assert machine is not None
        if self.network.contention == "fair":
            raise ParameterError('contention="fair": NCCL\'s collectives do not share links: use "serial"')
        nodes = len(np.unique(self.network.place(np.arange(size) if ranks is None else ranks)))
        blocks = 1 if name == "allreduce" else size
        total = int(sizes.sum()) if isinstance(sizes, np.ndarray) else int(sizes) * blocks
        chosen = machine.choice(name, total, ranks=size, nodes=nodes) if size > 1 else None
        seconds = machine.seconds(name, total, ranks=size, nodes=nodes)
        algorithm = "ring" if chosen is None else chosen.algorithm
        tree = algorithm == "tree"
        schedule = catalogue.double_tree(size, 1) if tree else catalogue.schedule(name, "ring", size)
        known = f"nccl {algorithm}" if chosen is None else f"nccl {algorithm} {chosen.protocol}"
        return CollectivePlan(name, known, schedule, MessageSizes(schedule, sizes), seconds=seconds)

    def _schedule(
        self, name: str, algorithm: str, sizes: Sizes | Edges, *, size: int, ranks: Ints | None
    ) -> Schedule:
        if isinstance(sizes, Edges):
            return catalogue.neighbours(size, _frozen(sizes.source), _frozen(sizes.dest))
        if algorithm == "chain":
            return catalogue.chain(size, max(1, -(-int(sizes) // self.selection.segment_bytes)))
        if algorithm == "double_tree":
            return catalogue.double_tree(size, max(1, -(-int(sizes) // (2 * self.selection.segment_bytes))))
        if algorithm == "segmented_ring":
            return catalogue.segmented_ring(size, max(2, -(-int(sizes) // (size * GLOO_SEGMENT))))
        if algorithm.startswith("two_level"):
            places = self.network.place(np.arange(size) if ranks is None else ranks)
            return catalogue.two_level(_frozen(places), algorithm.partition(":")[2] or "recursive_doubling")
        return catalogue.schedule(name, algorithm, size)


def _frozen(values: Ints) -> bytes:
    return np.ascontiguousarray(values, np.int64).tobytes()


class Timing(Planner):
    """A planner with a cache: ranks that arrive together on the same call leave alike.

    If all ranks arrive at one time t, and each waits for all, the leaving times are t plus those for an arrival at 0,
    which are computed once.
    """

    _ROOM = 1024  # cached collectives; a program with more variants pays for each of them again

    def __init__(self, network: Network, selection: Selection | None = None) -> None:
        super().__init__(network, selection)
        self._known: dict[tuple[str, int, int, int, bytes, str], Finish] = {}

    def finish(
        self,
        operation: str,
        arrivals: Floats,
        sizes: Sizes | Edges,
        root: int = 0,
        *,
        ranks: Ints | None = None,
        out_free: Floats | None = None,
        dtype: str = "",
    ) -> Finish:
        """Return when each rank leaves: see the function `finish`."""
        # Ranks in step, by far the most common case, arrive at one time, and then a collective takes as long as any
        # other of its kind. If the sizes or the states of the NICs differ, equal calls are too rare to be worth a key.
        # If ranks leave early, they may leave before it is known that all arrive together. Their times must not depend
        # on that. Nor may they differ, by the rounding of a sum, from the times of ranks that leave when all have
        # arrived.
        size, sizes = len(arrivals), _even(sizes)
        together = out_free is None and size and (arrivals == arrivals[0]).all()
        together = together and base_name(operation) in catalogue.SYNCHRONISING
        if self.network.changes or not together or isinstance(sizes, (np.ndarray, Edges)):
            plan = self.plan(operation, size, sizes, root, ranks=ranks, dtype=dtype)
            return plan.finish(arrivals, self.network, ranks, out_free=out_free)
        key = (operation, size, int(sizes), root, b"" if ranks is None else ranks.tobytes(), dtype)
        found = self._known.get(key)
        if found is None:
            plan = self.plan(operation, size, sizes, root, ranks=ranks, dtype=dtype)
            found = plan.finish(np.zeros(size), self.network, ranks)
            self._remember(key, found)
        begin_s = arrivals[0]
        return found._replace(times=found.times + begin_s, out_free=found.out_free + begin_s)

    def _remember(self, key: tuple[str, int, int, int, bytes, str], together: Finish) -> None:
        if len(self._known) >= self._ROOM:
            self._known.clear()
        self._known[key] = together


def finish(
    operation: str,
    arrivals: Floats,
    sizes: Sizes | Edges,
    root: int = 0,
    *,
    network: Network,
    ranks: Ints | None = None,
    selection: Selection | None = None,
    out_free: Floats | None = None,
    dtype: str = "",
) -> Finish:
    """Return when each rank completes a collective.

    Args:
        operation: "barrier", "bcast", "reduce", "allreduce", "gather", "scatter", "allgather", "alltoall",
            "reduce_scatter", "scan", "exscan", their v-forms, "neighbor".
        arrivals: When each rank enters, float64 (P,), seconds. NaN for an absent rank: then the times of
            exactly those ranks that depend on it are NaN.
        sizes: Bytes: see `schedule`; `Edges` for a neighbour exchange.
        root: The root's rank in the group.
        network: The costs of messages.
        ranks: World ranks of the members, int (P,); None if they are 0 to P-1.
        selection: The choice of algorithms; MPICH's choice if None.
        out_free: When each rank's NIC can begin to inject, float64 (P,), seconds; None: all are idle.
        dtype: Name of the elements' type, for the speed of reductions; "" if it is not known.

    Raises:
        ParameterError: An unknown operation, or sizes that do not fit it.
    """
    timing = Timing(network, selection)
    return timing.finish(operation, arrivals, sizes, root, ranks=ranks, out_free=out_free, dtype=dtype)


def depends(operation: str, algorithm: str, size: int, root: int = 0, *, rank: int) -> frozenset[int] | None:
    """Return the ranks on whose arrival the departure of `rank` depends; None stands for all."""
    name = base_name(operation)
    schedule = catalogue.chain(size, 1) if algorithm == "chain" else catalogue.schedule(name, algorithm, size)
    return _dependencies(name, schedule, root, rank)
