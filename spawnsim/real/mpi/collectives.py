"""Collective calls on MPI: the library's own blocking calls, counted, and monitored by the watchdog.

They are not derived from non-blocking calls, because these would sum in another order. With `check_calls` all ranks
first check that they are in the same call: both MPIs accept a `Bcast` against an `Allreduce`, and SUM against MAX,
without an error. Large sums among ranks of one node use shared memory: an MPI moves each byte of an Allreduce between
two processes several times; here the minimum is one pass to read and one to write. These sums use the same tree order
as virtual ranks and MPICH, so the bits are the same with and without shared memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.datatypes import NAMED
from spawnsim.comm.ops import SUM, Op, reduce_tree_in_place
from spawnsim.real.mpi.abortable import abortable, make_detached
from spawnsim.real.mpi.runtime import CommCore, MPIRuntime
from spawnsim.real.mpi.translation import parameter_names, peer
from spawnsim.real.runtime.collectives import CallDescription, ordered_allreduce, require_same_call
from spawnsim.real.runtime.services import contribution, nbytes_of

if TYPE_CHECKING:
    from spawnsim.real.runtime.staging import Stage


SAME_SIZE = dict.fromkeys(("Allgather", "Alltoall", "Gather", "Reduce"), "sendbuf") | dict.fromkeys(
    ("Allreduce", "Exscan", "Reduce_scatter_block", "Scan", "Scatter"), "recvbuf"
) | {"Bcast": "buf"}  # fmt: skip
"""The argument that must have the same number of bytes and the same dtype on all ranks."""


def check_call(raw: MPI.Intracomm, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise MismatchError, on all ranks, unless all are in the same collective with the same arguments."""
    kind: Any = type(raw)
    parameters = parameter_names(kind, operation)
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    parts = [operation]
    if "root" in parameters:
        parts.append(f"root {given.get('root', 0)}")
    if "op" in parameters:
        op = given.get("op", MPI.SUM)
        reduced = op.__reduce__() if isinstance(op, MPI.Op) else "a function"
        parts.append(reduced if isinstance(reduced, str) else "a user's op")
    spec = given.get(SAME_SIZE.get(operation, ""))
    if spec is MPI.IN_PLACE and operation == "Reduce":  # its root
        spec = given.get("recvbuf")
    mine = CallDescription(", ".join(parts), *_size_of(spec))
    require_same_call(mine, lambda ends: raw.Allreduce(MPI.IN_PLACE, ends, MPI.MIN), raw.allgather)


def _size_of(spec: Any) -> tuple[int | None, str | None]:
    """Return the bytes of a buffer, and its dtype unless a datatype is given, which may be derived."""
    if spec is None or spec is MPI.IN_PLACE:
        return None, None
    parts = spec if isinstance(spec, (list, tuple)) else [spec]
    plain = not any(isinstance(part, (str, MPI.Datatype)) for part in parts)
    dtype = getattr(parts[0], "dtype", None) if plain else None
    return nbytes_of(spec), None if dtype is None else str(dtype).removeprefix("torch.")


Array = NDArray[Any]
LARGE_NBYTES = 1 << 17
"""From this size on, two barriers cost less than the library's algorithm."""
CHUNK_NBYTES = 1 << 21
"""Bytes per round: small enough to stay in the caches from copy to sum to result, large enough for few barriers."""
SHM_SHARE = 0.25
"""Maximum share of a node's free shared memory: the library needs some too, and a page beyond it kills the process."""


class LibrarySum:
    """Sums by the library, for communicators with ranks on several nodes."""

    def __init__(self, raw: MPI.Intracomm) -> None:
        self._raw = raw

    def allreduce(self, contribution: Array, into: Array) -> None:
        self._raw.Allreduce(MPI.IN_PLACE if contribution is into else contribution, into)

    def free(self) -> None:
        """Do nothing: no resources are held."""


