"""The real building: a call blocks the process.

* `real.mpi`: a communicator over mpi4py
* `real.torch`: one over torch.distributed, for where there is no MPI
* `real.rank`: what both have, whatever carries their messages
* `real.launching`: starting ranks, and what the machine can run

Nothing is imported here, so that `import spawnsim.real` loads neither MPI nor torch.
"""
