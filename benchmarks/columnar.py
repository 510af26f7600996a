"""The cost of a round over columns: `python benchmarks/columnar.py [--most RANKS] [--rounds N] [--ordinary]`.

Processor seconds per round (median of the rounds after the first), nanoseconds per rank and round, and peak memory,
from 100 ranks on. In each round all ranks compute (lognormal, persistent stragglers) and report, and 1 in 100 is
replaced by the mean of 8 donors; or all average 100 MB. The column "floor" is a lower bound: one draw and one selection
of as many numbers. With `--ordinary`, also the same averaging on 1,000 ordinary virtual ranks. The numbers of
messages are asserted.

`--live RANKS --processes 1,2`: models of 2,410 weights that train (batches of 8 of 64 numbers, SGD), and selective
replacement every 5 iterations, on that many processes (mpiexec): seconds in all and per iteration, processor seconds
per iteration of the busiest process (also for one model), and the peak memory of each process. The digests must be
equal. A million models, 100 iterations: `python benchmarks/columnar.py --live 1000000 --iterations 100 --processes 2`.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from spawnsim import columnar
from spawnsim.policies import AsyncSelectiveAveragingPolicy, AverageAllPolicy, SpawnPolicy
from spawnsim.policies.rules.selection import worst_of

SIZES = (100, 1000, 10_000, 100_000, 1_000_000, 2_400_000)
STRAGGLERS = "lognormal:0.3+slow:0.02,5"
NBYTES, RATIO, DONORS = 100_000_000, 0.01, 8
LIVE_EVERY = 5  # iterations between two rounds of live models


def policy(name: str) -> SpawnPolicy:
    if name == "average":
        return AverageAllPolicy(1)
    return AsyncSelectiveAveragingPolicy(None, 1, RATIO, averaging_strategy="mean", donors=DONORS)


def messages(name: str, ranks: int) -> int:
    """Return the number of messages of a round after the first; collectives follow their algorithms."""
    core = 1 << (ranks.bit_length() - 1)
    steps, folded = core * (core.bit_length() - 1), 2 * (ranks - core)
    if name == "average":  # a digest, if the mean of equal models could differ, and the models
        return (steps + folded if ranks != core else 0) + 2 * steps + folded
    replaced = max(1, int(ranks * RATIO + 1e-9))
    return 2 * (ranks - 1) + 2 * DONORS * replaced


def measured(name: str, ranks: int, rounds: int) -> float:
    """Return the median of a round's processor seconds, without the first round."""
    marks: list[float] = []
    sent: list[int] = []

    def on_round(done: columnar.Round) -> None:
        marks.append(time.process_time())
        sent.append(done.messages)

    columnar.run(
        policy(name), ranks=ranks, iterations=rounds + 1, model_nbytes=NBYTES, stragglers=STRAGGLERS, streams="bulk",
        on_round=on_round,
    )  # fmt: skip
    assert sent[1:] == [messages(name, ranks)] * rounds, (name, ranks, sent[:3], messages(name, ranks))
    return statistics.median(np.diff(marks))


