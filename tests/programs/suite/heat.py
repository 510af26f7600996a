"""Jacobi on a Cartesian grid; columns of the halo travel as vector datatypes."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
dims = MPI.Compute_dims(comm.size, 2)
cart = comm.Create_cart(dims, periods=[False, False], reorder=True)
up, down = cart.Shift(0, 1)
left, right = cart.Shift(1, 1)
ny, nx = 6, 5
u = np.zeros((ny + 2, nx + 2))
coords = cart.Get_coords(cart.rank)
if coords[0] == 0:
    u[0, :] = 1.0
column = MPI.DOUBLE.Create_vector(ny, 1, nx + 2)
column.Commit()


def at(row, col):
    return u.reshape(-1)[row * (nx + 2) + col :]


for _ in range(20):
    cart.Sendrecv(u[1, 1:-1].copy(), up, 0, u[-1, 1:-1], down, 0)
    cart.Sendrecv(u[-2, 1:-1].copy(), down, 1, u[0, 1:-1], up, 1)
    cart.Sendrecv([at(1, 1), 1, column], left, 2, [at(1, nx + 1), 1, column], right, 2)
    cart.Sendrecv([at(1, nx), 1, column], right, 3, [at(1, 0), 1, column], left, 3)
    new = u.copy()
    new[1:-1, 1:-1] = 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])
    change = cart.allreduce(float(np.abs(new - u).max()), op=MPI.MAX)
    u = new
heat = cart.reduce(float(u[1:-1, 1:-1].sum()), root=0)
column.Free()

whole = np.zeros((ny * dims[0] + 2, nx * dims[1] + 2))
whole[0, :] = 1.0
for _ in range(20):
    new = whole.copy()
    new[1:-1, 1:-1] = 0.25 * (whole[:-2, 1:-1] + whole[2:, 1:-1] + whole[1:-1, :-2] + whole[1:-1, 2:])
    whole = new
y, x = coords[0] * ny, coords[1] * nx
assert np.allclose(u[1:-1, 1:-1], whole[y + 1 : y + ny + 1, x + 1 : x + nx + 1])
if cart.rank == 0:
    print(f"dims {dims} heat {heat:.10f} change {change:.10f}")
cart.Free()
