"""Errors are exceptions that a program can catch, and the run goes on."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size


def class_of(call):
    try:
        call()
    except MPI.Exception as error:
        return error.Get_error_class()
    raise AssertionError("no error")


assert class_of(lambda: comm.send(1, dest=size + 5)) == MPI.ERR_RANK
assert class_of(lambda: comm.bcast(1, root=size)) == MPI.ERR_ROOT
assert class_of(lambda: comm.send(1, 0, tag=-7)) == MPI.ERR_TAG
assert class_of(lambda: MPI.COMM_NULL.Get_rank()) == MPI.ERR_COMM
right, left = (rank + 1) % size, (rank - 1) % size
request = comm.Isend(np.zeros(10), right)
assert class_of(lambda: comm.Recv(np.zeros(2), left)) == MPI.ERR_TRUNCATE
request.Wait()
assert comm.Get_errhandler() == MPI.ERRORS_RETURN
status = MPI.Status()
comm.Recv(np.zeros(1), MPI.PROC_NULL, status=status)
assert status.source == MPI.PROC_NULL
assert status.count == 0
comm.Barrier()
if rank == 0:
    print("errors caught")
