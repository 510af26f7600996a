"""What tests of training share."""

from __future__ import annotations

import pytest

from spawnsim.training.vmapped import Vmapped


@pytest.fixture
def sizes(monkeypatch):
    """How many rows each batched call has."""
    found = []
    rows_of = Vmapped.rows

    def counted(self, rows, dims):
        found.append(len((*rows.trained, *rows.fixed)[0]))
        return rows_of(self, rows, dims)

    monkeypatch.setattr(Vmapped, "rows", counted)
    return found
