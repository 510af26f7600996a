"""Codecs of float vectors, and the choice of a codec per tensor: one for all, one for each, or by size or role.

A codec is any object with `nbytes_per_value`, `encode(values) -> bytes` and `decode(bytes, count) -> float32 values`.
Encoding is deterministic, and a vector of equal values is decoded exactly (especially zeros: peers that agree exchange
deltas of zero). Vectors with non-finite values travel unchanged: see `pack`. Codecs that drop values are only for
differences: see `difference_codecs`. Pure functions of numpy arrays and of descriptions of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from spawnsim.errors import ParameterError
from spawnsim.phantoms import PhantomArray, is_phantom

Bytes = NDArray[np.uint8]
Floats = NDArray[Any]  # float32 or float64
Float32s = NDArray[np.float32]


class Codec(Protocol):
    """Encodes a finite float vector to bytes, and decodes bytes to a vector."""

    @property
    def nbytes_per_value(self) -> float:
        """Approximate size of one value on the wire."""

    def encode(self, values: Floats) -> Bytes:
        """Return the encoding of a vector of shape (n,)."""

    def decode(self, body: Bytes, count: int) -> Float32s:
        """Return the `count` values that the bytes encode."""


@dataclass(frozen=True, slots=True)
class NoCompression:
    """Values travel unchanged, in their own type."""

    nbytes_per_value: float = 4.0

    def encode(self, values: Floats) -> Bytes:
        return as_bytes(values)

    def decode(self, body: Bytes, count: int) -> Float32s:
        return body.view(np.float32)[:count]


@dataclass(frozen=True, slots=True)
class Float16:
    """Half precision; values beyond its range are clipped to ±65504."""

    nbytes_per_value: float = 2.0

    def encode(self, values: Floats) -> Bytes:
        return as_bytes(np.clip(values, -65504, 65504).astype(np.float16))

    def decode(self, body: Bytes, count: int) -> Float32s:
        return body.view(np.float16)[:count].astype(np.float32)


@dataclass(frozen=True, slots=True)
class Scaled16Bit:
    """Half precision of (x − mean)/std: preserves small differences far from zero, and large values."""

    nbytes_per_value: float = 2.0

    def encode(self, values: Floats) -> Bytes:
        mean, std = _moments(values)
        # Equal values have no deviation: a division by 0 would give NaN instead of the exact values.
        scaled = np.zeros(values.size) if std == 0 else (values.astype(np.float64) - mean) / std
        return np.concatenate([as_bytes(np.asarray([mean, std])), as_bytes(scaled.astype(np.float16))])

    def decode(self, body: Bytes, count: int) -> Float32s:
        mean, std = body[:16].view(np.float64)
        scaled = body[16:].view(np.float16)[:count].astype(np.float64)
        return np.asarray(scaled * std + mean, dtype=np.float32)


class _Codebook:
    """The means of 256 buckets, in float32, followed by the bucket of each value."""

    __slots__ = ()

    @staticmethod
    def _coded(codes: Bytes, values: Floats) -> Bytes:
        filled = np.bincount(codes, minlength=256)
        book = np.bincount(codes, weights=values, minlength=256) / np.maximum(filled, 1)
        return np.concatenate([as_bytes(book.astype(np.float32)), codes])

    def decode(self, body: Bytes, count: int) -> Float32s:
        return np.asarray(body[:1024].view(np.float32)[body[1024 : 1024 + count]])


@dataclass(frozen=True, slots=True)
class Uniform8Bit(_Codebook):
    """256 equal buckets over `sigmas` standard deviations; each value is decoded as the mean of its bucket."""

    sigmas: float = 6.0
    nbytes_per_value: float = 1.0

    def __post_init__(self) -> None:
        if not self.sigmas > 0:
            raise ParameterError(f"sigmas={self.sigmas!r}: give a number above 0")

    def encode(self, values: Floats) -> Bytes:
        mean, std = _moments(values)
        scale = self.sigmas * std / 256
        if scale == 0:
            # One bucket whose mean is the value: equal values are decoded exactly.
            return self._coded(np.zeros(values.size, np.uint8), values)
        codes = np.clip(np.rint((values - mean) / scale) + 128, 0, 255).astype(np.uint8)
        return self._coded(codes, values)


@dataclass(frozen=True, slots=True)
class Quantile8Bit(_Codebook):
    """256 buckets with about equally many values; each value is decoded as the mean of its bucket."""

    nbytes_per_value: float = 1.0

    def encode(self, values: Floats) -> Bytes:
        edges = np.quantile(values, np.arange(1, 256) / 256) if values.size else np.empty(0)
        return self._coded(np.searchsorted(edges, values, side="right").astype(np.uint8), values)


@dataclass(frozen=True, slots=True)
class Blockwise8Bit:
    """Blocks of `block` values, each scaled by its largest magnitude to integers from −127 to 127."""

    block: int = 4096
    nbytes_per_value: float = 1.0

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ParameterError(f"block={self.block!r}: give a whole number of at least 1")

    def encode(self, values: Floats) -> Bytes:
        padded = chunked(values, self.block)
        # The zeros of the padding never exceed a block's largest magnitude.
        largest = np.abs(padded).max(axis=1)
        scaled = padded * (127 / np.where(largest > 0, largest, 1))[:, None]
        codes = np.rint(scaled).astype(np.int8).reshape(-1)[: values.size]
        return np.concatenate([as_bytes(largest), codes.view(np.uint8)])

    def decode(self, body: Bytes, count: int) -> Float32s:
        blocks = -(-count // self.block)
        largest = body[: 8 * blocks].view(np.float64)
        codes = body[8 * blocks :].view(np.int8)[:count].astype(np.float64)
        return np.asarray(codes / 127 * np.repeat(largest, self.block)[:count], dtype=np.float32)


NAMED: dict[str, Codec] = {
    "none": NoCompression(), "float16": Float16(), "scaled16": Scaled16Bit(), "uniform8": Uniform8Bit(),
    "quantile8": Quantile8Bit(), "blockwise8": Blockwise8Bit(),
}  # fmt: skip


def as_codec(compression: str | Codec | None) -> Codec:
    """Return the codec with a name; return a codec unchanged; None means "none"."""
    if compression is None:
        return NAMED["none"]
    if not isinstance(compression, str):
        return compression
    if compression not in NAMED:
        raise ParameterError(
            f"compression={compression!r}: choose one of {', '.join(NAMED)}, or give a codec"
        )
    return NAMED[compression]


def pack(codec: Codec, values: Floats) -> tuple[bool, Bytes]:
    """Return (raw, bytes): compressed, or raw if that is not smaller or a value is not finite."""
    # Codecs scale by means and maxima, which would spread one NaN to all values.
    if isinstance(codec, NoCompression) or not np.isfinite(values).all():
        return True, as_bytes(values)
    packed = phantom_bytes(codec, values.size) if is_phantom(values) else codec.encode(values)
    return (False, packed) if packed.size < values.nbytes else (True, as_bytes(values))


def unpack(codec: Codec, body: Bytes, *, raw: bool, dtype: np.dtype[Any], count: int) -> Floats:
    """Return the `count` values of a body from `pack`, in `dtype`, the dtype of the packed values.

    Raises ValueError if the body is too short.
    """
    if is_phantom(body) and not raw:
        return PhantomArray(count, dtype)  # type: ignore[return-value]
    values = body.view(dtype)[:count] if raw else codec.decode(body, count)
    # Slices do not fail: without this check, a short body would give fewer values.
    if values.size != count:
        raise ValueError(f"{body.size} bytes hold {values.size} of {count} values")
    return values.astype(dtype, copy=False)


def phantom_bytes(codec: Codec, count: int) -> Any:
    """Return the phantom of an encoded vector without data."""
    return PhantomArray(encoded_nbytes(codec, count), np.uint8)


def encoded_nbytes(codec: Any, count: int) -> int:
    """Return the encoded size of `count` values, from the codec's own `encoded_nbytes` if it has one."""
    own = getattr(codec, "encoded_nbytes", None)
    return int(own(count)) if own is not None else _encoded_nbytes(codec, count)


