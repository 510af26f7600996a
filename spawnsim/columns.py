"""Archives of columns, such as a run's `metrics.npz`, which may be damaged or come from an unknown source.

The sizes in an archive are checked before memory is allocated for them, and nothing is unpickled. Large columns stay
in their file until they are requested.
"""

from __future__ import annotations

import zipfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError

KINDS = "biufU"  # bools, integers, floats and texts
MOST_RANKS = 10**7  # an upper bound for any job; arrays over ranks have this size

PIECE = 100_000  # rows
HELD_B = 64 << 20  # bytes of rows that are kept in memory without a request

Column = NDArray[Any]


class StoredColumns(Mapping[str, Column]):
    """Columns of one length in a file: a requested column is read and kept, `pieces` keeps nothing.

    Attributes:
        rows: their length.
        dtypes: their types by name.
    """

    def __init__(self, rows: int, dtypes: Mapping[str, np.dtype[Any]]) -> None:
        self.rows, self.dtypes = rows, dict(dtypes)
        self._read: dict[str, Column] = {}

    @abstractmethod
    def pieces(self, name: str) -> Iterator[Column]:
        """Yield a column from its beginning to its end; all columns come in pieces of the same lengths."""

    def __getitem__(self, name: str) -> Column:
        if name not in self._read:
            dtype = self.dtypes[name]
            self._read[name] = np.concatenate([np.empty(0, dtype), *self.pieces(name)], dtype=dtype)
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self.dtypes  # a membership test must not read

    def __iter__(self) -> Iterator[str]:
        return iter(self.dtypes)

    def __len__(self) -> int:
        return len(self.dtypes)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # to another process, where the file is not open


class ArchivedColumns(StoredColumns):
    """The columns of an archive, which stays open: its file may be replaced or removed meanwhile."""

    def __init__(self, path: Path) -> None:
        with _reading(path):
            # Closed with the last reference to it.
            self._path, self._archive = path, zipfile.ZipFile(path)
            self._members = {info.filename.removesuffix(".npy"): info for info in self._archive.infolist()}
            # Headers of all columns first: no large data are read from an inconsistent archive.
            claimed = {name: _claimed(self._archive, member) for name, member in self._members.items()}
            if len(lengths := {rows for rows, _ in claimed.values()}) > 1:
                raise ValueError("its columns differ in length")
        super().__init__(max(lengths, default=0), {name: dtype for name, (_, dtype) in claimed.items()})

    @property
    def nbytes(self) -> int:
        """The size of all columns in memory."""
        return self.rows * sum(dtype.itemsize for dtype in self.dtypes.values())

    def pieces(self, name: str) -> Iterator[Column]:
        """Yield a column from its beginning to its end; `ParameterError` if it is damaged."""
        dtype = self.dtypes[name]
        with _reading(self._path), self._archive.open(self._members[name]) as file:
            _header(file)
            for begin in range(0, self.rows, PIECE):
                yield np.frombuffer(_whole(file, min(PIECE, self.rows - begin) * dtype.itemsize), dtype)
            file.read(1)  # its checksum is verified at its end


def _whole(file: Any, nbytes: int) -> bytes:
    found: bytes = file.read(nbytes)
    if len(found) < nbytes:
        raise ValueError("a column is shorter than it claims")
    return found


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert the errors of a missing or damaged archive."""
    try:
        yield
    except ParameterError:
        raise
    except FileNotFoundError:
        raise ParameterError(f"{path.parent} is not a run folder: it holds no {path.name}") from None
    except KeyError as error:
        raise ParameterError(f"cannot read {path}: it lacks the column {error}") from error
    except Exception as error:  # the errors of zipfile, zlib and numpy on damaged data have no common base
        raise ParameterError(f"cannot read {path}: {str(error) or type(error).__name__}") from error


def read_columns(path: Path, names: Sequence[str] | None = None) -> dict[str, Column]:
    """Return columns of one length; `names` selects columns, None: all.

    Raises:
        ParameterError: there is no such file, it is damaged, or it lacks one of the names.
    """
    stored = ArchivedColumns(path)
    with _reading(path):
        return {name: stored[name] for name in (stored if names is None else names)}


def _claimed(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[int, np.dtype[Any]]:
    """Return a column's number of rows and type, if its claimed size matches its real one."""
    with archive.open(member) as file:
        shape, dtype = _header(file)
    if len(shape) != 1 or dtype.kind not in KINDS:
        raise ValueError(f"column {member.filename!r} is not a column of numbers or texts")
    # A few bytes can claim an array of any size, for which numpy would allocate the memory at once.
    if shape[0] * dtype.itemsize > member.file_size:
        raise ValueError(f"column {member.filename!r} claims {shape[0]:,} rows, but is shorter")
    return shape[0], dtype


def _header(file: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    return shape, dtype


def require_ranks(path: Path, ranks: Column, count: int | None = None) -> None:
    """Raise `ParameterError` unless a column `rank` holds numbers of ranks, of `count` ranks if that is known."""
    if ranks.dtype.kind not in "iu":
        raise ParameterError(f"cannot read {path}: its column 'rank' does not hold integers")
    least, largest = (int(ranks.min()), int(ranks.max())) if len(ranks) else (0, 0)
    if least < 0 or largest >= (count or MOST_RANKS):
        of = f"of {count:,} ranks" if count else "of any job"
        raise ParameterError(f"cannot read {path}: {least if least < 0 else largest} is not a rank {of}")
