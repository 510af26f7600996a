"""The cost that the wrapper adds to a call of mpi4py: `mpiexec -n 2 python benchmarks/real_call.py`.

Microseconds, medians of 5.

Each pair of figures comes from one run, alternating: first the raw call, then the wrapped call.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from spawnsim.comm import ANY_SOURCE, PROC_NULL
from spawnsim.real.mpi import MPIComm, guarded, world

CALLS, REPEATS = 2000, 5


def timed(call: Callable[[], object], calls: int = CALLS) -> float:
    """Return microseconds per call."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


def pairs(comm: MPIComm) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return name → (raw call, wrapped call)."""
    raw, one, many = comm.as_mpi_comm(), np.zeros(1), np.zeros(2)
    other = 1 - comm.rank if comm.rank < 2 else MPI.PROC_NULL

    def ping(who: object) -> Callable[[], None]:
        send, receive = (who.Send, who.Recv)  # type: ignore[attr-defined]
        peer = other if who is raw or other >= 0 else PROC_NULL

        def call() -> None:
            if comm.rank == 0:
                send(one, peer, 1)
                receive(many, peer, 1)
            else:
                receive(many, peer, 1)
                send(one, peer, 1)

        return call

    return {
        "Allreduce of 8 bytes": (lambda: raw.Allreduce(one, many[:1]), lambda: comm.Allreduce(one, many[:1])),
        "Barrier": (raw.Barrier, comm.Barrier),
        "Bcast of 8 bytes": (lambda: raw.Bcast(one), lambda: comm.Bcast(one)),
        "allreduce of an int": (lambda: raw.allreduce(1), lambda: comm.allreduce(1)),
        "Send and Recv there and back": (ping(raw), ping(comm)),
        "Iprobe": (lambda: raw.Iprobe(MPI.ANY_SOURCE, 5), lambda: comm.Iprobe(ANY_SOURCE, 5)),
        "Get_rank": (raw.Get_rank, comm.Get_rank),
    }


def main() -> None:
    comm = world()
    with guarded(comm):
        for name, (bare, wrapped) in pairs(comm).items():
            figures = []
            for _ in range(REPEATS):
                comm.Barrier()
                figures.append((timed(bare), timed(wrapped)))
            raw_us, wrapped_us = (statistics.median(column) for column in zip(*figures, strict=True))
            if comm.rank == 0:
                print(
                    f"{name:30} raw {raw_us:8.2f}  wrapped {wrapped_us:8.2f}  added {wrapped_us - raw_us:6.2f} us"
                )
        block = timed(lambda: comm.compute().__enter__() and comm.compute().__exit__())
        if comm.rank == 0:
            print(f"{'empty compute() block':30} {block:.2f} us")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
