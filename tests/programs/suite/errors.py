"""Errors are exceptions that a program can catch, and the run goes on."""
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
for bad in (lambda: comm.send(1, dest=size + 5), lambda: comm.bcast(1, root=size), lambda: comm.send(1, 0, tag=-7)):
    try:
        bad()
    except MPI.Exception as error:
        assert error.Get_error_class() in (MPI.ERR_RANK, MPI.ERR_ROOT, MPI.ERR_TAG), error
    else:
        raise AssertionError("no error")
right, left = (rank + 1) % size, (rank - 1) % size
request = comm.Isend(np.zeros(10), right)
try:
    comm.Recv(np.zeros(2), left)
except MPI.Exception as error:
    assert error.Get_error_class() == MPI.ERR_TRUNCATE
else:
    raise AssertionError("no truncation")
request.Wait()
assert comm.Get_errhandler() == MPI.ERRORS_RETURN
try:
    MPI.COMM_NULL.Get_rank()
except MPI.Exception as error:
    assert error.Get_error_class() == MPI.ERR_COMM
status = MPI.Status()
comm.Recv(np.zeros(1), MPI.PROC_NULL, status=status)
assert status.source == MPI.PROC_NULL
assert status.count == 0
comm.Barrier()
if rank == 0:
    print("errors caught")
