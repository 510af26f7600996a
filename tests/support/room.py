"""A device that has memory for so many models at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spawnsim.training.row_step import RowStep


def limit_rows(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Let steps of more rows find no memory; return how many rows were asked for, call by call, as they come."""
    compute, sizes = RowStep.differentiate, list[int]()

    def limited(self: RowStep, rows: Any, inputs: Any) -> Any:
        sizes.append(len(rows[0]))
        if len(rows[0]) > most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return compute(self, rows, inputs)

    monkeypatch.setattr(RowStep, "differentiate", limited)
    return sizes
