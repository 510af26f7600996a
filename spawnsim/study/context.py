"""The context that a study's function receives: sweeps, figures, and functions that report findings.

A study is a Python file with `def study(context: Context) -> None`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spawnsim.plots.experiments import read
from spawnsim.run import Run
from spawnsim.run.result import warnings_of_runs
from spawnsim.study import claims, sweeping
from spawnsim.study.store import Cell, Cost, Scalar, Store, grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Result:
    """A finished run of a study: its cell, its record, its cost."""

    cell: Cell
    run: Run
    cost: Cost


@dataclass(frozen=True)
class Context:
    """The argument of `study(context)`.

    Attributes:
        name: the study's name.
        home: the folder of the study's file; program paths are relative to it.
        out: the folder for figures and finished runs.
        quick: the user wants a small version, as a check that the study works.
        repeats: how many seeds the user wants; None: all seeds of the study.
        jobs: how many runs may execute at once.
        say: takes one line of text for the user.
        executor: executes the runs; None means a pool of `jobs` processes, or this process when `jobs` is 0.
        used: folder of each run that a sweep has returned → its description; contexts derived from this one share it.
    """

    name: str
    home: Path
    out: Path
    quick: bool = False
    repeats: int | None = None
    jobs: int = 1
    say: Callable[[str], None] = lambda _: None
    executor: Executor | None = None
    used: dict[str, Mapping[str, Any]] = field(default_factory=dict, repr=False, compare=False)

    def file(self, name: str) -> Path:
        return self.home / name

    def seeds(self, own: Sequence[int]) -> list[int]:
        """Return the seeds to run.

        Args:
            own: the study's seeds; `--quick` takes only the first.

        Returns:
            As many seeds as the user asked for (`--seeds`): first the study's, then the integers after the study's
            last seed.
        """
        if self.repeats is None:
            return list(own[:1] if self.quick else own)
        more = range(own[-1] + 1, own[-1] + 1 + max(self.repeats - len(own), 0))
        return [*own[: self.repeats], *more]

    def grid(
        self, file: str, *, ranks: Sequence[int], seeds: Sequence[int],
        over: Mapping[str, Sequence[Scalar]] | None = None, around: Mapping[str, Sequence[Any]] | None = None,
        **world: Any,
    ) -> list[Cell]:  # fmt: skip
        """Return one cell per combination of values of `over` and `around`, numbers of ranks and seeds."""
        return grid(self.file(file), ranks=ranks, seeds=seeds, over=over, around=around, **world)

    def sweep(
        self, cells: Sequence[Cell], *, each: Callable[[Result], None] = lambda _: None
    ) -> list[Result]:
        """Run the cells that are not done yet, and return the results of all cells.

        Args:
            cells: the cells to run; equal cells run once.
            each: is called with each result as soon as it is available, while other cells still run: it can draw a
                figure meanwhile.

        Returns:
            One result per cell, in the order of `cells`.

        Raises:
            StudyError: some runs failed; the successful runs are kept.
        """
        store, found = Store(self.out / "runs"), dict[str, Result]()

        def ended(cell: Cell) -> None:
            found[cell.key] = Result(cell, read(store.folder(cell)), store.cost(cell))
            self.used[str(store.folder(cell))] = found[cell.key].run.what
            each(found[cell.key])

        sweeping.sweep(cells, store, jobs=self.jobs, executor=self.executor, say=self.say, ended=ended)
        return [replace(found[cell.key], cell=cell) for cell in cells]

    def warnings(self) -> list[str]:
        """Return each kind of warning of the runs that this study has used once, with the number of runs."""
        return warnings_of_runs(self.used)

    def alone(self) -> Context:
        """Return this context with at most one run at a time: timed real processes must not share the machine."""
        return replace(self, jobs=min(self.jobs, 1))

    def save(self, figure: Figure, stem: str) -> list[Path]:
        """Write a figure as PNG and PDF into the study's folder, and report the path."""
        from spawnsim.plots import save  # matplotlib is loaded with the first figure

        paths = save(figure, self.out / stem)
        self.say(f"figure: {paths[0]}")
        return paths

    def claim(self, text: str, *, source: str, checks: Mapping[str, bool], found: str) -> str:
        """Report the finding about a published claim, and keep it for the table of claims (`spawnsim study claims`).

        Args:
            text: the claim, in one sentence.
            source: where it was published.
            checks: aspect of the claim → whether it holds; the verdict follows.
            found: the figures, and the settings under which they were found. Failed checks that it does not name
                are appended.

        Returns:
            The verdict: "holds", "holds in part" or "does not hold here".
        """
        missed = [name for name, held in checks.items() if not held and name not in found]
        found = found + (f" (not: {', '.join(missed)})" if missed else "")
        claim = claims.Claim(text, source, claims.verdict(checks), found, self.name)
        claims.write(self.out, claim)
        self.say(f"{claim.verdict}: {text}: {found}")
        return claim.verdict

    def save_table(self, rows: Sequence[Mapping[str, object]], stem: str) -> Path:
        """Write rows as JSON into the study's folder."""
        path = self.out / f"{stem}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(list(rows), indent=2) + "\n")
        return path
