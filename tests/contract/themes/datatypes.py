"""Datatypes: what they are, and what they do to messages; CPU tensors of torch as buffers, where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np

from contract.cases import Skipped, claim, fails, refused, same


def echoed(comm: Any, source: Any, target: Any, status: Any = None) -> None:
    """Send a message to oneself."""
    rank = comm.Get_rank()
    comm.Sendrecv(source, rank, 0, target, rank, 0, status)


def sizes_and_names(MPI, comm):
    """Predefined types have C's sizes, and names."""
    sizes = {1: "BYTE C_BOOL", 2: "INT16_T", 4: "INT FLOAT", 8: "DOUBLE AINT", 16: "C_DOUBLE_COMPLEX"}
    for size, names in sizes.items():
        for name in names.split():
            one = getattr(MPI, name)
            same((one.Get_size(), one.Get_extent(), one.Get_name()), (size, (0, size), f"MPI_{name}"))
            same((one.size, one.extent, one.is_predefined, one.is_named), (size, size, True, True))


def codes(MPI, comm):
    """Types and typecodes lead to each other."""
    for code in "bhilqBHILQfd":
        same(MPI.Datatype.fromcode(code).tocode(), code)
    same((MPI.DOUBLE.typestr, MPI.DOUBLE.typechar, MPI.INT32_T.typechar), ("f8", "d", "i"))
    refused(ValueError, MPI.Datatype.fromcode, "no such code")
    refused(ValueError, MPI.DOUBLE.Create_contiguous(2).tocode)


def a_column(MPI, comm):
    """A vector picks a column, which may be received as a line or as another column."""
    grid, line, other = np.arange(12.0).reshape(3, 4), np.zeros(3), np.zeros((3, 2))
    column, narrow = MPI.DOUBLE.Create_vector(3, 1, 4).Commit(), MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    same((column.Get_size(), column.Get_extent()), (24, (0, 72)))
    echoed(comm, [grid.reshape(-1)[1:], 1, column], line)
    same(line, [1, 5, 9])
    # Both sides have three doubles in their signature, so the strides may differ.
    echoed(comm, [grid, 1, column], [other, 1, narrow])
    same(other[:, 0], [0, 4, 8])
    column.Free()
    narrow.Free()


def gaps_in_what_is_received(MPI, comm, own):
    """The memory between the parts of a derived type stays, also between elements, which follow at its extent."""
    grid, target = np.full((3, 4), -1.0), np.full(6, -1.0)
    echoed(comm, np.arange(6.0), [grid, 1, own(MPI.DOUBLE.Create_hvector(3, 2, 32).Commit())])
    same(grid, [[0, 1, -1, -1], [2, 3, -1, -1], [4, 5, -1, -1]])
    echoed(comm, np.arange(3.0), [target, 3, own(MPI.DOUBLE.Create_resized(0, 16).Commit())])
    same(target, [0, -1, 1, -1, 2, -1])


def indexed_elements(MPI, comm, own):
    """Indexed types pick blocks in any order, by elements or bytes."""
    source = np.arange(10, dtype=np.int32)
    for datatype, wanted in (
        (MPI.INT.Create_indexed([2, 1], [7, 1]), [7, 8, 1]),
        (MPI.INT.Create_hindexed([2, 1], [28, 4]), [7, 8, 1]),
        (MPI.INT.Create_indexed_block(2, [6, 0]), [6, 7, 0, 1]),
        (MPI.INT.Create_hindexed_block(2, [24, 0]), [6, 7, 0, 1]),
    ):
        target = np.zeros(len(wanted), np.int32)
        echoed(comm, [source, 1, own(datatype).Commit()], target)
        same(target, wanted)


def structures(MPI, comm):
    """A struct of several types is C's struct: numpy's aligned records travel with it."""
    dtype = np.dtype([("id", "i4"), ("value", "f8"), ("flag", "i1")], align=True)
    places = [dtype.fields[name][1] for name in dtype.names]  # type: ignore[index,union-attr]
    record = MPI.Datatype.Create_struct([1, 1, 1], places, [MPI.INT, MPI.DOUBLE, MPI.SIGNED_CHAR]).Commit()
    # The extent has C's padding at the end, the true extent ends with the last byte.
    same(
        (record.Get_size(), record.Get_extent(), record.Get_true_extent()), (13, (0, dtype.itemsize), (0, 17))
    )
    source = np.array([(1, 2.5, 3), (4, 5.5, 6)], dtype)
    target = np.zeros(2, dtype)
    echoed(comm, [source, 2, record], [target, 2, record])
    same(target.tolist(), source.tolist())
    record.Free()


