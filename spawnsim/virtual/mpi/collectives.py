"""Collectives under mpi4py's names: blocking, non-blocking and persistent ones of buffers, of neighbors, of objects.

What each collective of buffers does is decided in `semantics`; here it is only run, in three forms. Of pickled objects
(lower case) each rank gets copies of its own: no object is shared by two ranks. Between two neighbors with several
edges the k-th edge out meets the k-th one in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, signature
from typing import Any

import numpy as np

from spawnsim.comm import ops
from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.calls import nonblocking, persistent
from spawnsim.comm.constants import PROC_NULL
from spawnsim.comm.failures import ERR_COUNT, ArgumentError, Truncated
from spawnsim.comm.handles import INFO_NULL, each_integer, integer
from spawnsim.comm.ops import SUM, Op
from spawnsim.phantoms import PhantomError
from spawnsim.virtual.mpi import semantics
from spawnsim.virtual.mpi.context import Member
from spawnsim.virtual.mpi.instance import Call, CollectiveInstance
from spawnsim.virtual.mpi.payload import dumps, loads
from spawnsim.virtual.mpi.requests import Prequest, Request, request_for
from spawnsim.virtual.mpi.semantics import Outcome


def agreed_op(op: Op) -> tuple[str, ...]:
    """Return what all ranks of a reduction must have in common."""
    return (getattr(op, "name", "") or "user-defined",)


def folded(op: Op) -> Callable[[bytes, bytes], bytes]:
    """Return `combine` for pickles."""
    return lambda a, b: dumps(op(loads(a), loads(b)))


class _Collective:
    """A description of a collective, which gives its class the three calls of that name; see `collective`."""

    def __init__(self, describe: Callable[..., Call]) -> None:
        self._describe = describe

    def __set_name__(self, owner: type, name: str) -> None:
        describe, started, given = self._describe, nonblocking(name), signature(self._describe)
        info = Parameter("info", Parameter.POSITIONAL_OR_KEYWORD, default=INFO_NULL)
        with_info = Signature([*given.parameters.values(), info])

        def run(self: Any, *args: Any, **kwargs: Any) -> None:
            call = describe(self, *args, **kwargs)
            self._take(call, self._meet(call))

        def start(self: Any, *args: Any, **kwargs: Any) -> Request:
            return self._start(describe(self, *args, **kwargs))  # type: ignore[no-any-return]

        def prepare(self: Any, *args: Any, **kwargs: Any) -> Prequest:
            # A persistent call binds its arguments once (MPI 4.1, 6.13), and begins afresh at each Start.
            bound = with_info.bind(self, *args, **kwargs)
            bound.arguments.pop("info", None)
            if "root" in bound.arguments:  # what is no number is refused now, and not at the first Start
                bound.arguments["root"] = integer(bound.arguments["root"])
            return Prequest.prepare(lambda: getattr(self, started)(*bound.args[1:], **bound.kwargs))

        _add(owner, name, run, (given, describe.__doc__))
        _add(owner, started, start, (given, f"Start {name}."))
        _add(owner, persistent(name), prepare, (with_info, f"Prepare {name}."))


def _add(owner: type, name: str, call: Any, told: tuple[Signature, str | None]) -> None:
    """Give a class a call; `told` is its signature and its docstring."""
    call.__name__, call.__qualname__ = name, f"{owner.__name__}.{name}"
    call.__signature__, call.__doc__ = told
    setattr(owner, name, call)


def collective(describe: Callable[..., Call]) -> Any:
    """Make three calls of one description: of `Bcast` also `Ibcast` and `Bcast_init`.

    MPI defines the non-blocking and the persistent form by the blocking one (MPI 4.1, 6.12 and 6.13): the same
    arguments, the same matching among the ranks, the same result, and a request that says when. So they are not
    written down again. Use it as a decorator in the class that is to have the calls.

    Args:
        describe: takes the arguments of the blocking call, and returns what is to be done.

    Returns:
        What the class replaces by the blocking call when it is made.
    """
    return _Collective(describe)


class Collectives(Member):
    """Collectives of buffers and of objects."""

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

    def _take(self, call: Call, outcome: Any) -> None:
        """Put the outcome where it belongs; what does not fit is named."""
        try:
            call.collect(outcome)
        except Truncated as error:
            text = f"{error.message}; it is from {call.describe()} on {self._label}"
            raise Truncated(message=text) from None
        except PhantomError as error:
            raise PhantomError(f"rank {self._me} in {call.describe()} on {self._label}: {error}") from None

    def _start(self, call: Call) -> Request:
        # The program goes on: it may write to its buffer once the result is there, before others come.
        if call.lent:
            call.part, call.lent = call.part.copy(), False
        departure = self._join(call)

        def deliver(_: Any) -> None:
            self._take(call, departure.instance.outcome(departure.me))

        return request_for(self._world, departure, departure, deliver)

    # -- of buffers --------------------------------------------------------------------------------------------

    @collective
    def Barrier(self) -> Call:
        """Wait until all ranks have arrived."""
        return semantics.barrier()

    @collective
    def Bcast(self, buf: Any, root: int = 0) -> Call:
        """Send the root's buffer to all ranks."""
        return semantics.bcast(buf, self._root(root), self._me)

    @collective
    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
        """Collect equal blocks at the root."""
        return semantics.gather(sendbuf, recvbuf, self._root(root), self._place)

    @collective
    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
        """Collect unequal blocks at the root."""
        return semantics.gather(sendbuf, recvbuf, self._root(root), self._place, vector=True)

    @collective
    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
        """Hand out equal blocks of the root's buffer."""
        return semantics.scatter(sendbuf, recvbuf, self._root(root), self._place)

    @collective
    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
        """Hand out unequal blocks of the root's buffer."""
        return semantics.scatter(sendbuf, recvbuf, self._root(root), self._place, vector=True)

    @collective
    def Allgather(self, sendbuf: Any, recvbuf: Any) -> Call:
        """Collect equal blocks at all ranks."""
        return semantics.allgather(sendbuf, recvbuf, self._place)

    @collective
    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> Call:
        """Collect unequal blocks at all ranks."""
        return semantics.allgather(sendbuf, recvbuf, self._place, vector=True)

    @collective
    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> Call:
        """Exchange equal blocks between all pairs of ranks."""
        return semantics.alltoall(sendbuf, recvbuf, self._place)

    @collective
    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> Call:
        """Exchange unequal blocks between all pairs of ranks."""
        return semantics.alltoall(sendbuf, recvbuf, self._place, vector=True)

    @collective
    def Alltoallw(self, sendbuf: Any, recvbuf: Any) -> Call:
        """Exchange blocks of different types between all pairs of ranks."""
        return semantics.alltoall(sendbuf, recvbuf, self._place, vector=True, types=True)

    @collective
    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Call:
        """Combine all ranks' buffers at the root."""
        return semantics.reduce(sendbuf, recvbuf, op, root=self._root(root), me=self._me)

    @collective
    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Call:
        """Combine all ranks' buffers at all ranks."""
        return semantics.allreduce(sendbuf, recvbuf, op)

    @collective
    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Call:
        """Combine all ranks' buffers and hand out equal blocks."""
        place = self._me, len(self._members)
        return semantics.reduce_scatter(sendbuf, recvbuf, None, op, place=place)

    @collective
    def Reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
    ) -> Call:
        """Combine all ranks' buffers and hand out blocks of `recvcounts` elements."""
        counts = self._counts(recvbuf, recvcounts)
        place = self._me, len(self._members)
        return semantics.reduce_scatter(sendbuf, recvbuf, counts, op, place=place)

    # -- of objects --------------------------------------------------------------------------------------------

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
        parts = self._meet(Call("gather", "gatherv", part, len(part), root, sizes="each", outcome=outcome))
        return None if parts is None else [loads(each) for each in parts]

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return this rank's item of the root's sequence."""
        parts, root = None, self._root(root)
        if self._me == root:
            parts = self._one_each(sendobj)
        nbytes = np.array([len(part) for part in parts]) if parts else 0
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

        def outcome(instance: CollectiveInstance, rank: int) -> Any:
            return ops.reduce_binomial(instance.parts(rank), folded(op)) if rank == root else None

        combined = self._meet(
            Call("reduce", "reduce", part, len(part), root, agree=agreed_op(op), outcome=outcome)
        )
        return None if combined is None else loads(combined)

    def allreduce(self, sendobj: Any, op: Op = SUM) -> Any:
        """Return the combination of all ranks' objects."""
        part = dumps(sendobj)

        def outcome(instance: CollectiveInstance, rank: int) -> Any:
            return instance.shared(rank, lambda: ops.reduce_binomial(instance.parts(rank), folded(op)))

        call = Call("allreduce", "allreduce", part, len(part), agree=agreed_op(op), outcome=outcome)
        return loads(self._meet(call))

    def _one_each(self, sendobj: Sequence[Any] | None) -> list[bytes]:
        size = len(self._peers)
        items = [None] * size if sendobj is None else list(sendobj)
        if len(items) != size:
            raise ArgumentError(
                ERR_COUNT, f"expecting {size} items, one per rank of {self._label}; got {len(items)}"
            )
        return [dumps(item) for item in items]


