"""Where finished runs of a study lie: one folder per key; a folder that exists is done.

This room knows folders and renames. A run is written into a draft beside its place and renamed at the end, which is
atomic: a study that was interrupted, or that two people run at once, never sees half a run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from spawnsim.study.cell import Cell

COST = "cost.json"


@dataclass(frozen=True)
class Cost:
    """What a run took on this machine: wall seconds, peak memory of its process in bytes, load when it began."""

    wall_s: float
    peak_memory_B: int  # noqa: N815  (B is the unit)
    load: float


class Store:
    """Finished runs under `root`, by key."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, cell: Cell) -> Path:
        """Return the place of a cell's run, there or not."""
        return self.root / f"{cell.name}-{cell.key}"

    def done(self, cell: Cell) -> bool:
        """Say whether the run is there."""
        return self.folder(cell).is_dir()

    def cost(self, cell: Cell) -> Cost:
        """Return what the run took when it was made."""
        return Cost(**json.loads((self.folder(cell) / COST).read_text()))

    @contextmanager
    def draft(self, cell: Cell) -> Iterator[Path]:
        """Give a folder to write into; it takes its place when the block ends well, and stays aside when it fails."""
        place = self.folder(cell)
        draft = place.with_name(f".{place.name}.{os.getpid()}")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            yield draft
        except BaseException:
            failed = place.with_name(f"failed-{place.name}")
            shutil.rmtree(failed, ignore_errors=True)
            with suppress(OSError):
                draft.rename(failed)  # what was recorded until then, to look at
            raise
        try:
            draft.rename(place)
        except OSError:
            if not place.is_dir():
                raise
            shutil.rmtree(draft)  # somebody else was faster; equal keys mean equal results


def write_cost(folder: Path, cost: Cost) -> None:
    """Write the cost beside the run."""
    (folder / COST).write_text(json.dumps(asdict(cost)) + "\n")
