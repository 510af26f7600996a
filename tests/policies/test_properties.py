"""Properties that hold for all models, weights and groups: the mean is kept, consensus and hull are not left."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.policy_ranks import line, numbers, walk

from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    OneSidedSelectiveAveragingPolicy,
)
from spawnsim.policies.rules.donors import STRATEGIES
from spawnsim.policies.state.arithmetic import blend

few = settings(max_examples=25, deadline=None)


@st.composite
def doubly_stochastic(draw: st.DrawFn) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return a matrix whose rows and columns sum to 1: a mixture of permutations (Birkhoff)."""
    size = draw(st.integers(2, 8))
    orders = draw(st.lists(st.permutations(range(size)), min_size=1, max_size=5))
    shares = np.array(draw(st.lists(st.floats(0.01, 1), min_size=len(orders), max_size=len(orders))))
    return sum(
        share * np.eye(size)[list(order)] for share, order in zip(shares / shares.sum(), orders, strict=True)
    )  # type: ignore[return-value]


@given(doubly_stochastic(), st.integers(0, 2**32 - 1))
def test_doubly_stochastic_mixing_keeps_the_mean(matrix: np.ndarray, seed: int) -> None:
    """Each rank blends all models by its row: their mean stays, and their variance does not grow."""
    models = torch.from_numpy(np.random.default_rng(seed).normal(size=(len(matrix), 5)))
    mixed = torch.stack([blend(list(models), list(row)) for row in matrix])
    assert torch.allclose(mixed.mean(0), models.mean(0), rtol=0, atol=1e-12)
    assert (mixed.var(0) <= models.var(0) + 1e-12).all()


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=6), st.data())
def test_a_mixture_stays_in_the_hull(values: list[float], data: st.DataObject) -> None:
    """No weight, however uneven, leads beyond the least and the greatest donor."""
    weights = data.draw(st.lists(st.floats(0.001, 1), min_size=len(values), max_size=len(values)))
    mixed = blend([torch.tensor(value) for value in values], weights).item()
    slack = 1e-4 * (1 + max(map(abs, values)))
    assert min(values) - slack <= mixed <= max(values) + slack


@few
@given(st.integers(1, 12), st.floats(-1e6, 1e6, width=32), st.floats(0, 1))
def test_averaging_at_consensus_changes_nothing(size: int, value: float, momentum: float) -> None:
    """Equal models stay equal everywhere, and what they are, to the bit, whatever the size of the group."""
    found = walk(
        lambda _: AverageAllPolicy(1, momentum=momentum),
        ranks=size,
        steps=1,
        start=lambda _: line(value, width=9),
    )
    assert {frozenset(numbers(model)) for model in found.models.values()} == {frozenset([value])}


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
@pytest.mark.parametrize("transport", ["messages", "windows"])
def test_replacing_at_consensus_changes_nothing(strategy: str, transport: str) -> None:
    """A rank that takes over from its equals is what it was, to the bit, whatever the size of the group."""

    def policy(comm: object) -> AsyncSelectiveAveragingPolicy | OneSidedSelectiveAveragingPolicy:
        build = lambda: line(99.0)  # noqa: E731
        if transport == "messages":
            return AsyncSelectiveAveragingPolicy(build, 2, 0.4, strategy, cooldown=0)
        return OneSidedSelectiveAveragingPolicy(
            build, None, 2, 0.0, 0.4, strategy, replacement_mode="worst_ratio", group=comm, cooldown=0
        )

    found = walk(policy, ranks=7, steps=9, start=lambda _: line(0.1))
    assert found.events("replacement")
    assert all(numbers(model) == numbers(line(0.1)[0]) for model in found.models.values())
