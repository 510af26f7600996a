"""A journal: the records of a process, kept on disk while it runs, so that they outlive it.

Each real rank appends to its own shard; all virtual ranks of a process share one. Records are written at most
`FLUSH_S` late, one *frame* at a time: a line of JSON (which rows follow, new texts, events, the rank's counts), then
the rows as the recorder packs them. Later any process (rank 0, the rank that failed, the launcher) replays all shards
into one `Recorder`. The last frame of a killed rank may be torn and is skipped. Before a merge, all other processes
must have closed their journals, or be dead.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from time import monotonic  # the real one: ranks that record may have a virtual `time.monotonic`
from typing import Any, BinaryIO, NamedTuple

from spawnsim.errors import ParameterError, StorageError
from spawnsim.record.recorder import Portion, Recorder
from spawnsim.record.sorting import storing

FOLDER, OLD, NEW = "shards", ".shards", ".shards-new"
BEFORE = "ranks-before"  # the records of a resumed run up to its checkpoint
TOGETHER = "ranks"  # the shard of a process that runs all ranks
TRACE = "trace"  # the timeline of a traced run
STATES = "states"  # next to the shards of a watched run: its ranks' current states
FLUSH_S = 0.5  # a killed rank loses at most this much

_TYPES: dict[str, type] = {kind.__name__: kind for kind in (float, int, bool, str, type(None))}

Counted = Mapping[str, Any]


class Journal:
    """Records rows and events; without a path they stay in memory (see `frames`) until `open`.

    Attributes:
        counted: called at each flush; returns the rank's counts so far: a dict of numbers.
        frames: frames that were flushed without a file, or could not be written to it yet.

    Args:
        path: the shard.
        prompt: whether an event is written at once: it shows what happened before one of many ranks was killed.
    """

    def __init__(self, path: Path | None = None, *, prompt: bool = True) -> None:
        self.counted: Callable[[], Counted] = dict
        self.frames: list[bytes] = []
        self._prompt = prompt
        self._recorder = Recorder()
        self._file: FileIO | None = None
        self._pending, self._due_s = False, monotonic() + FLUSH_S
        self._lock = threading.Lock()  # background tasks of a real rank are threads
        if path is not None:
            self.open(path)

    def open(self, path: Path) -> None:
        """Write to this shard from now on; a rank knows its own shard only once it has met the other ranks."""
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a killed process would lose data in Python's buffer, but not a write in the kernel's cache.
            self._file = path.open("wb", buffering=0)

    @property
    def rows(self) -> int:
        return self._recorder.rows

    @property
    def time_s(self) -> float:
        return self._recorder.time_s

    def row(self, rank: int, time_s: float, values: Mapping[str, Any]) -> None:
        """Keep one row; tensors are converted to numbers now, since they will change."""
        with self._lock:
            self._recorder.row(rank, time_s, values)
            self._pending = True
        # Outside of the lock, which `flush` acquires itself.
        if monotonic() > self._due_s:
            self.flush()

    def event(self, rank: int, time_s: float, kind: str, fields: Mapping[str, Any]) -> None:
        """Keep one event."""
        with self._lock:
            self._recorder.event(rank, time_s, kind, fields)
            self._pending = True
        if self._prompt or monotonic() > self._due_s:
            self.flush()

    def keep_up(self) -> None:
        """Write records that are pending for `FLUSH_S`; another thread calls it now and then, as rows may be rare."""
        if self._pending and monotonic() > self._due_s:
            with suppress(StorageError):  # it is kept, and the rank gets the error with its next row
                self.flush()

    def flush(self) -> None:
        """Write pending records. Raises `StorageError` if they cannot be written; they are kept for the next flush."""
        with self._lock:
            # Background tasks may record after the end; their rows no longer belong to a run.
            if self._file is not None and self._file.closed:
                return
            # Appended before it is written: what a full disk refuses stays first in the queue, so order is kept.
            self.frames.append(packed(self._recorder.drain(), self.counted()))
            # Frames of the time before the shard had a file go first.
            while self._file is not None and self.frames:
                _append(self._file, self.frames[0])
                del self.frames[0]
            self._pending = False
            self._due_s = monotonic() + FLUSH_S

    def close(self) -> None:
        """Write pending records and close the shard; more than once is fine."""
        self.flush()
        if self._file is not None:
            self._file.close()


def _append(file: FileIO, frame: bytes) -> None:
    """Write a whole frame, or nothing: frames after a torn one would be unreadable."""
    # A raw file may write less than requested; the view avoids copying the rest.
    whole, left = file.tell(), memoryview(frame)
    try:
        with storing(Path(str(file.name))):
            while left:
                left = left[file.write(left) :]
    except StorageError:
        with suppress(OSError):
            file.truncate(whole)
            file.seek(whole)
        raise


# ---------------------------------------------------------------------------------------------------------- frames
def packed(portion: Portion, counted: Counted) -> bytes:
    """Return a frame."""
    blocks = [[names, [kind.__name__ for kind in types], len(data)] for names, types, data in portion.blocks]
    # JSON for the head, bytes for the rows: rows as JSON cost three times as much. The head holds the lengths, which
    # reveal a torn frame.
    head = {"blocks": blocks, "words": portion.words, "events": portion.events, "counted": counted}
    return b"".join([json.dumps(head).encode(), b"\n", *(data for _, _, data in portion.blocks)])


def replay(file: BinaryIO, recorder: Recorder) -> Counted:
    """Replay a journal into a recorder, up to a torn frame; return the rank's last counts."""
    last: Counted = {}
    for portion, words, counted in frames(file):
        recorder.absorb(portion, words)
        # Counts are totals, not differences: in a torn journal the last whole frame's counts are right.
        last = counted
    return last


