"""MPI adds without a word, whatever the program has told numpy and Python to do about overflow."""

import warnings

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
warnings.simplefilter("error")
if comm.rank % 2 == 0:  # ranks differ, and share the results
    np.seterr(all="raise")

many, few = np.full(2000, 1e308), np.full(3, 1e308)
told, single = np.full(3 * comm.size, 1e308), np.full(3, 3e38, np.float32)
for given in (many, few, single):
    for op in (MPI.SUM, MPI.PROD, MPI.MAX):
        found = np.empty_like(given)
        comm.Allreduce(given, found, op)
        comm.Reduce(given, found, op, 0)
        comm.Scan(given, found, op)
        comm.Exscan(given, found, op)
        comm.Iallreduce(given, found, op).Wait()
    MPI.PROD.Reduce_local(given, found)
    assert np.isinf(found).all()
comm.Reduce_scatter_block(told, few, MPI.PROD)
comm.Reduce_scatter(told, few, op=MPI.PROD)
assert comm.size == 1 or np.isinf(few).all()
pairs = np.full(2, 1e308 + 1e308j)
comm.Allreduce(MPI.IN_PLACE, pairs, MPI.PROD)

one, was = np.full(3, 1e308), np.empty(3)
win = MPI.Win.Allocate(24, 8, comm=comm)
np.frombuffer(win)[:] = 1e308
win.Fence()
win.Accumulate(one, 0)
win.Fence()
assert comm.rank or np.isinf(np.frombuffer(win)).all()
win.Get_accumulate(one, was, 0)
win.Fence()
assert np.isinf(was).all()
win.Fence()
for wrong in (one, np.zeros(1, np.int32)):  # one element of one type, also where it is not used
    try:
        win.Fetch_and_op(wrong, was[:1], 0, 0, MPI.NO_OP)
    except ValueError:
        continue
    raise AssertionError(wrong)
win.Fence()
win.Free()
if comm.rank == 0:
    print("infinite")
