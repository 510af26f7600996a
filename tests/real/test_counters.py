"""How many bytes a buffer specification stands for, as a real rank counts them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spawnsim.comm import DOUBLE, FLOAT, INT
from spawnsim.real.runtime.services import nbytes_of

TEN = np.zeros(10)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (TEN, 80),
        (torch.zeros(3), 12),
        (b"abc", 3),
        (None, 0),
        ([], 0),
        ([TEN, 4], 32),
        ([TEN, np.int32(4)], 32),
        ([TEN, DOUBLE], 80),
        ([TEN, 4, DOUBLE], 32),
        ([TEN, (3, 5), DOUBLE], 24),
        ([TEN, [1, 2, 3], [0, 1, 3], DOUBLE], 48),
        ([TEN, ([1, 2], [0, 1]), DOUBLE], 24),
        ([TEN, [1, 2], [0, 8], [DOUBLE, FLOAT]], 16),
        ([TEN, ([1, 2], [0, 8]), [INT, FLOAT]], 12),
        ([TEN, [DOUBLE, FLOAT]], 80),
    ],
)
def test_a_specification_counts_what_it_sends(spec: Any, expected: int) -> None:
    """By counts and types where they are stated (one for each rank too), else by the memory."""
    assert nbytes_of(spec) == expected
