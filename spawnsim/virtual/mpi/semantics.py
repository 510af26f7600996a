"""What each collective of buffers contributes, how contributions are combined, and where the outcome goes.

One function per collective makes a `Call`; the blocking, non-blocking and persistent calls all run it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spawnsim.comm import ops
from spawnsim.comm.buffers import Buffer, Vector, as_buffer
from spawnsim.comm.constants import is_in_place
from spawnsim.comm.failures import ERR_COUNT, ERR_TYPE, ArgumentError
from spawnsim.comm.memory import as_bytes
from spawnsim.comm.ops import Merge, Op
from spawnsim.phantoms import is_phantom
from spawnsim.virtual.mpi.instance import Call, CollectiveInstance, drop

Outcome = Callable[[Any], object]
Combine = Callable[[Any, Any], Any]


def _in_place(spec: Any) -> bool:
    """Return whether a rank's data lie in its other buffer; mpi4py takes None for the same."""
    return spec is None or is_in_place(spec)


def _fill(spec: Any, **how: Any) -> Outcome:
    """Return what unpacks a list of blocks into a buffer specification; None leaves it alone."""
    target = as_buffer(spec, writable=True, **how)

    def unpack(blocks: Sequence[Any] | None) -> None:
        if blocks is None or _fill_row(target, blocks):
            return
        for block, data in zip(target, blocks, strict=True):
            # A missing block is the root's own, which IN_PLACE left where it was.
            if data is not None:
                block.unpack(data)

    return unpack


def _fill_row(target: Buffer | Vector, blocks: Sequence[Any]) -> bool:
    """Copy blocks to memory in which they lie one behind the other; False if it is none, or they do not fit exactly."""
    # One call for all: a thousand ranks that get a block of each other have a million blocks.
    row = target.row()
    if row is None or any(type(data) is not np.ndarray or data.dtype is not row.dtype for data in blocks):
        return False
    counts = target.counts if isinstance(target, Vector) else [target.count] * target.blocks
    if [*map(len, blocks)] != counts:
        return False
    np.concatenate(blocks, out=row)
    return True


def _taken_apart(spec: Any, size: int, **how: Any) -> list[Any]:
    """Return snapshots of the blocks of a buffer specification, one for each of `size` ranks."""
    source = as_buffer(spec, blocks=size, **how)
    if isinstance(source, Vector) or source.blocks != size or is_phantom(source.array):
        return [block.pack() for block in source]
    return list(source.pack().reshape(size, -1))


def _row(recvbuf: Any, size: int) -> Outcome:
    """Return what unpacks equal blocks, joined into one array, into a buffer of `size` blocks."""
    target = as_buffer(recvbuf, writable=True, blocks=size)
    return lambda joined: None if joined is None else target.unpack(joined)


def _joined(parts: list[Any]) -> Any:
    """Return all contributions in a row: made once, for a thousand ranks would otherwise unpack a million blocks."""
    # Equal bytes may come under several dtypes (an int32 and its unsigned twin); numpy would convert them to a
    # common one and change the bytes.
    same = all(part.dtype == parts[0].dtype for part in parts)
    return np.concatenate(parts if same else [as_bytes(part) for part in parts])


def barrier() -> Call:
    """Everybody arrives before anybody leaves."""
    return Call("Barrier", "barrier")


def bcast(buf: Any, root: int, me: int) -> Call:
    """The root's buffer goes to all."""
    own = as_buffer(buf)
    # The root's part itself, not a copy per rank: receivers unpack it, and nobody writes to it.
    outcome = lambda instance, rank: instance.calls[root].part  # noqa: E731
    return Call(
        "Bcast", "bcast", own.pack() if me == root else None, own.nbytes, root, sizes="root", outcome=outcome,
        # The root's buffer holds the data already; unpacking into it would cost a pass over memory.
        collect=drop if me == root else own.unpack,
    )  # fmt: skip


def gather(sendbuf: Any, recvbuf: Any, root: int, place: tuple[int, int], vector: bool = False) -> Call:
    """The root gets every rank's block. `place` is (this rank, number of ranks)."""
    me, size = place
    part = None
    if not (_in_place(sendbuf) and me == root):
        part = as_buffer(sendbuf).pack()
    collect = _fill(recvbuf, vector=vector, blocks=size) if me == root else drop
    nbytes = 0 if part is None else part.nbytes
    outcome = lambda instance, rank: instance.parts(rank) if rank == root else None  # noqa: E731
    # Of equal blocks the length is known from one of them, of others never before all have come: so is the algorithm.
    how = ("gatherv", "each") if vector else ("gather", "all")
    return Call("Gather", how[0], part, nbytes, root, sizes=how[1], outcome=outcome, collect=collect)


