"""Predictions of a real run's times on virtual ranks, and their errors over repeats.

The same program runs with compute times from the real run: replayed, fitted, or only their mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.fidelity.fitting import Fit, fit_stragglers
from spawnsim.fidelity.microbenchmarks import FloatArray
from spawnsim.fidelity.scoring import NullRecorder
from spawnsim.fidelity.watching import Seen, watched
from spawnsim.models.compute import Straggler, Trace
from spawnsim.models.platform import Cores, Platform
from spawnsim.scenario import Scenario
from spawnsim.units import text_table
from spawnsim.virtual import simulate

MEASURES = ("iteration", "policy", "waiting share", "total")


@dataclass(frozen=True)
class Times:
    """The times of a run after its warm-up.

    Attributes:
        iteration_s: mean time from one compute block to the next.
        policy_s: mean time between two blocks: communication and the program's own work.
        waiting: share of the time spent inside communication calls.
        total_s: time from the first block to the end, on the slowest rank.
    """

    iteration_s: float
    policy_s: float
    waiting: float
    total_s: float

    def named(self) -> dict[str, float]:
        """Return the values with the names in `MEASURES`."""
        return dict(zip(MEASURES, (self.iteration_s, self.policy_s, self.waiting, self.total_s), strict=True))


def times(seen: Sequence[Seen], warmup: int, *, local_s: float = 0.0) -> Times:
    """Return the times of a run. `local_s`: mean of the program's own work, which virtual runs put in blocks."""
    # From the first block after the warm-up: first calls load libraries and make connections, which take no virtual
    # time.
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
    """Times of virtual runs with one model of compute, one run for each seed."""

    name: str
    runs: tuple[Times, ...]

    def median(self) -> dict[str, float]:
        return {name: float(np.median([run.named()[name] for run in self.runs])) for name in MEASURES}


@dataclass(frozen=True)
class Setting:
    """A prediction: a program, its scenario with the first seed, and the number of first blocks to ignore (`warmup`).

    `cores`: the cores that the ranks of the real run shared; None: each rank had its own core.
    """

    main: Callable[[Any], object]
    scenario: Scenario
    warmup: int
    cores: Cores | None = None


def predict(
    setting: Setting, seen: Sequence[Seen], platform: Platform, *, seeds: int = 5
) -> tuple[Prediction, ...]:
    """Return the predictions from replayed, fitted and constant compute times."""
    # A program's own work between calls takes no virtual time, so add it to the block before it.
    rows = [work_s(rank, setting) for rank in seen]
    short = [rank for rank, row in enumerate(rows) if len(row) < setting.warmup + 2]
    if short:
        raise ParameterError(
            f"rank {short[0]} went through {len(rows[short[0]])} comm.compute() blocks: validation needs at least "
            f"{setting.warmup + 2} (a warm-up of {setting.warmup}, and two more)"
        )
    local_s = float(np.mean([rank.local_s[setting.warmup :].mean() for rank in seen]))
    found = []
    for name, (trace, stragglers) in _models(rows, setting.warmup).items():
        # Without stragglers nothing is random: other seeds would give the same run.
        runs = 1 if not stragglers else seeds
        first = setting.scenario.seed
        ran = [_run(setting, platform, trace, stragglers, seed=seed) for seed in range(first, first + runs)]
        found.append(Prediction(name, tuple(times(each, setting.warmup, local_s=local_s) for each in ran)))
    return tuple(found)


def fitted(seen: Sequence[Seen], setting: Setting) -> Fit:
    """Return the straggler fit of a run's compute blocks."""
    return fit_stragglers([work_s(rank, setting)[setting.warmup :] for rank in seen])


def work_s(rank: Seen, setting: Setting) -> FloatArray:
    """Return a rank's work from block to block, in seconds on an unshared core."""
    # By the clock, a block includes the turns of other ranks on its core, which the prediction adds itself.
    worked_s = None if setting.cores is None else rank.worked_s
    return (rank.blocks_s if worked_s is None else worked_s) + rank.local_s


def _models(rows: Sequence[FloatArray], warmup: int) -> Mapping[str, tuple[Trace, tuple[Straggler, ...]]]:
    fit = fit_stragglers([row[warmup:] for row in rows])
    mean_s = float(np.mean([row[warmup:].mean() for row in rows]))
    # Traces, since a trace takes precedence over the durations that the program gives to comm.compute(seconds): a
    # real program may state the durations of another machine.
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

    platform = replace(platform, cores=setting.cores)
    scenario = replace(setting.scenario, platform=platform, stragglers=stragglers, compute=trace, seed=seed)
    simulate(program, scenario, recorder=NullRecorder())
    return [found[rank] for rank in range(scenario.ranks)]


