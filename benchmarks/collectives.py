"""What the timing of collectives costs: `python benchmarks/collectives.py [RANKS]`; beside SMPI where it is installed.

Milliseconds, best of 5, on skewed arrivals (nothing is remembered). The numbers of messages are asserted.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import spawnsim
from spawnsim.virtual.collectives import Planner, Selection, Timing
from spawnsim.virtual.network import Hockney, LogGP, Network, Nodes, Switch

FLOATS, ROUNDS = 10_000, 5
NETWORKS: dict[str, Network] = {
    "switch": Switch(Hockney(1e-5, 1.25e9)),
    "LogGP": Switch(LogGP(5e-6, 1e-6, 1e-6, 1e-9)),
    "nodes of 16": Nodes(Hockney(1e-6, 1e10), Hockney(1e-5, 1.25e9), 16),
}
MESSAGES: dict[
    tuple[str, str, int], Callable[[int], int]
] = {  # operation, algorithm, bytes -> messages of P ranks
    ("barrier", "dissemination", 0): lambda size: size * (size - 1).bit_length(),
    ("bcast", "binomial", 40_000): lambda size: size - 1,
    ("allreduce", "recursive_doubling", 40_000): lambda size: (
        _core(size) * (_core(size).bit_length() - 1) + 2 * (size - _core(size))
    ),
    ("allreduce", "rabenseifner", 40_000): lambda size: (
        2 * _core(size) * (_core(size).bit_length() - 1) + 2 * (size - _core(size))
    ),
    ("allreduce", "ring", 40_001): lambda size: 2 * size * (size - 1),
    ("gather", "linear", 1000): lambda size: size - 1,
    ("alltoall", "pairwise", 1000): lambda size: size * (size - 1),
}
SMPI_PLATFORM = """<?xml version="1.0"?><!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1"><cluster id="c" prefix="n" suffix="" radical="0-{last}" speed="1Gf" bw="1.25GBps" lat="5us"
sharing_policy="SPLITDUPLEX"/></platform>"""
SMPI_PROGRAM = """#include <mpi.h>
#include <stdlib.h>
int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  int rounds = atoi(argv[1]), count = atoi(argv[2]);
  float *in = calloc(count, 4), *out = calloc(count, 4);
  while (rounds--) MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  MPI_Finalize();
}"""


def _core(size: int) -> int:
    return 1 << (size.bit_length() - 1)


def best(call: Callable[[], object], repeats: int = 5) -> float:
    """Return the shortest of some runs, in seconds."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def dataflow(network: Network, call: tuple[str, str, int], arrivals: np.ndarray, messages: int) -> float:
    """Return the seconds that the timing of one call takes."""
    operation, algorithm, nbytes = call
    planner = Planner(network, Selection(fixed=((operation, algorithm),)))
    size = len(arrivals)
    assert planner.plan(operation, size, nbytes).finish(arrivals, network).messages == messages, call
    return best(lambda: planner.plan(operation, size, nbytes).finish(arrivals, network))


def dataflows(size: int) -> None:
    """Print what each algorithm's timing takes on each network."""
    arrivals = np.random.default_rng(0).random(size) * 1e-3
    print(f"{size} ranks, milliseconds".ljust(36), *(name.rjust(12) for name in NETWORKS))
    for call, messages in MESSAGES.items():
        costs = [dataflow(network, call, arrivals, messages(size)) for network in NETWORKS.values()]
        print("{} {} {} B".format(*call).ljust(36), *(f"{1e3 * cost:12.2f}" for cost in costs))
    timing, together = Timing(NETWORKS["switch"], Selection.parse("ring")), np.ones(size)
    timing.finish("allreduce", together, 40_001)
    print(
        f"the same ring, arriving together {1e6 * best(lambda: timing.finish('allreduce', together, 40_001)):.0f} us"
    )


def live(size: int) -> float:
    """Return the seconds of an allreduce of floats among virtual ranks: data, timing, switches."""

    def main(comm: spawnsim.Comm, rounds: int) -> None:
        mine, total = np.ones(FLOATS, np.float32), np.empty(FLOATS, np.float32)
        for _ in range(rounds):
            comm.Allreduce(mine, total)

    return _slope(
        lambda rounds: spawnsim.run(lambda comm: main(comm, rounds), ranks=size, platform="ethernet-10g")
    )


def _slope(call: Callable[[int], object]) -> float:
    """Return the seconds per round, start-up taken off."""
    return (best(lambda: call(ROUNDS + 1), 3) - best(lambda: call(1), 3)) / ROUNDS


def smpi(size: int) -> float:
    """Return the seconds of the same allreduce in SMPI, by recursive doubling."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.c").write_text(SMPI_PROGRAM)
        (folder / "platform.xml").write_text(SMPI_PLATFORM.format(last=size - 1))
        (folder / "hosts").write_text("\n".join(f"n{i}" for i in range(size)))
        subprocess.run(
            ["smpicc", "-O2", "program.c", "-o", "program"], cwd=folder, check=True, capture_output=True
        )
        where = [
            "-np",
            str(size),
            "-platform",
            "platform.xml",
            "-hostfile",
            "hosts",
            "--log=root.thres:error",
        ]
        options = ["--cfg=smpi/simulate-computation:no", "--cfg=smpi/allreduce:rdb"]

        def call(rounds: int) -> None:
            program = ["./program", str(rounds), str(FLOATS)]
            subprocess.run(
                ["smpirun", *where, *options, *program], cwd=folder, check=True, capture_output=True
            )

        return _slope(call)


def main() -> None:
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    dataflows(size)
    ours = live(1024)
    print(f"1,024 virtual ranks, one allreduce of {FLOATS} floats: {1e3 * ours:.1f} ms")
    if shutil.which("smpirun"):
        theirs = smpi(1024)
        print(f"the same in SMPI: {1e3 * theirs:.1f} ms, {theirs / ours:.1f} times as long")


if __name__ == "__main__":
    main()
