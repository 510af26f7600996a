"""Carry out cells that are not done yet, through any `concurrent.futures.Executor`.

This room knows cells, the store and executors; it must not know what a program computes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from spawnsim.errors import SpawnsimError, WorldError
from spawnsim.study.cell import Cell
from spawnsim.study.execute import execute, one_thread
from spawnsim.study.store import Cost, Store

Say = Callable[[str], None]


@dataclass(frozen=True)
class Progress:
    """Tells how far a sweep is: one line per finished run, with the time that is left at this pace."""

    say: Say
    total: int
    began_s: float

    def finished(self, done: int, cell: Cell, cost: Cost) -> None:
        """Say that `cell` is the run number `done` to finish."""
        elapsed_s = time.monotonic() - self.began_s
        left_s = elapsed_s / done * (self.total - done)
        eta = f", about {duration(left_s)} left" if done < self.total else f", {duration(elapsed_s)} in all"
        self.say(f"[{done}/{self.total}] {cell.name}: {duration(cost.wall_s)}{eta}")


def duration(seconds: float) -> str:
    """Return a duration for people.

    >>> duration(8.25), duration(75)
    ('8.2 s', '1 min 15 s')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60)} s"


def pool(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of fresh processes, one per run, of one thread each: a run's peak memory is its own."""
    return ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1, initializer=one_thread
    )


def sweep(cells: Sequence[Cell], store: Store, *, executor: Executor | None = None, say: Say) -> list[Path]:
    """Run what is not done yet; return the run folders in the order of `cells`.

    Args:
        cells: the runs; equal ones are run once.
        store: where finished runs lie.
        executor: anything that is a `concurrent.futures.Executor`; None runs one after another, in this process.
        say: takes one line of text per finished run.

    Raises:
        WorldError: some runs failed; those that did not are kept, and a second sweep tries the rest only.
    """
    missing = list({cell.key: cell for cell in cells if not store.done(cell)}.values())
    if len(missing) < len(cells):
        say(f"{len(cells) - len(missing)} of {len(cells)} runs are there already")
    progress, failures = Progress(say, len(missing), time.monotonic()), []
    for done, (cell, outcome) in enumerate(_outcomes(missing, store.root, executor), start=1):
        if isinstance(outcome, Cost):
            progress.finished(done, cell, outcome)
        else:
            failures.append((cell, outcome))
            last_line = str(outcome).strip().rpartition("\n")[2]
            say(f"[{done}/{len(missing)}] {cell.name} failed: {last_line}")
    if failures:
        cell, error = failures[0]
        raise WorldError(
            f"{len(failures)} of {len(cells)} runs failed; the first: {cell.name}: {error}"
        ) from error
    return [store.folder(cell) for cell in cells]


def _outcomes(
    cells: Iterable[Cell], root: Path, executor: Executor | None
) -> Iterator[tuple[Cell, Cost | SpawnsimError]]:
    if executor is None:
        yield from ((cell, _outcome(partial(execute, cell, root))) for cell in cells)
        return
    pending: dict[Future[Cost], Cell] = {executor.submit(execute, cell, root): cell for cell in cells}
    for future in as_completed(pending):
        yield pending[future], _outcome(future.result)


def _outcome(attempt: Callable[[], Cost]) -> Cost | SpawnsimError:
    """Only errors that spawnsim words are collected; a bug of ours ends the sweep with its traceback."""
    try:
        return attempt()
    except SpawnsimError as error:
        return error
