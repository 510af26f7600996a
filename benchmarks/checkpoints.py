"""The cost of checkpoints: how long they block ranks, and how much the writing thread takes from the training.

    spawnsim run benchmarks/checkpoints.py --backend mpi -n 4 --out DIR
    spawnsim run benchmarks/checkpoints.py --ranks 1000 --compute 0 --set parameters=10000 --set checkpoints=1 --out DIR

Each rank saves a linear model and its AdamW state: three times the parameters. "held up": seconds in the call, on the
slowest rank. "writing": processor seconds of the writing thread, mean of the ranks; and the time until all files
exist. The cost per minute is "held up" alone if the thread has its own core, and the sum of both if it shares the
rank's core. All virtual ranks are one process: there the call is the whole cost.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from typing import Any

import torch

MINUTE_S = 60.0


def main(comm: Any, parameters: int = 10_000_000, checkpoints: int = 5) -> None:
    """Save `checkpoints` times, and print the cost."""
    width = math.isqrt(parameters)
    model = torch.nn.Linear(width, width, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    virtual, found = comm.capabilities().backend == "virtual", []
    for iteration in range(1, checkpoints + 1):
        comm.Barrier()
        began_s, process_s, own_s = time.perf_counter(), time.process_time(), time.thread_time()
        comm.checkpoint(iteration=iteration, model=model, optimizer=optimizer)
        held_s, processor_s = time.perf_counter() - began_s, time.process_time() - process_s
        writing_s = 0.0
        if not virtual:
            comm.runtime.checkpoints.finish()
            writing_s = time.process_time() - process_s - (time.thread_time() - own_s)
        found.append((held_s, processor_s, writing_s, time.perf_counter() - began_s))
    of_ranks = comm.gather(found, root=0)
    if comm.rank != 0:
        return
    held_s = statistics.median(max(each[at][0] for each in of_ranks) for at in range(checkpoints))
    writing_s = statistics.median(
        statistics.mean(each[at][2] for each in of_ranks) for at in range(checkpoints)
    )
    there_s = statistics.median(max(each[at][3] for each in of_ranks) for at in range(checkpoints))
    print(f"{comm.size} ranks, {width**2:,} parameters each, median of {checkpoints}:", file=sys.stderr)
    if virtual:
        processor_s = statistics.median(of_ranks[0][at][1] for at in range(checkpoints))
        print(f"{held_s:.2f} s, of which {processor_s:.2f} s of processor time", file=sys.stderr)
        return
    print(
        f"held up {held_s:.3f} s ({held_s / MINUTE_S:.2%} of a minute); writing {writing_s:.3f} s of processor time "
        f"(both: {(held_s + writing_s) / MINUTE_S:.2%}); files there after {there_s:.2f} s",
        file=sys.stderr,
    )
