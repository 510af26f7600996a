"""A shared counter: Fetch_and_op, then Lock/Get/Accumulate, then mpi4py.util.sync.Counter; a window with fences."""

import numpy as np
from mpi4py import MPI
from mpi4py.util import sync

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
win = MPI.Win.Allocate(8 if rank == 0 else 0, 8, comm=comm)
if rank == 0:
    win.Lock(0)
    np.frombuffer(win.tomemory(), "i8")[:] = 0
    win.Unlock(0)
comm.Barrier()
mine = []
while True:
    got, one = np.empty(1, "i8"), np.ones(1, "i8")
    win.Lock(0)
    win.Fetch_and_op(one, got, 0, 0, MPI.SUM)
    win.Unlock(0)
    if got[0] >= 4 * size:
        break
    mine.append(int(got[0]))
every = sorted(value for part in comm.allgather(mine) for value in part)
assert every == list(range(4 * size)), every
comm.Barrier()
win.Free()

table = np.zeros(size, "d")
win = MPI.Win.Create(table, 8, comm=comm)
win.Fence()
for target in range(size):
    win.Put(np.array([rank + 1.0]), target, rank)
win.Fence()
assert (table == np.arange(1, size + 1)).all()
win.Fence(MPI.MODE_NOSUCCEED)
win.Lock(0, MPI.LOCK_SHARED)
win.Accumulate(np.ones(size), 0, op=MPI.SUM)
win.Unlock(0)
comm.Barrier()
copy = np.empty(size)
win.Lock(0, MPI.LOCK_SHARED)
win.Get(copy, 0)
win.Unlock(0)
assert (copy == np.arange(1, size + 1) + size).all()
comm.Barrier()
win.Free()

counter = sync.Counter(comm=comm)
got = [next(counter) for _ in range(3)]
assert sorted(value for part in comm.allgather(got) for value in part) == list(range(3 * size))
comm.Barrier()
counter.free()
mutex = sync.Mutex(comm=comm)
with mutex:
    pass
mutex.free()
with sync.Sequential(comm):
    print("counted by", rank)