@lru_cache(maxsize=4096)
def _encoded_nbytes(codec: Any, count: int) -> int:
    return int(codec.encode(np.zeros(count, np.float32)).nbytes)


def as_bytes(values: NDArray[Any]) -> Bytes:
    """Return the elements of an array, in order, as bytes."""
    if is_phantom(values):
        return values.view(np.uint8)
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1)


def chunked(values: Floats, chunk: int) -> NDArray[np.float64]:
    """Return a vector as rows of `chunk` values, padded with zeros."""
    rows = np.zeros((-(-values.size // chunk), chunk))
    rows.reshape(-1)[: values.size] = values
    return rows


def _moments(values: Floats) -> tuple[float, float]:
    """Return mean and standard deviation; exactly the value and 0 if all values are equal."""
    if not values.size or (values == values[0]).all():
        return (float(values[0]) if values.size else 0.0), 0.0
    wide = values.astype(np.float64)
    return float(wide.mean()), float(wide.std())


class TensorRole(Enum):
    """Role of a tensor in its model."""

    ACTIVATION = "activation"
    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    UNSPECIFIED = "unspecified"


@dataclass(frozen=True, slots=True)
class CompressionInfo:
    """The properties of a tensor on which its compression may depend: name or place, shape, dtype and role."""

    key: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: TensorRole = TensorRole.UNSPECIFIED

    @classmethod
    def from_tensor(
        cls, tensor: torch.Tensor, key: Any = None, role: TensorRole = TensorRole.UNSPECIFIED
    ) -> CompressionInfo:
        return cls(key, tuple(tensor.shape), tensor.dtype, role)

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()


@runtime_checkable
class CodecChoice(Protocol):
    """Chooses a codec for each tensor."""

    def codec_for(self, info: CompressionInfo) -> Codec:
        """Return the codec for a tensor."""


Choice = str | Codec | CodecChoice | None
Choices = Choice | Sequence[Choice] | Mapping[Any, Choice]


def _codec_of(choice: Choice, info: CompressionInfo) -> Codec:
    return choice.codec_for(info) if isinstance(choice, CodecChoice) else as_codec(choice)


def check_codec(choice: object) -> None:
    """Raise `ParameterError` unless `choice` is the name of a codec, a codec or a `CodecChoice`."""
    is_codec = all(hasattr(choice, name) for name in ("encode", "decode", "nbytes_per_value"))
    if choice is None or isinstance(choice, str):
        as_codec(choice)
    elif isinstance(choice, type) or not (isinstance(choice, CodecChoice) or is_codec):
        raise ParameterError(
            f"compression={choice!r}: give the name of a codec, a codec, or an object with codec_for(info)"
        )


@dataclass(frozen=True, slots=True)
class SizeAdaptiveCompression:
    """`less` for tensors of fewer than `threshold` elements, `greater_equal` for all larger ones."""

    threshold: int
    less: Choice
    greater_equal: Choice

    def __post_init__(self) -> None:
        check_codec(self.less)
        check_codec(self.greater_equal)

    def codec_for(self, info: CompressionInfo) -> Codec:
        return _codec_of(self.greater_equal if info.size >= self.threshold else self.less, info)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleAdaptiveCompression:
    """A codec by the role of a tensor; omitted roles, and tensors without a role, use `default`."""

    activation: Choice = None
    parameter: Choice = None
    gradient: Choice = None
    optimizer: Choice = None
    default: Choice = "none"

    def __post_init__(self) -> None:
        for choice in (self.activation, self.parameter, self.gradient, self.optimizer, self.default):
            check_codec(choice)

    def codec_for(self, info: CompressionInfo) -> Codec:
        given = None if info.role is TensorRole.UNSPECIFIED else getattr(self, info.role.value)
        return _codec_of(self.default if given is None else given, info)


@dataclass(frozen=True, slots=True)
class PerTensorCompression:
    """A codec for each tensor: a sequence in the tensors' order, or a mapping from their keys."""

    tensor_compressions: Sequence[Choice] | Mapping[Any, Choice]

    def __post_init__(self) -> None:
        given = self.tensor_compressions
        for choice in given.values() if isinstance(given, Mapping) else given:
            check_codec(choice)

    def codec_for(self, info: CompressionInfo) -> Codec:
        try:
            return _codec_of(self.tensor_compressions[info.key], info)
        except (KeyError, IndexError, TypeError):
            raise ParameterError(f"compression: nothing is given for the tensor {info.key!r}") from None


def as_compression(given: Choices) -> Choice:
    """Return the user's choice as one object: sequences and mappings become `PerTensorCompression`."""
    if isinstance(given, (list, tuple, Mapping)):
        return PerTensorCompression(given)
    check_codec(given)
    return given  # type: ignore[return-value]


def check_infos(infos: Sequence[CompressionInfo], tensors: Sequence[torch.Tensor]) -> None:
    """Raise `ParameterError` if the descriptions do not match the tensors."""
    if [tuple(info.shape) for info in infos] != [tuple(tensor.shape) for tensor in tensors]:
        raise ParameterError(
            f"tensor_infos describes {len(infos)} tensors, not these {len(tensors)}, in this order"
        )


def infos_by_place(tensors: Sequence[torch.Tensor]) -> list[CompressionInfo]:
    """Return descriptions of tensors with their indices as keys."""
    return [CompressionInfo.from_tensor(tensor, key=index) for index, tensor in enumerate(tensors)]


def codecs_for(given: Choices, infos: Sequence[CompressionInfo]) -> list[Codec]:
    """Return each tensor's codec. A sequence must have one for each tensor."""
    choice = as_compression(given)
    if not isinstance(given, (list, tuple)):
        return [_codec_of(choice, info) for info in infos]
    if len(given) != len(infos):
        raise ParameterError(
            f"compression names {len(given)} codecs for {len(infos)} tensors: give one for each"
        )
    return [_codec_of(each, info) for each, info in zip(given, infos, strict=True)]
