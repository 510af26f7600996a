"""Exchanges with the neighbours of a topology, under mpi4py's names.

Between two neighbours with several edges, the k-th outgoing edge matches the k-th incoming one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import PROC_NULL
from spawnsim.comm.failures import ERR_COUNT, ArgumentError
from spawnsim.virtual.mpi.collectives import Collectives, Outcome, collective
from spawnsim.virtual.mpi.instance import Call, CollectiveInstance
from spawnsim.virtual.mpi.payload import dumps, loads

Edge = tuple[int, int]  # a neighbour, and the number of the edge among the edges between the two
Edges = tuple[Sequence[Edge], Sequence[Edge]]  # incoming, outgoing; both ends of an edge have the same number


def occurrences(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return each rank with the number of its earlier occurrences.

    >>> occurrences([3, 5, 3])
    [(3, 0), (5, 0), (3, 1)]
    """
    seen: Counter[int] = Counter()
    found = []
    for rank in ranks:
        found.append((rank, seen[rank]))
        seen[rank] += 1
    return found


def neighbor_call(name: str, parts: Sequence[Any], nbytes: Sequence[int], edges: Edges) -> Call:
    """Return the call of a rank that sends `parts`, one per outgoing edge, and receives one per incoming edge."""
    incoming, outgoing = edges
    sent = dict(zip(outgoing, parts, strict=True))
    real = [(dest, size) for (dest, _), size in zip(outgoing, nbytes, strict=True) if dest != PROC_NULL]
    needs = tuple(sorted({source for source, _ in incoming if source != PROC_NULL}))

    def outcome(instance: CollectiveInstance, me: int) -> list[Any]:
        return [
            None if source == PROC_NULL else instance.calls[source].part[me, which]  # type: ignore[union-attr]
            for source, which in incoming
        ]

    sizes = [dest for dest, _ in real], [size for _, size in real]
    return Call(name, "neighbor", sent, sizes, sizes="edges", needs=needs, outcome=outcome)


def _blocks(
    spec: Any, number: int, *, vector: bool, types: bool = False, writable: bool = False
) -> list[Any]:
    """Return a buffer's blocks, one for each of `number` edges; [] for a rank without edges."""
    if not number:  # a count in the specification is the length of each block
        return []
    return list(as_buffer(spec, vector=vector, blocks=number, types=types, writable=writable))


def _collect(target: list[Any]) -> Outcome:
    def unpack(blocks: Sequence[Any]) -> None:
        for block, data in zip(target, blocks, strict=True):
            if data is not None:
                block.unpack(data)

    return unpack


def allgather_call(sendbuf: Any, recvbuf: Any, edges: Edges, vector: bool = False) -> Call:
    """Describe the exchange of one buffer for all neighbours; receive a block from each."""
    part, dests = as_buffer(sendbuf).pack(), edges[1]
    target = _blocks(recvbuf, len(edges[0]), vector=vector, writable=True)
    own = neighbor_call("Neighbor_allgather", [part] * len(dests), [part.nbytes] * len(dests), edges)
    own.collect = _collect(target)
    return own


def alltoall_call(
    sendbuf: Any, recvbuf: Any, edges: Edges, *, vector: bool = False, types: bool = False
) -> Call:
    """Describe the exchange of a block for each neighbour; receive a block from each."""
    parts = [block.pack() for block in _blocks(sendbuf, len(edges[1]), vector=vector, types=types)]
    target = _blocks(recvbuf, len(edges[0]), vector=vector, types=types, writable=True)
    own = neighbor_call("Neighbor_alltoall", parts, [part.nbytes for part in parts], edges)
    own.collect = _collect(target)
    return own


class NeighborCollectives(Collectives):
    """Exchanges with the neighbours of a topology."""

    __slots__ = ()

    @property
    def _edges(self) -> Edges:
        self._need()
        return self._context.topology.neighborhood(self._me)  # type: ignore[no-any-return]

    @collective
    def Neighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> Call:
        """Send one buffer to all outgoing neighbours; collect equal blocks from the incoming ones."""
        return allgather_call(sendbuf, recvbuf, self._edges)

    @collective
    def Neighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> Call:
        """Send one buffer to all outgoing neighbours; collect unequal blocks from the incoming ones."""
        return allgather_call(sendbuf, recvbuf, self._edges, vector=True)

    @collective
    def Neighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> Call:
        return alltoall_call(sendbuf, recvbuf, self._edges)

    @collective
    def Neighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> Call:
        return alltoall_call(sendbuf, recvbuf, self._edges, vector=True)

    @collective
    def Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> Call:
        return alltoall_call(sendbuf, recvbuf, self._edges, vector=True, types=True)

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        return self._exchange("neighbor_allgather", [dumps(sendobj)] * len(self._edges[1]))

    def neighbor_alltoall(self, sendobj: Sequence[Any] | None) -> list[Any]:
        """Send an object to each outgoing neighbour; return one from each incoming one."""
        items = [None] * len(self._edges[1]) if sendobj is None else list(sendobj)
        if len(items) != len(self._edges[1]):
            raise ArgumentError(
                ERR_COUNT, f"expecting {len(self._edges[1])} items, one per neighbour; got {len(items)}"
            )
        return self._exchange("neighbor_alltoall", [dumps(item) for item in items])

    def _exchange(self, name: str, parts: list[bytes]) -> list[Any]:
        received = self._meet(neighbor_call(name, parts, [len(part) for part in parts], self._edges))
        return [None if part is None else loads(part) for part in received]
