"""Objects of the program's own classes, user-defined operations, and requests of all kinds."""

import dataclasses

import numpy as np
from mpi4py import MPI


@dataclasses.dataclass
class Point:
    x: float
    y: float

    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)


comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
right, left = (rank + 1) % size, (rank - 1) % size
request = comm.isend(Point(rank, 1.0), right, tag=3)
got = comm.recv(source=left, tag=3)
request.wait()
assert got == Point(left, 1.0)
assert type(got) is Point
total = comm.allreduce(Point(rank, 1.0))
assert total == Point(size * (size - 1) / 2, size)
data = comm.bcast({"key": [1, 2.5, "x"], "where": rank} if rank == size - 1 else None, root=size - 1)
assert data["where"] == size - 1
data["key"].append(rank)
parts = comm.scatter([(i + 1) ** 2 for i in range(size)] if rank == 0 else None, root=0)
assert parts == (rank + 1) ** 2
assert comm.gather(parts, root=0) == ([(i + 1) ** 2 for i in range(size)] if rank == 0 else None)
assert comm.alltoall([(rank, i) for i in range(size)]) == [(i, rank) for i in range(size)]

requests = [comm.irecv(source=left, tag=i) for i in range(4)]
sends = [comm.isend(list(range(i)), right, tag=i) for i in (3, 1, 0, 2)]
assert MPI.Request.waitall(requests) == [list(range(i)) for i in range(4)]
MPI.Request.Waitall(sends)
buffers = [np.empty(4) for _ in range(3)]
requests = [comm.Irecv(b, left, 10 + i) for i, b in enumerate(buffers)]
for i in (2, 0, 1):
    comm.Send(np.full(4, 10.0 * rank + i), right, 10 + i)
left_over = 3
while left_over:
    index = MPI.Request.Waitany(requests)
    assert (buffers[index] == 10.0 * left + index).all()
    left_over -= 1
assert MPI.Request.Waitany(requests) == MPI.UNDEFINED
requests = [comm.irecv(source=left, tag=20 + i) for i in range(3)]
for i in range(3):
    comm.send(i * i, right, 20 + i)
found = {}
while len(found) < 3:
    indices, objects = MPI.Request.waitsome(requests)
    found |= dict(zip(indices, objects, strict=True))
assert found == {0: 0, 1: 1, 2: 4}
assert MPI.Request.Testsome(requests) is None
status = MPI.Status()
assert MPI.Request.testall([comm.isend(1, MPI.PROC_NULL)]) == (True, [None])
persistent = [comm.Send_init(np.arange(3.0) + rank, right), comm.Recv_init(buffers[0][:3], left)]
for _ in range(3):
    MPI.Prequest.Startall(persistent)
    MPI.Request.Waitall(persistent)
assert (buffers[0][:3] == np.arange(3.0) + left).all()
for each in persistent:
    each.Free()


def longest(a, b, dt):
    x, y = np.frombuffer(a, "d"), np.frombuffer(b, "d")
    y[:] = np.where(abs(x) > abs(y), x, y)


op = MPI.Op.Create(longest, commute=True)
out = np.empty(2)
comm.Allreduce(np.array([-float(rank), 1.0]), out, op=op)
assert out[0] == -(size - 1)
op.Free()
work = comm.Iallreduce(np.full(5, 1.0), big := np.empty(5))
flag = False
while not flag:
    flag = work.Test()
assert (big == size).all()
comm.Ibarrier().Wait()
req = comm.Ibcast(big, root=0)
req.Wait()
if rank == 0:
    print("objects", total, data["key"])
