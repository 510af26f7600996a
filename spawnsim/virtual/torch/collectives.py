"""The contribution and the outcome of each collective of torch.distributed.

A contribution is the bytes of a tensor (or a list of them), so that the digest covers it and a faulty link can corrupt
it. A reduction is computed once for all ranks, in the tensors' own type, and in gloo's order (`comm.ops`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp
from torch.utils._python_dispatch import _disable_current_modes

from spawnsim.comm import ops
from spawnsim.comm.ops import reduce_ring, ring_block
from spawnsim.errors import UnsupportedError, UsageError
from spawnsim.virtual.mpi.instance import Call, CollectiveInstance

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Tensors = Sequence[torch.Tensor]
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


@dataclass(slots=True)
class TorchCall(Call):
    """A collective as one rank calls it, with the shapes and the line of the program."""

    shapes: Sequence[list[int]] = ()

    def __post_init__(self) -> None:
        self.dtype = dict(self.agree).get("dtype", "")

    def describe(self) -> str:
        """Return the call as in the program, and its line."""
        parts = [f"shape={self.shapes[0] if len(self.shapes) == 1 else self.shapes}"] if self.shapes else []
        parts += [f"{name}={value}" for name, value in self.agree if name != "elements"]
        parts += [f"root={self.root}"] if self.root >= 0 else []
        return f"{self.name}({', '.join(parts)})" + (f" at {self.line}" if self.line else "")


# DistributedDataParallel gathers a few tensors of each rank on each rank when it is made. For the usual tensors in
# contiguous memory, every look-up counts.
_PLAIN = {torch.Tensor, torch.nn.Parameter}


def _in_one_piece(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def raw(tensor: torch.Tensor, *, borrowed: bool = False) -> Bytes:
    """Return the bytes of a tensor: a copy, or with `borrowed` its own memory, if that is contiguous."""
    if not borrowed and _in_one_piece(tensor):
        copy = np.empty(tensor.nbytes, np.uint8)
        ctypes.memmove(copy.ctypes.data, tensor.data_ptr(), tensor.nbytes)
        return copy
    _check(tensor)
    with torch.no_grad(), _disable_current_modes():
        whole = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if not whole.numel():
            return np.empty(0, np.uint8)
        found = _memory(whole)
        return found if borrowed or whole.data_ptr() != tensor.data_ptr() else found.copy()


def _memory(tensor: torch.Tensor) -> Bytes:
    """Return a contiguous tensor's memory, which keeps the tensor alive; `tensor.numpy()` would prevent resizing."""
    block: Any = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    block.tensor = tensor
    return np.frombuffer(block, np.uint8)


@cache
def numpy_type(dtype: torch.dtype) -> np.dtype[Any] | None:
    """Return a type as numpy's; None if numpy lacks it, such as bfloat16."""
    try:
        return np.dtype(str(dtype).removeprefix("torch."))
    except TypeError:
        return None


def memory(tensor: torch.Tensor) -> Any:
    """Return a tensor's own memory as an array of its type, if it is in one piece and numpy has the type; else None."""
    dtype = numpy_type(tensor.dtype)
    return None if dtype is None or not _in_one_piece(tensor) else _memory(tensor).view(dtype)


def write(tensor: torch.Tensor, data: Bytes) -> None:
    """Write bytes to a tensor unchanged; autograd does not see this, as on real ranks."""
    if data.nbytes != tensor.nbytes:
        raise UsageError(
            f"received {data.nbytes} bytes for a tensor of shape {list(tensor.shape)} and {name_of(tensor)}, which "
            f"needs {tensor.nbytes}"
        )
    if _in_one_piece(tensor):
        ctypes.memmove(tensor.data_ptr(), data.ctypes.data, data.nbytes)
        return
    _check(tensor)
    if data.nbytes:
        with torch.no_grad(), _disable_current_modes():
            target = tensor.detach()
            target.copy_(typed(data.copy(), target.dtype).view(target.shape))


class Target:
    """A tensor as the target of a receive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.dtype = tensor, numpy_type(tensor.dtype)

    def unpack(self, data: Bytes) -> None:
        """Write the bytes of a message to the tensor."""
        write(self._tensor, data)


def typed(data: Bytes, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as a flat tensor that shares their memory."""
    return torch.from_numpy(data).view(dtype)


def _check(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"a tensor on {tensor.device}: virtual ranks share this process, and compute with CPU tensors"
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"a tensor of layout {tensor.layout}: make it dense, or reduce its parts")


