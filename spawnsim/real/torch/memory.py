"""User memory as bytes to send and receive, and as tensors for torch's collectives; GPU tensors are staged.

A tensor on a GPU travels over gloo by way of pinned main memory (`staging`). Knows buffers and tensors; sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.datatypes import BF16
from spawnsim.comm.failures import SpecTypeError
from spawnsim.comm.memory import as_bytes
from spawnsim.comm.regions import Buffer
from spawnsim.real.rank.staging import Call, Memory, Stage, far
from spawnsim.real.torch.wire import Bytes

HERE = Memory()
BUF = ("buf",)


def on_gpu(spec: Any) -> bool:
    """Whether a specification is a tensor in a GPU's memory."""
    return isinstance(spec, torch.Tensor) and spec.device.type != "cpu"


def staged(tensor: torch.Tensor) -> torch.Tensor:
    """Return pinned main memory of a GPU tensor's shape and type."""
    return HERE.host(tensor)


def outgoing(spec: Any) -> Bytes:
    """Return the bytes of a message: the user's own memory where they lie in a row, else a copy."""
    if spec is None:
        raise SpecTypeError("None is no buffer: pass an array, a tensor or bytes")
    if far(spec) is not None:
        (spec,) = Stage(HERE, Call("Send", BUF, (spec,))).args
    return bytes_of(as_buffer(spec))


def bytes_of(buffer: Buffer) -> Bytes:
    """Return the bytes of a buffer as they travel: its own memory where they lie in a row, else a copy."""
    return as_bytes(buffer.array if in_a_row(buffer) else buffer.pack())


def in_a_row(buffer: Buffer) -> bool:
    """Whether a buffer's memory is what travels."""
    return bool(buffer.datatype and buffer.datatype.is_predefined and buffer.datatype.dense)


class Target:
    """Where a receive puts its data: a buffer, memory for data to come straight to, what to do with so many bytes."""

    __slots__ = ("after", "buffer", "memory")

    def __init__(self, buffer: Buffer | None, after: Callable[[int], object] | None = None) -> None:
        self.buffer, self.after = buffer, after
        self.memory = as_bytes(buffer.array) if buffer is not None and in_a_row(buffer) else None


OBJECT = Target(None)
"""The target of an object receive."""


def incoming(spec: Any) -> Target:
    """Return the target of a receive into the user's memory."""
    if far(spec) is not None:
        stage = Stage(HERE, Call("Recv", BUF, (spec,)))
        return Target(as_buffer(*stage.args), lambda nbytes: stage.end(nbytes if stage.partial else None))
    return Target(as_buffer(spec, writable=True))


def flat(spec: Any, *, writable: bool = False) -> torch.Tensor | None:
    """Return the user's memory as a flat tensor for a collective of torch, or None if torch has no such type."""
    if isinstance(spec, torch.Tensor):
        if spec.dim() == 1 and not spec.requires_grad and spec.is_contiguous():
            return spec
        return spec.detach().view(-1) if spec.is_contiguous() else None
    buffer = as_buffer(spec, writable=writable)
    if not (buffer.datatype and buffer.datatype.is_predefined):
        return None
    array = buffer.array
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype.name not in TORCH_NAMES:
        return None
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def as_plain(spec: Any) -> bool:
    """Whether a specification is memory alone, without counts or types."""
    return isinstance(spec, (np.ndarray, torch.Tensor))


TORCH_NAMES = {"float16", "float32", "float64", "int8", "uint8", "int32", "int64"}
"""Types that gloo reduces."""
