"""`TorchComm.Allreduce` on gloo against torch's `all_reduce`: under torchrun, ratios within one run, medians of 5.

`torchrun --standalone --nproc-per-node 2 benchmarks/real_torch.py`
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from spawnsim.comm import IN_PLACE
from spawnsim.real.torch import guarded, world

REPEATS = 5


def timed(call: Callable[[], object], calls: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - begin


def main() -> None:
    torch.set_num_threads(1)
    comm = world()
    with guarded(comm):
        for length, calls in ((1, 200), (10_000, 100), (10_000_000, 2)):
            tensor, ratios, last = torch.zeros(length), [], (0.0, 0.0)
            for _ in range(REPEATS + 1):
                last = (
                    timed(lambda: dist.all_reduce(tensor), calls),  # noqa: B023  called before the next round
                    timed(lambda: comm.Allreduce(IN_PLACE, tensor), calls),  # noqa: B023
                )
                ratios.append(last[0] / last[1])
            if comm.rank == 0:
                print(
                    f"Allreduce of {length:10,} float32: torch {last[0] / calls * 1e6:9.0f} us, "
                    f"ours {last[1] / calls * 1e6:9.0f} us, {statistics.median(ratios[1:]):.2f} × (wanted 0.95)"
                )


if __name__ == "__main__":
    main()
