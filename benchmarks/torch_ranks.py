"""DistributedDataParallel on many ranks in one process: virtual ranks against PyTorch's own threaded process group.

    python benchmarks/torch_ranks.py [--ranks 64] [--steps 100]

Each way runs in a separate process; printed are wall seconds, processor seconds, and peak memory.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAINING = """
import sys
import torch, torch.nn as nn, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(steps):
    torch.manual_seed(0)
    layers = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x, y = torch.randn(8, 32, generator=data), torch.randint(0, 4, (8,), generator=data)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}", flush=True)
"""
SCRIPT = (
    TRAINING
    + """
dist.init_process_group("gloo")
train(int(sys.argv[1]))
"""
)
THREADED = (
    TRAINING
    + """
import threading
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, ProcessLocalGroup

steps, ranks = int(sys.argv[1]), int(sys.argv[2])
_install_threaded_pg()
torch._C._distributed_c10d._set_thread_isolation_mode(True)
store = dist.HashStore()
made = threading.Barrier(ranks)


def one(rank):
    dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
    made.wait()
    train(steps)


threading.stack_size(1 << 20)
threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
)


def measured(line: list[str]) -> str:
    """Run a command; return its output and its cost."""
    began = time.perf_counter()
    done = subprocess.run(
        line, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    took = time.perf_counter() - began
    use = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = done.stdout.strip() if done.returncode == 0 else done.stderr.strip()[-300:]
    return (
        f"{output}  {took:.1f} s, processor {use.ru_utime + use.ru_stime:.1f} s, {use.ru_maxrss / 1e3:.0f} MB"
    )


def main() -> None:
    """Measure both ways, or the chosen one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--way", choices=("virtual", "threaded"))
    given = parser.parse_args()
    if given.way is None:  # a process for each way, so that the children's usage is one way's alone
        for way in ("virtual", "threaded"):
            line = [
                sys.executable,
                __file__,
                "--ranks",
                str(given.ranks),
                "--steps",
                str(given.steps),
                "--way",
                way,
            ]
            subprocess.run(line, check=False)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.py"
        file.write_text(SCRIPT if given.way == "virtual" else THREADED)
        line = [
            sys.executable,
            "-m",
            "spawnsim",
            "run",
            str(file),
            "-n",
            str(given.ranks),
            "--quiet",
            "--set",
            "prefix=false",
        ]
        if given.way == "threaded":
            line = [sys.executable, str(file), str(given.steps), str(given.ranks)]
        print(
            given.way,
            measured([*line, *(["--", str(given.steps)] if given.way == "virtual" else [])]),
            flush=True,
        )


if __name__ == "__main__":
    main()
