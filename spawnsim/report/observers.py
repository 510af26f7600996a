"""Observers of a run, through its folder: the live page, loggers of curves, and the loop that updates them.

`LOGGERS` is the one table of loggers. Each gets the same *steps*: for every recorded column of numbers, the median
and the 10 % and 90 % quantiles over ranks, once for each iteration, as soon as all living ranks have passed it. So
1,000 ranks make three curves per metric, not 1,000. Each logger's library is imported when the logger is opened.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.plots.series import BAND
from spawnsim.real.runtime.registry import DEAD, ENDED, REGISTRY, ranks_at_stage
from spawnsim.record.journal import RankStates, read_states
from spawnsim.run.result import Run

QUANTILES = {"median": 0.5, "p10": BAND[0], "p90": BAND[1]}
POLL_S = 1.0  # the least time between two polls of a run
ENDS = (("died", DEAD), ("finished", ENDED))  # the stages that a monitor writes about its rank
SILENT_S = 5.0  # after this silence a real rank's state is unknown: stopped, or in code that blocks threads
SHARE = 0.01  # the largest share of a core that polls may take while the run executes


class Step(NamedTuple):
    """The values that ranks recorded in one iteration, by "column/median", "column/p10", "column/p90"."""

    iteration: int
    values: dict[str, float]


class Steps:
    """The steps of a run, each yielded once."""

    def __init__(self) -> None:
        self._last = -1  # the last iteration that was yielded

    def new(self, run: Run, *, ended: bool) -> Iterator[Step]:
        """Yield the new steps that all living ranks have completed; at the end of the run, all remaining steps."""
        rank = np.asarray(run.table["rank"])
        iteration = _iterations(run, rank)
        if not len(iteration):
            return
        until = int(iteration.max()) + 1 if ended else self._passed(run, rank, iteration)
        chosen = np.flatnonzero((iteration > self._last) & (iteration < until))
        # By iteration, so that each iteration is one stretch.
        chosen = chosen[np.argsort(iteration[chosen], kind="stable")]
        found, sizes = np.unique(iteration[chosen], return_counts=True)
        ends = np.cumsum(sizes)
        columns = {
            name: np.asarray(run.table[name], dtype=np.float64)[chosen]
            for name in run.table
            if name not in ("rank", "iteration") and run.table.dtype(name).kind in "biuf"
        }
        replaced = _replaced(run, found)
        for place, (begin, end) in enumerate(zip(ends - sizes, ends, strict=True)):
            values = {
                f"{name}/{which}": each
                for name, column in columns.items()
                for which, each in _quantiles(column[begin:end])
            }
            yield Step(int(found[place]), values | {"replacements": float(replaced[place])})
            self._last = int(found[place])

    @staticmethod
    def _passed(run: Run, rank: Any, iteration: Any) -> int:
        """Return the iteration of the slowest living rank."""
        dead = {event["rank"] for event in run.events if event["kind"] == "crash"}
        furthest = np.full(max(int(run.what.get("ranks") or 0), int(rank.max()) + 1), -1)
        np.maximum.at(furthest, rank, iteration)
        living = [int(each) for number, each in enumerate(furthest) if number not in dead]
        return min(living, default=-1)


def _iterations(run: Run, rank: Any) -> Any:
    """Return the iteration of each row; if none was recorded, the number of earlier rows of the row's rank."""
    if "iteration" in run.table and run.table.dtype("iteration").kind in "if":
        return np.nan_to_num(run.table["iteration"], nan=-1).astype(np.int64)
    # Rows are ordered by rank, and in recorded order within a rank.
    first = np.searchsorted(rank, rank)
    return np.arange(len(rank)) - first


def _quantiles(values: Any) -> Iterator[tuple[str, float]]:
    known = values[np.isfinite(values)]
    if len(known):
        yield from zip(QUANTILES, np.quantile(known, list(QUANTILES.values())).tolist(), strict=True)


def _replaced(run: Run, iterations: Any) -> Any:
    """Return the number of replacements up to each of these iterations, according to their events."""
    when = sorted(
        each["iteration"]
        for each in run.events
        if each["kind"] == "replacement" and isinstance(each.get("iteration"), int)
    )
    return np.searchsorted(when, iterations, side="right")


# --------------------------------------------------------------------------------------------------------- loggers
class Logger(Protocol):
    """A receiver of the steps of one run."""

    def step(self, step: Step) -> None: ...

    def close(self, totals: Mapping[str, float]) -> None:
        """Take the run's totals, and write all pending data."""


