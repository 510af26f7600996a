"""Policies on real MPI against bare calls: `mpiexec -n 2 python benchmarks/real_policies.py` (and -n 4).

Ratios within one run: bare and ours alternate, medians of REPEATS. "Originals' way": one Allreduce per parameter, with
a copy to numpy before and a copy back after.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from spawnsim.policies import AsyncSelectiveAveragingPolicy, AverageAllPolicy, one_storage
from spawnsim.real.mpi import MPIComm, Options, guarded, world

REPEATS = 5
MILLION = 1_000_000


class Weights(torch.nn.Module):
    """A model that consists of float32 tensors of given lengths."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterList([torch.zeros(length) for length in lengths])


def timed(comm: MPIComm, call: Callable[[], object]) -> float:
    """Return the seconds that the slowest rank took."""
    comm.Barrier()
    begin = time.perf_counter()
    call()
    return float(comm.allreduce(time.perf_counter() - begin, max_))


def max_(one: float, other: float) -> float:
    return max(one, other)


def ratio(
    comm: MPIComm, bare: Callable[[], object], ours: Callable[[], object]
) -> tuple[float, float, float]:
    """Return median seconds of both, and the median of bare over ours."""
    bare(), ours()
    pairs = [(timed(comm, bare), timed(comm, ours)) for _ in range(REPEATS)]
    one, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    return one, other, statistics.median(b / o for b, o in pairs)


def averaging(comm: MPIComm, lengths: list[int], *, together: bool = False) -> Callable[[], object]:
    """Return one averaging by `AverageAllPolicy`, of separate tensors or of tensors `together` in one storage."""
    model = Weights(lengths)
    if together:
        one_storage(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = AverageAllPolicy(average_every=1)
    return lambda: policy(1, model, optimizer, group=comm)


def flat_allreduce(comm: MPIComm, length: int) -> Callable[[], object]:
    """Return one bare Allreduce of the same number of bytes."""
    raw, sent, received = comm.as_mpi_comm(), np.zeros(length, np.float32), np.empty(length, np.float32)
    return lambda: raw.Allreduce(sent, received)


def per_parameter(comm: MPIComm, lengths: list[int]) -> Callable[[], object]:
    """Return one averaging in the originals' way."""
    raw, model = comm.as_mpi_comm(), Weights(lengths)

    def average() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                sent = parameter.detach().cpu().numpy().copy()
                received = np.empty_like(sent)
                raw.Allreduce(sent, received)
                parameter.copy_(torch.from_numpy(received / comm.size))

    return average


def ordered(comm: MPIComm, length: int) -> Callable[[], object]:
    """Return one Allreduce in rank order of the same number of bytes."""
    sent, received = np.zeros(length, np.float32), np.empty(length, np.float32)
    return lambda: comm.Allreduce(sent, received)


def idle_call(comm: MPIComm, policy: object, calls: int = 2000) -> float:
    """Return microseconds of a policy call in an iteration without an exchange."""
    model = Weights([1000] * 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for iteration in range(1, 50):
        policy(iteration, model, optimizer, local_metric=0.0, group=comm)  # type: ignore[operator]
    begin = time.perf_counter()
    for iteration in range(1, calls):
        policy(iteration, model, optimizer, local_metric=0.0, group=comm)  # type: ignore[operator]
    return (time.perf_counter() - begin) / calls * 1e6


def training(comm: MPIComm, policy: object | None, iterations: int = 400) -> tuple[float, float]:
    """Return seconds for some iterations of a small MLP, with or without a policy, and the seconds in its calls."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(128, 256), torch.randint(10, (128,))
    comm.Barrier()
    begin, inside = time.perf_counter(), 0.0
    for iteration in range(iterations):
        with comm.compute():
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metric = -loss.item()  # every training loop reads its loss
        if policy is not None:
            called = time.perf_counter()
            model, optimizer, _ = policy(iteration, model, optimizer, local_metric=metric, group=comm)  # type: ignore[operator]
            inside += time.perf_counter() - called
    return time.perf_counter() - begin, inside


def main() -> None:
    torch.set_num_threads(1)
    fast, exact = world(), world(options=Options(reduction="ordered"))
    with guarded(fast):
        table = [
            ("average all, 10 M float32 in 1 tensor / bare Allreduce", 0.9,
             ratio(fast, flat_allreduce(fast, 10 * MILLION), averaging(fast, [10 * MILLION]))),
            ("ordered reduction, 10 M float32 / bare Allreduce", 0.6,
             ratio(fast, flat_allreduce(fast, 10 * MILLION), ordered(exact, 10 * MILLION))),
            *(small(fast, length) for length in (100, 300, 1000)),
            ("the last in one storage / originals' way", 8.0,
             ratio(fast, per_parameter(fast, [1000] * 300), averaging(fast, [1000] * 300, together=True))),
            ("20 tensors of 500,000 / originals' way", 2.0,
             ratio(fast, per_parameter(fast, [MILLION // 2] * 20), averaging(fast, [MILLION // 2] * 20))),
        ]  # fmt: skip
        if fast.rank == 0:
            for name, wanted, (bare, ours, found) in table:
                print(
                    f"{name:58} bare {bare * 1e3:8.2f} ms  ours {ours * 1e3:8.2f} ms  {found:5.2f} × (wanted {wanted})"
                )
        idle(fast)
        slowdown(fast)
        exact.runtime.finalize()


def small(comm: MPIComm, length: int) -> tuple[str, float, tuple[float, float, float]]:
    """Return a row on 300 tensors of this length."""
    found = ratio(comm, per_parameter(comm, [length] * 300), averaging(comm, [length] * 300))
    return f"300 tensors of {length:,} / originals' way", 8.0, found


def idle(comm: MPIComm) -> None:
    """Print the cost of a call when no exchange is due."""
    calm = AverageAllPolicy(average_every=10**9)
    busy = AsyncSelectiveAveragingPolicy(None, average_every=10**9)
    found = idle_call(comm, calm), idle_call(comm, busy)
    comm.Barrier()
    if comm.rank == 0:
        print(
            f"idle call: AverageAll {found[0]:.1f} us, AsyncSelectiveAveraging {found[1]:.1f} us (wanted 20)"
        )


def slowdown(comm: MPIComm) -> None:
    """Print how much asynchronous averaging slows training."""
    ratios, shares = [], []
    for _ in range(REPEATS):
        policy = AsyncSelectiveAveragingPolicy(None, average_every=100)
        alone, (together, inside) = training(comm, None)[0], training(comm, policy)
        ratios.append(comm.allreduce(together) / comm.allreduce(alone))
        shares.append(comm.allreduce(inside / together) / comm.size)
        policy.shutdown()
    if comm.rank == 0:
        slower, share = 100 * (statistics.median(ratios) - 1), 100 * statistics.median(shares)
        print(f"training with asynchronous averaging: {slower:+.1f} %; {share:.1f} % in its calls (wanted 2)")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
