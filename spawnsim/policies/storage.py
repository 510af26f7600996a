"""A model's tensors moved end to end into one memory, so that they travel as one.

This room knows modules and memory; it knows no communicator and no policy.
"""

from __future__ import annotations

import torch

from spawnsim.errors import UsageError
from spawnsim.policies.memory import new_buffer
from spawnsim.policies.state import Travels, collect


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
