"""A journal: the records of a process, kept on disk while it runs, so that they outlive it.

Each real rank appends to its own shard, all virtual ranks of a process to one, at most `FLUSH_S` late, one *frame*
a time: a line of JSON (which rows follow, new texts, events, what the rank has counted), then the rows as the
recorder packs them. Later any process (rank 0, the rank that failed, the launcher) replays all shards into one
`Recorder`; the last frame of a rank that was killed may be torn and is left out. Whoever merges has seen to it that
the others have closed their journals, or are dead.
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
BEFORE = "ranks-before"  # what a run that is resumed had recorded until its checkpoint
TOGETHER = "ranks"  # the shard of a process that runs all ranks
TRACE = "trace"  # that of the timeline of a run that is traced
STATES = "states"  # beside the shards of a run that is watched: what its ranks do now
FLUSH_S = 0.5  # a killed rank loses at most this much

_TYPES: dict[str, type] = {kind.__name__: kind for kind in (float, int, bool, str, type(None))}

Counted = Mapping[str, Any]


class Journal:
    """Records rows and events; without a path they stay in memory (see `frames`) until `open`.

    Attributes:
        counted: asked at each flush for what the rank has counted so far: a dict of numbers.
        frames: frames that were flushed without a file, or could not be written to it yet.

    Args:
        path: the shard.
        prompt: whether an event is written at once: it tells what happened before a rank of many was killed.
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
        """Write to this shard from now on; a rank knows which is its own only once it has met the others."""
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: what Python still held in a buffer would be lost with a killed process, and a write from the
            # kernel's cache is not.
            self._file = path.open("wb", buffering=0)

    @property
    def rows(self) -> int:
        return self._recorder.rows

    @property
    def time_s(self) -> float:
        return self._recorder.time_s

    def row(self, rank: int, time_s: float, values: Mapping[str, Any]) -> None:
        """Keep one row; tensors are asked for their numbers now, since they will change."""
        with self._lock:
            self._recorder.row(rank, time_s, values)
            self._pending = True
        # Outside of the lock, which `flush` takes itself.
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
        """Write what is pending for `FLUSH_S`; another thread calls it now and then, as rows may be rare."""
        if self._pending and monotonic() > self._due_s:
            with suppress(StorageError):  # it is kept, and the rank meets the error with its next row
                self.flush()

    def flush(self) -> None:
        """Write pending records. Raises `StorageError` if they cannot be written; they are kept, and tried again."""
        with self._lock:
            # Background tasks may record after the end; their rows belong to no run any more.
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
    """Write a whole frame, or nothing: frames after a torn one could not be read."""
    # A raw file may write less than it is given; the view saves copying the rest.
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
    # JSON for the head, bytes for the rows: rows as JSON cost three times as much. The head holds the lengths, so a
    # torn frame is known as such.
    head = {"blocks": blocks, "words": portion.words, "events": portion.events, "counted": counted}
    return b"".join([json.dumps(head).encode(), b"\n", *(data for _, _, data in portion.blocks)])


def replay(file: BinaryIO, recorder: Recorder) -> Counted:
    """Give everything in a journal to a recorder, up to a torn frame; return what the rank has counted last."""
    last: Counted = {}
    for portion, words, counted in frames(file):
        recorder.absorb(portion, words)
        # Counts are totals, not differences: of a torn journal the last whole frame's are right.
        last = counted
    return last


def frames(file: BinaryIO) -> Iterator[tuple[Portion, list[str], Counted]]:
    """Yield a journal frame by frame, with all texts so far, up to a torn one."""
    words: list[str] = []
    while (found := _next(file)) is not None:
        portion, counted = found
        # Texts are numbered over the whole journal, and each frame holds only those that are new in it.
        words += portion.words
        yield portion, words, counted


def _next(file: BinaryIO) -> tuple[Portion, Counted] | None:
    """Return the next whole frame, or None: the rank was killed while it wrote."""
    try:
        head = json.loads(file.readline())
    # Also at the end of the file, where an empty line is no JSON.
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
    """What all shards of a folder hold; `counted` has an entry per rank that has a shard of its own."""

    recorder: Recorder
    counted: dict[int, Counted]


def shard(folder: Path, rank: int | None = None) -> Path:
    """Return the file of one rank's journal in a run folder, or of the journal of all ranks together."""
    return folder / FOLDER / (TOGETHER if rank is None else f"rank-{rank:05d}")


def merge(folder: Path) -> Merged:
    """Return all that the shards of a run folder hold."""
    recorder, counted = Recorder(folder / FOLDER), {}
    # Sorted: the order of replay decides the order of columns and of texts, and must not be the file system's.
    for path in sorted((folder / FOLDER).glob("rank*"), key=lambda path: (path.name != BEFORE, path.name)):
        with path.open("rb") as file:
            found = replay(file, recorder)
        if path.name not in (TOGETHER, BEFORE):
            counted[int(path.stem.removeprefix("rank-"))] = found
    return Merged(recorder, counted)