class TensorBoard:
    """Writes event files that TensorBoard reads."""

    def __init__(self, folder: Path, _what: Mapping[str, Any]) -> None:
        from tensorboard.summary import Writer  # not torch's, which would load torch

        self._writer: Any = Writer(str(folder / "tensorboard"))

    def step(self, step: Step) -> None:
        for name, value in step.values.items():
            self._writer.add_scalar(name, value, step.iteration)
        self._writer.flush()

    def close(self, totals: Mapping[str, float]) -> None:
        for name, value in totals.items():
            self._writer.add_scalar(f"totals/{name}", value, 0)
        self._writer.close()


class WeightsAndBiases:
    """Logs to a run of Weights & Biases; `wandb sync` uploads offline files."""

    def __init__(self, folder: Path, what: Mapping[str, Any]) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = wandb.init(
            mode=mode, dir=folder, project="spawnsim", name=folder.name, config=dict(what),
            settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip

    def step(self, step: Step) -> None:
        self._run.log(step.values, step=step.iteration)

    def close(self, totals: Mapping[str, float]) -> None:
        self._run.summary.update(dict(totals))
        self._run.finish()


LOGGERS: dict[str, Callable[[Path, Mapping[str, Any]], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


# ------------------------------------------------------------------------------------------------------- following
class Observer(Protocol):
    """A receiver of a run while it executes, and of the whole run at its end."""

    def show(self, run: Run, states: RankStates | None) -> None:
        """Take the rows so far, and the states of the ranks if they are known."""

    def end(self, run: Run) -> None: ...


class Logging:
    """An observer that passes each step of a run to a logger once."""

    def __init__(self, logger: Logger) -> None:
        self._logger, self._steps = logger, Steps()

    def show(self, run: Run, _states: RankStates | None) -> None:
        for step in self._steps.new(run, ended=False):
            self._logger.step(step)

    def end(self, run: Run) -> None:
        for step in self._steps.new(run, ended=True):
            self._logger.step(step)
        totals = {name: float(value) for name, value in run.totals.items() if isinstance(value, (int, float))}
        self._logger.close(totals)


def follow(
    folder: Path,
    observers: Sequence[Observer],
    over: Callable[[float, Run | None], bool],
    registry: Path | None = None,
) -> None:
    """Show a run to observers until it ends, and then its end.

    Args:
        folder: the run folder.
        observers: the observers.
        over: waits for at most the given seconds, and returns whether the run has ended; its second argument is the
            run.
        registry: the folder in which the processes of a job of real ranks write their stages.
    """
    wait_s, run = 0.0, None
    while not over(wait_s, run):
        begin_s, first = time.process_time(), run is None
        run = _loaded(folder)
        if run is not None:
            states = read_states(folder) if not run.is_real else real_states(folder, run, registry)
            for each in observers:
                each.show(run, states)
        # The first poll loads much that later polls find loaded.
        spent_s = 0.0 if first else time.process_time() - begin_s
        wait_s = max(POLL_S, spent_s / SHARE * _crowding())
    # A run that ended before it recorded anything has nothing to show.
    run = _loaded(folder)
    if run is not None:
        for each in observers:
            each.end(run)


def _crowding() -> float:
    """Return the processes per core, from 1 to 3: on a busy machine a run takes longer, and is polled less often."""
    return min(max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0), 3.0)


def _loaded(folder: Path) -> Run | None:
    """Return the run as recorded so far; None while it starts, or moves its files."""
    with suppress(ParameterError, FileNotFoundError):
        return Run.load(folder)
    return None


def real_states(folder: Path, run: Run, registry: Path | None) -> RankStates:
    """Return the states of real ranks: their monitors write how they ended, the ranks themselves write their waits."""
    environ = {} if registry is None else {REGISTRY: str(registry)}
    stages = [(word, ranks_at_stage(stage, environ) or set()) for word, stage in ENDS]

    def state(rank: int) -> tuple[str, str]:
        ended = next((word for word, ranks in stages if rank in ranks), None)
        reported = read_states(folder, rank)
        if ended is not None or reported is None:
            return ended or "running", ""
        silent_s = time.time() - reported.time_s
        return reported.ranks[0] if silent_s < SILENT_S else ("running", f"no report for {silent_s:.0f} s")

    last_s = float(np.max(run.table["time_s"], initial=0.0))
    return RankStates(last_s, [state(rank) for rank in range(int(run.what.get("ranks") or 0))])
