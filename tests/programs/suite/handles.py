"""Handles in pickles, and what is left of a type whose parts are freed."""

import pickle

import numpy as np
from mpi4py import MPI
from mpi4py.util import dtlib

comm = MPI.COMM_WORLD
for one in (MPI.MAX, MPI.INFO_NULL, MPI.GROUP_EMPTY, MPI.ERRORS_RETURN, MPI.DOUBLE):
    assert comm.bcast(one) == one
    assert pickle.loads(pickle.dumps(type(one)(one))) == one

pair = MPI.Datatype.Create_struct([1, 2], [0, 8], [MPI.INT, MPI.DOUBLE])
padded = pair.Create_resized(0, 32).Commit()
pair.Free()
for _ in range(2):
    dtype = dtlib.to_numpy_dtype(padded)  # it frees what it takes the type apart into
assert dtype.itemsize == padded.extent == 32
if comm.rank == 0:  # the launcher may mix the lines of several ranks
    print(dtype, padded.typestr, padded.typechar)
rows = np.zeros(3, dtype)
rows["f0"] = comm.rank
comm.Bcast([rows, 3, padded], comm.size - 1)
assert (rows["f0"] == comm.size - 1).all()

ends, edges = [0], []
for rank in range(comm.size):
    edges += [(rank - 1) % comm.size, (rank + 1) % comm.size]
    ends.append(len(edges))
for index in (ends, ends[1:]):
    assert comm.Graph_map(index, edges) == comm.Create_graph(index, edges).rank == comm.rank
graph = comm.Create_dist_graph_adjacent([], [], MPI.WEIGHTS_EMPTY, MPI.WEIGHTS_EMPTY)
assert graph.Get_dist_neighbors_count() == (0, 0, True)
try:
    MPI.COMM_SELF.Create_dist_graph_adjacent([0], [0], MPI.WEIGHTS_EMPTY, MPI.WEIGHTS_EMPTY)
except ValueError:
    graph.Free()
assert not graph, "weights of no edges were taken for one"
try:
    comm.Create_cart([comm.size], [])
except ValueError:
    refused = comm.reduce(1)
    if comm.rank == 0:
        print(refused, "ranks were told that a grid needs a flag for each length")
