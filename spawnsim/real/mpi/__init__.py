"""A communicator over mpi4py: `world()` under mpiexec or srun, `wrap(comm)` for an mpi4py communicator.

`comm` is the public interface. Each other module implements one part of MPI (point to point, collectives, windows), the
translation of arguments to mpi4py's, or an addition of spawnsim (deadlines, sums in shared memory, recovery).
"""

from spawnsim.real.mpi.comm import MPIComm, Options, close, guarded, namespace, world, wrap

__all__ = ["MPIComm", "Options", "close", "guarded", "namespace", "world", "wrap"]
