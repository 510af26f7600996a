"""What stragglers cost a job, from a trace of its operations as ByteDance published them (Lin et al., OSDI 2025).

What-if analysis as there: T is how long the steps take with the durations that were recorded, T_ideal with the mean of
all operations of the same type instead, and the slowdown is S = T / T_ideal. S_w has the recorded durations of one
worker (or stage) alone, all others at the mean; and what the last stage explains is (T - T') / (T - T_ideal), with
T' that of the last stage at the mean, all others as recorded.

A step is computing alone: each worker computes its operations in the order in which it did, the forward pass of a
micro-batch on a model chunk waits for the chunk before, the backward pass for the chunk behind, and the step lasts
until the slowest worker is done. Communication, the optimizer and gaps are left out, on which the original also
simulates: where they take long, S is nearer to 1 there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.fidelity.inputs import table_rows
from spawnsim.models.compute import Trace

FORWARD, BACKWARD = "forward-compute", "backward-compute"
WHOLE = ("rank", "stage", "step")  # numbers without a fraction
COLUMNS = (*WHOLE, "optype", "duration")
PIPELINE = ("dp_rank", "mb_id", "gmc")  # whole numbers, too; needed of several stages, with start_ts
Columns = dict[str, NDArray[Any]]


class WhatIf(NamedTuple):
    """How much longer steps take than with equal operations (1: not at all).

    Attributes:
        slowdown: S, in all.
        workers: each worker's rank in the trace.
        by_worker: S_w, with one worker as it was.
        by_stage: with one stage as it was.
        last_stage: the share of the slowdown that goes with the last stage's durations; 0 without a slowdown.
    """

    slowdown: float
    workers: tuple[int, ...]
    by_worker: tuple[float, ...]
    by_stage: tuple[float, ...]
    last_stage: float


def read_bytedance(path: Path) -> tuple[Trace, WhatIf]:
    """Return compute times of a job's workers, and what its stragglers cost.

    A row is an operation of a worker; those of `optype` forward-compute and backward-compute count.

    Args:
        path: Parquet (`pip install "spawnsim[tables]"`), or CSV with the same columns: rank, stage, step, optype,
            duration (s); of pipelines also start_ts (s), dp_rank, mb_id (micro-batch) and gmc (model chunk, numbered
            through the whole model); and any others.

    Returns:
        A row of seconds for each worker by rising rank, one entry a step; and the analysis.

    Raises:
        ParameterError: the file cannot be read, lacks a column, a value is no number, a worker lacks a step, or
            operations wait for one that is not there.
    """
    columns = _operations(path)
    workers, worker = np.unique(columns["rank"], return_inverse=True)
    steps, step = np.unique(columns["step"], return_inverse=True)
    sums, counts = np.zeros((len(workers), len(steps))), np.zeros((len(workers), len(steps)), np.int64)
    np.add.at(sums, (worker, step), columns["duration"])
    np.add.at(counts, (worker, step), 1)
    if not counts.all():
        lacks, of = np.argwhere(counts == 0)[0]
        raise ParameterError(
            f"{path}: step: rank {workers[lacks]:.0f} computes nothing in step {steps[of]:.0f}"
        )
    found = _analysis(path, columns | {"worker": worker}, workers)
    return Trace(list(sums), source=str(path)), found


def _analysis(path: Path, columns: Columns, workers: NDArray[Any]) -> WhatIf:
    """Carry out all steps under every change of durations at once, a column for each change."""
    stages, stage = np.unique(columns["stage"], return_inverse=True)
    recorded = columns["duration"]
    backward = columns["optype"] == BACKWARD
    mean = np.zeros(len(recorded))
    for kind in (backward, ~backward):
        if kind.any():
            mean[kind] = recorded[kind].mean()
    last = stage == len(stages) - 1
    kept = np.stack(
        [np.ones_like(last), np.zeros_like(last), ~last]
        + [columns["worker"] == each for each in range(len(workers))]
        + [stage == each for each in range(len(stages))],
        axis=1,
    )
    durations = np.where(kept, recorded[:, None], mean[:, None])
    took_s = np.sum(list(_steps_s(path, columns, durations)), axis=0)
    recorded_s, ideal_s, without_s = (float(each) for each in took_s[:3])
    slower = tuple((took_s[3:] / ideal_s).tolist())
    lost_s = recorded_s - ideal_s
    return WhatIf(
        recorded_s / ideal_s,
        tuple(int(each) for each in workers),
        slower[: len(workers)],
        slower[len(workers) :],
        (recorded_s - without_s) / lost_s if abs(lost_s) > 1e-9 * ideal_s else 0.0,
    )


def _steps_s(path: Path, columns: Columns, durations: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield how long each step takes, (changes,)."""
    worker = columns["worker"]
    in_stages = len(np.unique(columns["stage"])) > 1
    order = (
        np.lexsort((columns["start_ts"], worker, columns["step"]))
        if in_stages
        else np.argsort(columns["step"])
    )
    for places in np.split(order, np.flatnonzero(np.diff(columns["step"][order])) + 1):
        if in_stages:
            yield _pipeline_s(path, columns, places, durations)
        else:  # no worker waits before the end
            each = np.zeros((worker.max() + 1, durations.shape[1]))
            np.add.at(each, worker[places], durations[places])
            yield each.max(axis=0)


