"""Collectives under mpi4py's names, on buffers (blocking, non-blocking and persistent) and on objects.

A collective on buffers is described once, as a `Call`: the rank's contribution, its outcome, and the arguments on which
all ranks must agree. Snapshots are numpy arrays; reductions keep the orders of `comm.ops`, so that results are
reproducible bit for bit. As in mpi4py, `IN_PLACE` means that the data are in the other buffer. Each rank gets its own
copies of pickled objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from inspect import Parameter, Signature, signature
from typing import Any

import numpy as np

from spawnsim.comm import ops
from spawnsim.comm.buffers import Buffer, Vector, as_buffer
from spawnsim.comm.constants import IN_PLACE
from spawnsim.comm.failures import ERR_COUNT, ERR_TYPE, ArgumentError, Truncated
from spawnsim.comm.handles import INFO_NULL, each_integer, integer
from spawnsim.comm.layouts import BF16
from spawnsim.comm.memory import as_bytes
from spawnsim.comm.ops import SUM, Op
from spawnsim.phantoms import PhantomError
from spawnsim.virtual.engine.kernel import current_task
from spawnsim.virtual.mpi.context import Member
from spawnsim.virtual.mpi.instance import Call, CollectiveInstance, drop
from spawnsim.virtual.mpi.payload import differ, dumps, loads, warn, watched
from spawnsim.virtual.mpi.requests import Prequest, Request, request_for

Outcome = Callable[[Any], object]


def agreed_op(op: Op) -> tuple[str, ...]:
    """Return the arguments on which all ranks of a reduction must agree."""
    return (getattr(op, "name", "") or "user-defined",)


def folded(op: Op) -> Callable[[bytes, bytes], bytes]:
    """Return `combine` for pickled objects."""
    return lambda a, b: dumps(op(loads(a), loads(b)))


class _Collective:
    """A description of a collective, which adds three calls to its class; see `collective`."""

    def __init__(self, describe: Callable[..., Call]) -> None:
        self._describe = describe

    def __set_name__(self, owner: type, name: str) -> None:
        describe, started, given = self._describe, "I" + name[0].lower() + name[1:], signature(self._describe)
        info = Parameter("info", Parameter.POSITIONAL_OR_KEYWORD, default=INFO_NULL)
        with_info = Signature([*given.parameters.values(), info])

        def run(self: Any, *args: Any, **kwargs: Any) -> None:
            call = describe(self, *args, **kwargs)
            self._take(call, self._meet(call))

        def start(self: Any, *args: Any, **kwargs: Any) -> Request:
            return self._start(describe(self, *args, **kwargs))  # type: ignore[no-any-return]

        def prepare(self: Any, *args: Any, **kwargs: Any) -> Prequest:
            # A persistent call binds its arguments once (MPI 4.1, 6.13), and begins anew at each Start.
            bound = with_info.bind(self, *args, **kwargs)
            bound.arguments.pop("info", None)
            if "root" in bound.arguments:  # an invalid root is refused now instead of at the first Start
                bound.arguments["root"] = integer(bound.arguments["root"])
            return Prequest.prepare(lambda: getattr(self, started)(*bound.args[1:], **bound.kwargs))

        _add(owner, name, run, (given, describe.__doc__))
        _add(owner, started, start, (given, f"Start {name}."))
        _add(owner, f"{name}_init", prepare, (with_info, f"Prepare {name}."))


def _add(owner: type, name: str, call: Any, documented: tuple[Signature, str | None]) -> None:
    call.__name__, call.__qualname__ = name, f"{owner.__name__}.{name}"
    call.__signature__, call.__doc__ = documented
    setattr(owner, name, call)


def collective(describe: Callable[..., Call]) -> Any:
    """Create three calls from one description: from `Bcast` also `Ibcast` and `Bcast_init`.

    MPI defines the non-blocking and the persistent forms through the blocking one (MPI 4.1, 6.12 and 6.13): the same
    arguments, the same matching among the ranks, the same result, and in addition a request. So they are not written
    separately. Use it as a decorator in the class that gets the calls.

    Args:
        describe: Takes the arguments of the blocking call, and returns its `Call`.

    Returns:
        A descriptor, which the class replaces with the blocking call.
    """
    return _Collective(describe)


def _in_place(spec: Any) -> bool:
    """Return whether a rank's data are in its other buffer; as in mpi4py, None means the same."""
    # Inlines `is_in_place`.
    return spec is None or spec is IN_PLACE or type(spec).__name__ == "InPlaceType"


