"""One-sided reads on real MPI: `mpiexec -n 2 python benchmarks/real_windows.py`.

Ratios within one run, medians of 5.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
from mpi4py import MPI

from spawnsim.real.mpi import MPIComm, guarded, world

REPEATS, LENGTH = 5, 10_000_000
BATCH_S, BATCHES = 0.05, 40


def fetch(comm: MPIComm) -> float:
    """Return the bandwidth of our Get of 10 M float32, as a share of a bare Get's."""
    ours = comm.Win.Allocate(4 * LENGTH)
    bare = MPI.Win.Allocate(4 * LENGTH, 1, comm=comm.as_mpi_comm())
    into, ratios = np.zeros(LENGTH, np.float32), []
    comm.Barrier()
    if comm.rank == 0:
        bare.Lock_all()
        ours.Lock_all()
        for _ in range(REPEATS + 1):
            begin = time.perf_counter()
            bare.Get(into, 1)
            bare.Flush(1)
            middle = time.perf_counter()
            ours.Get(into, 1)
            ours.Flush(1)
            ratios.append((middle - begin) / (time.perf_counter() - middle))
        bare.Unlock_all()
        ours.Unlock_all()
    comm.Barrier()
    bare.Free()
    return statistics.median(ratios[1:]) if ratios else 0.0


def wait_for_a_busy_donor(comm: MPIComm, memory: str) -> tuple[list[float], float]:
    """Return waits (s) of a reader of 1 MB while the donor computes in blocks, and the cost of polling on the donor."""
    length = 250_000
    own = np.zeros(length, np.float32)
    window = comm.Win.Allocate(4 * length) if memory == "allocate" else comm.Win.Create(own)
    into, waits, spent = np.zeros(length, np.float32), [], 0.0
    comm.Barrier()
    if comm.rank == 1:
        begin = time.perf_counter()
        for _ in range(BATCHES):
            block = comm.compute()
            block.__enter__()
            time.sleep(BATCH_S)
            leaving = time.perf_counter()
            block.__exit__()
            spent += time.perf_counter() - leaving
        spent /= time.perf_counter() - begin
    else:
        window.Lock_all()
        end = time.perf_counter() + BATCH_S * (BATCHES - 3)
        while time.perf_counter() < end:
            begin = time.perf_counter()
            window.Get(into, 1)
            window.Flush(1)
            waits.append(time.perf_counter() - begin)
            time.sleep(0.007)
        window.Unlock_all()
    comm.Barrier()
    return waits, spent


def main() -> None:
    comm = world()
    with guarded(comm):
        share = fetch(comm)
        if comm.rank == 0:
            print(f"Get of 10 M float32: {share:.2f} of a bare Get (wanted 0.9)")
        for memory in ("allocate", "create"):
            waits, spent = wait_for_a_busy_donor(comm, memory)
            spent = comm.bcast(spent, root=1)
            if comm.rank == 0:
                median, longest = statistics.median(waits) * 1e3, max(waits) * 1e3
                print(
                    f"reader's wait, donor in blocks of 50 ms, window by {memory}: median {median:.2f} ms,",
                    end=" ",
                )
                print(
                    f"longest {longest:.1f} ms (wanted 60), {100 * spent:.3f} % of the donor's time (wanted 0.1)"
                )


if __name__ == "__main__":
    main()
