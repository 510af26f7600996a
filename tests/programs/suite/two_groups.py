"""Collectives between two groups of unequal size, in each of their forms."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
first = comm.rank < (comm.size + 2) // 3


def calls(between, name, *args, **kwargs):
    """Make a call that blocks, and the same one that does not."""
    getattr(between, name)(*args, **kwargs)
    yield
    getattr(between, "I" + name.lower())(*args, **kwargs).Wait()
    yield


def check(between, mine, theirs):
    """Hold all rooted calls, with a root in the first group, and some others to what they must bring."""
    n = between.remote_size
    root = (MPI.ROOT if between.rank == 0 else MPI.PROC_NULL) if first else 0
    numbers, got = np.arange(3) + mine[between.rank], np.zeros(3, int)
    for _ in calls(between, "Bcast", numbers if first else got, root=root):
        assert first or [*got] == [theirs[0], theirs[0] + 1, theirs[0] + 2]
        got[:] = 0
    rows = np.zeros((n, 3), int)
    for _ in calls(between, "Gather", numbers, rows, root=root):
        assert root != MPI.ROOT or [*rows[:, 1]] == [each + 1 for each in theirs]
        rows[:] = 0
    many, unequal = np.full(between.rank + 1, mine[between.rank]), np.zeros(n * (n + 1) // 2, int)
    counts = [rank + 1 for rank in range(n)]
    for _ in calls(between, "Gatherv", many, [unequal, counts], root=root):
        assert root != MPI.ROOT or [*unequal] == [
            each for rank, each in enumerate(theirs) for _ in range(rank + 1)
        ]
        unequal[:] = 0
    for _ in calls(between, "Scatter", np.arange(3 * n), got, root=root):
        assert root < 0 or [*got] == [3 * between.rank + each for each in range(3)]
        got[:] = 0
    for _ in calls(between, "Scatterv", [np.arange(unequal.size), counts], many, root=root):
        assert root < 0 or many[0] == between.rank * (between.rank + 1) // 2
        many[:] = 0
    for _ in calls(between, "Reduce", numbers, got, root=root):
        assert root != MPI.ROOT or [*got] == [sum(theirs) + n * each for each in range(3)]
        got[:] = 0
    # Each group gets the sum of what the other one gives: as many blocks as it has ranks itself.
    total, block = between.size * n, np.zeros(n, int)
    # Not without waiting: MPICH 5.0 stands still there.
    between.Reduce_scatter_block(np.arange(total) + mine[between.rank], block)
    assert [*block] == [sum(theirs) + n * (between.rank * n + each) for each in range(n)]


if comm.size > 1:
    group = comm.Split(first, comm.rank)
    between = group.Create_intercomm(0, comm, (comm.size + 2) // 3 if first else 0)
    cut = (comm.size + 2) // 3
    sides = [*range(cut)], [*range(cut, comm.size)]
    check(between, sides[not first], sides[first])
    between.Free()
    group.Free()
if comm.rank == 0:
    print("two groups agree")
