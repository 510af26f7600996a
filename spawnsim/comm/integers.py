"""Integers as programs pass them: Python's, numpy's, elements of tensors, even floats.

mpi4py hands ranks, tags and their like to C: whatever has `__int__` is taken and truncated, so that 2.5 is 2. Lists of
numbers (counts, dimensions, ranks of a group) it takes by `__index__`, which floats have not. Numbers that do not fit
C's types are refused. This room is where both rules live.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any, Final

from spawnsim.comm.failures import SpecTypeError, TooLarge

INT: Final = 1 << 31  # one more than the largest of C's `int`
AINT: Final = 1 << 63  # of addresses, displacements and sizes in bytes


def integer(value: Any, limit: int = INT) -> int:
    """Return one number as a plain `int`. Raises `SpecTypeError` (a TypeError) or `TooLarge` (an OverflowError)."""
    if type(value) is not int:
        if not hasattr(type(value), "__int__"):
            raise SpecTypeError(f"an integer is required, got {value!r}")
        value = int(value)
    return _fitting(value, limit)


def each_integer(values: Iterable[Any], limit: int = INT) -> list[int]:
    """Return a list of numbers as plain `int`s. Raises as `integer` does, also for floats."""
    return [_fitting(index(value), limit) for value in values]


def _fitting(value: int, limit: int) -> int:
    if not -limit <= value < limit:
        raise TooLarge(f"value too large to convert to an integer of C: {value}")
    return value