class SharedMemorySum:
    """Sums in shared memory, for a communicator within one node: two halves per rank, used alternately.

    Each chunk takes two barriers: after all ranks have written their contributions, and after each rank has summed its
    slice of all contributions. A single half would need a third barrier, before the next chunk overwrites results that
    other ranks still read. `Sync` before and after each barrier orders stores and loads, as MPI requires in shared
    memory.
    """

    def __init__(self, raw: MPI.Intracomm, runtime: MPIRuntime) -> None:
        self.label, self._runtime = f"{raw.Get_name()}/node{raw.Get_size()}", runtime
        self._raw, self._rank, self._size = raw, raw.Get_rank(), raw.Get_size()
        self._win = MPI.Win.Allocate_shared(2 * CHUNK_NBYTES, 1, comm=raw)
        self._win.Lock_all(MPI.MODE_NOCHECK)
        self._halves = [
            np.asarray(self._win.Shared_query(rank)[0], np.uint8).reshape(2, CHUNK_NBYTES)
            for rank in range(self._size)
        ]
        self._turn = 0
        runtime.windows.append(self)

    @classmethod
    def of(cls, raw: MPI.Intracomm, runtime: MPIRuntime) -> SharedMemorySum | LibrarySum:
        """Return the implementation of large sums for this communicator; collective."""
        return cls(raw, runtime) if _on_one_node(raw) else LibrarySum(raw)

    def allreduce(self, contribution: Array, into: Array) -> None:
        """Write the sum of all contributions to `into`; both flat, of one dtype, and possibly the same memory."""
        step, in_place = CHUNK_NBYTES // contribution.itemsize, contribution is into
        for start in range(0, contribution.size, step):
            piece = slice(start, start + step)
            self._round(contribution[piece], into[piece], in_place=in_place)

    def _round(self, contribution: Array, into: Array, *, in_place: bool) -> None:
        """Sum one chunk. A half is rewritten two rounds later, when a barrier guarantees that all ranks have read it.

        A rank's own slice is not copied: no other rank needs it before it is summed, and its result is in place.
        """
        self._turn ^= 1
        rank, length, kind = self._rank, contribution.size, contribution.dtype
        low, high = rank * length // self._size, (rank + 1) * length // self._size
        parts = [half[self._turn, : length * kind.itemsize].view(kind) for half in self._halves]
        _copy_but(low, high, contribution, parts[rank])
        if not in_place:
            into[low:high] = contribution[low:high]
        self._meet()
        slices = [part[low:high] for part in parts]  # no other rank touches these between the barriers
        shared, slices[rank] = slices[-1], into[low:high]
        total = reduce_tree_in_place(slices, _add)
        if total is shared:
            into[low:high] = total
        else:
            shared[:] = total
        self._meet()
        _copy_but(low, high, parts[-1], into)

    def _meet(self) -> None:
        self._win.Sync()
        self._raw.Barrier()
        self._win.Sync()

    def free(self) -> None:
        self._runtime.windows.remove(self)
        self.release()

    def release(self) -> None:
        """Free the memory; collective, and possible after the communicator was freed."""
        self._halves = []
        self._win.Unlock_all()
        self._win.Free()


def _copy_but(low: int, high: int, source: Array, to: Array) -> None:
    to[:low], to[high:] = source[:low], source[high:]


def _add(one: Array, other: Array) -> Array:
    return np.add(one, other, out=other)


def _on_one_node(raw: MPI.Intracomm) -> bool:
    """Return whether all ranks share a node with room for the memory; collective, the same on all ranks."""
    if raw.Get_size() == 1:
        return False
    node = raw.Split_type(MPI.COMM_TYPE_SHARED)
    fits = node.Get_size() == raw.Get_size() and _has_room(2 * CHUNK_NBYTES * raw.Get_size())
    node.Free()
    return bool(raw.allreduce(fits, MPI.LAND))


def _has_room(nbytes: int) -> bool:
    try:
        disk = os.statvfs("/dev/shm")
    except OSError:  # the library keeps its shared memory elsewhere and manages it itself
        return True
    return nbytes < SHM_SHARE * disk.f_bavail * disk.f_frsize


def summable_arrays(sendbuf: Any, recvbuf: Any) -> tuple[Array, Array] | None:
    """Return contribution and result as flat arrays if they are large and of one type that numpy sums, else None.

    Both are mpi4py buffer specifications. All ranks of an Allreduce get the same answer, whatever form each rank uses.
    """
    into = _summable_array(recvbuf)
    if into is None or into.nbytes < LARGE_NBYTES or into.dtype.kind not in "fiu" or into.itemsize < 4:
        return None
    given = into if sendbuf is MPI.IN_PLACE else _summable_array(sendbuf)
    same = given is not None and given.dtype == into.dtype and given.size == into.size
    return (given, into) if same and given is not None else None


def _summable_array(spec: Any) -> Array | None:
    """Return the memory of a buffer specification, or None unless it is contiguous memory of one predefined type."""
    try:
        if type(spec) in (list, tuple):
            spec = [_named(part) if isinstance(part, MPI.Datatype) else part for part in spec]
        buffer = as_buffer(spec)
    except (TypeError, ValueError, BufferError, KeyError):  # the library will raise the error
        return None
    return buffer.array if buffer.dtype is not None and buffer.datatype.is_predefined else None


