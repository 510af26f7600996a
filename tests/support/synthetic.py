"""Synthetic finished runs for the tests of plots, report, trace and study: seeded, no simulator needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from spawnsim.record import Table
from spawnsim.run import Run

REACHED = {"none": (0.60, 0.16), "average": (0.93, 0.02), "selective": (0.88, 0.06)}


def run(
    policy: str = "selective", *, ranks: int = 1000, iterations: int = 100, seed: int = 7, real: bool = False
) -> Run:
    """Return a run with columns iteration, loss, accuracy and compute_s, and replacements if it is selective."""
    rng = np.random.default_rng((seed, ranks, sum(map(ord, policy))))
    compute_s = 0.01 * rng.lognormal(0, 0.3, (ranks, 1)) * rng.lognormal(0, 0.1, (ranks, iterations))
    time_s = np.cumsum(compute_s + 0.0004, axis=1)
    if policy == "average":
        time_s = _together(time_s)
    accuracy = _accuracy(rng, policy, compute_s.shape)
    events = _replace(rng, accuracy, time_s) if policy == "selective" else []
    columns = {
        "rank": np.repeat(np.arange(ranks, dtype=np.int32), iterations),
        "time_s": time_s.ravel(),
        "iteration": np.tile(np.arange(iterations), ranks),
        "loss": (2.4 * np.exp(-3 * accuracy)).ravel(),
        "accuracy": accuracy.ravel(),
        "compute_s": compute_s.ravel(),
    }
    totals = {
        "ranks": ranks, "iterations": iterations, "virtual_seconds": float(time_s.max()), "wall_seconds": 12.5,
        "events": 123456, "messages": 54321, "bytes": 10**9, "replacements": len(events), "digest": "0f3c" * 8,
    }  # fmt: skip
    return Run(_what(policy, seed, real), Table(columns), events, totals)


def _what(policy: str, seed: int, real: bool) -> dict[str, Any]:
    return {
        "file": "digits.py", "parameters": {"policy": policy}, "platform": "ethernet-10g",
        "stragglers": "lognormal:0.3", "seed": seed, "backend": "mpi" if real else "virtual",
    }  # fmt: skip


def _accuracy(rng: np.random.Generator, policy: str, shape: tuple[int, int]) -> np.ndarray:
    top, width = REACHED[policy]
    reached = top - 0.1 + 0.5 * width * rng.normal(0, 1, (shape[0], 1))
    curves = 0.1 + reached * (1 - np.exp(-np.arange(shape[1]) / 25))
    return np.clip(curves + rng.normal(0, 0.01, shape), 0, 0.99)


def _together(time_s: np.ndarray, every: int = 10) -> np.ndarray:
    """Let everybody wait for the slowest at the end of each tenth iteration."""
    steps = np.diff(time_s, axis=1, prepend=0.0)
    for last in range(every - 1, time_s.shape[1], every):
        reached = steps[:, : last + 1].sum(axis=1)
        steps[:, last] += reached.max() - reached
    return np.cumsum(steps, axis=1)


def _replace(
    rng: np.random.Generator, accuracy: np.ndarray, time_s: np.ndarray, every: int = 10
) -> list[dict[str, Any]]:
    events = []
    for number, step in enumerate(range(every, accuracy.shape[1], every)):
        order = np.argsort(accuracy[:, step], kind="stable")
        best = order[-max(1, len(order) // 5) :]
        for rank in order[: max(1, len(order) // 10)]:
            donors = sorted(map(int, rng.choice(best, size=min(8, len(best)), replace=False)))
            accuracy[rank, step:] = accuracy[donors, step:].mean(axis=0) - 0.01
            event = {"kind": "replacement", "rank": int(rank), "time_s": float(time_s[rank, step])}
            donated = {"donors": donors, "round": number, "metric": float(accuracy[rank, step])}
            events.append(event | donated | {"iteration": step})
    return sorted(events, key=lambda event: event["time_s"])
