"""MPICommExecutor: the other ranks work for the root."""

from mpi4py import MPI
from mpi4py.futures import MPICommExecutor, as_completed


def square(x):
    return x * x


def fail(x):
    raise ValueError(f"no {x}")


with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
    if executor is not None:
        assert list(executor.map(square, range(10))) == [x * x for x in range(10)]
        futures = [executor.submit(square, x) for x in range(5)]
        assert sorted(f.result() for f in as_completed(futures)) == [0, 1, 4, 9, 16]
        bad = executor.submit(fail, 3)
        assert isinstance(bad.exception(), ValueError)
        print("futures", sum(executor.starmap(pow, [(2, 3), (3, 2)])))