def _named(datatype: MPI.Datatype) -> Any:
    """Return spawnsim's type of the same name; KeyError for a derived one."""
    return NAMED[datatype.Get_name()]


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
"""A root of these may only send, and a rank that only sends does not notice a death: it polls afterwards."""


def _method(operation: str, *, objects: bool) -> Callable[..., Any]:
    """Return the method for one collective."""
    one_way = operation in ONE_WAY

    def call(self: Collectives, *args: Any, **kwargs: Any) -> Any:
        runtime = self.runtime
        translate = runtime.translate.op if objects else runtime.translate
        if args:
            args = tuple([translate(value) for value in args])
        if kwargs:
            kwargs = {key: translate(value) for key, value in kwargs.items()}
        result = self._watched(operation, args, kwargs)
        if one_way:
            runtime.poll()
        return result

    call.__name__ = call.__qualname__ = operation
    call.__doc__ = f"mpi4py's `{operation}`, bounded by the deadline."
    return call


class Collectives(CommCore):
    """All collectives; the table above creates the methods."""

    _node: SharedMemorySum | LibrarySum | None  # for large sums, created by the first one
    _shares: bool  # whether large sums may go through shared memory

    def _watched(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the raw call as an active call of the watchdog; GPU tensors are staged in main memory."""
        stage = self._staged(operation, args, kwargs) if self.runtime.translate.devices else None
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
        """Make the raw call, or `function` of the raw communicator, as an active call of the watchdog."""
        runtime = self.runtime
        if self._inter:  # only on an intercommunicator can a root be ROOT or PROC_NULL
            args = tuple([peer(value) if type(value) is int else value for value in args])
            kwargs = {key: peer(value) if key == "root" else value for key, value in kwargs.items()}
        self._sequence += 1
        runtime.counters.part(contribution(operation, args, kwargs, (self.rank, self.size)))
        spelled = args, kwargs
        if runtime.translate.unnamed and function is None and operation[0].isupper():
            args, kwargs = runtime.translate.reducing(self._raw, operation, args, kwargs)
        if runtime.abortable:
            if operation in MAKERS:
                call = partial(getattr(self._raw, operation), *args, **kwargs)
                return make_detached(self, operation, call, meeting=operation != "Create_group")
            return function(self, *args) if function else abortable(self, operation, args, kwargs)
        watchdog, thread = runtime.watchdog, get_ident()
        active = watchdog.active
        active[thread] = (operation, self._sequence, self, perf_counter(), runtime.clock.limit_s())
        try:
            if runtime.check_calls and not self._inter and operation != "Create_group":
                check_call(self._raw, operation, *spelled)
            if function is None:
                return getattr(self._raw, operation)(*args, **kwargs)
            return function(self._raw, *args)
        except MPI.Exception as error:
            raise self._error(error, f"{operation} number {self._sequence}") from None
        finally:
            watchdog.last = active.pop(thread, None)

    def _staged(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stage | None:
        """Return main memory for GPU tensors among translated arguments; None if the call can be made as it is."""
        rank, direct = None if self._inter else self.rank, not self.runtime.abortable
        return self.runtime.translate.stage(self._raw, operation, args, kwargs, rank=rank, direct=direct)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> None:
        """mpi4py's `Allreduce`, with a deadline; summed in rank order with `reduction="ordered"`.

        Large sums among ranks of one node use shared memory, in the library's order.
        """
        runtime = self.runtime
        translate = runtime.translate
        args = translate(sendbuf), translate(recvbuf), translate(op)
        stage = self._staged("Allreduce", (sendbuf, recvbuf, op), {}) if translate.devices else None
        if stage is not None:  # from here on all ranks must take the same path, wherever their memory lies
            self.Allreduce(*stage.args)
            stage.end()
            return
        if runtime.ordered and isinstance(op, Op):
            self._called("Allreduce", (sendbuf, recvbuf, op), {}, ordered_allreduce)
            return
        if self._shares and getattr(recvbuf, "nbytes", LARGE_NBYTES) >= LARGE_NBYTES and args[2] == MPI.SUM:
            large = summable_arrays(*args[:2])
            if large is not None:
                self._called("Allreduce", args, {}, partial(self._on_node, large))
                return
        self._called("Allreduce", args, {})

    def _on_node(self, large: tuple[Array, Array], raw: MPI.Intracomm, *_: Any) -> None:
        if self._node is None:
            self._node = SharedMemorySum.of(raw, self.runtime)
        self._node.allreduce(*large)


for _name in BUFFER:
    setattr(Collectives, _name, _method(_name, objects=False))
for _name in OBJECT:
    setattr(Collectives, _name, _method(_name, objects=True))
