"""What the figures need of a run, and how a run is named in a legend or a caption.

This room knows the shape of a finished run (four attributes); it must not know how runs are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from spawnsim.plots.series import Table
from spawnsim.run import Run

REAL = " (real MPI)"  # ends the label of a run on real processes


class Recorded(Protocol):
    """A finished run: `what` ran, its `totals`, its `table` of columns and its `events`."""

    @property
    def what(self) -> Mapping[str, Any]: ...
    @property
    def totals(self) -> Mapping[str, Any]: ...
    @property
    def table(self) -> Table: ...
    @property
    def events(self) -> Sequence[Mapping[str, Any]]: ...


def read(folder: str | Path) -> Run:
    """Load a run folder; a run that failed half-way is loaded as far as it came."""
    return Run.load(folder)


def ranks_of(run: Recorded) -> int:
    """Return the number of ranks."""
    return int(run.totals.get("ranks") or int(run.table["rank"].max()) + 1)


def is_real(run: Recorded) -> bool:
    """Say whether the run took place on real processes."""
    return str(run.what.get("backend") or "virtual") != "virtual"


def clock_of(runs: Sequence[Recorded]) -> str:
    """Return what an axis of the ranks' clocks shows: virtual seconds as soon as one run is virtual."""
    return "time (s)" if all(map(is_real, runs)) else "virtual time (s)"


def label(run: Recorded) -> str:
    """Return the run's name in a legend: its policy, or else its file."""
    parameters = run.what.get("parameters") or {}
    file = Path(str(run.what.get("file") or "run")).stem
    name = str(parameters["policy"] or "none") if "policy" in parameters else file
    return f"{name}{REAL}" if is_real(run) else name


def _distinct(runs: Sequence[Recorded], key: str) -> list[str]:
    return list(
        dict.fromkeys(str(run.what[key]) for run in runs if run.what.get(key) not in (None, "", "none"))
    )


def setting(runs: Sequence[Recorded]) -> str:
    """Return who ran where: ranks, platform, stragglers, faults, seeds; for the caption below a figure."""
    parts = []
    for real, kind in ((False, "virtual ranks"), (True, "real MPI ranks")):
        sizes = sorted({ranks_of(run) for run in runs if is_real(run) is real})
        if sizes:
            parts.append(" and ".join(f"{size:,}" for size in sizes) + f" {kind}")
    virtual = [run for run in runs if not is_real(run)]
    parts += _distinct(virtual, "platform")
    parts += [
        f"{key} {' / '.join(values)}"
        for key in ("stragglers", "faults")
        if (values := _distinct(virtual, key))
    ]
    seeds = _distinct(runs, "seed")
    if seeds:
        parts.append(
            f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds ({seeds[0]} … {seeds[-1]})"
        )
    return " · ".join(parts)