def fill_blocks(spec: Any, **how: Any) -> Outcome:
    """Return a function that unpacks a list of blocks into a buffer specification; it ignores None."""
    target = as_buffer(spec, writable=True, **how)

    def unpack(blocks: Sequence[Any] | None) -> None:
        if blocks is None or _fill_row(target, blocks):
            return
        for block, data in zip(target, blocks, strict=True):
            # A missing block is the root's own, which IN_PLACE left in position.
            if data is not None:
                _unpack_alike("a collective", block, data)

    return unpack


def _unpack_alike(call: str, target: Buffer, data: Any) -> None:
    """Unpack data, and warn if they are less than the buffer, or of another type."""
    nbytes = target.unpack(data)
    if nbytes < target.nbytes:
        _warn(f"received {nbytes} bytes in {call} into {target.nbytes}: MPI requires equal counts")
    elif nbytes and differ(data.dtype, target.dtype):
        kinds = f"{data.dtype} in {call} into {target.dtype}"
        _warn(f"received {kinds}: MPI copies the bytes and does not convert them")


def _warn(what: str) -> None:
    task = current_task()
    if task is not None:
        warn(task.kernel.owner, what)


def _fill_row(target: Buffer | Vector, blocks: Sequence[Any]) -> bool:
    """Copy blocks to contiguous memory; False if the target is not contiguous, or the blocks do not fit exactly."""
    # One copy for all blocks: a thousand ranks that each get a block from every rank have a million blocks.
    row = target.row()
    if row is None or any(type(data) is not np.ndarray or data.dtype is not row.dtype for data in blocks):
        return False
    counts = target.counts if isinstance(target, Vector) else [target.count] * target.blocks
    if [*map(len, blocks)] != counts:
        return False
    np.concatenate(blocks, out=row)
    return True


def taken_apart(spec: Any, size: int, **how: Any) -> list[Any]:
    """Return snapshots of the blocks of a buffer specification, one for each of `size` ranks."""
    source = as_buffer(spec, blocks=size, **how)
    if isinstance(source, Vector) or source.blocks != size or source.phantom:
        return [block.pack() for block in source]
    return list(source.pack().reshape(size, -1))


def _joined(parts: list[Any]) -> Any:
    """Return all contributions in a row: made once, or a thousand ranks would unpack a million blocks."""
    # Equal bytes may have several dtypes (an int32 and its unsigned twin); numpy would convert them to a common dtype
    # and change the bytes.
    same = all(part.dtype == parts[0].dtype for part in parts)
    return np.concatenate(parts if same else [as_bytes(part) for part in parts])


def _all_parts(instance: CollectiveInstance, rank: int) -> list[Any]:
    # One list for all ranks: otherwise each rank would create a list with an entry per rank.
    found: list[Any] = instance.shared(instance.parts)
    return found


@cache  # numpy takes four microseconds for a name
def _name(dtype: np.dtype[Any] | None) -> str:
    return "" if dtype is None else "bfloat16" if dtype == BF16 else dtype.name


def _reducing(
    name: str, buffers: tuple[Any, Any], op: Op, *, for_all: bool = False, blocks: int = 1
) -> tuple[Call, Buffer]:
    """Return the call of a reduction of (send buffer, receive buffer), without outcome so far, and the send buffer.

    With `for_all`, every rank gets the combination, so no rank leaves before all have arrived. The send buffer has
    `blocks` blocks.
    """
    sendbuf, recvbuf = buffers
    if sendbuf is recvbuf and type(sendbuf) is np.ndarray:
        _warn(f"passed one buffer twice to {name}, which MPI forbids: MPI.IN_PLACE stands for the second")
    own = as_buffer(recvbuf if _in_place(sendbuf) else sendbuf, blocks=blocks)
    op.check(own.datatype)
    call = Call(name, name.lower(), None, own.nbytes, dtype=_name(own.datatype.dtype))
    # The arguments on which all ranks must agree are separate from the data, so that a mismatch raises an error with
    # both values instead of returning a wrong sum.
    call.agree = (op.name or "user-defined", own.count * own.blocks, own.type_name)
    if for_all:
        call.op, call.datatype = op, own.datatype
        call.part, call.borrowed = _borrow(own)
    else:
        call.part = own.pack()
    return call, own


def _receiving(name: str, own: Buffer, recvbuf: Any) -> Outcome:
    target = as_buffer(recvbuf, writable=True)
    agree(name, own, target)
    return target.unpack


