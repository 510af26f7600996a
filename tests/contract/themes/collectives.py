"""Collective calls on buffers of equal blocks, and what reductions compute: operations, types, orders."""

from __future__ import annotations

from typing import Any

import numpy as np

from contract.cases import claim, close, fails, refused, same


def bcast_from_every_root(MPI: Any, comm: Any) -> None:
    """All get the root's array, in any dtype."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for root in range(size):
        for code in "?bilBHfdFD":
            buf = np.full(3, root + 1 if rank == root else 0).astype(code)
            comm.Bcast(buf, root=root)
            same(buf, np.full(3, root + 1).astype(code))


def bcast_of_many_kinds_of_memory(MPI: Any, comm: Any) -> None:
    """Specifications may differ between ranks as long as the data agree."""
    rank = comm.Get_rank()
    target = np.zeros((2, 2))
    comm.Bcast(np.arange(4.0) if rank == 0 else [target, 4, MPI.DOUBLE])
    if rank:
        same(target, [[0, 1], [2, 3]])
    raw = bytearray(b"root" if rank == 0 else b"none")
    comm.Bcast(raw)
    same(bytes(raw), b"root")


def bcast_of_megabytes(MPI: Any, comm: Any) -> None:
    """Large arrays arrive whole."""
    buf = np.arange(300_000.0) if comm.Get_rank() == 0 else np.zeros(300_000)
    comm.Bcast(buf)
    same(buf, np.arange(300_000.0))


def bcast_of_columns(MPI: Any, comm: Any) -> None:
    """A derived type on one side may meet a plain array on the other."""
    rank = comm.Get_rank()
    column = MPI.DOUBLE.Create_vector(3, 1, 3).Commit()
    grid, line = np.arange(9.0).reshape(3, 3), np.zeros(3)
    # MPI asks for equal type signatures, not for equal types: a vector of three doubles matches three doubles.
    comm.Bcast([grid, 1, column] if rank == 0 else line)
    same(grid[:, 0] if rank == 0 else line, [0, 3, 6])
    column.Free()


def gather_to_every_root(MPI: Any, comm: Any) -> None:
    """The root's rows are the ranks' arrays; others pass None."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for root in range(size):
        table = np.full((size, 2), -1.0) if rank == root else None
        comm.Gather(np.array([rank, rank + 0.5]), table, root=root)
        if table is not None:
            same(table, [[other, other + 0.5] for other in range(size)])


def scatter_from_every_root(MPI: Any, comm: Any) -> None:
    """Each rank gets its row of the root's table."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for root in range(size):
        table = np.arange(2.0 * size).reshape(size, 2) if rank == root else None
        row = np.zeros(2)
        comm.Scatter(table, row, root=root)
        same(row, [2.0 * rank, 2.0 * rank + 1])


def allgather(MPI: Any, comm: Any) -> None:
    """Everybody gets all arrays by rank."""
    rank, size = comm.Get_rank(), comm.Get_size()
    table = np.zeros((size, 3), np.int32)
    comm.Allgather(np.full(3, rank, np.int32), table)
    same(table, np.repeat(np.arange(size), 3).reshape(size, 3))


def alltoall(MPI: Any, comm: Any) -> None:
    """Block j of rank i becomes block i of rank j."""
    rank, size = comm.Get_rank(), comm.Get_size()
    sent = np.array([[10 * rank + other] * 2 for other in range(size)], np.int32)
    found = np.zeros((size, 2), np.int32)
    comm.Alltoall(sent, found)
    same(found, [[10 * other + rank] * 2 for other in range(size)])


def blocks_with_stated_counts(MPI: Any, comm: Any) -> None:
    """A stated count is that of one block; the memory may be longer than all blocks."""
    rank, size = comm.Get_rank(), comm.Get_size()
    table = np.full(2 * size + 3, -1)
    comm.Allgather([np.full(5, rank), 2, MPI.LONG], [table, 2, MPI.LONG])
    same(table, [*np.repeat(np.arange(size), 2), -1, -1, -1])
    crossed = np.full(size + 1, -1)
    comm.Alltoall([np.arange(size + 1) * 10 + rank, 1, "l"], [crossed, 1, "l"])
    same(crossed, [*(rank * 10 + np.arange(size)), -1])


def memory_that_does_not_divide_into_blocks(MPI: Any, comm: Any) -> None:
    """Without a count the memory must hold equal blocks: a rest is refused, before anything is sent."""
    size = comm.Get_size()
    if size > 1:
        # mpi4py refuses this in Python, before MPI is called, so the other ranks need not take part.
        with refused(ValueError):
            comm.Allgather(np.zeros(1), np.zeros(size + 1))


def types_that_differ_by_name_only(MPI: Any, comm: Any) -> None:
    """Blocks of a contiguous type gather with blocks of its parts."""
    rank, size = comm.Get_rank(), comm.Get_size()
    pair = MPI.INT.Create_contiguous(2).Commit()
    table = np.zeros(2 * size, np.int32)
    comm.Allgather([np.full(2, rank, np.int32), 1, pair], [table, 2, MPI.INT])
    same(table, np.repeat(np.arange(size), 2))
    table[:] = 0
    comm.Allgather(np.full(2, rank, np.int32), [table, 1, pair])
    same(table, np.repeat(np.arange(size), 2))
    pair.Free()


def gather_of_interleaved_columns(MPI: Any, comm: Any) -> None:
    """A resized column type makes each rank's array a column of the root's table."""
    rank, size = comm.Get_rank(), comm.Get_size()
    strided = MPI.DOUBLE.Create_vector(3, 1, size)
    # The extent says where the next rank's block begins: that of the plain vector is the whole grid but for its last
    # gap.
    column = strided.Create_resized(0, 8).Commit()
    table = np.zeros((3, size))
    comm.Gather(np.full(3, float(rank)), [table, 1, column] if rank == 0 else None)
    if rank == 0:
        same(table, np.tile(np.arange(float(size)), (3, 1)))
    back = np.zeros(3)
    comm.Scatter([table, 1, column] if rank == 0 else None, back)
    same(back, np.full(3, float(rank)))
    column.Free()
    strided.Free()


def reduce_to_every_root(MPI: Any, comm: Any) -> None:
    """The root gets the sum; others pass None."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for root in range(size):
        total = np.zeros(3) if rank == root else None
        comm.Reduce(np.arange(3.0) + rank, total, root=root)
        if total is not None:
            same(total, size * np.arange(3.0) + size * (size - 1) / 2)


