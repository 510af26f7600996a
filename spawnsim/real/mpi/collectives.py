"""Collective calls on MPI: the library's own blocking calls, counted, and watched from outside.

They are not rebuilt from non-blocking ones, because then sums would be taken in another order. Knows names of
collectives and the watchdog's table; how buffers are spelled is mpi4py's business.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from mpi4py import MPI

from spawnsim.comm.ops import SUM, Op
from spawnsim.real.mpi.fingerprints import check
from spawnsim.real.mpi.leavable import leavable, making
from spawnsim.real.mpi.node import LARGE_NBYTES, Array, Library, Node, arrays
from spawnsim.real.mpi.words import failure, peer
from spawnsim.real.rank.ordered import ordered_allreduce

if TYPE_CHECKING:
    from spawnsim.real.mpi.comm import MPIComm
    from spawnsim.real.mpi.home import Home
    from spawnsim.real.rank.staging import Stage

BUFFER = (
    "Barrier", "Bcast", "Gather", "Gatherv", "Scatter", "Scatterv", "Allgather", "Allgatherv", "Alltoall",
    "Alltoallv", "Alltoallw", "Reduce", "Reduce_scatter", "Reduce_scatter_block", "Scan", "Exscan",
    "Neighbor_allgather", "Neighbor_allgatherv", "Neighbor_alltoall", "Neighbor_alltoallv", "Neighbor_alltoallw",
)  # fmt: skip
OBJECT = (
    "barrier", "bcast", "gather", "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan",
    "neighbor_allgather", "neighbor_alltoall",
)  # fmt: skip
MAKERS = (
    "Dup", "Clone", "Split", "Split_type", "Create", "Create_group", "Create_cart", "Create_graph",
    "Create_dist_graph", "Create_dist_graph_adjacent", "Sub", "Dup_with_info", "Shrink",
)  # fmt: skip
ONE_WAY = {"Bcast", "bcast", "Scatter", "scatter", "Scatterv"}
"""A root of these may only send, and a rank that only sends never notices a death: it polls afterwards."""


def _method(operation: str, *, objects: bool) -> Callable[..., Any]:
    """Return the method for one collective."""
    one_way = operation in ONE_WAY

    def call(self: Collectives, *args: Any, **kwargs: Any) -> Any:
        home = self._home
        translate = home.words.op if objects else home.words
        if args:
            args = tuple([translate(value) for value in args])
        if kwargs:
            kwargs = {key: translate(value) for key, value in kwargs.items()}
        result = self._watched(operation, args, kwargs)
        if one_way:
            home.poll()
        return result

    call.__name__ = call.__qualname__ = operation
    call.__doc__ = f"mpi4py's `{operation}`, bounded by the deadline."
    return call


class Collectives:
    """All collectives; the table above makes the methods."""

    _raw: MPI.Intracomm
    _home: Home
    _sequence: int
    _node: Node | Library | None  # how large sums go, once one has gone
    _shares: bool  # whether shared memory is a way at all
    _inter: bool  # only between groups can a root be ROOT or PROC_NULL
    label: str
    rank: int
    members: tuple[int, ...]

    def _watched(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the raw call while the watchdog knows of it; where arguments are GPU tensors, on main memory."""
        stage = self._staged(operation, args, kwargs) if self._home.words.devices else None
        if stage is None:
            return self._called(operation, args, kwargs)
        self._called(operation, stage.args, stage.kwargs)
        stage.end()
        return None

    def _called(
        self,
        operation: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        function: Callable[..., Any] | None = None,
    ) -> Any:
        """Make the raw call, or `function` of the raw communicator, while the watchdog knows of it."""
        home = self._home
        if self._inter:
            args = tuple([peer(value) if type(value) is int else value for value in args])
            kwargs = {key: peer(value) if key == "root" else value for key, value in kwargs.items()}
        self._sequence += 1
        home.tally.part(operation, args, kwargs, self.rank)
        if home.leavable:
            comm = cast("MPIComm", self)
            if operation in MAKERS:
                call = partial(getattr(self._raw, operation), *args, **kwargs)
                return making(comm, operation, call, meeting=operation != "Create_group")
            return function(self, *args) if function else leavable(comm, operation, args, kwargs)
        watchdog, thread = home.watchdog, get_ident()
        active = watchdog.active
        active[thread] = (operation, self._sequence, self, perf_counter(), home.clock.limit_s())
        try:
            if home.fingerprints:
                check(self._raw, operation, self._sequence, args, kwargs=kwargs)
            if function is None:
                return getattr(self._raw, operation)(*args, **kwargs)
            return function(self._raw, *args)
        except MPI.Exception as error:
            what = f"rank {self._raw.Get_rank()} of {self.label}: {operation} number {self._sequence}"
            raise failure(error, self._raw, what) from None
        finally:
            watchdog.last = active.pop(thread, None)

    def _staged(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stage | None:
        """Return main memory for GPU tensors among translated arguments; None if the call can be made as it is."""
        rank, direct = None if self._inter else self.rank, not self._home.leavable
        return self._home.words.stage(self._raw, operation, args, kwargs, rank=rank, direct=direct)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> None:
        """mpi4py's `Allreduce`, bounded by the deadline; summed in rank order with `reduction="ordered"`.

        Large sums among ranks of one node go through memory that they share, in the order of the library's own.
        """
        home = self._home
        words = home.words
        args = words(sendbuf), words(recvbuf), words(op)
        stage = self._staged("Allreduce", (sendbuf, recvbuf, op), {}) if words.devices else None
        if stage is not None:  # from here on all ranks must go the same way, wherever each one's memory lies
            self.Allreduce(*stage.args)
            stage.end()
            return
        if home.ordered and isinstance(op, Op):
            self._called("Allreduce", (sendbuf, recvbuf, op), {}, ordered_allreduce)
            return
        if self._shares and getattr(recvbuf, "nbytes", LARGE_NBYTES) >= LARGE_NBYTES and args[2] == MPI.SUM:
            large = arrays(*args[:2])
            if large is not None:
                self._called("Allreduce", args, {}, partial(self._on_node, large))
                return
        self._called("Allreduce", args, {})

    def _on_node(self, large: tuple[Array, Array], raw: MPI.Intracomm, *_: Any) -> None:
        if self._node is None:
            self._node = Node.of(raw, self._home)
        self._node.allreduce(*large)


for _name in BUFFER:
    setattr(Collectives, _name, _method(_name, objects=False))
for _name in OBJECT:
    setattr(Collectives, _name, _method(_name, objects=True))

__all__ = ["MAKERS", "Collectives"]
