"""Tensors that lie far away: a device without a card, for tests.

A `Far` tensor says that its device is not the CPU and hands out no pointer, no buffer and no capsule, so whoever takes
it for main memory fails; torch's copies from and to it work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map


class Far(torch.Tensor):
    """A tensor whose memory only torch can reach; `near` is that memory."""

    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> Far:
        """Return the tensor over memory that stays out of sight."""
        kind = {"strides": near.stride(), "dtype": near.dtype, "device": torch.device("meta")}
        self: Far = torch.Tensor._make_wrapper_subclass(cls, near.shape, **kind)
        self.near = near
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what torch asks for on the memory behind."""

        def near(value: Any) -> Any:
            return value.near if isinstance(value, Far) else value

        def far(value: Any) -> Any:
            return Far(value) if isinstance(value, torch.Tensor) else value

        found = func(*tree_map(near, args), **tree_map(near, kwargs or {}))
        return args[0] if func.__name__.startswith("copy_") else tree_map(far, found)