def fields_of_records(MPI, comm, own):
    """A resized type walks over one field of an array of records."""
    dtype = np.dtype([("id", "i4"), ("value", "f8")], align=True)
    source, target = np.array([(1, 0.5), (2, 1.5), (3, 2.5)], dtype), np.zeros(3)
    one = own(MPI.DOUBLE.Create_hindexed([1], [8]))
    field = own(one.Create_resized(0, dtype.itemsize).Commit())
    echoed(comm, [source, 3, field], target)
    same(target, [0.5, 1.5, 2.5])


def boxes(MPI, comm, own):
    """Subarrays are boxes of arrays, in C and Fortran order."""
    grid = np.arange(20.0).reshape(4, 5)
    for box in (([4, 5], [2, 3], [1, 2]), ([5, 4], [3, 2], [2, 1], MPI.ORDER_F)):
        datatype, target = own(MPI.DOUBLE.Create_subarray(*box).Commit()), np.zeros((2, 3))
        same((datatype.Get_size(), datatype.Get_extent()), (48, (0, 160)))
        echoed(comm, [grid, 1, datatype], target)
        same(target, grid[1:3, 2:5])


def nested_types(MPI, comm):
    """Types are made of types of types."""
    pair = MPI.INT.Create_vector(2, 1, 2)
    pairs = pair.Create_hvector(2, 1, 24)
    triple = pairs.Create_contiguous(2).Commit()
    same((triple.Get_size(), triple.Get_extent()), (32, (0, 72)))
    source, target = np.arange(20, dtype=np.int32), np.zeros(8, np.int32)
    echoed(comm, [source, 1, triple], target)
    same(target, [0, 2, 6, 8, 9, 11, 15, 17])
    for datatype in (triple, pairs, pair):
        datatype.Free()


def negative_strides(MPI, comm, own):
    """A vector with a negative stride runs backwards from its start."""
    backwards = own(MPI.DOUBLE.Create_vector(4, 1, -1))
    # Blocks lie before the start, so the type is placed at the last element.
    shifted = own(MPI.Datatype.Create_struct([1], [24], [backwards]).Commit())
    same((backwards.Get_extent(), backwards.Get_true_extent()), ((-24, 32), (-24, 32)))
    target = np.zeros(4)
    echoed(comm, [np.arange(4.0), 1, shifted], target)
    same(target, [3, 2, 1, 0])


def counts_and_elements(MPI, comm):
    """A message that ends inside a derived element has no count, but basic elements."""
    triple, status = MPI.INT.Create_contiguous(3).Commit(), MPI.Status()
    target = np.zeros(9, np.int32)
    echoed(comm, np.arange(4, dtype=np.int32), [target, 3, triple], status)
    # Four integers are one triple and a third: no count of triples, but four basic elements.
    same(
        (status.Get_count(triple), status.Get_elements(triple), status.Get_count(MPI.INT)),
        (MPI.UNDEFINED, 4, 4),
    )
    same(target, [0, 1, 2, 3, 0, 0, 0, 0, 0])
    echoed(comm, np.arange(6, dtype=np.int32), [target, 3, triple], status)
    same((status.Get_count(triple), status.Get_elements(triple)), (2, 6))
    triple.Free()


def types_that_cannot_be_used(MPI, comm, rank, own):
    """A type must be committed, and not freed, which predefined ones cannot be; negative counts are ERR_COUNT."""
    raw, pair = own(MPI.INT.Create_contiguous(2)), MPI.INT.Create_contiguous(2)
    fails(MPI, MPI.ERR_TYPE, comm.Isend, [np.zeros(2, np.int32), 1, raw], dest=rank)
    pair.Free()
    claim(pair == MPI.DATATYPE_NULL and not pair, "a freed type is null")
    for call in (pair.Get_size, MPI.INT.Free):
        fails(MPI, MPI.ERR_TYPE, call)
    fails(MPI, MPI.ERR_COUNT, MPI.INT.Create_contiguous, -1)
    fails(MPI, MPI.ERR_TYPE, MPI.DATATYPE_NULL.Create_contiguous, 2)


def duplicates_and_names(MPI, comm, own):
    """A duplicate is a type of its own with the same layout."""
    twin, target = own(MPI.DOUBLE.Dup()), np.zeros(2)
    twin.Set_name("twin")
    same((twin.Get_name(), MPI.DOUBLE.Get_name(), twin.Get_size()), ("twin", "MPI_DOUBLE", 8))
    claim(twin != MPI.DOUBLE, "a duplicate is another type")
    echoed(comm, [np.ones(2), twin], target)
    same(target, [1, 1])


