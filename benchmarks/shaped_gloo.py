"""Exchanges of 123 MB by gloo among four processes of one machine behind shaped links, as in `diloco_measured`.

    unshare -Urnm python benchmarks/shaped_gloo.py [1gbit [REPEATS]]

Each process has a network namespace; `tc` shapes its card with a token bucket, and frames have 9,001 bytes, as on AWS.
Prints for each kind of exchange its times, and the bytes that rank 0 sends, frames included. It needs `ip` and `tc`,
and no rights, but the machine must allow user namespaces. Faster links than its cores can serve measure the cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

RANKS, PARAMETERS, MIB = 4, 30_846_720, 262_144  # floats
LARGEST = 50_257 * 256  # a weight of this size is a bucket by itself
MASKS = 6 << 20


def shell(*words: str) -> None:
    """Run a command."""
    subprocess.run(words, check=True)


def cable(rate: str) -> None:
    """Make a bridge, and a namespace for each rank behind it."""
    shell("mount", "-t", "tmpfs", "none", "/run")
    shell("ip", "link", "add", "bridge", "type", "bridge")
    shell("ip", "link", "set", "bridge", "up")
    for rank in map(str, range(RANKS)):
        shell("ip", "netns", "add", f"n{rank}")
        shell("ip", "link", "add", f"v{rank}", "type", "veth", "peer", "name", "e0", "netns", f"n{rank}")
        shell("ip", "link", "set", f"v{rank}", "mtu", "9001", "master", "bridge", "up")
        own = ("ip", "-n", f"n{rank}")
        shell(*own, "link", "set", "lo", "up")
        shell(*own, "addr", "add", f"10.9.0.1{rank}/24", "dev", "e0")
        shell(*own, "link", "set", "e0", "mtu", "9001", "up")
        bucket = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        shell(*own[:1], "netns", "exec", f"n{rank}", "tc", "qdisc", "add", "dev", "e0", "root", *bucket)


class Sum(nn.Module):
    """A model of this size whose step computes next to nothing; maybe with buffers, which DDP broadcasts."""

    def __init__(self, buffers: int = 0) -> None:
        super().__init__()
        small = (PARAMETERS - 2 * LARGEST) // 6
        sizes = (LARGEST, *[small] * 6, LARGEST)
        self.parts = nn.ParameterList(torch.zeros(size) for size in sizes)
        self.register_buffer("masks", torch.zeros(buffers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + part.sum()
        return x


def sent() -> int:
    """Return the bytes that have left the card."""
    return int(Path("/sys/class/net/e0/statistics/tx_bytes").read_text())


def timed(name: str, exchange: Callable[[], object], repeats: int) -> None:
    """Print the time of each exchange."""
    found = []
    for _ in range(repeats):
        dist.barrier()
        began_s, before = time.perf_counter(), sent()
        exchange()
        found.append(time.perf_counter() - began_s)
        after = sent()
    if dist.get_rank() == 0:
        times = " ".join(f"{1e3 * each:.0f}" for each in found)
        print(f"{name:24} {times} ms; {(after - before) / 1e6:.1f} MB", flush=True)


def in_pieces(sizes: Sequence[int]) -> Callable[[], None]:
    """Return an exchange in pieces of these sizes, all begun at once."""
    pieces = torch.zeros(PARAMETERS).split([*sizes, PARAMETERS - sum(sizes)])

    def exchange() -> None:
        for work in [dist.all_reduce(piece, async_op=True) for piece in pieces]:
            work.wait()

    return exchange


def rank(number: int, repeats: int) -> None:
    """Measure, as one rank."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "e0", "MASTER_ADDR": "10.9.0.10", "MASTER_PORT": "29500"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=number, world_size=RANKS)
    timed("one piece", in_pieces([]), repeats)
    timed("buckets of 1, 25 … MiB", in_pieces([MIB, *[25 * MIB] * 4]), repeats)
    timed("two buckets", in_pieces([LARGEST]), repeats)
    plain = Sum()
    timed("computing alone", lambda: plain(torch.zeros(())).backward(), repeats)
    for name, buffers in (("DDP", 0), ("DDP, buffers of 25 MB", MASKS)):
        model = nn.parallel.DistributedDataParallel(Sum(buffers))
        timed(name, lambda model=model: model(torch.zeros(())).backward(), repeats)
    dist.destroy_process_group()


def main(rate: str = "1gbit", repeats: str = "7") -> None:
    """Shape the links, start the ranks."""
    cable(rate)
    command = [sys.executable, __file__, "rank"]
    ranks = [
        subprocess.Popen(["ip", "netns", "exec", f"n{number}", *command, str(number), repeats])
        for number in range(RANKS)
    ]
    sys.exit(max(each.wait() for each in ranks))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(*map(int, sys.argv[2:]))
    else:
        main(*sys.argv[1:])
