"""A model's tensors end to end in one memory, so that they travel as one.

This room knows modules and memory; it knows no communicator and no policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from spawnsim.errors import UsageError
from spawnsim.policies.state import Travels, collect


def new_buffer(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a new flat buffer; on the CPU by numpy, which takes huge pages where it can."""
    if device.type == "cpu":
        return torch.from_numpy(np.empty(count * dtype.itemsize, np.uint8)).view(dtype)
    return torch.empty(count, dtype=dtype, device=device)


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


def one_storage(model: torch.nn.Module) -> None:
    """Move all parameters and buffers of one dtype and device into one memory, end to end, keeping their values.

    `AverageAllPolicy` then sums them where they lie, which halves its price for a model of many small tensors.
    Parameters stay the same objects, so optimizers go on as before; what else looks at their old memory (a view, a
    captured CUDA graph) sees no more changes: call this right after the model is built.

    Raises `UsageError` if tensors of the model share memory: they would be parted.
    """
    live = [tensor for tensor in collect(model, None, Travels()).values() if tensor.numel()]
    if len({tensor.data_ptr() for tensor in live}) < len(live):
        raise UsageError(
            "one_storage: parameters or buffers of this model share memory; tie them as one Parameter"
        )
    held = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.numel()}
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in live):
        group = [held[tensor.data_ptr()] for tensor in live if (tensor.dtype, tensor.device) == kind]
        memory = new_buffer(sum(tensor.numel() for tensor in group), *kind)
        for tensor, row in zip(group, torch.split(memory, [t.numel() for t in group]), strict=True):
            place = row.view(tensor.shape)
            place.copy_(tensor.detach())
            tensor.data = place
