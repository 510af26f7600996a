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


def _of_classes(value: Any, classes: set[Any]) -> list[Tensor]:
    """Return the tensors of some classes among the arguments of a call."""
    if type(value) in classes:
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [found for each in value for found in _of_classes(each, classes)]


class Watch:
    """The two classes, of parameters and of other tensors, whose looks one run is told of."""

    def __init__(self, deferred: Deferred) -> None:
        def look(args: Any, kwargs: Any = None) -> None:
            unknown = _of_classes(args, ours) + (_of_classes(kwargs, ours) if kwargs else [])
            if not unknown:
                return
            found = caller()
            deferred.look(
                found[1] if found is not None and found[0] is deferred else None,
                lambda: not ours.isdisjoint(map(type, unknown)),
            )
            # Copies are made of the class of their original, and there is nothing to be carried out for them.
            for each in unknown:
                if type(each) in ours:
                    each.__class__ = nn.Parameter if isinstance(each, nn.Parameter) else Tensor

        def looked(
            cls: type, function: Callable[..., Any], kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **(kwargs or {}))
            look(args, kwargs)
            return function(*args, **(kwargs or {}))

        def as_number(method: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
            def number(self: Tensor) -> Any:
                look((self,))
                return method(self)

            return number

        def copied(self: Tensor, memo: dict[int, Any]) -> Tensor:
            look((self,))  # before torch takes the class, which the copy would have
            copy: Tensor = type(self).__deepcopy__(self, memo)  # type: ignore[no-untyped-call]
            return copy

        members: dict[str, Any] = {"__torch_function__": classmethod(looked), "__deepcopy__": copied}
        # What losses are looked at by, as a rule, comes here directly: by way of torch it takes twice as long.
        numbers = {name: as_number(getattr(Tensor, name)) for name in ("item", "__float__")}
        self.parameter: Any = type("PendingParameter", (nn.Parameter,), members)
        self.tensor: Any = type("PendingTensor", (Tensor,), members | numbers)
        ours = {self.parameter, self.tensor}
        deferred.unknown, self.look = self.tensor, look

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
