"""Two ranks, both asynchronous policies, plain and compressed: the worse one takes over all that a model may hold."""

from __future__ import annotations

import sys
from typing import Any

import torch

from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    OneSidedSelectiveAveragingPolicy,
    SpawnPolicy,
    Windows,
    Wiring,
)


class Everything(torch.nn.Module):
    """Every kind of tensor, each filled with one value: halves, complex, 0-dim, frozen, empty, strided, buffers."""

    def __init__(self, value: float) -> None:
        super().__init__()
        for name in ("float32", "float64", "float16", "bfloat16", "complex64"):
            full = torch.full((3, 5), value, dtype=getattr(torch, name))
            self.register_parameter(f"of_{name}", torch.nn.Parameter(full))
            self.register_parameter(f"one_{name}", torch.nn.Parameter(full[0, 0].clone()))
        self.frozen = torch.nn.Parameter(torch.full((4,), value), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.empty(0, 3))
        self.turned = torch.nn.Parameter(torch.full((700, 30), value).t())
        self.norm = torch.nn.BatchNorm1d(5)
        with torch.no_grad():
            self.norm.running_var.fill_(value)
            self.norm.num_batches_tracked.fill_(2**40 + int(value))
        self.register_buffer("mask", torch.full((3,), bool(value)))
        self.register_buffer("unbounded", torch.tensor([float("inf"), float("-inf"), value]))


def policy_for(transport: str, compression: str | None) -> SpawnPolicy:
    """Return a policy in which the only better rank gives."""
    if transport == "messages":
        return AsyncSelectiveAveragingPolicy(
            None, 2, 0.5, cooldown=0, rule="replace", compression=compression, wiring=Wiring(part_nbytes=4096)
        )
    return OneSidedSelectiveAveragingPolicy(
        None, None, 2, 0.0, 0.5, replacement_mode="worst_ratio", cooldown=0, compression=compression,
        windows=Windows(transport),  # type: ignore[arg-type]
    )  # fmt: skip


def differing(one: torch.nn.Module, other: torch.nn.Module) -> list[str]:
    """Return the names of tensors that are not equal, bit for bit."""
    pairs = zip(one.state_dict().items(), other.state_dict().values(), strict=True)
    return [
        name for (name, mine), theirs in pairs if mine.dtype != theirs.dtype or not torch.equal(mine, theirs)
    ]


def main(comm: Any, steps: int = 24) -> None:
    """Rank 0, all zeros, takes over from rank 1, all ones (which every dtype holds)."""
    for transport in ("messages", "flat", "per_parameter"):
        for compression in (None, "float16", "bfloat16", "blockwise8"):
            model: torch.nn.Module = Everything(float(comm.Get_rank()))
            optimizer: torch.optim.Optimizer = torch.optim.SGD(
                [p for p in model.parameters() if p.requires_grad], 0.1
            )
            policy, replaced = policy_for(transport, compression), 0
            comm.Barrier()
            for iteration in range(steps):
                with comm.compute(0.005):
                    pass
                comm.clock.sleep(0.005)
                model, optimizer, info = policy(iteration, model, optimizer, float(comm.Get_rank()), comm)
                replaced += info["is_replaced"]
            policy.shutdown()
            if comm.Get_rank() == 0:
                assert replaced, (transport, compression)
                assert not differing(model, Everything(1.0)), (
                    transport,
                    compression,
                    differing(model, Everything(1.0)),
                )
    comm.Barrier()


if __name__ == "__main__":
    from spawnsim.real.mpi import guarded, world

    home = world()
    with guarded(home):
        main(home)
        if home.rank == 0:
            sys.stdout.write("all well\n")
