"""Hello, in the order of ranks."""

import sys

from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
assert (rank, size) == (comm.rank, comm.size)
for turn in range(size):
    comm.Barrier()
    if turn == rank:
        print(f"Hello, World! I am process {rank} of {size}.")
        sys.stdout.flush()
