"""Reports of time and imbalance: data first, one table in the log."""

from __future__ import annotations

import logging

import pytest

from spawnsim.errors import ParameterError
from spawnsim.torchgfn.distributed import report_load_imbalance, report_time_info

# D11: a step that rank 0 lacks, iterations that rank 1 lacks, and a single number.
TIMINGS = [
    {"step": [1.0, 2.0, 3.0], "setup": 0.5},
    {"step": [3.0, 2.0], "setup": 1.5},
    {"step": [2.0, 5.0, 1.0], "replay": [4.0], "never": []},
]


def test_imbalance_covers_every_step_of_every_rank() -> None:
    """Useful = mean over the ranks that have the iteration, waiting = maximum - mean, summed over iterations."""
    step, setup, replay = report_load_imbalance(TIMINGS, 3)
    assert (step.step, step.useful_s, step.waiting_s) == ("step", 2 + 3 + 2, 1 + 2 + 1)
    assert (step.ranks, step.iterations, step.efficiency) == (3, 3, 7 / 11)
    assert (setup.useful_s, setup.waiting_s, setup.ranks, setup.iterations) == (1.0, 0.5, 2, 1)
    assert (replay.step, replay.useful_s, replay.waiting_s, replay.ranks) == ("replay", 4.0, 0.0, 1)


def test_time_info_has_each_rank_and_the_totals() -> None:
    """Mean and total per rank; maximum and mean of the totals."""
    info = report_time_info(TIMINGS, 3)
    assert info.per_rank[0] == {"step": (2.0, 6.0), "setup": (0.5, 0.5)}
    assert info.longest_s == {"step": 8.0, "setup": 1.5, "replay": 4.0}
    assert info.mean_s == {"step": 19 / 3, "setup": 1.0, "replay": 4.0}


def test_both_are_logged_once_as_a_table(caplog: pytest.LogCaptureFixture) -> None:
    """One record each, at level INFO; nothing is printed."""
    with caplog.at_level(logging.INFO, "spawnsim.torchgfn.distributed"):
        report_load_imbalance(TIMINGS, 3)
        report_time_info(TIMINGS, 3)
    first, second = (record.getMessage().splitlines() for record in caplog.records)
    assert first[1:3] == ["step    useful s  waiting s  ranks", "step      7.0000     4.0000    3/3"]
    assert second[2].split() == ["0", "step", "2.0000", "6.0000"]


def test_fewer_ranks_than_said_is_an_error() -> None:
    """It names both numbers."""
    with pytest.raises(ParameterError, match="3 dictionaries for world_size=4"):
        report_load_imbalance(TIMINGS, 4)
