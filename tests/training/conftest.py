"""What tests of training share."""

from __future__ import annotations

import pytest

from spawnsim.training.batches import StepBatch


@pytest.fixture
def sizes(monkeypatch):
    """How many steps each call of the batched computation carries out."""
    found = []
    compute = StepBatch.compute

    def counted(self, works):
        found.append(len(works))
        compute(self, works)

    monkeypatch.setattr(StepBatch, "compute", counted)
    return found