def floor(ranks: int) -> float:
    """Return the processor seconds that every round needs: a draw for each rank, and finding the worst ranks."""
    rng, seconds = np.random.default_rng(0), []
    for _ in range(5):
        began = time.process_time()
        worst_of(rng.lognormal(0.0, 0.3, ranks), max(1, ranks // 100))
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def ordinary(ranks: int, rounds: int) -> float:
    """Return the processor seconds of a round of averaging on ordinary virtual ranks, with models of 8 numbers."""
    import torch

    import spawnsim

    def main(comm: spawnsim.Comm) -> None:
        averaging, model = AverageAllPolicy(1), torch.nn.Linear(8, 1, bias=False)
        torch.nn.init.constant_(model.weight, comm.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for iteration in range(rounds):
            with comm.compute():
                pass
            averaging(iteration, model, optimizer, None, comm)

    began = time.process_time()
    spawnsim.run(main, ranks=ranks, stragglers=STRAGGLERS)
    return (time.process_time() - began) / rounds


def live(ranks: int, iterations: int) -> None:
    """Train models on the processes that mpiexec has started; the first one prints a line of the table."""
    import torch
    from torch.nn.functional import cross_entropy

    from spawnsim.real.mpi import guarded, world

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2000, 64, generator=generator), torch.randint(10, (2000,), generator=generator)

    def build(rng):  # type: ignore[no-untyped-def]
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    def data(rng, rank, size):  # type: ignore[no-untyped-def]
        draw = rng("data")
        while True:
            chosen = torch.from_numpy(draw.integers(0, 2000, 8))
            yield x[chosen], y[chosen]

    marks = []
    with guarded(world()) as comm:
        run = columnar.run(
            AsyncSelectiveAveragingPolicy(None, LIVE_EVERY, RATIO, averaging_strategy="mean", donors=DONORS),
            ranks=ranks, iterations=iterations, streams="bulk", comm=comm,
            training=columnar.Training(build, lambda model, x, y: cross_entropy(model(x), y), data),
            on_round=lambda _done: marks.append((time.perf_counter(), time.process_time())),
        )  # fmt: skip
        step_s, busy_s = (np.array(marks[-1]) - marks[0]) / (LIVE_EVERY * (len(marks) - 1))
        busy_s = max(comm.allgather(busy_s))
        peaks = comm.allgather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
        if comm.rank == 0:
            peak, per_model = ", ".join(f"{each:.2f}" for each in peaks), busy_s / ranks * 1e6
            print(
                f"{comm.size:9} {ranks:>9,} {run.totals['wall_seconds']:9.1f} {step_s:9.3f} {busy_s:9.3f} "
                f"{per_model:9.1f}  {peak:16} {run.totals['digest']}"
            )


def all_live(ranks: int, iterations: int, processes: str) -> None:
    """Print the table of live models, one line for each number of processes."""
    titles = ("processes", "models", "s in all", "s a step", "busy", "us/model")
    print(*(f"{each:>9}" for each in titles), f" {'GB':16} digest")
    digests = set()
    for count in processes.split(","):
        command = [str(Path(sys.executable).parent / "mpiexec"), "-n", count, sys.executable, __file__]
        command += ["--live", str(ranks), "--iterations", str(iterations)]
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        digests.add(line.split()[-1])
        print(line, flush=True)
    assert len(digests) == 1, "digests differ"


def one(name: str, ranks: int, rounds: int) -> str:
    """Return a line of the table, measured in a separate process, so that its peak memory is not shared."""
    command = [sys.executable, __file__, "--one", name, str(ranks), "--rounds", str(rounds)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ordinary", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("POLICY", "RANKS"))
    parser.add_argument("--live", type=int, metavar="RANKS")
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--processes", metavar="P,P")
    options = parser.parse_args()
    if options.live:
        if options.processes:
            all_live(options.live, options.iterations, options.processes)
        else:
            live(options.live, options.iterations)
        return
    if options.one:
        name, ranks = options.one[0], int(options.one[1])
        seconds = measured(name, ranks, options.rounds)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        low = floor(ranks)
        per_rank = seconds / ranks * 1e9
        print(
            f"{name:9} {ranks:>9,} {seconds:10.4f} {per_rank:9.0f} {low:10.4f} {seconds / low:6.1f} {peak:6.2f}"
        )
        return
    print(
        f"{'policy':9} {'ranks':>9} {'s a round':>10} {'ns a rank':>9} {'floor, s':>10} {'ratio':>6} {'GB':>6}"
    )
    for ranks in (size for size in SIZES if size <= options.most):
        for name in ("selective", "average"):
            print(one(name, ranks, options.rounds), flush=True)
    if options.ordinary:
        print(f"averaging, 1,000 ordinary virtual ranks: {ordinary(1000, 20):.4f} s a round")


if __name__ == "__main__":
    main()
