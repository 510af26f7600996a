"""Messages above the eager threshold, synchronous, buffered and ready sends; pkl5; matched probes."""

import numpy as np
from mpi4py import MPI
from mpi4py.util import pkl5

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
right, left = (rank + 1) % size, (rank - 1) % size
big = np.full(300_000, float(rank))
got = np.empty_like(big)
request = comm.Irecv(got, left)
comm.Send(big, right)
request.Wait()
assert (got == left).all()
request = comm.Issend(big[:3], right)
comm.Recv(got[:3], left)
request.Wait()
MPI.Attach_buffer(bytearray(20_000 + MPI.BSEND_OVERHEAD))
comm.Bsend(big[:100], right)
comm.Recv(got[:100], left)
MPI.Detach_buffer()
request = comm.Irecv(got[:5], left, tag=77)
comm.Barrier()
comm.Rsend(big[:5], right, tag=77)
request.Wait()
request = comm.isend({"a": rank}, right, tag=4)
message = comm.mprobe(left, 4)
assert message.recv() == {"a": left}
request.wait()
if size > 1:
    if rank == 0:
        comm.Send([big, MPI.DOUBLE], 1, 5)
    if rank == 1:
        status = MPI.Status()
        while not comm.Iprobe(0, 5, status):
            pass
        assert status.Get_count(MPI.DOUBLE) == big.size
        comm.Recv(got, 0, 5)
five = pkl5.Intracomm(comm)
request = five.isend({"array": big, "rank": rank}, right, tag=6)
received = five.recv(source=left, tag=6)
request.wait()
assert received["rank"] == left
assert (received["array"] == left).all()
assert five.bcast(big[:4] if rank == 0 else None, root=0)[0] == 0
assert [a[0] for a in five.allgather(big[:2])] == list(range(size))
if rank == 0:
    print("large", float(received["array"].sum()))
