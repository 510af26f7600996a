"""Collectives of Python objects over the wire.

Knows this communicator's inner point-to-point channel; objects are pickled once per call and combined in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import Any

from spawnsim.comm.ops import SUM
from spawnsim.errors import ParameterError
from spawnsim.real.rank.pending import Pending
from spawnsim.real.torch.exchanges import Exchanges
from spawnsim.real.torch.mailbox import as_payload
from spawnsim.real.torch.memory import OBJECT
from spawnsim.real.torch.requests import Together

Combine = Callable[[Any, Any], Any]


class Objects(Exchanges):
    """bcast, gather, allreduce and their kin."""

    def _swap(self, operation: str, objects: dict[int, Any], sources: Sequence[int]) -> list[Any]:
        """Send `objects[rank]` to each rank, return what the sources sent here, in their order."""
        tag, inner = self._count(operation), self._inner
        receiving = [inner._receive(rank, tag, operation, OBJECT) for rank in sources]
        pickled: dict[int, Any] = {}
        for thing in objects.values():
            if id(thing) not in pickled:
                pickled[id(thing)] = as_payload(self._home.pickle.dumps(thing))
        sending = [
            inner._start(pickled[id(thing)], (rank, tag), operation) for rank, thing in objects.items()
        ]
        parts: list[Pending] = [*receiving, *sending]
        self._met(Together.of(self._home, (operation, -1, self), parts), operation)
        return [request.value for request in receiving]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        self._root(root, "bcast")
        sends = dict.fromkeys(range(self.size), obj) if self.rank == root else {}
        return self._swap("bcast", sends, [root])[0]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        self._root(root, "gather")
        found = self._swap("gather", {root: sendobj}, range(self.size) if self.rank == root else [])
        return found if self.rank == root else None

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        self._root(root, "scatter")
        sends: dict[int, Any] = {}
        if self.rank == root:
            sends = dict(enumerate(self._one_each(sendobj, "scatter")))
        return self._swap("scatter", sends, [root])[0]

    def allgather(self, sendobj: Any) -> list[Any]:
        return self._swap("allgather", dict.fromkeys(range(self.size), sendobj), range(self.size))

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        return self._swap("alltoall", dict(enumerate(self._one_each(sendobj, "alltoall"))), range(self.size))

    def _one_each(self, objects: Sequence[Any] | None, operation: str) -> list[Any]:
        given = list(objects) if objects is not None else []
        if len(given) != self.size:
            raise ParameterError(
                f"{operation}: give a list of {self.size} objects, one per rank, not {len(given)}"
            )
        return given

    def reduce(self, sendobj: Any, op: Combine = SUM, root: int = 0) -> Any:
        found = self.gather(sendobj, root)
        return None if found is None else fold(op, found)

    def allreduce(self, sendobj: Any, op: Combine = SUM) -> Any:
        return fold(op, self.allgather(sendobj))

    def scan(self, sendobj: Any, op: Combine = SUM) -> Any:
        return fold(op, self.allgather(sendobj)[: self.rank + 1])

    def exscan(self, sendobj: Any, op: Combine = SUM) -> Any:
        before = self.allgather(sendobj)[: self.rank]
        return fold(op, before) if before else None
