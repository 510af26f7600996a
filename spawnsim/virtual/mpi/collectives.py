"""Collectives under mpi4py's names: blocking, non-blocking and persistent ones of buffers, and those of objects.

What each means is told in `semantics`; here they are only run, and no clock is known. Of pickled objects (lower case)
each rank gets copies of its own: one object is never two ranks'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spawnsim.comm import ops
from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.comm.failures import ERR_COUNT, ArgumentError, Truncated
from spawnsim.comm.handles import INFO_NULL, Info, each_integer, integer
from spawnsim.comm.ops import SUM, Op
from spawnsim.virtual.mpi import semantics
from spawnsim.virtual.mpi.context import Member
from spawnsim.virtual.mpi.instance import Call, CollectiveInstance
from spawnsim.virtual.mpi.payload import dumps, loads
from spawnsim.virtual.mpi.point_to_point import BufferedSends, Buffers
from spawnsim.virtual.mpi.requests import Prequest, Request
from spawnsim.virtual.mpi.semantics import CollectiveCall


class CollectiveBase(Member):
    """What the blocking, non-blocking and persistent calls share."""

    __slots__ = ()

    @property
    def _place(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        return self._me, len(self._peers)

    def _root(self, root: int) -> int:
        root = integer(root)
        self._check_root(root)
        return root

    def _counts(self, recvbuf: Any, counts: Sequence[int] | None) -> Sequence[int] | None:
        """Return the elements per rank; not given, each rank tells how many it receives."""
        if counts is not None:
            return each_integer(counts)
        return self._meet(semantics.counts(as_buffer(recvbuf).count))  # type: ignore[no-any-return]

    def _run(self, plan: CollectiveCall) -> None:
        self._take(plan, self._meet(plan.call))

    def _take(self, plan: CollectiveCall, outcome: Any) -> None:
        """Put the outcome where it belongs; what does not fit is named."""
        try:
            plan.collect(outcome)
        except Truncated as error:
            text = f"{error.message}; it is from {plan.call.describe()} on {self._label}"
            raise Truncated(message=text) from None


class Collectives(CollectiveBase):
    """Blocking collectives of buffers, with mpi4py's names."""

    __slots__ = ()

    def Barrier(self) -> None:
        """Wait until all ranks have arrived."""
        self._run(semantics.barrier())

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Send the root's buffer to all ranks."""
        self._run(semantics.bcast(buf, self._root(root), self._me))

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Collect equal blocks at the root."""
        self._run(semantics.gather(sendbuf, recvbuf, self._root(root), self._place))

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Collect unequal blocks at the root."""
        self._run(semantics.gather(sendbuf, recvbuf, self._root(root), self._place, vector=True))

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Hand out equal blocks of the root's buffer."""
        self._run(semantics.scatter(sendbuf, recvbuf, self._root(root), self._place))

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Hand out unequal blocks of the root's buffer."""
        self._run(semantics.scatter(sendbuf, recvbuf, self._root(root), self._place, vector=True))

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect equal blocks at all ranks."""
        self._run(semantics.allgather(sendbuf, recvbuf, self._place, lend=True))

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect unequal blocks at all ranks."""
        self._run(semantics.allgather(sendbuf, recvbuf, self._place, vector=True))

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Exchange equal blocks between all pairs of ranks."""
        self._run(semantics.alltoall(sendbuf, recvbuf, self._place))

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Exchange unequal blocks between all pairs of ranks."""
        self._run(semantics.alltoall(sendbuf, recvbuf, self._place, vector=True))

    def Alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        """Exchange blocks of different types between all pairs of ranks."""
        self._run(semantics.alltoall(sendbuf, recvbuf, self._place, vector=True, types=True))

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> None:
        """Combine all ranks' buffers at the root."""
        self._run(semantics.reduce(sendbuf, recvbuf, op, root=self._root(root), me=self._me))

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Combine all ranks' buffers at all ranks."""
        self._run(semantics.allreduce(sendbuf, recvbuf, op, lend=True))

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Combine all ranks' buffers and hand out equal blocks."""
        self._run(semantics.reduce_scatter(sendbuf, recvbuf, None, op, place=self._place, lend=True))

    def Reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
    ) -> None:
        """Combine all ranks' buffers and hand out blocks of `recvcounts` elements."""
        counts = self._counts(recvbuf, recvcounts)
        self._run(semantics.reduce_scatter(sendbuf, recvbuf, counts, op, place=self._place, lend=True))


