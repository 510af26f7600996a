"""One flat vector of all averaged tensors, its division into parts, and the share that each rank reduces.

Tensors of one dtype and codec lie end to end in one segment; a codec with statistics over several values encodes each
tensor separately. Half precision travels and is summed in float32, integers and booleans in float64 (then rounded),
complex numbers as pairs. Positions count elements over all segments.

The shares are the minimax partition over peers of unequal bandwidth. In a butterfly of n peers, peer i sends and
receives V·(1 + (n − 2)·w_i) when it reduces the fraction w_i, in time V·(1 + (n − 2)·w_i)/b_i. The fractions minimise
the slowest peer's time, and among all such choices the next slowest, and so on. Water-filling (`fractions`) computes
them exactly, without a linear programme.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spawnsim.errors import ParameterError
from spawnsim.phantoms import PhantomArray
from spawnsim.policies.state.arithmetic import add, new_memory, phantom_memory, sum_dtype, without_data
from spawnsim.policies.state.codecs import Bytes, Codec, Float16, NoCompression, unpack

Floats = NDArray[np.float64]


def digest(text: str) -> int:
    """Return a 63-bit number for a text, the same on every rank."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def fractions(bandwidths: Sequence[float] | Floats) -> Floats:
    """Return each peer's fraction of the vector, shape (n,), sum 1; peers of bandwidth 0 get 0."""
    given = np.asarray(bandwidths, dtype=np.float64)
    if not given.size or not (np.isfinite(given) & (given >= 0)).all() or not given.any():
        raise ParameterError(f"bandwidths {given.tolist()}: give numbers of at least 0, at least one above")
    peers = given.size
    if peers <= 2:  # all partitions take equally long: n − 2 is 0
        return np.asarray(given / given.sum())
    # With S = {i : w_i > 0} and a level x, w_i = (x·b_i − 1)/(n − 2) on S, and Σ w_i = 1 gives
    # x = (n − 2 + |S|)/Σ_S b_i. S contains the fastest peers (a peer with x·b_i ≤ 1 spends 1/b_i ≥ x although it
    # reduces nothing), so there are at most n levels to test. The sum of the fractions rises with x, so the level is
    # unique, and no choice of fractions is better: fractions within a lower level sum to less than 1.
    order = np.argsort(-given, kind="stable")
    fastest = given[order]
    levels = (peers - 2 + np.arange(1, peers + 1)) / np.cumsum(fastest)
    # The largest set whose slowest peer still gets a share.
    filled = int(np.flatnonzero(levels * fastest > 1)[-1]) + 1
    found = np.zeros(peers)
    found[order[:filled]] = (levels[filled - 1] * fastest[:filled] - 1) / (peers - 2)
    return np.asarray(found / found.sum())


def whole_shares(length: int, scores: Floats) -> list[int]:
    """Return integers that sum to `length`, in proportion to scores (the Hagenbach-Bischoff method)."""
    # Slightly below the quota, so that rounding never distributes more than `length`.
    quota = np.floor(length * scores / scores.sum() * (1 - 1e-12)).astype(np.int64)
    for _ in range(length - int(quota.sum())):
        quota[int(np.argmax(scores / (quota + 1)))] += 1
    return [int(count) for count in quota]


def element_counts(length: int, bandwidths: Sequence[float | None], min_size: int = 0) -> list[int]:
    """Return how many of `length` elements each peer reduces.

    Unknown bandwidths (None) count as the mean of the known ones above 0; a peer of bandwidth 0 reduces nothing. Peers
    with fewer than `min_size` elements get none, unless no peer has that many.
    """
    known = [rate for rate in bandwidths if rate]
    mean = sum(known) / len(known) if known else 1.0
    rates = np.asarray([mean if rate is None else rate for rate in bandwidths], dtype=np.float64)
    scores = fractions(rates)
    least = min_size / max(length, 1)
    if scores.max() >= least:
        scores[scores < least] = 0.0
    return whole_shares(length, scores)


Values = NDArray[Any]
VALUE_BY_VALUE = (NoCompression, Float16)  # codecs that encode each value by itself
# Slightly above one half: a mean of exactly one half rounds the same way on all ranks, in any order of summation.
HALF = 0.5 + 1e-6