def scatter(sendbuf: Any, recvbuf: Any, root: int, place: tuple[int, int], vector: bool = False) -> Call:
    """Every rank gets its block of the root's buffer."""
    me, size = place
    part: list[Any] | None = None
    nbytes: Any = 0  # how much the others get, the root alone tells
    if me == root:
        blocks = _taken_apart(sendbuf, size, vector=vector)
        part, nbytes = blocks, np.array([block.nbytes for block in blocks])
    outcome = lambda instance, rank: instance.calls[root].part[rank]  # noqa: E731
    collect: Outcome = drop if _in_place(recvbuf) and me == root else as_buffer(recvbuf, writable=True).unpack
    return Call("Scatter", "scatter", part, nbytes, root, sizes="root", outcome=outcome, collect=collect)


def allgather(sendbuf: Any, recvbuf: Any, place: tuple[int, int], *, vector: bool = False) -> Call:
    """Every rank gets every rank's block."""
    me, size = place
    own = (
        as_buffer(recvbuf, vector=vector, blocks=size).block(me) if _in_place(sendbuf) else as_buffer(sendbuf)
    )
    part, lent = (own.pack(), False) if vector else _lent(own)

    collect = _fill(recvbuf, vector=True, blocks=size) if vector else _row(recvbuf, size)
    return Call(
        "Allgather", "allgather", part, part.nbytes, sizes="each", outcome=_all_parts if vector else _all_joined,
        lent=lent, collect=collect,
    )  # fmt: skip


def _all_parts(instance: CollectiveInstance, rank: int) -> list[Any]:
    # One list for all ranks: each would make one as long as there are ranks.
    found: list[Any] = instance.shared(rank, lambda: instance.parts(rank))
    return found


def _all_joined(instance: CollectiveInstance, rank: int) -> Any:
    # Joined once for all ranks: each rank's own list of 1,000 blocks would make a million unpackings.
    return instance.shared(rank, lambda: _joined(instance.parts(rank)))


def alltoall(
    sendbuf: Any, recvbuf: Any, place: tuple[int, int], *, vector: bool = False, types: bool = False
) -> Call:
    """Every rank gets, from every rank, the block meant for it."""
    _, size = place
    # In place, what is sent lies where it will be received, so it is packed (copied) before anything is written.
    source = recvbuf if _in_place(sendbuf) else sendbuf
    blocks = _taken_apart(source, size, vector=vector, types=types)
    return Call(
        "Alltoall", "alltoall", blocks, np.array([block.nbytes for block in blocks]), sizes="matrix",
        outcome=lambda instance, rank: [part[instance.place(rank)] for part in instance.parts(rank)],
        collect=_fill(recvbuf, vector=vector, blocks=size, types=types),
    )  # fmt: skip


# -- reductions ----------------------------------------------------------------------------------------------


def merger(op: Op, own: Buffer) -> Merge:
    """Return the `merge` of an operation (see `Op.merging`) for arrays of a buffer's datatype."""
    op.check(own.datatype)
    return op.merging(own.datatype)


def combiner(op: Op, own: Buffer) -> Combine:
    """Return `combine(a, b)` for arrays of a buffer's datatype; it leaves `a` and `b` as they are."""
    merge = ops.quiet(merger(op, own))
    # Into fresh memory: prefixes and rooted results are made from parts that other ranks still need.
    return lambda a, b: merge(a, b, np.empty_like(b))


def _reducing(
    name: str, buffers: tuple[Any, Any], op: Op, *, for_all: bool = False, blocks: int = 1
) -> tuple[Call, Buffer]:
    """Return the call of a reduction of (what is sent, what is received), still without outcome, and what it sends.

    `for_all` says that every rank gets the combination, so that none leaves before all have come. What is sent are so
    many blocks of the count that its specification tells.
    """
    sendbuf, recvbuf = buffers
    own = as_buffer(recvbuf if _in_place(sendbuf) else sendbuf, blocks=blocks)
    op.check(own.datatype)
    call = Call(name, name.lower(), None, own.nbytes)
    # What all ranks must agree on is kept apart from the data, so that a mismatch is told with both values instead
    # of as a wrong sum.
    kind = f"phantom {own.type_name}" if is_phantom(own.array) else own.type_name
    call.agree = (op.name or "user-defined", own.count * own.blocks, kind)
    if for_all:
        call.op, call.datatype = op, own.datatype
        call.part, call.lent = _lent(own)
    else:
        call.part = own.pack()
    return call, own


def _receiving(name: str, own: Buffer, recvbuf: Any) -> Outcome:
    """Return what unpacks into the receiving buffer, which must hold what is sent."""
    target = as_buffer(recvbuf, writable=True)
    agree(name, own, target)
    return target.unpack


def agree(call: str, sent: Buffer, target: Buffer) -> None:
    """Refuse buffers of one call that differ in count or type. Two names of one numpy type are the same type."""
    if sent.count != target.count:
        raise ArgumentError(ERR_COUNT, f"{call}: {sent.count} elements into a buffer of {target.count}")
    ours, theirs = sent.datatype, target.datatype
    if ours is theirs:
        return
    # MPI matches type signatures: MPI.INT and MPI.INT32_T are one type to numpy, and a reduction may mix their names.
    plain = ours.is_predefined and theirs.is_predefined and ours.dtype is not None
    if ours != theirs and not (plain and ours.dtype == theirs.dtype):
        names = ours.Get_name() or "a derived type", theirs.Get_name() or "a derived type"
        raise ArgumentError(ERR_TYPE, f"{call}: {names[0]} into a buffer of {names[1]}")