def _pipeline_s(path: Path, columns: Columns, places: NDArray[Any], durations: NDArray[Any]) -> NDArray[Any]:
    """Return how long one step takes; `places` are its operations, worker by worker in the order of their starts."""
    names = list(
        zip(*(columns[name][places].tolist() for name in ("dp_rank", "optype", "mb_id", "gmc")), strict=True)
    )
    awaited = _awaited(names)
    left: defaultdict[int, list[int]] = defaultdict(list)
    for at in reversed(range(len(places))):
        left[int(columns["worker"][places[at]])].append(at)
    done: dict[Any, NDArray[Any]] = {}
    free_s: dict[int, NDArray[Any]] = {own: np.zeros(durations.shape[1]) for own in left}
    going = list(left)
    while going:
        before = len(done)
        for own in going:
            while left[own] and (
                names[left[own][-1]] not in awaited or awaited[names[left[own][-1]]] in done
            ):
                at = left[own].pop()
                begin = free_s[own]
                if names[at] in awaited:
                    begin = np.maximum(begin, done[awaited[names[at]]])
                free_s[own] = done[names[at]] = begin + durations[places[at]]
        going = [own for own in going if left[own]]
        if going and len(done) == before:
            replica, kind, batch, chunk = names[left[going[0]][-1]]
            raise ParameterError(
                f"{path}: step {columns['step'][places[0]]:.0f}: {kind} of dp_rank {replica:.0f}, mb_id {batch:.0f}, "
                f"gmc {chunk:.0f} waits for one that comes after it: are start_ts, mb_id and gmc as they were?"
            )
    return np.max(list(free_s.values()), axis=0)  # type: ignore[no-any-return]


def _awaited(names: list[Any]) -> Mapping[Any, Any]:
    """Return which operation each waits for, of another chunk: the forward pass below, the backward pass above."""
    known, found = set(names), {}
    for name in names:
        replica, kind, batch, chunk = name
        wanted = (replica, kind, batch, chunk + (1 if kind == BACKWARD else -1))
        if kind == BACKWARD and wanted not in known:  # the last chunk: what it is the gradient of
            wanted = (replica, FORWARD, batch, chunk)
        if wanted in known:
            found[name] = wanted
    return found


def _operations(path: Path) -> Columns:
    """Return the columns of the operations that compute: texts, or float64."""
    table = _table(path)
    columns = {name: _column(path, table, name) for name in COLUMNS}
    computes = np.isin(columns["optype"], (FORWARD, BACKWARD))
    if not computes.any():
        raise ParameterError(f"{path}: optype: no {FORWARD} or {BACKWARD}")
    needed: tuple[str, ...] = WHOLE
    if len(np.unique(columns["stage"][computes])) > 1:
        columns |= {name: _column(path, table, name) for name in (*PIPELINE, "start_ts")}
        needed = WHOLE + PIPELINE
    for name in needed:
        bad = np.flatnonzero(computes & (columns[name] != np.floor(columns[name])))
        if len(bad):
            raise ParameterError(
                f"{path}: {name} of row {bad[0]} is {columns[name][bad[0]]}, no whole number"
            )
    duration = columns["duration"]
    bad = np.flatnonzero(~((duration >= 0.0) & (duration < np.inf)))
    if len(bad):
        raise ParameterError(f"{path}: duration of row {bad[0]} is {duration[bad[0]]}, not 0 s or more")
    return {name: values[computes] for name, values in columns.items()}


def _table(path: Path) -> Mapping[str, Any]:
    if path.suffix == ".csv":
        rows = [row for _, row in table_rows(path, COLUMNS, ",")]
        return {name: [row[name] or "nan" for row in rows] for name in (rows[0] if rows else COLUMNS)}
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise UnsupportedError(f'{path}: Parquet needs pyarrow: pip install "spawnsim[tables]"') from error
    try:
        file = parquet.ParquetFile(path)
        known = [name for name in (*COLUMNS, *PIPELINE, "start_ts") if name in file.schema_arrow.names]
        found: Mapping[str, Any] = file.read(columns=known).to_pydict()
    except (OSError, ValueError, KeyError) as error:  # pyarrow's errors are of these
        raise ParameterError(f"{path}: cannot be read as Parquet ({error})") from error
    return found


def _column(path: Path, table: Mapping[str, Any], name: str) -> NDArray[Any]:
    if name not in table:
        raise ParameterError(
            f"{path}: no column {name!r}; it needs {', '.join((*COLUMNS, *PIPELINE, 'start_ts'))}"
        )
    try:
        return np.array(table[name], dtype=str if name == "optype" else np.float64)
    except (ValueError, TypeError) as error:
        raise ParameterError(f"{path}: {name}: {error}") from error
