"""Bandwidth: a window of messages, then a short answer."""

import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
window = 16
for nbytes in (1024, 65536):
    s, r, ack = np.zeros(nbytes, "B"), np.zeros(nbytes * window, "B"), np.zeros(4, "B")
    comm.Barrier()
    t0 = MPI.Wtime()
    for _ in range(5):
        if rank == 0 and size > 1:
            MPI.Request.Waitall([comm.Isend([s, MPI.CHAR], 1, 100) for _ in range(window)])
            comm.Recv([ack, MPI.CHAR], 1, 101)
        elif rank == 1:
            parts = [r[k * nbytes : (k + 1) * nbytes] for k in range(window)]
            MPI.Request.Waitall([comm.Irecv([part, MPI.CHAR], 0, 100) for part in parts])
            comm.Send([ack, MPI.CHAR], 0, 101)
    if rank == 0:
        rate = nbytes * window * 5 / (MPI.Wtime() - t0) / 1e6
        print(f"{nbytes:<10}{rate:20.6f}" if "--values" in sys.argv else f"{nbytes} measured")