def _lent(own: Buffer) -> tuple[Any, bool]:
    """Return a contribution, and whether it is the program's memory itself.

    Where every rank waits for every other one, the result is made before any of them returns, so no copy is needed. It
    would be one wherever a rank returns first: from a rooted collective, a scan, and every call that only starts.
    """
    # Derived types have gaps, which must not travel, so only plain arrays are lent.
    if own.datatype.dtype is not None and own.datatype.is_predefined:
        return own.array, True
    return own.pack(), False


def reduce(sendbuf: Any, recvbuf: Any, op: Op, *, root: int, me: int) -> Call:
    """The root gets the combination of all contributions, in the order of a binomial tree, or of gloo's rings."""
    call, own = _reducing("Reduce", (sendbuf, recvbuf), op)
    datatype = own.datatype
    # Commutative: the tree is rooted at the root, as libraries do it. Otherwise it begins at rank 0, so that
    # operands stay in rank order.
    first = root if op.Is_commutative() else 0

    def outcome(instance: CollectiveInstance, rank: int) -> Any:
        if rank != root:
            return None
        if instance.sums_as_gloo(op, datatype, call.part):
            return ops.combined(instance.parts(rank), op, datatype, rooted=True)
        return ops.reduce_to_root(instance.parts(rank), op.merging(datatype), first)

    call.root, call.outcome = root, outcome
    if me == root:
        call.collect = _receiving("Reduce", own, recvbuf)
    return call


def allreduce(sendbuf: Any, recvbuf: Any, op: Op) -> Call:
    """Every rank gets the combination, in the order of recursive doubling: bit for bit what both MPI wheels return.

    Or in the order of gloo's rings, if the communicator sums so.
    """
    call, own = _reducing("Allreduce", (sendbuf, recvbuf), op, for_all=True)
    call.outcome, call.collect = CollectiveInstance.combined, _receiving("Allreduce", own, recvbuf)
    return call


def counts(count: int) -> Call:
    """Every rank learns how many elements each rank receives."""
    return Call("Reduce_scatter", "allgather", count, 8, outcome=_all_parts)


def reduce_scatter(
    sendbuf: Any,
    recvbuf: Any,
    counts: Sequence[int] | None,
    op: Op,
    *,
    place: tuple[int, int],
) -> Call:
    """Every rank gets its block of the combination; `counts` are the elements per rank, None: equal blocks.

    `place` is (this rank, number of ranks) in its own group: of two groups each gets the other's combination.
    """
    me, size = place
    blocks = size if counts is None else 1
    call, own = _reducing("Reduce_scatter", (sendbuf, recvbuf), op, for_all=True, blocks=blocks)
    # The time counts what each rank receives. With the whole vector as size, every block was timed as if it were
    # all of it.
    if counts is None:
        start, end = me * own.count, (me + 1) * own.count
        call.sizes = "blocks"  # and no list of them: each of a thousand ranks would make one
    else:
        lengths = np.array(counts, np.int64)
        whole = lengths.sum()
        if whole != own.count:
            raise ArgumentError(
                ERR_COUNT, f"recvcounts add up to {whole}, but each rank contributes {own.count} elements"
            )
        start, end = lengths[:me].sum(), lengths[: me + 1].sum()
        call.nbytes, call.sizes = lengths * own.datatype.size, "same"
    # Of derived types the combination is bytes, of predefined ones it is elements.
    step = len(call.part) // max(own.count * blocks, 1)
    call.outcome = lambda instance, rank: instance.combined(rank)[start * step : end * step]
    call.collect = as_buffer(recvbuf, writable=True).unpack
    return call


def scan(sendbuf: Any, recvbuf: Any, op: Op, inclusive: bool) -> Call:
    """Rank r gets the combination of ranks 0 to r, or to r - 1 (rank 0 then keeps what it has)."""
    name = "Scan" if inclusive else "Exscan"
    call, own = _reducing(name, (sendbuf, recvbuf), op)
    combine = combiner(op, own)

    def outcome(instance: CollectiveInstance, rank: int) -> Any:
        last = rank if inclusive else rank - 1
        # MPI: on rank 0 Exscan's result is undefined; mpi4py leaves the buffer, and so does this.
        if last < 0:
            return None
        if instance.here < len(instance.members):  # this rank leaves before the later ones arrive
            # Parts of later ranks may not be there yet, so only the own prefix is made.
            return ops.reduce_ordered(instance.parts(rank)[: last + 1], combine)
        # All have come: every prefix is made in one pass for all ranks. One pass each would be quadratic.
        return instance.shared(rank, lambda: list(ops.scan_prefixes(instance.parts(rank), combine)))[last]

    unpack, call.outcome = _receiving(name, own, recvbuf), outcome
    call.collect = lambda data: None if data is None else unpack(data)
    return call
