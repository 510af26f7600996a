"""Which collective algorithms explain the measured times, and how fast reductions add.

This room knows points, networks and the dataflow of algorithms. It must not know communicators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from spawnsim.calibrate.sampling import Point
from spawnsim.virtual.collectives import Selection, Timing
from spawnsim.virtual.collectives.catalogue import names
from spawnsim.virtual.network import Fabric

REDUCING = ("reduce", "allreduce")
GAMMAS = (0.0, *np.geomspace(1e-12, 1e-8, 33).tolist())  # seconds per byte: 1,000 GB/s to 0.1 GB/s
FINER = np.geomspace(0.75, 1.34, 25).tolist()
ROUNDS = 5
GOOD = 0.05  # a mean error of 5 %: no fixed algorithm for less
WORTH = 0.8  # a fixed algorithm must bring the error below this share of that of the library's own choice


def predicted_s(timing: Timing, operation: str, nbytes: int, ranks: int) -> float:
    """Return what `sampling` would measure: the slowest rank, each time after a barrier whose ranks leave unequally."""
    clocks, slowest_s = np.zeros(ranks), []
    size = 0 if operation == "barrier" else max(nbytes // 8, 1) * 8
    for _ in range(ROUNDS):
        begun = timing.finish("barrier", clocks, 0).times
        clocks = timing.finish(operation, begun, size).times
        slowest_s.append(float(np.max(clocks - begun)))
    return float(np.median(slowest_s))


def misfit(timing: Timing, points: Sequence[Point], ranks: int) -> float:
    """Return the mean absolute logarithm of predicted over measured."""
    ratios = [predicted_s(timing, point.operation, point.nbytes, ranks) / point.seconds for point in points]
    return float(np.mean(np.abs(np.log(ratios))))


def fit_gamma(network: Fabric, points: Sequence[Point], ranks: int) -> Fabric:
    """Return the network with the speed of arithmetic that explains the reductions best, whatever their algorithms."""
    reductions = _by_operation(points, REDUCING)
    if not reductions:
        return network
    coarse = _best_gamma(network, reductions, ranks, GAMMAS)
    return _best_gamma(network, reductions, ranks, [coarse.gamma_s_per_B * factor for factor in FINER])


def _best_gamma(
    network: Fabric, reductions: Mapping[str, Sequence[Point]], ranks: int, gammas: Sequence[float]
) -> Fabric:
    candidates = [replace(network, gamma_s_per_B=gamma) for gamma in dict.fromkeys(gammas)]
    return min(candidates, key=lambda candidate: _best_misfit(candidate, reductions, ranks))


def _best_misfit(network: Fabric, reductions: Mapping[str, Sequence[Point]], ranks: int) -> float:
    return sum(
        min(misfit(Timing(network, fixed), points, ranks) for fixed in _fixed(operation))
        for operation, points in reductions.items()
    )


def fit_selection(network: Fabric, points: Sequence[Point], ranks: int) -> Selection:
    """Return the selection that explains the collectives best: a library's rules, and fixed algorithms where better."""
    by_operation = _by_operation(
        points, ("barrier", "bcast", *REDUCING, "gather", "scatter", "allgather", "alltoall")
    )
    rules = {
        library: {
            op: misfit(Timing(network, Selection(library)), own, ranks) for op, own in by_operation.items()
        }
        for library in ("mpich", "openmpi")
    }
    library = min(rules, key=lambda name: sum(rules[name].values()))
    fixed = []
    for operation, own in by_operation.items():
        errors = {
            choice.fixed[0][1]: misfit(Timing(network, choice), own, ranks) for choice in _fixed(operation)
        }
        best = min(errors, key=lambda name: errors[name])
        if errors[best] < WORTH * rules[library][operation] and rules[library][operation] > GOOD:
            fixed.append((operation, best))
    return Selection(library, tuple(fixed))


def _fixed(operation: str) -> list[Selection]:
    return [Selection(fixed=((operation, name),)) for name in names(operation) if name != "two_level"]


def _by_operation(points: Sequence[Point], operations: Sequence[str]) -> dict[str, list[Point]]:
    found = {operation: [p for p in points if p.operation == operation] for operation in operations}
    return {operation: own for operation, own in found.items() if own}
