"""The cost of a rank as their number grows: processor time per rank and iteration, and memory, over ranks.

usage: python benchmarks/scale.py [--loops NAME,...] [--iterations N] [RANKS ...]

RANKS default to 100, 1,000, 10,000 and 100,000. Each figure comes from a separate process. Times are without start-up
(a run of N + 1 iterations less a run of 1 iteration), and memory is the peak of the process, less its peak with 10
ranks. The numbers of events, messages and runs of Python's garbage collector are asserted, since times may not show
their growth.

Loops: "lockstep" computes and sums four numbers over all ranks; "record" computes and records, then meets in a
barrier; "poll" computes and polls for a message; "one-sided" trains a model of four weights under one-sided selective
averaging.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from spawnsim.record import Recorder
from spawnsim.scenario import Scenario
from spawnsim.virtual import simulate

RANKS, FEW, ITERATIONS = (100, 1_000, 10_000, 100_000), 10, 10
Loop = Callable[[Any, int], None]


def lockstep(comm: Any, iterations: int) -> None:
    mine, total = np.ones(4), np.empty(4)
    for _ in range(iterations):
        with comm.compute(0.01):
            pass
        comm.Allreduce(mine, total)
    assert total[0] == comm.Get_size()


def record(comm: Any, iterations: int) -> None:
    for iteration in range(iterations):
        with comm.compute(0.01):
            pass
        comm.record(iteration=iteration, loss=0.5)
    comm.Barrier()


def poll(comm: Any, iterations: int) -> None:
    for _ in range(iterations):
        with comm.compute(0.01):
            pass
        comm.Iprobe()


def one_sided(comm: Any, iterations: int) -> None:
    import torch

    from spawnsim.policies import OneSidedSelectiveAveragingPolicy

    def build() -> Any:
        model = torch.nn.Module()
        model.weights = torch.nn.Parameter(torch.zeros(4))
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    model, optimizer = build()
    policy = OneSidedSelectiveAveragingPolicy(build, model=model, average_every=5)
    for iteration in range(iterations):
        with comm.compute(0.01):
            metric = float(comm.Get_rank() * 7919 % 1000)
        model, optimizer, _ = policy(iteration, model, optimizer, local_metric=metric, group=comm)
    policy.shutdown()


# The loop; events of ranks, and events of SimPy: each in an iteration of a rank, and once per rank. None: not
# asserted.
LOOPS: dict[str, tuple[Loop, tuple[int, int] | None, tuple[int, int] | None]] = {
    "lockstep": (lockstep, (2, 0), (0, 0)),
    "record": (record, (1, 1), (0, 0)),
    "poll": (poll, (1, 0), (1, 0)),
    "one-sided": (one_sided, None, None),
}


def spent(name: str, ranks: int, iterations: int) -> float:
    """Return the processor seconds of a run; assert its number of events and garbage collections."""
    loop, events, scheduled = LOOPS[name]
    collections, begin = gc.get_stats()[0]["collections"], time.process_time()
    totals = simulate(lambda comm: loop(comm, iterations), Scenario(ranks), recorder=Recorder())
    seconds = time.process_time() - begin
    if events is not None:
        assert totals.events == ranks * (events[0] * iterations + events[1]), totals
        assert gc.get_stats()[0]["collections"] - collections <= 2, (
            "objects of a collective outlive many collections"
        )
    if scheduled is not None:
        assert totals.scheduled <= ranks * (scheduled[0] * iterations + scheduled[1]), totals
    return seconds


def peak_kilobytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(name: str, ranks: int, iterations: int) -> dict[str, float]:
    """Return microseconds per rank and iteration, microseconds of start and end per rank, and bytes per rank."""
    spent(name, FEW, 2)
    before = peak_kilobytes()
    short = spent(name, ranks, 1)
    after = peak_kilobytes()
    long = spent(name, ranks, iterations + 1)
    cost = (long - short) / ranks / iterations * 1e6
    return {
        "cost_us": cost, "start_us": short / ranks * 1e6 - cost, "rank_B": (after - before) * 1024 / ranks
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ranks", nargs="*", type=int, default=RANKS)
    parser.add_argument("--loops", default="lockstep,record,poll")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument(
        "--here", action="store_true", help="in this process, as JSON: for this program's own use"
    )
    given = parser.parse_args()
    if given.here:
        print(json.dumps(measure(given.loops, given.ranks[0], given.iterations)))
        return
    print(
        "loop".ljust(12),
        "ranks".rjust(9),
        "us per rank and iteration",
        "start, end: us per rank",
        "kB per rank",
    )
    for name in given.loops.split(","):
        for ranks in given.ranks:
            command = [
                sys.executable,
                __file__,
                "--here",
                "--loops",
                name,
                "--iterations",
                str(given.iterations),
            ]
            output = subprocess.run(
                [*command, str(ranks)], check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            found = json.loads(output)
            print(
                f"{name:<12} {ranks:>9,} {found['cost_us']:>25.1f} {found['start_us']:>23.1f} "
                f"{found['rank_B'] / 1e3:>11.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
