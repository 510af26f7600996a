"""Tensors that are not what they should be yet: whoever looks at one has the work that they wait for carried out first.

Parameters, optimizer state and results of a rank stay ordinary tensors; only while work is put off do they belong to a
class of which torch tells us each use. So a look costs nothing otherwise, and nobody holds a strange object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from spawnsim.comm.deferred import Deferred, caller

# What may be asked of a tensor without a look at its values.
METADATA = {
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "is_leaf",
        "requires_grad",
        "is_cuda",
        "is_meta",
    )
} | {Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.__len__}


class Watch:
    """The two classes, of parameters and of other tensors, whose looks one run is told of."""

    def __init__(self, deferred: Deferred) -> None:
        def looked(
            cls: type, function: Callable[..., Any], kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **(kwargs or {}))
            found = caller()
            deferred.look(
                found[1] if found is not None and found[0] is deferred else None,
                lambda: bool(self._unknown((args, kwargs))),
            )
            # Copies are made of the class of their original, and there is nothing to be carried out for them.
            for stray in self._unknown((args, kwargs)):
                stray.__class__ = nn.Parameter if isinstance(stray, nn.Parameter) else Tensor
            return function(*args, **(kwargs or {}))

        members: dict[str, Any] = {"__torch_function__": classmethod(looked)}
        self.parameter: Any = type("PendingParameter", (nn.Parameter,), members)
        self.tensor: Any = type("PendingTensor", (Tensor,), members)
        deferred.unknown = self.tensor

    def _unknown(self, value: Any) -> list[Any]:
        """Return what among the arguments of a call is not known."""
        if isinstance(value, Tensor):
            return [value] if type(value) in (self.parameter, self.tensor) else []
        if isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, (list, tuple)):
            return []
        return [unknown for each in value for unknown in self._unknown(each)]

    def watch(self, parameters: Iterable[nn.Parameter], tensors: Iterable[Tensor]) -> None:
        """Be told of looks from now on."""
        for parameter in parameters:
            parameter.__class__ = self.parameter
        for tensor in tensors:
            tensor.__class__ = self.tensor

    def result(self, like: Tensor) -> Tensor:
        """Return a tensor that is not known yet."""
        tensor = torch.empty_like(like)
        tensor.__class__ = self.tensor
        return tensor


def release(parameters: Iterable[nn.Parameter], tensors: Iterable[Tensor]) -> None:
    """Make them ordinary tensors again."""
    for parameter in parameters:
        parameter.__class__ = nn.Parameter
    for tensor in tensors:
        tensor.__class__ = Tensor


def known(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Give results their values."""
    with torch.no_grad():
        release((), tensors)
        torch._foreach_copy_(tensors, values)
