"""A table: columns by name, of a run's rows or of a sweep's runs, and how it is handed to other tools."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError

Column = NDArray[Any]


class Table(Mapping[str, Column]):
    """Columns by name, as a mapping: `table["loss"]` is a numpy array with one value per row.

    A run's table has the columns `rank` (int32) and `time_s` (float64, the rank's clock) and one per recorded name;
    rows are ordered by rank, then as recorded. Values that a row does not have are NaN ("" in a column of text).
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = dict(columns)
        lengths = {name: len(column) for name, column in self._columns.items()}
        if len(set(lengths.values())) > 1:
            raise ParameterError(f"columns of one table have one length; found {lengths}")

    def __getitem__(self, name: str) -> Column:
        try:
            return self._columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; there are: {', '.join(self._columns)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self._columns.values()), ()))

    def where(self, chosen: Column) -> Table:
        """Return the chosen rows as a table.

        Args:
            chosen: a mask of shape (rows,), bool, or an array of row numbers, int.

        Returns:
            A table with the same columns; masks and arrays of numbers copy, so it shares no memory.
        """
        return Table({name: column[chosen] for name, column in self._columns.items()})

    def of_rank(self, rank: int) -> Table:
        """Return the rows of one rank.

        Args:
            rank: its number in the world.

        Returns:
            Its rows, in the order in which it recorded them; none for a rank that recorded nothing.
        """
        return self.where(self["rank"] == rank)

    def digest(self) -> bytes:
        """Return a checksum that tells whether two tables are equal bit for bit.

        Returns:
            16 bytes (BLAKE2b) over names, dtypes and values of all columns; the order of columns does not count.
        """
        # Sorted by name: in which order columns first appeared depends on which rank recorded first.
        whole = hashlib.blake2b(digest_size=16)
        for name, column in sorted(self._columns.items()):
            whole.update(f"{name} {column.dtype.str} ".encode())
            whole.update(np.ascontiguousarray(column).tobytes())
        return whole.digest()

    def to_pandas(self) -> Any:
        """Return the table for pandas.

        Returns:
            A `pandas.DataFrame` with the same columns.

        Raises:
            ParameterError: pandas is not installed.
        """
        return _tables_package("pandas", "to_pandas()").DataFrame(self._columns)

    def to_parquet(self, path: str | Path) -> None:
        """Write the table as a Parquet file.

        Args:
            path: the file, which is replaced.

        Raises:
            ParameterError: pyarrow is not installed.
        """
        arrow, parquet = (_tables_package(name, "to_parquet()") for name in ("pyarrow", "pyarrow.parquet"))
        parquet.write_table(arrow.table(self._columns), path)

    def to_csv(self, path: str | Path) -> None:
        """Write the table as comma-separated values, with a line of names; numbers as Python writes them.

        Args:
            path: the file, which is replaced.
        """
        # By blocks: lists of Python's numbers take many times the memory of the columns.
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(self)
            for begin in range(0, self.rows, _BLOCK):
                block = [column[begin : begin + _BLOCK].tolist() for column in self.values()]
                rows.writerows(zip(*block, strict=True))

    def __repr__(self) -> str:
        return f"Table({self.rows:,} rows: {', '.join(self._columns)})"

    def _repr_html_(self) -> str:
        from html import escape  # needed here alone

        head = "".join(f"<th>{escape(name)}</th>" for name in self)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(_cell(column[row]))}</td>' for column in self.values())}</tr>"
            for row in range(min(self.rows, 5))
        )
        return f"<p>{self.rows:,} rows</p><table><tr>{head}</tr>{body}</table>"


_BLOCK = 100_000  # rows


def _tables_package(name: str, what: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise ParameterError(f'{what} needs {package}: pip install "spawnsim[tables]"') from error


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, np.floating) else str(value)
