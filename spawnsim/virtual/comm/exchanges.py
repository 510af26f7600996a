"""What neighbourhood collectives exchange: plans over the edges of a topology.

Between a pair of ranks with several edges the k-th one out meets the k-th one in. This room knows edges and buffers; it
must not know grids or clocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import PROC_NULL
from spawnsim.virtual.comm.plans import Outcome, Plan
from spawnsim.virtual.meeting import Call, Meeting

Edges = tuple[Sequence[int], Sequence[int]]  # from whom, to whom


def occurrences(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return each rank with how often it came before.

    >>> occurrences([3, 5, 3])
    [(3, 0), (5, 0), (3, 1)]
    """
    seen: Counter[int] = Counter()
    found = []
    for rank in ranks:
        found.append((rank, seen[rank]))
        seen[rank] += 1
    return found


def call(name: str, parts: Sequence[Any], nbytes: Sequence[int], edges: Edges) -> Call:
    """Return the call of a rank that sends `parts`, one per outgoing edge, and gets one per incoming edge."""
    sources, dests = edges
    sent = dict(zip(occurrences(dests), parts, strict=True))
    real = [(dest, size) for dest, size in zip(dests, nbytes, strict=True) if dest != PROC_NULL]
    needs = tuple(sorted({source for source in sources if source != PROC_NULL}))

    def outcome(meeting: Meeting, me: int) -> list[Any]:
        return [
            None if source == PROC_NULL else meeting.calls[source].part[me, turn]  # type: ignore[union-attr]
            for source, turn in occurrences(sources)
        ]

    sizes = [dest for dest, _ in real], [size for _, size in real]
    return Call(name, "neighbor", sent, sizes, sizes="edges", needs=needs, outcome=outcome)


def _blocks(
    spec: Any, number: int, *, vector: bool, types: bool = False, writable: bool = False
) -> list[Any]:
    """Return a buffer's blocks, one for each of `number` edges; of a rank without edges, none."""
    blocks = list(as_buffer(spec, vector=vector, blocks=number, types=types, writable=writable))
    return blocks if number else []


def _collect(target: list[Any]) -> Outcome:
    def unpack(blocks: Sequence[Any]) -> None:
        for block, data in zip(target, blocks, strict=True):
            if data is not None:
                block.unpack(data)

    return unpack


def allgather(sendbuf: Any, recvbuf: Any, edges: Edges, vector: bool = False) -> Plan:
    """The same buffer to each neighbour; a block from each."""
    part, dests = as_buffer(sendbuf).pack(), edges[1]
    target = _blocks(recvbuf, len(edges[0]), vector=vector, writable=True)
    own = call("Neighbor_allgather", [part] * len(dests), [part.nbytes] * len(dests), edges)
    return Plan(own, _collect(target))


def alltoall(sendbuf: Any, recvbuf: Any, edges: Edges, *, vector: bool = False, types: bool = False) -> Plan:
    """A block to each neighbour; a block from each."""
    parts = [block.pack() for block in _blocks(sendbuf, len(edges[1]), vector=vector, types=types)]
    target = _blocks(recvbuf, len(edges[0]), vector=vector, types=types, writable=True)
    own = call("Neighbor_alltoall", parts, [part.nbytes for part in parts], edges)
    return Plan(own, _collect(target))