def name_of(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's type, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def described(tensors: Tensors) -> tuple[list[list[int]], tuple[tuple[str, Any], ...]]:
    """Return the shapes, and the properties that must be equal on all ranks: element counts and types."""
    shapes = [list(tensor.shape) for tensor in tensors]
    counts = [tensor.numel() for tensor in tensors]
    types = list(dict.fromkeys(name_of(tensor) for tensor in tensors))
    one = len(tensors) == 1
    agree = (("dtype", ", ".join(types)), ("elements", counts[0] if one else tuple(counts)))
    return shapes, agree


def nbytes_of(tensors: Tensors) -> int:
    """Return the size of tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# ----------------------------------------------------------------------------------------------------- reductions


def op_name(op: Any) -> str:
    """Return the name of a ReduceOp."""
    return next(name for name in OPS if op == getattr(ReduceOp, name))


_MERGES: dict[str, Any] = {
    "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum, "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip


def reduced(parts: list[Bytes], op: Any, dtype: torch.dtype, *, rooted: bool = False) -> Bytes:
    """Return the combination of all ranks' bytes, in new memory; `rooted`: for a reduce."""
    name = op_name(op)
    merge = _MERGES.get(name, torch.add)
    in_rings = merge in (torch.add, torch.mul) and dtype.is_floating_point
    number = dtype
    if merge is torch.add and dtype.is_complex:  # gloo adds real and imaginary parts as numbers
        in_rings, number = True, dtype.to_real()

    def merged(a: Any, b: Any, out: Any) -> Any:
        merge(typed(a, number), typed(b, number), out=typed(out, number))
        return out

    if not parts[0].size:
        return parts[0].copy()
    with torch.no_grad(), _disable_current_modes():
        if name == "PREMUL_SUM":
            _, factor = op.__getstate__()  # torch before 2.13 has no `op.factor`
            parts = [typed(part, dtype).mul(factor).view(torch.uint8).numpy() for part in parts]
        found: Bytes
        if in_rings:
            block = ring_block(len(parts[0]), number.itemsize, len(parts), rooted=rooted)
            found = reduce_ring(parts, merged, block)
        else:
            found = ops.reduce_tree(parts, merged)
        if name == "AVG":
            whole = typed(found, dtype)
            whole.div_(
                len(parts), rounding_mode=None if whole.is_floating_point() or whole.is_complex() else "trunc"
            )
    return found


def sum_sparse(parts: Sequence[Bytes], like: torch.Tensor) -> torch.Tensor:
    """Return the sum of sparse tensors of one shape, each given as the bytes of its indices and values."""
    one = like.coalesce()
    row = one.values().element_size() * math.prod(one.values().shape[1:])
    total = torch.zeros_like(like)
    for part in parts:
        count = len(part) // (8 * one.sparse_dim() + row)
        cut = 8 * one.sparse_dim() * count
        indices = typed(part[:cut].copy(), torch.int64).view(one.sparse_dim(), count)
        values = typed(part[cut:].copy(), like.dtype).view(count, *one.values().shape[1:])
        total = total + torch.sparse_coo_tensor(indices, values, like.shape)
    return total.coalesce()


def combination(
    op: Any, dtypes: Sequence[torch.dtype], *, rooted: bool = False
) -> Callable[[CollectiveInstance, int], list[Bytes]]:
    """Return the outcome for several tensors: the combination of each, computed once for all ranks."""

    def make(instance: CollectiveInstance) -> list[Bytes]:
        columns = zip(*(_listed(part) for part in instance.parts()), strict=True)
        pairs = zip(columns, dtypes, strict=True)
        return [reduced(list(column), op, dtype, rooted=rooted) for column, dtype in pairs]

    return lambda instance, rank: instance.shared(lambda: make(instance))


def _listed(part: Any) -> list[Bytes]:
    return part if isinstance(part, list) else [part]


def scattered(
    op: Any, dtypes: Sequence[torch.dtype], *, apart: bool
) -> Callable[[CollectiveInstance, int], list[Bytes]]:
    """Return the outcome of a reduce-scatter: a rank's block of the combination of each row of blocks.

    A contribution has the blocks of the first row for all ranks, then the blocks of the second row. Blocks are
    combined separately (`apart`), or the row as a whole: gloo does either, depending on the call.
    """

    def make(instance: CollectiveInstance) -> list[Bytes]:
        size = len(instance.members)
        blocks = list(zip(*instance.parts(), strict=True))  # by row and rank: the blocks of all contributions
        if apart:
            kinds = [dtype for dtype in dtypes for _ in range(size)]
            return [reduced(list(block), op, dtype) for block, dtype in zip(blocks, kinds, strict=True)]
        found: list[Bytes] = []
        for at, dtype in enumerate(dtypes):
            rows = [np.concatenate(part[at * size : (at + 1) * size]) for part in instance.parts()]
            found += np.split(reduced(rows, op, dtype), size)
        return found

    return lambda instance, rank: instance.shared(lambda: make(instance))[rank :: len(instance.members)]
