"""Real ranks: processes on real machines, where a call blocks until the library has completed it.

* `real.mpi`: a communicator over mpi4py
* `real.torch`: a communicator over torch.distributed, for systems without MPI
* `real.base`: the requirements on a backend, and the communicator and run of a rank that are derived from it
* `real.runtime`: the services of a rank on any backend (requests, watchdog, abort, clock, records), and calls that are
  derived from messages (collectives, windows)
* `real.launch`: starting and supervising a job, and checking the capabilities of the machine

This package imports nothing, so that `import spawnsim.real` loads neither MPI nor torch.
"""
