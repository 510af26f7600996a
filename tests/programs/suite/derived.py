"""Derived datatypes: contiguous, vector, indexed, struct, resized, subarray; Pack and Unpack."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
right, left = (rank + 1) % size, (rank - 1) % size
matrix = np.arange(16.0).reshape(4, 4) + 100 * rank
column = MPI.DOUBLE.Create_vector(4, 1, 4).Commit()
got = np.zeros(4)
comm.Sendrecv([matrix, 1, column], right, 0, got, left, 0)
assert (got == np.array([0, 4, 8, 12]) + 100 * left).all()
indexed = MPI.DOUBLE.Create_indexed([2, 1], [1, 7]).Commit()
got = np.zeros(3)
comm.Sendrecv([matrix, 1, indexed], right, 0, got, left, 0)
assert (got == np.array([1, 2, 7]) + 100 * left).all()
block = MPI.DOUBLE.Create_subarray([4, 4], [2, 2], [1, 1]).Commit()
target = np.zeros((4, 4))
comm.Sendrecv([matrix, 1, block], right, 0, [target, 1, block], left, 0)
assert target[1, 1] == 5 + 100 * left
assert target[0, 0] == 0
record = np.dtype([("id", "i4"), ("pos", "f8", 3), ("name", "S8")], align=True)
fields = MPI.Datatype.Create_struct(
    [1, 3, 8], [record.fields[n][1] for n in ("id", "pos", "name")], [MPI.INT, MPI.DOUBLE, MPI.CHAR]
)
kind = fields.Create_resized(0, record.itemsize).Commit()
mine = np.zeros(3, record)
mine["id"], mine["pos"], mine["name"] = rank, np.arange(3), b"abc"
theirs = np.zeros(3, record)
comm.Sendrecv([mine, 3, kind], right, 0, [theirs, 3, kind], left, 0)
assert (theirs["id"] == left).all()
assert (theirs["pos"] == np.arange(3)).all()
assert theirs["name"][2] == b"abc"
every = np.zeros(size, record)
comm.Allgather([mine[:1], 1, kind], [every, 1, kind])
assert list(every["id"]) == list(range(size))
packed, position = bytearray(64), 0
position = MPI.INT.Pack(np.array([rank, 7], "i"), packed, position, comm)
position = MPI.DOUBLE.Pack(np.array([0.5]), packed, position, comm)
incoming = bytearray(64)
comm.Sendrecv([packed, position, MPI.PACKED], right, 9, [incoming, position, MPI.PACKED], left, 9)
ints, real, position = np.zeros(2, "i"), np.zeros(1), 0
position = MPI.INT.Unpack(incoming, position, ints, comm)
MPI.DOUBLE.Unpack(incoming, position, real, comm)
assert list(ints) == [left, 7]
assert real[0] == 0.5
for each in (column, indexed, block, fields, kind):
    each.Free()
if rank == 0:
    print("types", MPI.DOUBLE.Get_size(), MPI.DOUBLE.Get_extent(), record.itemsize)
