"""The calls of a virtual rank: communicators, requests and windows of a simulated MPI, under mpi4py's names.

A program on virtual ranks that imports `mpi4py.MPI` gets `module.MPI`.
"""
