"""A journal: what one real rank records, kept on disk while it runs, so that a rank that dies leaves what it saw.

Each rank appends to its own shard, one JSON object a line, at most `FLUSH_S` late. Later anybody (rank 0, the rank
that failed, the launcher) replays all shards into one `Recorder`; the last line of a rank that was killed may be
torn and is left out.

This room knows files and a recorder. It knows no communicator: whoever merges has seen to it that the others have
closed their journals, or are dead.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from spawnsim.record.plain import document, scalar
from spawnsim.record.recorder import Recorder, Sink

FOLDER = "shards"
FLUSH_S = 0.5  # a killed rank loses at most this much


class Journal:
    """Records one rank's rows and events; without a path they stay in memory (see `lines`) until `open`."""

    def __init__(self, path: Path | None = None) -> None:
        self.lines: list[str] = []
        self._pending: list[tuple[int, float, str | None, dict[str, Any]]] = []
        self._file: TextIO | None = None
        self._due_s = time.monotonic() + FLUSH_S
        self._lock = threading.Lock()  # background tasks of a real rank are threads
        if path is not None:
            self.open(path)

    def open(self, path: Path) -> None:
        """Write to this shard from now on; a rank knows which is its own only once it has met the others."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")

    def row(self, rank: int, time_s: float, values: Mapping[str, Any]) -> None:
        """Keep one row; tensors are asked for their numbers now, since they will change."""
        plain = {name: value if type(value) is float else scalar(value) for name, value in values.items()}
        self._keep(rank, time_s, None, plain)

    def event(self, rank: int, time_s: float, kind: str, fields: Mapping[str, Any]) -> None:
        """Keep one event, and write it at once: events are few, and tell what happened before a failure."""
        self._keep(rank, time_s, kind, document(fields))
        self.flush()

    def _keep(self, rank: int, time_s: float, kind: str | None, content: dict[str, Any]) -> None:
        with self._lock:
            self._pending.append((rank, time_s, kind, content))
        if time.monotonic() > self._due_s:
            self.flush()

    def flush(self) -> None:
        """Write what is pending."""
        with self._lock:
            lines = [json.dumps(entry) for entry in self._pending]
            self._pending.clear()
            if self._file is None:
                self.lines += lines
            elif lines and not self._file.closed:
                self._file.write("\n".join(lines) + "\n")
                self._file.flush()
            self._due_s = time.monotonic() + FLUSH_S

    def close(self) -> None:
        """Write what is pending and close the shard; more than once is fine."""
        self.flush()
        if self._file is not None:
            self._file.close()


def shard(folder: Path, rank: int) -> Path:
    """Return the file of one rank's journal in a run folder."""
    return folder / FOLDER / f"rank-{rank:05d}.jsonl"


def replay(lines: Iterable[str], sink: Sink) -> None:
    """Give every row and event of a journal to a recorder; a torn line ends it."""
    for line in lines:
        try:
            rank, time_s, kind, content = json.loads(line)
        except ValueError:  # the rank was killed in the middle of this line
            return
        if kind is None:
            sink.row(rank, time_s, content)
        else:
            sink.event(rank, time_s, kind, content)


def merge(folder: Path) -> tuple[Recorder, list[int]]:
    """Return all that the shards of a run folder hold, and the ranks that have a shard."""
    recorder, ranks = Recorder(), []
    for path in sorted((folder / FOLDER).glob("rank-*.jsonl")):
        ranks.append(int(path.stem.removeprefix("rank-")))
        with path.open(encoding="utf-8", errors="replace") as lines:
            replay(lines, recorder)
    return recorder, ranks


def discard(folder: Path) -> None:
    """Remove the shards, once what they hold is in the run folder's own files."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep others that would merge the same shards waiting: each then sees what those before it have closed."""
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    with (folder / FOLDER / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
