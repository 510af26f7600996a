"""A device that has memory for so many models at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spawnsim.training.vmapped import Vmapped


def limit_rows(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Let calls of more rows find no memory; return how many rows were asked for, call by call, as they come."""
    rows_of, sizes = Vmapped.rows, list[int]()

    def limited(self: Vmapped, rows: Any, dims: Any) -> Any:
        sizes.append(len((*rows.trained, *rows.fixed)[0]))
        if sizes[-1] > most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return rows_of(self, rows, dims)

    monkeypatch.setattr(Vmapped, "rows", limited)
    return sizes
