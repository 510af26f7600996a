"""Observers of a run, through its folder: the live page and loggers of curves; and the loop that feeds them.

`LOGGERS` is the one table of loggers. Each gets the same *steps*: of every recorded column of numbers the median and
the 10 % and 90 % quantiles over ranks, once for each iteration, as soon as all ranks that live have come past it. So
1,000 ranks make three curves a metric, and not 1,000. Each logger's library is imported when it is opened.
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
LOOK_S = 1.0  # between two looks at a run, at least
ENDS = (("died", DEAD), ("finished", ENDED))  # what a monitor has written of its rank
SILENT_S = 5.0  # after that a real rank may do what it likes: its process is stopped, or in code that lets no other run
SHARE = 0.01  # of a core, at most, that looks at a run take while it goes on


class Step(NamedTuple):
    """What ranks recorded in one iteration: `values` by "column/median", "column/p10", "column/p90"."""

    iteration: int
    values: dict[str, float]


class Steps:
    """The steps of a run, each yielded once."""

    def __init__(self) -> None:
        self._told = -1  # the last iteration

    def new(self, run: Run, *, ended: bool) -> Iterator[Step]:
        """Yield the new steps that all living ranks have completed; at the end all that are left."""
        rank = np.asarray(run.table["rank"])
        iteration = _iterations(run, rank)
        if not len(iteration):
            return
        until = int(iteration.max()) + 1 if ended else self._passed(run, rank, iteration)
        chosen = np.flatnonzero((iteration > self._told) & (iteration < until))
        # By iteration, so that each is one stretch.
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
            self._told = int(found[place])

    @staticmethod
    def _passed(run: Run, rank: Any, iteration: Any) -> int:
        """Return the iteration that the last of the ranks that live is at."""
        dead = {event["rank"] for event in run.events if event["kind"] == "crash"}
        furthest = np.full(max(int(run.what.get("ranks") or 0), int(rank.max()) + 1), -1)
        np.maximum.at(furthest, rank, iteration)
        living = [int(each) for number, each in enumerate(furthest) if number not in dead]
        return min(living, default=-1)


def _iterations(run: Run, rank: Any) -> Any:
    """Return the iteration of each row; where none was recorded, how many rows its rank had recorded before."""
    if "iteration" in run.table and run.table.dtype("iteration").kind in "if":
        return np.nan_to_num(run.table["iteration"], nan=-1).astype(np.int64)
    # Rows are ordered by rank, then as recorded.
    first = np.searchsorted(rank, rank)
    return np.arange(len(rank)) - first


def _quantiles(values: Any) -> Iterator[tuple[str, float]]:
    known = values[np.isfinite(values)]
    if len(known):
        yield from zip(QUANTILES, np.quantile(known, list(QUANTILES.values())).tolist(), strict=True)


def _replaced(run: Run, iterations: Any) -> Any:
    """Return how many replacements there were up to each of these iterations, by what their events say."""
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
        """Take the run's totals, and write all that is pending."""


class TensorBoard:
    """Event files that TensorBoard reads."""

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
    """A run of Weights & Biases; `wandb sync` uploads offline files."""

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
    """A receiver of a run while it lasts, and of the whole run at its end."""

    def show(self, run: Run, states: RankStates | None) -> None:
        """Take the rows so far, and the states of the ranks, if they are known."""

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
    """Show a run to observers until it is over, and then its end.

    Args:
        folder: the run folder.
        observers: which.
        over: waits for at most so many seconds, and returns whether the run is over; its second argument is the run.
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
        # The first look loads much that later ones have.
        spent_s = 0.0 if first else time.process_time() - begin_s
        wait_s = max(LOOK_S, spent_s / SHARE * _crowding())
    # A run that ended before it recorded anything leaves nothing to show.
    run = _loaded(folder)
    if run is not None:
        for each in observers:
            each.end(run)


def _crowding() -> float:
    """Return how many want each core: a run among others takes longer, and is looked at less often."""
    return min(max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0), 3.0)


def _loaded(folder: Path) -> Run | None:
    """Return what a run has left so far; None while it begins, or moves its files."""
    with suppress(ParameterError, FileNotFoundError):
        return Run.load(folder)
    return None


def real_states(folder: Path, run: Run, registry: Path | None) -> RankStates:
    """Return what real ranks do: what their monitors have written of their ends, and they themselves of their waits."""
    environ = {} if registry is None else {REGISTRY: str(registry)}
    stages = [(word, ranks_at_stage(stage, environ) or set()) for word, stage in ENDS]

    def state(rank: int) -> tuple[str, str]:
        ended = next((word for word, ranks in stages if rank in ranks), None)
        told = read_states(folder, rank)
        if ended is not None or told is None:
            return ended or "running", ""
        silent_s = time.time() - told.time_s
        return told.ranks[0] if silent_s < SILENT_S else ("running", f"says nothing for {silent_s:.0f} s")

    last_s = float(np.max(run.table["time_s"], initial=0.0))
    return RankStates(last_s, [state(rank) for rank in range(int(run.what.get("ranks") or 0))])
