"""Byte transport: a tensor's raw bytes from rank to rank.

One message per tensor, the same bytes on every building. The receiver learns the length by a matched probe, so several
threads or tasks of a rank may receive at once. This room knows tensors as bytes; it knows no shapes and no meaning.
"""

from __future__ import annotations

from typing import Any

import torch

from spawnsim.comm import ANY_SOURCE, BYTE, Status
from spawnsim.distributed.worlds import Group, comm_of, default_backend


def raw_bytes(data: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as they lie in memory, row by row: uint8 of n·itemsize, on the CPU.

    Nothing is converted: bfloat16 is 2 bytes an element, float64 is 8. May share memory with `data`.
    """
    return data.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(raw: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return what `raw_bytes` was made of, given its dtype and shape; shares memory."""
    return raw.view(dtype).reshape(shape)


class AsyncSendHandle:
    """A send in progress. Dropping it loses nothing: the communicator keeps the message until it has left."""

    _buffer: Any
    _request: Any

    def __init__(self, buffer: Any, request: Any) -> None:
        self._buffer, self._request = buffer, request

    def is_complete(self) -> bool:
        """Return whether the send has completed, without waiting; each call lets the transport go on."""
        return bool(self._request.Test())

    def wait(self) -> None:
        """Wait until the send has completed. Raises `Timeout` at the communicator's deadline."""
        self._request.Wait()


def send(
    data: torch.Tensor, dst_rank: int, backend: str = default_backend, tag: int = 0, *, group: Group = None
) -> None:
    """Send a tensor's raw bytes to `dst_rank` of the group.

    Any dtype and shape; bytes are never converted (the original cast values to uint8). Both backends carry the same
    bytes in one message, which `recv`, or an MPI receive of bytes, takes.
    """
    comm_of(group, backend).Send(raw_bytes(data).numpy(), dst_rank, tag)


def isend(
    data: torch.Tensor, dst_rank: int, backend: str = default_backend, tag: int = 0, *, group: Group = None
) -> AsyncSendHandle:
    """Send a tensor's raw bytes without waiting. `data` may change as soon as the call returns: a copy is sent."""
    raw = raw_bytes(data).clone()
    return AsyncSendHandle(raw, comm_of(group, backend).Isend(raw.numpy(), dst_rank, tag))


def recv(
    src_rank: int | None = None, backend: str = default_backend, tag: int = 0, *, group: Group = None
) -> tuple[int, torch.Tensor]:
    """Receive what `send` or `isend` sent; return (source in the group, uint8 tensor of any length).

    `src_rank` None takes the next message of the tag from anyone. `view(dtype).view(shape)` gives the tensor back.
    """
    comm: Any = comm_of(group, backend)
    status, message = Status(), None
    while message is None:  # another thread of this rank may take the one that was seen
        message = comm.Mprobe(ANY_SOURCE if src_rank is None else src_rank, tag, status)
    raw = torch.empty(status.Get_count(BYTE), dtype=torch.uint8)
    message.Recv(raw.numpy())
    return status.Get_source(), raw
