"""`reduction="ordered"`: an Allreduce whose sums are taken in rank order, the same on every library and size.

Slices go to their owners by all-to-all, each owner adds the contributions rank 0, 1, 2, …, and the results are
all-gathered: a ring's bytes. Knows buffers, ops and two collectives; knows no watchdog and no deadline.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import IN_PLACE
from spawnsim.comm.ops import Op

Array = NDArray[Any]
BLOCK = 1 << 15
"""Elements combined at a time, so that the running sum stays in the core's cache."""
CHUNK = 1 << 22
"""Elements per round: memory that is used again needs no new pages, and the same bytes travel."""


def slices(length: int, size: int) -> tuple[list[int], list[int]]:
    """Return counts and displacements of `size` almost equal slices of `length` elements."""
    counts = [length // size + (rank < length % size) for rank in range(size)]
    starts = [sum(counts[:rank]) for rank in range(size)]
    return counts, starts


def fold(parts: Array, op: Op) -> Array:
    """Combine the rows of `parts` (size, n) in place, from row 0 on; return the last row, which holds the result."""
    for start in range(0, parts.shape[1], BLOCK):
        rows = parts[:, start : start + BLOCK]
        for before, row in pairwise(rows):
            op.reduce(before, row)
    last: Array = parts[-1]
    return last


def ordered_allreduce(raw: Any, sendbuf: Any, recvbuf: Any, op: Op) -> None:
    """All ranks' contributions combined as ((rank 0 op rank 1) op rank 2) op …; `raw` has mpi4py's collectives.

    `sendbuf`, `recvbuf`: dense buffers of one predefined datatype, or `IN_PLACE` and the buffer.
    """
    result = as_buffer(recvbuf, writable=True)
    given = result if sendbuf is IN_PLACE else as_buffer(sendbuf)
    op.check(given.datatype)
    contribution, into = given.array, result.array
    scratch = np.empty(raw.Get_size() * (CHUNK // raw.Get_size() + 1), contribution.dtype)
    for start in range(0, contribution.size, CHUNK):
        stop = start + CHUNK
        _chunk(raw, contribution[start:stop], into[start:stop], (scratch, op))


def _chunk(raw: Any, contribution: Array, into: Array, tools: tuple[Array, Op]) -> None:
    """Combine one chunk, small enough for what is received to stay in the cache."""
    scratch, op = tools
    size, rank, nbytes = raw.Get_size(), raw.Get_rank(), contribution.itemsize
    counts, starts = slices(contribution.size, size)
    mine = counts[rank]
    parts = scratch[: size * mine].reshape(size, mine)
    sent = [count * nbytes for count in counts], [start * nbytes for start in starts]
    got = [mine * nbytes] * size, [r * mine * nbytes for r in range(size)]
    raw.Alltoallv([contribution.view(np.uint8), *sent, "B"], [_bytes(parts), *got, "B"])
    raw.Allgatherv([_bytes(fold(parts, op)), "B"], [into.view(np.uint8), *sent, "B"])


def _bytes(array: Array) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
