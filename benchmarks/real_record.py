"""The cost of recording on a real rank: `mpiexec -n 2 python benchmarks/real_record.py`.

Microseconds of the program's own thread (waiting for a core does not count), the best of 9 rounds. Rows go to a shard
on disk, as in `spawnsim run --out`, including flushes. The training loop computes for about 200 us per iteration, as
in the digits study; rounds with and without `comm.record` alternate.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from spawnsim.real.mpi import MPIComm, guarded, world
from spawnsim.record import Journal
from spawnsim.record.journal import shard

CALLS, REPEATS = 5_000, 9
Recording = Callable[[int], object]
NUMBERS = {"iteration": 3, "loss": 0.5, "ok": True, "wait_s": 0.25, "stale": 1, "a": 1.5, "b": 2.5, "c": 3.5}


def timed(call: Callable[[], object], calls: int = CALLS) -> float:
    """Return microseconds per call."""
    rounds = []
    for _ in range(REPEATS):
        begin = time.thread_time()
        for _ in range(calls):
            call()
        rounds.append((time.thread_time() - begin) / calls * 1e6)
    return min(rounds)


def block(comm: MPIComm) -> None:
    """Compute nothing."""
    with comm.compute():
        pass


def step(weights: np.ndarray) -> None:
    """Compute for about 200 us, on this core only."""
    for _ in range(240):
        weights += 1.0


def loop_us(comm: MPIComm, recording: Recording) -> float:
    """Return microseconds per iteration of a training loop."""
    weights, count = np.zeros(2_000), 500
    begin = time.thread_time()
    for iteration in range(count):
        with comm.compute():
            step(weights)
        recording(iteration)
    return (time.thread_time() - begin) / count * 1e6


def main() -> None:
    journal = Journal()
    comm = world(recorder=journal)
    with tempfile.TemporaryDirectory() as folder, guarded(comm):
        journal.open(shard(Path(folder), comm.rank))
        record, counters = comm.record, comm.runtime.counters
        array, loss = np.zeros(100), np.float64(0.5)
        figures = {
            "row of 8 numbers": timed(lambda: record(**NUMBERS)),
            "row of 7 numbers and a text": timed(lambda: record(**{**NUMBERS, "c": "age"})),
            "row of 7 numbers and a numpy scalar": timed(lambda: record(**{**NUMBERS, "c": loss})),
            "event": timed(lambda: record.event("replacement", donors=[1, 2], why="age"), 500),
            "compute block": timed(lambda: block(comm)),
            "count of a message": timed(lambda: counters.sent("Isend", array)),
            "count of a collective": timed(lambda: counters.part("Allreduce", (array, array), {}, 0)),
        }
        kept: Recording = lambda iteration: record(**{**NUMBERS, "iteration": iteration, "why": "age"})  # noqa: E731
        pairs = [(loop_us(comm, lambda _: None), loop_us(comm, kept)) for _ in range(REPEATS)]
        without, given = (min(column) for column in zip(*pairs, strict=True))
        if comm.rank == 0:
            print("\n".join(f"{name:36} {us:7.2f} us" for name, us in figures.items()))
            share = 100 * (given / without - 1)
            print(
                f"{'training loop, per iteration':36} {without:7.1f} us, recorded {given:.1f} us: {share:+.2f} %"
            )
            print(
                f"{'bytes of the shard per row':36} {shard(Path(folder), 0).stat().st_size / journal.rows:7.1f}"
            )


if __name__ == "__main__":
    main()
