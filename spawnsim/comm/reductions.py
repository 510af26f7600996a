"""The order in which contributions are combined, which decides the last bits of a floating-point sum.

`tree` is the order in which both MPI wheels' `Allreduce` sums on one node (recursive doubling; ranks are folded in
pairs first when their number is no power of two), bit for bit. This room knows lists and a `combine`, and of arrays
that they can be copied; it must not know types or ranks' clocks. All buildings combine by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, TypeVar

from numpy.typing import NDArray

T = TypeVar("T")
Array = NDArray[Any]
Combine = Callable[[T, T], T]


def _pairs(parts: list[T], combine: Combine[T]) -> list[T]:
    return [combine(parts[i], parts[i + 1]) for i in range(0, len(parts) - 1, 2)]


def tree(parts: list[Array], merge: Combine[Array]) -> Array:
    """Combine arrays in the order of recursive doubling: fold to a power of two, then pairs, pairs of pairs, and so on.

    `merge(a, b)` puts the combination of a and b in the place of b. `parts` stay as they are. The tree is walked depth
    first: a thousand contributions pass once through a handful of accumulators, which stay in the processor's cache.
    """
    extra = len(parts) - (1 << (len(parts).bit_length() - 1))
    accumulators, spare = _Accumulators(merge), 2 * extra
    for i in range(0, spare, 2):
        accumulators.push(accumulators.fresh(parts[i], parts[i + 1]), owned=True)
    for part in parts[spare:]:
        accumulators.push(part, owned=False)
    return accumulators.result()


def tree_in_place(parts: list[Array], merge: Combine[Array]) -> Array:
    """Combine as `tree` does, in the memory of the parts themselves; the result lies in the last one."""
    extra = len(parts) - (1 << (len(parts).bit_length() - 1))
    level = _pairs(parts[: 2 * extra], merge) + parts[2 * extra :]
    while len(level) > 1:
        level = _pairs(level, merge)
    return level[0]


class _Accumulators:
    """Subtrees that are complete, the highest first: a binary counter. Those that are `owned` may be written."""

    def __init__(self, merge: Combine[Array]) -> None:
        self._merge = merge
        self._stack: list[tuple[int, Array, bool]] = []  # height, array, owned
        self._spare: list[Array] = []

    def fresh(self, a: Array, b: Array) -> Array:
        """Return the combination of two arrays in memory of its own."""
        if not self._spare:
            return self._merge(a, b.copy())
        place = self._spare.pop()
        place[...] = b
        return self._merge(a, place)

    def push(self, value: Array, owned: bool) -> None:
        """Add a leaf, and combine what has become as high as its neighbour."""
        height, stack = 0, self._stack
        while stack and stack[-1][0] == height:
            _, before, own = stack.pop()
            value = self._merge(before, value) if owned else self.fresh(before, value)
            if own:
                self._spare.append(before)
            height, owned = height + 1, True
        stack.append((height, value, owned))

    def result(self) -> Array:
        """Return the whole tree, in memory of its own."""
        ((_, value, owned),) = self._stack
        return value if owned else value.copy()


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
