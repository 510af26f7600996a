"""Collectives made of messages over the wire: gathers, scatters, all-to-alls, objects, reductions that torch has not.

Each call is a plan (what goes to whom, what comes from whom, what to do with it), which the blocking form waits for
and the `I` form returns. Objects are pickled once per call. Contributions are combined in the orders of virtual ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.buffers import Buffer, as_buffer
from spawnsim.comm.constants import is_in_place
from spawnsim.comm.failures import ERR_ROOT, CallError
from spawnsim.comm.memory import as_bytes
from spawnsim.comm.ops import SUM, Merge, Op, reduce_ordered, reduce_to_root, reduce_tree
from spawnsim.errors import Timeout
from spawnsim.real.runtime.collectives import ObjectCollectives
from spawnsim.real.runtime.requests import RealRequest
from spawnsim.real.torch.point_to_point import OBJECT, CompositeRequest, PointToPoint, ReceiveTarget, bytes_of
from spawnsim.real.torch.runtime import CommCore
from spawnsim.real.torch.transport import Bytes, as_payload

Array = NDArray[Any]
Sends = Iterable[tuple[int, Bytes]]
Receives = Iterable[tuple[int, Buffer]]
Compared = tuple[str, Any]
"""What all ranks must agree on beside the operation: root and op, and a buffer whose bytes and type count, or None."""
NOTHING: Compared = ("", None)


class Exchanges(CommCore, ObjectCollectives):
    """Gather, Scatter, Alltoall, Scan and their other forms, by plans, and the collectives of objects."""

    _inner: PointToPoint  # the same ranks in another context, so that no receive of the program takes these messages

    # An exchange is a set of messages in the communicator's second context, with the number of the collective as their
    # tag: so two exchanges that overlap (`Igather`, `Iscatter`) cannot take each other's messages, and no receive of
    # the program can. All receives are posted first, so that what comes goes straight to its place.

    def _plan(
        self,
        operation: str,
        sends: Sends,
        receives: Receives,
        *,
        contributed: int,
        after: Callable[[], object] | None = None,
        what: Compared = NOTHING,
    ) -> CompositeRequest:
        """Begin an exchange; a block to oneself is copied by the mailbox as well. `contributed`: bytes of this rank."""
        tag, inner = self._count(), self._inner
        if self.runtime.check_calls and operation[0] != "I":
            self._agreed(operation, tag, what)
        self.runtime.counters.part(contributed)
        parts: list[RealRequest] = [
            inner._receive(rank, tag, operation, ReceiveTarget(block)) for rank, block in receives
        ]
        parts += [inner._start(data, (rank, tag), operation) for rank, data in sends]
        return CompositeRequest.of(self.runtime, (operation, -1, self), parts, after)

    def _agreed(self, operation: str, number: int, what: Compared) -> None:
        """Raise MismatchError, on all ranks, unless all are in the same collective with the same arguments."""
        raise NotImplementedError

    def _met(self, request: CompositeRequest, operation: str) -> Any:
        """Wait for an exchange; past the deadline, name the missing ranks."""
        try:
            return request.wait()
        except Timeout as late:
            missing = [part._what[1] for part in request._parts if not part.advance()]
            who = ", ".join(map(str, sorted(set(missing))))
            raise Timeout(set(missing), operation, late.sequence, f"{late}; missing: rank {who}") from None

    def _root(self, root: int, operation: str) -> None:
        if not 0 <= root < self.size:
            raise CallError(
                ERR_ROOT, f"rank {self.rank}: {operation} with root {root}: ranks are 0 to {self.size - 1}"
            )

    # --------------------------------------------------------------------------------------- gather and scatter
    def _gather(self, operation: str, sendbuf: Any, recvbuf: Any, root: int = 0) -> CompositeRequest:
        self._root(root, operation)
        blocks: list[tuple[int, Buffer]] = []
        own = 0
        if self.rank == root:
            table = as_blocks(recvbuf, self.size, vector=operation.endswith("v"), writable=True)
            blocks = [
                (rank, table[rank]) for rank in range(self.size) if rank != root or not is_in_place(sendbuf)
            ]
            own = table[root].nbytes
        sends = [] if is_in_place(sendbuf) else [(root, bytes_of(as_buffer(sendbuf)))]
        contributed = sends[0][1].nbytes if sends else own
        what = f"root {root}", sendbuf if operation == "Gather" else None
        return self._plan(operation, sends, blocks, contributed=contributed, what=what)

    def _scatter(self, operation: str, sendbuf: Any, recvbuf: Any, root: int = 0) -> CompositeRequest:
        self._root(root, operation)
        sends: list[tuple[int, Bytes]] = []
        whole = 0
        if self.rank == root:
            table = as_blocks(sendbuf, self.size, vector=operation.endswith("v"))
            sends = [
                (r, bytes_of(table[r])) for r in range(self.size) if r != root or not is_in_place(recvbuf)
            ]
            whole = sum(block.nbytes for block in table)
        blocks = [] if is_in_place(recvbuf) else [(root, as_buffer(recvbuf, writable=True))]
        what = f"root {root}", recvbuf if operation == "Scatter" else None
        return self._plan(operation, sends, blocks, contributed=whole, what=what)

    def _allgather(self, operation: str, sendbuf: Any, recvbuf: Any) -> CompositeRequest:
        table = as_blocks(recvbuf, self.size, vector=operation.endswith("v"), writable=True)
        own = bytes_of(table[self.rank] if is_in_place(sendbuf) else as_buffer(sendbuf))
        others = [r for r in range(self.size) if r != self.rank or not is_in_place(sendbuf)]
        sends = [(r, own) for r in others]
        what = "", sendbuf if operation == "Allgather" else None
        blocks = [(r, table[r]) for r in others]
        return self._plan(operation, sends, blocks, contributed=own.nbytes, what=what)

    def _alltoall(self, operation: str, sendbuf: Any, recvbuf: Any) -> CompositeRequest:
        kind = {"vector": operation[-1] in "vw", "types": operation[-1] == "w"}
        into = as_blocks(recvbuf, self.size, writable=True, **kind)
        given = into if is_in_place(sendbuf) else as_blocks(sendbuf, self.size, **kind)
        copied = is_in_place(sendbuf)  # or a block might be overwritten before it has left
        sends = [(r, as_bytes(block.pack()) if copied else bytes_of(block)) for r, block in enumerate(given)]
        whole = sum(data.nbytes for _, data in sends)
        what = "", sendbuf if operation == "Alltoall" else None
        return self._plan(operation, sends, enumerate(into), contributed=whole, what=what)

    # ---------------------------------------------------------------------------------------------- reductions
    def _fold(
        self,
        operation: str,
        given: Buffer,
        ranks: tuple[list[int], list[int]],
        op: Op,
        *,
        combine: Callable[[list[Array], Merge], Array],
        finish: Callable[[Any], object],
        root: int | None = None,
    ) -> CompositeRequest:
        """Combine the parts of `ranks[0]`; `ranks[1]` need this rank's part."""
        op.check(given.datatype)
        own = given.pack()
        sources, dests = ranks
        parts: dict[int, Array] = {rank: np.empty_like(own) for rank in sources}

        def after() -> None:
            if parts:
                finish(combine([*parts.values()], op.merging(given.datatype)))

        blocks = [(rank, as_buffer(as_bytes(part))) for rank, part in parts.items()]
        sends = [(rank, as_bytes(own)) for rank in dests]
        what = op.name if root is None else f"root {root}, {op.name}", given
        return self._plan(operation, sends, blocks, contributed=own.nbytes, after=after, what=what)

    def _reduction(
        self, operation: str, buffers: tuple[Any, Any], op: Op, root: int | None
    ) -> CompositeRequest:
        sendbuf, recvbuf = buffers
        everyone, mine = list(range(self.size)), root is None or root == self.rank
        into = as_buffer(recvbuf, writable=True) if mine else None
        given = into if is_in_place(sendbuf) and into is not None else as_buffer(sendbuf)
        finish = into.unpack if into is not None else len
        ranks = (everyone if mine else [], everyone if root is None else [root])
        # The orders of virtual ranks, which are MPI's.
        to_root = partial(reduce_to_root, root=(root or 0) if op.Is_commutative() else 0)
        combine = reduce_tree if root is None else to_root
        return self._fold(operation, given, ranks, op, combine=combine, finish=finish, root=root)

    def _scan(self, operation: str, sendbuf: Any, recvbuf: Any, op: Op) -> CompositeRequest:
        into = as_buffer(recvbuf, writable=True)
        given = into if is_in_place(sendbuf) else as_buffer(sendbuf)
        exclusive = operation in ("Exscan", "Iexscan")
        before = list(range(self.rank + (not exclusive)))
        after = list(range(self.rank + exclusive, self.size))
        return self._fold(operation, given, (before, after), op, combine=_in_rank_order, finish=into.unpack)

    def Scan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        self._met(self._scan("Scan", sendbuf, recvbuf, op), "Scan")

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        self._met(self._scan("Exscan", sendbuf, recvbuf, op), "Exscan")

    def Iscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> RealRequest:
        return self._scan("Iscan", sendbuf, recvbuf, op)

    def Iexscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> RealRequest:
        return self._scan("Iexscan", sendbuf, recvbuf, op)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        into = as_buffer(recvbuf, writable=True)
        given = as_buffer(recvbuf if is_in_place(sendbuf) else sendbuf)
        count = given.count // self.size
        self._reduce_scatter("Reduce_scatter_block", (given, into), [count] * self.size, op)

    def Reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Op = SUM) -> None:
        into = as_buffer(recvbuf, writable=True)
        given = as_buffer(recvbuf if is_in_place(sendbuf) else sendbuf)
        counts = recvcounts if recvcounts is not None else self.allgather(into.count)
        self._reduce_scatter("Reduce_scatter", (given, into), list(counts), op)

    def _reduce_scatter(
        self, operation: str, buffers: tuple[Buffer, Buffer], counts: list[int], op: Op
    ) -> None:
        """Every rank combines the slices that it keeps."""
        given, into = buffers
        op.check(given.datatype)
        starts = [sum(counts[:rank]) for rank in range(self.size)]
        parts = [np.empty_like(given.part(starts[self.rank], counts[self.rank]).pack()) for _ in counts]
        slices = [(r, as_bytes(given.part(starts[r], counts[r]).pack())) for r in range(self.size)]
        blocks = [(rank, as_buffer(as_bytes(part))) for rank, part in enumerate(parts)]
        whole = sum(data.nbytes for _, data in slices)
        what = op.name, given
        self._met(self._plan(operation, slices, blocks, contributed=whole, what=what), operation)
        total = reduce_tree(parts, op.merging(given.datatype))
        into.part(0, counts[self.rank]).unpack(total)

    # ----------------------------------------------------------------------------------------------- objects
    def _swap(
        self, operation: str, objects: dict[int, Any], sources: Sequence[int], root: int | None = None
    ) -> list[Any]:
        """Send `objects[rank]` to each rank, return what the sources sent here, in their order."""
        tag, inner = self._count(), self._inner
        if self.runtime.check_calls:
            self._agreed(operation, tag, ("" if root is None else f"root {root}", None))
        receiving = [inner._receive(rank, tag, operation, OBJECT) for rank in sources]
        pickled: dict[int, Any] = {}
        for thing in objects.values():
            if id(thing) not in pickled:
                pickled[id(thing)] = as_payload(self.runtime.pickle.dumps(thing))
        self.runtime.counters.part(sum(data.nbytes for data in pickled.values()))
        sending = [
            inner._start(pickled[id(thing)], (rank, tag), operation) for rank, thing in objects.items()
        ]
        parts: list[RealRequest] = [*receiving, *sending]
        self._met(CompositeRequest.of(self.runtime, (operation, -1, self), parts), operation)
        return [request.value for request in receiving]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        self._root(root, "bcast")
        sends = dict.fromkeys(range(self.size), obj) if self.rank == root else {}
        return self._swap("bcast", sends, [root], root)[0]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        self._root(root, "gather")
        found = self._swap("gather", {root: sendobj}, range(self.size) if self.rank == root else [], root)
        return found if self.rank == root else None

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        self._root(root, "scatter")
        sends: dict[int, Any] = {}
        if self.rank == root:
            sends = dict(enumerate(self._one_each(sendobj, "scatter")))
        return self._swap("scatter", sends, [root], root)[0]

    def allgather(self, sendobj: Any) -> list[Any]:
        return self._swap("allgather", dict.fromkeys(range(self.size), sendobj), range(self.size))

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        return self._swap("alltoall", dict(enumerate(self._one_each(sendobj, "alltoall"))), range(self.size))


