"""Codecs of differences: few bits per value or few of many values, and error feedback to the next vector.

For pseudo-gradients and similar vectors, whose values may change as long as nothing is lost in the long run: see
`ErrorFeedback`. `Codec` defines the interface. Pure functions of numpy arrays, except `ErrorFeedback`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError
from spawnsim.phantoms import is_phantom
from spawnsim.policies.state.codecs import (
    Bytes,
    Codec,
    Float32s,
    Floats,
    as_bytes,
    as_codec,
    chunked,
    encoded_nbytes,
    phantom_bytes,
)
from spawnsim.random import WORLD, generator


def _pack_bits(codes: NDArray[Any], bits: int) -> Bytes:
    """Return integers below 2^bits, packed with `bits` bits each, the lowest bit first."""
    planes = (codes.astype(np.uint32)[:, None] >> np.arange(bits, dtype=np.uint32)) & 1
    return np.packbits(planes.astype(np.uint8).reshape(-1))


def _unpack_bits(body: Bytes, bits: int, count: int) -> NDArray[np.int64]:
    planes = np.unpackbits(body, count=count * bits).reshape(count, bits).astype(np.int64)
    return np.asarray(planes @ (1 << np.arange(bits)))


@dataclass(frozen=True, slots=True)
class LowBit:
    """A sign and a power of two per value, 1 to 4 bits in total, relative to the largest magnitude of its block.

    4 bits (E3M0, in which Streaming DiLoCo sends outer gradients): 0 and ±2^-k for k from 0 to 6. 3 bits: 0, ±1, ±1/2
    and ±1/4; 2 bits: 0 and ±1; 1 bit: the sign, times the mean magnitude of the block (0 counts as positive). Values
    are rounded to the nearest of these.

    Each `block` of values has its own scale (4 bytes).
    """

    bits: int = 4
    block: int = 4096

    def __post_init__(self) -> None:
        if self.bits not in (1, 2, 3, 4) or self.block < 1:
            raise ParameterError(
                f"LowBit({self.bits!r}, {self.block!r}): give 1 to 4 bits, and a block of at least 1"
            )

    @property
    def nbytes_per_value(self) -> float:
        return self.bits / 8 + 4 / self.block

    def encoded_nbytes(self, count: int) -> int:
        return 4 * -(-count // self.block) + -(-count * self.bits // 8)

    @property
    def _levels(self) -> NDArray[np.float64]:
        if self.bits == 1:
            return np.ones(1)
        return np.concatenate([[0.0], 2.0 ** np.arange(2 - 2 ** (self.bits - 1), 1)])

    def encode(self, values: Floats) -> Bytes:
        rows = chunked(values, self.block)
        magnitudes, levels = np.abs(rows), self._levels
        if self.bits == 1:
            filled = np.full(len(rows), float(self.block))
            filled[-1:] -= rows.size - values.size
            # Anchored, so that equal magnitudes are decoded exactly.
            first = magnitudes[:, :1]
            inside = np.arange(rows.size).reshape(rows.shape) < values.size
            scale = first[:, 0] + ((magnitudes - first) * inside).sum(axis=1) / filled
        else:
            scale = magnitudes.max(axis=1, initial=0)
        scale = scale.astype(np.float32)
        relative = magnitudes / np.where(scale > 0, scale, 1).astype(np.float64)[:, None]
        codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, relative, side="right")
        codes = (codes + len(levels) * (rows < 0)).reshape(-1)[: values.size]
        return np.concatenate([as_bytes(scale), _pack_bits(codes, self.bits)])

    def decode(self, body: Bytes, count: int) -> Float32s:
        blocks = -(-count // self.block)
        scale = np.repeat(body[: 4 * blocks].view(np.float32), self.block)[:count]
        levels = self._levels
        codes = _unpack_bits(body[4 * blocks :], self.bits, count)
        return np.concatenate([levels, -levels]).astype(np.float32)[codes] * scale


@dataclass(frozen=True, slots=True)
class TopK:
    """The values of largest magnitude of each chunk, with their places; all other values are decoded as 0.

    For differences with error feedback (`ErrorFeedback`), not for weights. Ties go to the first.
    """

    chunk: int = 4096
    keep: int = 64  # values per chunk
    values: str | Codec = "none"  # codec of the kept values, as one vector; "none": float32

    def __post_init__(self) -> None:
        if not 1 <= self.keep <= self.chunk:
            raise ParameterError(f"TopK(chunk={self.chunk!r}, keep={self.keep!r}): give 1 <= keep <= chunk")
        as_codec(self.values)

    @property
    def _place_bits(self) -> int:
        return max((self.chunk - 1).bit_length(), 1)

    @property
    def nbytes_per_value(self) -> float:
        return self.keep / self.chunk * (self._place_bits / 8 + as_codec(self.values).nbytes_per_value)

    def encoded_nbytes(self, count: int) -> int:
        kept = -(-count // self.chunk) * self.keep
        return -(-kept * self._place_bits // 8) + encoded_nbytes(as_codec(self.values), kept)

    def encode(self, values: Floats) -> Bytes:
        rows = chunked(values, self.chunk)
        places = np.sort(np.argsort(-np.abs(rows), axis=1, kind="stable")[:, : self.keep], axis=1)
        kept = np.take_along_axis(rows, places, axis=1).reshape(-1).astype(np.float32)
        return np.concatenate(
            [_pack_bits(places.reshape(-1), self._place_bits), as_codec(self.values).encode(kept)]
        )

    def decode(self, body: Bytes, count: int) -> Float32s:
        rows = np.zeros((-(-count // self.chunk), self.chunk), np.float32)
        kept = len(rows) * self.keep
        ends = -(-kept * self._place_bits // 8)
        places = _unpack_bits(body[:ends], self._place_bits, kept).reshape(len(rows), self.keep)
        # A copy: the values may begin at any byte, but are read as aligned words.
        values = as_codec(self.values).decode(body[ends:].copy(), kept)
        np.put_along_axis(rows, places, values.reshape(places.shape), axis=1)
        return rows.reshape(-1)[:count]


@lru_cache(maxsize=8)
def cosines(length: int) -> NDArray[np.float64]:
    """Return the orthonormal DCT-II matrix for a length, shape (length, length): row k is frequency k."""
    at = np.arange(length)
    basis: NDArray[np.float64] = np.sqrt(2 / length) * np.cos(np.pi / length * np.outer(at, at + 0.5))
    basis[0] /= np.sqrt(2)
    return basis


@dataclass(frozen=True, slots=True)
class DCT:
    """Cosine coefficients of chunks, encoded by another codec; as in DeMo with `TopK` of the same chunk."""

    chunk: int = 64  # values that are transformed together
    codec: str | Codec = TopK(64, 32)  # codec of the coefficients, as one vector

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ParameterError(f"chunk={self.chunk!r}: give a whole number of at least 1")
        as_codec(self.codec)

    @property
    def nbytes_per_value(self) -> float:
        return as_codec(self.codec).nbytes_per_value

    def encoded_nbytes(self, count: int) -> int:
        return encoded_nbytes(as_codec(self.codec), -(-count // self.chunk) * self.chunk)

    def encode(self, values: Floats) -> Bytes:
        coefficients = (chunked(values, self.chunk) @ cosines(self.chunk).T).reshape(-1)
        return as_codec(self.codec).encode(coefficients.astype(np.float32))

    def decode(self, body: Bytes, count: int) -> Float32s:
        rows = -(-count // self.chunk)
        coefficients = as_codec(self.codec).decode(body, rows * self.chunk).reshape(rows, self.chunk)
        return (coefficients @ cosines(self.chunk)).astype(np.float32).reshape(-1)[:count]


@dataclass(frozen=True, slots=True)
class RandomMask:
    """A random share of the values, at places equal on all ranks, which are not sent; all other values become 0.

    `seed` is the seed of the run; use a different `number` in each round.
    """

    share: float = 0.005
    seed: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ParameterError(f"share={self.share!r}: give a number above 0 and at most 1")

    @property
    def nbytes_per_value(self) -> float:
        return 4 * self.share

    def kept(self, count: int) -> int:
        """Return how many of `count` values are in a mask: at least one unless `count` is 0."""
        return max(round(self.share * count), min(count, 1))

    def places(self, count: int) -> NDArray[np.int64]:
        """Return the places of this mask in a vector of `count` values, in ascending order."""
        draw = generator(self.seed, WORLD, f"mask {self.number}")
        return np.sort(draw.choice(count, self.kept(count), replace=False))

    def encoded_nbytes(self, count: int) -> int:
        return 4 * self.kept(count)

    def encode(self, values: Floats) -> Bytes:
        return as_bytes(values[self.places(values.size)].astype(np.float32))

    def decode(self, body: Bytes, count: int) -> Float32s:
        found = np.zeros(count, np.float32)
        found[self.places(count)] = body.view(np.float32)
        return found


class ErrorFeedback:
    """Stores the encoding error of a rank's vectors, and adds it to the next vector: e ← decay·e + x; e −= sent.

    `decay` is the share of the error that is kept, from 0 (no feedback) to 1.
    """

    def __init__(self, codec: str | Codec, decay: float = 1.0) -> None:
        if not 0 <= decay <= 1:
            raise ParameterError(f"decay={decay!r}: give a number from 0 to 1")
        self.codec, self.decay = as_codec(codec), decay
        self.errors: dict[Any, Floats] = {}
        self._next: dict[Any, Floats] = {}

    def encode(self, key: Any, values: Floats) -> Bytes:
        """Return the encoding of a finite vector of shape (n,), plus the error of the earlier vectors with this key.

        The error of this vector takes effect with `commit`: a vector that did not arrive may be encoded again.
        """
        if is_phantom(values):
            return phantom_bytes(self.codec, values.size)  # type: ignore[no-any-return]
        if not self.decay:
            return self.codec.encode(values)
        error = self.errors.get(key)
        whole = values.copy() if error is None else self.decay * error + values
        body = self.codec.encode(whole)
        self._next[key] = whole - self.codec.decode(body, values.size)
        return body

    def commit(self, key: Any) -> None:
        """Record that the latest encoded vector of this key has arrived."""
        if key in self._next:
            self.errors[key] = self._next.pop(key)
