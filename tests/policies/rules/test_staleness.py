"""Rules of servers against recursions written out in numpy, and against torch's own SGD."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spawnsim.errors import ParameterError
from spawnsim.policies import Polynomial, ServerRule, constant
from spawnsim.policies.rules.staleness import ServerOptimizer, local_steps

CHANGES = np.random.default_rng(3).normal(size=(24, 7))


@pytest.mark.parametrize("activation", [0.0, 0.1, 0.25])
def test_delayed_nesterov_is_the_recursion_of_its_paper(activation: float) -> None:
    """Algorithm 3 of arXiv 2401.09135, N = 4: momentum in every fourth arrival, gradients in all."""
    lr, beta, size, c = 0.07, 0.9, 4, activation
    theta, momentum, total = np.ones(7), np.zeros(7), np.zeros(7)
    server = ServerOptimizer(ServerRule(lr, beta, size, delayed=True, activation=c), [np.ones(7)])
    for count, change in enumerate(CHANGES, start=1):
        total += change
        if count % size == 0:
            momentum = beta * momentum + total / size
            theta = theta - lr * ((1 - c * size + c) * beta * momentum + change / size)
            total = np.zeros(7)
        else:
            theta = theta - lr * (c * beta * momentum + change / size)
        server.take([change])
        np.testing.assert_allclose(server.weights[0], theta, rtol=0, atol=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_the_other_rules_are_torchs_sgd_on_means(nesterov: bool, size: int) -> None:
    """Vanilla (N = 1) and FedBuff: weighted changes are summed, and each N-th arrival is a step with their mean."""
    parameter = torch.nn.Parameter(torch.ones(7, dtype=torch.float64))
    oracle = torch.optim.SGD([parameter], lr=0.3, momentum=0.8, nesterov=nesterov)
    server = ServerOptimizer(ServerRule(0.3, 0.8, size, nesterov=nesterov), [parameter.detach().clone()])
    waiting: list[Any] = []
    for count, change in enumerate(CHANGES):
        weight = Polynomial()(count % 5)
        server.take([torch.from_numpy(change)], weight)
        waiting.append(weight * torch.from_numpy(change))
        if len(waiting) == size:
            parameter.grad = sum(waiting) / size
            oracle.step()
            waiting = []
        torch.testing.assert_close(server.weights[0], parameter.detach(), rtol=0, atol=1e-12)


def test_weights_by_staleness() -> None:
    """Constant, and (1 + s)^-a."""
    assert [constant(s) for s in (0, 9)] == [1, 1]
    assert [Polynomial()(s) for s in (0, 3, 8)] == pytest.approx([1, 1 / 2, 1 / 3])
    assert Polynomial(0)(7) == 1


def test_local_steps_are_those_of_the_authors_toy() -> None:
    """Seconds a step of 0.58, 0.75, 1.51, 3.33 and 20 steps of the fastest; never fewer than the least."""
    speeds = [1 / seconds for seconds in (0.58, 0.75, 1.51, 3.33)]
    assert [local_steps(20, speed, speeds[0]) for speed in speeds] == [20, 15, 7, 5]
    assert local_steps(20, 0, speeds[0]) == 20
    assert local_steps(20, 1, 1000, least=2) == 2


def test_bad_rules_are_refused() -> None:
    """Ranges, and an activation where it means nothing."""
    for bad in (
        {"lr": 0},
        {"momentum": 1},
        {"size": 0},
        {"activation": 0.1},
        {"size": 4, "delayed": True, "activation": 1},
    ):
        with pytest.raises(ParameterError, match="give"):
            ServerRule(**bad)
    with pytest.raises(ParameterError, match="power"):
        Polynomial(-1)
