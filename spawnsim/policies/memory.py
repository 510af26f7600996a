"""Flat memory for tensors, and tensors as one flat memory.

This room knows torch's storages and numpy's; it knows no model, no communicator and no policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

CPU = torch.device("cpu")


def new_buffer(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a new flat buffer; on the CPU by numpy, which takes huge pages where it can."""
    if device.type == "cpu":
        return torch.from_numpy(np.empty(count * dtype.itemsize, np.uint8)).view(dtype)
    return torch.empty(count, dtype=dtype, device=device)


def as_memory(tensor: torch.Tensor) -> Any:
    """Return a tensor in main memory as an array: numpy begins sooner than torch, which counts for small ones."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def one_run(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensors as one flat view if they lie end to end in one storage, in this order; else None."""
    first, at = tensors[0], tensors[0].storage_offset()
    start = first.untyped_storage().data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == start and tensor.storage_offset() == at
        if not (same and tensor.dtype == first.dtype and tensor.is_contiguous()):
            return None
        at += tensor.numel()
    return first.as_strided((at - first.storage_offset(),), (1,))