Edge = tuple[int, int]  # a neighbour, and which of the edges that join the two
Edges = tuple[Sequence[Edge], Sequence[Edge]]  # from whom, to whom; both ends of an edge mark it alike


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


def neighbor_call(name: str, parts: Sequence[Any], nbytes: Sequence[int], edges: Edges) -> Call:
    """Return the call of a rank that sends `parts`, one per outgoing edge, and gets one per incoming edge."""
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
    """Return a buffer's blocks, one for each of `number` edges; of a rank without edges, none."""
    if not number:  # a count beside it is that of each block, of which there are none
        return []
    return list(as_buffer(spec, vector=vector, blocks=number, types=types, writable=writable))


def _collect(target: list[Any]) -> Outcome:
    def unpack(blocks: Sequence[Any]) -> None:
        for block, data in zip(target, blocks, strict=True):
            if data is not None:
                block.unpack(data)

    return unpack


def allgather_call(sendbuf: Any, recvbuf: Any, edges: Edges, vector: bool = False) -> Call:
    """The same buffer to each neighbour; a block from each."""
    part, dests = as_buffer(sendbuf).pack(), edges[1]
    target = _blocks(recvbuf, len(edges[0]), vector=vector, writable=True)
    own = neighbor_call("Neighbor_allgather", [part] * len(dests), [part.nbytes] * len(dests), edges)
    own.collect = _collect(target)
    return own


def alltoall_call(
    sendbuf: Any, recvbuf: Any, edges: Edges, *, vector: bool = False, types: bool = False
) -> Call:
    """A block to each neighbour; a block from each."""
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
        """Exchange equal blocks, one with each neighbour."""
        return alltoall_call(sendbuf, recvbuf, self._edges)

    @collective
    def Neighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> Call:
        """Exchange unequal blocks, one with each neighbour."""
        return alltoall_call(sendbuf, recvbuf, self._edges, vector=True)

    @collective
    def Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> Call:
        """Exchange blocks of different types, one with each neighbour."""
        return alltoall_call(sendbuf, recvbuf, self._edges, vector=True, types=True)

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of the incoming neighbours."""
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
