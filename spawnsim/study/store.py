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

from spawnsim.errors import ParameterError
from spawnsim.record.folder import read_manifest
from spawnsim.record.manifest import file_digest
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
        """Say whether the run is there, and of the files that it depends on none was edited since."""
        place = self.folder(cell)
        return place.is_dir() and _as_recorded(cell, place)

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
        if place.is_dir() and not self.done(cell):
            shutil.rmtree(place)
        try:
            draft.rename(place)
        except OSError:
            if not place.is_dir():
                raise
            shutil.rmtree(draft)  # somebody else was faster; equal keys mean equal results


def _as_recorded(cell: Cell, place: Path) -> bool:
    """Say whether all files that a run has depended on are the same today; a key cannot know all that it imports."""
    try:
        recorded = (read_manifest(place).get("what") or {}).get("inputs") or {}
    except ParameterError:
        return False
    own = {name: Path(cell.file).parent / name.removeprefix("program/") for name in recorded}
    files = own | cell.inputs()
    return all(files[name].is_file() and file_digest(files[name]) == recorded[name] for name in recorded)


def write_cost(folder: Path, cost: Cost) -> None:
    """Write the cost beside the run."""
    (folder / COST).write_text(json.dumps(asdict(cost)) + "\n")
