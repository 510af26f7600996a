"""Merging: which parts of a model travel together (fragments), and the weight of each rank's part (robust weights).

A fragmenter is any callable `(names, sizes, count) -> fragments`. A fragment lists the places of its tensors in
ascending order; every tensor is in exactly one. The tensors of one block of a model stay together: tensors whose names
agree up to the first number, such as `h.3.`, or tensors of one module if names have no number. Norms and weights are
numbers; this module handles no tensors.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError

Weights = NDArray[np.float64]
Fragments = list[list[int]]
Fragmenter = Callable[[Sequence[str], Sequence[int], int], Fragments]
_BLOCK = re.compile(r"(.*?(?:^|[./])\d+)(?:\.|$)")


def blocks(names: Sequence[str]) -> Fragments:
    """Return the places of each block's tensors; blocks are in the order of their first tensors.

    >>> blocks(["embed.weight", "h.0.attn.w", "h.0.mlp.w", "h.1.attn.w", "head.w", "head.b"])
    [[0], [1, 2], [3], [4, 5]]
    """
    found: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        match = _BLOCK.match(name)
        found.setdefault(match[1] if match else name.rpartition(".")[0] or name, []).append(place)
    return list(found.values())


def strided(names: Sequence[str], sizes: Sequence[int], count: int) -> Fragments:
    """Deal blocks out in turn: fragment p has the blocks p, p + count, p + 2·count and so on.

    As in Streaming DiLoCo: each fragment extends from the model's input to its output.

    >>> strided(["h.0", "h.1", "h.2", "h.3", "h.4"], [1] * 5, 2)
    [[0, 2, 4], [1, 3]]
    """
    dealt = _enough(blocks(names), count)
    return [sorted(place for block in dealt[first::count] for place in block) for first in range(count)]


def sequential(names: Sequence[str], sizes: Sequence[int], count: int) -> Fragments:
    """Cut the sequence of blocks into `count` pieces with about equally many blocks.

    >>> sequential(["h.0", "h.1", "h.2", "h.3", "h.4"], [1] * 5, 2)
    [[0, 1, 2], [3, 4]]
    """
    row = _enough(blocks(names), count)
    ends = np.cumsum([0, *(len(part) for part in np.array_split(np.arange(len(row)), count))])
    return [sorted(place for block in row[begin:end] for place in block) for begin, end in pairwise(ends)]


def greedy(names: Sequence[str], sizes: Sequence[int], count: int) -> Fragments:
    """Put each block, the largest first, into the currently smallest fragment; ties go to the first.

    >>> greedy(["h.0", "h.1", "h.2", "h.3"], [7, 5, 4, 3], 2)
    [[0, 3], [1, 2]]
    """
    weighed = [(sum(sizes[place] for place in block), block) for block in _enough(blocks(names), count)]
    filled = [0] * count
    found: Fragments = [[] for _ in range(count)]
    for size, block in sorted(weighed, key=lambda each: (-each[0], each[1])):
        least = filled.index(min(filled))
        # A block without elements counts as 1, so that no fragment stays empty.
        filled[least] += max(size, 1)
        found[least] += block
    return [sorted(each) for each in found]


def _enough(found: Fragments, count: int) -> Fragments:
    if not 1 <= count <= len(found):
        raise ParameterError(
            f"fragments={count}: give 1 to {len(found)}, the number of this model's blocks with parameters"
        )
    return found


FRAGMENTERS: dict[str, Fragmenter] = {"strided": strided, "sequential": sequential, "greedy": greedy}


def as_fragmenter(how: str | Fragmenter) -> Fragmenter:
    """Return the fragmenter with a name; return a function unchanged.

    Raises:
        ParameterError: it is neither a known name nor a function.
    """
    found = FRAGMENTERS.get(how) if isinstance(how, str) else how
    if not callable(found):
        raise ParameterError(
            f"fragmenter={how!r}: choose one of {', '.join(FRAGMENTERS)}, or give a function"
        )
    return found


def norm_softmax(norms: Sequence[float]) -> Weights:
    """Return softmax(−norm): the rank that has moved least has the largest weight; non-finite norms have weight 0.

    Source: Cheng et al. 2024, EDiT (arXiv 2412.07210). If no norm is finite, all weights are 0.

    >>> norm_softmax([0.0, math.log(3.0), math.inf]).round(2).tolist()
    [0.75, 0.25, 0.0]
    """
    given = np.asarray(norms, dtype=np.float64)
    finite = np.isfinite(given)
    weights = np.zeros(given.size)
    if finite.any():
        weights[finite] = np.exp(given[finite].min() - given[finite])
        weights /= weights.sum()
    return weights


def clip_scale(norm: float, limit: float) -> float:
    """Return the factor that scales a vector of this norm to a norm of at most `limit`.

    >>> clip_scale(5.0, 10.0), clip_scale(20.0, 10.0), clip_scale(0.0, math.inf)
    (1.0, 0.5, 1.0)
    """
    return 1.0 if norm <= limit else limit / norm


class OutlierFilter:
    """Detects norms far above earlier norms, by moving averages of mean and variance.

    z = (norm − mean)/std with exponentially weighted moments; an outlier has z above `threshold` · max(1, standard
    deviation of the latest z). Small norms are never outliers. Source: EDiT's reference implementation.

    Args:
        alpha: weight of a new norm in the averages, above 0 and at most 1.
        threshold: threshold in standard deviations, above 0.
        warm_up: number of norms before the first judgement, and number of latest z that are stored, at least 2.

    Raises:
        ParameterError: an argument is out of range.
    """

    def __init__(self, alpha: float = 0.02, threshold: float = 3.0, warm_up: int = 120) -> None:
        if not (0 < alpha <= 1 and threshold > 0 and warm_up >= 2):
            raise ParameterError(
                f"OutlierFilter(alpha={alpha!r}, threshold={threshold!r}, warm_up={warm_up!r}): "
                "give 0 < alpha <= 1, threshold > 0, warm_up >= 2"
            )
        self.alpha, self.threshold, self.warm_up = alpha, threshold, warm_up
        self.count, self.mean, self.variance = 0, 0.0, 0.0
        self._latest: deque[float] = deque(maxlen=warm_up)

    def state(self) -> list[Any]:
        return [self.count, self.mean, self.variance, [*self._latest]]

    def load(self, state: Sequence[Any]) -> None:
        """Restore the state from a checkpoint."""
        self.count, self.mean, self.variance, latest = state
        self._latest.extend(latest)

    def z(self, norm: float) -> float:
        """Return how many standard deviations a norm lies above the mean; 0 during the warm-up."""
        if self.count < self.warm_up or self.variance == 0:
            return 0.0
        return (norm - self.mean) / math.sqrt(self.variance)

    def is_outlier(self, norm: float) -> bool:
        """Return whether a norm is not finite, or far above earlier norms."""
        if not math.isfinite(norm):
            return True
        if self.count < self.warm_up:
            return False
        spread = float(np.std(self._latest, ddof=1))
        return self.z(norm) > self.threshold * max(1.0, spread)

    def see(self, norm: float) -> None:
        """Add a norm to the averages; ignore non-finite norms."""
        if not math.isfinite(norm):
            return
        self.count += 1
        before = norm - self.mean
        self.mean += self.alpha * before
        self.variance = (1 - self.alpha) * (self.variance + self.alpha * before * (norm - self.mean))
        self._latest.append(self.z(norm))
