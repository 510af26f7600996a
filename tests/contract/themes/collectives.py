"""Collective calls on buffers of equal blocks, and what reductions compute: operations, types, orders."""

from __future__ import annotations

from typing import Any

import numpy as np

from contract.cases import claim, close, fails, refused, same


def bcast_from_every_root(MPI, comm, call, rank, size):
    """All get the root's array, in any dtype."""
    for root in range(size):
        for code in "?bilBHfdFD":
            buf = np.full(3, root + 1 if rank == root else 0).astype(code)
            call(comm, "Bcast", buf, root=root)
            same(buf, np.full(3, root + 1).astype(code))


def bcast_of_many_kinds_of_memory(MPI, comm, call, rank, own):
    """Specifications may differ between ranks as long as the data agree."""
    target = np.zeros((2, 2))
    call(comm, "Bcast", np.arange(4.0) if rank == 0 else [target, 4, MPI.DOUBLE])
    if rank:
        same(target, [[0, 1], [2, 3]])
    raw = bytearray(b"root" if rank == 0 else b"none")
    call(comm, "Bcast", raw)
    same(bytes(raw), b"root")
    column = own(MPI.DOUBLE.Create_vector(3, 1, 3).Commit())
    grid, line = np.arange(9.0).reshape(3, 3), np.zeros(3)
    # MPI asks for equal type signatures, not for equal types: a vector of three doubles matches three doubles.
    call(comm, "Bcast", [grid, 1, column] if rank == 0 else line)
    same(grid[:, 0] if rank == 0 else line, [0, 3, 6])


def bcast_of_megabytes(MPI, comm, call, rank):
    """Large arrays arrive whole."""
    buf = np.arange(300_000.0) if rank == 0 else np.zeros(300_000)
    call(comm, "Bcast", buf)
    same(buf, np.arange(300_000.0))


def gather_to_every_root(MPI, comm, call, rank, size):
    """The root's rows are the ranks' arrays; others pass None. The root's own row may lie there already."""
    for root in range(size):
        mine, table = np.array([rank, rank + 0.5]), np.full((size, 2), -1.0)
        call(comm, "Gather", mine, table if rank == root else None, root=root)
        same(
            table,
            [[other, other + 0.5] for other in range(size)] if rank == root else np.full((size, 2), -1.0),
        )
        call(
            comm,
            "Gather",
            MPI.IN_PLACE if rank == root else -mine,
            table if rank == root else None,
            root=root,
        )
        if rank == root:
            signs = [1 if other == root else -1 for other in range(size)]
            same(table, [[sign * other, sign * (other + 0.5)] for other, sign in enumerate(signs)])


def scatter_from_every_root(MPI, comm, call, rank, size):
    """Each rank gets its row of the root's table; the root's own may stay there."""
    for root in range(size):
        table = np.arange(2.0 * size).reshape(size, 2) if rank == root else None
        for target in (np.zeros(2), MPI.IN_PLACE if rank == root else np.zeros(2)):
            call(comm, "Scatter", table, target, root=root)
            same(table[rank] if target is MPI.IN_PLACE else target, [2.0 * rank, 2.0 * rank + 1])


def allgather(MPI, comm, call, rank, size):
    """Everybody gets all arrays by rank; each rank's own may lie there already."""
    table, wanted = np.zeros((size, 3), np.int32), np.repeat(np.arange(size), 3).reshape(size, 3)
    call(comm, "Allgather", np.full(3, rank, np.int32), table)
    same(table, wanted)
    table[rank] += 1
    call(comm, "Allgather", MPI.IN_PLACE, table)
    same(table, wanted + 1)


def alltoall(MPI, comm, call, rank, size):
    """Block j of rank i becomes block i of rank j, also within one table."""
    sent = np.array([[10 * rank + other] * 2 for other in range(size)], np.int32)
    found = np.zeros((size, 2), np.int32)
    call(comm, "Alltoall", sent, found)
    same(found, [[10 * other + rank] * 2 for other in range(size)])
    call(comm, "Alltoall", MPI.IN_PLACE, found)
    same(found, sent)