def allreduce(MPI: Any, comm: Any) -> None:
    """Everybody gets the sum, by default and by name."""
    rank, size = comm.Get_rank(), comm.Get_size()
    total = np.zeros(2)
    comm.Allreduce(np.array([rank, 1.0]), total)
    same(total, [size * (size - 1) / 2, size])
    comm.Allreduce(np.array([rank, 1.0]), [total, MPI.DOUBLE], op=MPI.MAX)
    same(total, [size - 1, 1])


def allreduce_is_the_same_everywhere(MPI: Any, comm: Any) -> None:
    """Sums of floats agree between ranks to the last bit."""
    rank, size = comm.Get_rank(), comm.Get_size()
    rng = np.random.default_rng(rank)
    mine, total = rng.standard_normal(1000), np.zeros(1000)
    comm.Allreduce(mine, total)
    # MPI recommends this and does not ask for it; averaging relies on it, since models that differ in a bit drift
    # apart.
    same(len(set(comm.allgather(total.tobytes()))), 1)
    close(total, sum(np.random.default_rng(other).standard_normal(1000) for other in range(size)), 1e-9)


def reduce_scatter_block(MPI: Any, comm: Any) -> None:
    """The sum is spread in equal blocks."""
    rank, size = comm.Get_rank(), comm.Get_size()
    part = np.zeros(2, np.int64)
    comm.Reduce_scatter_block(np.arange(2 * size) + rank, part)
    whole = size * np.arange(2 * size) + size * (size - 1) // 2
    same(part, whole[2 * rank : 2 * rank + 2])


def reduce_scatter(MPI: Any, comm: Any) -> None:
    """The sum is spread in blocks of given lengths, which may be inferred or zero."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [other % 3 for other in range(size)]
    length, start = sum(counts), sum(counts[:rank])
    # Without counts mpi4py takes each rank's own from the length of its receive buffer.
    for given in (counts, None):
        part = np.full(counts[rank], -1)
        comm.Reduce_scatter(np.arange(length) + rank, part, given)
        whole = size * np.arange(length) + size * (size - 1) // 2
        same(part, whole[start : start + counts[rank]])


def scan_and_exscan(MPI: Any, comm: Any) -> None:
    """Prefix sums with and without oneself; rank 0 of Exscan keeps what it had."""
    rank = comm.Get_rank()
    mine, upto, before = np.full(2, rank + 1), np.zeros(2, np.int64), np.full(2, -7)
    comm.Scan(mine, upto)
    comm.Exscan(mine, before)
    same(upto, np.full(2, (rank + 1) * (rank + 2) // 2))
    # MPI leaves rank 0's receive buffer undefined after Exscan; libraries do not touch it, and programs rely on that.
    same(before, np.full(2, rank * (rank + 1) // 2 if rank else -7))


def empty_buffers(MPI: Any, comm: Any) -> None:
    """Collectives of nothing complete."""
    size, none = comm.Get_size(), np.zeros(0)
    comm.Bcast(none)
    comm.Gather(none, np.zeros((size, 0)))
    comm.Allgather(none, np.zeros(0))
    comm.Alltoall(none, np.zeros(0))
    comm.Allreduce(none, np.zeros(0))
    comm.Scan(none, np.zeros(0))


def send_and_receive_buffers_must_agree_in_reductions(MPI: Any, comm: Any) -> None:
    """A reduction whose two buffers differ in count or type is refused before anything is sent."""
    with refused(ValueError):
        comm.Allreduce(np.zeros(2), np.zeros(3))
    with refused(ValueError):
        comm.Allreduce(np.zeros(2), np.zeros(2, np.float32))


def results_do_not_alias(MPI: Any, comm: Any) -> None:
    """Every rank's result is its own memory."""
    rank, size = comm.Get_rank(), comm.Get_size()
    total = np.zeros(2)
    comm.Allreduce(np.ones(2), total)
    # Ranks in one process could be given one array as their result: a store of one would show on the others.
    total += rank
    comm.Barrier()
    same(total, np.full(2, size + float(rank)))
    buf = np.zeros(2)
    comm.Bcast(buf)
    buf += rank
    comm.Barrier()
    same(buf, np.full(2, float(rank)))


