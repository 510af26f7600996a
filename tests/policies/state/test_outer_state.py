"""Vectors of an outer optimizer: differences that are not finite."""

import math

import torch

from spawnsim.policies.state.outer import FlatFloats


def test_a_difference_that_is_not_finite_is_zero() -> None:
    """One number of one rank would otherwise reach all weights through the momentum."""
    found = FlatFloats.of({"w": torch.tensor([math.inf, 1.0, math.nan])})
    assert found.set_difference(FlatFloats.of({"w": torch.tensor([math.inf, 3.0, 0.0])})) == 2
    assert found.tensors()["w"].tolist() == [0.0, 2.0, 0.0]
