"""What reductions compute: operations, types, orders."""

from __future__ import annotations

from typing import Any

import numpy as np

from spawnsim.testing.claims import claim, close, fails, same


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
