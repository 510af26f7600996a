"""Time of starting processes of a main program as virtual ranks: `python benchmarks/spawned.py [RANKS]`.

First a script that starts its ranks, with a barrier, as `spawnsim run FILE` does after the import of torch; then a test
that trains one DDP step, in a session that has done so before. Processor time and wall time, in seconds.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import spawnsim
from spawnsim.virtual.scripts.main_program import processes_as_ranks

SCRIPT = """
import torch.distributed as dist, torch.multiprocessing as mp

def work(rank, size):
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method="tcp://localhost:29500")
    dist.barrier()

if __name__ == "__main__":
    mp.spawn(work, args=(RANKS,), nprocs=RANKS)
"""


def step(rank: int, size: int) -> None:
    """Train one step."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    model = DistributedDataParallel(torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    dist.destroy_process_group()


def trained(size: int) -> None:
    """Train one step on ranks that a main program starts."""
    with processes_as_ranks():
        mp.spawn(step, args=(size,), nprocs=size)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the processor time and the wall time of a call."""
    used_s, begun_s = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - used_s, time.perf_counter() - begun_s


def main() -> None:
    """Print both times."""
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT.replace("RANKS", str(size)))
        print("script, first run: {:.3f} processor, {:.3f} wall".format(*timed(lambda: spawnsim.run(script))))
        print("script, again:     {:.3f} processor, {:.3f} wall".format(*timed(lambda: spawnsim.run(script))))
    print("step, first:       {:.3f} processor, {:.3f} wall".format(*timed(lambda: trained(size))))
    times = [timed(lambda: trained(size)) for _ in range(9)]
    print(
        "step, median of 9: {:.3f} processor, {:.3f} wall".format(
            *map(statistics.median, zip(*times, strict=True))
        )
    )


if __name__ == "__main__":
    main()
