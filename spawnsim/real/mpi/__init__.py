"""A communicator over mpi4py: `world()` under mpiexec or srun, `wrap(comm)` for one of mpi4py's own.

`comm` is the face. The other modules are each one part of what MPI does (point to point, collectives, windows), the
translation of arguments to mpi4py's, or what spawnsim adds (deadlines, sums in shared memory, recovery from deaths).
"""

from spawnsim.real.mpi.comm import MPIComm, Options, close, guarded, namespace, world, wrap

__all__ = ["MPIComm", "Options", "close", "guarded", "namespace", "world", "wrap"]
