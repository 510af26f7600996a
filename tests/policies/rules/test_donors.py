"""From whom: rules for donors, and decisions put together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
    OneOfBest,
    Rules,
    Uniform,
    decide,
    how_many,
)
from spawnsim.policies.rules.selection import Expired, Report, Selection, Threshold, WorstRatio, worst_count

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


def by_hand(reports: list[Report], rules: Rules, seed: int) -> dict[int, dict[int, float]]:
    """Return the weights of donors by replaced rank: the rules as documented, without columns."""
    rng, mode = np.random.default_rng(seed), rules.mode

    def good(report: Report) -> float:
        return -math.inf if not math.isfinite(report.metric) else report.metric * (1 if mode == "max" else -1)

    taking = [each for each in reports if rules.nan_policy == "worst" or math.isfinite(each.metric)]
    order, who = sorted(taking, key=lambda each: (good(each), each.rank)), rules.selection
    if isinstance(who, WorstRatio):
        bar = -math.inf if who.threshold is None else who.threshold * (1 if mode == "max" else -1)
        any_behind = who.threshold is None or any(good(each) < bar for each in taking)
        gone = order[: worst_count(len(taking), who.ratio) * any_behind]
    elif isinstance(who, Threshold):
        bar = who.threshold * (1 if mode == "max" else -1)
        gone = [each for each in order if good(each) < bar] if math.isfinite(bar) else []
    else:
        gone = [each for each in order if each.expired]
    gone = gone[: len(taking) - 1]
    giving = [each for each in taking if each not in gone and math.isfinite(each.metric)]
    found = {}
    for rank in sorted(each.rank for each in gone) if giving else ():
        count = how_many(rules.donors.count, len(giving))  # type: ignore[attr-defined]
        best = [each for each in order if each in giving][len(giving) - count :]
        if isinstance(rules.donors, Uniform):
            drawn = range(count) if count == len(giving) else rng.choice(len(giving), count, replace=False)
            chosen = [giving[place] for place in drawn]
        else:
            chosen = best if type(rules.donors) is Best else [best[rng.choice(range(count))]]
            if isinstance(rules.donors, OneOfBest):
                chosen = [sorted(best, key=lambda each: each.rank)[best.index(chosen[0])]]
        values = np.array([good(each) for each in sorted(chosen, key=lambda each: each.rank)])
        weights = np.full(len(values), 1 / len(values))
        if rules.strategy == "weighted_mean" and values.std() > 0:
            weights = np.exp(values / values.std()) / np.exp(values / values.std()).sum()
        elif rules.strategy == "best_only":
            weights = np.eye(len(values))[len(values) - 1 - values[::-1].argmax()]
        ranks = sorted(each.rank for each in chosen)
        found[rank] = {rank: weight for rank, weight in zip(ranks, weights.tolist(), strict=True) if weight}
    return found


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("strategy", ["mean", "weighted_mean", "best_only"])
def test_decisions_are_those_of_the_rules_by_hand(mode: Any, strategy: str) -> None:
    """Ties, NaN, few ranks, all selections, the three donor rules that take a count."""
    rng, replaced = np.random.default_rng(3), 0
    selections: list[Selection] = [
        WorstRatio(0.2, mode), WorstRatio(0.9, mode), WorstRatio(0, mode), WorstRatio(0.3, mode, -1.0),
        Threshold(0.5, mode), Threshold(np.inf, mode), Threshold(-9.0, mode), Expired(mode),
    ]  # fmt: skip
    for trial in range(400):
        size, seed = int(rng.integers(1, 60)), int(rng.integers(1 << 30))
        metrics = rng.integers(-4, 4, size) / 2.0  # many ties
        metrics[rng.random(size) < 0.15] = rng.choice([np.nan, np.inf, -np.inf])
        ranks = np.sort(rng.choice(1000, size, replace=False))
        rows = zip(ranks.tolist(), metrics.tolist(), (rng.random(size) < 0.3).tolist(), strict=True)
        reports = [Report(*row) for row in rows]
        count = (None, 1, 3, 0.5)[int(rng.integers(4))]
        donors = (Uniform(count), Best(count, mode), OneOfBest(count, mode))[trial % 3]
        policy: Any = ("worst", "exclude")[int(rng.integers(2))]
        rules = Rules(selections[trial % len(selections)], donors, strategy, None, mode, policy)
        decision = decide(trial, reports, rules, np.random.default_rng(seed))
        wanted = by_hand(reports, rules, seed)
        found = {
            rank: dict(zip(a.donors, a.weights, strict=True)) for rank, a in decision.assignments.items()
        }
        assert {rank: each.keys() for rank, each in found.items()} == {
            r: each.keys() for r, each in wanted.items()
        }
        for rank, weights in wanted.items():
            assert found[rank] == pytest.approx(weights, abs=1e-12)
        assert decision.receivers.tolist() == [rank for rank, each in found.items() for _ in each]
        replaced += len(found)
    assert replaced > 400


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