def blocks_with_stated_counts(MPI, comm, call, rank, size):
    """A stated count is that of one block; the memory may be longer than all blocks."""
    table = np.full(2 * size + 3, -1)
    call(comm, "Allgather", [np.full(5, rank), 2, MPI.LONG], [table, 2, MPI.LONG])
    same(table, [*np.repeat(np.arange(size), 2), -1, -1, -1])
    crossed = np.full(size + 1, -1)
    call(comm, "Alltoall", [np.arange(size + 1) * 10 + rank, 1, "l"], [crossed, 1, "l"])
    same(crossed, [*(rank * 10 + np.arange(size)), -1])


def memory_that_does_not_divide_into_blocks(MPI, comm, call, size):
    """Without a count the memory must hold equal blocks: a rest is refused, before anything is sent."""
    if size > 1:
        # mpi4py refuses this in Python, before MPI is called, so the other ranks need not take part.
        refused(ValueError, call, comm, "Allgather", np.zeros(1), np.zeros(size + 1))


def types_that_differ_by_name_only(MPI, comm, call, rank, size, own):
    """Blocks of a contiguous type gather with blocks of its parts."""
    pair = own(MPI.INT.Create_contiguous(2).Commit())
    mine, table = np.full(2, rank, np.int32), np.zeros(2 * size, np.int32)
    for source, target in (([mine, 1, pair], [table, 2, MPI.INT]), (mine, [table, 1, pair])):
        call(comm, "Allgather", source, target)
        same(table, np.repeat(np.arange(size), 2))
        table[:] = 0


def gather_of_interleaved_columns(MPI, comm, call, rank, size, own):
    """A resized column type makes each rank's array a column of the root's table."""
    strided = own(MPI.DOUBLE.Create_vector(3, 1, size))
    # The extent says where the next rank's block begins: that of the plain vector is the whole grid but for its last
    # gap.
    column = own(strided.Create_resized(0, 8).Commit())
    table, back = np.zeros((3, size)), np.zeros(3)
    spec = [table, 1, column] if rank == 0 else None
    call(comm, "Gather", np.full(3, float(rank)), spec)
    if rank == 0:
        same(table, np.tile(np.arange(float(size)), (3, 1)))
    call(comm, "Scatter", spec, back)
    same(back, np.full(3, float(rank)))


def reduce_to_every_root(MPI, comm, call, rank, size):
    """The root gets the sum, also in place of its operand; others pass None."""
    wanted = size * np.arange(3.0) + size * (size - 1) / 2
    for root in range(size):
        mine, total = np.arange(3.0) + rank, np.zeros(3)
        call(comm, "Reduce", mine, total if rank == root else None, root=root)
        same(total, wanted if rank == root else np.zeros(3))
        call(
            comm, "Reduce", MPI.IN_PLACE if rank == root else mine, mine if rank == root else None, root=root
        )
        same(mine, wanted if rank == root else np.arange(3.0) + rank)


def allreduce(MPI, comm, call, rank, size):
    """Everybody gets the sum, by default and by name, also in place of the operand."""
    mine, total = np.array([rank, 1.0]), np.zeros(2)
    call(comm, "Allreduce", mine, total)
    same(total, [size * (size - 1) / 2, size])
    call(comm, "Allreduce", mine, [total, MPI.DOUBLE], op=MPI.MAX)
    same(total, [size - 1, 1])
    call(comm, "Allreduce", MPI.IN_PLACE, mine, op=MPI.SUM)
    same(mine, [size * (size - 1) / 2, size])


def allreduce_is_the_same_everywhere(MPI, comm, call, rank, size):
    """Sums of floats agree between ranks to the last bit."""
    rows = [np.random.default_rng(other).standard_normal(1000) for other in range(size)]
    total = np.zeros(1000)
    call(comm, "Allreduce", rows[rank], total)
    # MPI recommends this and does not ask for it; averaging relies on it, since models that differ in a bit drift
    # apart.
    same(len(set(comm.allgather(total.tobytes()))), 1)
    close(total, sum(rows), 1e-9)


def reduce_scatter_block(MPI, comm, call, rank, size):
    """The sum is spread in equal blocks; in place, the rank's lies at the start of the buffer."""
    mine, part = np.arange(2 * size) + rank, np.zeros(2, np.int64)
    whole = size * np.arange(2 * size) + size * (size - 1) // 2
    call(comm, "Reduce_scatter_block", mine, part)
    call(comm, "Reduce_scatter_block", MPI.IN_PLACE, mine)
    for found in (part, mine[:2]):
        same(found, whole[2 * rank : 2 * rank + 2])


