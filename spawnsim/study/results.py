"""A sweep: its cells, the state of each, and their results as one tidy table.

`sweep.json` next to the runs lists the requested cells, so an unfinished sweep can be read, and its missing runs are
known. Reading a folder does not need the program: the program may have been moved or edited since.
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
TOTALS = ("iterations", "messages", "bytes", "replacements")  # columns of every table, besides the seconds
SHOWN = 8  # rows of a table in a notebook


@dataclass(frozen=True)
class Planned:
    """One cell of a sweep, as its folder describes it.

    Attributes:
        label: the values that distinguish it from the other cells.
        values: file, backend, ranks, parameters, circumstances and seed, by name.
        folder: the name of its run's folder, below `runs`.
        command: the command that makes only this run.
    """

    label: str
    values: dict[str, Any]
    folder: str
    command: str


@dataclass(frozen=True, repr=False)
class Sweep:
    """A sweep's folder.

    Attributes:
        folder: its path.
        cells: all requested cells, in order; seeds vary fastest.
        command: the command that started or continues it.
    """

    folder: Path
    cells: tuple[Planned, ...]
    command: str = ""

    # -------------------------------------------------------------------------------------------- making and reading
    @classmethod
    def plan(cls, cells: Sequence[Cell], out: str | Path) -> Sweep:
        """Write the plan of a sweep, its cells, into a folder, without running any.

        Args:
            cells: the cells, as `spawnsim.study.grid` makes them; equal cells count once.
            out: the folder; its finished runs are kept.

        Returns:
            The sweep.

        Raises:
            ParameterError: the folder holds a run, cannot be written, or a sweep of other runs is executing there.
        """
        with _held(Path(out), cells) as found:
            return found

    @classmethod
    def run(
        cls, cells: Sequence[Cell], out: str | Path, *, jobs: int = 1, executor: Executor | None = None,
        limit_s: float | None = None, say: Callable[[str], None] = lambda _: None,
    ) -> Sweep:  # fmt: skip
        """Run the cells that are not done yet.

        Args:
            cells: the cells, as `spawnsim.study.grid` makes them.
            out: the folder: `sweep.json`, and `runs` with a folder per cell.
            jobs: how many runs may execute at once; 0: one after another, in this process.
            executor: any `concurrent.futures.Executor`, instead of a pool of processes; all its machines must see
                `out`.
            limit_s: wall seconds that one run may take; a longer run is ended, and counts as failed.
            say: takes one line of text per finished run.

        Returns:
            The sweep, finished.

        Raises:
            ParameterError: the limit cannot be enforced; nothing is written.
            StudyError: some runs failed; the successful runs are kept, and the same call tries the failed ones again.
        """
        require_limit(limit_s, jobs, executor)
        with _held(Path(out), cells) as found:
            sweep(cells, found.store, jobs=jobs, executor=executor, limit_s=limit_s, say=say)
            return found

    @classmethod
    def load(cls, path: str | Path) -> Sweep:
        """Return the sweep in a folder, finished or not.

        Raises:
            ParameterError: the folder holds no sweep, or its plan is damaged.
        """
        place = Path(path) / PLAN
        try:
            plan = json.loads(place.read_text(encoding="utf-8"))
            cells = tuple(Planned(**each) for each in plan["cells"])
            return cls(Path(path), cells, str(plan["command"]))
        except OSError as error:
            raise ParameterError(f"{path} is not a sweep's folder: it lacks a readable {PLAN}") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ParameterError(f"{place} is not a sweep's: {error}") from error

    @property
    def store(self) -> Store:
        """The store of the runs."""
        return Store(self.folder / "runs")

    # -------------------------------------------------------------------------------------------------------- contents
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
        """Yield the finished runs; each is read when it is yielded."""
        for cell in self.of_state(DONE):
            yield cell, Run.load(self.store.root / cell.folder)

    def warnings(self) -> list[str]:
        """Return each kind of warning of the finished runs once, with the number of runs."""
        folders = {cell.label: self.store.root / cell.folder for cell in self.of_state(DONE)}
        return warnings_of_runs({label: read_manifest(folder)["what"] for label, folder in folders.items()})

    @property
    def varied(self) -> list[str]:
        """Names of the parameters and circumstances in which cells differ, without the seed."""
        names = {name: None for cell in self.cells for name in cell.values if name != "seed"}
        return [name for name in names if len({str(cell.values.get(name)) for cell in self.cells}) > 1]

    def table(self, *measures: str) -> Table:
        """Return one row per cell.

        Args:
            measures: the measures to compute from each run, such as "final:accuracy" or "time_to:accuracy>0.8"; see
                `spawnsim.plots.measures`.

        Returns:
            Columns: parameters, circumstances, seed, "state", "outcome", the totals of the run (virtual seconds,
                messages, bytes …), its cost on this machine ("wall_s", "peak_memory_B"), "folder", and one column per
                measure. A value is NaN if the cell is not done or did not record it.

        Raises:
            ParameterError: a measure is not understood, or no run has recorded its column.
        """
        from spawnsim.plots.measures import Measure  # imported only now: it loads matplotlib

        asked = [Measure.of(text) for text in measures]
        rows: list[dict[str, Any]] = [self._row(cell, asked) for cell in self.cells]
        for each in asked:
            errors = [row[each.text] for row in rows if row[each.text] is not None]
            if errors and all(isinstance(value, ParameterError) for value in errors):
                raise errors[0]
        # One policy may not record what another records.
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
        manifest, cost = read_manifest(place), read_cost(place)
        row |= {"outcome": manifest["outcome"], "folder": cell.folder}
        clock = next(name for name in SECONDS[::-1] if name in manifest["totals"] or name == SECONDS[0])
        row |= {name: manifest["totals"].get(name) for name in (clock, *TOTALS)}
        row |= {"wall_s": cost.wall_s, "peak_memory_B": cost.peak_memory_B}
        # Read the rows of a run only if a measure needs them.
        run = Run.load(place) if any(each.needs_rows for each in measures) else None
        return row | {each.text: _value(each, run, manifest["totals"]) for each in measures}

    def keep(self, cells: Sequence[Planned]) -> Sweep:
        """Return the sweep with only some of its cells."""
        return Sweep(self.folder, tuple(cells), self.command)

    def says(self) -> str:
        """Return the progress: "64 runs: 60 done, 1 failed, 1 stopped, 2 missing"."""
        counts = Counter(map(self.state, self.cells))
        parts = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
        return f"{counted(len(self.cells), 'run')}: {parts or 'none'}"

    def __repr__(self) -> str:
        return f"Sweep({self.folder}, {self.says()})"

    def _repr_html_(self) -> str:
        from html import escape  # needed only here

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
    """Write a folder's plan and give the sweep; while the block runs, no other process can change the cells."""
    require_free(place)
    prepare(place)
    names = labels(cells)
    distinct = {cell.key: cell for cell in cells}
    found = Sweep(place, tuple(_planned(cell, names[key]) for key, cell in distinct.items()), _command())
    lock = os.open(place, os.O_RDONLY)
    try:
        # An exclusive lock while the plan is written, then a lock shared with all sweeps that have the same plan.
        if _locks(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            _write_plan(found)
        _locks(lock, fcntl.LOCK_SH)
        there = Sweep.load(place)
        if {each.folder for each in there.cells} != {each.folder for each in found.cells}:
            raise ParameterError(
                f"another sweep with other runs is active in {place} ({there.command}): wait for its end, or give "
                "another folder (--out)"
            )
        yield found
    finally:
        os.close(lock)
        # If the folder was removed meanwhile, its finished runs are lost; the runs made since then need their plan.
        if place.is_dir() and not (place / PLAN).exists():
            _write_plan(found)


def _locks(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    # Some shared file systems lock no folders: there, the last plan counts.
    except OSError:
        return True
    return True


def _write_plan(sweep: Sweep) -> None:
    text = json.dumps({"command": sweep.command, "cells": [asdict(each) for each in sweep.cells]}, indent=1)
    # Written to a draft and renamed: another process may read the plan while the sweep runs.
    draft = sweep.folder / f".{PLAN}"
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(sweep.folder / PLAN)


def _planned(cell: Cell, label: str) -> Planned:
    return Planned(label, cell.values(), f"{cell.name}-{cell.key}", command_of(cell))


def _command() -> str:
    """Return the command that started this process; for a program in Python, its name."""
    return str(manifest.made()["command"]) if sys.argv and sys.argv[0] else ""


def column_of(values: Sequence[Any], number: bool = False) -> NDArray[Any]:
    """Return values, one per row, as a column of floats, integers or bools if all are such values, else of texts.

    None becomes NaN in a column of numbers, and "none" otherwise. `number`: the column holds numbers, even if no row
    has one.
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
