"""Rows that exceed the memory: sorted in parts, which are stored in a file, and merged to columns in a file.

A part holds rows of one shape, by rank and then as recorded. A merge reads a stretch of each part, so memory holds a
number of rows that does not depend on the total. The files have no name: they vanish with the process.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np

from spawnsim.columns import Column, StoredColumns
from spawnsim.errors import StorageError

MERGED = 500_000  # rows in memory while parts are merged
LEAST = 1_000  # rows per read of a part, which has some 100,000 or more: smaller reads cost too much time


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Report errors of the file system in words."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def in_order(rank: Column, order: Column) -> Column:
    """Return the numbers of rows, by rank, then as recorded."""
    # The order of recording counts within a rank alone: among ranks it depends on their interleaving.
    found: Column = np.lexsort((order, rank))
    return found


class Scratch:
    """A file without a name, which is written at its end and read anywhere.

    Args:
        folder: where it is stored. If the folder is not writable, such as another user's run that is only read, the
            file is stored with the system's temporary files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.nbytes = folder, 0
        try:
            self._file: IO[bytes] = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # it lasts as long as this
        except OSError:
            self._file = TemporaryFile(buffering=0)  # noqa: SIM115

    def append(self, values: Column) -> int:
        begin, left = self.nbytes, memoryview(values.tobytes())
        self.nbytes += len(left)
        with storing(self.folder):
            while left:
                left = left[self._file.write(left) :]
        return begin

    def read(self, begin: int, count: int, dtype: np.dtype[Any]) -> Column:
        parts, nbytes = list[bytes](), count * dtype.itemsize
        while nbytes:
            # At a given place, not at the file's own position: several readers may alternate.
            parts.append(os.pread(self._file.fileno(), nbytes, begin))
            begin, nbytes = begin + len(parts[-1]), nbytes - len(parts[-1])
        return np.frombuffer(b"".join(parts), dtype) if parts else np.empty(0, dtype)


class _Part:
    """Sorted rows of one shape in a file, of which a stretch is in memory."""

    def __init__(self, shape: Hashable, scratch: Scratch, rows: Column) -> None:
        self.shape, self._scratch = shape, scratch
        ordered = rows[in_order(rows["\0rank"], rows["\0order"])]
        self._begin, self.left, self.rows = scratch.append(ordered), len(ordered), np.empty(0, rows.dtype)

    def fill(self, count: int) -> None:
        """Read the next rows, if memory holds none."""
        if not len(self.rows):
            count, dtype = min(count, self.left), self.rows.dtype
            self.rows = self._scratch.read(self._begin, count, dtype)
            self._begin, self.left = self._begin + count * dtype.itemsize, self.left - count

    @property
    def last(self) -> tuple[int, int]:
        """The rank and number of the last row in memory: all unread rows come after it."""
        return int(self.rows["\0rank"][-1]), int(self.rows["\0order"][-1])

    def taken(self, until: tuple[int, int] | None) -> Column:
        cut = len(self.rows)
        if until is not None:
            first, last = np.searchsorted(self.rows["\0rank"], (until[0], until[0] + 1))
            cut = int(first + np.searchsorted(self.rows["\0order"][first:last], until[1], side="right"))
        found, self.rows = self.rows[:cut], self.rows[cut:]
        return found


class SortedRows:
    """Rows of several shapes, all stored in a file.

    Attributes:
        shapes: the caller's key of each shape, and the type of its rows.

    Args:
        folder: see `Scratch`.
    """

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[Hashable, np.dtype[Any]] = {}
        self._scratch, self._parts = Scratch(folder), list[_Part]()

    def add(self, shape: Hashable, rows: Column) -> None:
        """Keep rows of a shape."""
        self.shapes[shape] = rows.dtype
        self._parts.append(_Part(shape, self._scratch, rows))

    def merged(self) -> Iterator[list[Column]]:
        """Yield all rows by rank, then as recorded, stretch by stretch: each is an array for every shape."""
        parts = list(map(copy, self._parts))  # each continues from its position
        count = max(LEAST, MERGED // max(1, len(parts)))
        while parts:
            for part in parts:
                part.fill(count)
            until = min((part.last for part in parts if part.left), default=None)
            found = {shape: [np.empty(0, dtype)] for shape, dtype in self.shapes.items()}
            for part in parts:
                found[part.shape].append(part.taken(until))
            yield [np.concatenate(pieces) for pieces in found.values()]
            parts = [part for part in parts if len(part.rows) or part.left]


class FiledColumns(StoredColumns):
    """Columns in a file without a name.

    Args:
        folder: see `Scratch`.
        pieces: the columns by name, piece by piece, all with the same names and types; at least one piece.
    """

    def __init__(self, folder: Path, pieces: Iterable[Mapping[str, Column]]) -> None:
        self._scratch, self._places = Scratch(folder), list[tuple[int, dict[str, int]]]()
        dtypes: dict[str, np.dtype[Any]] = {}
        for piece in pieces:
            dtypes = {name: column.dtype for name, column in piece.items()}
            places = {name: self._scratch.append(column) for name, column in piece.items()}
            self._places.append((len(piece["rank"]), places))
        super().__init__(sum(rows for rows, _ in self._places), dtypes)

    def pieces(self, name: str) -> Iterator[Column]:
        for rows, places in self._places:
            yield self._scratch.read(places[name], rows, self.dtypes[name])
