"""Averaging in groups on a healthy network: how many averages are complete, and their virtual time.

    python benchmarks/groups.py [MEGABYTES ...]

Each rank holds float32 numbers and a few int64 ones, as models with BatchNorm do. It averages with all other ranks,
in steps that begin at the same time. An average is complete if every rank ends with the exact mean.
"""

import sys

import torch

import spawnsim
from spawnsim.policies.averaging import DecentralizedAverager

STEPS, RANKS, PLATFORMS = 3, (2, 4, 8, 16), ("infiniband-hdr", "ethernet-10g", "wan-volunteers")


def measure(ranks: int, platform: str, megabytes: float) -> tuple[int, float]:
    """Return the number of complete averages, and the median of their seconds on the slowest rank."""
    right, seconds = [True] * STEPS, [0.0] * STEPS

    def main(comm: spawnsim.Comm) -> None:
        values = torch.empty(int(megabytes * 250_000)), torch.empty(3, dtype=torch.int64)
        averager = DecentralizedAverager(
            values,
            comm,
            start=False,
            prefix="bench",
            target_group_size=ranks,
            min_matchmaking_time=1.0,
            request_timeout=0.5,
        )
        for step in range(STEPS):
            values[0].fill_(comm.rank), values[1].fill_(2 * comm.rank)
            comm.Barrier()
            began_s = comm.clock.now()
            averager.step(timeout=200.0)
            seconds[step] = max(seconds[step], comm.clock.now() - began_s)
            right[step] &= bool((values[0] == (ranks - 1) / 2).all() and (values[1] == ranks - 1).all())
            averager.serve(60.0 if platform == "wan-volunteers" else 1.0)
        averager.shutdown()

    spawnsim.run(main, ranks=ranks, platform=platform, deadline_s=1000.0)
    return sum(right), sorted(seconds)[STEPS // 2]


if __name__ == "__main__":
    for size in [float(each) for each in sys.argv[1:]] or [0.1, 1.2, 12.0]:
        for platform in PLATFORMS:
            found = {ranks: measure(ranks, platform, size) for ranks in RANKS}
            whole = sum(right for right, _ in found.values())
            times = ", ".join(f"{ranks} ranks {seconds:.3g} s" for ranks, (_, seconds) in found.items())
            print(
                f"{size:g} MB, {platform}: {whole} of {STEPS * len(RANKS)} averages whole; {times}",
                flush=True,
            )
