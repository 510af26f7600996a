"""The order in which contributions are combined, which decides the last bits of a floating-point sum.

`tree` is the order in which both MPI wheels' `Allreduce` sums on one node (recursive doubling; ranks are folded in
pairs first when their number is no power of two), bit for bit. This room knows lists and a `combine`; it must not
know types or ranks' clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")
Combine = Callable[[T, T], T]


def _pairs(parts: list[T], combine: Combine[T]) -> list[T]:
    return [combine(parts[i], parts[i + 1]) for i in range(0, len(parts) - 1, 2)]


def tree(parts: list[T], combine: Combine[T]) -> T:
    """Combine in the order of recursive doubling: fold to a power of two, then pairs, pairs of pairs, and so on."""
    extra = len(parts) - (1 << (len(parts).bit_length() - 1))
    level = _pairs(parts[: 2 * extra], combine) + parts[2 * extra :]
    while len(level) > 1:
        level = _pairs(level, combine)
    return level[0]


def binomial(parts: list[T], combine: Combine[T], root: int = 0) -> T:
    """Combine in the order of a binomial tree to `root`: ranks are renumbered from the root on."""
    level = parts[root:] + parts[:root]
    while len(level) > 1:
        odd = level[-1:] if len(level) % 2 else []
        level = _pairs(level, combine) + odd
    return level[0]


def ordered(parts: list[T], combine: Combine[T]) -> T:
    """Combine in rank order: ((0 1) 2) 3 and so on."""
    result = parts[0]
    for part in parts[1:]:
        result = combine(result, part)
    return result


def prefixes(parts: list[T], combine: Combine[T]) -> Iterator[T]:
    """Yield the combination of ranks 0..r for each r, in rank order."""
    return accumulate(parts, combine)