def agree(call: str, sent: Buffer, target: Buffer) -> None:
    """Raise an error if buffers of one call differ in count or type. Two names of one numpy type are the same type."""
    if sent.count != target.count:
        raise ArgumentError(ERR_COUNT, f"{call}: {sent.count} elements into a buffer of {target.count}")
    ours, theirs = sent.datatype, target.datatype
    if ours is theirs:
        return
    # MPI matches type signatures: MPI.INT and MPI.INT32_T are one type to numpy, and a reduction may mix the two names.
    plain = ours.is_predefined and theirs.is_predefined and ours.dtype is not None
    if ours != theirs and not (plain and ours.dtype == theirs.dtype):
        names = ours.Get_name() or "a derived type", theirs.Get_name() or "a derived type"
        raise ArgumentError(ERR_TYPE, f"{call}: {names[0]} into a buffer of {names[1]}")


def _borrow(own: Buffer) -> tuple[Any, bool]:
    """Return a contribution, and whether it is the program's memory itself.

    If every rank waits for every other rank, the result is computed before any of them returns, so no copy is needed. A
    copy is needed wherever a rank may return earlier: in a rooted collective, a scan, and every non-blocking call.
    """
    # Derived types have gaps, which must not be sent, so only plain arrays are borrowed.
    if own.datatype.dtype is not None and own.datatype.is_predefined:
        return own.array, True
    return own.pack(), False


def _scattering(call: Call, ends: tuple[int, int], own: Buffer, recvbuf: Any) -> Call:
    # The combination is bytes for derived types, and elements for predefined types.
    step = len(call.part) // max(own.count * own.blocks, 1)
    call.outcome = lambda instance, rank: instance.combined(rank)[ends[0] * step : ends[1] * step]
    call.collect = as_buffer(recvbuf, writable=True).unpack
    return call


