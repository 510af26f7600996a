"""Sample sort: Alltoall of counts, Alltoallv of data, Gatherv of the result."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
data = np.sort(np.random.RandomState(rank + 7).rand(40))
samples = data[:: max(1, len(data) // size)][:size]
everyone = np.sort(np.concatenate(comm.allgather(samples)))
splitters = everyone[len(everyone) // size :: max(1, len(everyone) // size)][: size - 1]
where = np.searchsorted(data, splitters)
scounts = np.diff(np.concatenate([[0], where, [len(data)]])).astype("i")
rcounts = np.empty(size, "i")
comm.Alltoall(scounts, rcounts)
sdispls = np.concatenate([[0], np.cumsum(scounts)[:-1]]).astype("i")
rdispls = np.concatenate([[0], np.cumsum(rcounts)[:-1]]).astype("i")
bucket = np.empty(int(rcounts.sum()))
comm.Alltoallv([data, scounts, sdispls, MPI.DOUBLE], [bucket, rcounts, rdispls, MPI.DOUBLE])
bucket.sort()
counts = comm.gather(len(bucket), root=0)
whole = np.empty(40 * size) if rank == 0 else None
comm.Gatherv(bucket, [whole, counts] if rank == 0 else None, root=0)
if rank == 0:
    expected = np.sort(np.concatenate([np.random.RandomState(r + 7).rand(40) for r in range(size)]))
    assert np.array_equal(whole, expected)
    print("sorted", len(whole), f"{whole[0]:.6f} {whole[-1]:.6f}")
