"""The services of a rank on any real backend, independent of the library that carries its messages.

Requests, a watchdog, abort and finalize, clock, random streams and records, counters, checkpoints, the job's registry;
and, derived from messages, point-to-point calls, collectives and windows. Imports neither mpi4py nor torch.distributed.
"""
