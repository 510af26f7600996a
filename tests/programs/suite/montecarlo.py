"""Pi by chance; each rank seeds all its generators with its rank, and none disturbs another's."""

import random

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
np.random.seed(100 + comm.rank)
random.seed(comm.rank)
inside = 0
drawn = []
for _ in range(10):
    x, y = np.random.rand(50), np.random.rand(50)
    comm.Barrier()
    inside += int((x * x + y * y <= 1).sum())
    drawn.append(random.random())
    drawn.append(float(np.random.randn()))
    comm.Barrier()
own = random.Random(comm.rank)
state = np.random.RandomState(100 + comm.rank)
for i in range(10):
    state.rand(100)
    assert drawn[2 * i] == own.random()
    assert drawn[2 * i + 1] == state.randn()
total = comm.reduce(inside, root=0)
if comm.rank == 0:
    print("pi is roughly", 4 * total / (500 * comm.size))
