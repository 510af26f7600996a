"""Archives of columns, such as a run's `metrics.npz`, which may be damaged or come from an unknown source.

Sizes that an archive claims are checked before memory is allocated for them, and nothing is unpickled.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError

KINDS = "biufU"  # bools, integers, floats and texts
MOST_RANKS = 10**7  # more no job has; arrays over ranks are made of them

Column = NDArray[Any]


def read_columns(path: Path, names: Sequence[str] | None = None) -> dict[str, Column]:
    """Return columns of one length; `names` are those wanted, None: all.

    Raises:
        ParameterError: there is no such file, it is damaged, or it lacks one of the names.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            # Headers of all columns first: nothing large is read of an archive that does not fit together.
            if len({_rows(archive, member) for member in members.values()}) > 1:
                raise ValueError("its columns differ in length")
            return {name: _column(archive, members[name]) for name in (members if names is None else names)}
    except FileNotFoundError:
        raise ParameterError(f"{path.parent} is not a run folder: it holds no {path.name}") from None
    except KeyError as error:
        raise ParameterError(f"cannot read {path}: it holds no column {error}") from error
    except Exception as error:  # what damage makes zipfile, zlib and numpy raise has no common root
        raise ParameterError(f"cannot read {path}: {str(error) or type(error).__name__}") from error


def _rows(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
    """Return how many rows a column has, if what it claims is as large as it is."""
    with archive.open(member) as file:
        shape, dtype = _header(file)
    if len(shape) != 1 or dtype.kind not in KINDS:
        raise ValueError(f"column {member.filename!r} is not a column of numbers or texts")
    # A few bytes can claim an array of any size, for which numpy would take the memory at once.
    if shape[0] * dtype.itemsize > member.file_size:
        raise ValueError(f"column {member.filename!r} claims {shape[0]:,} rows, and is shorter")
    return shape[0]


def _header(file: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    return shape, dtype


def _column(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Column:
    with archive.open(member) as file:
        found: Column = np.lib.format.read_array(_binary(file), allow_pickle=False)
        return found


def _binary(file: Any) -> BinaryIO:
    return file  # type: ignore[no-any-return]  # zipfile's own class has all that is asked


def require_ranks(path: Path, ranks: Column, count: int | None = None) -> None:
    """Raise `ParameterError` unless a column `rank` holds numbers of ranks, of `count` ranks if that is known."""
    if ranks.dtype.kind not in "iu":
        raise ParameterError(f"cannot read {path}: its column 'rank' holds no integers")
    least, largest = (int(ranks.min()), int(ranks.max())) if len(ranks) else (0, 0)
    if least < 0 or largest >= (count or MOST_RANKS):
        of = f"of {count:,} ranks" if count else "of any job"
        raise ParameterError(f"cannot read {path}: {least if least < 0 else largest} is no rank {of}")
