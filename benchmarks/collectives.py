"""The cost of timing collectives: `python benchmarks/collectives.py [RANKS]`; compared with SMPI if it is installed.

Milliseconds of processor time. Dataflows: best of 5, on skewed arrivals (nothing is cached), with asserted numbers of
messages. The allreduce with its data: medians of 5, alternating with SMPI.
"""

from __future__ import annotations

import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import spawnsim
from spawnsim.models.collectives import Planner, Selection, Timing
from spawnsim.models.network import Hockney, LogGP, Network, Nodes, Switch

FLOATS, ROUNDS, REPEATS = 10_000, 5, 5
NETWORKS: dict[str, Network] = {
    "switch": Switch(Hockney(1e-5, 1.25e9)),
    "LogGP": Switch(LogGP(5e-6, 1e-6, 1e-6, 1e-9)),
    "nodes of 16": Nodes(Hockney(1e-6, 1e10), Hockney(1e-5, 1.25e9), 16),
}
# Operation, algorithm, bytes -> number of messages for P ranks.
MESSAGES: dict[tuple[str, str, int], Callable[[int], int]] = {
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
    """Return the shortest duration of several runs, in seconds."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return min(times)


def dataflow(network: Network, call: tuple[str, str, int], arrivals: np.ndarray, messages: int) -> float:
    """Return the seconds that the timing of one call takes."""
    operation, algorithm, nbytes = call
    planner = Planner(network, Selection(fixed=((operation, algorithm),)))
    size = len(arrivals)
    assert planner.plan(operation, size, nbytes).finish(arrivals, network).messages == messages, call
    return best(lambda: planner.plan(operation, size, nbytes).finish(arrivals, network))


def dataflows(size: int) -> None:
    """Print the cost of each algorithm's timing on each network."""
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


def live(size: int, rounds: int) -> float:
    """Return the processor seconds of float allreduces among virtual ranks: data, timing, switches."""

    def main(comm: spawnsim.Comm) -> None:
        mine, total = np.ones(FLOATS, np.float32), np.empty(FLOATS, np.float32)
        for _ in range(rounds):
            comm.Allreduce(mine, total)

    begin = time.process_time()
    spawnsim.run(main, ranks=size, platform="ethernet-10g")
    return time.process_time() - begin


def touching(size: int) -> float:
    """Return a lower bound in seconds: reading all ranks' contributions once, and writing their results once."""
    given = [np.ones(FLOATS, np.float32) for _ in range(size)]
    taken, total = [np.empty_like(each) for each in given], np.zeros(FLOATS, np.float32)

    def touch() -> None:
        for each in given:
            np.add(each, total, total)
        for each in taken:
            each[:] = total

    return best(touch)


def smpi(folder: Path, size: int) -> Callable[[int], float]:
    """Build the same allreduce for SMPI, by recursive doubling; return a function: rounds -> processor seconds."""
    (folder / "program.c").write_text(SMPI_PROGRAM)
    (folder / "platform.xml").write_text(SMPI_PLATFORM.format(last=size - 1))
    (folder / "hosts").write_text("\n".join(f"n{i}" for i in range(size)))
    subprocess.run(
        ["smpicc", "-O2", "program.c", "-o", "program"], cwd=folder, check=True, capture_output=True
    )
    where = ["-np", str(size), "-platform", "platform.xml", "-hostfile", "hosts", "--log=root.thres:error"]
    options = ["--cfg=smpi/simulate-computation:no", "--cfg=smpi/allreduce:rdb"]

    def call(rounds: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        program = ["./program", str(rounds), str(FLOATS)]
        subprocess.run(["smpirun", *where, *options, *program], cwd=folder, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    return call


def against_smpi(size: int) -> None:
    """Print the processor time per round of an allreduce, ours and SMPI's alternating, without start-up."""
    with tempfile.TemporaryDirectory() as name:
        calls: dict[str, Callable[[int], float]] = {"virtual ranks": lambda rounds: live(size, rounds)}
        if shutil.which("smpirun"):
            calls["SMPI"] = smpi(Path(name), size)
        spent: dict[str, list[float]] = {each: [] for each in calls}
        for _ in range(REPEATS):
            for each, call in calls.items():
                spent[each].append((call(ROUNDS + 1) - call(1)) / ROUNDS)
    print(f"{size:,} ranks, one allreduce of {FLOATS:,} floats, milliseconds; medians of {REPEATS}")
    print(f"{'touching the data alone':<24}{1e3 * touching(size):8.1f}")
    for each, seconds in spent.items():
        ratio = statistics.median(seconds) / statistics.median(spent["virtual ranks"])
        print(f"{each:<24}{1e3 * statistics.median(seconds):8.1f}{ratio:8.1f} x")


def main() -> None:
    dataflows(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
    against_smpi(1024)


if __name__ == "__main__":
    main()
