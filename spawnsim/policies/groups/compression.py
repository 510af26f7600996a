"""Which codec for which tensor: one for all, one for each, or chosen by size or role.

Pure: descriptions of tensors go in, codecs (`codecs`, a room above) come out; nothing is packed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import torch

from spawnsim.errors import ParameterError
from spawnsim.policies.codecs import Codec, as_codec


class TensorRole(Enum):
    """What a tensor is to its model."""

    ACTIVATION = "activation"
    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    UNSPECIFIED = "unspecified"


@dataclass(frozen=True, slots=True)
class CompressionInfo:
    """A tensor, as far as its compression may depend on it: its name or place, shape, dtype and role."""

    key: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: TensorRole = TensorRole.UNSPECIFIED

    @classmethod
    def from_tensor(
        cls, tensor: torch.Tensor, key: Any = None, role: TensorRole = TensorRole.UNSPECIFIED
    ) -> CompressionInfo:
        """Return the description of a tensor."""
        return cls(key, tuple(tensor.shape), tensor.dtype, role)

    @property
    def size(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


@runtime_checkable
class Compression(Protocol):
    """Chooses a codec for each tensor."""

    def codec_for(self, info: CompressionInfo) -> Codec:
        """Return the codec for a tensor."""


Choice = str | Codec | Compression | None
Choices = Choice | Sequence[Choice] | Mapping[Any, Choice]


def _codec(choice: Choice, info: CompressionInfo) -> Codec:
    return choice.codec_for(info) if isinstance(choice, Compression) else as_codec(choice)


def _is_codec(choice: object) -> bool:
    return all(hasattr(choice, name) for name in ("encode", "decode", "nbytes_per_value"))


def check_choice(choice: object) -> None:
    """Raise `ParameterError` if this is no way to compress."""
    if choice is None or isinstance(choice, str):
        as_codec(choice)
    elif isinstance(choice, type) or not (isinstance(choice, Compression) or _is_codec(choice)):
        raise ParameterError(
            f"compression={choice!r}: give the name of a codec, a codec, or an object with codec_for(info)"
        )


@dataclass(frozen=True, slots=True)
class SizeAdaptiveCompression:
    """One way for tensors of fewer than `threshold` elements, another for the others."""

    threshold: int
    less: Choice
    greater_equal: Choice

    def __post_init__(self) -> None:
        check_choice(self.less)
        check_choice(self.greater_equal)

    def codec_for(self, info: CompressionInfo) -> Codec:
        """Return the codec for a tensor of this size."""
        return _codec(self.greater_equal if info.size >= self.threshold else self.less, info)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleAdaptiveCompression:
    """By the role of a tensor; roles that are not given, and tensors without a role, take `default`."""

    activation: Choice = None
    parameter: Choice = None
    gradient: Choice = None
    optimizer: Choice = None
    default: Choice = "none"

    def __post_init__(self) -> None:
        for choice in (self.activation, self.parameter, self.gradient, self.optimizer, self.default):
            check_choice(choice)

    def codec_for(self, info: CompressionInfo) -> Codec:
        """Return the codec for a tensor of this role."""
        given = None if info.role is TensorRole.UNSPECIFIED else getattr(self, info.role.value)
        return _codec(self.default if given is None else given, info)


@dataclass(frozen=True, slots=True)
class PerTensorCompression:
    """One way for each tensor: a sequence in the tensors' order, or a mapping from their keys."""

    tensor_compressions: Sequence[Choice] | Mapping[Any, Choice]

    def __post_init__(self) -> None:
        given = self.tensor_compressions
        for choice in given.values() if isinstance(given, Mapping) else given:
            check_choice(choice)

    def codec_for(self, info: CompressionInfo) -> Codec:
        """Return the codec for the tensor of this key."""
        try:
            return _codec(self.tensor_compressions[info.key], info)
        except (KeyError, IndexError, TypeError):
            raise ParameterError(f"compression: nothing is given for the tensor {info.key!r}") from None


def as_compression(given: Choices) -> Choice:
    """Return one object for what a user gave: sequences and mappings are taken tensor by tensor."""
    if isinstance(given, (list, tuple, Mapping)):
        return PerTensorCompression(given)
    check_choice(given)
    return given  # type: ignore[return-value]


def check_infos(infos: Sequence[CompressionInfo], tensors: Sequence[torch.Tensor]) -> None:
    """Raise `ParameterError` if the descriptions are not those of the tensors."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if [tuple(info.shape) for info in infos] != shapes:
        raise ParameterError(
            f"tensor_infos describes {len(infos)} tensors, not these {len(shapes)}, in this order"
        )


def described(tensors: Sequence[torch.Tensor]) -> list[CompressionInfo]:
    """Return descriptions of tensors of which no more is known than their places."""
    return [CompressionInfo.from_tensor(tensor, key=index) for index, tensor in enumerate(tensors)]


def codecs_for(given: Choices, infos: Sequence[CompressionInfo]) -> list[Codec]:
    """Return each tensor's codec. A sequence must name one for each of them."""
    choice = as_compression(given)
    if isinstance(given, (list, tuple)):
        if len(given) != len(infos):
            raise ParameterError(
                f"compression names {len(given)} codecs for {len(infos)} tensors: give one for each"
            )
        return [_codec(each, info) for each, info in zip(given, infos, strict=True)]
    return [_codec(choice, info) for info in infos]
