"""The order of gloo's sums against its definition; tests/real/test_torchrun.py compares it with gloo itself."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest

from spawnsim.comm.datatypes import DOUBLE, FLOAT, INT
from spawnsim.comm.ops import MAX, PROD, SUM, combined, depends_on_order, reduce_ring, ring_block

MIB = 1 << 20


def contributions(ranks: int, count: int, dtype: Any) -> list[Any]:
    """Return numbers of very different sizes."""
    draw = np.random.default_rng(ranks * 1000 + count)
    wide = draw.standard_normal((ranks, count)) * np.exp(2 * draw.standard_normal((ranks, count)))
    return list(wide.astype(dtype))


def one_by_one(parts: list[Any], block: int) -> Any:
    """Return the sums, element by element: of block b from rank b - 1 down to rank b."""
    ranks = len(parts)
    turns = [[(at // block - step) % ranks for step in range(1, ranks + 1)] for at in range(len(parts[0]))]
    return np.array([reduce(np.add, [parts[rank][at] for rank in each]) for at, each in enumerate(turns)])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 13, 16])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_blocks_are_summed_from_the_rank_before_down(ranks: int, dtype: Any) -> None:
    """Whatever the length, with short and empty last blocks; contributions stay as they are."""
    for count in (1, 2, 3, 17, 100, 1001):
        parts = contributions(ranks, count, dtype)
        given = np.array(parts)
        size = parts[0].itemsize
        block = ring_block(count * size, size, ranks) // size
        with np.errstate(all="ignore"):
            expected = one_by_one(parts, block)
        assert reduce_ring(parts, np.add, block).tobytes() == expected.tobytes()
        assert np.array(parts).tobytes() == given.tobytes()


def test_blocks_by_length() -> None:
    """Two segments for each rank, and more where these would be longer than 1 MiB; a reduce fills its segments."""
    assert [ring_block(4 * count, 4, 4) for count in (1, 8, 9, 1000)] == [8, 8, 16, 1000]
    assert ring_block(6 * MIB, 8, 3) == ring_block(6 * MIB, 8, 3, rooted=True) == 2 * MIB
    assert ring_block(6 * MIB + 8, 8, 3) == 3 * 699_056
    assert ring_block(6 * MIB + 8, 8, 3, rooted=True) == 3 * MIB
    assert ring_block(0, 4, 3) == 0


def test_floats_alone_depend_on_the_order() -> None:
    """Sums and products of them; a reduce may cut otherwise than an all-reduce."""
    assert depends_on_order(SUM, FLOAT) and depends_on_order(PROD, DOUBLE)
    assert not depends_on_order(MAX, FLOAT) and not depends_on_order(SUM, INT)
    assert not depends_on_order(SUM, FLOAT.Dup())
    parts = contributions(3, 786_450, np.float64)
    assert combined(parts, SUM, DOUBLE).tobytes() != combined(parts, SUM, DOUBLE, rooted=True).tobytes()
