"""Checked reading of TOML: values with units, and errors that name file, key and line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from spawnsim import units
from spawnsim.errors import ParameterError
from spawnsim.options import nearest

Key = str | int
T = TypeVar("T")

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?")
_ASSIGNMENT = re.compile(r"\s*([\w\"'-]+(?:\s*\.\s*[\w\"'-]+)*)\s*=")


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def line_of(text: str, path: Sequence[Key]) -> int:
    """Return the line, counted from 1, of a key in TOML text; of the nearest enclosing table if it has no line."""
    # tomllib keeps no lines, so the text is read once more, only for headers and assignments. A key inside an inline
    # table has no separate line: the longest path that leads to it is the answer.
    best, found = -1, 1
    table: tuple[Key, ...] = ()
    entries: dict[tuple[Key, ...], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.fullmatch(line):
            table = _parts(header[2])
            if header[1] == "[[":
                entries[table] = entries.get(table, -1) + 1
                table = (*table, entries[table])
            here = table
        elif assignment := _ASSIGNMENT.match(line):
            here = (*table, *_parts(assignment[1]))
        else:
            continue
        if len(here) > best and tuple(path[: len(here)]) == here:
            best, found = len(here), number
    return found


class PlacedError(ParameterError):
    """An error that already names its place in the file."""


MOST = 10**9  # of any count: counts determine the sizes of tables
LONGEST = 1000  # characters of an error: a damaged file may hold a value of any length


@dataclass(frozen=True, eq=False)
class Section:
    """One table of a TOML file. Each value is requested by its kind; keys that were not requested are errors."""

    file: str
    text: str
    values: dict[str, Any]
    path: tuple[Key, ...] = ()
    asked: set[str] = field(default_factory=set)

    @classmethod
    def of_file(cls, path: Path) -> Section:
        """Return the top of a TOML file."""
        try:
            return cls.of_text(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ParameterError(
                f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
            ) from error

    @classmethod
    def of_text(cls, text: str, file: str) -> Section:
        """Return the top of TOML text."""
        try:
            return cls(file, text, tomllib.loads(text))
        except (
            tomllib.TOMLDecodeError,
            RecursionError,
            ValueError,
        ) as error:  # ValueError: numbers of 5,000 digits
            raise ParameterError(f"{file}: not valid TOML: {error}") from error

    def error(self, key: str | None, message: str) -> ParameterError:
        """Return the error for a key, or (None) for the whole table."""
        path = self.path if key is None else (*self.path, key)
        name = ".".join(map(str, path)) or "top of the file"
        full = f"{name}: {message}"
        shown = full if len(full) <= LONGEST else full[:LONGEST] + "…"
        return PlacedError(f"{self.file}, line {line_of(self.text, path)}: {shown}")

    def get(self, key: str, read: Callable[[Any], T], default: T | None = None) -> T:
        """Return `read(value)`; a missing key gives the default, or an error without a default."""
        self.asked.add(key)
        if key not in self.values:
            if default is None:
                raise self.error(key, "missing")
            return default
        try:
            return read(self.values[key])
        except PlacedError:
            raise
        except ValueError as error:  # includes ParameterError
            raise self.error(key, str(error)) from error

    def has(self, key: str) -> bool:
        return key in self.values

    def seconds(self, key: str, default: float | None = None) -> float:
        return self.get(key, lambda value: _least(units.seconds(_with_unit(value, "2 us")), 0.0), default)

    def bytes_per_second(self, key: str, default: float | None = None) -> float:
        """Return a bandwidth above 0, written with its unit."""
        return self.get(
            key, lambda value: _above(units.bytes_per_second(_with_unit(value, "10 Gbit/s"))), default
        )

    def above(self, key: str, read: Callable[[Any], float]) -> float:
        """Return a number above 0, as `read` returns it."""
        return self.get(key, lambda value: _above(read(value)))

    def nbytes(self, key: str, default: int | None = None) -> int:
        """Return a size of at least 0 bytes, written with its unit."""
        return self.get(key, lambda value: int(_least(units.nbytes(_with_unit(value, "64 KiB")), 0)), default)

    def string(self, key: str, default: str | None = None) -> str:
        return self.get(key, _string, default)

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        return self.get(key, lambda value: _one_of(value, choices), default)

    def flag(self, key: str, default: bool) -> bool:
        return self.get(key, _flag, default)

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        """Return an integer from `least` to `most`."""
        return self.get(key, lambda value: _within(_integer(value), least, most), default)

    def seed(self) -> int:
        """Return the seed of a table's own random streams, 0 by default."""
        return self.integer("seed", 0, least=0, most=2**63)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number without unit."""
        return self.get(key, _number, default)

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers from 1 to `MOST`."""
        return self.get(key, lambda value: tuple(_within(_integer(item), 1, MOST) for item in _list(value)))

    def table(self, key: str, read: Callable[[Section, str], T]) -> list[list[T]]:
        """Return rows of values, each converted by `read` with its key."""

        def row(values: Any) -> list[T]:
            return [
                read(Section(self.file, self.text, {key: value}, self.path), key) for value in _list(values)
            ]

        return self.get(key, lambda rows: [row(values) for values in _list(rows)])

    def section(self, key: str) -> Section:
        """Return the table of a key; an empty one if it is missing."""
        return self.get(key, lambda value: self._inside(value, key), self._inside({}, key))

    def sections(self, key: str) -> list[Section]:
        """Return the tables of a list of tables."""
        return self.get(
            key, lambda value: [self._inside(item, key, i) for i, item in enumerate(_list(value))]
        )

    def _inside(self, value: Any, *keys: Key) -> Section:
        if not isinstance(value, dict):
            raise ParameterError(f"{value!r}: write a table")
        return Section(self.file, self.text, value, (*self.path, *keys))

    def build(self, kind: Callable[..., T], **arguments: Any) -> T:
        """Return `kind(**arguments)`; its refusal becomes an error at this table."""
        try:
            return kind(**arguments)
        except ParameterError as error:
            raise self.error(None, str(error)) from error

    def close(self) -> None:
        """Raise ParameterError if the table holds a key that was not requested."""
        for key in self.values:
            if key not in self.asked:
                allowed = f"here are allowed: {', '.join(sorted(self.asked))}"
                raise self.error(key, f"no such key; {nearest(key, self.asked) or allowed}")


def _with_unit(value: Any, example: str) -> str:
    if not isinstance(value, str):
        raise ParameterError(f'{value!r}: write a text with a unit, such as "{example}"')
    return value


def _above(value: float) -> float:
    if not value > 0.0:
        raise ParameterError(f"{value:g}: must be above 0")
    return value


def _least(value: float, least: float) -> float:
    if not value >= least:
        raise ParameterError(f"{value:g}: must be at least {least:g}")
    return value


def _within(value: int, least: int, most: int) -> int:
    if value > most:
        raise ParameterError(f"{value}: must be at most {most:,}")
    return int(_least(value, least))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ParameterError(f"{value!r}: write true or false")
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ParameterError(f"{value!r}: write a text")
    return value


def _one_of(value: Any, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ParameterError(f"{value!r}: write one of {', '.join(choices)}")
    return str(value)


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ParameterError(f"{value!r}: write an integer")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ParameterError(f"{value!r}: write a number")
    return float(value)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ParameterError(f"{value!r}: write a list")
    return value