def frames(file: BinaryIO) -> Iterator[tuple[Portion, list[str], Counted]]:
    """Yield a journal frame by frame, with all texts so far, up to a torn frame."""
    words: list[str] = []
    while (found := _next(file)) is not None:
        portion, counted = found
        # Texts are numbered over the whole journal, and each frame holds only the new ones.
        words += portion.words
        yield portion, words, counted


def _next(file: BinaryIO) -> tuple[Portion, Counted] | None:
    """Return the next whole frame, or None: the rank was killed while it wrote."""
    try:
        head = json.loads(file.readline())
    # Also at the end of the file: an empty line is not JSON.
    except ValueError:
        return None
    parts = [
        (tuple(names), tuple(map(_TYPES.__getitem__, types)), size) for names, types, size in head["blocks"]
    ]
    blocks = [(names, types, file.read(size)) for names, types, size in parts]
    if any(len(data) < size for (_, _, data), (_, _, size) in zip(blocks, parts, strict=True)):
        return None
    return Portion(blocks, head["words"], head["events"]), head["counted"]


# ---------------------------------------------------------------------------------------------------------- shards
class Merged(NamedTuple):
    """The contents of all shards of a folder; `counted` has an entry for each rank with its own shard."""

    recorder: Recorder
    counted: dict[int, Counted]


def shard(folder: Path, rank: int | None = None) -> Path:
    """Return the file of one rank's journal in a run folder, or of the journal of all ranks together."""
    return folder / FOLDER / (TOGETHER if rank is None else f"rank-{rank:05d}")


def merge(folder: Path) -> Merged:
    """Return the merged shards of a run folder."""
    recorder, counted = Recorder(folder / FOLDER), {}
    # Sorted: the order of replay decides the order of columns and of texts, and must not be the file system's.
    for path in sorted((folder / FOLDER).glob("rank*"), key=lambda path: (path.name != BEFORE, path.name)):
        with path.open("rb") as file:
            found = replay(file, recorder)
        if path.name not in (TOGETHER, BEFORE):
            counted[int(path.stem.removeprefix("rank-"))] = found
    return Merged(recorder, counted)


def merge_frames(parts: list[list[bytes]]) -> Merged:
    """Return the merged journals of ranks that wrote no file."""
    recorder = Recorder()
    return Merged(
        recorder, {rank: replay(io.BytesIO(b"".join(frames)), recorder) for rank, frames in enumerate(parts)}
    )


