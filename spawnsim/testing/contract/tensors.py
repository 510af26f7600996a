"""CPU tensors of torch as buffers, where torch is installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from spawnsim.testing.claims import Skipped, claim, refused, ring, same


def load() -> Any:
    """Return torch, which is imported only here; without it the test is skipped."""
    if importlib.util.find_spec("torch") is None:
        raise Skipped("torch is not installed")
    return importlib.import_module("torch")


def tensors_go_round_a_ring(MPI: Any, comm: Any) -> None:
    """Tensors of all usual dtypes are sent and received in place."""
    torch = load()
    rank, _, left, right = ring(comm)
    for name in ("float32", "float64", "int64", "int32", "uint8", "bool", "complex64", "float16"):
        source, target = (
            torch.full((2, 3), rank).to(getattr(torch, name)),
            torch.zeros(2, 3).to(getattr(torch, name)),
        )
        comm.Sendrecv(source, right, 0, target, left, 0)
        claim(torch.equal(target, torch.full((2, 3), left).to(getattr(torch, name))), f"{name} arrives")


def tensors_are_reduced(MPI: Any, comm: Any) -> None:
    """Averaging parameters, in place and not."""
    torch = load()
    rank, size = comm.Get_rank(), comm.Get_size()
    parameter = torch.nn.Parameter(torch.full((4,), float(rank)))
    total = torch.zeros(4)
    comm.Allreduce(parameter.detach(), total)
    comm.Allreduce(MPI.IN_PLACE, parameter.data)
    same(total.tolist(), [size * (size - 1) / 2] * 4)
    same(parameter.tolist(), total.tolist())


def tensors_and_arrays_meet(MPI: Any, comm: Any) -> None:
    """A tensor is broadcast to arrays."""
    torch = load()
    import numpy as np

    buf = torch.arange(5, dtype=torch.float64) if comm.Get_rank() == 0 else np.zeros(5)
    comm.Bcast(buf)
    same(np.asarray(buf), np.arange(5.0))


def tensors_that_cannot_be_buffers(MPI: Any, comm: Any) -> None:
    """A tensor that requires grad or has gaps is refused."""
    torch = load()
    rank = comm.Get_rank()
    for tensor in (torch.zeros(3, requires_grad=True), torch.zeros(4, 4)[:, 1]):
        with refused(BufferError, RuntimeError, ValueError):
            comm.Isend(tensor, dest=rank)


def tensors_as_objects(MPI: Any, comm: Any) -> None:
    """State dictionaries travel as objects."""
    torch = load()
    rank, _, left, right = ring(comm)
    state = torch.nn.Linear(2, 2).state_dict() | {"rank": torch.tensor(rank)}
    found = comm.sendrecv(state, dest=right, source=left)
    same((int(found["rank"]), found["weight"].shape), (left, (2, 2)))
