"""One flat vector of all averaged tensors, and how it is cut into parts.

This room knows tensors and numbers; no rank's clock, no communicator. Tensors of one dtype lie end to end in one
segment. Halves travel and sum in float32, whole numbers and truth values in float64 (then rounded), complex numbers
as pairs. Positions count elements over all segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spawnsim.errors import ParameterError
from spawnsim.policies.arithmetic import add, sum_dtype
from spawnsim.policies.codecs import Codec, NoCompression
from spawnsim.policies.groups.keys import digest

Values = NDArray[Any]
HALF = (
    0.5 + 1e-6
)  # a little more: a mean of exactly a half is the same on all ranks, whichever way it was summed


@dataclass(frozen=True, slots=True)
class Segment:
    """All tensors of one dtype: where they begin in the vector, how many elements, summed in which type."""

    start: int
    count: int
    wide: np.dtype[Any]
    compressible: bool


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of the vector that travels as one message: elements `start` to `stop` of a segment."""

    segment: int
    start: int
    stop: int


class Vector:
    """The averaged tensors of one rank, live: read as flat arrays, changed by adding deltas."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        if not tensors:
            raise ParameterError("averaged_tensors is empty: give at least one tensor")
        self.tensors = [t.detach() for t in tensors]
        real = [torch.view_as_real(t) if t.is_complex() else t for t in self.tensors]
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in real:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        self._groups = list(by_dtype.values())
        self.segments: list[Segment] = []
        for group in self._groups:
            wide = sum_dtype(group[0].dtype)
            self.segments.append(
                Segment(
                    self.count,
                    sum(tensor.numel() for tensor in group),
                    np.dtype("float64" if wide == torch.float64 else "float32"),
                    group[0].dtype.is_floating_point,
                )
            )
        shapes = [(str(t.dtype), tuple(t.shape)) for t in self.tensors]
        self.schema = digest(repr(shapes))

    @property
    def count(self) -> int:
        """Elements in all segments."""
        return sum(segment.count for segment in self.segments)

    def read(self) -> list[Values]:
        """Return a copy of each segment, shape (count,), in its wide type."""
        copies = []
        for group, segment in zip(self._groups, self.segments, strict=True):
            flat = np.empty(segment.count, segment.wide)
            at = 0
            for tensor in group:
                torch.from_numpy(flat[at : at + tensor.numel()]).copy_(tensor.reshape(-1))
                at += tensor.numel()
            copies.append(flat)
        return copies

    def add(self, deltas: Sequence[Values]) -> None:
        """Add deltas of the segments' shapes to the tensors, in place; whole numbers round to the nearest."""
        for group, delta in zip(self._groups, deltas, strict=True):
            at = 0
            for tensor in group:
                drift = torch.from_numpy(delta[at : at + tensor.numel()]).reshape(tensor.shape)
                tensor.copy_(_sum(tensor.cpu(), drift))
                at += tensor.numel()

    def zeros(self) -> list[Values]:
        """Return zeros of the segments' shapes."""
        return [np.zeros(segment.count, segment.wide) for segment in self.segments]

    def codec(self, segment: int, codec: Codec) -> Codec:
        """Return the codec for a segment: whole numbers are not compressed."""
        return codec if self.segments[segment].compressible else NoCompression()

    def cut(self, counts: Sequence[int], codec: Codec, part_size_bytes: int) -> list[list[Part]]:
        """Return each reducer's parts: reducer i has `counts[i]` elements, in order, none in two segments."""
        cuts, begin = [], 0
        for count in counts:
            cuts.append(self._range(begin, begin + count, codec, part_size_bytes))
            begin += count
        return cuts

    def _range(self, begin: int, end: int, codec: Codec, part_size_bytes: int) -> list[Part]:
        parts = []
        for index, segment in enumerate(self.segments):
            low, high = max(begin - segment.start, 0), min(end - segment.start, segment.count)
            plain = isinstance(codec, NoCompression) or not segment.compressible
            step = max(int(part_size_bytes / (segment.wide.itemsize if plain else codec.nbytes_per_value)), 1)
            parts += [Part(index, at, min(at + step, high)) for at in range(low, high, step)]
        return parts


def _sum(value: torch.Tensor, drift: torch.Tensor) -> torch.Tensor:
    """Return value + drift; whole numbers round halves up."""
    if value.dtype.is_floating_point or value.dtype == torch.bool:
        return add(value, drift.clone())
    return torch.floor(value.double() + drift + HALF).to(value.dtype)


def average(parts: Sequence[Values], weights: Sequence[float]) -> tuple[Values, float]:
    """Return the weighted mean of equally long parts and the sum of the weights.

    Anchored at the first part, so that equal parts give exactly that part; summed in the order given. An element that
    is not finite in some part counts there with weight 0; where nobody has a finite one, the mean is NaN.
    """
    anchor, total = parts[0], float(sum(weights))
    if not total > 0:
        return anchor, 0.0
    drift = np.zeros_like(anchor)
    with np.errstate(invalid="ignore", over="ignore"):
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            drift += (part - anchor) * anchor.dtype.type(weight / total)
        mean = anchor + drift
    if np.isfinite(mean).all():
        return mean, total
    return _finite_average(parts, weights), total


def _finite_average(parts: Sequence[Values], weights: Sequence[float]) -> Values:
    stacked = np.stack(parts)
    finite = np.isfinite(stacked)
    shares = finite * np.asarray(weights, stacked.dtype)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Values = (np.where(finite, stacked, 0) * shares).sum(axis=0) / shares.sum(axis=0)
    return mean


def difference(mean: Values, part: Values) -> Values:
    """Return mean − part; 0 where either is not finite: nothing mends such a value by addition."""
    with np.errstate(invalid="ignore"):
        delta = mean - part
    return delta if np.isfinite(delta).all() else np.nan_to_num(delta, nan=0.0, posinf=0.0, neginf=0.0)