def begin_after(folder: Path, before: Iterable[Portion]) -> None:
    """Replace all shards by a journal of earlier records, which come from one recorder."""
    fresh = folder / NEW
    draft = fresh / f".{BEFORE}"
    shutil.rmtree(fresh, ignore_errors=True)
    with storing(fresh):
        fresh.mkdir()
        with draft.open("wb") as file:
            file.writelines(packed(portion, {}) for portion in before)
        draft.rename(fresh / BEFORE)  # this name marks it as whole
    _put_in_place(folder)


def _put_in_place(folder: Path) -> None:
    """Move the earlier records to the place of all shards; the shards are removed once no reader needs them."""
    shutil.rmtree(folder / OLD, ignore_errors=True)
    with suppress(FileNotFoundError):
        (folder / FOLDER).rename(folder / OLD)
    (folder / NEW).rename(folder / FOLDER)
    shutil.rmtree(folder / OLD, ignore_errors=True)


def mend(folder: Path) -> None:
    """Complete a `begin_after` whose process was killed between its two moves: otherwise all rows are lost."""
    if (folder / NEW / BEFORE).exists() and not (folder / FOLDER).exists():
        _put_in_place(folder)


def has_shards(folder: Path) -> bool:
    """Whether a run folder holds shards."""
    return any((folder / FOLDER).glob("rank*"))


def discard(folder: Path) -> None:
    """Remove the shards, once the run folder's own files hold their records: all at once, even if a process dies."""
    shutil.rmtree(folder / OLD, ignore_errors=True)
    with suppress(FileNotFoundError):
        # A rename first: a process killed while it removes files one by one would leave shards that look like a whole
        # run.
        (folder / FOLDER).rename(folder / OLD)
    shutil.rmtree(folder / OLD, ignore_errors=True)
    # Left by a resumption that was cut short: a later one must not use it.
    shutil.rmtree(folder / NEW, ignore_errors=True)


class RankStates(NamedTuple):
    """The states of a run's ranks at a time, virtual or on the clock of real ranks.

    `ranks`: by rank a word ("computing", "waiting", "finished", "died", …), and further details, such as the call.
    """

    time_s: float
    ranks: list[tuple[str, str]]


def write_states(folder: Path, states: RankStates, rank: int | None = None) -> None:
    """Write the states of all ranks, or of one real rank, for observers; no effect once shards have been merged."""
    place = _states(folder, rank)
    draft = place.with_name(f".{place.name}")
    with suppress(OSError):
        draft.write_text(json.dumps(states))
        # Renamed: a reader sees the old states or the new ones, whole.
        draft.replace(place)


def read_states(folder: Path, rank: int | None = None) -> RankStates | None:
    """Return the last written states, of all virtual ranks or of one real rank; or None."""
    try:
        time_s, ranks = json.loads(_states(folder, rank).read_text())
    except (OSError, ValueError):
        return None
    return RankStates(time_s, [(word, more) for word, more in ranks])


def _states(folder: Path, rank: int | None) -> Path:
    return folder / FOLDER / (STATES if rank is None else f"{STATES}-{rank:05d}")


class Hold:
    """A run folder that a run writes: no other run may begin there until `release`, or until the process has ended.

    Raises:
        ParameterError: another run holds it.
    """

    def __init__(self, folder: Path) -> None:
        # The folder itself: this needs no extra file, and the lock cannot outlive its holder.
        number = os.open(folder, os.O_RDONLY)
        self.release = weakref.finalize(self, os.close, number)
        _holds.add(self)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ParameterError(
                f"{folder}: another run writes to it; wait for its end, stop it, or choose another folder"
            ) from None
        except OSError:  # a file system without locks: two runs in one folder stay undetected there
            self.release()


_holds = weakref.WeakSet[Hold]()


def _let_go() -> None:
    for hold in list(_holds):
        hold.release()


# A forked process that outlives the program (a loader's worker) writes no folder, and must not hold it.
os.register_at_fork(after_in_child=_let_go)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes that would merge the same shards waiting: each then sees all shards closed before."""
    # Another process may have discarded the shards meanwhile; the lock still needs its folder.
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    with (folder / FOLDER / "lock").open("w") as file:
        # The open file holds the lock: it is released when the process dies, while a lock file would stay for ever.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
