"""Allreduce latency: the mean over ranks."""

import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
for count in [int(arg) for arg in sys.argv[2:]] or (2, 4096, 262144):
    s, r = np.ones(count, "f"), np.zeros(count, "f")
    comm.Barrier()
    timer = 0.0
    for _ in range(4):
        t0 = MPI.Wtime()
        comm.Allreduce([s, MPI.FLOAT], [r, MPI.FLOAT], op=MPI.SUM)
        timer += MPI.Wtime() - t0
        comm.Barrier()
    assert r[0] == comm.size
    every = comm.gather(timer / 4 * 1e6, root=0)
    if comm.rank == 0:
        print(f"{4 * count:<10}{max(every):20.6f}" if "--values" in sys.argv else f"{4 * count} measured")
