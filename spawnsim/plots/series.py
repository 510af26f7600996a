"""From a table of rows (rank, time, value) to curves over ranks and over seeds.

Numpy arrays only: no file, no figure, no run object. Every function is pure, and the bootstrap draws from a seed that
the caller passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError
from spawnsim.options import nearest
from spawnsim.random import WORLD, generator

Floats = NDArray[np.float64]
Table = Mapping[str, NDArray[Any]]

BAND = (0.1, 0.9)
FEW = 5  # with fewer seeds, an interval contains no more than the seeds


class Grid(NamedTuple):
    """Values of every rank on common points: `x` (points,), `values` (ranks, points), NaN before a rank's first row."""

    x: Floats
    values: Floats


class Interval(NamedTuple):
    """A median with bounds; `kind` names the bounds: its confidence interval, or the least and largest value."""

    median: float
    low: float
    high: float
    kind: str = "90 % interval"


def column(table: Table, name: str) -> NDArray[Any]:
    """Return a column, or raise an error that lists the columns."""
    if name not in table:
        hint = nearest(name, table) or f"this run has: {', '.join(sorted(table))}"
        raise ParameterError(f"column {name!r} was not recorded; {hint}")
    return table[name]


def numbers(table: Table, name: str) -> Floats:
    """Return a column as floats, or raise an error if it holds texts."""
    found = column(table, name)
    if found.dtype.kind not in "biuf":
        raise ParameterError(f"column {name!r} holds texts, which have no curve")
    return np.asarray(found, dtype=np.float64)


def carried_forward(table: Table, name: str, over: str = "time_s", points: int = 240) -> Grid:
    """Put each rank's values on a common grid over `over`; a rank keeps its last value until the next row.

    Rows whose value or position is NaN are left out. `over="iteration"` uses the recorded iterations as the grid
    when there are at most `points` of them.
    """
    values = numbers(table, name)
    position = numbers(table, over)
    rank = np.asarray(column(table, "rank"))
    # Infinite values stay: a diverged loss must not look like the last good one.
    known = np.isfinite(position) & ~np.isnan(values)
    values, position, rank = values[known], position[known], rank[known]
    if not len(values):
        raise ParameterError(f"column {name!r} holds no numbers")
    # By rank first, so that each rank's rows are one stretch that can be searched without a mask.
    order = np.lexsort((position, rank))
    values, position, rank = values[order], position[order], rank[order]
    x = _grid(position, points)
    members, starts = np.unique(rank, return_index=True)
    out = np.full((len(members), len(x)), np.nan)
    for row, (begin, end) in enumerate(zip(starts, [*starts[1:], len(rank)], strict=True)):
        # "right": at a row's own time its value counts already.
        last = np.searchsorted(position[begin:end], x, side="right") - 1
        out[row] = np.where(last >= 0, values[begin:end][np.maximum(last, 0)], np.nan)
    return Grid(x, out)


def _grid(position: Floats, points: int) -> Floats:
    # A few positions, such as iterations, are the grid: points between them would show steps that no rank took.
    distinct = np.unique(position)
    if len(distinct) <= points:
        return distinct
    return np.linspace(distinct[0], distinct[-1], points)


def quantiles(grid: Grid, levels: Sequence[float]) -> Floats:
    """Return quantiles over ranks, shape (levels, points); NaN while fewer than half of the ranks have a value."""
    # A median of the first few ranks would jump as each slower rank joins.
    enough = np.mean(~np.isnan(grid.values), axis=0) >= 0.5
    out = np.full((len(levels), len(grid.x)), np.nan)
    out[:, enough] = np.nanquantile(grid.values[:, enough], levels, axis=0)
    return out


def resampled(x: Floats, y: Floats, onto: Floats) -> Floats:
    """Return a step curve at other points: the last value at or before each; NaN before the first."""
    last = np.searchsorted(x, onto, side="right") - 1
    return np.where(last >= 0, y[np.maximum(last, 0)], np.nan)


def bootstrap_medians(samples: Floats, level: float = 0.9, draws: int = 2000, seed: int = 0) -> Floats:
    """Return median, low and high over the first axis, shape (3, …): a percentile bootstrap of the median.

    The percentile interval of Efron (1979); with one sample low and high equal the median.
    """
    samples = np.asarray(samples, dtype=np.float64)
    if not len(samples):
        raise ParameterError("a bootstrap needs at least one sample")
    # A separate stream of the seed: the same runs give the same figure, whatever else was drawn.
    rng = generator(seed, WORLD, "bootstrap")
    picks = rng.integers(0, len(samples), size=(draws, len(samples)))
    # One column at a time would need less memory, but draws x seeds x points stays under 100 MB for 20 seeds of 240
    # points.
    medians = np.median(samples[picks], axis=1)
    # Infinite values, of runs that never reach a target, cannot be interpolated: then the bounds are drawn values.
    levels = [(1 - level) / 2, (1 + level) / 2]
    finite = np.isfinite(medians).all()
    low, high = np.quantile(medians, levels, axis=0, method="linear" if finite else "nearest")
    return np.stack([np.median(samples, axis=0), low, high])


def bootstrap_median(samples: Sequence[float], level: float = 0.9, seed: int = 0) -> Interval:
    """Return the median of a few numbers (one per seed) with its bootstrap interval."""
    median, low, high = map(float, bootstrap_medians(np.asarray(samples, dtype=np.float64), level, seed=seed))
    return Interval(median, low, high, f"{100 * level:g} % interval")


def over_seeds(samples: Sequence[float]) -> Interval:
    """Return the median of one number per seed with its interval; with fewer than five seeds, the least and largest."""
    if len(samples) >= FEW:
        return bootstrap_median(samples)
    values = np.asarray(samples, dtype=np.float64)
    return Interval(float(np.median(values)), float(values.min()), float(values.max()), "least to largest")


def per_rank_last(table: Table, name: str) -> Floats:
    """Return the last recorded (not NaN) value of each rank, ordered by rank."""
    values = numbers(table, name)
    rank = np.asarray(column(table, "rank"))
    known = ~np.isnan(values)
    # `unique` finds the first of each, so in reverse order it finds the last.
    members, reverse = np.unique(rank[known][::-1], return_index=True)
    return values[known][::-1][reverse] if len(members) else np.empty(0)


def per_rank_sum(table: Table, name: str) -> Floats:
    """Return the sum of a column per rank, ordered by rank; NaN counts as 0."""
    rank = np.asarray(column(table, "rank"))
    members, index = np.unique(rank, return_inverse=True)
    values = np.nan_to_num(numbers(table, name))
    return np.bincount(index, weights=values, minlength=len(members)).astype(np.float64)


def spread_at_end(table: Table, name: str, band: tuple[float, float] = BAND) -> tuple[float, float, float]:
    """Return low, median and high over ranks of each rank's last value; NaN if no rank has a value."""
    last = per_rank_last(table, name)
    if not len(last):
        return (float("nan"),) * 3
    low, median, high = np.quantile(last, (band[0], 0.5, band[1]))
    return float(low), float(median), float(high)
