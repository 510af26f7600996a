"""Which reports are compared, without a window: lines of any length, ranks at any distance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spawnsim.policies.rules.selection import NEVER, ReportRounds, Reports, ReportTable, WorstRatio


def lines(*rows: list[tuple[int, float]], dead: tuple[int, ...] = ()) -> ReportTable:
    """Return the lines of ranks 0, 1, …, each with its reports (iteration, metric), newest first."""
    longest = max(map(len, rows))
    full = [row + [(NEVER, math.nan)] * (longest - len(row)) for row in rows]
    iterations = np.array([[iteration for iteration, _ in row] for row in full])
    metrics = np.array([[metric for _, metric in row] for row in full])
    alive = np.array([rank not in dead for rank in range(len(rows))])
    no = np.zeros(len(rows), bool)
    return ReportTable(np.arange(len(rows)), iterations, metrics, no, alive, no)


def metrics(reports: Reports) -> list[float]:
    """Return the metrics by rank."""
    found: list[float] = reports.metrics.tolist()
    return found


def judge(rounds: ReportRounds, seen: ReportTable, me: int, ratio: float = 0.34) -> tuple[int, bool] | None:
    """Judge by the worst share."""
    return rounds.judge(seen, lambda reports: me in WorstRatio(ratio)(reports))


def test_each_rank_is_taken_at_the_iteration_or_next_to_it() -> None:
    """Exactly there if it reported there, else the nearest report, of two the newer."""
    seen = lines([(30, 3.0), (20, 2.0)], [(20, 2.5), (10, 1.5)], [(40, 9.0), (35, 8.0)], [(5, 0.5)])
    assert metrics(seen.near(20)) == [2.0, 2.5, 8.0, 0.5]
    assert metrics(seen.near(25)) == [3.0, 2.5, 8.0, 0.5]
    assert seen.shared() == 20
    assert lines([]).shared() == NEVER


def test_a_verdict_falls_as_soon_as_nothing_can_change_it() -> None:
    """Rank 2 has not reported yet: rank 0 is among the two worst whatever comes, rank 3 is not, rank 1 must wait."""
    seen = lines([(10, 0.0)], [(10, 1.0)], [(0, 5.0)], [(10, 3.0)])
    for me, verdict in ((0, (10, True)), (3, (10, False)), (1, None)):
        rounds = ReportRounds(10)
        rounds.reported(0, judged=False)
        rounds.reported(10, judged=True)
        assert judge(rounds, seen, me, 0.5) == verdict
    later = lines([(10, 0.0)], [(10, 1.0)], [(10, 0.5), (0, 5.0)], [(10, 3.0)])
    assert judge(rounds, later, 1, 0.5) == (10, False)


def test_a_dead_rank_and_one_far_behind_are_not_waited_for() -> None:
    """The dead do not count; who is more than four reports behind counts with what it reported last."""
    seen = lines([(50, 0.0)], [(50, 1.0)], [(40, -9.0)], dead=(2,))
    rounds = ReportRounds(10)
    for iteration in range(0, 60, 10):
        rounds.reported(iteration, judged=iteration == 50)
    assert judge(rounds, seen, 0) == (50, True)
    for newest, verdict in ((20, None), (10, (60, False))):
        rounds = ReportRounds(10)
        for iteration in range(0, 70, 10):
            rounds.reported(iteration, judged=iteration == 60)
        assert judge(rounds, lines([(60, 0.0)], [(60, 1.0)], [(newest, -9.0)]), 0) == verdict


def test_each_report_is_judged_once_in_order_and_none_for_ever() -> None:
    """One look half a period after each report; after four open ones the oldest is judged with what there is."""
    rounds, seen = ReportRounds(10), lines([(50, 0.0)], [(0, 1.0)])
    found = []
    for iteration in range(0, 60, 10):
        rounds.reported(iteration, judged=iteration > 0)
        looks = [at for at in range(iteration, iteration + 10) if rounds.due(at, last=False)]
        assert looks == ([] if iteration == 0 else list(range(iteration + 5, iteration + 10)))
        found.append(judge(rounds, seen, 0))
        assert not rounds.due(iteration + 9, last=False)
    assert found == [None, None, None, None, None, (10, True)]
    rounds.close()
    assert judge(rounds, seen, 0) is None


@pytest.mark.parametrize("period", [1, 2, 3])
def test_short_periods_are_judged_in_the_next_call(period: int) -> None:
    """Half a period is a call at least, and the next report is the last chance."""
    rounds = ReportRounds(period)
    rounds.reported(period, judged=True)
    assert not rounds.due(period, last=True)
    assert rounds.due(period + 1, last=period == 1)
