"""The recorder: what `comm.record` writes to, in memory.

Rows of one *shape* (the same names with the same types, in the same order) are packed one after another into one
growing block of bytes, which numpy later reads as columns without copying. A row of eight numbers takes 84 bytes and
about a microsecond, so 1,000 ranks may record 1,000 rows each.

This room knows names, values, ranks and times. It knows no communicator, no file, and not whether time is virtual.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.record.plain import INT64, Scalar, document, scalar
from spawnsim.record.table import Column, Table

OWN = ("rank", "time_s")  # added by the recorder: a row cannot have them too
OWN_OF_EVENTS = ("kind", "time_s", "rank")

Event = dict[str, Any]

_FORMATS = {float: "d", int: "q", bool: "?", str: "i"}
_DTYPES = {
    float: "<f8",
    int: "<i8",
    bool: "?",
    str: "<i4",
}  # a text is a number in the recorder's list of words


class Sink(Protocol):
    """Where ranks record: the one interface that communicators know."""

    def row(self, rank: int, time_s: float, values: Mapping[str, Any]) -> None:
        """Keep one row. Values are numbers, bools, short texts, None, or 0-dim arrays and tensors."""

    def event(self, rank: int, time_s: float, kind: str, fields: Mapping[str, Any]) -> None:
        """Keep one event. Fields are whatever JSON can hold, and arrays."""


class Block:
    """All rows of one shape. Each is (rank, order, time_s, values...), packed without gaps. None takes no room.

    Attributes:
        direct: whether values can be packed as they come: no texts, no None.
        words: the names whose values are texts.
    """

    __slots__ = ("_absent", "_texts", "data", "direct", "dtype", "names", "pack", "types", "words")

    def __init__(self, names: Sequence[str], types: Sequence[type]) -> None:
        clash = [name for name in names if name in OWN]
        if clash:
            raise ParameterError(
                f"record({clash[0]}=...): {clash[0]} is added by itself; choose another name"
            )
        self.names, self.types = tuple(names), tuple(types)
        kept = [(name, kind) for name, kind in zip(names, types, strict=True) if kind is not type(None)]
        self.words = tuple(name for name, kind in kept if kind is str)
        self.direct = len(kept) == len(names) and not self.words
        self._texts = [place for place, kind in enumerate(types) if kind is str]
        self._absent = [place for place, kind in enumerate(types) if kind is type(None)][::-1]
        self.pack = struct.Struct("<iqd" + "".join(_FORMATS[kind] for _, kind in kept)).pack
        own = [("\0rank", "<i4"), ("\0order", "<i8"), ("\0time_s", "<f8")]
        self.dtype = np.dtype(own + [(name, _DTYPES[kind]) for name, kind in kept])
        self.data = bytearray()

    def stored(self, values: Mapping[str, Any], words: dict[str, int]) -> Sequence[Any]:
        """Return the values of a row of this shape as they are packed."""
        plain = list(values.values())
        for place in self._texts:
            plain[place] = words.setdefault(plain[place], len(words))
        for place in self._absent:
            del plain[place]
        return plain

    def rows(self) -> Column:
        """Return the rows as a structured array; it is a view, so the block must not grow while it lives."""
        return np.frombuffer(self.data, self.dtype)


@dataclass(frozen=True)
class Portion:
    """What a recorder has kept for a while: `blocks` are (names, types, packed rows), `words` the texts new in them."""

    blocks: list[tuple[tuple[str, ...], tuple[type, ...], bytes]]
    words: list[str]
    events: list[Event]


class Recorder:
    """Keeps the rows and events of any number of ranks in memory.

    Attributes:
        rows: how many rows were recorded so far.
        time_s: the time of the latest row, for whoever shows progress.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.time_s = 0.0
        self._blocks: dict[tuple[Any, ...], Block] = {}
        self._words: dict[str, int] = {}
        self._names: dict[str, None] = {}  # in the order in which they first appeared
        self._events: list[Event] = []
        self._given = 0  # so many words have been given away by `drain`

    def row(self, rank: int, time_s: float, values: Mapping[str, Any]) -> None:
        """Keep one row; `ParameterError` when a value is no number, bool, text, None or 0-dim array."""
        block = self._blocks.get((*values, *map(type, values.values())))
        if block is None:
            values = {
                name: value if type(value) in _FORMATS else _scalar(name, value)
                for name, value in values.items()
            }
            block = self._block(tuple(values), tuple(map(type, values.values())))
        stored = values.values() if block.direct else block.stored(values, self._words)
        try:
            block.data += block.pack(rank, self.rows, time_s, *stored)
        except struct.error:
            raise _too_large(values) from None
        self.rows += 1
        self.time_s = time_s

    def _block(self, names: tuple[str, ...], types: tuple[type, ...]) -> Block:
        """Return the block for rows of a shape, a new one if there was none."""
        block = self._blocks.get((*names, *types))
        if block is None:
            block = self._blocks[(*names, *types)] = Block(names, types)
            self._names |= dict.fromkeys(names)
        return block

    def drain(self) -> Portion:
        """Give away what has come since the last time; the recorder goes on, and counts on."""
        found = [block for block in self._blocks.values() if block.data]
        blocks = [(block.names, block.types, bytes(block.data)) for block in found]
        for block in found:
            block.data = bytearray()
        words, events = list(islice(self._words, self._given, None)), self._events
        self._given, self._events = len(self._words), []
        return Portion(blocks, words, events)

    def absorb(self, portion: Portion, words: Sequence[str]) -> None:
        """Keep what another recorder gave away; `words` are all its texts so far."""
        own = np.array([self._words.setdefault(word, len(self._words)) for word in words], np.int32)
        for names, types, data in portion.blocks:
            block = self._block(names, types)
            rows = np.frombuffer(data, block.dtype).copy()
            for name in block.words:
                rows[name] = own[rows[name]]
            block.data += rows.tobytes()
            self.rows += len(rows)
        self._events += portion.events

    def event(self, rank: int, time_s: float, kind: str, fields: Mapping[str, Any]) -> None:
        """Keep one event; `ParameterError` when a field has the name of one that is added by itself."""
        clash = [name for name in fields if name in OWN_OF_EVENTS]
        if clash:
            raise ParameterError(f"record.event({kind!r}, {clash[0]}=...): {clash[0]} is added by itself")
        self._events.append({"kind": kind, "time_s": float(time_s), "rank": rank} | document(fields))

    def events(self) -> list[Event]:
        """Return the events by time, then rank, then as recorded."""
        return sorted(self._events, key=lambda event: (event["time_s"], event["rank"]))

    def table(self) -> Table:
        """Return all rows, by rank, then as recorded."""
        blocks = [block for block in self._blocks.values() if block.data]
        parts = [block.rows() for block in blocks]
        if not parts:
            return Table({"rank": np.empty(0, np.int32), "time_s": np.empty(0)})
        ranks = np.concatenate([part["\0rank"] for part in parts])
        order = np.lexsort((np.concatenate([part["\0order"] for part in parts]), ranks))
        columns = {
            "rank": ranks[order],
            "time_s": np.concatenate([part["\0time_s"] for part in parts])[order],
        }
        for name in self._names:
            columns[name] = self._column(name, blocks, parts)[order]
        return Table(columns)

    def _column(self, name: str, blocks: Sequence[Block], parts: Sequence[Column]) -> Column:
        if any(name in block.words for block in blocks):
            return np.concatenate(
                [self._texts(name, block, part) for block, part in zip(blocks, parts, strict=True)]
            )
        pieces = [
            part[name] if name in (part.dtype.names or ()) else np.full(len(part), np.nan) for part in parts
        ]
        return np.concatenate(pieces)

    def _texts(self, name: str, block: Block, part: Column) -> Column:
        if name in block.words:
            texts: Column = np.array(list(self._words))[part[name]]
            return texts
        if name in (part.dtype.names or ()):  # text here, a number there: the column is text
            return part[name].astype(np.str_)
        return np.full(len(part), "")


def _scalar(name: str, value: Any) -> Scalar:
    try:
        return scalar(value)
    except ParameterError as error:
        raise ParameterError(f"record({name}=...): {error}; record arrays as several rows or names") from None


def _too_large(values: Mapping[str, Any]) -> ParameterError:
    large = [name for name, value in values.items() if type(value) is int and value not in INT64]
    return ParameterError(f"record({', '.join(large)}=...): an integer must fit 64 bits")
