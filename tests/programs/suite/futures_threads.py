"""mpi4py's executor over threads: what it has beyond that of `concurrent.futures`."""

from mpi4py import MPI
from mpi4py.futures import ThreadPoolExecutor
from mpi4py.util.pool import ThreadPool

comm = MPI.COMM_WORLD
with ThreadPoolExecutor(2) as executor:
    assert executor.bootup() is executor
    assert executor.num_workers == 2
    powers = list(executor.starmap(pow, [(2, 3), (3, 2), (comm.rank, 2)], chunksize=2))
    plain = list(executor.map(abs, range(-9, 0), chunksize=4))
    mixed = sorted(executor.map(abs, range(-9, 0), unordered=True))
try:
    executor.bootup()
except RuntimeError as error:
    told = str(error)
with ThreadPool(2) as pool:
    assert pool.starmap(pow, [(2, 3), (3, 2)]) == powers[:2]
    assert sorted(pool.imap_unordered(abs, [-1, -2])) == [1, 2]
every = comm.gather((powers, told))
if comm.rank == 0:  # the launcher may mix the lines of several ranks
    print(every, plain, mixed)
