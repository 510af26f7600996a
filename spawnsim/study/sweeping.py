"""Run the missing cells of a study, with any `concurrent.futures.Executor`.

A cell runs in a process of the pool (virtual ranks), or by the command that a person would type (real ranks, and any
other executor). `execute` is a plain function of picklable values, so that any executor can send it to another
process or machine.
"""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, as_completed
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from spawnsim.errors import ParameterError, SpawnsimError, StudyError, WorldError
from spawnsim.options import OPTIONS, arguments_of
from spawnsim.record.folder import prepare
from spawnsim.run import process_setup, run
from spawnsim.run.process_setup import stoppable
from spawnsim.study.executors import STOPPING_S, Processes, out_of_time, pool
from spawnsim.study.store import Cell, Cost, Store, labels, write_cost

if TYPE_CHECKING:
    from spawnsim.columnar import Experiment

LAST_LINES = 12
MOST_S = 24 * 86_400.0  # the longest limit of a run: the system counts a wait in milliseconds, in 31 bits
WHOLE = 3  # failures that are reported with all lines
PRINTED = "output.txt"  # in a run's folder: the output of its ranks
How = Callable[[Cell, Path], None]
T = TypeVar("T")


def here(cell: Cell, folder: Path) -> None:
    """Run a cell on virtual ranks, in this process."""
    run(
        cell.file, ranks=cell.ranks, seed=cell.seed, out=folder, parameters=dict(cell.parameters),
        **dict(cell.world),
    )  # fmt: skip


def aside(cell: Cell, folder: Path) -> None:
    """Run a cell in a process of a pool; the output of its ranks goes to its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PRINTED
    with path.open("w", encoding="utf-8") as file, redirect_stdout(file):
        here(cell, folder)
    if not path.stat().st_size:
        path.unlink()


def by_command(cell: Cell, folder: Path, limit_s: float | None = None) -> None:
    """Run a cell by the command that a person would type; the error of a failure includes its last lines."""
    # A new process: a process can start MPI only once, and an executor's workers may be threads, or run many cells.
    with subprocess.Popen(
        command_line(cell, folder), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=dict.fromkeys(process_setup.VARIABLES, "1") | os.environ,
    ) as command:  # fmt: skip
        try:
            output, _ = command.communicate(timeout=limit_s)
        except BaseException as stop:
            _end(command)
            if isinstance(stop, subprocess.TimeoutExpired):
                raise out_of_time(limit_s) from None
            raise
    if command.returncode:
        tail = "\n".join(output.splitlines()[-LAST_LINES:])
        raise WorldError(f"{command_of(cell)} ended with status {command.returncode}:\n{tail}")


def _end(command: subprocess.Popen[str]) -> None:
    """Terminate a command, so that it ends its ranks and keeps their records; kill it if it does not end."""
    command.terminate()
    try:
        # A shorter wait than the one before this process itself is killed.
        command.communicate(timeout=STOPPING_S / 2)
    except subprocess.TimeoutExpired:
        command.kill()


def execute(cell: Cell, root: Path, how: How = here, limit_s: float | None = None) -> Cost:
    """Run `cell` into its folder under `root`; return the recorded cost if that run exists already."""
    store = Store(root)
    # Checked again: another study may have made the run while this cell waited in the pool.
    if store.done(cell):
        return store.cost(cell)
    # `replace` makes a cell without the cached key. A run of edited files stored under the old key would be found as
    # that key's result.
    if replace(cell).key != cell.key:
        raise ParameterError(
            f"files that {cell.name} depends on were edited since the study began, or differ where it runs: "
            "start it again"
        )
    commanded = how is by_command or cell.backend != "virtual"
    load, began_s = os.getloadavg()[0], time.monotonic()
    # A signal raises only here: a process that waits for work, in a pool that stops, just ends.
    try:
        with stoppable(), store.draft(cell) as folder:
            by_command(cell, folder, limit_s) if commanded else how(cell, folder)
            cost = Cost(round(time.monotonic() - began_s, 3), _peak_memory(commanded), round(load, 2))
            # Within the draft: a run without its cost would look finished, and fail when it is read.
            write_cost(folder, cost)
    # Errors of a program carry its rank: an OSError comes from the store, such as a folder that was removed.
    except OSError as error:
        raise ParameterError(f"cannot write {error.filename or store.root}: {error.strerror}") from error
    return cost


def experiment_of(cell: Cell, out: Path | None = None) -> Experiment:
    """Return a cell's run over columns, into a folder."""
    from spawnsim.columnar.named import experiment  # imports torch

    world = {name: value for name, value in cell.world.items() if name != "columns"}
    return experiment(
        None,
        cell.parameters,
        file=Path(cell.file),
        ranks=cell.ranks,
        seed=cell.seed,
        out=out,
        overwrite=True,
        **world,
    )