def send_buffers_stay_as_they_are(MPI: Any, comm: Any) -> None:
    """No collective writes to what it sends."""
    rank, size = comm.Get_rank(), comm.Get_size()
    mine, table = np.arange(float(size)) + rank, np.zeros((size, size))
    comm.Allgather(mine, table)
    comm.Alltoall(mine, table[0].copy())
    comm.Allreduce(mine, np.zeros(size))
    comm.Scan(mine, np.zeros(size))
    comm.Reduce_scatter_block(mine, np.zeros(1))
    same(mine, np.arange(float(size)) + rank)


def reduced(comm: Any, mine: Any, op: Any) -> Any:
    """Return what Allreduce makes of everybody's array."""
    result = np.zeros_like(mine)
    comm.Allreduce(mine, result, op=op)
    return result


def sums_of_every_type(MPI: Any, comm: Any) -> None:
    """All number types are added."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for code in "bhilqBHILQfdgFD":
        same(
            reduced(comm, np.full(3, rank + 1).astype(code), MPI.SUM),
            np.full(3, size * (size + 1) // 2).astype(code),
        )


def products(MPI: Any, comm: Any) -> None:
    """Products of integers, floats and complex numbers."""
    size = comm.Get_size()
    for code in "ildD":
        same(reduced(comm, np.full(2, 2).astype(code), MPI.PROD), np.full(2, 2**size).astype(code))


def extrema(MPI: Any, comm: Any) -> None:
    """Largest and smallest values, of signed and unsigned integers and floats."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for code in "bhilBHILfd":
        mine = np.array([rank, size - rank, 7]).astype(code)
        same(reduced(comm, mine, MPI.MAX), np.array([size - 1, size, 7]).astype(code))
        same(reduced(comm, mine, MPI.MIN), np.array([0, 1, 7]).astype(code))
    same(reduced(comm, np.array([-rank]), MPI.MIN), [1 - size])


def logical_operations(MPI: Any, comm: Any) -> None:
    """Logical operations take integers and booleans; the result is 0 or 1."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for code in "?bil":
        mine = np.array([1, rank == 0, 0]).astype(code)
        same(reduced(comm, mine, MPI.LAND), np.array([1, size == 1, 0]).astype(code))
        same(reduced(comm, mine, MPI.LOR), np.array([1, 1, 0]).astype(code))
        same(reduced(comm, mine, MPI.LXOR), np.array([size % 2, 1, 0]).astype(code))
    same(reduced(comm, np.array([6, 0]), MPI.LOR), [1 if size > 1 else 6, 0])


def bitwise_operations(MPI: Any, comm: Any) -> None:
    """Bitwise operations take integers and bytes."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for code in "bhilBHIL":
        mine = np.array([1 << (rank % 7), 5, 3]).astype(code)
        same(int(reduced(comm, mine, MPI.BOR)[0]), (1 << min(size, 7)) - 1)
        same(reduced(comm, mine, MPI.BAND)[1:], np.array([5, 3]).astype(code))
        same(reduced(comm, mine, MPI.BXOR)[1:], np.array([5, 3] if size % 2 else [0, 0]).astype(code))
    raw, result = bytearray([1 << (rank % 7)]), bytearray(1)
    comm.Allreduce([raw, MPI.BYTE], [result, MPI.BYTE], op=MPI.BOR)
    same(result[0], (1 << min(size, 7)) - 1)


def locations_of_extrema(MPI: Any, comm: Any) -> None:
    """MAXLOC and MINLOC give the value and the lowest index that has it, for all pair types."""
    rank, size = comm.Get_rank(), comm.Get_size()
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


