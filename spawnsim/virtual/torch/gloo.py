"""Calls that gloo rejects, or handles wrongly without an error: rejected and reported here, so that no bug is hidden.

gloo treats the memory of a tensor as contiguous, whatever its strides. For other backends, only the checks that all
backends share apply.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from spawnsim.errors import UsageError
from spawnsim.virtual.engine.diagnosis import place
from spawnsim.virtual.engine.kernel import current_task

GLOO = "gloo"
TYPES = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool, torch.complex64, torch.complex128,
}  # fmt: skip


class Refused(UsageError, RuntimeError):
    """A call that gloo rejects: spawnsim's `UsageError`, and the RuntimeError that torch raises."""


def root_of(opts: Any, size: int) -> int:
    """Return the root in the options, in a group of `size` ranks."""
    root = int(getattr(opts, "rootRank", 0))
    if not 0 <= root < size:
        raise Refused(f"invalid root rank {root}: the group has the ranks 0 to {size - 1}")
    return root


def check(name: str, backend: str, tensors: Sequence[torch.Tensor]) -> None:
    """Reject types that gloo does not support; report tensors that are not contiguous."""
    if GLOO not in backend:
        return
    for tensor in tensors:
        if tensor.dtype not in TYPES:
            raise Refused(
                f"{name} of {tensor.dtype}, a type that gloo does not support: convert the tensor, or send its bytes "
                "(tensor.view(torch.uint8))"
            )
        if not tensor.is_contiguous() and not _in_one_piece(tensor):
            _report(name, tensor)


def check_equal(name: str, backend: str, tensors: Sequence[torch.Tensor]) -> None:
    """Reject a list of tensors with different shapes: gloo would treat all as having the first one's shape."""
    for place_, tensor in enumerate(tensors):
        if GLOO in backend and tensor.shape != tensors[0].shape:
            raise Refused(
                f"{name}: the tensor at index {place_} has the shape {list(tensor.shape)}, and the tensor at index 0 "
                f"{list(tensors[0].shape)}; gloo requires equal shapes: use all_to_all_single with split sizes, or pad"
            )


def _in_one_piece(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a contiguous block of memory, in any order of dimensions."""
    if tensor.layout is not torch.strided:
        return True
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != filled:
            return False
        filled *= size
    return True


def _report(name: str, tensor: torch.Tensor) -> None:
    task = current_task()
    if task is None:
        return
    line = place(sys._getframe()).partition(" (in ")[0]
    task.kernel.owner.mistakes.setdefault(
        ("strided", line),
        f"rank {task.rank} at {task.clock:.6g} s ({line}) gave {name} a tensor of shape {list(tensor.shape)} with gaps "
        f"in memory (strides {list(tensor.stride())}): gloo treats its memory as contiguous and moves the wrong "
        "elements without an error; NCCL raises an error. Virtual ranks moved the right elements: pass "
        "tensor.contiguous(), and copy the result back",
    )
