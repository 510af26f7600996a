"""A communicator over mpi4py: `world()` under mpiexec or srun, `wrap(comm)` for one of mpi4py's own.

`comm` is the face. Each of the other rooms is one part of what MPI does (messages, collectives, windows, requests), in
mpi4py's words (`words`), or one promise of the house on top of it (sums on a node, recovery, fingerprints).
"""

from spawnsim.real.mpi.comm import MPIComm, Options, close, guarded, namespace, world, wrap

__all__ = ["MPIComm", "Options", "close", "guarded", "namespace", "world", "wrap"]
