"""The study of the phase diagram: its measures, its boundaries, and a small version of it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from support.studies import study_of

from spawnsim.cli import main as command
from spawnsim.record.table import Table


@pytest.fixture(scope="module")
def study():
    """Return the study's module."""
    return study_of("phase_diagram")


def rounds_of(study, accuracies, means, nbytes):
    """Return a run whose ranks have equal accuracies, one round a second."""
    ranks = study.RANKS
    rows = [(rank, turn) for rank in range(ranks) for turn in range(len(accuracies))]
    table = Table(
        {
            "rank": np.array([rank for rank, _ in rows]),
            "iteration": np.array([turn for _, turn in rows]),
            "time_s": np.array([1.0 + turn for _, turn in rows]),
            "accuracy": np.array([accuracies[turn] for _, turn in rows]),
        }
    )
    events = [
        {"kind": "round", "iteration": turn, "time_s": 1.0 + turn, "bytes": nbytes, "mean_accuracy": mean}
        for turn, mean in enumerate(means)
    ]
    return SimpleNamespace(table=table, events=events)


def test_the_result_is_the_rank_s_or_the_mean_s_at_a_time_or_after_some_bytes(study):
    """The accuracy of a round is that before its exchange, so its bytes do not count yet."""
    accuracy = study.accuracy
    run = rounds_of(study, [0.1, 0.2, 0.3, 0.8], [0.15, 0.1, 0.5, 0.6], 100)
    assert accuracy(run, np.inf, np.inf) == 0.8
    assert accuracy(run, 3.0, np.inf) == 0.5
    assert accuracy(run, np.inf, 0) == 0.15
    assert accuracy(run, np.inf, 199) == 0.2
    assert accuracy(run, 0.5, np.inf) == 0.0


def test_a_boundary_is_where_the_gain_becomes_positive(study):
    """Infinite if it ends below 0; 0 if it is positive from the beginning; the last crossing counts."""
    boundary = study.boundary
    assert boundary([0, 1, 2], [-0.1, -0.1, 0.3]) == pytest.approx(1.25)
    assert boundary([0, 1, 2], [0.1, -0.1, 0.1]) == pytest.approx(1.5)
    assert boundary([0, 1, 2], [0.1, 0.2, 0.1]) == 0.0
    assert boundary([0, 1, 2], [0.1, 0.2, 0.0]) == np.inf
    gains = {
        alpha: [0.3 * spread - 0.3 * (alpha is not None) - 0.1 for spread in (0.0, 1.0, 2.0)]
        for alpha in study.ALPHAS
    }
    rows = [
        {"map": study.MAPS[0].name, "by": "equal time", "alpha": alpha, "spread": spread,
         "ends": {"selective": [0.5 + gain] * 4, "average": [0.5] * 4}}
        for alpha, own in gains.items() for spread, gain in zip((0.0, 1.0, 2.0), own, strict=True)
    ]  # fmt: skip
    found = {row["alpha"]: row for row in study.fitted(rows, 4)}
    assert found["even"]["sigma"] == pytest.approx(1 / 3)
    assert found[0.3]["sigma"] == pytest.approx(4 / 3)
    assert found[0.3]["low"] == pytest.approx(found[0.3]["high"])


def test_a_small_version_of_the_study(tmp_path):
    """One seed at the corners of one map: every policy at every corner, and a figure."""
    assert command(["study", "phase_diagram", "--quick", "--jobs", "0", "--out", str(tmp_path / "p")]) == 0
    rows = json.loads((tmp_path / "p" / "phase_diagram.json").read_text())
    assert len(rows) == 8
    assert all(len(row["ends"]) == 6 and all(0 < own[0] <= 1 for own in row["ends"].values()) for row in rows)
    even = next(row for row in rows if row["place"] == "even, σ 0" and row["by"] == "equal time")
    assert even["ends"]["average"][0] > 0.85
    assert (tmp_path / "p" / "phases.png").stat().st_size > 10_000
