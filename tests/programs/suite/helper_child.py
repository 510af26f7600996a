"""The program that spawning.py spawns: it computes part of pi, and answers its parents."""

import sys

import numpy as np
from mpi4py import MPI

parent, comm = MPI.Comm.Get_parent(), MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
assert parent != MPI.COMM_NULL
assert parent.Is_inter()

count = np.zeros(1, "i4")
parent.Bcast([count, MPI.INT], root=0)
step = 1.0 / count[0]
places = (np.arange(rank, count[0], size) + 0.5) * step
parent.Reduce([np.array((4.0 / (1.0 + places**2)).sum() * step), MPI.DOUBLE], None, op=MPI.SUM, root=0)

told = parent.allgather((rank, sys.argv[1:]))
assert [each for each, _ in told] == list(range(parent.Get_remote_size()))
assert parent.bcast(None, root=0) == "all"
assert parent.allreduce(rank) == sum(range(parent.Get_remote_size()))
both = parent.Merge(high=True)
assert both.Get_rank() == both.Get_size() - size + rank
both.Barrier()
both.Free()
parent.Disconnect()
assert MPI.Comm.Get_parent() == MPI.COMM_NULL
