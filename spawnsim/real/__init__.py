"""Real ranks: processes on real machines, where a call blocks until the library has done it.

* `real.mpi`: a communicator over mpi4py
* `real.torch`: one over torch.distributed, for where there is no MPI
* `real.base`: what a backend provides, and the communicator and run of a rank that are derived from it
* `real.runtime`: what a rank has on any of these backends (requests, watchdog, abort, clock, records), and what is
  derived from messages (collectives, windows)
* `real.launch`: starting and supervising a job, and what the machine can run

Nothing is imported here, so that `import spawnsim.real` loads neither MPI nor torch.
"""
