"""The arithmetic of states: flat memory, numbers that are not finite, blend, delta rule, momentum.

Sums are anchored (`a + Σ w (x - a)`), so equal inputs give a bit-identical output. Half precision is summed in
float32, integers in float64, and rounded once. Large tensors are processed piece by piece, so that intermediate
results stay in the cache instead of fresh memory: two to four times faster, with the same bits. NaN and infinities are
detected at the cost of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from spawnsim.phantoms import PhantomArray

CPU, META = torch.device("cpu"), torch.device("meta")


def without_data(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the meta device: it has a shape and a dtype, but no data."""
    return tensor.device == META


def new_buffer(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a new flat buffer; on the CPU from numpy, which uses huge pages where possible."""
    if device.type == "cpu":
        return torch.from_numpy(np.empty(count * dtype.itemsize, np.uint8)).view(dtype)
    return torch.empty(count, dtype=dtype, device=device)


def as_memory(tensor: torch.Tensor) -> Any:
    """Return a tensor in main memory as an array: numpy has less overhead than torch, which matters for small ones."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def new_memory(nbytes: int) -> Any:
    """Return bytes in main memory."""
    return np.empty(nbytes, np.uint8)


def phantom_memory(nbytes: int) -> Any:
    """Return bytes without memory."""
    return PhantomArray(nbytes, np.uint8)


def as_tensor(array: Any) -> torch.Tensor:
    """Return an array as a tensor over the same memory; a phantom as a tensor on the meta device."""
    if isinstance(array, PhantomArray):
        return torch.empty(array.nbytes, dtype=torch.uint8, device=META)
    return torch.from_numpy(array)


def as_one_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensors as one flat view if they lie end to end in one storage, in this order; else None."""
    first, at = tensors[0], tensors[0].storage_offset()
    start = first.untyped_storage().data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == start and tensor.storage_offset() == at
        if not (same and tensor.dtype == first.dtype and tensor.is_contiguous()):
            return None
        at += tensor.numel()
    return first.as_strided((at - first.storage_offset(),), (1,))


def surely_finite(tensor: torch.Tensor) -> bool:
    """Return whether the sum proves that all values are finite; False also if the sum itself overflowed."""
    if without_data(tensor):  # no data
        return True
    total = tensor.sum().item()
    return math.isfinite(total.real) and math.isfinite(total.imag)


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers of a floating-point tensor are finite."""
    return surely_finite(tensor) or bool(torch.isfinite(tensor).all())


PIECE = 1 << 18  # elements: an intermediate result of this size fits in the L2 cache


def _piecewise(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Return an elementwise function of equally shaped tensors, in the dtype of the first, piece by piece."""
    first = tensors[0]
    if first.numel() <= PIECE or any(tensor.device.type != "cpu" for tensor in tensors):
        return function(*tensors)
    # Pieces of an elementwise function have the same bits. A piece stays in the cache between two operations, without
    # fresh memory. An accelerator gains nothing from this cache, and each kernel launch costs time.
    flats = [tensor.reshape(-1) for tensor in tensors]
    result = new_buffer(first.numel(), first.dtype, first.device)
    for at in range(0, first.numel(), PIECE):
        result[at : at + PIECE] = function(*(flat[at : at + PIECE] for flat in flats))
    return result.view(first.shape)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of `dtype` are summed: at least float32; float64 for integers."""
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    if not dtype.is_floating_point or dtype == torch.float64:
        return torch.float64
    return torch.float32


def _difference(value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Return value - anchor, and 0 where they are equal, such as for two infinities of a mask."""
    difference = value - anchor
    near = difference.device.type == "cpu"  # on other devices the check would wait
    if not (near and surely_finite(difference)):
        difference.masked_fill_(value == anchor, 0)
    return difference


def is_whole(total: float) -> bool:
    """Return whether no weight is missing from this sum: it is 1 but for rounding errors.

    Callers do not divide by such a sum, so that weights that were divided once and recorded keep their bits.
    """
    return math.isclose(total, 1, rel_tol=1e-12)


def blend(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted mean of equally shaped tensors in the dtype of the first; integers are rounded.

    Weights that do not sum to 1 (a donor lacks the tensor) are divided by their sum.
    """
    anchor, total = values[0], float(sum(weights))
    if len(values) == 1 or not total > 0:
        return anchor.clone()
    if is_whole(total):
        total = 1.0
    return _piecewise(lambda *pieces: _blended(pieces, [weight / total for weight in weights]), *values)


def _blended(values: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    # a + Σ w (x - a) instead of Σ w x: if all x are equal, the drift is exactly 0, and the mean is that value to the
    # bit, for any weights. Σ w x of equal values has a rounding error in each mixture.
    wide = sum_dtype(values[0].dtype)
    base = values[0].to(wide)
    near = base.device.type == "cpu"
    drift = _drift(base, values, shares, torch.sub if near else _difference)
    # A finite sum has finite terms, so one check is enough. The slower difference is used only for non-finite sums.
    if near and not surely_finite(drift):
        drift = _drift(base, values, shares, _difference)
    return add(values[0], drift)


def _drift(
    base: torch.Tensor,
    values: Sequence[torch.Tensor],
    shares: Sequence[float],
    minus: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Return Σ w (x - a) over all values but the first, whose wide form is `base`."""
    drift = torch.zeros_like(base)
    for value, share in zip(values[1:], shares[1:], strict=True):
        if share:
            drift += minus(value.to(base.dtype), base).mul_(share)
    return drift


def accumulate(drift: torch.Tensor, value: torch.Tensor, anchor: torch.Tensor, share: float) -> None:
    """Add share·(value - anchor) to a contiguous drift of the summing dtype: one step of `blend`, to the bit."""
    if not share:
        return
    pieces: list[Sequence[torch.Tensor]] = [[each.reshape(-1)] for each in (drift, value, anchor)]
    if all(each[0].device.type == "cpu" for each in pieces):
        pieces = [torch.split(each[0], PIECE) for each in pieces]  # as in `_piecewise`
    for to, new, base in zip(*pieces, strict=True):
        to += _difference(new.to(to.dtype), base.to(to.dtype)).mul_(share)


def add(anchor: torch.Tensor, drift: torch.Tensor) -> torch.Tensor:
    """Return anchor + drift in the anchor's dtype, and overwrite drift; integers and booleans are rounded."""
    if anchor.dtype == torch.bool:
        return drift.add_(anchor) > 0.5
    if anchor.dtype.is_floating_point or anchor.dtype.is_complex:
        return drift.add_(anchor).to(anchor.dtype)
    return anchor + drift.round_().to(anchor.dtype)


def _zero_where_not_finite(drift: torch.Tensor) -> torch.Tensor:
    """Return a drift with 0 in place of non-finite values, such as differences of two equal infinities."""
    if drift.is_complex():
        return torch.where(torch.isfinite(drift), drift, torch.zeros((), dtype=drift.dtype))
    return drift.nan_to_num_(0.0, 0.0, 0.0)


def with_delta(mixed: torch.Tensor, now: torch.Tensor, then: torch.Tensor) -> torch.Tensor:
    """Return mixed + (now - then): steps taken since the request to the donors are preserved.

    Where this rank's steps are not finite (a diverged model), the result is the mixture alone.
    """
    return _piecewise(_stepped, mixed, now, then)


def _stepped(mixed: torch.Tensor, now: torch.Tensor, then: torch.Tensor) -> torch.Tensor:
    wide = sum_dtype(mixed.dtype)
    return add(mixed, _zero_where_not_finite(now.to(wide) - then.to(wide)))


def with_momentum(new: torch.Tensor, own: torch.Tensor, momentum: float) -> torch.Tensor:
    """Return m·own + (1 - m)·new, or the new value where this rank's own value is not finite."""
    if momentum == 0 or not (new.dtype.is_floating_point or new.dtype.is_complex):
        return new
    return _piecewise(lambda new, own: _kept(new, own, momentum), new, own)


def _kept(new: torch.Tensor, own: torch.Tensor, momentum: float) -> torch.Tensor:
    wide = sum_dtype(new.dtype)
    return add(new, _zero_where_not_finite((own.to(wide) - new.to(wide)).mul_(momentum)))
