"""Run folders: `run.json`, `metrics.npz`, `events.jsonl`, read and written. Never pickles.

Each file is written next to its final place and then renamed, so a reader finds either the old file or the new one,
whole.
The bytes depend on the content alone (no time stamps inside the archive): equal runs give equal files.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from spawnsim import checkpoints
from spawnsim.columns import HELD_B, MOST_RANKS, ArchivedColumns, read_columns, require_ranks
from spawnsim.errors import ParameterError, StorageError
from spawnsim.record import journal
from spawnsim.record.manifest import INPUTS, Files, keep
from spawnsim.record.recorder import OWN, Event, Portion, Recorder, document
from spawnsim.record.sorting import storing
from spawnsim.record.table import Table
from spawnsim.units import LONGEST_S

MANIFEST, METRICS, EVENTS = "run.json", "metrics.npz", "events.jsonl"
TRACE = "trace.gz"  # the timeline of a traced run: its journal, packed
DRAWN = ("trace.json", "trace.json.gz")  # the drawings that `spawnsim trace` makes of a run
HELD = (MANIFEST, METRICS, EVENTS, TRACE, journal.FOLDER, checkpoints.FOLDER)
RUNNING = "running"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip archive can hold


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    # In the same folder, since a rename is atomic only within one file system. The process id in its name keeps apart
    # the drafts of ranks that fail together and write the same file.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with storing(path):
            with draft.open("wb") as file:
                yield file
            draft.replace(path)
    finally:
        # On a full disk, half a draft would occupy the space that other files need.
        draft.unlink(missing_ok=True)


def named(out: str | Path) -> Path:
    """Return the path that `out` (or --out) names; `ParameterError` for an empty text, which would mean "here"."""
    if not str(out):
        raise ParameterError("--out '': give a folder; '.' is the current one")
    return Path(out)


def require_free(folder: Path, *, overwrite: bool = False, empty_too: bool = False) -> None:
    """Raise `ParameterError` if writing a run into this folder would lose another run.

    `empty_too`: a run that failed before it recorded anything, for example at a typing error, may be lost.
    """
    held = [name for name in HELD if (folder / name).exists()]
    if held and not overwrite and not (empty_too and _failed_with_nothing(folder)):
        raise ParameterError(
            f"{folder} already holds a run ({', '.join(held)}): choose another folder, or overwrite it (--overwrite)"
        )


def require_own(folder: Path) -> None:
    """Raise `ParameterError` for a folder that holds files, but no run: a run's files would mix with them."""
    if (folder / MANIFEST).exists() or not folder.is_dir():
        return
    found = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if found:
        some = ", ".join(found[:3]) + " …" * (len(found) > 3)
        raise ParameterError(
            f"--out {folder} is a folder with other files ({some}): give a new folder, such as "
            f"{folder / 'run'}"
        )


def _failed_with_nothing(folder: Path) -> bool:
    """Return whether a folder holds a run that failed without a row, event, checkpoint or timeline."""
    if any((folder / name).exists() for name in (TRACE, journal.FOLDER, checkpoints.FOLDER)):
        return False
    try:
        manifest = read_manifest(folder)
        rows, events = read_table(folder).rows, read_events(folder)
    except ParameterError:  # unreadable rows or events may hold data
        return False
    # "finished": a run that ends well may have recorded nothing, and its totals count.
    return manifest["outcome"] not in (RUNNING, "finished") and not rows and not events


def require_no_file_of_a_run(path: Path) -> None:
    """Raise `ParameterError` if `path`, which is going to be written, is a folder, or a file of a recorded run."""
    if path.is_dir():
        raise ParameterError(f"{path} is a folder: give a file")
    if path.name in HELD and (path.parent / MANIFEST).exists():
        raise ParameterError(
            f"{path} belongs to the run in {path.parent}, which would be lost: choose another name"
        )