def _in_rank_order(parts: list[Array], merge: Merge) -> Array:
    return reduce_ordered(parts, lambda total, part: merge(total, part, part))


def as_blocks(
    spec: Any, size: int, *, vector: bool = False, types: bool = False, writable: bool = False
) -> list[Buffer]:
    """Return the blocks of a specification, one per rank."""
    if not vector:
        whole = as_buffer(spec, blocks=size, writable=writable)
        if whole.datatype.is_predefined or not whole.count:
            return list(whole)
        spec = [spec[0], ([whole.count] * size, None), spec[-1]]
    return list(as_buffer(spec, vector=True, blocks=size, types=types, writable=writable))


def _forms(name: str, plan: str) -> None:
    """Add the blocking and the `I` form of one exchange."""

    def begin(self: Exchanges, *args: Any, **kwargs: Any) -> CompositeRequest:
        return getattr(self, plan)(name, *args, **kwargs)  # type: ignore[no-any-return]

    def block(self: Exchanges, *args: Any, **kwargs: Any) -> None:
        self._met(begin(self, *args, **kwargs), name)

    setattr(Exchanges, name, block)
    setattr(Exchanges, "I" + name.lower(), begin)


for _name in (
    "Gather", "Gatherv", "Scatter", "Scatterv", "Allgather", "Allgatherv", "Alltoall", "Alltoallv", "Alltoallw",
):  # fmt: skip
    _forms(_name, "_" + _name.lower().rstrip("vw"))
