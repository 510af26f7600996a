"""From whom: rules for donors, and decisions put together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spawnsim.errors import ParameterError, UsageError
from spawnsim.policies.rules.donors import (
    Best,
    ByMetric,
    Decision,
    DonorRule,
    Neighbours,
    Rules,
    Uniform,
    decide,
)
from spawnsim.policies.rules.selection import Report, WorstRatio

RING = {rank: ((rank - 1) % 8, (rank + 1) % 8) for rank in range(8)}
RULES: list[DonorRule] = [Uniform(), Uniform(2), Uniform(0.5), Best(2), ByMetric(2), Neighbours(RING)]


def taken(values: Sequence[float], rule: DonorRule, strategy: str = "mean", ratio: float = 0.25) -> Decision:
    """Return what a round with these metrics decides."""
    reports = [Report(rank, value) for rank, value in enumerate(values)]
    return decide(10, reports, Rules(WorstRatio(ratio), rule, strategy), np.random.default_rng(3))


@given(
    st.lists(st.floats(), min_size=1, max_size=8), st.sampled_from(RULES), st.floats(0, 1),
    st.sampled_from(["mean", "weighted_mean", "best_only"]),
)  # fmt: skip
def test_donors_are_never_replaced_and_weights_are_a_distribution(
    values: list[float], rule: DonorRule, ratio: float, strategy: str
) -> None:
    """For every rule, strategy and set of metrics: donors are finite survivors, and somebody survives."""
    decision = taken(values, rule, strategy, ratio)
    assert len(decision.assignments) < len(values)
    for rank, assignment in decision.assignments.items():
        assert assignment.donors
        assert rank not in assignment.donors
        assert not set(assignment.donors) & decision.assignments.keys()
        assert all(math.isfinite(values[donor]) for donor in assignment.donors)
        assert sum(assignment.weights) == pytest.approx(1)


def test_best_only_has_one_donor_of_weight_one() -> None:
    """Donors that weigh nothing are not asked."""
    decision = taken([0.0, 3.0, 5.0, 4.0], Uniform(), "best_only")
    assert decision.assignments[0].donors == (2,)
    assert decision.assignments[0].weights == (1.0,)


def test_reset_has_no_donors() -> None:
    """reset_weights starts afresh."""
    assert taken([0.0, 1.0], Uniform(), "reset_weights", 0.5).assignments[0].donors == ()


def test_nobody_is_replaced_when_all_are_nan() -> None:
    """Without a finite survivor there is nobody to take over from."""
    assert not taken([math.nan] * 4, Uniform()).assignments


def test_rank_0_is_an_ordinary_rank() -> None:
    """Rank 0 is replaced when it is worst and donates when it is best."""
    assert 0 in taken([0.0, 1.0, 2.0, 3.0], Uniform()).assignments
    assert taken([9.0, 1.0, 2.0, 3.0], Best()).assignments[1].donors == (0,)


def test_busy_ranks_neither_give_nor_take() -> None:
    """A rank whose last replacement is under way is left out of both roles, and counts as one of the worst."""
    reports = [Report(rank, float(rank)) for rank in range(4)]
    rules = Rules(WorstRatio(0.5), Uniform())
    decision = decide(0, reports, rules, np.random.default_rng(0), busy={0, 3})
    assert {rank: a.donors for rank, a in decision.assignments.items()} == {1: (2,)}


def test_mean_of_k_donors_has_the_variance_of_sampling_without_replacement() -> None:
    """Oracle: the mean of k of the N - 1 others varies by S²/k · (1 - k/(N - 1))."""
    rng, values = np.random.default_rng(5), np.arange(15.0)
    candidates = [Report(rank, value) for rank, value in enumerate(values)]
    means = [np.mean(values[Uniform(4)(99, candidates, rng)]) for _ in range(20_000)]
    expected = values.var(ddof=1) / 4 * (1 - 4 / 15)
    assert np.var(means) == pytest.approx(expected, rel=0.05)


def test_neighbours_come_from_the_topology() -> None:
    """On a ring only the two neighbours give."""
    assert taken([0.0, 1, 2, 3, 4, 5, 6, 7], Neighbours(RING), ratio=0.125).assignments[0].donors == (1, 7)


def test_a_users_own_objects_take_part() -> None:
    """Selection, donor rule and mixing may each be a plain function."""
    rules = Rules(lambda _: frozenset({2}), lambda *_: [0, 1], mixing=lambda _: np.array([0.25, 0.75]))
    decision = decide(0, [Report(r, 1.0) for r in range(3)], rules, np.random.default_rng(0))
    assert decision.assignments[2].weights == (0.25, 0.75)


def test_a_donor_rule_that_names_a_replaced_rank_is_an_error() -> None:
    """The rule holds for users' objects as well."""
    with pytest.raises(UsageError, match="donor rule"):
        taken([0.0, 1.0], lambda *_: [0])


def test_a_mixing_that_does_not_sum_to_1_is_an_error() -> None:
    """Weights that would shrink a model are refused."""
    rules = Rules(WorstRatio(0.5), Uniform(), mixing=lambda metrics: np.ones(len(metrics)))
    with pytest.raises(UsageError, match="sum to 1"):
        decide(0, [Report(r, float(r)) for r in range(4)], rules, np.random.default_rng(0))


@pytest.mark.parametrize("count", [0, -1, 0.0, 1.5, True])
def test_bad_counts_of_donors_are_refused(count: float) -> None:
    """A count is a positive whole number, a share in (0, 1] or None."""
    with pytest.raises(ParameterError, match="count"):
        Uniform(count)


def test_a_nan_rank_triggers_nothing_where_it_is_excluded() -> None:
    """With nan_policy="exclude" a NaN neither falls behind a threshold nor takes part."""
    reports = [Report(0, math.nan), Report(1, 2.0), Report(2, 3.0)]
    rules = Rules(WorstRatio(0.5, threshold=1.0), Uniform(), nan_policy="exclude")
    assert not decide(0, reports, rules, np.random.default_rng(0)).assignments
