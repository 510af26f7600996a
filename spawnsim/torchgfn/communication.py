"""Communication of tensors under torchgfn's names: bytes, collectives, gathered rows, means of gradients and models.

A tensor is one message, with the same bytes on every backend. The receiver takes its length from a matched probe, so
several threads or tasks of a rank may receive concurrently. Results are on the tensors' own devices. Counts are sent as
64-bit integers, never in the data's dtype. Means are one flat Allreduce, with the arithmetic of the policies.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from spawnsim.backends import BACKENDS, backend_of, real_backends
from spawnsim.comm import ANY_SOURCE, BYTE, MAX, MIN, SUM, Comm, Status, as_comm
from spawnsim.comm.backends import virtual_world, world
from spawnsim.errors import MismatchError, ParameterError, UsageError
from spawnsim.policies.exchange.group_mean import GroupMean
from spawnsim.policies.state.layout import StateScope, Tensors, as_real, collect

default_backend = "mpi"

Group: TypeAlias = Any
"""A spawnsim `Comm`, an mpi4py communicator, a torch.distributed process group, or None for the world."""


def comm_of(group: Group = None, backend: str = default_backend) -> Comm:
    """Return the communicator of a group, or of the backend's world without one.

    Raises:
        ParameterError: `backend` is neither "mpi" nor "torch", or `group` is not a group.
    """
    backend_of(backend, real_backends())
    return world(backend) if group is None else as_comm(group)


def _first_env(*names: str, default: str | None = None) -> str | None:
    return next((value for name in names if (value := os.environ.get(name))), default)


def _get_MPI() -> Any:
    """Return the caller's `MPI`: mpi4py's module, loaded on demand, or the virtual one on a virtual rank."""
    if virtual_world() is None:
        BACKENDS["mpi"].load()  # first, because it configures how mpi4py starts MPI
        return sys.modules["mpi4py.MPI"]
    from spawnsim.virtual.mpi.module import MPI  # loads the simulator, which real ranks do not need

    return MPI


def raw_bytes(data: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as stored in memory, row by row: uint8 of n·itemsize, on the CPU.

    Nothing is converted: bfloat16 is 2 bytes per element, float64 is 8. May share memory with `data`.
    """
    # Contiguous first: a byte view needs adjacent elements, and the gaps of a slice must not be sent.
    return data.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(raw: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor of which `raw` holds the bytes, given its dtype and shape; shares memory."""
    return raw.view(dtype).reshape(shape)


class AsyncSendHandle:
    """A send in progress. It completes even if the handle is dropped: the communicator keeps the message until then."""

    _buffer: Any
    _request: Any

    def __init__(self, buffer: Any, request: Any) -> None:
        self._buffer, self._request = buffer, request

    def is_complete(self) -> bool:
        """Return whether the send has completed, without waiting; each call also lets the transport make progress."""
        return bool(self._request.Test())

    def wait(self) -> None:
        """Wait until the send has completed. Raises `Timeout` at the communicator's deadline."""
        self._request.Wait()


def send(
    data: torch.Tensor, dst_rank: int, backend: str = default_backend, tag: int = 0, *, group: Group = None
) -> None:
    """Send a tensor's raw bytes to `dst_rank` of the group.

    Any dtype and shape; bytes are never converted (the original converts values to uint8). Both backends send the same
    bytes in one message, for `recv` or an MPI receive of bytes.
    """
    comm_of(group, backend).Send(raw_bytes(data).numpy(), dst_rank, tag)


def isend(
    data: torch.Tensor, dst_rank: int, backend: str = default_backend, tag: int = 0, *, group: Group = None
) -> AsyncSendHandle:
    """Send a tensor's raw bytes without waiting. `data` may change after the call: a copy is sent."""
    raw = raw_bytes(data).clone()
    return AsyncSendHandle(raw, comm_of(group, backend).Isend(raw.numpy(), dst_rank, tag))


def recv(
    src_rank: int | None = None, backend: str = default_backend, tag: int = 0, *, group: Group = None
) -> tuple[int, torch.Tensor]:
    """Receive a tensor from `send` or `isend`; return (source in the group, uint8 tensor of any length).

    `src_rank` None receives the next message with the tag from any rank. `view(dtype).view(shape)` restores the tensor.
    """
    comm: Any = comm_of(group, backend)
    status, message = Status(), None
    while message is None:  # another thread of this rank may take the probed message
        message = comm.Mprobe(ANY_SOURCE if src_rank is None else src_rank, tag, status)
    raw = torch.empty(status.Get_count(BYTE), dtype=torch.uint8)
    message.Recv(raw.numpy())
    return status.Get_source(), raw


OPS = {"SUM": SUM, "MAX": MAX, "MIN": MIN}


def get_rank(backend: str = default_backend, group: Group = None) -> int:
    """Return the caller's rank in the group."""
    return comm_of(group, backend).Get_rank()


def get_world_size(backend: str = default_backend, group: Group = None) -> int:
    """Return the number of ranks in the group."""
    return comm_of(group, backend).Get_size()


def barrier(backend: str = default_backend, group: Group = None) -> None:
    """Wait for all ranks of the group."""
    comm_of(group, backend).Barrier()


@torch.no_grad()
def all_gather(
    output_list: list[torch.Tensor], tensor: torch.Tensor, backend: str = default_backend, group: Group = None
) -> None:
    """Gather the tensors of all ranks on every rank: `output_list[r]` becomes rank r's tensor.

    Any dtype, shape and device, equal on all ranks. Raises `UsageError` if an element of the list does not fit.
    """
    comm = comm_of(group, backend)
    _check_places(output_list, tensor, comm.Get_size())
    own = raw_bytes(tensor)
    # As bytes, so that one Allgather serves every dtype: MPI has no type for bfloat16.
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

    float16 and bfloat16 are combined in float32 and rounded once; integers wrap as in torch; for booleans SUM and MAX
    are "or", MIN is "and". Complex tensors support only SUM.
    """
    comm = comm_of(group, backend)
    if op not in OPS or (tensor.is_complex() and op != "SUM"):
        raise ParameterError(
            f"op={op!r} of {tensor.dtype}: choose one of {', '.join(OPS)}; complex tensors support only SUM"
        )
    # As bytes of 0 and 1 a sum would be a count; the maximum is "or".
    if tensor.dtype == torch.bool:
        op = "MIN" if op == "MIN" else "MAX"
    # Real and imaginary parts as a last dimension: summed separately, they need no complex type of the library.
    seen = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    own = seen.to("cpu", _wire(seen.dtype)).contiguous()
    result = torch.empty_like(own)
    comm.Allreduce(own.numpy(), result.numpy(), OPS[op])
    seen.copy_(result)


def _wire(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are combined: MPI has no half precision."""
    if dtype == torch.bool:
        return torch.uint8
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@torch.no_grad()
def broadcast(tensor: torch.Tensor, src: int, backend: str = default_backend, group: Group = None) -> None:
    """Broadcast the tensor of rank `src`, in place. `src` is a rank of the group, on every backend.

    (In torch.distributed `src` is a world rank; the original passed it through, and so differed between backends.)
    """
    raw = raw_bytes(tensor).clone()
    comm_of(group, backend).Bcast(raw.numpy(), src)
    tensor.detach().copy_(from_bytes(raw, tensor.dtype, tuple(tensor.shape)))


Kind = tuple[str, tuple[int, ...]]  # name of the dtype, shape of one row


def gather_distributed_data(
    local_tensor: torch.Tensor | Sequence[Any],
    world_size: int | None = None,
    rank: int | None = None,
    training_group: Group = None,
    *,
    backend: str = default_backend,
) -> torch.Tensor | None:
    """Return the rows of all ranks of the group, in the order of ranks, on rank 0; None on other ranks.

    Args:
        local_tensor: (rows, ...) of any dtype, or a list of numbers; a 0-dim tensor is one row. Ranks may have
            different numbers of rows, including 0; dtype and shape of a row must agree.
        world_size: ignored: the group knows its size.
        rank: ignored.
        training_group: the participating ranks; None: the whole world.
        backend: the world to use if no group is given.

    Raises:
        MismatchError: on every rank, if rows differ in dtype or shape.
    """
    comm = comm_of(training_group, backend)
    own = local_tensor if isinstance(local_tensor, torch.Tensor) else torch.as_tensor(local_tensor)
    rows = own.detach().cpu().reshape(own.shape or (1,))
    raw = raw_bytes(rows)
    # Sizes before rows: a rank with rows of another kind must be found before any rank waits for bytes.
    facts = _facts(comm, rows, raw.numel())
    kind = _agreed(comm, rows, facts)
    together = torch.empty(int(facts[:, 2].sum()) if comm.Get_rank() == 0 else 0, dtype=torch.uint8)
    _gather(comm, raw, together, facts[:, 2])
    if comm.Get_rank() != 0:
        return None
    return from_bytes(together, getattr(torch, kind[0]), (int(facts[:, 0].sum()), *kind[1]))


def _kind(rows: torch.Tensor) -> Kind:
    return str(rows.dtype).removeprefix("torch."), tuple(rows.shape[1:])


def _facts(comm: Comm, rows: torch.Tensor, nbytes: int) -> NDArray[np.int64]:
    """Return number of rows, digest of the kind, and bytes of every rank, (size, 3)."""
    # A digest of fixed length, because shapes of any number of dimensions cannot be gathered as numbers.
    digest = hashlib.blake2b(repr(_kind(rows)).encode(), digest_size=8).digest()
    own = np.array(
        [rows.shape[0] if rows.numel() else 0, int.from_bytes(digest, "little", signed=True), nbytes]
    )
    facts = np.empty((comm.Get_size(), 3), np.int64)
    comm.Allgather(own, facts)
    return facts


def _agreed(comm: Comm, rows: torch.Tensor, facts: NDArray[np.int64]) -> Kind:
    """Return the kind of the non-empty rows. An empty list does not determine its dtype."""
    speaking = np.flatnonzero(facts[:, 0]) if facts[:, 0].any() else np.zeros(1, np.int64)
    first = int(speaking[0])
    # The root gathers, and may be a rank without rows, which has no dtype: the first rank with rows broadcasts its
    # kind.
    kind: Kind = comm.bcast(_kind(rows), root=first)
    others = [int(rank) for rank in speaking if facts[rank, 1] != facts[first, 1]]
    if others:
        raise MismatchError(
            f"rank {comm.Get_rank()}: rows cannot be gathered: rank {first} has {kind[0]} of shape {list(kind[1])}, "
            f"rank {', '.join(map(str, others))} something else; give all ranks rows of one dtype and shape"
        )
    return kind


def _gather(comm: Comm, raw: torch.Tensor, together: torch.Tensor, counts: NDArray[np.int64]) -> None:
    collective: Any = comm
    collective.Gatherv(
        raw.numpy(), [together.numpy(), counts.tolist()] if comm.Get_rank() == 0 else None, root=0
    )


def average_gradients(
    model: torch.nn.Module, group: Group = None, *, backend: str = default_backend, guard: bool = True
) -> None:
    """Replace each gradient by its mean over the group, in place.

    A rank without a gradient (`grad=None`) counts as zero and gets the mean; a gradient that is missing on all ranks
    stays None. With `guard`, elements that are not finite are ignored, as in `policies.AverageAllPolicy`; use
    guard=False if a loss scaler checks for overflows afterwards. All ranks must call.
    Raises `MismatchError` on every rank if the models differ.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return
    gradients = [_gradient(parameter) for parameter in trained]
    # Averaged with the gradients: the result shows whether any rank had a gradient, without a separate message.
    held = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.float32)
    live: Tensors = {f"gradient/{number}": gradient for number, gradient in enumerate(gradients)}
    live = as_real({**live, "held": held})
    comm = comm_of(group, backend)
    GroupMean(comm, live, guard=guard)(comm, live)
    for parameter, gradient, share in zip(trained, gradients, held.tolist(), strict=True):
        parameter.grad = gradient if share > 0 else None


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter, requires_grad=False)
    gradient = parameter.grad.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient


def average_models(
    model: torch.nn.Module,
    training_group: Group = None,
    *,
    travels: StateScope | None = None,
    backend: str = default_backend,
    guard: bool = True,
) -> None:
    """Replace parameters and buffers by their mean over the group, in place: optimizers keep their references.

    The mean of equal models is that model, to the bit, also in a part of the world. `travels` excludes buffers or
    frozen parameters; with `guard`, elements that are not finite are ignored, as in `policies.AverageAllPolicy`.
    Raises `MismatchError` on every rank if the models differ.
    """
    comm = comm_of(training_group, backend)
    live = as_real(collect(model, None, travels or StateScope()))
    if live:
        GroupMean(comm, live, guard=guard)(comm, live)