def prepare(folder: Path) -> None:
    """Make the folder; `ParameterError` if it is not writable, before any work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParameterError(f"cannot make the run folder {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ParameterError(f"cannot write to the run folder {folder}")


def begin(folder: Path, what: Mapping[str, Any], inputs: Files | None = None) -> None:
    """Open a run folder for a run: remove the files of an earlier run; run.json says "running"."""
    prepare(folder)
    # run.json is written last: until then the old one may remain, but never next to another run's rows.
    for name in (METRICS, EVENTS, TRACE, *DRAWN):
        (folder / name).unlink(missing_ok=True)
    journal.discard(folder)
    checkpoints.discard(folder)
    shutil.rmtree(folder / INPUTS, ignore_errors=True)
    keep(folder, inputs or {})
    write_manifest(folder, {"what": what, "totals": {}, "outcome": RUNNING})


def begin_again(
    folder: Path, what: Mapping[str, Any], inputs: Files, *, before: tuple[Iterable[Table], Sequence[Event]]
) -> None:
    """Open a run folder for a run that continues from a checkpoint: it holds `before`, rows and events, and the new
    records.

    If killed at any time, it leaves the earlier rows.
    """
    journal.begin_after(folder, _portions(*before))
    # "running" only now: until then the old rows are read from the files that held them.
    write_manifest(folder, {"what": what, "totals": {}, "outcome": RUNNING})
    for name in (METRICS, EVENTS, TRACE, *DRAWN):
        (folder / name).unlink(missing_ok=True)
    # Not removed first: the running program may be the kept copy.
    kept = {name for name, path in inputs.items() if path.resolve() == (folder / INPUTS / name).resolve()}
    keep(folder, {name: path for name, path in inputs.items() if name not in kept})


def _portions(tables: Iterable[Table], events: Sequence[Event]) -> Iterator[Portion]:
    """Yield the records before a run: the events, and one table after the other."""
    recorder = Recorder()
    recorder.precede(recorder.table(), events)
    yield recorder.drain()
    for table in tables:
        recorder.precede(table)
        yield recorder.drain()


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write run.json."""
    # Strict JSON: no other parser reads Python's NaN and Infinity.
    text = json.dumps(document(manifest), indent=2, allow_nan=False)
    with _replacing(folder / MANIFEST) as file:
        file.write(text.encode() + b"\n")


def version(folder: Path) -> tuple[int, int] | None:
    """Return the identity of run.json, which each `write_manifest` changes, or None without a run.json."""
    try:
        status = (folder / MANIFEST).stat()
    except FileNotFoundError:
        return None
    # Both: some file systems keep whole seconds, and a third write may get the inode of the first.
    return status.st_ino, status.st_mtime_ns


def write_table(folder: Path, table: Table) -> None:
    """Write metrics.npz: one array per column, lightly compressed."""
    with _replacing(folder / METRICS) as file, zipfile.ZipFile(file, "w", compresslevel=1) as archive:
        for name in table:
            # Not `numpy.savez`, which stores the time in the archive: equal runs would give different bytes.
            entry = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            # The size is unknown before the column is packed; without this flag, columns beyond 2 GiB fail at their
            # end.
            with archive.open(entry, "w", force_zip64=True) as member:
                head = {"descr": np.lib.format.dtype_to_descr(table.dtype(name)), "fortran_order": False}
                np.lib.format.write_array_header_1_0(member, head | {"shape": (table.rows,)})
                for piece in table.pieces(name):
                    member.write(piece[name].tobytes())


def write_events(folder: Path, events: Sequence[Event]) -> None:
    """Write events.jsonl: one JSON object a line, by time."""
    # One object per line: an error can name a damaged line, and tools can read a part.
    with _replacing(folder / EVENTS) as file:
        for event in events:
            file.write(json.dumps(event, allow_nan=False).encode() + b"\n")


def keep_trace(folder: Path) -> None:
    """Pack the journal of the timeline into its place, now that the run is complete."""
    journaled = folder / journal.FOLDER / journal.TRACE
    with (
        journaled.open("rb") as file,
        _replacing(folder / TRACE) as target,
        gzip.GzipFile("", "wb", compresslevel=1, fileobj=target, mtime=0) as packed,
    ):
        shutil.copyfileobj(file, packed)


@contextmanager
def opened_trace(folder: Path) -> Iterator[BinaryIO | None]:
    """Give the journal of a run's timeline; after a kill, as far as it was written; None: the run was not traced."""
    packed, plain = folder / TRACE, folder / journal.FOLDER / journal.TRACE
    if packed.exists():
        with gzip.open(packed) as file:
            yield cast(BinaryIO, file)
    elif plain.exists():
        with plain.open("rb") as file:
            yield file
    else:
        yield None


def write(folder: Path, *, table: Table, events: Sequence[Event], manifest: Mapping[str, Any]) -> None:
    """Write a whole run; run.json is written last, so that its outcome describes existing files."""
    prepare(folder)
    # Rows and events before the manifest: a run with a recorded outcome must have both.
    write_table(folder, table)
    write_events(folder, events)
    write_manifest(folder, manifest)