def reduce_scatter(MPI, comm, call, rank, size):
    """The sum is spread in blocks of given lengths, which may be inferred or zero; in place, to the buffer's start."""
    counts = [other % 3 for other in range(size)]
    length, start = sum(counts), sum(counts[:rank])
    wanted = (size * np.arange(length) + size * (size - 1) // 2)[start : start + counts[rank]]
    mine = np.arange(length) + rank
    # Without counts mpi4py takes each rank's own from the length of its receive buffer.
    for given in (counts, None):
        part = np.full(counts[rank], -1)
        call(comm, "Reduce_scatter", mine, part, given)
        same(part, wanted)
    call(comm, "Reduce_scatter", MPI.IN_PLACE, mine, counts)
    same(mine[: counts[rank]], wanted)


def scan_and_exscan(MPI, comm, call, rank):
    """Prefix sums with and without oneself, also in place; rank 0 of Exscan keeps what it had."""
    mine, upto, before = np.full(2, rank + 1), np.zeros(2, np.int64), np.full(2, -7)
    call(comm, "Scan", mine, upto)
    call(comm, "Exscan", mine, before)
    wanted = (rank + 1) * (rank + 2) // 2, rank * (rank + 1) // 2
    # MPI leaves rank 0's receive buffer undefined after Exscan; libraries do not touch it, and programs rely on that.
    same((upto.tolist(), before.tolist()), ([wanted[0]] * 2, [wanted[1] if rank else -7] * 2))
    call(comm, "Exscan", MPI.IN_PLACE, mine)
    same(mine, np.full(2, wanted[1] if rank else 1))
    mine[:] = rank + 1
    call(comm, "Scan", MPI.IN_PLACE, mine)
    same(mine, upto)


def empty_buffers(MPI, comm, call, size):
    """Collectives of nothing complete."""
    none = np.zeros(0)
    call(comm, "Bcast", none)
    call(comm, "Gather", none, np.zeros((size, 0)))
    for name in ("Allgather", "Alltoall", "Allreduce", "Scan"):
        call(comm, name, none, np.zeros(0))


def send_and_receive_buffers_must_agree_in_reductions(MPI, comm, call):
    """A reduction whose two buffers differ in count or type is refused before anything is sent."""
    for target in (np.zeros(3), np.zeros(2, np.float32)):
        refused(ValueError, call, comm, "Allreduce", np.zeros(2), target)


def results_do_not_alias(MPI, comm, call, rank, size):
    """Every rank's result is its own memory."""
    total, buf = np.zeros(2), np.zeros(2)
    call(comm, "Allreduce", np.ones(2), total)
    call(comm, "Bcast", buf)
    # Ranks in one process could be given one array as their result: a store of one would show on the others.
    total += rank
    buf += rank
    comm.Barrier()
    same((total.tolist(), buf.tolist()), ([size + float(rank)] * 2, [float(rank)] * 2))


def send_buffers_stay_as_they_are(MPI, comm, call, rank, size):
    """No collective writes to what it sends."""
    mine = np.arange(float(size)) + rank
    places = {
        "Allgather": (size, size),
        "Alltoall": size,
        "Allreduce": size,
        "Scan": size,
        "Reduce_scatter_block": 1,
    }
    for name, shape in places.items():
        call(comm, name, mine, np.zeros(shape))
        same(mine, np.arange(float(size)) + rank)


def reduced(comm: Any, mine: Any, op: Any) -> Any:
    """Return what Allreduce makes of everybody's array."""
    result = np.zeros_like(mine)
    comm.Allreduce(mine, result, op=op)
    return result


def sums_and_products_of_every_type(MPI, comm, rank, size):
    """All number types are added; integers, floats and complex numbers are multiplied. Integers wrap, silently."""
    total = size * (size + 1) // 2
    for code in "bhilqBHILQfdgFD":
        same(reduced(comm, np.full(3, rank + 1).astype(code), MPI.SUM), np.full(3, total).astype(code))
    for code in "ildD":
        same(reduced(comm, np.full(2, 2).astype(code), MPI.PROD), np.full(2, 2**size).astype(code))
    wrapped = np.full(1, (100 * size + 128) % 256 - 128, np.int8)
    same(reduced(comm, np.full(1, 100, np.int8), MPI.SUM), wrapped)


def extrema(MPI, comm, rank, size):
    """Largest and smallest values, of signed and unsigned integers and floats."""
    for code in "bhilBHILfd":
        mine = np.array([rank, size - rank, 7]).astype(code)
        same(reduced(comm, mine, MPI.MAX), np.array([size - 1, size, 7]).astype(code))
        same(reduced(comm, mine, MPI.MIN), np.array([0, 1, 7]).astype(code))
    same(reduced(comm, np.array([-rank]), MPI.MIN), [1 - size])


def logical_operations(MPI, comm, rank, size):
    """Logical operations take integers and booleans; the result is 0 or 1."""
    for code in "?bil":
        mine = np.array([1, rank == 0, 0]).astype(code)
        same(reduced(comm, mine, MPI.LAND), np.array([1, size == 1, 0]).astype(code))
        same(reduced(comm, mine, MPI.LOR), np.array([1, 1, 0]).astype(code))
        same(reduced(comm, mine, MPI.LXOR), np.array([size % 2, 1, 0]).astype(code))
    same(reduced(comm, np.array([6, 0]), MPI.LOR), [1 if size > 1 else 6, 0])


def bitwise_operations(MPI, comm, rank, size):
    """Bitwise operations take integers and bytes."""
    for code in "bhilBHIL":
        mine = np.array([1 << (rank % 7), 5, 3]).astype(code)
        same(int(reduced(comm, mine, MPI.BOR)[0]), (1 << min(size, 7)) - 1)
        same(reduced(comm, mine, MPI.BAND)[1:], np.array([5, 3]).astype(code))
        same(reduced(comm, mine, MPI.BXOR)[1:], np.array([5, 3] if size % 2 else [0, 0]).astype(code))
    raw, result = bytearray([1 << (rank % 7)]), bytearray(1)
    comm.Allreduce([raw, MPI.BYTE], [result, MPI.BYTE], op=MPI.BOR)
    same(result[0], (1 << min(size, 7)) - 1)


def locations_of_extrema(MPI, comm, rank, size):
    """MAXLOC and MINLOC give the value and the lowest index that has it, for all pair types."""
    pairs = {"h": MPI.SHORT_INT, "i": MPI.INT_INT, "l": MPI.LONG_INT, "f": MPI.FLOAT_INT, "d": MPI.DOUBLE_INT}
    # Two ranks share each value, so that the tie goes by index, of which MPI asks for the lowest.
    for code, datatype in pairs.items():
        dtype = np.dtype([("value", code), ("index", "i4")], align=True)
        mine, found = np.array([(rank // 2, rank), (-rank, rank)], dtype), np.zeros(2, dtype)
        comm.Allreduce([mine, 2, datatype], [found, 2, datatype], op=MPI.MAXLOC)
        top = (size - 1) // 2
        same(found.tolist(), [(top, 2 * top), (0, 0)])
        comm.Allreduce([mine, 2, datatype], [found, 2, datatype], op=MPI.MINLOC)
        same(found.tolist(), [(0, 0), (1 - size, size - 1)])


def operations_of_the_program(MPI, comm, rank, size):
    """A function of two buffers and a datatype is an operation."""
    seen = []

    def absolute_maximum(inbuf: Any, inoutbuf: Any, datatype: Any) -> None:
        seen.append((datatype == MPI.DOUBLE, len(inbuf) == len(inoutbuf)))
        first, inout = np.frombuffer(inbuf), np.frombuffer(inoutbuf)
        np.copyto(inout, first, where=abs(first) > abs(inout))

    op = MPI.Op.Create(absolute_maximum, commute=True)
    same(op.Is_commutative(), True)
    same(reduced(comm, np.array([-1.0 * rank, 1.0]), op), [1.0 - size, 1.0])
    claim(all(one and other for one, other in seen), "the function gets equal buffers and the datatype")
    op.Free()
    claim(op == MPI.OP_NULL, "a freed operation is null")


def operations_that_do_not_commute(MPI, comm, rank, size, own):
    """Operands of an associative operation that does not commute meet in the order of ranks."""

    def product(inbuf: Any, inoutbuf: Any, datatype: Any) -> None:
        first, inout = np.frombuffer(inbuf).reshape(-1, 2, 2), np.frombuffer(inoutbuf).reshape(-1, 2, 2)
        inout[...] = first @ inout

    op = own(MPI.Op.Create(product, commute=False))
    # With a zero below the diagonal these would commute; so any other order gives another product.
    matrices = [np.array([[1.0, other], [1.0, 1.0]]) for other in range(size)]
    upto = [matrices[0]]
    for matrix in matrices[1:]:
        upto.append(upto[-1] @ matrix)
    same(reduced(comm, matrices[rank], op), upto[-1])
    prefix = np.zeros((2, 2))
    comm.Scan(matrices[rank], prefix, op=op)
    same(prefix, upto[rank])
    for root in range(size):
        target = np.zeros((2, 2)) if rank == root else None
        comm.Reduce(matrices[rank], target, op=op, root=root)
        if target is not None:
            same(target, upto[-1])


def operations_on_derived_types(MPI, comm, rank, size, own):
    """The function sees elements of a derived type whole."""
    vector = own(MPI.DOUBLE.Create_contiguous(3).Commit())
    lengths = []

    def longer(inbuf: Any, inoutbuf: Any, datatype: Any) -> None:
        lengths.append(datatype.Get_size())
        first, inout = np.frombuffer(inbuf).reshape(-1, 3), np.frombuffer(inoutbuf).reshape(-1, 3)
        better = np.linalg.norm(first, axis=1) > np.linalg.norm(inout, axis=1)
        inout[better] = first[better]

    op = own(MPI.Op.Create(longer, commute=True))
    target = np.zeros((2, 3))
    comm.Allreduce([np.full((2, 3), float(rank)), 2, vector], [target, 2, vector], op=op)
    same(target, np.full((2, 3), size - 1.0))
    # A subset: on one rank the function is not called at all.
    claim(set(lengths) <= {24}, "the function is told the derived type")


def local_reductions(MPI, comm):
    """Reduce_local combines two buffers of one rank."""
    inout = np.array([1.0, 5.0])
    MPI.SUM.Reduce_local(np.array([2.0, 3.0]), inout)
    same(inout, [3, 8])
    MPI.MAX.Reduce_local(np.array([9.0, 0.0]), inout)
    same(inout, [9, 8])


def operations_refuse_types(MPI, comm):
    """An operation without meaning for a type is ERR_OP, as are REPLACE and NO_OP for any; and nobody waits."""
    floats, flags, bits = np.zeros(1), np.zeros(1, "?"), np.zeros(1, "F")
    mistakes = [
        (MPI.BAND, floats),
        (MPI.LAND, floats),
        (MPI.SUM, flags),
        (MPI.MAX, bits),
        (MPI.MAXLOC, floats),
    ]
    # On COMM_SELF, since a library may notice the mistake on some ranks only after others wait in the call.
    for op, operand in (*mistakes, *((op, floats) for op in (MPI.REPLACE, MPI.NO_OP, MPI.OP_NULL))):
        fails(MPI, MPI.ERR_OP, MPI.COMM_SELF.Allreduce, operand, operand.copy(), op=op)


def reductions_of_arrays(MPI, comm, rank, size):
    """Large sums are right in every element, whatever the shape; halves are added, long doubles keep their digits."""
    total = reduced(comm, np.arange(100_000.0) + rank, MPI.SUM)
    close(total, size * np.arange(100_000.0) + size * (size - 1) / 2)
    same(reduced(comm, np.full((2, 3, 4), rank), MPI.SUM), np.full((2, 3, 4), size * (size - 1) // 2))
    if MPI._typedict.get("e"):
        same(reduced(comm, np.full(2, 0.5, np.float16), MPI.SUM), np.full(2, 0.5 * size, np.float16))
    tiny = np.longdouble(2) ** -60
    total = reduced(comm, np.full(1, 1 + tiny, np.longdouble), MPI.SUM)
    same(bool(total[0] == size * (1 + tiny)), True)