def what_a_type_is_made_of(MPI, comm, own):
    """Decode tells constructor and arguments; envelopes tell the constructor."""
    vector = own(MPI.INT.Create_vector(3, 2, 4))
    base, name, arguments = vector.decode()
    same((base == MPI.INT, name, arguments), (True, "VECTOR", {"count": 3, "blocklength": 2, "stride": 4}))
    same((vector.combiner, MPI.INT.combiner), (MPI.COMBINER_VECTOR, MPI.COMBINER_NAMED))


def pack_and_unpack(MPI, comm):
    """Several messages travel as one packed one."""
    buf, rank = bytearray(64), comm.Get_rank()
    position = MPI.INT.Pack(np.array([rank, 7], np.int32), buf, 0, comm)
    position = MPI.DOUBLE.Pack(np.array([0.5]), buf, position, comm)
    same((position, MPI.INT.Pack_size(2, comm)), (16, 8))
    received = bytearray(64)
    echoed(comm, [buf, position, MPI.PACKED], [received, MPI.PACKED])
    numbers, value = np.zeros(2, np.int32), np.zeros(1)
    position = MPI.INT.Unpack(received, 0, numbers, comm)
    position = MPI.DOUBLE.Unpack(received, position, value, comm)
    same((numbers.tolist(), value.tolist(), position), ([rank, 7], [0.5], 16))


def absolute_addresses(MPI, comm, own):
    """With BOTTOM, displacements are addresses: one message from two arrays."""
    one, two = np.array([1.0, 2.0]), np.array([3, 4], np.int32)
    places = [MPI.Get_address(one), MPI.Get_address(two)]
    both = own(MPI.Datatype.Create_struct([2, 2], places, [MPI.DOUBLE, MPI.INT]).Commit())
    target = np.zeros(3)
    echoed(comm, [MPI.BOTTOM, 1, both], [target, 24, MPI.BYTE])
    same((target[:2].tolist(), target[2:].view(np.int32).tolist()), ([1, 2], [3, 4]))
    same(MPI.Aint_diff(places[0], MPI.Aint_add(places[0], 8)), -8)


def load_torch() -> Any:
    """Return torch, which is imported only here; without it the test is skipped."""
    if importlib.util.find_spec("torch") is None:
        raise Skipped("torch is not installed")
    return importlib.import_module("torch")


def tensors_go_round_a_ring(MPI, comm, rank, left, right):
    """Tensors of all usual dtypes are sent and received in place."""
    torch = load_torch()
    for name in ("float32", "float64", "int64", "int32", "uint8", "bool", "complex64", "float16"):
        source, target, wanted = (torch.full((2, 3), n).to(getattr(torch, name)) for n in (rank, 0, left))
        comm.Sendrecv(source, right, 0, target, left, 0)
        claim(torch.equal(target, wanted), f"{name} arrives")


def tensors_are_reduced(MPI, comm, rank, size):
    """Averaging parameters, in place and not."""
    torch = load_torch()
    parameter = torch.nn.Parameter(torch.full((4,), float(rank)))
    total = torch.zeros(4)
    comm.Allreduce(parameter.detach(), total)
    comm.Allreduce(MPI.IN_PLACE, parameter.data)
    same(total.tolist(), [size * (size - 1) / 2] * 4)
    same(parameter.tolist(), total.tolist())


def tensors_and_arrays_meet(MPI, comm):
    """A tensor is broadcast to arrays."""
    torch = load_torch()
    import numpy as np

    buf = torch.arange(5, dtype=torch.float64) if comm.Get_rank() == 0 else np.zeros(5)
    comm.Bcast(buf)
    same(np.asarray(buf), np.arange(5.0))


def tensors_that_cannot_be_buffers(MPI, comm, rank):
    """A tensor that requires grad or has gaps is refused."""
    torch = load_torch()
    for tensor in (torch.zeros(3, requires_grad=True), torch.zeros(4, 4)[:, 1]):
        refused((BufferError, RuntimeError, ValueError), comm.Isend, tensor, dest=rank)


def tensors_as_objects(MPI, comm, rank, left, right):
    """State dictionaries travel as objects."""
    torch = load_torch()
    state = torch.nn.Linear(2, 2).state_dict() | {"rank": torch.tensor(rank)}
    found = comm.sendrecv(state, dest=right, source=left)
    same((int(found["rank"]), found["weight"].shape), (left, (2, 2)))
