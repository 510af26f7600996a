"""How models travel on real MPI: `mpiexec -n 2 python benchmarks/real_transport.py` (and -n 4).

Ratios within one run: the compared calls alternate, medians of REPEATS. A pass is one copy of the model's 40 MB
between two buffers that are in use already. `part`, `copies` or `bytes` runs only that section.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from spawnsim.policies import AsyncSelectiveAveragingPolicy, Wiring
from spawnsim.policies.exchange.messages import decode
from spawnsim.policies.exchange.replacement import Packer
from spawnsim.policies.exchange.snapshot_window import SnapshotWindow
from spawnsim.policies.rules.cadence import Fixed
from spawnsim.policies.state.snapshot import Compression
from spawnsim.real.mpi import MPIComm, guarded, world

REPEATS, MILLION = 7, 1_000_000
LENGTHS = [MILLION // 2] * 20
BLOCK_S, EVERY, ITERATIONS = 0.05, 8, 34


class Weights(torch.nn.Module):
    """A model that consists of float32 tensors of given lengths."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterList([torch.rand(length) for length in lengths])


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def medians(calls: dict[str, Callable[[], object]], repeats: int = REPEATS) -> dict[str, float]:
    """Return each call's median seconds; the calls alternate, and the first two rounds do not count."""
    turns = [{name: seconds(call) for name, call in calls.items()} for _ in range(repeats + 2)]
    return {name: statistics.median(turn[name] for turn in turns[2:]) for name in calls}


def show(title: str, found: dict[str, float], unit: str) -> None:
    """Print seconds, and each as a multiple of a reference."""
    print(title)
    for name, each in found.items():
        print(f"  {name:58} {each * 1e3:8.2f} ms  {each / found[unit]:6.2f} ×")


# ----------------------------------------------------------------------------------------------- copies
def copies(comm: MPIComm) -> None:
    """Measure a donor's and a receiver's own work on one snapshot, in passes over the model."""
    live = {f"parameter/{name}": each.detach() for name, each in Weights(LENGTHS).named_parameters()}
    flat, other = np.ones(sum(LENGTHS), np.float32), np.ones(sum(LENGTHS), np.float32)
    snapshots = SnapshotWindow(comm, live, Fixed(9.0))
    calls: dict[str, Callable[[], object]] = {"a pass": lambda: np.copyto(flat, other)}
    for how in (None, "float16", "bfloat16"):
        packer = Packer(2**26, checksum=True, compression=Compression(how))
        sent = packer.pack(live, 1, 1, busy=lambda memory: False)
        calls[f"pack, {how}"] = lambda packer=packer: packer.pack(live, 1, 1, busy=lambda memory: False)
        calls[f"check and unpack, {how}"] = lambda packer=packer, sent=sent: packer.unpack(
            [*map(decode, sent)]
        )
    bare = Packer(2**26)
    calls["pack into fresh memory, no checksum"] = lambda: bare.pack(live, 1, 1)
    calls["publish in a window"] = lambda: snapshots.publish(live, 1)
    calls["publish by way of a stage, with Put"] = lambda: staged(live, flat, snapshots)
    found = medians(calls)
    if comm.rank == 0:
        show("one rank's own work, 10 M float32 in 20 tensors", found, "a pass")
    fetch(comm, snapshots, live)
    snapshots.free()


def staged(live: dict[str, torch.Tensor], flat: np.ndarray[Any, Any], snapshots: SnapshotWindow) -> None:
    """Publish in the former way: copy to a stage, and from there to the window."""
    pieces = torch.split(torch.from_numpy(flat), LENGTHS)
    torch._foreach_copy_(list(pieces), list(live.values()))
    window, me = snapshots._windows[""].win, snapshots.comm.Get_rank()
    window.Put([flat.view(np.uint8), flat.nbytes], me, [4096, flat.nbytes])
    window.Flush(me)


