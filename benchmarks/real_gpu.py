"""Policies on CUDA tensors: over NCCL, or over MPI through pinned memory; without a GPU it reports that and exits.

    torchrun --nproc-per-node 2 benchmarks/real_gpu.py        # NCCL with one rank per GPU, else gloo and pinned memory
    mpiexec -n 2 python benchmarks/real_gpu.py                # staged, or by a CUDA-aware MPI

Ratios within one run: bare and ours alternate, medians of REPEATS. "Bare" is the code of a program without spawnsim:
torch's `all_reduce` on the GPU; or copies to pinned memory that is allocated once, mpi4py's call, and copies back.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from spawnsim.policies import AsyncSelectiveAveragingPolicy, AverageAllPolicy
from spawnsim.real.launch.launchers import cuda_aware, detect_launcher, gpu_of_rank

REPEATS = 5
MILLION = 1_000_000
SHAPES = {
    "10 M in 1 tensor": [10 * MILLION],
    "20 of 500,000": [MILLION // 2] * 20,
    "300 of 1,000": [1000] * 300,
}

Ratio = tuple[float, float, float]


class Weights(torch.nn.Module):
    """A model that consists of float32 tensors of given lengths, on the GPU."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterList([torch.zeros(length, device="cuda") for length in lengths])


def timed(comm: Any, call: Callable[[], object]) -> float:
    """Return the seconds that the slowest rank took, until its GPU was done."""
    torch.cuda.synchronize()
    comm.Barrier()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return float(max(comm.allgather(time.perf_counter() - begin)))


def ratio(comm: Any, bare: Callable[[], object], ours: Callable[[], object]) -> Ratio:
    """Return median seconds of both, and the median of bare over ours."""
    for call in (bare, ours, bare, ours):
        call()
    pairs = [(timed(comm, bare), timed(comm, ours)) for _ in range(REPEATS)]
    one, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    return one, other, statistics.median(b / o for b, o in pairs)


def bare_sum(comm: Any, length: int) -> Callable[[], object]:
    """Return the sum of `length` float32 over all ranks, without spawnsim."""
    tensor = torch.zeros(length, device="cuda")
    if not hasattr(comm, "as_mpi_comm"):
        host = tensor if over_nccl() else torch.zeros(length, pin_memory=True)
        return lambda: through(tensor, host, lambda: dist.all_reduce(host))
    host, total = torch.zeros(length, pin_memory=True), torch.zeros(length, pin_memory=True)
    sent, got, raw = host.numpy(), total.numpy(), comm.as_mpi_comm()

    def copied() -> None:
        host.copy_(tensor)
        raw.Allreduce(sent, got)
        tensor.copy_(total)

    return copied


def over_nccl() -> bool:
    """Return whether torch's group of all ranks has NCCL; spawnsim chooses NCCL if each rank has its own GPU."""
    return "nccl" in str(dist.get_backend_config())


def through(tensor: torch.Tensor, host: torch.Tensor, call: Callable[[], object]) -> None:
    """Make a call on main memory, with copies if the tensor is elsewhere."""
    if host is not tensor:
        host.copy_(tensor)
    call()
    if host is not tensor:
        tensor.copy_(host)


def per_parameter(comm: Any, lengths: list[int]) -> Callable[[], object]:
    """Return one averaging in the originals' way: each parameter to main memory, one Allreduce, and back."""
    model = Weights(lengths)

    def average() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                sent = parameter.detach().cpu()
                received = torch.empty_like(sent)
                comm.Allreduce(sent.numpy(), received.numpy())
                parameter.copy_(received / comm.size)

    return average


def averaging(comm: Any, lengths: list[int]) -> Callable[[], object]:
    """Return one averaging by `AverageAllPolicy`."""
    model = Weights(lengths)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = AverageAllPolicy(average_every=1)
    return lambda: policy(1, model, optimizer, group=comm)


def training_s(comm: Any, policy: Any, iterations: int = 400) -> float:
    """Return seconds for some iterations of a small MLP on the GPU, with or without a policy."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10)
    ).cuda()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(128, 256, device="cuda"), torch.randint(10, (128,), device="cuda")
    comm.Barrier()
    begin = time.perf_counter()
    for iteration in range(iterations):
        with comm.compute():
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metric = -loss.item()  # waits for the GPU, with and without a policy
        if policy is not None:
            model, optimizer, _ = policy(iteration, model, optimizer, local_metric=metric, group=comm)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def slowdown(comm: Any) -> float:
    """Return by how many percent asynchronous averaging slows training."""
    ratios = []
    for _ in range(REPEATS):
        policy = AsyncSelectiveAveragingPolicy(None, average_every=100)
        plain, with_policy = training_s(comm, None), training_s(comm, policy)
        ratios.append(sum(comm.allgather(with_policy)) / sum(comm.allgather(plain)))
        policy.shutdown()
    return 100 * (statistics.median(ratios) - 1)


def way(comm: Any) -> str:
    """Return the path of GPU tensors here."""
    if hasattr(comm, "as_mpi_comm"):
        return f"{comm.capabilities().library}, {'CUDA-aware' if cuda_aware() else 'staged through pinned memory'}"
    return "NCCL, tensors stay on the GPUs" if over_nccl() else "gloo, staged through pinned memory"


def measure(comm: Any) -> None:
    """Print the card, figures and ratios. Collective."""
    cards = sorted(
        set(comm.allgather(f"{torch.cuda.get_device_name()} number {torch.cuda.current_device()}"))
    )
    say = print if comm.rank == 0 else lambda *_: None
    say(f"{comm.size} ranks on {', '.join(cards)}; {way(comm)}")
    for name, lengths in SHAPES.items():
        for what, bare in (
            ("bare sum", bare_sum(comm, sum(lengths))),
            ("originals' way", per_parameter(comm, lengths)),
        ):
            one, other, found = ratio(comm, bare, averaging(comm, lengths))
            say(
                f"average all, {name:18} / {what:15} {one * 1e3:8.2f} ms  ours {other * 1e3:8.2f} ms  {found:6.2f} ×"
            )
    say(f"training with asynchronous averaging: {slowdown(comm):+.1f} %")


def main() -> None:
    here = detect_launcher()
    if not torch.cuda.is_available():
        if here.rank == 0:
            print("no CUDA device here: nothing to measure (benchmarks/real_policies.py measures on the CPU)")
        return
    torch.cuda.set_device(gpu_of_rank(torch.cuda.device_count()))
    if here.launcher == "torchrun":
        from spawnsim.real import torch as backend
    else:
        from spawnsim.real import mpi as backend  # type: ignore[no-redef]
    comm = backend.world()
    with backend.guarded(comm):
        measure(comm)


if __name__ == "__main__":
    main()
