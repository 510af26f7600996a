"""Spawned programs: pi by other ranks, over an intercommunicator; several programs at once; a pool of workers."""

import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
child = str(Path(__file__).with_name("helper_child.py"))
assert MPI.Comm.Get_parent() == MPI.COMM_NULL


def work_with(inter, workers):
    """Let spawned ranks compute pi; return it, and what they tell."""
    assert (inter.Get_size(), inter.Get_remote_size()) == (size, workers)
    role = MPI.ROOT if rank == 0 else MPI.PROC_NULL
    inter.Bcast([np.array(100, "i4"), MPI.INT], root=role)
    pi = np.zeros(1)
    inter.Reduce(None, [pi, MPI.DOUBLE], op=MPI.SUM, root=role)
    told = inter.allgather((rank, "parent"))
    inter.bcast("all" if rank == 0 else None, root=role)
    total = inter.allreduce(rank)
    both = inter.Merge(high=False)
    assert (both.Get_rank(), both.Get_size()) == (rank, size + workers)
    both.Barrier()
    both.Free()
    inter.Disconnect()
    assert inter == MPI.COMM_NULL
    return round(float(pi[0]), 6), told, total


codes = []
first = comm.Spawn(sys.executable, args=[child, "one", "2"], maxprocs=3, root=size - 1, errcodes=codes)
assert codes == [MPI.SUCCESS] * 3
print(rank, *work_with(first, 3))
several = comm.Spawn_multiple([sys.executable] * 2, [[child, "a"], ["-u", child]], [1, 2], root=0)
print(rank, *work_with(several, 3))
