"""Carry out cells that are not done yet, through any `concurrent.futures.Executor`.

This room knows cells, the store and executors; it must not know what a program computes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread

from spawnsim.errors import SpawnsimError, StudyError
from spawnsim.run.threads import one_thread
from spawnsim.study.cell import Cell
from spawnsim.study.execute import execute, prepare
from spawnsim.study.store import Cost, Store

Say = Callable[[str], None]
PRELOADED = [
    "spawnsim.study.execute",
    "spawnsim.policies",
    "spawnsim.virtual",
    "sklearn.datasets",
]  # those there are


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


STOPPING_S = 5.0  # for which a run that is told to stop may go on writing what it has recorded


@contextmanager
def pool(jobs: int) -> Iterator[Executor]:
    """Give a pool of fresh processes, one per run, of one thread each: a run's peak memory is its own.

    They are forked from one that has loaded what runs need, which takes longer than a short run, and begun nothing.

    When the block is left by an exception, such as Ctrl-C, nothing more begins, and what runs is told to stop.
    """
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with one_thread():  # libraries ask when they are loaded, which is before a run begins
        executor = ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1, initializer=prepare)
        try:
            yield executor
        except BaseException:
            _stop(executor, others)
            raise
        executor.shutdown()


def _stop(executor: Executor, others: Collection[BaseProcess]) -> None:
    """Let nothing more begin, and tell the processes of a pool to stop: each once, those that begin meanwhile, too."""
    ending = Thread(target=partial(executor.shutdown, cancel_futures=True), daemon=True)
    ending.start()
    told: set[BaseProcess] = set()
    due_s = time.monotonic() + STOPPING_S
    while ending.is_alive():
        running = {*multiprocessing.active_children()} - {*others}
        for process in running - told:
            process.terminate()
        told |= running
        if time.monotonic() > due_s:
            for process in running:
                process.kill()
        ending.join(0.05)


def sweep(cells: Sequence[Cell], store: Store, *, executor: Executor | None = None, say: Say) -> list[Path]:
    """Run what is not done yet; return the run folders in the order of `cells`.

    Args:
        cells: the runs; equal ones are run once.
        store: where finished runs lie.
        executor: anything that is a `concurrent.futures.Executor`; None runs one after another, in this process.
        say: takes one line of text per finished run.

    Raises:
        StudyError: some runs failed; those that did not are kept, and a second sweep tries the rest only.
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
        raise StudyError(
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
