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
    Reports,
    Selection,
    Threshold,
    WorstRatio,
    admitted,
    worst_count,
)

NAN, INF = math.nan, math.inf
metrics = st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=40)


def reports(values: list[float]) -> list[Report]:
    """Return one report per metric."""
    return [Report(rank, value) for rank, value in enumerate(values)]


@pytest.mark.parametrize(
    ("selection", "values", "chosen"),
    [
        # NaN and both infinities are below every finite metric, in order of rank
        (WorstRatio(0.5), [1.0, NAN, -5.0, INF], {1, 3}),
        (WorstRatio(0.75), [1.0, NAN, -5.0, INF], {1, 2, 3}),
        (WorstRatio(0.25), [1.0] * 32, set(range(8))),
        (WorstRatio(0.3, "min"), [0.1, 9.0, 0.2, NAN], {3}),
        # the ratio applies once a rank is worse than the threshold
        (WorstRatio(0.5, threshold=1.0), [1.0, 2.0], set()),
        (WorstRatio(0.5, threshold=1.0), [0.9, 2.0], {0}),
        (WorstRatio(0.5, threshold=1.0), [NAN, 2.0], {0}),
        (Threshold(-100.0), [NAN, 1.0], {0}),
        (Threshold(9.0), [1.0, 3.0, 3.0, 2.0], {0, 1, 3}),  # the best stays, the last of equals
        # an infinite threshold is never met
        *((Threshold(infinite), [1.0, 2.0], set()) for infinite in (INF, -INF)),
        *((WorstRatio(0.5, threshold=infinite), [1.0, 2.0], set()) for infinite in (INF, -INF)),
    ],
)
def test_selections(selection: Selection, values: list[float], chosen: set[int]) -> None:
    """Which ranks go is defined, also among equals and numbers that are not finite; the order of reports is not."""
    assert selection(reports(values)) == selection(reports(values)[::-1]) == chosen


@pytest.mark.parametrize(
    ("size", "ratio", "count"),
    [(0, 0.5, 0), (1, 1.0, 0), (2, 1.0, 1), (4, 0.25, 1), (4, 0.0, 0), (10, 0.3, 3), (100, 0.29, 29), (5, 0.01, 1)],
)  # fmt: skip
def test_worst_count(size: int, ratio: float, count: int) -> None:
    """0 for ratio 0 or a single rank, else floor(n r), at least 1 and at most n - 1."""
    assert worst_count(size, ratio) == count


@given(metrics, st.floats(0, 1), st.floats(allow_nan=False))
def test_somebody_survives_and_is_no_worse(values: list[float], ratio: float, threshold: float) -> None:
    """Whatever the metrics, exactly worst_count ranks go, the worst ones, and never all."""
    chosen = WorstRatio(ratio)(reports(values))
    assert len(chosen) == worst_count(len(values), ratio) < len(values)
    order = sorted(
        range(len(values)), key=lambda rank: (values[rank] if math.isfinite(values[rank]) else -INF, rank)
    )
    assert chosen == set(order[: len(chosen)])
    assert len(Threshold(threshold)(reports(values))) < len(values)


def test_nan_policies() -> None:
    """Worst keeps them, exclude leaves them out, raise names the rank."""
    given_ = Reports.of(reports([1.0, NAN]))
    assert admitted(given_, "worst") is given_
    assert [report.rank for report in admitted(given_, "exclude")] == [0]
    with pytest.raises(UsageError, match=r"rank \[1\]"):
        admitted(given_, "raise")


def test_reports_are_objects_for_those_who_want_them() -> None:
    """By rank; one, a slice, or all."""
    given_ = Reports.of([Report(5, 2.0), Report(3, 1.0, expired=True)])
    assert given_[0] == Report(3, 1.0, expired=True)
    assert given_[1:] == [Report(5, 2.0)]
    assert given_.range == (1.0, 2.0)
    assert Reports.of([]).range == pytest.approx((NAN, NAN), nan_ok=True)


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


@pytest.mark.parametrize("bad", [-0.1, 1.1, NAN])
def test_bad_ratio_is_refused_in_the_constructor(bad: float) -> None:
    """A ratio outside [0, 1] is an error that names it."""
    with pytest.raises(ParameterError, match="replacement_ratio"):
        WorstRatio(bad)
