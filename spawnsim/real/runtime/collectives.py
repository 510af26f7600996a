"""Collectives derived from messages, for any backend, and code that the backends' own collectives share.

A derived collective is a plan: the bytes to send to each rank, the bytes to receive from each rank, and a final step.
The blocking form waits for a plan, the `I` form returns it. Objects are pickled once per call. Contributions are
combined in the same orders as on virtual ranks.

`reduction="ordered"` computes the sums of an Allreduce in rank order, independent of library and size: an all-to-all
sends slices to their owners, each owner adds the contributions of ranks 0, 1, 2, …, and the results are all-gathered.
This moves as many bytes as a ring.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.buffers import Buffer, as_buffer
from spawnsim.comm.constants import is_in_place
from spawnsim.comm.failures import ERR_ROOT, CallError
from spawnsim.comm.memory import as_bytes
from spawnsim.comm.ops import SUM, Merge, Op, reduce_binomial, reduce_ordered, reduce_to_root, reduce_tree
from spawnsim.errors import MismatchError, ParameterError, Timeout, program_place
from spawnsim.real.runtime.messages import OBJECT, CompositeRequest, PointToPoint, ReceiveTarget, bytes_of
from spawnsim.real.runtime.requests import RealRequest
from spawnsim.real.runtime.wire import Bytes, as_payload
from spawnsim.units import spans

Array = NDArray[Any]
BLOCK = 1 << 15
"""Elements combined at a time, so that the running sum stays in the core's cache."""
CHUNK = 1 << 22
"""Elements per round: reused memory needs no new pages, and the number of bytes sent is the same."""


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
    """Combine one chunk, which is small enough for the received data to stay in the cache."""
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
    """Collectives of Python objects, combined in mpi4py's order: all are implemented by `allgather`.

    A backend that can send to individual ranks overrides `bcast`, `gather`, `scatter` and `alltoall`.
    """

    rank: int
    size: int

    def allgather(self, sendobj: Any) -> list[Any]:
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
    """A rank's description of its call of a collective, for comparison with the other ranks' descriptions.

    Args:
        call: operation, root and op as text; the same on all ranks.
        nbytes: the bytes that one rank contributes or receives; None: not compared, for example for in-place data.
        dtype: the dtype of the elements; None: not compared, for example for derived datatypes.
    """

    call: str
    nbytes: int | None = None
    dtype: str | None = None

    def __str__(self) -> str:
        size = "" if self.nbytes is None else f", {self.nbytes} bytes"
        return f"{self.call}{size}{f' of {self.dtype}' if self.dtype else ''}"

    @property
    def numbers(self) -> list[int]:
        """Return one number per field; hashes have 7 bytes, so that their negatives also fit."""
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
    """Raise MismatchError on all ranks unless all ranks describe their call in the same way.

    `minimum` replaces an array by its elementwise minimum over all ranks. Applied to numbers and their negatives, it
    yields the lowest and highest values, so one reduction of 48 bytes shows whether they are equal. Only if they differ
    are the texts themselves gathered, with the lines of the program.
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
    raise MismatchError(f"ranks called different collectives:\n{table}\n  make the same call on every rank")


Sends = Iterable[tuple[int, Bytes]]
Receives = Iterable[tuple[int, Buffer]]
Compared = tuple[str, Any]
"""Data on which all ranks must agree besides the operation: root and op, and a buffer (bytes and type) or None."""
NOTHING: Compared = ("", None)


def size_of(spec: Any) -> tuple[int | None, str | None]:
    """Return the bytes of a buffer, and its dtype if that is predefined; None for an in-place buffer."""
    if spec is None or is_in_place(spec):
        return None, None
    buffer = spec if isinstance(spec, Buffer) else as_buffer(spec)
    return buffer.nbytes, str(buffer.dtype) if buffer.datatype.is_predefined else None


class DerivedCollectives(PointToPoint, ObjectCollectives):
    """All collectives, derived from messages. A backend overrides collectives that its library implements better.

    The table below adds the blocking and the `I` form of each collective from its plan.
    """

    _inner: PointToPoint  # the same ranks in another context, so that no receive of the program takes these messages

    # An exchange is a set of messages in the communicator's second context, with the number of the collective as their
    # tag. So overlapping exchanges (`Igather`, `Iscatter`) cannot take each other's messages, and neither can a receive
    # of the program. All receives are posted first, so that arriving data go directly to their destination.

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
        """Begin an exchange; the mailbox also copies this rank's own block. `contributed`: bytes of this rank."""
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

        def minimum(ends: NDArray[np.int64]) -> None:
            ends[:] = np.min(self._passed(operation, number, dict.fromkeys(everyone, ends), everyone), axis=0)

        def texts(text: str) -> list[str]:
            return self._passed(operation, number, dict.fromkeys(everyone, text), everyone)

        everyone = range(self.size)
        require_same_call(describe(operation, what), minimum, texts)

    def _met(self, request: CompositeRequest) -> Any:
        """Wait for an exchange; past the deadline, name the missing ranks."""
        try:
            return request.wait()
        except Timeout as late:
            missing = {part._what[1] for part in request._parts if not part.advance()}
            text = f"{late}; missing: rank {', '.join(map(str, sorted(missing)))}"
            raise Timeout(missing, request._what[0], late.sequence, text) from None

    def _root(self, root: int, operation: str) -> None:
        if not 0 <= root < self.size:
            raise CallError(
                ERR_ROOT, f"rank {self.rank}: {operation} with root {root}: ranks are 0 to {self.size - 1}"
            )

    # ---------------------------------------------------------------------------------------------- moving data
    def _barrier(self, operation: str) -> CompositeRequest:
        nothing = np.empty(0, np.uint8)
        others = [rank for rank in range(self.size) if rank != self.rank]
        blocks = [(rank, as_buffer(nothing)) for rank in others]
        return self._plan(operation, [(rank, nothing) for rank in others], blocks, contributed=0)

    def _bcast(self, operation: str, buf: Any, root: int = 0) -> CompositeRequest:
        self._root(root, operation)
        sends: list[tuple[int, Bytes]] = []
        blocks: list[tuple[int, Buffer]] = []
        if self.rank == root:
            data = bytes_of(as_buffer(buf))
            sends = [(rank, data) for rank in range(self.size) if rank != root]
        else:
            blocks = [(root, as_buffer(buf, writable=True))]
        contributed = sends[0][1].nbytes if sends else 0
        return self._plan(operation, sends, blocks, contributed=contributed, what=(f"root {root}", buf))

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
        what = "", sendbuf if operation == "Allgather" else None
        blocks = [(r, table[r]) for r in others]
        return self._plan(operation, [(r, own) for r in others], blocks, contributed=own.nbytes, what=what)

    def _alltoall(self, operation: str, sendbuf: Any, recvbuf: Any) -> CompositeRequest:
        kind = {"vector": operation[-1] in "vw", "types": operation[-1] == "w"}
        into = as_blocks(recvbuf, self.size, writable=True, **kind)
        given = into if is_in_place(sendbuf) else as_blocks(sendbuf, self.size, **kind)
        copied = is_in_place(sendbuf)  # otherwise a block might be overwritten before it has left
        sends = [(r, as_bytes(block.pack()) if copied else bytes_of(block)) for r, block in enumerate(given)]
        whole = sum(data.nbytes for _, data in sends)
        what = "", sendbuf if operation == "Alltoall" else None
        return self._plan(operation, sends, enumerate(into), contributed=whole, what=what)

    # ---------------------------------------------------------------------------------------------- reductions
    def _fold(
        self,
        operation: str,
        given: Buffer,
        ranks: tuple[Iterable[int], Iterable[int]],
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

    def _reduce(
        self, operation: str, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0
    ) -> CompositeRequest:
        self._root(root, operation)
        into = given = None
        if self.rank == root:
            given, into = _given_and_into(sendbuf, recvbuf, alike=True)
        # The orders of virtual ranks, which are MPI's.
        combine = partial(reduce_to_root, root=root if op.Is_commutative() else 0)
        ranks = (range(self.size) if into is not None else (), (root,))
        finish = len if into is None else into.unpack
        own = as_buffer(sendbuf) if given is None else given
        return self._fold(operation, own, ranks, op, combine=combine, finish=finish, root=root)

    def _allreduce(self, operation: str, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> CompositeRequest:
        given, into = _given_and_into(sendbuf, recvbuf, alike=True)
        combine = _in_rank_order if self.runtime.ordered else reduce_tree
        everyone = range(self.size)
        return self._fold(operation, given, (everyone, everyone), op, combine=combine, finish=into.unpack)

    def _scan(self, operation: str, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> CompositeRequest:
        given, into = _given_and_into(sendbuf, recvbuf, alike=True)
        exclusive = operation in ("Exscan", "Iexscan")
        ranks = range(self.rank + (not exclusive)), range(self.rank + exclusive, self.size)
        return self._fold(operation, given, ranks, op, combine=_in_rank_order, finish=into.unpack)

    def _reduce_scatter_block(
        self, operation: str, sendbuf: Any, recvbuf: Any, op: Op = SUM
    ) -> CompositeRequest:
        given, _ = _given_and_into(sendbuf, recvbuf)
        return self._reduce_scatter(operation, sendbuf, recvbuf, [given.count // self.size] * self.size, op)

    def _reduce_scatter(
        self, operation: str, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Op = SUM
    ) -> CompositeRequest:
        """Every rank combines the slices that it keeps."""
        given, into = _given_and_into(sendbuf, recvbuf)
        op.check(given.datatype)
        counts = list(self.allgather(into.count) if recvcounts is None else recvcounts)
        slices = [given.part(sum(counts[:rank]), counts[rank]).pack() for rank in range(self.size)]
        parts = [np.empty_like(slices[self.rank]) for _ in counts]

        def after() -> None:
            into.part(0, counts[self.rank]).unpack(reduce_tree(parts, op.merging(given.datatype)))

        sends = [(rank, as_bytes(part)) for rank, part in enumerate(slices)]
        blocks = [(rank, as_buffer(as_bytes(part))) for rank, part in enumerate(parts)]
        whole = sum(data.nbytes for _, data in sends)
        return self._plan(operation, sends, blocks, contributed=whole, after=after, what=(op.name, given))

    # ----------------------------------------------------------------------------------------------- objects
    def _swap(
        self, operation: str, objects: dict[int, Any], sources: Sequence[int], root: int | None = None
    ) -> list[Any]:
        """Send `objects[rank]` to each rank, return what the sources sent here, in their order."""
        tag = self._count()
        if self.runtime.check_calls:
            self._agreed(operation, tag, ("" if root is None else f"root {root}", None))
        return self._passed(operation, tag, objects, sources, counted=True)

    def _passed(
        self,
        operation: str,
        tag: int,
        objects: dict[int, Any],
        sources: Sequence[int],
        *,
        counted: bool = False,
    ) -> list[Any]:
        receiving = [self._inner._receive(rank, tag, operation, OBJECT) for rank in sources]
        pickled = {id(thing): as_payload(self.runtime.pickle.dumps(thing)) for thing in _distinct(objects)}
        if counted:
            self.runtime.counters.part(sum(data.nbytes for data in pickled.values()))
        sending = [
            self._inner._start(pickled[id(thing)], (rank, tag), operation) for rank, thing in objects.items()
        ]
        parts: list[RealRequest] = [*receiving, *sending]
        self._met(CompositeRequest.of(self.runtime, (operation, -1, self), parts))
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


def describe(operation: str, what: Compared) -> CallDescription:
    """Return the description of a rank's call."""
    return CallDescription(", ".join(filter(None, [operation, what[0]])), *size_of(what[1]))


def _distinct(objects: dict[int, Any]) -> Iterable[Any]:
    return {id(thing): thing for thing in objects.values()}.values()


def _given_and_into(sendbuf: Any, recvbuf: Any, *, alike: bool = False) -> tuple[Buffer, Buffer]:
    """Return both buffers of a reduction; `alike`: refuse different counts or types."""
    into = as_buffer(recvbuf, writable=True)
    given = into if is_in_place(sendbuf) else as_buffer(sendbuf)
    if alike and (given.count, given.dtype) != (into.count, into.dtype):
        raise ParameterError(
            f"mismatch in send ({given.dtype} × {given.count}) and receive buffer ({into.dtype} × {into.count})"
        )
    return given, into


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
    def begin(self: DerivedCollectives, *args: Any, **kwargs: Any) -> CompositeRequest:
        return getattr(self, plan)("I" + name.lower(), *args, **kwargs)  # type: ignore[no-any-return]

    def block(self: DerivedCollectives, *args: Any, **kwargs: Any) -> None:
        self._met(getattr(self, plan)(name, *args, **kwargs))

    setattr(DerivedCollectives, name, block)
    setattr(DerivedCollectives, "I" + name.lower(), begin)


for _name in (
    "Barrier", "Bcast", "Gather", "Gatherv", "Scatter", "Scatterv", "Allgather", "Allgatherv", "Alltoall",
    "Alltoallv", "Alltoallw", "Reduce", "Allreduce", "Reduce_scatter", "Reduce_scatter_block",
):  # fmt: skip
    _forms(_name, "_" + _name.lower().rstrip("vw"))
DerivedCollectives.barrier = DerivedCollectives.Barrier  # type: ignore[attr-defined]
_forms("Scan", "_scan")
_forms("Exscan", "_scan")