def fetch(comm: MPIComm, snapshots: SnapshotWindow, live: dict[str, torch.Tensor]) -> None:
    """Take a donor's snapshot, against a bare Get of the same bytes."""
    for version in (1, 2):  # `staged` left one slot without a description
        snapshots.publish(live, version)
    raw, into = snapshots._windows[""].win._raw, np.ones(sum(LENGTHS), np.float32)
    donor = (comm.rank + 1) % comm.size

    def get() -> None:
        raw.Get(into, donor, [4096, into.nbytes])
        raw.Flush(donor)

    comm.Barrier()
    if comm.rank == 0:
        found = medians({"bare Get": get, "take a snapshot": lambda: snapshots.take([donor])}, 4 * REPEATS)
        show("one-sided fetch", found, "bare Get")
        print(
            f"  share of the bare bandwidth: {found['bare Get'] / found['take a snapshot']:.2f} (wanted 0.9)"
        )
    comm.Barrier()


# ------------------------------------------------------------------------------------------- two-sided waits
def training(
    comm: MPIComm, wiring: Wiring, compression: str | None = None
) -> tuple[list[float], list[int], float]:
    """Return this rank's waits (s), the iterations that each took, and its seconds in calls for each replacement.

    Half of the ranks are replaced every EVERY iterations; each iteration computes for BLOCK_S.
    """
    model: torch.nn.Module = Weights(LENGTHS)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = AsyncSelectiveAveragingPolicy(
        None, EVERY, 0.5, "best_only", cooldown=0, rule="replace", wiring=wiring, compression=compression
    )
    waits, iterations, spent = [], [], 0.0
    comm.Barrier()
    for iteration in range(1, ITERATIONS):
        with comm.compute():
            time.sleep(BLOCK_S)
        begin = time.perf_counter()
        model, optimizer, info = policy(iteration, model, optimizer, float(comm.rank), comm)
        spent += time.perf_counter() - begin
        if info["is_replaced"]:
            waits.append(info["wait_s"])
            iterations.append(iteration % EVERY)
    policy.shutdown()
    return waits, iterations, spent


def compare(comm: MPIComm, title: str, settings: dict[str, tuple[Wiring, str | None]]) -> None:
    """Print waits under several settings, which alternate."""
    found: dict[str, list[tuple[list[float], list[int], float]]] = {name: [] for name in settings}
    for _ in range(3):
        for name, (wiring, compression) in settings.items():
            found[name] += comm.allgather(training(comm, wiring, compression))
    if comm.rank:
        return
    print(title)
    for name, each in found.items():
        waits = sorted(wait for one in each for wait in one[0])
        iterations = sorted(count for one in each for count in one[1])
        spent = sum(one[2] for one in each) / max(len(waits), 1)
        print(
            f"  {name:30} wait: median {statistics.median(waits) * 1e3:6.1f} ms, longest {waits[-1] * 1e3:6.1f} ms;"
            f" iterations since the decision: median {statistics.median(iterations):g}, most {iterations[-1]};"
            f" calls on all ranks {spent * 1e3:6.1f} ms a replacement (of {len(waits)})"
        )


def parts(comm: MPIComm) -> None:
    """Measure replacements by the size of the messages."""
    sizes = (2**18, 2**20, 2**22, 2**24, 2**26)
    settings: dict[str, tuple[Wiring, str | None]] = {
        f"part_nbytes={size}": (Wiring(part_nbytes=size), None) for size in sizes
    }
    compare(comm, f"two-sided, 10 M float32 in 20 tensors, blocks of {BLOCK_S * 1e3:g} ms", settings)


def smaller(comm: MPIComm) -> None:
    """Measure replacements with compression."""
    settings: dict[str, tuple[Wiring, str | None]] = {
        str(how): (Wiring(), how) for how in (None, "float16", "bfloat16", "blockwise8")
    }
    compare(comm, "two-sided, compressed", settings)


SECTIONS = {"copies": copies, "part": parts, "bytes": smaller}


def main() -> None:
    torch.set_num_threads(1)
    comm = world()
    with guarded(comm):
        for name in sys.argv[1:] or SECTIONS:
            SECTIONS[name](comm)


if __name__ == "__main__":
    main()
