"""Who is replaced: counts, ties, NaN, age."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spawnsim.errors import ParameterError, UsageError
from spawnsim.policies.rules.selection import (
    Age,
    Expired,
    Report,
    Threshold,
    WorstRatio,
    admitted,
    compute_worst_ranks_by_ratio,
    spare_the_best,
    worst_count,
    worst_first,
)

metrics = st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=40)


def reports(values: list[float]) -> list[Report]:
    """Return one report per metric."""
    return [Report(rank, value) for rank, value in enumerate(values)]


def test_non_finite_metrics_are_worst() -> None:
    """NaN and both infinities rank below every finite metric, in order of rank."""
    order = worst_first(reports([1.0, math.nan, -5.0, math.inf]))
    assert [report.rank for report in order] == [1, 3, 2, 0]


def test_ties_go_to_the_lower_rank() -> None:
    """Equal metrics are replaced from rank 0 up: which rank goes is defined."""
    assert compute_worst_ranks_by_ratio([1.0] * 32, 0.25) == set(range(8))


def test_in_mode_min_the_highest_metric_is_worst() -> None:
    """With mode="min" a loss can be given as it is."""
    assert WorstRatio(0.3, "min")(reports([0.1, 9.0, 0.2, math.nan])) == {3}


@pytest.mark.parametrize(
    ("size", "ratio", "count"),
    [
        (0, 0.5, 0),
        (1, 1.0, 0),
        (2, 1.0, 1),
        (4, 0.25, 1),
        (4, 0.0, 0),
        (10, 0.3, 3),
        (100, 0.29, 29),
        (5, 0.01, 1),
    ],
)
def test_worst_count(size: int, ratio: float, count: int) -> None:
    """0 for ratio 0 or a single rank, else floor(n r), at least 1 and at most n - 1."""
    assert worst_count(size, ratio) == count


@given(metrics, st.floats(0, 1))
def test_worst_ratio_leaves_a_survivor_and_counts_right(values: list[float], ratio: float) -> None:
    """Whatever the metrics, exactly worst_count ranks go, never all, and no survivor is worse than one that goes."""
    chosen = WorstRatio(ratio)(reports(values))
    assert len(chosen) == worst_count(len(values), ratio) < len(values)
    order = [report.rank for report in worst_first(reports(values))]
    assert chosen == set(order[: len(chosen)])


@given(metrics, st.floats(allow_nan=False))
def test_threshold_leaves_a_survivor(values: list[float], threshold: float) -> None:
    """The best rank stays, even if all are behind the threshold."""
    assert len(Threshold(threshold)(reports(values))) < len(values)


def test_threshold_replaces_nan() -> None:
    """A rank whose metric is NaN is behind every threshold."""
    assert Threshold(-100.0)(reports([math.nan, 1.0])) == {0}


def test_infinite_threshold_means_never() -> None:
    """An infinite threshold is not triggered, in either mode."""
    for infinite in (math.inf, -math.inf):
        assert not Threshold(infinite)(reports([1.0, 2.0]))
        assert not WorstRatio(0.5, threshold=infinite)(reports([1.0, 2.0]))


def test_worst_ratio_with_threshold_waits_for_somebody_behind_it() -> None:
    """The ratio applies only once a rank is worse than the threshold."""
    rule = WorstRatio(0.5, threshold=1.0)
    assert rule(reports([1.0, 2.0])) == set()
    assert rule(reports([0.9, 2.0])) == {0}
    assert rule(reports([math.nan, 2.0])) == {0}


def test_spare_the_best_keeps_one() -> None:
    """If a selection names everybody, the best stays to donate."""
    assert spare_the_best({0, 1, 2}, reports([1.0, 3.0, 2.0])) == {0, 2}


def test_nan_policies() -> None:
    """Worst keeps them, exclude leaves them out, raise names the rank."""
    given_ = reports([1.0, math.nan])
    assert len(admitted(given_, "worst")) == 2
    assert [report.rank for report in admitted(given_, "exclude")] == [0]
    with pytest.raises(UsageError, match=r"rank \[1\]"):
        admitted(given_, "raise")


def test_a_life_lasts_one_call_more_than_max_age() -> None:
    """Oracle: life = max_age + 1 calls."""
    age = Age((50, 50), np.random.default_rng(0))
    lives = []
    for _ in range(3):
        calls = 1
        while not age.tick():
            calls += 1
        lives.append(calls)
        age.reset()
    assert lives == [51, 51, 51]


def test_age_rate_is_one_over_mean_plus_one() -> None:
    """Oracle: replacement rate per call = 1 / (E[max_age] + 1), both ends of the range included."""
    age, ends, drawn = Age((5, 15), np.random.default_rng(1)), 0, set()
    for _ in range(110_000):
        if age.tick():
            ends += 1
            drawn.add(age.max_age)
            age.reset()
    assert drawn == set(range(5, 16))
    assert ends / 110_000 == pytest.approx(1 / 11, rel=0.02)


def test_expired_selects_those_whose_age_ran_out() -> None:
    """Selection by age looks at ages alone."""
    assert Expired()([Report(0, 9.0, expired=True), Report(1, 0.0)]) == {0}


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan])
def test_bad_ratio_is_refused_in_the_constructor(bad: float) -> None:
    """A ratio outside [0, 1] is an error that names it."""
    with pytest.raises(ParameterError, match="replacement_ratio"):
        WorstRatio(bad)
