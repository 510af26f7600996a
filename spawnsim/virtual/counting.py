"""Computing times by counting: floating-point operations and bytes of a rank's torch operations, at a device's rates.

The time of each operation, forward and backward, is the longer of two: its floating-point operations (as counted by
torch's own counter: matrix products, convolutions, attention) at the arithmetic rate, or the bytes of all tensors that
it reads and writes at the memory rate. So times are functions of shapes and types alone, the same in each run. Views
and allocations are free. Not modelled: fusion by a device's library, kernel launches, caches, Python's own time, and
numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the time of the thread's operations while it is active; torch extends it to backward passes.

    Args:
        meter: the task's meter, which adds up the seconds. Operations within calls of the library are not counted.
        rates: floating-point operations and bytes per second.
    """

    def __init__(self, meter: Any, rates: tuple[float, float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter, self._rates = meter, rates

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute an operation, and count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._meter.depth:
            self._meter.counted_s += seconds(func, args, kwargs, out, rates=self._rates)
        return out


def seconds(func: Any, args: Any, kwargs: Any, out: Any, *, rates: tuple[float, float]) -> float:
    """Return the time of one operation."""
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
    """Yield the tensors among arguments, and in lists of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; an element that a stride of 0 repeats counts once."""
    if tensor.layout is not torch.strided:
        return 0
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()
