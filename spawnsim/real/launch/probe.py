"""A program of two ranks that measures what an MPI does here; `doctor` starts it. Prints one JSON object.

Uses mpi4py alone, on purpose: it shows the bare library, without what spawnsim adds.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from mpi4py import MPI

from spawnsim.real.launch.launchers import cuda_aware

BUSY_S = 0.4
LEVELS = {0: "single", 1: "funneled", 2: "serialized", 3: "multiple"}


def waited_s(window: MPI.Win, comm: MPI.Comm) -> float:
    """Return how long rank 0's Get waits for rank 1, which computes for BUSY_S seconds."""
    window.Lock_all()
    comm.Barrier()
    begin = time.perf_counter()
    if comm.Get_rank() == 1:
        while time.perf_counter() - begin < BUSY_S:
            sum(range(100))
    else:
        time.sleep(BUSY_S / 4)
        begin = time.perf_counter()
        window.Get([bytearray(8), MPI.BYTE], 1)
        window.Flush(1)
    took = time.perf_counter() - begin
    comm.Barrier()
    window.Unlock_all()
    window.Free()
    return took


def measure() -> dict[str, Any]:
    """Return what is to be known of this MPI. Collective over two ranks."""
    comm = MPI.COMM_WORLD
    vendor, version = MPI.get_vendor()
    allocated = waited_s(MPI.Win.Allocate(8, 1, comm=comm), comm)
    created = waited_s(MPI.Win.Create(bytearray(8), 1, comm=comm), comm)
    begin = time.perf_counter()
    for _ in range(200):
        comm.Barrier()
    return {
        "vendor": vendor,
        "version": ".".join(map(str, version)),
        "library": " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split()),
        "standard": ".".join(map(str, MPI.Get_version())),
        "thread_level": LEVELS.get(MPI.Query_thread(), "unknown"),
        "progress_allocate": allocated < BUSY_S / 2,
        "progress_create": created < BUSY_S / 2,
        "cuda_aware": cuda_aware(),
        "barrier_us": (time.perf_counter() - begin) / 200 * 1e6,
    }


if __name__ == "__main__":
    found = measure()
    if MPI.COMM_WORLD.Get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