class IntraCollectives(CollectiveBase):
    """Blocking collectives that only intracommunicators have."""

    __slots__ = ()

    def Scan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Combine the buffers of ranks 0 to this one."""
        self._run(semantics.scan(sendbuf, recvbuf, op, inclusive=True))

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Combine the buffers of the ranks before this one."""
        self._run(semantics.scan(sendbuf, recvbuf, op, inclusive=False))


class Starts(CollectiveBase):
    """Starting a plan without waiting."""

    __slots__ = ()

    def _start(self, plan: CollectiveCall) -> Request:
        completion, waiting = self._join(plan.call)

        def deliver(_: Any) -> None:
            self._take(plan, waiting.meeting.outcome(waiting.me))

        return Request.start(self._world, completion, waiting, deliver)


class NonblockingCollectives(Starts):
    """Non-blocking collectives of buffers, with mpi4py's names. A receiving buffer is filled when it is waited for."""

    __slots__ = ()

    def Ibarrier(self) -> Request:
        """Start Barrier."""
        return self._start(semantics.barrier())

    def Ibcast(self, buf: Any, root: int = 0) -> Request:
        """Start Bcast."""
        return self._start(semantics.bcast(buf, self._root(root), self._me))

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start Gather."""
        return self._start(semantics.gather(sendbuf, recvbuf, self._root(root), self._place))

    def Igatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start Gatherv."""
        return self._start(semantics.gather(sendbuf, recvbuf, self._root(root), self._place, vector=True))

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start Scatter."""
        return self._start(semantics.scatter(sendbuf, recvbuf, self._root(root), self._place))

    def Iscatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        """Start Scatterv."""
        return self._start(semantics.scatter(sendbuf, recvbuf, self._root(root), self._place, vector=True))

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start Allgather."""
        return self._start(semantics.allgather(sendbuf, recvbuf, self._place))

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start Allgatherv."""
        return self._start(semantics.allgather(sendbuf, recvbuf, self._place, vector=True))

    def Ialltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start Alltoall."""
        return self._start(semantics.alltoall(sendbuf, recvbuf, self._place))

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start Alltoallv."""
        return self._start(semantics.alltoall(sendbuf, recvbuf, self._place, vector=True))

    def Ialltoallw(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start Alltoallw."""
        return self._start(semantics.alltoall(sendbuf, recvbuf, self._place, vector=True, types=True))

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Request:
        """Start Reduce."""
        return self._start(semantics.reduce(sendbuf, recvbuf, op, root=self._root(root), me=self._me))

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start Allreduce."""
        return self._start(semantics.allreduce(sendbuf, recvbuf, op))

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start Reduce_scatter_block."""
        return self._start(semantics.reduce_scatter(sendbuf, recvbuf, None, op, place=self._place))

    def Ireduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
    ) -> Request:
        """Start Reduce_scatter."""
        return self._start(
            semantics.reduce_scatter(
                sendbuf, recvbuf, self._counts(recvbuf, recvcounts), op, place=self._place
            )
        )


class NonblockingIntraCollectives(Starts):
    """Non-blocking collectives that only intracommunicators have."""

    __slots__ = ()

    def Iscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start Scan."""
        return self._start(semantics.scan(sendbuf, recvbuf, op, inclusive=True))

    def Iexscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start Exscan."""
        return self._start(semantics.scan(sendbuf, recvbuf, op, inclusive=False))


