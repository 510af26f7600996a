"""A sweep: its cells, which of them are done, and what they have come to as one tidy table.

`sweep.json` beside the runs says which cells were asked for, so an unfinished sweep can be read, and says what is
missing. A folder is read without the program: it may have been moved, or edited since.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError
from spawnsim.record import Table, manifest
from spawnsim.record.folder import prepare, read_manifest, require_free
from spawnsim.run import Run
from spawnsim.run.result import SECONDS, shown, warnings_of_runs
from spawnsim.study.store import COST, FAILED, STOPPED, Cell, Store, labels, read_cost
from spawnsim.study.sweeping import command_of, require_limit, sweep
from spawnsim.units import counted

if TYPE_CHECKING:
    from spawnsim.plots.measures import Measure

PLAN = "sweep.json"
DONE, MISSING = "done", "missing"
STATES = (DONE, FAILED, STOPPED, MISSING)  # of a cell
TOTALS = ("iterations", "messages", "bytes", "replacements")  # columns of every table, beside the seconds
SHOWN = 8  # rows of a table in a notebook


@dataclass(frozen=True)
class Planned:
    """One cell of a sweep as its folder tells it.

    Attributes:
        label: what sets it apart from the others.
        values: file, backend, ranks, parameters, circumstances and seed, by name.
        folder: name of its run's folder, below `runs`.
        command: the command that makes this run alone.
    """

    label: str
    values: dict[str, Any]
    folder: str
    command: str


@dataclass(frozen=True, repr=False)
class Sweep:
    """A sweep's folder.

    Attributes:
        folder: where it lies.
        cells: all that were asked for, in order; seeds vary fastest.
        command: the command that began it, or goes on with it.
    """

    folder: Path
    cells: tuple[Planned, ...]
    command: str = ""

    # -------------------------------------------------------------------------------------------- making and reading
    @classmethod
    def plan(cls, cells: Sequence[Cell], out: str | Path) -> Sweep:
        """Say in a folder which cells a sweep has; none is run.

        Args:
            cells: the cells, as `spawnsim.study.grid` makes them; equal ones count once.
            out: the folder; runs that it holds already are kept.

        Returns:
            The sweep.

        Raises:
            ParameterError: the folder holds a run, cannot be written, or a sweep of other runs goes on there.
        """
        with _held(Path(out), cells) as found:
            return found

    @classmethod
    def run(
        cls, cells: Sequence[Cell], out: str | Path, *, jobs: int = 1, executor: Executor | None = None,
        limit_s: float | None = None, say: Callable[[str], None] = lambda _: None,
    ) -> Sweep:  # fmt: skip
        """Carry out the cells that are not done yet.

        Args:
            cells: the cells, as `spawnsim.study.grid` makes them.
            out: the folder: `sweep.json`, and `runs` with a folder per cell.
            jobs: how many runs may go on at once; 0: one after another, in this process.
            executor: any `concurrent.futures.Executor` that carries them out instead; all its machines see `out`.
            limit_s: wall seconds that one run may take; one that takes longer is ended, and has failed.
            say: takes one line of text per finished run.

        Returns:
            The sweep, finished.

        Raises:
            ParameterError: a limit that cannot be held; nothing is written.
            StudyError: some runs failed; those that did not are kept, and the same call tries the others again.
        """
        require_limit(limit_s, jobs, executor)
        with _held(Path(out), cells) as found:
            sweep(cells, found.store, jobs=jobs, executor=executor, limit_s=limit_s, say=say)
            return found

    @classmethod
    def load(cls, path: str | Path) -> Sweep:
        """Return the sweep of a folder, finished or not.

        Raises:
            ParameterError: the folder holds no sweep, or its plan is damaged.
        """
        place = Path(path) / PLAN
        try:
            plan = json.loads(place.read_text(encoding="utf-8"))
            cells = tuple(Planned(**each) for each in plan["cells"])
            return cls(Path(path), cells, str(plan["command"]))
        except OSError as error:
            raise ParameterError(f"{path} is not a sweep's folder: it has no readable {PLAN}") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ParameterError(f"{place} is not a sweep's: {error}") from error

    @property
    def store(self) -> Store:
        """Where the runs lie."""
        return Store(self.folder / "runs")

    # --------------------------------------------------------------------------------------------------- what it holds
    def state(self, cell: Planned) -> str:
        """Return "done", "failed", "stopped" (with the sweep, such as by Ctrl-C) or "missing"."""
        if (self.store.root / cell.folder / COST).is_file():
            return DONE
        aside = (why for why in (FAILED, STOPPED) if self.store.aside(cell.folder, why).is_dir())
        return next(aside, MISSING)

    def of_state(self, state: str) -> list[Planned]:
        """Return the cells in a state."""
        return [cell for cell in self.cells if self.state(cell) == state]

    def runs(self) -> Iterator[tuple[Planned, Run]]:
        """Yield the finished runs, each read when it is asked for."""
        for cell in self.of_state(DONE):
            yield cell, Run.load(self.store.root / cell.folder)

    def warnings(self) -> list[str]:
        """Return each kind of warning of the finished runs once, with the number of runs."""
        folders = {cell.label: self.store.root / cell.folder for cell in self.of_state(DONE)}
        return warnings_of_runs({label: read_manifest(folder)["what"] for label, folder in folders.items()})

    @property
    def varied(self) -> list[str]:
        """What cells differ in beside their seed: names of parameters and circumstances."""
        names = {name: None for cell in self.cells for name in cell.values if name != "seed"}
        return [name for name in names if len({str(cell.values.get(name)) for cell in self.cells}) > 1]

    def table(self, *measures: str) -> Table:
        """Return one row per cell.

        Args:
            measures: what to work out of each run, such as "final:accuracy" or "time_to:accuracy>0.8"; see
                `spawnsim.plots.measures`.

        Returns:
            Columns: parameters, circumstances, seed, "state", "outcome", what the run came to (virtual seconds,
            messages, bytes …), what it cost here ("wall_s", "peak_memory_B"), "folder", and one per measure. What a
            cell that is not done, or has not recorded it, does not tell is NaN.

        Raises:
            ParameterError: a measure is not understood, or no run has what it is of.
        """
        from spawnsim.plots.measures import Measure  # as with figures, matplotlib is loaded only now

        asked = [Measure.of(text) for text in measures]
        rows: list[dict[str, Any]] = [self._row(cell, asked) for cell in self.cells]
        for each in asked:
            told = [row[each.text] for row in rows if row[each.text] is not None]
            if told and all(isinstance(value, ParameterError) for value in told):
                raise told[0]
        # What one policy records another may not.
        for row in rows:
            row |= {name: None for name, value in row.items() if isinstance(value, Exception)}
        names = {name: None for row in rows for name in row}
        numbers = {*TOTALS, *SECONDS, "wall_s", "peak_memory_B", *(each.text for each in asked)}
        return Table({name: column_of([row.get(name) for row in rows], name in numbers) for name in names})

    def _row(self, cell: Planned, measures: Sequence[Measure]) -> dict[str, Any]:
        place, state = self.store.root / cell.folder, self.state(cell)
        row: dict[str, Any] = {**cell.values, "state": state}
        if state != DONE:
            return row | {"outcome": state, "folder": cell.folder} | {each.text: None for each in measures}
        told, cost = read_manifest(place), read_cost(place)
        row |= {"outcome": told["outcome"], "folder": cell.folder}
        clock = next(name for name in SECONDS[::-1] if name in told["totals"] or name == SECONDS[0])
        row |= {name: told["totals"].get(name) for name in (clock, *TOTALS)}
        row |= {"wall_s": cost.wall_s, "peak_memory_B": cost.peak_memory_B}
        # The rows of a run are read only where something is worked out of them.
        run = Run.load(place) if any(each.needs_rows for each in measures) else None
        return row | {each.text: _value(each, run, told["totals"]) for each in measures}

    def keep(self, cells: Sequence[Planned]) -> Sweep:
        """Return the sweep of some of its cells."""
        return Sweep(self.folder, tuple(cells), self.command)

    def says(self) -> str:
        """Return how far it is: "64 runs: 60 done, 1 failed, 1 stopped, 2 missing"."""
        counts = Counter(map(self.state, self.cells))
        parts = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
        return f"{counted(len(self.cells), 'run')}: {parts or 'none'}"

    def __repr__(self) -> str:
        return f"Sweep({self.folder}, {self.says()})"

    def _repr_html_(self) -> str:
        from html import escape  # needed here alone

        names = [*self.varied, "seed"]
        head = "".join(f"<th>{escape(name)}</th>" for name in [*names, "state"])
        rows = []
        for cell in self.cells[:SHOWN]:
            values = [*(shown(cell.values.get(name)) for name in names), self.state(cell)]
            rows.append("".join(f"<td>{escape(value)}</td>" for value in values))
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<p>{escape(repr(self))}</p><table><tr>{head}</tr>{body}</table>"


def _value(measure: Measure, run: Run | None, totals: dict[str, Any]) -> float | ParameterError:
    try:
        return measure.value(run, totals)
    except ParameterError as error:
        return error


@contextmanager
def _held(place: Path, cells: Sequence[Cell]) -> Iterator[Sweep]:
    """Write a folder's plan and give the sweep; while the block runs, no other process gives the folder other runs."""
    require_free(place)
    prepare(place)
    names = labels(cells)
    distinct = {cell.key: cell for cell in cells}
    found = Sweep(place, tuple(_planned(cell, names[key]) for key, cell in distinct.items()), _command())
    lock = os.open(place, os.O_RDONLY)
    try:
        # Alone for as long as the plan is written, then with all who have the same.
        if _locks(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            _write_plan(found)
        _locks(lock, fcntl.LOCK_SH)
        there = Sweep.load(place)
        if {each.folder for each in there.cells} != {each.folder for each in found.cells}:
            raise ParameterError(
                f"another sweep, of other runs, goes on in {place} ({there.command}): wait for its end, or give "
                "another folder (--out)"
            )
        yield found
    finally:
        os.close(lock)
        # Who removes the folder meanwhile loses the runs that were done: those made since need their plan.
        if place.is_dir() and not (place / PLAN).exists():
            _write_plan(found)


def _locks(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    # Some shared file systems lock no folders: there whoever comes last is obeyed.
    except OSError:
        return True
    return True


def _write_plan(sweep: Sweep) -> None:
    text = json.dumps({"command": sweep.command, "cells": [asdict(each) for each in sweep.cells]}, indent=1)
    # Beside its place first: somebody may draw figures of the sweep while it goes on.
    draft = sweep.folder / f".{PLAN}"
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(sweep.folder / PLAN)


def _planned(cell: Cell, label: str) -> Planned:
    return Planned(label, cell.values(), f"{cell.name}-{cell.key}", command_of(cell))


def _command() -> str:
    """Return the command that began this; of a program in Python its name."""
    return str(manifest.made()["command"]) if sys.argv and sys.argv[0] else ""


def column_of(values: Sequence[Any], number: bool = False) -> NDArray[Any]:
    """Return values, one per row, as a column: of floats, whole numbers or bools where all are, else of texts.

    None is NaN in a column of numbers, and else "none". `number`: the column holds numbers, even if no row has one.
    """
    known = [value for value in values if value is not None]
    kinds = {bool if isinstance(value, bool) else type(value) for value in known}
    whole = len(known) == len(values)
    if number or (whole and kinds and kinds <= {int, float}):
        kind: Any = np.int64 if whole and kinds == {int} else float
        return np.array([np.nan if value is None else value for value in values], kind)
    if whole and kinds == {bool}:
        return np.array(values)
    return np.array(["none" if value is None else str(value) for value in values])
