"""Partitioned messages around a ring: partitions become ready in any order."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
right, left = (rank + 1) % size, (rank - 1) % size
COUNT, PARTS = 5, 4

mine, theirs = np.zeros(COUNT * PARTS), np.full(COUNT * PARTS, -1.0)
send = comm.Psend_init(mine, PARTS, right, tag=3)
receive = comm.Precv_init([theirs, MPI.DOUBLE], PARTS, left, tag=3)

for turn in range(3):
    receive.Start()
    send.Start()
    assert not send.Test()
    for part in [2, 0]:
        mine[part * COUNT : (part + 1) * COUNT] = 100 * turn + 10 * rank + part
        send.Pready(part)
    assert not receive.Parrived(3)
    comm.Barrier()
    mine[COUNT : 2 * COUNT] = mine[3 * COUNT :] = turn
    send.Pready_list([3])
    send.Pready_range(1, 1)
    while not receive.Parrived(2):  # a library may deliver all partitions together
        pass
    assert (theirs[2 * COUNT : 3 * COUNT] == 100 * turn + 10 * left + 2).all()
    status = MPI.Status()
    MPI.Request.Waitall([send, receive], [MPI.Status(), status])
    assert send != MPI.REQUEST_NULL
    assert (status.source, status.tag, status.Get_count(MPI.DOUBLE)) == (left, 3, COUNT * PARTS)
    expected = np.repeat([100 * turn + 10 * left, turn, 100 * turn + 10 * left + 2, turn], COUNT)
    assert (theirs == expected).all(), theirs
send.Free()
receive.Free()

# Two of one pair and tag match in order; a derived type.
first, second = np.full(6, 1 + rank), np.full(6, 1000 + rank)
sends = [comm.Psend_init(each, 3, right) for each in (first, second)]
strided = MPI.LONG.Create_vector(2, 1, 2).Create_resized(0, 4 * 8).Commit()
into = [np.zeros(6, int), np.zeros(12, int)]
receives = [comm.Precv_init(into[0], 3, left, 0), comm.Precv_init([into[1], 1, strided], 3, left, 0)]
MPI.Prequest.Startall([*receives, *sends])
for request in sends[1], sends[0]:
    request.Pready_range(0, 2)
MPI.Request.Waitall([*receives, *sends])
assert (into[0] == 1 + left).all() and (into[1][::2] == 1000 + left).all() and not into[1][1::2].any()
for request in [*receives, *sends]:
    request.Free()

found = 0
try:
    comm.Psend_init(first, 2, size)
except MPI.Exception as error:
    found = error.Get_error_class()
assert found == MPI.ERR_RANK
print(f"rank {rank}: {int(theirs.sum())} {int(into[1].sum())}")
