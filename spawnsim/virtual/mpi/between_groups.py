"""Collectives of an intercommunicator: each group gets the contribution of the other group.

Of a rooted call, the root gives `ROOT`, the other ranks of its group give `PROC_NULL`, and the ranks of the other group
give the root's rank. A call takes the time of an allgather of both groups, whatever its algorithm is on real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spawnsim.comm import ops
from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import PROC_NULL, ROOT
from spawnsim.comm.failures import ERR_ROOT, CallError
from spawnsim.comm.handles import each_integer, integer
from spawnsim.comm.ops import SUM, Op
from spawnsim.virtual.mpi.collectives import (
    Collectives,
    Outcome,
    collective,
    fill_blocks,
    folded,
    taken_apart,
)
from spawnsim.virtual.mpi.instance import Call, CollectiveInstance, drop
from spawnsim.virtual.mpi.payload import dumps, loads

Choose = Callable[[list[Any]], Any]  # a rank's outcome, from the contributions of the other group


class BetweenGroups(Collectives):
    """Collectives on buffers and on objects, between two groups."""

    __slots__ = ()

    def _end(self, root: int) -> int:
        """Return the `root` of a rooted call, checked."""
        root = integer(root)
        if root not in (ROOT, PROC_NULL):
            self._check_root(root)
        return root

    def _sides(self, instance: CollectiveInstance) -> tuple[list[Any], list[Any]]:
        """Return the contributions of this group and of the other group."""
        parts, first = instance.parts(), len(self._context.groups[0])
        sides = parts[:first], parts[first:]
        return sides[self._side], sides[1 - self._side]

    def _exchange(
        self, name: str, part: Any = None, choose: Choose = lambda others: None, collect: Outcome = drop
    ) -> Call:
        self._need()
        pieces = part if isinstance(part, list) else [part]
        nbytes = sum(len(piece) if type(piece) is bytes else getattr(piece, "nbytes", 0) for piece in pieces)
        outcome = lambda instance, _: choose(self._sides(instance)[1])  # noqa: E731
        return Call(name, "allgather", part, nbytes, sizes="each", outcome=outcome, collect=collect)

    # -- on buffers --------------------------------------------------------------------------------------------

    @collective
    def Bcast(self, buf: Any, root: int = 0) -> Call:
        """Send the root's buffer to all ranks of the other group."""
        root = self._end(root)
        if root < 0:
            return self._exchange("Bcast", as_buffer(buf).pack() if root == ROOT else None)
        return self._exchange(
            "Bcast", None, lambda others: _given(others, root), as_buffer(buf, writable=True).unpack
        )

    def _gather(self, sendbuf: Any, recvbuf: Any, root: int, vector: bool) -> Call:
        root = self._end(root)
        if root == ROOT:
            fill = fill_blocks(recvbuf, vector=vector, blocks=len(self._peers))
            return self._exchange("Gather", None, _each_given, fill)
        return self._exchange("Gather", None if root == PROC_NULL else as_buffer(sendbuf).pack())

    def _scatter(self, sendbuf: Any, recvbuf: Any, root: int, vector: bool) -> Call:
        root, me = self._end(root), self._me
        if root < 0:
            blocks = taken_apart(sendbuf, len(self._peers), vector=vector) if root == ROOT else None
            return self._exchange("Scatter", blocks)
        unpack = as_buffer(recvbuf, writable=True).unpack
        return self._exchange("Scatter", None, lambda others: _given(others, root)[me], unpack)

    def _allgather(self, sendbuf: Any, recvbuf: Any, vector: bool) -> Call:
        fill = fill_blocks(recvbuf, vector=vector, blocks=len(self._peers))
        return self._exchange("Allgather", as_buffer(sendbuf).pack(), lambda others: others, fill)

    @collective
    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
        return self._gather(sendbuf, recvbuf, root, vector=False)

    @collective
    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
        return self._gather(sendbuf, recvbuf, root, vector=True)

    @collective
    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
        return self._scatter(sendbuf, recvbuf, root, vector=False)

    @collective
    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
        return self._scatter(sendbuf, recvbuf, root, vector=True)

    @collective
    def Allgather(self, sendbuf: Any, recvbuf: Any) -> Call:
        return self._allgather(sendbuf, recvbuf, vector=False)

    @collective
    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> Call:
        return self._allgather(sendbuf, recvbuf, vector=True)

    def _alltoall(self, sendbuf: Any, recvbuf: Any, **how: Any) -> Call:
        size, me = len(self._peers), self._me
        fill = fill_blocks(recvbuf, blocks=size, **how)
        choose = lambda others: [blocks[me] for blocks in others]  # noqa: E731
        return self._exchange("Alltoall", taken_apart(sendbuf, size, **how), choose, fill)

    @collective
    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Call:
        """Combine the buffers of the other group at the root."""
        root = self._end(root)
        if root == ROOT:
            target: Any = as_buffer(recvbuf, writable=True)
            return self._exchange("Reduce", None, _combining(op, target), target.unpack)
        return self._exchange("Reduce", None if root == PROC_NULL else as_buffer(sendbuf).pack())

    @collective
    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Call:
        """Combine the buffers of the other group at all ranks of this one."""
        target: Any = as_buffer(recvbuf, writable=True)
        part = as_buffer(sendbuf).pack()
        return self._exchange("Allreduce", part, _combining(op, target), target.unpack)

    def _reduce_scatter(self, buffers: tuple[Any, Any], counts: Sequence[int], op: Op) -> Call:
        sent, target = as_buffer(buffers[0]), as_buffer(buffers[1], writable=True)
        combine, before, me = _combining(op, target), sum(counts[: self._me]), self._me

        def choose(others: list[Any]) -> Any:
            whole = combine(others)
            step = len(whole) // max(sum(counts), 1)  # the bytes of an element of a derived type; else 1
            return whole[before * step : (before + counts[me]) * step]

        return self._exchange("Reduce_scatter", sent.pack(), choose, target.unpack)

    @collective
    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Call:
        """Combine the buffers of the other group and distribute equal blocks in this one."""
        counts = [as_buffer(recvbuf).count] * len(self._members)
        return self._reduce_scatter((sendbuf, recvbuf), counts, op)

    @collective
    def Reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
    ) -> Call:
        """Combine the buffers of the other group and distribute blocks of `recvcounts` elements in this one."""
        if recvcounts is None:
            call = self._exchange("Reduce_scatter", as_buffer(recvbuf).count)
            call.outcome = lambda instance, _: self._sides(instance)[0]
            recvcounts = self._meet(call)
        return self._reduce_scatter((sendbuf, recvbuf), each_integer(recvcounts), op)

    # -- on objects --------------------------------------------------------------------------------------------

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of the other group's root; None in the root's group."""
        root = self._end(root)
        return self._received(
            "bcast", dumps(obj) if root == ROOT else None, lambda others: _given(others, root), root
        )

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of the other group at the root, None elsewhere."""
        root = self._end(root)
        choose = _each_given if root == ROOT else lambda others: None
        parts = self._meet(self._exchange("gather", None if root < 0 else dumps(sendobj), choose))
        return [loads(part) for part in parts] if root == ROOT else None

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return this rank's item of the sequence of the other group's root."""
        root, me = self._end(root), self._me
        parts = self._one_each(sendobj) if root == ROOT else None
        return self._received("scatter", parts, lambda others: _given(others, root)[me], root)

    def _received(self, name: str, part: Any, choose: Choose, root: int) -> Any:
        received = self._meet(self._exchange(name, part, choose if root >= 0 else lambda others: None))
        return loads(received) if root >= 0 else None

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of the other group."""
        call = self._exchange("allgather", dumps(sendobj), lambda others: others)
        return [loads(part) for part in self._meet(call)]

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Return, from every rank of the other group, its item for this one."""
        me = self._me
        call = self._exchange(
            "alltoall", self._one_each(sendobj), lambda others: [each[me] for each in others]
        )
        return [loads(part) for part in self._meet(call)]

    def reduce(self, sendobj: Any, op: Op = SUM, root: int = 0) -> Any:
        """Return the combination of the other group's objects at the root, None elsewhere."""
        root = self._end(root)

        def combine(others: list[Any]) -> Any:
            return ops.reduce_binomial(_each_given(others), folded(op)) if root == ROOT else None

        found = self._meet(self._exchange("reduce", dumps(sendobj) if root >= 0 else None, combine))
        return None if found is None else loads(found)

    def allreduce(self, sendobj: Any, op: Op = SUM) -> Any:
        """Return the combination of the other group's objects."""
        call = self._exchange(
            "allreduce", dumps(sendobj), lambda others: ops.reduce_binomial(others, folded(op))
        )
        return loads(self._meet(call))


def _given(others: list[Any], root: int) -> Any:
    """Return the contribution of a rank of the other group."""
    if others[root] is None:
        raise CallError(
            ERR_ROOT,
            f"rank {root} of the other group has contributed nothing: of a rooted call between two groups, the root "
            "gives root=MPI.ROOT, its group MPI.PROC_NULL, and the other group the root's rank",
        )
    return others[root]


def _each_given(others: list[Any]) -> list[Any]:
    return [_given(others, rank) for rank in range(len(others))]


def _combining(op: Op, target: Any) -> Choose:
    op.check(target.datatype)
    return lambda others: ops.reduce_tree(_each_given(others), op.merging(target.datatype))
