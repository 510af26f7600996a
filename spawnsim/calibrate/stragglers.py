"""From the durations of compute blocks, rank by rank, to a step and the stragglers that explain the rest.

Persistent differences are taken out first, then rare blocks far from the others (transient stragglers), and what is
left is the noise: of the families that `spawnsim.virtual.compute` has, the one whose distribution function is nearest
(Kolmogorov and Smirnov's distance).

This room knows arrays of durations and stragglers. It must not know how they were measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spawnsim import random
from spawnsim.calibrate.sampling import FloatArray
from spawnsim.errors import ParameterError
from spawnsim.virtual.compute import (
    Bimodal,
    ComputeModel,
    Exponential,
    Fixed,
    Gamma,
    Lognormal,
    Noise,
    Pareto,
    SlowRank,
    Speed,
    Straggler,
)

FEW_RANKS = 16  # up to here each rank keeps its own factor; beyond, factors are a distribution
LEAST_SPREAD = 0.005  # relative differences below are left out
WORTH = 0.7  # transient stragglers must bring the distance below this share
FAR = 6.0  # robust standard deviations from the median: a transient straggler
DRAWS = 20_000


@dataclass(frozen=True)
class Fit:
    """A step and its stragglers. `distance`: between measured and fitted distributions of blocks (0 to 1)."""

    step_s: float
    stragglers: tuple[Straggler, ...]
    distance: float

    @property
    def model(self) -> ComputeModel:
        """The compute model."""
        return ComputeModel(Fixed(self.step_s), self.stragglers)

    def __str__(self) -> str:
        return "+".join(map(str, self.stragglers)) or "constant"


def fit_stragglers(rows: Sequence[FloatArray], *, same_ranks: bool = True) -> Fit:
    """Return the step and stragglers of durations in seconds, one row of blocks per rank.

    The mean block of the fit is the mean block of the rows. `same_ranks`: rank i of the fit is rank i of the rows,
    where they are few; otherwise its speeds are a distribution, fit for any number of ranks.
    """
    rows = [np.asarray(row, dtype=np.float64) for row in rows]
    if not rows or any(row.size < 2 for row in rows) or any((row <= 0.0).any() for row in rows):
        raise ParameterError(
            "stragglers are fitted to at least 2 compute blocks per rank, each longer than 0 s"
        )
    means = np.array([row.mean() for row in rows])
    ratios = np.concatenate([row / mean for row, mean in zip(rows, means, strict=True)])
    persistent = _persistent(means, ratios.std() / math.sqrt(ratios.size / len(rows)), same_ranks)
    noise = _noise(ratios)
    stragglers = (*persistent, *noise)
    # SlowRank has mean 1 over very many ranks; here it is about these ranks.
    product = math.prod(s.mean for s in noise) * (
        _mean_of_ranks(persistent, len(rows)) if same_ranks else 1.0
    )
    return Fit(float(means.mean()) / product, stragglers, _distance_of(noise, ratios))


def _mean_of_ranks(persistent: Sequence[Straggler], ranks: int) -> float:
    factors = [s.slowdown for s in persistent if isinstance(s, SlowRank)]
    return (sum(factors) + ranks - len(factors)) / ranks


def _persistent(means: FloatArray, error: float, same_ranks: bool) -> tuple[Straggler, ...]:
    """Return what tells the ranks' means apart beyond the error of the means."""
    relative = means / means.mean()
    spread = max(float(np.log(relative).std()) ** 2 - error**2, 0.0) ** 0.5
    if spread < LEAST_SPREAD:
        return ()
    if same_ranks and len(means) <= FEW_RANKS:
        return tuple(SlowRank(rank, _round(factor)) for rank, factor in enumerate(relative))
    return (Speed(_round(spread)),)


def _noise(ratios: FloatArray) -> tuple[Noise, ...]:
    """Return the noise of blocks around their rank's mean: one family, or a family and transient stragglers."""
    plain = _family(ratios)
    near, transient = _without_far(ratios)
    if not transient:
        return plain
    both = (*_family(near / near.mean()), *transient)
    return both if _distance_of(both, ratios) < WORTH * _distance_of(plain, ratios) else plain


def _family(ratios: FloatArray) -> tuple[Noise, ...]:
    if ratios.std() < LEAST_SPREAD:
        return ()
    return (min(_families(ratios), key=lambda family: _distance_of((family,), ratios)),)


def _without_far(ratios: FloatArray) -> tuple[FloatArray, tuple[Noise, ...]]:
    middle = float(np.median(ratios))
    deviation = 1.4826 * float(np.median(np.abs(ratios - middle)))
    far = ratios > max(middle + FAR * deviation, 1.25 * middle)
    if not far.any() or far.mean() > 0.2:  # what every fifth block has is no exception
        return ratios, ()
    slowdown = float(ratios[far].mean() / ratios[~far].mean())
    return ratios[~far], (Bimodal(_round(far.mean()), _round(slowdown)),)


def _families(near: FloatArray) -> list[Noise]:
    """Return one noise of each family, fitted to factors of mean 1 by moments or by maximum likelihood."""
    tail = near.size / float(np.sum(np.log(near / near.min())))
    families: list[Noise] = [Lognormal(_round(np.log(near).std())), Gamma(_round(near.std()))]
    families.append(Exponential(_round(min(max(1.0 - near.min(), 1e-6), 1.0))))
    return [*families, Pareto(_round(tail))] if tail > 1.001 else families


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def _distance_of(noise: Sequence[Noise], ratios: FloatArray) -> float:
    drawn = np.ones(DRAWS)
    for kind in noise:
        drawn = drawn * kind.draw(random.generator(0, 0, f"calibrate.{kind}"), DRAWS)
    return _between(drawn / drawn.mean(), ratios)


def _between(drawn: FloatArray, measured: FloatArray) -> float:
    grid = np.sort(np.concatenate([drawn, measured]))
    below = [
        np.searchsorted(np.sort(sample), grid, side="right") / sample.size for sample in (drawn, measured)
    ]
    return float(np.max(np.abs(below[0] - below[1])))
