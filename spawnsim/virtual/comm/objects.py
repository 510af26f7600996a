"""Collectives of pickled objects (lower case). Each rank gets copies of its own: one object is never two ranks'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spawnsim.comm import reductions
from spawnsim.comm.failures import ERR_COUNT, ArgumentError
from spawnsim.comm.ops import SUM, Op
from spawnsim.virtual.comm.collectives import Plans
from spawnsim.virtual.comm.payload import dumps, loads
from spawnsim.virtual.meeting import Call, Meeting


def _agreed(op: Op) -> tuple[tuple[str, str], ...]:
    """Return what all ranks of a reduction must have in common."""
    return (("op", getattr(op, "name", "") or "user-defined"),)


def _folded(op: Op) -> Callable[[bytes, bytes], bytes]:
    """Return `combine` for pickles."""
    return lambda a, b: dumps(op(loads(a), loads(b)))


class ObjectCollectives(Plans):
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

        def outcome(meeting: Meeting, rank: int) -> Any:
            return reductions.binomial(meeting.parts(rank), _folded(op)) if rank == root else None

        combined = self._meet(
            Call("reduce", "reduce", part, len(part), root, agree=_agreed(op), outcome=outcome)
        )
        return None if combined is None else loads(combined)

    def allreduce(self, sendobj: Any, op: Op = SUM) -> Any:
        """Return the combination of all ranks' objects."""
        part = dumps(sendobj)

        def outcome(meeting: Meeting, rank: int) -> Any:
            return meeting.shared(rank, lambda: reductions.binomial(meeting.parts(rank), _folded(op)))

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


class ObjectIntraCollectives(Plans):
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

        def outcome(meeting: Meeting, rank: int) -> Any:
            parts = meeting.parts(rank)[: rank + own]
            return reductions.ordered(parts, _folded(op)) if parts else None

        combined = self._meet(Call(name, name, part, len(part), agree=_agreed(op), outcome=outcome))
        return None if combined is None else loads(combined)
