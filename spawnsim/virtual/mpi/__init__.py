"""What a virtual rank calls: the communicators, requests and windows of a simulated MPI, under mpi4py's names.

`module.MPI` is what a program gets that imports `mpi4py.MPI` on virtual ranks.
"""
