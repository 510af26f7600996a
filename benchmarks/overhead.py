"""The cost of the simulator without learning: a no-op training loop on 1,000 ranks, and the memory of 10,000.

usage: python benchmarks/overhead.py [RANKS] [ITERATIONS]

Prints processor microseconds per rank and iteration, without start-up. Also asserts the number of events of each
loop: computing and recording need none, a poll needs one.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import spawnsim
from spawnsim.record import Recorder
from spawnsim.scenario import Scenario
from spawnsim.virtual import simulate

REPEATS, CROWD = 3, 10_000
Loop = Callable[[Any, int], None]


def computing(comm: Any, iterations: int) -> None:
    for _ in range(iterations):
        with comm.compute(0.01):
            pass


def recording(comm: Any, iterations: int) -> None:
    for iteration in range(iterations):
        with comm.compute(0.01):
            pass
        comm.record(iteration=iteration, loss=0.5)


def polling(comm: Any, iterations: int) -> None:
    for iteration in range(iterations):
        with comm.compute(0.01):
            pass
        comm.Iprobe()
        comm.record(iteration=iteration, loss=0.5)


def meeting(comm: Any, iterations: int) -> None:
    for iteration in range(iterations):
        with comm.compute(0.01):
            pass
        comm.Barrier()
        comm.record(iteration=iteration, loss=0.5)


LOOPS: dict[str, tuple[Loop, int]] = {  # and SimPy events per rank and iteration, at most
    "compute": (computing, 0),
    "compute, record": (recording, 0),
    "compute, poll, record": (polling, 1),
    "compute, Barrier, record": (meeting, 0),
}


def spent(loop: Loop, ranks: int, iterations: int, stragglers: str | None) -> tuple[float, int]:
    """Return the processor seconds of a run, and its number of SimPy events."""
    begin = time.process_time()
    totals = simulate(
        lambda comm: loop(comm, iterations),
        Scenario(ranks, stragglers=stragglers, seed=7),
        recorder=Recorder(),
    )
    return time.process_time() - begin, totals.scheduled


def per_iteration(loop: Loop, ranks: int, iterations: int, *, events: int, stragglers: str | None) -> float:
    """Return microseconds per rank and iteration."""
    costs = []
    for _ in range(REPEATS):
        short, _ = spent(loop, ranks, 1, stragglers)
        long, scheduled = spent(loop, ranks, iterations + 1, stragglers)
        assert scheduled <= (events * (iterations + 1) + 1) * ranks
        costs.append((long - short) / ranks / iterations * 1e6)
    return statistics.median(costs)


def crowd(comm: Any) -> None:
    """Make a few calls of each kind."""
    recording(comm, 10)
    right, left = (comm.Get_rank() + 1) % comm.Get_size(), (comm.Get_rank() - 1) % comm.Get_size()
    comm.sendrecv(None, right, source=left)
    comm.Barrier()


def memory() -> tuple[float, float]:
    """Return the kilobytes per rank of many ranks, at most, and the seconds of the run."""
    spawnsim.run(crowd, ranks=10)
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    spawnsim.run(crowd, ranks=CROWD)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) / CROWD, time.perf_counter() - begin


def main() -> None:
    kilobytes, seconds = memory()
    print(f"{CROWD:,} ranks: {kilobytes:.0f} kB each, {seconds:.1f} s in all")
    assert kilobytes < 50
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    iterations = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    print(f"{ranks:,} ranks, processor microseconds per rank and iteration; medians of {REPEATS}")
    for stragglers in (None, "lognormal:0.3"):
        for name, (loop, events) in LOOPS.items():
            cost = per_iteration(loop, ranks, iterations, events=events, stragglers=stragglers)
            print(f"{name:<28}{stragglers or '':<16}{cost:8.2f}")


if __name__ == "__main__":
    main()
