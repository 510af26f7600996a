"""Computing times by counting: floating-point operations and bytes of a rank's torch operations, at a device's rates.

Each operation, forward and backward, takes what the slower of the two takes: its floating-point operations (those that
torch's own counter knows: products of matrices, convolutions, attention) at the rate of the one, or the bytes of all
tensors that it reads and writes at the rate of the other. So the times are functions of shapes and types alone, the
same in each run. Views and allocations are free. Left out are what a device's library fuses, launches of kernels,
caches, Python's own time, and what numpy does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what the thread's operations take while it is entered; torch carries it into backward passes.

    Args:
        meter: of the rank: gets the seconds. While the rank is in a call of the library, nothing is counted.
        rates: floating-point operations and bytes a second.
    """

    def __init__(self, meter: Any, rates: tuple[float, float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter, self._rates = meter, rates

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out an operation, and count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._meter.depth:
            self._meter.counted_s += seconds(func, args, kwargs, out, rates=self._rates)
        return out


def seconds(func: Any, args: Any, kwargs: Any, out: Any, *, rates: tuple[float, float]) -> float:
    """Return what one operation takes."""
    if func.is_view:
        return 0.0
    given = list(_tensors((args, tuple(kwargs.values()))))
    if not given and func.overloadpacket.__name__.startswith(("empty", "new_empty")):
        return 0.0
    nbytes = sum(map(_nbytes, given)) + sum(map(_nbytes, _tensors(out)))
    count = flop_registry.get(func.overloadpacket)
    flops = count(*args, **kwargs, out_val=out) if count is not None else 0
    return max(flops / rates[0], nbytes / rates[1])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of arguments, and of lists of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; one that is repeated by a stride of 0 counts once."""
    if tensor.layout is not torch.strided:
        return 0
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()
