"""Compression: errors within bounds, equal values exact, anything finite or not comes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spawnsim.errors import ParameterError
from spawnsim.policies.state.codecs import NAMED, Uniform8Bit, as_codec, pack, unpack

BOUNDS = {"none": 0.0, "float16": 5e-8, "scaled16": 5e-8}  # mean squared error; the others' is 8e-4
every_codec = pytest.mark.parametrize("name", NAMED)


def there_and_back(name: str, values: np.ndarray) -> np.ndarray:
    """Return the values after a trip over the wire."""
    raw, body = pack(NAMED[name], values)
    return unpack(NAMED[name], body, raw=raw, dtype=values.dtype, count=values.size)


@every_codec
def test_normal_values_come_back_within_bounds(name: str) -> None:
    """A quarter of a million standard normal values; and zeros and huge ones stay finite."""
    values = np.random.default_rng(0).normal(size=2**18).astype(np.float32)
    assert np.mean((there_and_back(name, values) - values) ** 2) <= BOUNDS.get(name, 8e-4)
    for values in (np.zeros(25, np.float32), np.full(7, 3e38, np.float32)):
        assert np.isfinite(NAMED[name].decode(NAMED[name].encode(values), values.size)).all()


@every_codec
def test_sizes_on_the_wire(name: str) -> None:
    """What is sent is about as long as the codec says."""
    raw, body = pack(NAMED[name], np.ones(10_000, np.float32))
    assert body.size == pytest.approx(10_000 * NAMED[name].nbytes_per_value, abs=1100)
    assert raw == (name == "none")


@every_codec
@given(value=st.floats(-(2.0**15), 2.0**15, width=16), count=st.integers(0, 300))
def test_equal_values_are_exact(name: str, value: float, count: int) -> None:
    """Zeros above all: peers that agree exchange nothing but zeros."""
    if name == "blockwise8":
        value = 0.0
    values = np.full(count, value, np.float32)
    assert (there_and_back(name, values) == values).all()


@every_codec
def test_values_that_are_not_finite_survive(name: str) -> None:
    """They travel as they are, with all their company."""
    values = np.array([1.0, np.nan, -np.inf, 3.0], np.float32)
    np.testing.assert_array_equal(there_and_back(name, values), values)


def test_ranges() -> None:
    """A large finite value does not become infinite as a half; without compression double precision stays."""
    assert there_and_back("float16", np.array([1e9], np.float32)) == [65504]
    values = np.random.default_rng(0).normal(size=9)
    np.testing.assert_array_equal(there_and_back("none", values), values)


def test_short_bodies_and_unknown_names_are_refused() -> None:
    """ValueError, which the all-reduce counts as a refused part; the message lists the known names."""
    with pytest.raises(ValueError):
        unpack(NAMED["none"], np.zeros(8, np.uint8), raw=True, dtype=np.dtype("f4"), count=3)
    with pytest.raises(ParameterError, match="float16"):
        as_codec("gzip")
    assert as_codec(Uniform8Bit(4.0)).sigmas == 4.0