def execute_columns(cells: Sequence[Cell], root: Path) -> list[Cost]:
    """Run cells over columns, at once, each into its folder under `root`; return the cost of each."""
    from spawnsim import columnar

    store, load, began_s = Store(root), os.getloadavg()[0], time.monotonic()
    with stoppable(), ExitStack() as drafts:
        folders = [drafts.enter_context(store.draft(cell)) for cell in cells]
        columnar.run_all([experiment_of(cell, place) for cell, place in zip(cells, folders, strict=True)])
        cost = Cost(
            round((time.monotonic() - began_s) / len(cells), 3), _peak_memory(commanded=False), round(load, 2)
        )
        for place in folders:
            write_cost(place, cost)
    return [cost] * len(cells)


def arguments(cell: Cell) -> list[str]:
    """Return the arguments of `spawnsim` that run a cell; values are Python literals, the form that `--set` reads.

    Raises:
        ParameterError: a circumstance is an object, which a command line cannot hold.
    """
    line = ["run", str(cell.file), "--ranks", str(cell.ranks), "--seed", str(cell.seed)]
    if cell.world.get("columns"):
        line = ["sweep", str(cell.file), "--columns", *line[2:]]
    line += [] if cell.backend == "virtual" else ["--backend", cell.backend]
    for name, value in cell.world.items():
        if value is None or value is False or name in ("argv", "columns"):
            continue
        if name not in OPTIONS or not isinstance(value, (str, int, float, Path)):
            raise ParameterError(
                f"{name}={value!r} cannot be passed on a command line, which real ranks and foreign executors need: "
                "give text"
            )
        line += [OPTIONS[name]] if value is True else [OPTIONS[name], str(value)]
    line += arguments_of(cell.parameters)
    return line + (["--", *cell.world["argv"]] if cell.world.get("argv") else [])


def command_line(cell: Cell, folder: Path) -> list[str]:
    """Return the command line of a process that runs a cell into a folder."""
    command, *rest = arguments(cell)
    return [sys.executable, "-m", "spawnsim", command, "--out", str(folder), "--quiet", *rest]


def command_of(cell: Cell) -> str:
    """Return the command that runs a cell again, as a user types it."""
    try:
        return shlex.join(["spawnsim", *arguments(cell)])
    except ParameterError:  # some circumstances can only be given in Python
        return f"spawnsim.run({str(cell.file)!r}, ranks={cell.ranks}, seed={cell.seed}, …)"


def _peak_memory(commanded: bool) -> int:
    """Return the peak memory in bytes of this process, or, for launched ranks, of the largest single process."""
    whose = resource.RUSAGE_CHILDREN if commanded else resource.RUSAGE_SELF
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(whose).ru_maxrss * unit


Say = Callable[[str], None]


@dataclass(frozen=True)
class Progress:
    """Reports how far a sweep is: one line per finished run, with the remaining time at the current pace."""

    say: Say
    total: int
    began_s: float

    def finished(self, done: int, label: str, outcome: Cost | Exception) -> None:
        """Report that a run has ended; `done` is the number of ended runs."""
        elapsed_s = time.monotonic() - self.began_s
        left_s = elapsed_s / done * (self.total - done)
        took = (
            f": {duration(outcome.wall_s)}" if isinstance(outcome, Cost) else f" failed: {last_line(outcome)}"
        )
        eta = f", about {duration(left_s)} left" if done < self.total else f", {duration(elapsed_s)} in all"
        self.say(f"[{done}/{self.total}] {label}{took}{eta}")


