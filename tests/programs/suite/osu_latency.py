"""Ping-pong in the style of the OSU benchmarks."""

import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
for nbytes in (1, 1024, 65536, 1 << 20):
    skip, loop = 2, 10
    s, r = np.zeros(nbytes, "B"), np.zeros(nbytes, "B")
    comm.Barrier()
    t0 = 0.0
    for i in range(skip + loop):
        if i == skip:
            t0 = MPI.Wtime()
        if rank == 0 and size > 1:
            comm.Send([s, MPI.CHAR], 1, 1)
            comm.Recv([r, MPI.CHAR], 1, 1)
        elif rank == 1:
            comm.Recv([r, MPI.CHAR], 0, 1)
            comm.Send([s, MPI.CHAR], 0, 1)
    if rank == 0:
        latency = (MPI.Wtime() - t0) * 1e6 / (2 * loop)
        print(f"{nbytes:<10}{latency:20.6f}" if "--values" in sys.argv else f"{nbytes} measured")
