"""Two large machines: the published predictions follow from the fitted rows, and from nothing else."""

from __future__ import annotations

import csv
from types import ModuleType

import numpy as np
import pytest
from support.studies import STUDIES, study_of

EXPECTED = STUDIES / "expected" / "large_machines_predictions.csv"


@pytest.fixture(scope="module")
def machines() -> ModuleType:
    """Return the study's module."""
    return study_of("large_machines")


def test_the_predictions_are_those_of_the_fit(machines: ModuleType) -> None:
    """All 325 of them, from the rows of one number of nodes on each machine."""
    fits = machines.fits()
    assert {(row.nodes, row.algorithm) for row in fits["lumi"][0]} == {
        (16, "ring"),
        (16, "recursive_doubling"),
    }
    assert {row.ranks for row in fits["mare_nostrum"][0]} == {16}
    with EXPECTED.open(newline="") as file:
        expected = list(csv.DictReader(file))
    found = [*machines.predictions({name: fit.platform for name, (_, fit) in fits.items()})]
    assert len(found) == len(expected) == 325
    for (machine, nodes, algorithm, nbytes, seconds), row in zip(found, expected, strict=True):
        assert (machine, str(nodes), algorithm, str(nbytes)) == tuple(
            row[name] for name in machines.COLUMNS[:4]
        )
        assert seconds == pytest.approx(float(row["seconds"]), rel=1e-4)


def test_unseen_rows_are_predicted_within_a_few_per_cent(machines: ModuleType) -> None:
    """The median error of rows that their fit has not seen."""
    errors = {name: float(np.nanmedian(np.abs(fit.errors))) for name, (_, fit) in machines.fits().items()}
    assert errors["lumi"] < 0.05 and errors["mare_nostrum"] < 0.05
