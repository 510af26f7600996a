"""Run folders: `run.json`, `metrics.npz`, `events.jsonl`, read and written. Never pickles.

Each file is written beside its place and then moved there, so a reader finds the old file or the new one, whole.
The bytes depend on the content alone (no time stamps inside the archive): equal runs give equal files.

This room knows files. It knows nothing of how a run came about.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.record import journal
from spawnsim.record.manifest import INPUTS, Files, keep
from spawnsim.record.plain import document
from spawnsim.record.recorder import Event
from spawnsim.record.table import Table

MANIFEST, METRICS, EVENTS = "run.json", "metrics.npz", "events.jsonl"
HELD = (MANIFEST, METRICS, EVENTS, journal.FOLDER)
RUNNING = "running"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip archive can hold


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with journal.storing(path):
            with draft.open("wb") as file:
                yield file
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def named(out: str | Path) -> Path:
    """Return the path that `out` (or --out) names; `ParameterError` for an empty text, which would mean "here"."""
    if not str(out):
        raise ParameterError("--out '': name a place; '.' is this folder")
    return Path(out)


def require_free(folder: Path, *, overwrite: bool = False) -> None:
    """Raise `ParameterError` if a run would be lost that is written into this folder."""
    held = [name for name in HELD if (folder / name).exists()]
    if held and not overwrite:
        raise ParameterError(
            f"{folder} holds a run already ({', '.join(held)}): choose another folder, or overwrite it (--overwrite)"
        )


def require_no_file_of_a_run(path: Path) -> None:
    """Raise `ParameterError` if `path`, which is going to be written, is a folder, or a file of a recorded run."""
    if path.is_dir():
        raise ParameterError(f"{path} is a folder: name a file")
    if path.name in HELD and (path.parent / MANIFEST).exists():
        raise ParameterError(
            f"{path} belongs to the run in {path.parent}, which would be lost: choose another name"
        )


def prepare(folder: Path) -> None:
    """Make the folder; `ParameterError` when it cannot be written to, before any work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParameterError(f"cannot make the run folder {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ParameterError(f"cannot write to the run folder {folder}")


def begin(folder: Path, what: Mapping[str, Any], inputs: Files | None = None) -> None:
    """Open a run folder for a run: what an earlier one left there goes, and run.json says "running"."""
    prepare(folder)
    for name in (METRICS, EVENTS):
        (folder / name).unlink(missing_ok=True)
    journal.discard(folder)
    shutil.rmtree(folder / INPUTS, ignore_errors=True)
    keep(folder, inputs or {})
    write_manifest(folder, {"what": what, "totals": {}, "outcome": RUNNING})


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write run.json."""
    text = json.dumps(document(manifest), indent=2, allow_nan=False)
    with _replacing(folder / MANIFEST) as file:
        file.write(text.encode() + b"\n")


def write_table(folder: Path, table: Table) -> None:
    """Write metrics.npz: one array per column, lightly compressed."""
    with _replacing(folder / METRICS) as file, zipfile.ZipFile(file, "w", compresslevel=1) as archive:
        for name, column in table.items():
            entry = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, column, allow_pickle=False)


def write_events(folder: Path, events: Sequence[Event]) -> None:
    """Write events.jsonl: one JSON object a line, by time."""
    with _replacing(folder / EVENTS) as file:
        for event in events:
            file.write(json.dumps(event, allow_nan=False).encode() + b"\n")


def write(folder: Path, *, table: Table, events: Sequence[Event], manifest: Mapping[str, Any]) -> None:
    """Write a whole run; run.json comes last, so that its outcome speaks of files that are there."""
    prepare(folder)
    write_table(folder, table)
    write_events(folder, events)
    write_manifest(folder, manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return run.json; `ParameterError` when the folder holds no run."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise ParameterError(f"{folder} is no run folder: it has no readable {MANIFEST}") from error
    except ValueError as error:
        raise ParameterError(f"{folder / MANIFEST} is no JSON: {error}") from error
    if not isinstance(manifest, dict):
        raise ParameterError(f"{folder / MANIFEST} holds no JSON object")
    return manifest


def read_table(folder: Path) -> Table:
    """Return metrics.npz; `ParameterError` when it is missing or damaged."""
    try:
        with np.load(folder / METRICS, allow_pickle=False) as archive:
            return Table(dict(archive.items()))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ParameterError(f"cannot read {folder / METRICS}: {error}") from error


def read_events(folder: Path) -> list[Event]:
    """Return events.jsonl; `ParameterError` names the line that is damaged."""
    try:
        lines = (folder / EVENTS).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ParameterError(f"cannot read {folder / EVENTS}: {error.strerror}") from error
    return [_parsed(folder, number, line) for number, line in enumerate(lines, 1)]


def _parsed(folder: Path, number: int, line: str) -> Event:
    try:
        event: Event = json.loads(line)
    except ValueError as error:
        raise ParameterError(f"{folder / EVENTS}, line {number}: no JSON ({error})") from error
    return event