@contextmanager
def failing_in_place(folder: Path) -> Iterator[None]:
    """Record a failure to write a run's files as its outcome, or the run would say "running" for ever."""
    try:
        yield
    except StorageError as error:
        path = folder / MANIFEST
        with suppress(ParameterError, OSError):
            manifest, nbytes = read_manifest(folder), path.stat().st_size
            # The disk has no room for another file. Without indentation the text is shorter than the one that it
            # replaces, so it needs no further block.
            text = json.dumps(manifest | {"outcome": f"{type(error).__name__}: {error}"}).encode()
            if manifest["outcome"] == RUNNING and len(text) < nbytes:
                with path.open("r+b") as file:
                    file.write(text.ljust(nbytes - 1) + b"\n")
        raise


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return run.json: its "what" and "totals" are objects, its "outcome" is a text.

    Raises:
        ParameterError: the folder holds no run, or the file is damaged.
    """
    path = folder / MANIFEST
    try:
        manifest = _parsed(path.read_text(encoding="utf-8"))
        json.dumps(manifest, ensure_ascii=False).encode()  # half a character could not be written or drawn
    except OSError as error:
        if not Path(folder).exists():
            raise ParameterError(f"{folder}: this folder does not exist") from error
        # A sweep's or a study's folder.
        hint = f"; its runs are in {folder}/runs" if (Path(folder) / "runs").is_dir() else ""
        raise ParameterError(f"{folder} is not a run folder: it has no readable {MANIFEST}{hint}") from error
    except ValueError as error:
        raise ParameterError(f"{path} is not JSON: {error}") from error
    # Checked once here: all readers of a run rely on these three and check nothing further.
    kinds = {"what": dict, "totals": dict, "outcome": str}
    wrong = [name for name, kind in kinds.items() if not isinstance(_entry(manifest, name), kind)]
    if wrong:
        raise ParameterError(f"{path} does not describe a run: its {wrong[0]!r} is missing or invalid")
    ranks = manifest["totals"].get("ranks")
    # A damaged count would determine the size of arrays elsewhere.
    if ranks is not None and not _is_count(ranks, MOST_RANKS + 1):
        raise ParameterError(f"{path}: {str(ranks)[:20]} is not a number of ranks")
    found: dict[str, Any] = manifest
    totals = found["totals"]
    # Folders of earlier versions: the clock of real ranks was stored under the name of virtual time.
    if found["what"].get("backend", "virtual") != "virtual" and "virtual_seconds" in totals:
        totals["run_seconds"] = totals.pop("virtual_seconds")
    return found


def most_ranks(manifest: Mapping[str, Any]) -> int | None:
    """Return the largest number of ranks that a run has had: more than its last number if it was resumed with fewer."""
    ranks: int | None = manifest["totals"].get("ranks")
    before = _entry(manifest["what"].get("made"), "most_ranks")
    return max(ranks, before) if ranks is not None and _is_count(before, MOST_RANKS + 1) else ranks


def _entry(document: Any, name: str) -> Any:
    return document.get(name) if isinstance(document, dict) else None


def read_table(folder: Path, ranks: int | None = None) -> Table:
    """Return metrics.npz of a run of `ranks` ranks, if that is known.

    Raises:
        ParameterError: it is missing or damaged.
    """
    path = folder / METRICS
    stored = ArchivedColumns(path)
    table = Table(stored if stored.nbytes > HELD_B else read_columns(path))
    lacks = [name for name in OWN if name not in table]
    if lacks:
        raise ParameterError(f"cannot read {path}: it lacks the column {lacks[0]!r}")
    for piece in table.pieces(*OWN):
        # Figures allocate by the largest rank: one damaged number must not request all memory.
        require_ranks(path, piece["rank"], ranks)
        time_s = piece["time_s"]
        if time_s.dtype.kind != "f" or not ((time_s >= 0) & (time_s < LONGEST_S)).all():
            raise ParameterError(f"cannot read {path}: its column 'time_s' holds values that are not times")
    return table


def read_events(folder: Path, ranks: int | None = None) -> list[Event]:
    """Return events.jsonl of a run of `ranks` ranks, if that is known.

    Raises:
        ParameterError: it is missing, or a line, which the error names, is damaged.
    """
    path = folder / EVENTS
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ParameterError(f"cannot read {path}: {error.strerror}") from error
    return [_event(f"{path}, line {number}", line, ranks) for number, line in enumerate(lines, 1)]


def _event(where: str, line: bytes, ranks: int | None) -> Event:
    try:
        event = _parsed(line.decode())
    except ValueError as error:
        raise ParameterError(f"{where}: not JSON ({error})") from error
    time_s = _entry(event, "time_s")
    # A bool is an int in Python, and JSON has both.
    timed = isinstance(time_s, (int, float)) and not isinstance(time_s, bool) and 0 <= time_s < LONGEST_S
    if not (
        timed
        and isinstance(_entry(event, "kind"), str)
        and _is_count(_entry(event, "rank"), ranks or MOST_RANKS)
    ):
        raise ParameterError(f"{where}: not an event: an event has a kind, a rank and a time")
    found: Event = event
    return found


def _is_count(value: Any, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def _parsed(text: str) -> Any:
    """Return the value of a JSON text; `ValueError` if it is invalid, including NaN and endless nesting."""
    try:
        return json.loads(text, parse_constant=_refused)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refused(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")