class PersistentMessages(BufferedSends, Buffers):
    """Persistent point-to-point requests."""

    __slots__ = ()

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Prepare Isend."""
        dest, tag = integer(dest), integer(tag)
        return Prequest.prepare(lambda: self.Isend(buf, dest, tag))

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Prepare Ibsend."""
        dest, tag = integer(dest), integer(tag)
        return Prequest.prepare(lambda: self.Ibsend(buf, dest, tag))

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Prepare Issend."""
        dest, tag = integer(dest), integer(tag)
        return Prequest.prepare(lambda: self.Issend(buf, dest, tag))

    def Rsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Prepare Irsend."""
        dest, tag = integer(dest), integer(tag)
        return Prequest.prepare(lambda: self.Irsend(buf, dest, tag))

    def Recv_init(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prequest:
        """Prepare Irecv."""
        source, tag = integer(source), integer(tag)
        return Prequest.prepare(lambda: self.Irecv(buf, source, tag))


class PersistentCollectives(NonblockingCollectives):
    """Persistent collectives."""

    __slots__ = ()

    def Barrier_init(self, info: Info = INFO_NULL) -> Prequest:
        """Prepare Barrier."""
        return Prequest.prepare(lambda: self.Ibarrier())

    def Bcast_init(self, buf: Any, root: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Prepare Bcast."""
        root = integer(root)
        return Prequest.prepare(lambda: self.Ibcast(buf, root))

    def Gather_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Prepare Gather."""
        root = integer(root)
        return Prequest.prepare(lambda: self.Igather(sendbuf, recvbuf, root))

    def Gatherv_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Prepare Gatherv."""
        root = integer(root)
        return Prequest.prepare(lambda: self.Igatherv(sendbuf, recvbuf, root))

    def Scatter_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Prepare Scatter."""
        root = integer(root)
        return Prequest.prepare(lambda: self.Iscatter(sendbuf, recvbuf, root))

    def Scatterv_init(self, sendbuf: Any, recvbuf: Any, root: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Prepare Scatterv."""
        root = integer(root)
        return Prequest.prepare(lambda: self.Iscatterv(sendbuf, recvbuf, root))

    def Allgather_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Prepare Allgather."""
        return Prequest.prepare(lambda: self.Iallgather(sendbuf, recvbuf))

    def Allgatherv_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Prepare Allgatherv."""
        return Prequest.prepare(lambda: self.Iallgatherv(sendbuf, recvbuf))

    def Alltoall_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Prepare Alltoall."""
        return Prequest.prepare(lambda: self.Ialltoall(sendbuf, recvbuf))

    def Alltoallv_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Prepare Alltoallv."""
        return Prequest.prepare(lambda: self.Ialltoallv(sendbuf, recvbuf))

    def Alltoallw_init(self, sendbuf: Any, recvbuf: Any, info: Info = INFO_NULL) -> Prequest:
        """Prepare Alltoallw."""
        return Prequest.prepare(lambda: self.Ialltoallw(sendbuf, recvbuf))

    def Reduce_init(
        self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0, info: Info = INFO_NULL
    ) -> Prequest:
        """Prepare Reduce."""
        root = integer(root)
        return Prequest.prepare(lambda: self.Ireduce(sendbuf, recvbuf, op, root))

    def Allreduce_init(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, info: Info = INFO_NULL) -> Prequest:
        """Prepare Allreduce."""
        return Prequest.prepare(lambda: self.Iallreduce(sendbuf, recvbuf, op))

    def Reduce_scatter_block_init(
        self, sendbuf: Any, recvbuf: Any, op: Op = SUM, info: Info = INFO_NULL
    ) -> Prequest:
        """Prepare Reduce_scatter_block."""
        return Prequest.prepare(lambda: self.Ireduce_scatter_block(sendbuf, recvbuf, op))

    def Reduce_scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: Op = SUM,
        info: Info = INFO_NULL,
    ) -> Prequest:
        """Prepare Reduce_scatter."""
        return Prequest.prepare(lambda: self.Ireduce_scatter(sendbuf, recvbuf, recvcounts, op))


class PersistentIntraCollectives(NonblockingIntraCollectives):
    """Persistent collectives that only intracommunicators have."""

    __slots__ = ()

    def Scan_init(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, info: Info = INFO_NULL) -> Prequest:
        """Prepare Scan."""
        return Prequest.prepare(lambda: self.Iscan(sendbuf, recvbuf, op))

    def Exscan_init(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, info: Info = INFO_NULL) -> Prequest:
        """Prepare Exscan."""
        return Prequest.prepare(lambda: self.Iexscan(sendbuf, recvbuf, op))


def _agreed(op: Op) -> tuple[tuple[str, str], ...]:
    """Return what all ranks of a reduction must have in common."""
    return (("op", getattr(op, "name", "") or "user-defined"),)


def _folded(op: Op) -> Callable[[bytes, bytes], bytes]:
    """Return `combine` for pickles."""
    return lambda a, b: dumps(op(loads(a), loads(b)))


class ObjectCollectives(CollectiveBase):
    """Collectives of objects, with mpi4py's names."""

    __slots__ = ()

    def barrier(self) -> None:
        """Wait until all ranks have arrived."""
        self._meet(Call("Barrier", "barrier"))

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the root's object: a copy on every rank, the root included, as mpi4py does it."""
        root = self._root(root)
        part = dumps(obj) if self._me == root else b""
        outcome = lambda m, rank: m.calls[root].part  # noqa: E731
        received = self._meet(Call("bcast", "bcast", part, len(part), root, sizes="root", outcome=outcome))
        return loads(received)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return all ranks' objects at the root, None elsewhere."""
        part, root = dumps(sendobj), self._root(root)
        outcome = lambda m, rank: m.parts(rank) if rank == root else None  # noqa: E731
        parts = self._meet(Call("gather", "gather", part, len(part), root, sizes="each", outcome=outcome))
        return None if parts is None else [loads(each) for each in parts]

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return this rank's item of the root's sequence."""
        size, parts, root = len(self._peers), None, self._root(root)
        if self._me == root:
            parts = self._one_each(sendobj)
        nbytes = np.array([len(part) for part in parts]) if parts else np.zeros(size, np.int64)
        outcome = lambda m, rank: m.calls[root].part[rank]  # noqa: E731
        return loads(
            self._meet(Call("scatter", "scatter", parts, nbytes, root, sizes="root", outcome=outcome))
        )

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return all ranks' objects."""
        part = dumps(sendobj)
        call = Call(
            "allgather", "allgather", part, len(part), sizes="each", outcome=lambda m, rank: m.parts(rank)
        )
        return [loads(each) for each in self._meet(call)]

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Return, from every rank, its item for this one."""
        parts = self._one_each(sendobj)
        outcome = lambda m, rank: [part[m.place(rank)] for part in m.parts(rank)]  # noqa: E731
        nbytes = np.array([len(part) for part in parts])
        received = self._meet(Call("alltoall", "alltoall", parts, nbytes, sizes="matrix", outcome=outcome))
        return [loads(each) for each in received]

    def reduce(self, sendobj: Any, op: Op = SUM, root: int = 0) -> Any:
        """Return the combination of all ranks' objects at the root, None elsewhere."""
        part, root = dumps(sendobj), self._root(root)

        def outcome(meeting: CollectiveInstance, rank: int) -> Any:
            return ops.reduce_binomial(meeting.parts(rank), _folded(op)) if rank == root else None

        combined = self._meet(
            Call("reduce", "reduce", part, len(part), root, agree=_agreed(op), outcome=outcome)
        )
        return None if combined is None else loads(combined)

    def allreduce(self, sendobj: Any, op: Op = SUM) -> Any:
        """Return the combination of all ranks' objects."""
        part = dumps(sendobj)

        def outcome(meeting: CollectiveInstance, rank: int) -> Any:
            return meeting.shared(rank, lambda: ops.reduce_binomial(meeting.parts(rank), _folded(op)))

        call = Call("allreduce", "allreduce", part, len(part), agree=_agreed(op), outcome=outcome)
        return loads(self._meet(call))

    def _one_each(self, sendobj: Sequence[Any] | None) -> list[bytes]:
        size = len(self._peers)
        items = [None] * size if sendobj is None else list(sendobj)
        if len(items) != size:
            raise ArgumentError(
                ERR_COUNT, f"expecting {size} items, one per rank of {self._label}; got {len(items)}"
            )
        return [dumps(item) for item in items]


class ObjectIntraCollectives(CollectiveBase):
    """Collectives of objects that only intracommunicators have."""

    __slots__ = ()

    def scan(self, sendobj: Any, op: Op = SUM) -> Any:
        """Return the combination of the objects of ranks 0 to this one."""
        return self._prefix("scan", sendobj, op, 1)

    def exscan(self, sendobj: Any, op: Op = SUM) -> Any:
        """Return the combination of the objects of the ranks before this one; None on rank 0."""
        return self._prefix("exscan", sendobj, op, 0)

    def _prefix(self, name: str, sendobj: Any, op: Op, own: int) -> Any:
        part = dumps(sendobj)

        def outcome(meeting: CollectiveInstance, rank: int) -> Any:
            parts = meeting.parts(rank)[: rank + own]
            return ops.reduce_ordered(parts, _folded(op)) if parts else None

        combined = self._meet(Call(name, name, part, len(part), agree=_agreed(op), outcome=outcome))
        return None if combined is None else loads(combined)