def last_line(error: BaseException) -> str:
    """Return the line of an error's text that names the error: spawnsim's own line, or else the last."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    own = [line for line in lines if line.startswith("spawnsim: ")]
    return own[-1].removeprefix("spawnsim: ") if own else lines[-1]


def duration(seconds: float) -> str:
    """Return a duration for people.

    >>> duration(8.25), duration(75), duration(7260)
    ('8.2 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min {int(seconds % 60)} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


Ended = Callable[[Cell], None]


def sweep(
    cells: Sequence[Cell], store: Store, *, jobs: int = 0, executor: Executor | None = None,
    limit_s: float | None = None, say: Say, ended: Ended = lambda _: None,
) -> list[Path]:  # fmt: skip
    """Run the missing cells, in a pool of processes unless another executor is given.

    Args:
        cells: the runs; equal cells run once.
        store: the store of finished runs.
        jobs: the number of runs at once; 0: one after another, in this process.
        executor: any `concurrent.futures.Executor`; the caller shuts it down. It runs each cell by a command.
        limit_s: wall seconds that one run may take; a longer run is ended, and counts as failed.
        say: takes one line of text per finished run.
        ended: is called once for each finished run, as soon as it is available; first for the runs of earlier sweeps.

    Returns:
        The run folders, in the order of `cells`.

    Raises:
        ParameterError: the limit cannot be enforced, or the store's folder cannot be written.
        StudyError: some runs failed; the successful runs are kept, and a second sweep tries only the failed runs. Its
            notes name each failed run, with its error and its command.
    """
    require_limit(limit_s, jobs, executor)
    own_pool = executor is None and jobs > 0
    prepare(store.root)
    try:
        with pool(jobs, limit_s=limit_s) if own_pool else nullcontext(executor) as carrier:
            return _sweep(cells, store, carrier, limit_s=limit_s, jobs=jobs, say=say, ended=ended)
    except KeyboardInterrupt as stop:
        # Counted on disk: processes may have finished runs after the interrupt.
        kept = f"{sum(map(store.done, cells))} of {len(cells)} runs are done and kept"
        stop.__notes__ = [f"{kept}: the same command continues with the rest"]
        raise


def _sweep(
    cells: Sequence[Cell],
    store: Store,
    executor: Executor | None,
    *,
    limit_s: float | None,
    jobs: int,
    say: Say,
    ended: Ended,
) -> list[Path]:
    store.tidy()
    # By key: cells with different descriptions may be the same run.
    missing = {cell.key: cell for cell in cells if not store.done(cell)}
    if len(missing) < len(cells):
        say(f"{len(cells) - len(missing)} of {len(cells)} runs are already done")
    # Failures are kept and reported at the end, so that one bad cell does not stop the other runs of a night.
    progress, failures = Progress(say, len(missing), time.monotonic()), []
    names = labels(cells)
    outcomes = _outcomes(missing.values(), store.root.absolute(), executor, limit_s=limit_s, jobs=jobs)
    for cell in {cell.key: cell for cell in cells if cell.key not in missing}.values():
        ended(cell)
    for done, (cell, outcome) in enumerate(outcomes, start=1):
        progress.finished(done, names[cell.key], outcome)
        if isinstance(outcome, Exception):
            store.fail(cell)  # a run that exceeded its limit was terminated, and counts as failed
            failures.append((cell, outcome))
        else:
            ended(cell)
    if failures:
        store.tidy(aside=True)  # a killed process could not rename its draft itself
        raise _failed(failures, len(cells), store, names) from failures[0][1]
    return [store.folder(cell) for cell in cells]


def _failed(
    failures: Sequence[tuple[Cell, Exception]], total: int, store: Store, names: dict[str, str]
) -> StudyError:
    """Return the error that names all failures: each error, the folder kept, and the command that repeats the run."""
    first, error = failures[0]
    whole = StudyError(
        f"{len(failures)} of {total} runs failed; the first: {names[first.key]}: {last_line(error)}"
    )
    for number, (cell, error) in enumerate(failures):
        lines = [f"failed: {names[cell.key]}: {last_line(error)}", f"  again: {command_of(cell)}"]
        if store.failed(cell).is_dir():
            lines.append(f"  left:  {store.failed(cell)}")
        # Other errors are faults of this package or of the executor: the traceback shows the place.
        text = str(error) if isinstance(error, SpawnsimError) else error.__dict__.get("remote", str(error))
        if "\n" in text.strip() and number < WHOLE:
            lines += [f"  {line}" for line in text.strip().splitlines()]
        whole.add_note("\n".join(lines))
    return whole


def require_limit(limit_s: float | None, jobs: int, executor: object) -> None:
    """Raise `ParameterError` unless a run's limit (wall seconds) can be enforced: it needs a process to end."""
    if limit_s is not None and not (0 < limit_s <= MOST_S and (jobs > 0 or executor is not None)):
        raise ParameterError(
            f"a run's limit of {limit_s:g} s: give more than 0 and at most {MOST_S / 3600:g} h, and processes to end "
            "(--jobs 1)"
        )


def _columns(
    cells: Sequence[Cell], root: Path, executor: Executor | None, jobs: int
) -> Iterator[tuple[Cell, Cost | Exception]]:
    """Run cells over columns: as many batches as there are processes, each batch at once."""
    batches = [batch for number in range(max(jobs, 1)) if (batch := cells[number :: max(jobs, 1)])]
    attempts: list[Callable[[], list[Cost]]] = [partial(execute_columns, batch, root) for batch in batches]
    if executor is not None:  # all batches run at once
        attempts = [executor.submit(attempt).result for attempt in attempts]
    for batch, attempt in zip(batches, attempts, strict=True):
        costs = _outcome(attempt)
        yield from zip(batch, costs if isinstance(costs, list) else [costs] * len(batch), strict=True)


def _outcomes(
    cells: Iterable[Cell], root: Path, executor: Executor | None, *, limit_s: float | None, jobs: int
) -> Iterator[tuple[Cell, Cost | Exception]]:
    cells = [*cells]
    if any(cell.world.get("columns") for cell in cells):
        yield from _columns(cells, root, executor, jobs)
        return
    if executor is None:
        yield from ((cell, _outcome(partial(execute, cell, root))) for cell in cells)
        return
    # `Processes` enforces the limit itself.
    given: tuple[Any, ...] = (aside,) if isinstance(executor, Processes) else (by_command, limit_s)
    pending: dict[Future[Cost], Cell] = {executor.submit(execute, cell, root, *given): cell for cell in cells}
    # In order of completion: in order of submission, one long run would delay the reports of all others.
    for future in as_completed(pending):
        yield pending[future], _outcome(future.result)


def _outcome(attempt: Callable[[], T]) -> T | Exception:
    """Return the cost of a run, or of several, or the failure: an error of the run, or of the executor."""
    try:
        return attempt()
    except Exception as error:  # noqa: BLE001  reported at the end
        return error