def integers_wrap_around(MPI: Any, comm: Any) -> None:
    """Sums beyond the range of the type wrap, silently."""
    size = comm.Get_size()
    same(
        reduced(comm, np.full(1, 100, np.int8), MPI.SUM), np.full(1, (100 * size + 128) % 256 - 128, np.int8)
    )


def operations_of_the_program(MPI: Any, comm: Any) -> None:
    """A function of two buffers and a datatype is an operation."""
    rank, size = comm.Get_rank(), comm.Get_size()
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


def operations_that_do_not_commute(MPI: Any, comm: Any) -> None:
    """Operands of an associative operation that does not commute meet in the order of ranks."""
    rank, size = comm.Get_rank(), comm.Get_size()

    def product(inbuf: Any, inoutbuf: Any, datatype: Any) -> None:
        first, inout = np.frombuffer(inbuf).reshape(-1, 2, 2), np.frombuffer(inoutbuf).reshape(-1, 2, 2)
        inout[...] = first @ inout

    op = MPI.Op.Create(product, commute=False)
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
    op.Free()


def operations_on_derived_types(MPI: Any, comm: Any) -> None:
    """The function sees elements of a derived type whole."""
    rank, size = comm.Get_rank(), comm.Get_size()
    vector = MPI.DOUBLE.Create_contiguous(3).Commit()
    lengths = []

    def longer(inbuf: Any, inoutbuf: Any, datatype: Any) -> None:
        lengths.append(datatype.Get_size())
        first, inout = np.frombuffer(inbuf).reshape(-1, 3), np.frombuffer(inoutbuf).reshape(-1, 3)
        better = np.linalg.norm(first, axis=1) > np.linalg.norm(inout, axis=1)
        inout[better] = first[better]

    op = MPI.Op.Create(longer, commute=True)
    target = np.zeros((2, 3))
    comm.Allreduce([np.full((2, 3), float(rank)), 2, vector], [target, 2, vector], op=op)
    same(target, np.full((2, 3), size - 1.0))
    # A subset: on one rank the function is not called at all.
    claim(set(lengths) <= {24}, "the function is told the derived type")
    op.Free()
    vector.Free()


def local_reductions(MPI: Any, comm: Any) -> None:
    """Reduce_local combines two buffers of one rank."""
    inout = np.array([1.0, 5.0])
    MPI.SUM.Reduce_local(np.array([2.0, 3.0]), inout)
    same(inout, [3, 8])
    MPI.MAX.Reduce_local(np.array([9.0, 0.0]), inout)
    same(inout, [9, 8])


def operations_refuse_types(MPI: Any, comm: Any) -> None:
    """An operation without meaning for a type is ERR_OP, and nobody waits."""
    floats, flags, bits = np.zeros(1), np.zeros(1, "?"), np.zeros(1, "F")
    # On COMM_SELF, since a library may notice the mistake on some ranks only after others wait in the call.
    for op, operand in (
        (MPI.BAND, floats),
        (MPI.LAND, floats),
        (MPI.SUM, flags),
        (MPI.MAX, bits),
        (MPI.MAXLOC, floats),
    ):
        with fails(MPI, MPI.ERR_OP):
            MPI.COMM_SELF.Allreduce(operand, operand.copy(), op=op)


def replace_is_for_windows_only(MPI: Any, comm: Any) -> None:
    """REPLACE, NO_OP and the null operation do not reduce."""
    for op in (MPI.REPLACE, MPI.NO_OP, MPI.OP_NULL):
        with fails(MPI, MPI.ERR_OP):
            MPI.COMM_SELF.Allreduce(np.zeros(1), np.zeros(1), op=op)


def reductions_of_large_arrays(MPI: Any, comm: Any) -> None:
    """Large sums are right in every element."""
    rank, size = comm.Get_rank(), comm.Get_size()
    total = reduced(comm, np.arange(100_000.0) + rank, MPI.SUM)
    close(total, size * np.arange(100_000.0) + size * (size - 1) / 2)


def reductions_of_one_column(MPI: Any, comm: Any) -> None:
    """Reducing is per element, whatever the shape."""
    rank, size = comm.Get_rank(), comm.Get_size()
    same(reduced(comm, np.full((2, 3, 4), rank), MPI.SUM), np.full((2, 3, 4), size * (size - 1) // 2))


def half_precision(MPI: Any, comm: Any) -> None:
    """Half floats are added in half precision."""
    if MPI._typedict.get("e"):
        same(
            reduced(comm, np.full(2, 0.5, np.float16), MPI.SUM), np.full(2, 0.5 * comm.Get_size(), np.float16)
        )


def long_doubles(MPI: Any, comm: Any) -> None:
    """Long doubles keep their digits."""
    tiny = np.longdouble(2) ** -60
    total = reduced(comm, np.full(1, 1 + tiny, np.longdouble), MPI.SUM)
    same(bool(total[0] == comm.Get_size() * (1 + tiny)), True)