@dataclass(frozen=True, slots=True)
class Segment:
    """Tensors of one dtype and codec: start in the vector, number of elements, dtype of sums, codec."""

    start: int
    count: int
    wide: np.dtype[Any]
    codec: Codec

    @property
    def nbytes_per_value(self) -> float:
        return self.wide.itemsize if isinstance(self.codec, NoCompression) else self.codec.nbytes_per_value


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of the vector that travels as one message: elements `start` to `stop` of a segment."""

    segment: int
    start: int
    stop: int


class Vector:
    """The averaged tensors of one rank, live: read as flat arrays, changed by adding deltas.

    `codecs`: one for each tensor; default: no compression. Integer tensors are never compressed.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], codecs: Sequence[Codec] | None = None) -> None:
        if not tensors:
            raise ParameterError("averaged_tensors is empty: give at least one tensor")
        self.tensors = [t.detach() for t in tensors]
        self._groups: list[list[torch.Tensor]] = []
        kinds: list[tuple[torch.dtype, Codec]] = []
        codecs = codecs or [NoCompression()] * len(tensors)
        for tensor, codec in zip(self.tensors, codecs, strict=True):
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            kind = real.dtype, codec if real.dtype.is_floating_point else NoCompression()
            # Codecs with statistics of the whole vector must not mix tensors of different scale.
            if not isinstance(kind[1], VALUE_BY_VALUE) or kind not in kinds:
                kinds.append(kind)
                self._groups.append([real])
            else:
                self._groups[kinds.index(kind)].append(real)
        self.segments: list[Segment] = []
        for (dtype, codec), group in zip(kinds, self._groups, strict=True):
            wide = np.dtype("float64" if sum_dtype(dtype) == torch.float64 else "float32")
            self.segments.append(Segment(self.count, sum(each.numel() for each in group), wide, codec))
        kinds_of = zip(self.tensors, codecs, strict=True)
        layout = [(str(t.dtype), tuple(t.shape), _codec_name(codec)) for t, codec in kinds_of]
        self.schema = digest(repr(layout))

    @property
    def count(self) -> int:
        return sum(segment.count for segment in self.segments)

    @property
    def allocate(self) -> Callable[[int], Bytes]:
        return phantom_memory if without_data(self.tensors[0]) else new_memory

    def read(self) -> list[Values]:
        """Return a copy of each segment, shape (count,), in its wide dtype."""
        copies: list[Values] = []
        for group, segment in zip(self._groups, self.segments, strict=True):
            if without_data(group[0]):
                copies.append(PhantomArray(segment.count, segment.wide))  # type: ignore[arg-type]
                continue
            flat = np.empty(segment.count, segment.wide)
            at = 0
            for tensor in group:
                torch.from_numpy(flat[at : at + tensor.numel()]).copy_(tensor.reshape(-1))
                at += tensor.numel()
            copies.append(flat)
        return copies

    def add(self, deltas: Sequence[Values]) -> None:
        """Add deltas of the segments' shapes to the tensors, in place; integers are rounded to the nearest."""
        for group, delta in zip(self._groups, deltas, strict=True):
            if without_data(group[0]):
                continue
            at = 0
            for tensor in group:
                drift = torch.from_numpy(delta[at : at + tensor.numel()]).reshape(tensor.shape)
                tensor.copy_(_plus_drift(tensor.cpu(), drift))
                at += tensor.numel()

    def zeros(self) -> list[Values]:
        kinds: list[Any] = [PhantomArray if without_data(group[0]) else np.zeros for group in self._groups]
        return [make(each.count, each.wide) for make, each in zip(kinds, self.segments, strict=True)]

    def unpacked(self, part: Part, raw: bool, body: Bytes) -> Values:
        """Return the values of a part that was packed with its segment's codec; ValueError if the body is too short."""
        segment = self.segments[part.segment]
        return unpack(segment.codec, body, raw=raw, dtype=segment.wide, count=part.stop - part.start)

    def cut(self, counts: Sequence[int], part_size_bytes: int) -> list[list[Part]]:
        """Return each reducer's parts: reducer i has `counts[i]` elements, in order; no part spans two segments."""
        cuts, begin = [], 0
        for count in counts:
            cuts.append(self._range(begin, begin + count, part_size_bytes))
            begin += count
        return cuts

    def _range(self, begin: int, end: int, part_size_bytes: int) -> list[Part]:
        parts = []
        for index, segment in enumerate(self.segments):
            low, high = max(begin - segment.start, 0), min(end - segment.start, segment.count)
            step = max(int(part_size_bytes / segment.nbytes_per_value), 1)
            parts += [Part(index, at, min(at + step, high)) for at in range(low, high, step)]
        return parts


def _codec_name(codec: object) -> str:
    return repr(codec) if is_dataclass(codec) else f"{type(codec).__module__}.{type(codec).__qualname__}"


def _plus_drift(value: torch.Tensor, drift: torch.Tensor) -> torch.Tensor:
    if value.dtype.is_floating_point or value.dtype == torch.bool:
        return add(value, drift.clone())
    # Integers round halves up.
    return torch.floor(value.double() + drift + HALF).to(value.dtype)


def average(parts: Sequence[Values], weights: Sequence[float]) -> tuple[Values, float]:
    """Return the weighted mean of equally long parts and the sum of the weights.

    Anchored at the first part, so that equal parts give exactly that part; summed in the given order. A non-finite
    element of a part has weight 0; where all parts are non-finite, the mean is NaN.
    """
    anchor, total = parts[0], float(sum(weights))
    if not total > 0:
        return anchor, 0.0
    drift = np.zeros_like(anchor)
    with np.errstate(invalid="ignore", over="ignore"):
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            # Differences to the anchor: equal parts give exactly zero, whatever the weights.
            drift += (part - anchor) * anchor.dtype.type(weight / total)
        mean = anchor + drift
    if np.isfinite(mean).all():
        return mean, total
    return _finite_average(parts, weights), total


# Only for non-finite means, since it copies all parts.
def _finite_average(parts: Sequence[Values], weights: Sequence[float]) -> Values:
    stacked = np.stack(parts)
    finite = np.isfinite(stacked)
    shares = finite * np.asarray(weights, stacked.dtype)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Values = (np.where(finite, stacked, 0) * shares).sum(axis=0) / shares.sum(axis=0)
    return mean


def difference(mean: Values, part: Values) -> Values:
    """Return mean − part; 0 where either is not finite: addition cannot repair such a value."""
    with np.errstate(invalid="ignore"):
        delta = mean - part
    return delta if np.isfinite(delta).all() else np.nan_to_num(delta, nan=0.0, posinf=0.0, neginf=0.0)
