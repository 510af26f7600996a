"""Codecs of differences: what comes back, how long it is, and that nothing is lost with error feedback."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spawnsim.errors import ParameterError
from spawnsim.phantoms import PhantomArray
from spawnsim.policies.state.codecs import Codec, encoded_nbytes
from spawnsim.policies.state.difference_codecs import DCT, ErrorFeedback, LowBit, RandomMask, TopK, cosines

CODECS: list[Codec] = [
    *(LowBit(bits, block) for bits in (1, 2, 3, 4) for block in (1, 7, 4096)),
    TopK(64, 8), TopK(100, 1, LowBit(2)), TopK(5, 5), TopK(4096, 64, "blockwise8"),
    DCT(64, TopK(64, 32)), DCT(10, TopK(20, 3)), RandomMask(0.1, 3, 4),
]  # fmt: skip
vectors = st.integers(0, 300).flatmap(
    lambda count: st.lists(st.floats(-1e6, 1e6, width=32), min_size=count, max_size=count)
)


def there_and_back(codec: Codec, values: np.ndarray) -> np.ndarray:
    """Return what comes back."""
    return codec.decode(codec.encode(values), values.size)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(max_examples=15, deadline=None)
@given(given=vectors)
def test_lengths_depend_on_the_count_alone(codec: Codec, given: list[float]) -> None:
    """So that all ranks' bodies can be gathered, and phantoms are as long; zeros come back as zeros."""
    values = np.array(given, np.float32)
    body = codec.encode(values)
    assert body.dtype == np.uint8
    assert body.nbytes == encoded_nbytes(codec, values.size)
    found = codec.decode(body, values.size)
    assert found.shape == values.shape
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    assert not there_and_back(codec, np.zeros_like(values)).any()


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@settings(max_examples=30, deadline=None)
@given(value=st.floats(-1e6, 1e6, width=32), count=st.integers(1, 100))
def test_equal_values_are_exact_in_few_bits(bits: int, value: float, count: int) -> None:
    """In blocks that are full, and in the last one, which is not."""
    values = np.full(count, value, np.float32)
    np.testing.assert_array_equal(there_and_back(LowBit(bits, 8), values), values)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_few_bits_go_to_the_nearest_level(bits: int) -> None:
    """0 and ± powers of two of the block's largest magnitude: sixteen codes hold 15 values, of which none is nearer."""
    levels = [0.0, *(2.0**-k for k in range(2 ** (bits - 1) - 1))]
    values = np.random.default_rng(0).normal(size=999).astype(np.float32)
    for begin in range(0, 999, 50):
        block = values[begin : begin + 50]
        scaled = np.abs(block).max() * np.array([*levels, *(-level for level in levels)])
        nearest = scaled[np.abs(block[:, None] - scaled).argmin(axis=1)]
        found = there_and_back(LowBit(bits, 50), values)[begin : begin + 50]
        np.testing.assert_allclose(found, nearest, rtol=1e-6)


def test_one_bit_is_the_sign_and_the_mean_magnitude() -> None:
    """Of each block."""
    values = np.array([1.0, -2.0, 3.0, -4.0, 0.0, 8.0])
    np.testing.assert_allclose(there_and_back(LowBit(1, 4), values), [2.5, -2.5, 2.5, -2.5, 4, 4])


def test_the_largest_of_each_chunk_come_back() -> None:
    """Ties go to the first; the last chunk is shorter."""
    values = np.array([1, -5, 2, 5, 0.5, 0.25, 3], np.float32)
    np.testing.assert_array_equal(there_and_back(TopK(4, 1), values), [0, -5, 0, 0, 0, 0, 3])
    np.testing.assert_array_equal(there_and_back(TopK(4, 4), values), values)
    body = TopK(4096, 64).encode(np.zeros(8192, np.float32))
    assert body.nbytes == 128 * 4 + 128 * 12 // 8  # a place in 4,096 takes 12 bits


def test_cosines_are_orthonormal_and_those_of_scipy() -> None:
    """DCT-II; all coefficients kept, the vector comes back."""
    fft = pytest.importorskip("scipy.fft")
    values = np.random.default_rng(1).normal(size=64)
    np.testing.assert_allclose(cosines(64) @ cosines(64).T, np.eye(64), atol=1e-12)
    np.testing.assert_allclose(cosines(64) @ values, fft.dct(values, norm="ortho"), atol=1e-12)
    np.testing.assert_allclose(there_and_back(DCT(64, TopK(64, 64)), values), values, atol=1e-6)


def test_masks_are_equal_on_all_ranks_and_differ_in_time() -> None:
    """The key is the run's seed and the round, so places need not travel."""
    first, second = RandomMask(0.25, 7, 1), RandomMask(0.25, 7, 2)
    assert first.places(100).tolist() == RandomMask(0.25, 7, 1).places(100).tolist()
    assert first.places(100).tolist() != second.places(100).tolist()
    assert len(first.places(100)) == 25
    assert len(RandomMask(0.001).places(100)) == 1
    assert first.encode(np.ones(100)).nbytes == 100


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_error_feedback_loses_nothing(decay: float) -> None:
    """The sum of what was sent and of what is left is that of all vectors; where errors decay, by the recursion."""
    codec, rng = TopK(50, 2, LowBit(2)), np.random.default_rng(2)
    feedback, error = ErrorFeedback(codec, decay), np.zeros(150)
    for _ in range(40):
        values = rng.normal(size=150)
        sent = codec.decode(feedback.encode("w", values), 150)
        feedback.commit("w")
        error = decay * error + values - sent
        np.testing.assert_allclose(feedback.errors["w"], error, rtol=0, atol=1e-12)


def test_a_vector_that_did_not_arrive_is_not_counted() -> None:
    """Encoded again after a death, it gives the same bytes; keys have errors of their own."""
    feedback = ErrorFeedback(TopK(4, 1))
    values = np.array([1.0, 2.0, 3.0, 4.0])
    first = feedback.encode(0, values)
    assert feedback.encode(0, values).tolist() == first.tolist()
    feedback.commit(0)
    feedback.commit(1)
    assert feedback.errors[0].tolist() == [1, 2, 3, 0]
    assert feedback.encode(1, values).tolist() == first.tolist()


def test_phantoms_are_as_long_as_data() -> None:
    """And leave no error behind."""
    feedback = ErrorFeedback(TopK(64, 8))
    assert feedback.encode(0, PhantomArray(1000)).nbytes == feedback.encode(1, np.ones(1000)).nbytes
    feedback.commit(0)
    assert feedback.errors == {}


@pytest.mark.parametrize(
    "make",
    [
        lambda: LowBit(5), lambda: LowBit(4, 0), lambda: TopK(4, 5), lambda: TopK(4, 0), lambda: TopK(4, 1, "gzip"),
        lambda: DCT(0), lambda: DCT(4, "gzip"), lambda: RandomMask(0), lambda: RandomMask(1.5),
        lambda: ErrorFeedback("float16", -0.1), lambda: ErrorFeedback("gzip"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(make: object) -> None:
    """When a codec is made."""
    with pytest.raises(ParameterError):
        make()  # type: ignore[operator]
