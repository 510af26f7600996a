"""Exchanges with the neighbours of closed grids, with one or two ranks in a dimension, too; ranks without any."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
dims = MPI.Compute_dims(comm.size, 3)
grid = comm.Create_cart(dims, periods=[True] * 3)
places = [grid.Get_coords(rank) for rank in range(comm.size)]


def beside(place, axis, step):
    """Return who is a step away from a place along an axis."""
    moved = [*place]
    moved[axis] = (moved[axis] + step) % dims[axis]
    return places.index(moved)


# What a rank sends down an axis arrives from above, and the other way round (MPI 4.1, 8.6).
sides = [(axis, step) for axis in range(3) for step in (-1, 1)]
numbers = np.arange(6, dtype="i") + 10 * grid.rank
want = [10 * beside(grid.coords, axis, step) + 2 * axis + (step < 0) for axis, step in sides]
got = np.zeros(6, "i")
grid.Neighbor_alltoall(numbers, got)
assert [*got] == want, (got, want)
assert grid.neighbor_alltoall([*numbers.tolist()]) == want
got[:] = 0
grid.Ineighbor_alltoallv([numbers, [1] * 6], [got, [1] * 6]).Wait()
assert [*got] == want, (got, want)
types, steps = [MPI.INT] * 6, [4 * side for side in range(6)]
got[:] = 0
again = grid.Neighbor_alltoallw_init([numbers, [1] * 6, steps, types], [got, [1] * 6, steps, types])
again.Start()
again.Wait()
again.Free()
assert [*got] == want, (got, want)
grid.Free()

# Edges to rank 0 alone: the others have nobody to receive from, and rank 0 receives from all.
star = comm.Create_dist_graph([comm.rank], [1], [0])
got = np.zeros(comm.size if comm.rank == 0 else 0, "i")
star.Neighbor_alltoall([np.full(1, comm.rank, "i"), 1, MPI.INT], [got, 1, MPI.INT])
assert sorted(got) == [*range(comm.size)][: len(got)]
star.Free()
if comm.rank == 0:
    print("halos are right")
