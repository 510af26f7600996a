"""Fragments and robust weights: every tensor once, blocks together, and the reference's recursion of outliers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spawnsim.errors import ParameterError
from spawnsim.policies.rules.merging import (
    FRAGMENTERS,
    OutlierFilter,
    as_fragmenter,
    blocks,
    clip_scale,
    greedy,
    norm_softmax,
)

TRANSFORMER = [
    "embed.weight",
    *(f"h.{layer}.{part}" for layer in range(24) for part in ("attn.qkv", "attn.out", "mlp.w", "norm.scale")),
    "norm.weight",
    "norm.bias",
]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=40),
    st.integers(1, 40),
    st.sampled_from([*FRAGMENTERS]),
)
def test_each_tensor_is_in_one_fragment_and_blocks_stay_whole(sizes: list[int], count: int, how: str) -> None:
    """Of any sizes, whatever the fragmenter; no fragment is empty, and too many are refused."""
    names = [f"layers.{place // 3}.w{place % 3}" for place in range(len(sizes))]
    if count > len(blocks(names)):
        with pytest.raises(ParameterError, match="fragments"):
            as_fragmenter(how)(names, sizes, count)
        return
    found = as_fragmenter(how)(names, sizes, count)
    assert len(found) == count
    assert all(found)
    assert sorted(place for part in found for place in part) == list(range(len(sizes)))
    assert all(part == sorted(part) for part in found)
    of = {place: number for number, part in enumerate(found) for place in part}
    assert all(len({of[place] for place in block}) == 1 for block in blocks(names))


def test_layers_of_a_transformer_are_blocks() -> None:
    """24 layers of four tensors, the embedding, and the last norm: 26 blocks; strided takes each third."""
    assert len(blocks(TRANSFORMER)) == 26
    first = [
        TRANSFORMER[place] for place in FRAGMENTERS["strided"](TRANSFORMER, [1] * len(TRANSFORMER), 3)[0]
    ]
    assert {name.split(".")[1] for name in first if name.startswith("h.")} == {
        str(n) for n in range(2, 24, 3)
    }


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=4, max_size=30))
def test_greedy_is_within_a_third_of_the_best(sizes: list[int]) -> None:
    """Graham's bound for longest first: at most 4/3 − 1/(3·count) of the optimum, itself at least the mean."""
    count, names = 3, [str(place) for place in range(len(sizes))]
    heaviest = max(sum(sizes[place] for place in part) for part in greedy(names, sizes, count))
    # The least that any packing needs: the mean, the largest, and two of the four largest.
    least = max(sum(sizes) / count, max(sizes), sum(sorted(sizes)[-4:-2]))
    assert heaviest <= (4 / 3 - 1 / (3 * count)) * least * 1.5


def test_weights_fall_with_norms() -> None:
    """Softmax of minus the norm; shifted norms weigh the same, and without finite ones nobody counts."""
    norms = np.array([0.3, 2.0, 0.7])
    wanted = np.exp(-norms) / np.exp(-norms).sum()
    np.testing.assert_allclose(norm_softmax(norms.tolist()), wanted, rtol=0, atol=1e-15)
    np.testing.assert_allclose(norm_softmax((norms + 1e4).tolist()), wanted, rtol=0, atol=1e-11)
    assert norm_softmax([math.inf, math.nan]).tolist() == [0, 0]
    assert norm_softmax([1.0, math.inf]).tolist() == [1, 0]


def test_clipping_keeps_the_direction() -> None:
    """A factor of at most 1."""
    assert clip_scale(3.0, 10.0) == 1
    assert clip_scale(40.0, 10.0) * 40.0 == 10


def test_outliers_are_those_of_the_recursion() -> None:
    """The reference's moving moments, computed here once more; small norms are never outliers."""
    rng = np.random.default_rng(5)
    found = OutlierFilter(0.02, 3.0, 30)
    mean = variance = 0.0
    latest: list[float] = []
    for count in range(1, 400):
        norm = float(abs(rng.normal(2, 0.3)))
        if count > 31:
            z = (norm - mean) / math.sqrt(variance)
            limit = 3 * max(1.0, float(np.std(latest[-30:], ddof=1)))
            assert found.is_outlier(norm) == (z > limit)
        found.see(norm)
        before = norm - mean
        mean += 0.02 * before
        variance = 0.98 * (variance + 0.02 * before * (norm - mean))
        latest.append((norm - mean) / math.sqrt(variance) if count >= 30 else 0.0)
    assert found.mean == pytest.approx(mean, abs=1e-12)
    assert found.is_outlier(100.0)
    assert found.is_outlier(math.nan)
    assert not found.is_outlier(0.0)
    assert not OutlierFilter().is_outlier(1e9)


def test_an_unknown_fragmenter_is_refused() -> None:
    """With the known ones."""
    with pytest.raises(ParameterError, match="strided, sequential, greedy"):
        as_fragmenter("random")
