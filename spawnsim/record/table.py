"""A table: columns by name, of a run's rows or of a sweep's runs, and its conversion for other tools."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from spawnsim.columns import PIECE, Column, StoredColumns
from spawnsim.errors import ParameterError


class Table(Mapping[str, Column]):
    """Columns by name, as a mapping: `table["loss"]` is a numpy array with one value per row.

    A run's table has the columns `rank` (int32) and `time_s` (float64, the rank's clock) and one per recorded name;
    rows are ordered by rank, then as recorded. Missing values are NaN ("" in a column of text).

    A large table of a run folder stays on disk: a column is read on access, and `pieces` keeps nothing.
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = columns if isinstance(columns, StoredColumns) else dict(columns)
        if isinstance(self._columns, StoredColumns):
            return
        lengths = {name: len(column) for name, column in self._columns.items()}
        if len(set(lengths.values())) > 1:
            raise ParameterError(f"the columns of a table must have equal lengths; found {lengths}")

    def __getitem__(self, name: str) -> Column:
        try:
            return self._columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; the columns are: {', '.join(self._columns)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def rows(self) -> int:
        """The number of rows."""
        if isinstance(self._columns, StoredColumns):
            return self._columns.rows
        return len(next(iter(self._columns.values()), ()))

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the type of a column, without reading it.

        Args:
            name: the column's name.

        Returns:
            numpy's dtype.
        """
        return self._columns.dtypes[name] if isinstance(self._columns, StoredColumns) else self[name].dtype

    def pieces(self, *names: str) -> Iterator[Table]:
        """Yield the table from its first row to its last, some 100,000 rows at a time; nothing is kept.

        Args:
            names: names of the requested columns; empty: all.

        Yields:
            Tables of these columns.
        """
        wanted = names or tuple(self)
        if isinstance(self._columns, StoredColumns):
            for columns in zip(*map(self._columns.pieces, wanted), strict=True):
                yield Table(dict(zip(wanted, columns, strict=True)))
            return
        for begin in range(0, self.rows, PIECE):
            yield Table({name: self[name][begin : begin + PIECE] for name in wanted})

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
            Its rows, in the order in which it recorded them; empty if it recorded nothing.
        """
        return self.where(self["rank"] == rank)

    def digest(self, *, times: bool = True) -> bytes:
        """Return a checksum that shows whether two tables are equal bit for bit.

        Args:
            times: whether columns of times count: `time_s`, and every name that ends in `_s`.

        Returns:
            16 bytes (BLAKE2b) over names, dtypes and values of all columns; the order of columns does not count.
        """
        # Sorted by name: the order of first appearance depends on which rank recorded first.
        whole = hashlib.blake2b(digest_size=16)
        for name in sorted(name for name in self if times or not name.endswith("_s")):
            whole.update(f"{name} {self.dtype(name).str} ".encode())
            for piece in self.pieces(name):
                whole.update(piece[name].tobytes())
        return whole.digest()

    def to_pandas(self) -> Any:
        """Return the table for pandas.

        Returns:
            A `pandas.DataFrame` with the same columns.

        Raises:
            ParameterError: pandas is not installed.
        """
        return _tables_package("pandas", "to_pandas()").DataFrame(dict(self))

    def to_parquet(self, path: str | Path) -> None:
        """Write the table as a Parquet file.

        Args:
            path: the file, which is replaced.

        Raises:
            ParameterError: pyarrow is not installed.
        """
        arrow, parquet = (_tables_package(name, "to_parquet()") for name in ("pyarrow", "pyarrow.parquet"))
        parquet.write_table(arrow.table(dict(self)), path)

    def to_csv(self, path: str | Path) -> None:
        """Write the table as comma-separated values, with a line of names; numbers as Python writes them.

        Args:
            path: the file, which is replaced.
        """
        # By pieces: lists of Python's numbers take many times the memory of the columns.
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(self)
            for piece in self.pieces():
                rows.writerows(zip(*(column.tolist() for column in piece.values()), strict=True))

    def __repr__(self) -> str:
        return f"Table({self.rows:,} rows: {', '.join(self._columns)})"

    def _repr_html_(self) -> str:
        from html import escape  # needed here alone

        head = "".join(f"<th>{escape(name)}</th>" for name in self)
        first = next(self.pieces(), self)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(_cell(column[row]))}</td>' for column in first.values())}</tr>"
            for row in range(min(self.rows, 5))
        )
        return f"<p>{self.rows:,} rows</p><table><tr>{head}</tr>{body}</table>"


def _tables_package(name: str, what: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise ParameterError(f'{what} needs {package}: pip install "spawnsim[tables]"') from error


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, np.floating) else str(value)
