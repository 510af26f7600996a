"""The same program on virtual ranks, with the compute times of a real run: replayed, fitted, or their mean alone.

This room knows what was seen, platforms and one function of the virtual building. It must not know the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spawnsim.calibrate.judging import Silence
from spawnsim.calibrate.sampling import FloatArray
from spawnsim.calibrate.stragglers import Fit, fit_stragglers
from spawnsim.errors import ParameterError
from spawnsim.validate.watching import Seen, watched
from spawnsim.virtual import simulate
from spawnsim.virtual.compute import Straggler, Trace
from spawnsim.virtual.platform import Platform

MEASURES = ("iteration", "policy", "waiting share", "total")


@dataclass(frozen=True)
class Times:
    """What a run amounts to, after its warm-up.

    Attributes:
        iteration_s: mean time from one compute block to the next.
        policy_s: mean time between two blocks: communication and the program's own work.
        waiting: share of the time inside communication calls.
        total_s: from the first block to the end, on the slowest rank.
    """

    iteration_s: float
    policy_s: float
    waiting: float
    total_s: float

    def named(self) -> dict[str, float]:
        """Return the values by the names in `MEASURES`."""
        return dict(zip(MEASURES, (self.iteration_s, self.policy_s, self.waiting, self.total_s), strict=True))


def times(seen: Sequence[Seen], warmup: int, *, local_s: float = 0.0) -> Times:
    """Return the times of a run. `local_s`: mean own work that a virtual run holds inside its blocks."""
    spans_s = np.array([rank.end_s - rank.began_s[warmup] for rank in seen])
    blocks = np.array([len(rank.began_s) - warmup for rank in seen])
    gaps_s = np.concatenate([rank.gaps_s[warmup:] for rank in seen])
    inside_s = sum(float(rank.inside_s[warmup:].sum()) for rank in seen)
    return Times(
        iteration_s=float(np.mean(spans_s / blocks)),
        policy_s=float(gaps_s.mean()) + local_s,
        waiting=inside_s / float(spans_s.sum()),
        total_s=float(spans_s.max()),
    )


@dataclass(frozen=True)
class Prediction:
    """Times of virtual runs with one model of compute, one for each seed."""

    name: str
    runs: tuple[Times, ...]

    def median(self) -> dict[str, float]:
        """Return the median of each measure."""
        return {name: float(np.median([run.named()[name] for run in self.runs])) for name in MEASURES}


@dataclass(frozen=True)
class Setting:
    """What is predicted: a program on so many ranks, from `seed` on, its first `warmup` blocks left aside."""

    main: Callable[[Any], object]
    ranks: int
    seed: int
    warmup: int


def predict(
    setting: Setting, seen: Sequence[Seen], platform: Platform, *, seeds: int = 5
) -> tuple[Prediction, ...]:
    """Return the predictions by replayed, by fitted and by constant compute times."""
    rows = [rank.blocks_s + rank.local_s for rank in seen]
    short = [rank for rank, row in enumerate(rows) if len(row) < setting.warmup + 2]
    if short:
        raise ParameterError(
            f"rank {short[0]} went through {len(rows[short[0]])} comm.compute() blocks: validation needs at least "
            f"{setting.warmup + 2} (a warm-up of {setting.warmup}, and two more)"
        )
    local_s = float(np.mean([rank.local_s[setting.warmup :].mean() for rank in seen]))
    found = []
    for name, (trace, stragglers) in _models(rows, setting.warmup).items():
        runs = 1 if not stragglers else seeds
        found.append(
            Prediction(
                name,
                tuple(
                    times(
                        _run(setting, platform, trace, stragglers, seed=seed), setting.warmup, local_s=local_s
                    )
                    for seed in range(setting.seed, setting.seed + runs)
                ),
            )
        )
    return tuple(found)


def fitted(seen: Sequence[Seen], warmup: int) -> Fit:
    """Return the straggler fit of a run's compute blocks."""
    return fit_stragglers([(rank.blocks_s + rank.local_s)[warmup:] for rank in seen])


def _models(rows: Sequence[FloatArray], warmup: int) -> Mapping[str, tuple[Trace, tuple[Straggler, ...]]]:
    fit = fit_stragglers([row[warmup:] for row in rows])
    mean_s = float(np.mean([row[warmup:].mean() for row in rows]))
    # A trace goes before what the program states, and a program states what it would take elsewhere.
    return {
        "replayed": (Trace(rows, cycle=True), ()),
        "fitted": (Trace([[fit.step_s]] * len(rows), cycle=True), fit.stragglers),
        "constant": (Trace([[mean_s]] * len(rows), cycle=True), ()),
    }


def _run(
    setting: Setting, platform: Platform, trace: Trace, stragglers: tuple[Straggler, ...], *, seed: int
) -> list[Seen]:
    found: dict[int, Seen] = {}

    def program(comm: Any) -> None:
        found[comm.Get_rank()] = watched(setting.main, comm)

    simulate(
        program,
        ranks=setting.ranks,
        platform=platform,
        stragglers=stragglers,
        compute_s=trace,
        seed=seed,
        recorder=Silence(),
    )
    return [found[rank] for rank in range(setting.ranks)]