class Collectives(Member):
    """Collectives on buffers and on objects."""

    __slots__ = ()

    def _root(self, root: int) -> int:
        root = integer(root)
        self._check_root(root)
        return root

    def _take(self, call: Call, outcome: Any) -> None:
        """Deliver the outcome; a truncation error names the call."""
        try:
            call.collect(outcome)
        except Truncated as error:
            text = f"{error.message}; it is from {call.describe()} on {self._label}"
            raise Truncated(message=text) from None
        except PhantomError as error:
            raise PhantomError(f"rank {self._me} in {call.describe()} on {self._label}: {error}") from None

    def _start(self, call: Call) -> Request:
        # The program continues: it may write to its buffer once its result is there, before other ranks arrive.
        unchanged = None
        if call.borrowed:
            own, call.part, call.borrowed = call.part, call.part.copy(), False
            unchanged = watched(self._world, own, call.part, f"I{call.name.lower()}")
        departure = self._join(call)

        def deliver(status: Any) -> None:
            if unchanged is not None:
                unchanged(status)
            self._take(call, departure.instance.outcome(departure.me))

        return request_for(self._world, departure, departure, deliver)

    # -- on buffers --------------------------------------------------------------------------------------------

    @collective
    def Barrier(self) -> Call:
        return Call("Barrier", "barrier")

    @collective
    def Bcast(self, buf: Any, root: int = 0) -> Call:
        """Send the root's buffer to all ranks."""
        own, root = as_buffer(buf), self._root(root)
        here = self._me == root
        # The root's part itself, not a copy per rank: receivers unpack it, and no rank writes to it.
        outcome = lambda instance, rank: instance.calls[root].part  # noqa: E731
        return Call(
            "Bcast", "bcast", own.pack() if here else None, own.nbytes, root, sizes="root", outcome=outcome,
            # The root's buffer already holds the data; unpacking into it would cost a pass over memory.
            collect=drop if here else partial(_unpack_alike, "Bcast", own),
        )  # fmt: skip

    def _gather(self, sendbuf: Any, recvbuf: Any, root: int, vector: bool) -> Call:
        me, size = self._me, len(self._peers)
        root = self._root(root)
        part = None if _in_place(sendbuf) and me == root else as_buffer(sendbuf).pack()
        collect = fill_blocks(recvbuf, vector=vector, blocks=size) if me == root else drop
        nbytes = 0 if part is None else part.nbytes
        outcome = lambda instance, rank: instance.parts() if rank == root else None  # noqa: E731
        # With equal blocks, one arrival determines the message size and so the algorithm; otherwise all must have
        # arrived.
        how = ("gatherv", "each") if vector else ("gather", "all")
        return Call("Gather", how[0], part, nbytes, root, sizes=how[1], outcome=outcome, collect=collect)

    @collective
    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
        return self._gather(sendbuf, recvbuf, root, vector=False)

    @collective
    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
        return self._gather(sendbuf, recvbuf, root, vector=True)

    def _scatter(self, sendbuf: Any, recvbuf: Any, root: int, vector: bool) -> Call:
        root = self._root(root)
        here = self._me == root
        part: list[Any] | None = None
        nbytes: Any = 0  # only the root knows how much the other ranks get
        if here:
            part = taken_apart(sendbuf, len(self._peers), vector=vector)
            nbytes = np.array([block.nbytes for block in part])
        outcome = lambda instance, rank: instance.calls[root].part[rank]  # noqa: E731
        keeps = _in_place(recvbuf) and here
        collect: Outcome = drop if keeps else as_buffer(recvbuf, writable=True).unpack
        return Call("Scatter", "scatter", part, nbytes, root, sizes="root", outcome=outcome, collect=collect)

    @collective
    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
        return self._scatter(sendbuf, recvbuf, root, vector=False)

    @collective
    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Call:
        return self._scatter(sendbuf, recvbuf, root, vector=True)

    @collective
    def Allgather(self, sendbuf: Any, recvbuf: Any) -> Call:
        """Collect equal blocks at all ranks."""
        size = len(self._peers)
        target = as_buffer(recvbuf, writable=True, blocks=size)
        part, borrowed = _borrow(target.block(self._me) if _in_place(sendbuf) else as_buffer(sendbuf))
        # Joined once for all ranks: separate lists of 1,000 blocks would cost a million unpackings.
        outcome = lambda instance, rank: instance.shared(lambda: _joined(instance.parts()))  # noqa: E731
        return Call(
            "Allgather", "allgather", part, part.nbytes, sizes="each", outcome=outcome, borrowed=borrowed,
            collect=target.unpack,
        )  # fmt: skip

    @collective
    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> Call:
        """Collect unequal blocks at all ranks."""
        how: Any = {"vector": True, "blocks": len(self._peers)}
        own = as_buffer(recvbuf, **how).block(self._me) if _in_place(sendbuf) else as_buffer(sendbuf)
        part = own.pack()
        return Call(
            "Allgather", "allgather", part, part.nbytes, sizes="each", outcome=_all_parts,
            collect=fill_blocks(recvbuf, **how),
        )  # fmt: skip

    def _alltoall(self, sendbuf: Any, recvbuf: Any, **how: Any) -> Call:
        size = len(self._peers)
        # In place, received data overwrite the sent data, so these are packed (copied) before anything is written.
        blocks = taken_apart(recvbuf if _in_place(sendbuf) else sendbuf, size, **how)
        return Call(
            "Alltoall", "alltoall", blocks, np.array([block.nbytes for block in blocks]), sizes="matrix",
            outcome=lambda instance, rank: [part[rank] for part in instance.parts()],
            collect=fill_blocks(recvbuf, blocks=size, **how),
        )  # fmt: skip

    @collective
    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> Call:
        return self._alltoall(sendbuf, recvbuf)

    @collective
    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> Call:
        return self._alltoall(sendbuf, recvbuf, vector=True)

    @collective
    def Alltoallw(self, sendbuf: Any, recvbuf: Any) -> Call:
        return self._alltoall(sendbuf, recvbuf, vector=True, types=True)

    @collective
    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Call:
        """Combine all ranks' buffers at the root, in the order of a binomial tree, or of gloo's rings."""
        root = self._root(root)
        call, own = _reducing("Reduce", (sendbuf, recvbuf), op)
        datatype = own.datatype
        # Commutative: the tree begins at the root, as in MPI libraries. Otherwise it begins at rank 0, so that operands
        # stay in rank order.
        first = root if op.Is_commutative() else 0

        def outcome(instance: CollectiveInstance, rank: int) -> Any:
            if rank != root:
                return None
            if instance.sums_as_gloo(op, datatype, call.part):
                return ops.combined(instance.parts(), op, datatype, rooted=True)
            return ops.reduce_to_root(instance.parts(), op.merging(datatype), first)

        call.root, call.outcome = root, outcome
        if self._me == root:
            call.collect = _receiving("Reduce", own, recvbuf)
        return call

    @collective
    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Call:
        """Combine all ranks' buffers at all ranks, in the order of recursive doubling, or of gloo's rings.

        Recursive doubling returns the same bits as both MPI wheels.
        """
        call, own = _reducing("Allreduce", (sendbuf, recvbuf), op, for_all=True)
        call.outcome, call.collect = CollectiveInstance.combined, _receiving("Allreduce", own, recvbuf)
        return call

    @collective
    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Call:
        """Combine all ranks' buffers and distribute equal blocks."""
        size = len(self._peers)
        call, own = _reducing("Reduce_scatter", (sendbuf, recvbuf), op, for_all=True, blocks=size)
        call.sizes = "blocks"  # not a list of blocks: each of a thousand ranks would create one
        ends = self._me * own.count, (self._me + 1) * own.count
        return _scattering(call, ends, own, recvbuf)

    @collective
    def Reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
    ) -> Call:
        """Combine all ranks' buffers and distribute blocks of `recvcounts` elements."""
        if recvcounts is None:  # each rank contributes the number of elements that it receives
            count = as_buffer(recvbuf).count
            recvcounts = self._meet(Call("Reduce_scatter", "allgather", count, 8, outcome=_all_parts))
        lengths, me = np.array(each_integer(recvcounts), np.int64), self._me
        call, own = _reducing("Reduce_scatter", (sendbuf, recvbuf), op, for_all=True)
        if lengths.sum() != own.count:
            raise ArgumentError(
                ERR_COUNT,
                f"recvcounts add up to {lengths.sum()}, but each rank contributes {own.count} elements",
            )
        # The time depends on the bytes that each rank receives. With the whole vector as size, every block took as long
        # as the whole vector.
        call.nbytes, call.sizes = lengths * own.datatype.size, "same"
        return _scattering(call, (lengths[:me].sum(), lengths[: me + 1].sum()), own, recvbuf)

    def _scan(self, sendbuf: Any, recvbuf: Any, op: Op, inclusive: bool) -> Call:
        name = "Scan" if inclusive else "Exscan"
        call, own = _reducing(name, (sendbuf, recvbuf), op)
        merge = ops.quiet(op.merging(own.datatype))
        # Into new memory: other ranks still need the parts.
        combine = lambda a, b: merge(a, b, np.empty_like(b))  # noqa: E731

        def outcome(instance: CollectiveInstance, rank: int) -> Any:
            last = rank if inclusive else rank - 1
            # MPI: on rank 0 Exscan's result is undefined; mpi4py leaves the buffer unchanged, and so does this code.
            if last < 0:
                return None
            if instance.here < len(instance.members):  # this rank leaves before later ranks arrive
                # Parts of later ranks may be missing, so only this rank's prefix is computed.
                return ops.reduce_ordered(instance.parts()[: last + 1], combine)
            # All have arrived: one pass computes every prefix for all ranks. One pass per rank would be quadratic.
            return instance.shared(lambda: list(ops.scan_prefixes(instance.parts(), combine)))[last]

        unpack, call.outcome = _receiving(name, own, recvbuf), outcome
        call.collect = lambda data: None if data is None else unpack(data)
        return call

    # -- on objects --------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        self._meet(Call("Barrier", "barrier"))

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the root's object: a copy on every rank including the root, as in mpi4py."""
        root = self._root(root)
        part = dumps(obj) if self._me == root else b""
        outcome = lambda m, rank: m.calls[root].part  # noqa: E731
        received = self._meet(Call("bcast", "bcast", part, len(part), root, sizes="root", outcome=outcome))
        return loads(received)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return all ranks' objects at the root, None elsewhere."""
        part, root = dumps(sendobj), self._root(root)
        outcome = lambda m, rank: m.parts() if rank == root else None  # noqa: E731
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
            "allgather", "allgather", part, len(part), sizes="each", outcome=lambda m, rank: m.parts()
        )
        return [loads(each) for each in self._meet(call)]

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Return, from every rank, its item for this one."""
        parts = self._one_each(sendobj)
        outcome = lambda m, rank: [part[rank] for part in m.parts()]  # noqa: E731
        nbytes = np.array([len(part) for part in parts])
        received = self._meet(Call("alltoall", "alltoall", parts, nbytes, sizes="matrix", outcome=outcome))
        return [loads(each) for each in received]

    def reduce(self, sendobj: Any, op: Op = SUM, root: int = 0) -> Any:
        """Return the combination of all ranks' objects at the root, None elsewhere."""
        part, root = dumps(sendobj), self._root(root)

        def outcome(instance: CollectiveInstance, rank: int) -> Any:
            return ops.reduce_binomial(instance.parts(), folded(op)) if rank == root else None

        combined = self._meet(
            Call("reduce", "reduce", part, len(part), root, agree=agreed_op(op), outcome=outcome)
        )
        return None if combined is None else loads(combined)

    def allreduce(self, sendobj: Any, op: Op = SUM) -> Any:
        """Return the combination of all ranks' objects."""
        part = dumps(sendobj)

        def outcome(instance: CollectiveInstance, rank: int) -> Any:
            return instance.shared(lambda: ops.reduce_binomial(instance.parts(), folded(op)))

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
