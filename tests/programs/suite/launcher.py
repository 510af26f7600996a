"""Programs ask their environment whether mpiexec has started them, and which rank of their node they are."""

import os

from mpi4py import MPI

comm = MPI.COMM_WORLD
beside = comm.Split_type(MPI.COMM_TYPE_SHARED)
NAMES = {
    "PMI_RANK": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH
    "OMPI_COMM_WORLD_RANK": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
}
names = next(names for first, names in NAMES.items() if first in os.environ)
told = [int(os.environ[name]) for name in names]
assert told == [comm.rank, comm.size, beside.rank, beside.size], told
comm.Barrier()
if comm.rank == 0:
    print("launcher", len(told))
