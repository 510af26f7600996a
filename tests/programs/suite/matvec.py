"""Matrix times vector, rows spread over ranks; power iteration by Allgather."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
p = comm.Get_size()
m = 4
n = m * p
rng = np.random.default_rng(5)
A = rng.random((n, n))
A = (A + A.T) / 2
local = np.ascontiguousarray(A[comm.rank * m : (comm.rank + 1) * m])
x = np.ones(n)
xg = np.empty(n)
for _ in range(5):
    y = local @ x
    comm.Allgather([y, MPI.DOUBLE], [xg, MPI.DOUBLE])
    norm = np.sqrt(comm.allreduce(float(y @ y)))
    x = xg / norm
assert np.allclose(A @ x / np.linalg.norm(A @ x), x, atol=0.2)
expected = np.ones(n)
for _ in range(5):
    expected = A @ expected
    expected /= np.linalg.norm(expected)
assert np.allclose(x, expected)
if comm.rank == 0:
    print(f"norm {norm:.10f}")