def merge_frames(parts: list[list[bytes]]) -> Merged:
    """Return all that the journals of ranks hold that wrote no file."""
    recorder = Recorder()
    return Merged(
        recorder, {rank: replay(io.BytesIO(b"".join(frames)), recorder) for rank, frames in enumerate(parts)}
    )


def begin_after(folder: Path, before: Iterable[Portion]) -> None:
    """Put a journal of what was recorded before, of one recorder, in place of all shards."""
    fresh = folder / NEW
    draft = fresh / f".{BEFORE}"
    shutil.rmtree(fresh, ignore_errors=True)
    with storing(fresh):
        fresh.mkdir()
        with draft.open("wb") as file:
            file.writelines(packed(portion, {}) for portion in before)
        draft.rename(fresh / BEFORE)  # by this name it is known as whole
    _put_in_place(folder)


def _put_in_place(folder: Path) -> None:
    """Move what was recorded before to the place of all shards; these are removed once nothing needs them."""
    shutil.rmtree(folder / OLD, ignore_errors=True)
    with suppress(FileNotFoundError):
        (folder / FOLDER).rename(folder / OLD)
    (folder / NEW).rename(folder / FOLDER)
    shutil.rmtree(folder / OLD, ignore_errors=True)


def mend(folder: Path) -> None:
    """End what `begin_after` has begun in a process that was killed between its two moves: else all rows are lost."""
    if (folder / NEW / BEFORE).exists() and not (folder / FOLDER).exists():
        _put_in_place(folder)


def has_shards(folder: Path) -> bool:
    """Whether a run folder holds shards."""
    return any((folder / FOLDER).glob("rank*"))


def discard(folder: Path) -> None:
    """Remove the shards, once what they hold is in the run folder's own files: all at once, even if a process dies."""
    shutil.rmtree(folder / OLD, ignore_errors=True)
    with suppress(FileNotFoundError):
        # A rename first: a process killed while it removes files one by one would leave shards that look like a whole
        # run.
        (folder / FOLDER).rename(folder / OLD)
    shutil.rmtree(folder / OLD, ignore_errors=True)
    # Of a resumption that was cut short: a later one must not take it.
    shutil.rmtree(folder / NEW, ignore_errors=True)


class RankStates(NamedTuple):
    """What the ranks of a run do at a time, which is virtual or the clock of real ones.

    `ranks`: by rank a word ("computing", "waiting", "finished", "died", …), and what more is known, such as the call.
    """

    time_s: float
    ranks: list[tuple[str, str]]


def write_states(folder: Path, states: RankStates, rank: int | None = None) -> None:
    """Let whoever watches the run see what its ranks do, or one real rank; nothing once the shards have been merged."""
    place = _states(folder, rank)
    draft = place.with_name(f".{place.name}")
    with suppress(OSError):
        draft.write_text(json.dumps(states))
        # Moved: a reader sees the old states or the new ones, whole.
        draft.replace(place)


def read_states(folder: Path, rank: int | None = None) -> RankStates | None:
    """Return what was written last, of all virtual ranks or of one real rank; or None."""
    try:
        time_s, ranks = json.loads(_states(folder, rank).read_text())
    except (OSError, ValueError):
        return None
    return RankStates(time_s, [(word, more) for word, more in ranks])


def _states(folder: Path, rank: int | None) -> Path:
    return folder / FOLDER / (STATES if rank is None else f"{STATES}-{rank:05d}")


class Hold:
    """A run folder that a run writes: no other may begin there until `release`, or until the process has ended.

    Raises:
        ParameterError: another run holds it.
    """

    def __init__(self, folder: Path) -> None:
        # The folder itself, so that no file need lie there, and no lock can outlive its holder.
        number = os.open(folder, os.O_RDONLY)
        self.release = weakref.finalize(self, os.close, number)
        _holds.add(self)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ParameterError(
                f"{folder}: a run is writing there now; wait for its end, stop it, or choose another folder"
            ) from None
        except OSError:  # a file system without locks: there two runs in one folder are not noticed
            self.release()


_holds = weakref.WeakSet[Hold]()


def _let_go() -> None:
    for hold in list(_holds):
        hold.release()


# A process that a program has forked and that outlives it (a loader's worker) writes no folder, and must not hold it.
os.register_at_fork(after_in_child=_let_go)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep others that would merge the same shards waiting: each then sees what those before it have closed."""
    # Another may have discarded the shards meanwhile; the lock needs its folder all the same.
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    with (folder / FOLDER / "lock").open("w") as file:
        # Held by the open file: it falls when the process dies, where a lock file would stay for ever.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
