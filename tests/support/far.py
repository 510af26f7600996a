"""Tensors that lie far away: a device without a card, for tests.

A `Far` tensor says that its device is not the CPU and hands out no pointer, no buffer and no capsule, so whoever takes
it for main memory fails; torch's copies from and to it work, and arithmetic with tensors of the CPU does not. Within
`with card():` also new tensors and copies asked for on that device are far.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

AWAY = torch.device("meta", 1)  # with a number: what has none is a phantom of spawnsim
COPIES = {"copy_", "_foreach_copy_", "_to_copy"}
"""What torch does between devices; all else wants its tensors together, as CUDA does."""


class Far(torch.Tensor):
    """A tensor whose memory only torch can reach; `near` is that memory."""

    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> Far:
        kind = {"strides": near.stride(), "storage_offset": near.storage_offset(), "dtype": near.dtype}
        self: Far = torch.Tensor._make_wrapper_subclass(cls, near.shape, device=AWAY, **kind)
        self.near = near
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _done(func, args, dict(kwargs or {}))


class card(TorchDispatchMode):  # noqa: N801  # used as a context
    """A machine with the far device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        asked = given.get("device") == AWAY or any(isinstance(part, Far) for part in _flat((args, given)))
        return _done(func, args, given) if asked else func(*args, **given)


def _done(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, device = func.overloadpacket.__name__, kwargs.get("device")
    if name not in COPIES:
        _refuse_mixtures(args, kwargs)
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    found = func(*tree_map(_near, args), **tree_map(_near, kwargs))
    if name.endswith("_"):  # in place: the tensor that was given, of a list nothing
        return args[0] if isinstance(args[0], torch.Tensor) else None
    if "out" in kwargs:
        return kwargs["out"]
    return found if device is not None and device != AWAY else tree_map(_far, found)


def _refuse_mixtures(*given: Any) -> None:
    tensors = [part for part in _flat(given) if isinstance(part, torch.Tensor)]
    if any(isinstance(part, Far) for part in tensors) and any(
        part.dim() and not isinstance(part, Far) for part in tensors
    ):
        raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices")


def _flat(given: Any) -> list[Any]:
    leaves: list[Any] = torch.utils._pytree.tree_leaves(given)
    return leaves


def _near(value: Any) -> Any:
    return value.near if isinstance(value, Far) else value


def _far(value: Any) -> Any:
    return Far(value) if isinstance(value, torch.Tensor) else value
