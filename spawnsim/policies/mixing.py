"""How much: the weights of donors from their metrics.

This room knows metrics and weights; no rank, no tensor, no communicator (`arithmetic.py` applies the weights).
All weights are non-negative and sum to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError
from spawnsim.policies.selection import Mode, goodness

Weights = NDArray[np.float64]
Mixing = Callable[[Sequence[float]], Weights]  # donors' metrics → their weights
Strategy = Literal["mean", "weighted_mean", "best_only", "reset_weights"]
STRATEGIES: tuple[str, ...] = ("mean", "weighted_mean", "best_only", "reset_weights")


def mean_weights(metrics: Sequence[float], mode: Mode = "max") -> Weights:
    """Return equal weights."""
    return np.full(len(metrics), 1 / max(len(metrics), 1))


def softmax_weights(metrics: Sequence[float], mode: Mode = "max") -> Weights:
    """Return weights that grow with goodness: softmax of (metric - mean) / standard deviation.

    Shifting or scaling all metrics changes nothing; non-finite metrics weigh nothing unless all are non-finite.

    >>> softmax_weights([1.0, 2.0, 4.0]).round(2).tolist()
    [0.15, 0.22, 0.63]
    """
    good = np.asarray([goodness(metric, mode) for metric in metrics], dtype=np.float64)
    finite = np.isfinite(good)
    if not finite.any():
        return mean_weights(metrics)
    scaled = good / max(float(np.abs(good[finite]).max()), np.finfo(np.float64).tiny)  # no overflow below
    spread = float(scaled[finite].std())
    heat = np.where(finite, (scaled - scaled[finite].max()) / (spread if spread > 1e-12 else 1.0), -np.inf)
    raised = np.exp(heat)
    weights: Weights = raised / raised.sum()
    return weights


def best_weights(metrics: Sequence[float], mode: Mode = "max") -> Weights:
    """Return weight 1 for the best donor (the last of equals), 0 for the others."""
    good = [goodness(metric, mode) for metric in metrics]
    weights = np.zeros(len(good))
    if good:
        weights[max(range(len(good)), key=lambda index: (good[index], index))] = 1
    return weights


def weights_for(strategy: str, metrics: Sequence[float], mode: Mode = "max") -> Weights:
    """Return the donors' weights under a named strategy; `reset_weights` has no donors, hence no weights."""
    if strategy == "mean":
        return mean_weights(metrics, mode)
    if strategy == "weighted_mean":
        return softmax_weights(metrics, mode)
    if strategy == "best_only":
        return best_weights(metrics, mode)
    return np.empty(0)


def check_strategy(strategy: str) -> str:
    """Return the strategy, or raise `ParameterError`."""
    if strategy not in STRATEGIES:
        raise ParameterError(f"averaging_strategy={strategy!r}: choose one of {', '.join(STRATEGIES)}")
    return strategy


def check_momentum(momentum: float) -> float:
    """Return the momentum, or raise `ParameterError` if it is outside [0, 1]."""
    if not 0 <= momentum <= 1:
        raise ParameterError(
            f"momentum={momentum!r}: give a number from 0 to 1 (the share of the own weights kept)"
        )
    return float(momentum)