SAME = ("library", "ranks", "cores", "machine", "python", "numpy")
"""Facts that should be the same where a platform was measured and where it is used."""


@dataclass(frozen=True)
class Repeat:
    """One real run, and the predictions from its compute times."""

    measured: Times
    predictions: tuple[Prediction, ...]

    def error(self, model: str, measure: str) -> float:
        """Return predicted over measured, less 1; for the waiting share, the difference of the shares."""
        measured = self.measured.named()[measure]
        predicted = next(each for each in self.predictions if each.name == model).median()[measure]
        # If a share is near zero, any relative error of it is huge.
        if measure == "waiting share":
            return predicted - measured
        return predicted / measured - 1.0 if measured else float("nan")


@dataclass(frozen=True)
class Row:
    """One measure over all repeats: the median measured value; the median, least and largest error of each model."""

    measure: str
    measured: float
    errors: Mapping[str, tuple[float, float, float]]


def summary(repeats: Sequence[Repeat]) -> tuple[Row, ...]:
    """Return a row for each measure."""
    models = [prediction.name for prediction in repeats[0].predictions]
    return tuple(
        Row(
            measure,
            float(np.median([repeat.measured.named()[measure] for repeat in repeats])),
            {model: _spread([repeat.error(model, measure) for repeat in repeats]) for model in models},
        )
        for measure in MEASURES
    )


def _spread(errors: Sequence[float]) -> tuple[float, float, float]:
    return float(np.median(errors)), min(errors), max(errors)


def error_table(rows: Sequence[Row], repeats: int) -> str:
    """Return the rows as lines of text."""
    models = list(rows[0].errors)
    lines = []
    for row in rows:
        share = row.measure == "waiting share"
        value = f"{row.measured:.1%}" if share else _seconds(row.measured)
        lines.append((row.measure, value, *(_cell(row.errors[model], share, repeats) for model in models)))
    legend = "replayed: the run's own compute times. fitted: their mean and the straggler fit. constant: their mean."
    return f"{text_table(('', 'measured', *models), lines)}\n{legend}"


@dataclass(frozen=True)
class Validated:
    """A program that was run and predicted: its name, with ranks and parameters, and a row per measure."""

    name: str
    rows: tuple[Row, ...]


def case_table(cases: Sequence[Validated]) -> str:
    """Return one line per program: the times of an iteration and of the run, and the errors of the predictions."""
    lines = []
    for case in cases:
        rows = {row.measure: row for row in case.rows}
        cells = [case.name]
        for measure in ("iteration", "total"):
            cells.append(_seconds(rows[measure].measured))
            cells += [_cell(rows[measure].errors[model], False, 2) for model in rows[measure].errors]
        cells.append(_cell(rows["waiting share"].errors["replayed"], True, 2))
        lines.append(cells)
    models = list(cases[0].rows[0].errors)
    head = ("", "iteration", *models, "total", *models, "waiting share")
    return (
        f"{text_table(head, lines)}\nmedian error [least largest] over the repeats; waiting share: replayed"
    )


def read_cases(path: Path) -> list[Validated]:
    """Return the programs in a file with the output of `spawnsim validate --json` for several programs.

    Raises:
        ParameterError: the file cannot be read, or has other content.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return [Validated(str(case["name"]), tuple(map(_row, case["rows"]))) for case in document["cases"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParameterError(
            f"{path}: not the output of validate --json for several programs ({error!r})"
        ) from error


def _row(row: Mapping[str, Any]) -> Row:
    return Row(row["measure"], float(row["measured"]), {m: tuple(e) for m, e in row["errors"].items()})


def _cell(errors: tuple[float, float, float], share: bool, repeats: int) -> str:
    unit = " points" if share else "%"
    middle, low, high = (error * 100.0 for error in errors)
    spread = f" [{low:+.0f} {high:+.0f}]" if repeats > 1 else ""
    return f"{middle:+.1f}{unit}{spread}"


def _seconds(seconds: float) -> str:
    unit, scale = next(
        (u, s) for u, s in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if seconds * s >= 1 or u == "us"
    )
    return f"{seconds * scale:.3g} {unit}"


def differences(platform: Platform, here: Iterable[tuple[str, str]]) -> list[str]:
    """Return the facts that changed since the platform was measured; empty if it was not measured at all."""
    there = dict(platform.fitted)
    return [
        f"{name} was {there[name]}, is {value}"
        for name, value in here
        if name in SAME and there.get(name, value) != value
    ]
