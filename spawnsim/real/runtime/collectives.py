"""Collectives made of others, for any backend: ordered sums, Python objects, and a check that all are in one call.

`reduction="ordered"` takes the sums of an Allreduce in rank order, the same on every library and size: slices go to
their owners by all-to-all, each owner adds the contributions rank 0, 1, 2, …, and the results are all-gathered, which
moves as many bytes as a ring.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import is_in_place
from spawnsim.comm.ops import SUM, Op, reduce_binomial
from spawnsim.errors import MismatchError, ParameterError, program_place
from spawnsim.units import spans

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
    given = result if is_in_place(sendbuf) else as_buffer(sendbuf)
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


Combine = Callable[[Any, Any], Any]


class ObjectCollectives:
    """Collectives of Python objects, combined in the order of mpi4py's: all are made of `allgather`.

    A backend that can send to some ranks alone overrides `bcast`, `gather`, `scatter` and `alltoall`.
    """

    rank: int
    size: int

    def allgather(self, sendobj: Any) -> list[Any]:
        """Collect all objects at all ranks."""
        raise NotImplementedError

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return self.allgather(obj if self.rank == root else None)[root]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        found = self.allgather(sendobj)
        return found if self.rank == root else None

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        given = self._one_each(sendobj, "scatter") if self.rank == root else None
        return self.bcast(given, root)[self.rank]

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        return [row[self.rank] for row in self.allgather(self._one_each(sendobj, "alltoall"))]

    def reduce(self, sendobj: Any, op: Combine = SUM, root: int = 0) -> Any:
        found = self.gather(sendobj, root)
        return None if found is None else reduce_binomial(found, op)

    def allreduce(self, sendobj: Any, op: Combine = SUM) -> Any:
        return reduce_binomial(self.allgather(sendobj), op)

    def scan(self, sendobj: Any, op: Combine = SUM) -> Any:
        return reduce(op, self.allgather(sendobj)[: self.rank + 1])

    def exscan(self, sendobj: Any, op: Combine = SUM) -> Any:
        before = self.allgather(sendobj)[: self.rank]
        return reduce(op, before) if before else None

    def _one_each(self, objects: Sequence[Any] | None, operation: str) -> list[Any]:
        given = list(objects) if objects is not None else []
        if len(given) != self.size:
            raise ParameterError(
                f"{operation}: give a list of {self.size} objects, one per rank, not {len(given)}"
            )
        return given


UNKNOWN = np.iinfo(np.int64).max


@dataclass(frozen=True)
class CallDescription:
    """What a rank says of its call of a collective, to be compared with what the others say.

    Args:
        call: operation, root and op, as a text: the same on all ranks.
        nbytes: the bytes that one rank gives or takes; None: not to be compared, such as of data that are in place.
        dtype: of their elements; None: not to be compared, such as of derived datatypes.
    """

    call: str
    nbytes: int | None = None
    dtype: str | None = None

    def __str__(self) -> str:
        size = "" if self.nbytes is None else f", {self.nbytes} bytes"
        return f"{self.call}{size}{f' of {self.dtype}' if self.dtype else ''}"

    @property
    def numbers(self) -> list[int]:
        """Return a number for each of the three; hashes have 7 bytes, so that their negatives fit, too."""
        call, dtype = (
            int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
            if text
            else UNKNOWN
            for text in (self.call, self.dtype)
        )
        return [call, UNKNOWN if self.nbytes is None else self.nbytes, dtype]


def require_same_call(
    mine: CallDescription,
    minimum: Callable[[NDArray[np.int64]], object],
    allgather: Callable[[str], list[str]],
) -> None:
    """Raise MismatchError, on all ranks, unless all describe their call in the same way.

    `minimum` replaces an array by its elementwise minimum over all ranks. Of numbers and their negatives that gives the
    lowest and the highest of all, so one reduction of 48 bytes tells whether they are equal; only if they are not are
    the texts themselves gathered, with the lines of the program.
    """
    numbers = mine.numbers
    ends = np.array([*numbers, *(number if number == UNKNOWN else -number for number in numbers)], np.int64)
    minimum(ends)
    lowest, highest = ends[:3], -ends[3:]
    if np.all((lowest == highest) | (lowest == UNKNOWN)):
        return
    place = program_place(traceback.walk_stack(None))
    alike: dict[str, list[int]] = {}
    for rank, said in enumerate(allgather(f"{mine} ({place})" if place else f"{mine}")):
        alike.setdefault(said, []).append(rank)
    table = "\n".join(
        f"  rank{'s' * (len(ranks) > 1)} {spans(ranks)}: {said}" for said, ranks in alike.items()
    )
    raise MismatchError(
        f"ranks have met in different collectives:\n{table}\n  make the same call on every rank"
    )
