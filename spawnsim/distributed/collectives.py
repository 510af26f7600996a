"""Collectives on tensors, under the original's names; ranks are those of the group on every backend.

This room knows tensors and a communicator's collectives. Results lie on the tensors' own devices.
"""

from __future__ import annotations

import torch

from spawnsim.comm import MAX, MIN, SUM
from spawnsim.distributed.transport import from_bytes, raw_bytes
from spawnsim.distributed.worlds import Group, comm_of, default_backend
from spawnsim.errors import ParameterError, UsageError

OPS = {"SUM": SUM, "MAX": MAX, "MIN": MIN}


def get_rank(backend: str = default_backend, group: Group = None) -> int:
    """Return the caller's rank in the group."""
    return comm_of(group, backend).Get_rank()


def get_world_size(backend: str = default_backend, group: Group = None) -> int:
    """Return the number of ranks of the group."""
    return comm_of(group, backend).Get_size()


def barrier(backend: str = default_backend, group: Group = None) -> None:
    """Wait for all ranks of the group."""
    comm_of(group, backend).Barrier()


@torch.no_grad()
def all_gather(
    output_list: list[torch.Tensor], tensor: torch.Tensor, backend: str = default_backend, group: Group = None
) -> None:
    """Give every rank the tensors of all: `output_list[r]` becomes rank r's.

    Any dtype, shape and device; the same on all ranks. Raises `UsageError` where a place in the list does not fit.
    """
    comm = comm_of(group, backend)
    _check_places(output_list, tensor, comm.Get_size())
    own = raw_bytes(tensor)
    all_of_them = torch.empty((comm.Get_size(), own.numel()), dtype=torch.uint8)
    comm.Allgather(own.numpy(), all_of_them.numpy())
    for place, raw in zip(output_list, all_of_them, strict=True):
        place.copy_(from_bytes(raw.clone(), tensor.dtype, tuple(tensor.shape)))


def _check_places(places: list[torch.Tensor], tensor: torch.Tensor, size: int) -> None:
    if len(places) != size:
        raise UsageError(
            f"output_list has {len(places)} tensors for the {size} ranks of the group: give one a rank"
        )
    for rank, place in enumerate(places):
        if place.dtype != tensor.dtype or place.shape != tensor.shape:
            found = f"{place.dtype}{list(place.shape)}"
            raise UsageError(f"output_list[{rank}] is {found}, the tensor {tensor.dtype}{list(tensor.shape)}")


@torch.no_grad()
def all_reduce(
    tensor: torch.Tensor, op: str = "SUM", backend: str = default_backend, group: Group = None
) -> None:
    """Combine the tensors of all ranks in place; `op` is "SUM", "MAX" or "MIN".

    float16 and bfloat16 are combined in float32 and rounded once; whole numbers wrap as they do in torch; of truth
    values SUM and MAX are "or", MIN is "and". Complex tensors have a SUM only.
    """
    comm = comm_of(group, backend)
    if op not in OPS or (tensor.is_complex() and op != "SUM"):
        raise ParameterError(
            f"op={op!r} of {tensor.dtype}: choose one of {', '.join(OPS)}; complex have SUM alone"
        )
    if tensor.dtype == torch.bool:
        op = "MIN" if op == "MIN" else "MAX"
    seen = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    own = seen.to("cpu", _wire(seen.dtype)).contiguous()
    result = torch.empty_like(own)
    comm.Allreduce(own.numpy(), result.numpy(), OPS[op])
    seen.copy_(result)


def _wire(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are combined: MPI knows no half precision."""
    if dtype == torch.bool:
        return torch.uint8
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@torch.no_grad()
def broadcast(tensor: torch.Tensor, src: int, backend: str = default_backend, group: Group = None) -> None:
    """Give the tensor of rank `src` to all, in place. `src` is a rank of the group, on every backend.

    (torch.distributed counts `src` in the world; the original passed it through, and so differed between backends.)
    """
    raw = raw_bytes(tensor).clone()
    comm_of(group, backend).Bcast(raw.numpy(), src)
    tensor.detach().copy_(from_bytes(raw, tensor.dtype, tuple(tensor.shape)))
