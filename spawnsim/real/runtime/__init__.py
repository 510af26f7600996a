"""What a rank has on any real backend, whatever library carries its messages.

Requests, a watchdog, abort and finalize, clock, random streams and records, counters, and the synchronisation of
windows. Imports neither mpi4py nor torch.distributed; `real.mpi` and `real.torch` are built on it.
"""
