"""Whether all ranks of a group hold the same numbers: their mean is then what each of them has, to the bit.

The sum of n equal floats, divided by n, is that float only where n is a power of two; elsewhere its last bit may
differ, and the sum alone does not tell equal numbers from nearly equal ones. So ranks compare digests first: of the
beginnings of a few tensors; while these agree, of those of all tensors; and then of everything. Where models differ,
as they do in training, that is one small Allreduce.

This room knows tensors and a communicator's Allreduce; it knows no arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import torch

from spawnsim.comm import IN_PLACE, MAX, Comm
from spawnsim.policies.state import Tensors

FEW, HEAD = 8, 16  # tensors that are looked at first, and numbers of each


def all_same(comm: Comm, live: Tensors) -> bool:
    """Return whether all ranks of the group hold the same bits; collective. The layouts must be equal."""
    tensors = [tensor for tensor in live.values() if tensor.numel()]
    if not tensors:
        return True
    few = tensors[:: -(-len(tensors) // FEW)] + tensors[-1:]
    return (
        _agree(comm, map(_head, few))
        and _agree(comm, map(_head, tensors))
        and _agree(comm, (tensor.reshape(-1) for tensor in tensors))
    )


def _head(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first numbers of a tensor, without laying it out anew."""
    while tensor.dim() > 1:
        tensor = tensor[0]
    return tensor.reshape(-1)[:HEAD]


def _agree(comm: Comm, rows: Iterable[torch.Tensor]) -> bool:
    state = blake2b(digest_size=8)
    for row in rows:
        state.update(row.contiguous().cpu().view(torch.uint8).numpy().data)
    digest = np.frombuffer(state.digest(), np.int64)
    ends = np.concatenate([digest, ~digest])  # the greatest, and the least
    comm.Allreduce(IN_PLACE, ends, MAX)
    return bool(ends[0] == ~ends[1])
