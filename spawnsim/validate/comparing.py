"""Predicted against measured: errors, and how they spread over repeats.

This room knows times and predictions of times. It must not know how either came about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spawnsim.validate.predicting import MEASURES, Prediction, Times
from spawnsim.virtual.platform import Platform

SAME = ("library", "ranks", "cores", "machine", "python", "numpy")
"""What should be the same where a platform was measured and where it is used."""


@dataclass(frozen=True)
class Repeat:
    """One real run, and the predictions made from its compute times."""

    measured: Times
    predictions: tuple[Prediction, ...]

    def error(self, model: str, measure: str) -> float:
        """Return predicted over measured, less 1; for the waiting share the difference of the shares."""
        measured = self.measured.named()[measure]
        predicted = next(each for each in self.predictions if each.name == model).median()[measure]
        if measure == "waiting share":
            return predicted - measured
        return predicted / measured - 1.0 if measured else float("nan")


@dataclass(frozen=True)
class Row:
    """One measure over all repeats: the median measured value, and per model the median, least and largest error."""

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


def table(rows: Sequence[Row], repeats: int) -> str:
    """Return the rows as lines of text."""
    models = list(rows[0].errors)
    head = f"{'':15}{'measured':>12}" + "".join(f"{model:>24}" for model in models)
    lines = [head]
    for row in rows:
        share = row.measure == "waiting share"
        value = f"{row.measured:.1%}" if share else _seconds(row.measured)
        cells = "".join(f"{_cell(row.errors[model], share, repeats):>24}" for model in models)
        lines.append(f"{row.measure:15}{value:>12}{cells}")
    lines.append(
        "replayed: the run's own compute times. fitted: their mean and the straggler fit. constant: their mean."
    )
    return "\n".join(lines)


def _cell(errors: tuple[float, float, float], share: bool, repeats: int) -> str:
    unit, scale = (" points", 100.0) if share else ("%", 100.0)
    middle, low, high = (error * scale for error in errors)
    spread = f" [{low:+.0f} {high:+.0f}]" if repeats > 1 else ""
    return f"{middle:+.1f}{unit}{spread}"


def _seconds(seconds: float) -> str:
    unit, scale = next(
        (u, s) for u, s in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if seconds * s >= 1 or u == "us"
    )
    return f"{seconds * scale:.3g} {unit}"


def differences(platform: Platform, here: Iterable[tuple[str, str]]) -> list[str]:
    """Return what is not as it was where the platform was measured; empty if it was not measured at all."""
    there = dict(platform.fitted)
    return [
        f"{name} was {there[name]}, is {value}"
        for name, value in here
        if name in SAME and there.get(name, value) != value
    ]
