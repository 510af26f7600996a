"""Carry out the cells of a study that are not done yet, through any `concurrent.futures.Executor`.

One cell runs in this process (virtual ranks) or through a launcher (real ranks). `execute` is a plain function of
picklable values, so that any executor can carry it to another process or machine.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread

from spawnsim.errors import ParameterError, SpawnsimError, StudyError, WorldError
from spawnsim.options import arguments_of
from spawnsim.run import process_setup, run
from spawnsim.run.process_setup import one_thread, stoppable
from spawnsim.study.store import Cell, Cost, Store, write_cost

LAST_LINES = 12


def execute(cell: Cell, root: Path) -> Cost:
    """Carry out `cell` into its place under `root`; a cell that is there already costs nothing more."""
    store = Store(root)
    # Asked again, since another study may have made the run while this one waited in the pool.
    if store.done(cell):
        return store.cost(cell)
    # `replace` makes a cell without the cached key. A run of edited files under the old key would be found as its
    # result.
    if replace(cell).key != cell.key:
        raise ParameterError(
            f"files that {cell.name} depends on were edited since the study began: start it again"
        )
    load, began_s = os.getloadavg()[0], time.monotonic()
    # Only here a signal raises: one that waits for work, in a pool that is told to stop, just ends.
    with stoppable(), store.draft(cell) as folder:
        (_in_this_process if cell.backend == "virtual" else _by_launcher)(cell, folder)
        cost = Cost(round(time.monotonic() - began_s, 3), _peak_memory(cell), round(load, 2))
        # Within the draft: a run without its cost would look finished, and fail when it is read.
        write_cost(folder, cost)
    return cost


def prepare() -> None:
    """Make a process of a pool ready for one run: one thread, and it is for the study to tell it to stop.

    Numeric libraries are told that are not loaded yet: runs share the machine's cores. Ctrl-C on a terminal reaches
    all processes; those of a pool leave it to the study's.
    """
    process_setup.use_one_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _in_this_process(cell: Cell, folder: Path) -> None:
    run(
        cell.file, ranks=cell.ranks, seed=cell.seed, out=folder, parameters=dict(cell.parameters),
        **dict(cell.world),
    )  # fmt: skip


def _by_launcher(cell: Cell, folder: Path) -> None:
    """Start the same command that a person would type, and report its failure with its last lines."""
    # A process of its own, since MPI can be started once in a process.
    line = command_line(cell, folder)
    done = subprocess.run(
        line, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=dict.fromkeys(process_setup.VARIABLES, "1") | os.environ,
    )  # fmt: skip
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-LAST_LINES:])
        raise WorldError(f"{' '.join(line[1:])} ended with status {done.returncode}:\n{tail}")


def command_line(cell: Cell, folder: Path) -> list[str]:
    """Return the command line of a cell on real ranks; its values are Python literals, as `--set` reads them."""
    line = [
        sys.executable,
        "-m",
        "spawnsim",
        "run",
        str(cell.file),
        "--backend",
        cell.backend,
        "-n",
        str(cell.ranks),
    ]
    line += ["--seed", str(cell.seed), "--out", str(folder), "--quiet"]
    return line + arguments_of(cell.parameters)


def _peak_memory(cell: Cell) -> int:
    """Return bytes: this process's, or, for launched ranks, the largest single process's."""
    whose = resource.RUSAGE_SELF if cell.backend == "virtual" else resource.RUSAGE_CHILDREN
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(whose).ru_maxrss * unit


Say = Callable[[str], None]
PRELOADED = [
    "spawnsim.study.sweeping",
    "spawnsim.policies",
    "spawnsim.virtual",
    "spawnsim.training",
    "torch._dynamo",  # every optimizer imports it: 1.5 s of each run
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
def pool(jobs: int, *, fresh: bool = True) -> Iterator[Executor]:
    """Give a pool of processes of one thread each: fresh ones, one per run, so that a run's peak memory is its own.

    They are forked from one that has loaded what runs need, which takes longer than a short run, and begun nothing.

    When the block is left by an exception, such as Ctrl-C, nothing more begins, and what runs is told to stop.

    Args:
        jobs: how many runs may go on at once, at least 1.
        fresh: whether each run gets a process of its own; without, `jobs` processes carry out all of them.

    Returns:
        A context manager that gives the executor.
    """
    # Children of the caller's own are not ours to stop.
    others = set(multiprocessing.active_children())
    # Not fork: the caller may have threads and a loaded BLAS, whose locks a fork copies as they stand. Not spawn:
    # loading torch takes longer than a short run.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with one_thread():  # libraries ask when they are loaded, which is before a run begins
        # One task a process: peak memory would be that of the largest run so far, and leftovers of one run could
        # change the next.
        executor = ProcessPoolExecutor(
            jobs, mp_context=context, max_tasks_per_child=1 if fresh else None, initializer=prepare
        )
        try:
            yield executor
        # KeyboardInterrupt is no Exception, and is the common case.
        except BaseException:
            _stop(executor, others)
            raise
        executor.shutdown()


def _stop(executor: Executor, others: Collection[BaseProcess]) -> None:
    """Let nothing more begin, and tell the processes of a pool to stop: each once, those that begin meanwhile, too."""
    # In a thread, since `shutdown` waits for the processes that are to be stopped here.
    ending = Thread(target=partial(executor.shutdown, cancel_futures=True), daemon=True)
    ending.start()
    told: set[BaseProcess] = set()
    due_s = time.monotonic() + STOPPING_S
    while ending.is_alive():
        # Asked in each round: the executor may begin a process while it is shut down.
        running = {*multiprocessing.active_children()} - {*others}
        for process in running - told:
            process.terminate()
        told |= running
        # A run in a library's own loop hears no signal.
        if time.monotonic() > due_s:
            for process in running:
                process.kill()
        ending.join(0.05)


def sweep(cells: Sequence[Cell], store: Store, *, executor: Executor | None = None, say: Say) -> list[Path]:
    """Run what is not done yet.

    Args:
        cells: the runs; equal ones are run once.
        store: where finished runs lie.
        executor: anything that is a `concurrent.futures.Executor`; None runs one after another, in this process.
        say: takes one line of text per finished run.

    Returns:
        The run folders, in the order of `cells`.

    Raises:
        StudyError: some runs failed; those that did not are kept, and a second sweep tries the rest only.
    """
    # By key: cells that read differently may be the same run.
    missing = list({cell.key: cell for cell in cells if not store.done(cell)}.values())
    if len(missing) < len(cells):
        say(f"{len(cells) - len(missing)} of {len(cells)} runs are there already")
    # Failures are kept and told at the end, so that one bad cell does not cost a night's other runs.
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
    # As they end: in the order of submission one long run would hold back the news of all others.
    for future in as_completed(pending):
        yield pending[future], _outcome(future.result)


def _outcome(attempt: Callable[[], Cost]) -> Cost | SpawnsimError:
    """Only errors that spawnsim raises on purpose are collected; a bug of ours ends the sweep with its traceback."""
    try:
        return attempt()
    except SpawnsimError as error:
        return error
