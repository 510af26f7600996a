"""Weights, blending, delta rule, momentum: properties and exact oracles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spawnsim.policies.rules.donors import STRATEGIES, weights_for
from spawnsim.policies.state import arithmetic
from spawnsim.policies.state.arithmetic import blend, with_delta, with_momentum

metrics = st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=30)
tensors = st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=4).map(torch.tensor)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@given(metrics, st.sampled_from(STRATEGIES[:3]), st.sampled_from(["max", "min"]))
def test_weights_are_a_distribution(values: list[float], strategy: str, mode: Any) -> None:
    """For any metrics weights are non-negative and sum to 1; better donors weigh no less."""
    weights = weights_for(strategy, np.array(values), mode)
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1)
    order = np.argsort(values if mode == "max" else np.negative(values), kind="stable")
    assert (np.diff(weights[order]) >= -1e-12).all()
    both = weights_for(strategy, np.array([values, values[::-1]]), mode)
    assert both[0].tolist() == weights.tolist()


def test_weighted_mean_of_1_2_4_prefers_4() -> None:
    """The original gave .57 .29 .14: the worst donor weighed most. The unit of the metric does not matter."""
    worst, middle, best = weights_for("weighted_mean", np.array([1.0, 2.0, 4.0]))
    assert worst < middle < best
    assert weights_for("weighted_mean", np.array([-10.0, 10.0, 50.0])) == pytest.approx([worst, middle, best])
    assert weights_for("best_only", np.array([1.0, 4.0, 4.0])).tolist() == [0, 0, 1]


@given(tensors, st.lists(st.floats(0.01, 1), min_size=2, max_size=5))
def test_blend_of_equal_tensors_is_that_tensor(value: torch.Tensor, weights: list[float]) -> None:
    """At consensus nothing changes, not even in the last bit."""
    assert torch.equal(blend([value] * len(weights), weights), value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blend_is_the_weighted_mean_in_every_dtype(dtype: torch.dtype) -> None:
    """Half precision is summed in float32, whole numbers round, truth values take the majority."""
    one, three = torch.tensor(1).to(dtype), torch.tensor(3 if dtype != torch.bool else 1).to(dtype)
    mixed = blend([one, three, three], [0.5, 0.25, 0.25])
    assert mixed.dtype == dtype
    assert mixed.item() == (2 if dtype != torch.bool else True)


def test_blend_divides_by_the_weights_that_arrived() -> None:
    """Weights of donors that are missing do not pull the result to zero."""
    assert blend([torch.tensor([2.0]), torch.tensor([4.0])], [0.2, 0.2]).item() == pytest.approx(3)


def test_blend_keeps_infinite_masks() -> None:
    """Equal infinities (an attention mask among the buffers) stay what they are."""
    mask = torch.tensor([0.0, -math.inf])
    assert torch.equal(blend([mask, mask], [0.5, 0.5]), mask)


def test_large_whole_numbers_stay_exact() -> None:
    """Whole numbers beyond float64 survive if the donors agree."""
    big = torch.tensor(2**62 + 1)
    assert blend([big, big], [0.3, 0.7]).item() == 2**62 + 1


@given(tensors, tensors)
def test_delta_without_own_steps_is_the_mixture(mixed: torch.Tensor, own: torch.Tensor) -> None:
    """Oracle: with now = then the delta rule changes no bit."""
    assert torch.equal(with_delta(mixed, own, own), mixed)


def test_delta_keeps_own_steps() -> None:
    """Mixed + (now - then)."""
    assert with_delta(torch.tensor([10.0]), torch.tensor([3.0]), torch.tensor([1.0])).item() == 12


def test_a_diverged_model_is_healed() -> None:
    """NaN or infinite own weights add neither delta nor momentum."""
    mixed, broken = torch.tensor([1.0, 1.0]), torch.tensor([math.nan, math.inf])
    assert torch.equal(with_delta(mixed, broken, torch.zeros(2)), mixed)
    assert torch.equal(with_momentum(mixed, broken, 0.5), mixed)


@given(tensors, tensors, st.floats(0, 1))
def test_momentum_is_a_convex_combination(new: torch.Tensor, own: torch.Tensor, momentum: float) -> None:
    """θ = m·own + (1 - m)·new; equal inputs stay bit-identical."""
    expected = momentum * own.double() + (1 - momentum) * new.double()
    assert torch.allclose(with_momentum(new, own, momentum).double(), expected, rtol=1e-5, atol=1e-1)
    assert torch.equal(with_momentum(new, new, momentum), new)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
)
def test_large_tensors_are_mixed_as_small_ones_are(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Piece by piece or at once: the same bits, also across memory and with a remainder."""
    draw = torch.Generator().manual_seed(0)
    tensors = [(torch.randn(300, 41, generator=draw) * 5).to(dtype).t() for _ in range(3)]
    tensors[2][3, :2] = torch.tensor([float("nan"), float("inf")]).to(dtype)

    def mixed() -> list[torch.Tensor]:
        blended = blend(tensors, [0.5, 0.2, 0.3])
        return [blended, with_delta(blended, *tensors[1:]), with_momentum(blended, tensors[2], 0.3)]

    at_once = mixed()
    monkeypatch.setattr(arithmetic, "PIECE", 1000)
    for small, large in zip(at_once, mixed(), strict=True):
        assert large.shape == small.shape
        assert torch.equal(large.contiguous().view(torch.uint8), small.contiguous().view(torch.uint8))
