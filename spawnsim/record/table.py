"""A table: numpy columns of one length, by name.

This room knows arrays and nothing of runs, ranks' lives or files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
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
        """Return the rows that a mask (bool) or an index array (int) chooses."""
        return Table({name: column[chosen] for name, column in self._columns.items()})

    def of_rank(self, rank: int) -> Table:
        """Return the rows of one rank."""
        return self.where(self["rank"] == rank)

    def digest(self) -> bytes:
        """Return 16 bytes that tell whether two tables are equal bit for bit: names, types and values."""
        whole = hashlib.blake2b(digest_size=16)
        for name, column in sorted(self._columns.items()):
            whole.update(f"{name} {column.dtype.str} ".encode())
            whole.update(np.ascontiguousarray(column).tobytes())
        return whole.digest()

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`; pandas must be installed."""
        try:
            import pandas as pd
        except ModuleNotFoundError as error:
            raise ParameterError("to_pandas() needs pandas: pip install pandas") from error
        return pd.DataFrame(self._columns)

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


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, np.floating) else str(value)
