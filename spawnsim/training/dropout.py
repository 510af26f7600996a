"""Dropout of many models at once: each rank draws its masks itself, from its own generator, in its own turn.

The masks are inputs of a batched call. Knows calls of `torch.nn.functional.dropout`; must not know models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode

from spawnsim.training.grouping import Ungroupable


@dataclass(frozen=True)
class Mask:
    """The mask of one dropout call: 1 for kept elements, 0 for dropped ones."""

    shape: torch.Size
    stride: tuple[int, ...]  # numbers are drawn in memory order
    dtype: torch.dtype
    p: float

    def draw(self) -> Tensor:
        """Draw a mask from torch's generator, as torch's own dropout does on the CPU."""
        drawn = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
        return drawn.bernoulli_(1 - self.p)


class _OfDropout(TorchFunctionMode):
    """Intercepts dropout calls that drop elements: calls `mask`, and applies the mask that it returns."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is dropout:
            return self._dropout(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _dropout(self, input: Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002 - as torch
        if not (training and isinstance(p, float) and 0 < p < 1 and input.numel()):
            return dropout(input, p, training, inplace)
        scale = self.mask(input, p) / (1 - p)
        return input.mul_(scale) if inplace else input * scale

    def mask(self, given: Tensor, p: float) -> Tensor:
        raise NotImplementedError


class Drawing(_OfDropout):
    """Draws and records the masks of a call that executes alone.

    Attributes:
        masks: Shapes, dtypes and probabilities of the masks, in the order of calls.
        drawn: The masks themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Mask] = []
        self.drawn: list[Tensor] = []

    def mask(self, given: Tensor, p: float) -> Tensor:
        """Draw a mask."""
        if given.device.type != "cpu":
            raise Ungroupable("it has dropout on a GPU, where one generator serves all ranks of a call")
        like = torch.empty_like(given, device="meta")  # torch draws every element of an expanded tensor, too
        self.masks.append(Mask(like.shape, like.stride(), like.dtype, p))
        self.drawn.append(self.masks[-1].draw())
        return self.drawn[-1]


class Applying(_OfDropout):
    """Applies masks drawn in advance to the dropout calls of a function."""

    def __init__(self, masks: Sequence[Mask], drawn: Sequence[Tensor]) -> None:
        super().__init__()
        self._left = [*zip(masks, drawn, strict=True)][::-1]

    def mask(self, given: Tensor, p: float) -> Tensor:
        """Return the next mask."""
        mask, drawn = self._left.pop() if self._left else (None, None)
        if mask is None or drawn is None or (mask.p, mask.shape) != (p, given.shape):
            raise Ungroupable("its calls of dropout differ from one step to the next")
        return drawn

    def require_all(self) -> None:
        """Raise `Ungroupable` if masks are unused."""
        if self._left:
            raise Ungroupable("its calls of dropout differ from one step to the next")
