"""The recorder: `comm.record` writes to it, in memory; it returns a table of columns.

Values first become plain Python values; an object with `item()` (a numpy scalar, a tensor of one element) supplies its
number. Rows of one *shape* (the same names with the same types, in the same order) are packed one after another into
one growing block of bytes, which numpy later reads as columns without copying. A row of eight numbers takes 84 bytes
and about a microsecond, so 1,000 ranks may record 1,000 rows each. This module writes no file.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from spawnsim.columns import HELD_B, MOST_RANKS, Column
from spawnsim.errors import ParameterError
from spawnsim.record.sorting import FiledColumns, SortedRows, in_order
from spawnsim.record.table import Table

Scalar = float | int | bool | str | None
INT64 = range(-(2**63), 2**63)
BEFORE = -(2**62)  # the number of the first row of an earlier run


def scalar(value: Any) -> Scalar:
    """Return a value as float, int, bool, str or None; `ParameterError` for anything else."""
    if value is None or isinstance(value, (bool, float, int, str)):
        return _builtin(value)
    if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1:
        return scalar(value.item())
    raise ParameterError(f"a {type(value).__name__} is not one number, bool or short text")


def _builtin(value: Scalar) -> Scalar:
    # numpy's float64 is a float, and an IntEnum an int: only the exact types have a column format. bool before int,
    # since bool is a subclass of int.
    for kind in (bool, float, int, str):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    return None


def document(value: Any) -> Any:
    """Return a value in JSON's types, recursively; non-finite numbers become None, unknown objects their repr."""
    if isinstance(value, Mapping):
        return {str(name): document(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [document(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(document(each) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__} | document(vars_of(value))
    if value is None or isinstance(value, (bool, int, float, str)):
        plain = _builtin(value)
        return plain if not isinstance(plain, float) or math.isfinite(plain) else None
    if hasattr(value, "tolist"):  # numpy arrays and scalars, tensors
        return document(value.tolist())
    return _named(value)


def _named(value: Any) -> Any:
    """Return an object's repr; if the repr contains an address, its type and its plain attributes."""
    text = repr(value)
    # Addresses differ from run to run, and would change the digest of a study's key, and of the run.
    if f" at {hex(id(value))}" not in text.lower():  # numpy writes it in capitals
        return text
    name = getattr(value, "__qualname__", type(value).__qualname__)
    own = getattr(value, "__dict__", {}) if not hasattr(value, "__qualname__") else {}
    plain = {key: each for key, each in own.items() if isinstance(each, (bool, int, float, str, list, tuple))}
    return {"type": name} | document(plain) if plain else name


def vars_of(value: Any) -> dict[str, Any]:
    """Return the constructor's arguments of a dataclass, one level deep, in the order of its definition."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


OWN = ("rank", "time_s")  # added by the recorder: a row must not have them too
OWN_OF_EVENTS = ("kind", "time_s", "rank")

Event = dict[str, Any]

_FORMATS = {float: "d", int: "q", bool: "?", str: "i"}
# The recorder's list of words stores each text; a row holds its number.
_DTYPES = {float: "<f8", int: "<i8", bool: "?", str: "<i4"}


class Sink(Protocol):
    """Where ranks record: the one interface that communicators know."""

    def row(self, rank: int, time_s: float, values: Mapping[str, Any]) -> None:
        """Keep one row. Values are numbers, bools, short texts, None, or 0-dim arrays and tensors."""

    def event(self, rank: int, time_s: float, kind: str, fields: Mapping[str, Any]) -> None:
        """Keep one event. Fields hold JSON values and arrays."""


@runtime_checkable
class Flushed(Protocol):
    """A sink that writes later than it keeps."""

    def flush(self) -> None:
        """Write pending records."""


class Thinned:
    """A sink that passes on some rows, and all events, of the ranks that are to be recorded.

    Args:
        sink: their destination.
        every: keep a rank's rows whose `iteration` is a multiple of it; of rows without an iteration, every n-th.
        ranks: the ranks whose rows are kept; None: all.
        after_s: by rank, the time from which its rows and events are kept: before it, a resumed run repeats rows
            that it has already recorded.

    Raises:
        ParameterError: `every` is not a whole number of at least 1.
    """

    def __init__(
        self,
        sink: Sink,
        every: int = 1,
        ranks: Collection[int] | None = None,
        *,
        after_s: Mapping[int, float] | None = None,
    ) -> None:
        if type(every) is not int or every < 1:
            raise ParameterError(f"record_every={every!r}: give a whole number of at least 1")
        self._sink, self._every, self._ranks = sink, every, ranks
        self._rows: Counter[int] = Counter()  # number of rows without an iteration, by rank
        self._after_s = after_s or {}

    def row(self, rank: int, time_s: float, values: Mapping[str, Any]) -> None:
        if (self._ranks is not None and rank not in self._ranks) or time_s < self._after_s.get(rank, 0.0):
            return
        number = values.get("iteration")
        if type(number) is not int:
            number, self._rows[rank] = self._rows[rank], self._rows[rank] + 1
        if number % self._every == 0:
            self._sink.row(rank, time_s, values)

    def flush(self) -> None:
        if isinstance(self._sink, Flushed):
            self._sink.flush()

    def event(self, rank: int, time_s: float, kind: str, fields: Mapping[str, Any]) -> None:
        """Keep an event."""
        if time_s >= self._after_s.get(rank, 0.0):
            self._sink.event(rank, time_s, kind, fields)


def ranks_named(text: str | Collection[int] | None, ranks: int | None = None) -> frozenset[int] | None:
    """Return the ranks that a text such as "0-9,100" names; None: all.

    Raises:
        ParameterError: the text names no rank, or one outside the run's `ranks`, if these are known.
    """
    found = _named_ranks(text) if isinstance(text, str) else None if text is None else frozenset(text)
    if ranks is not None and found is not None:
        for beyond in sorted(rank for rank in found if not 0 <= rank < ranks):
            raise ParameterError(
                f"record_ranks={text!r}: the run has ranks 0 to {ranks - 1}, but no rank {beyond}"
            )
    return found


def _named_ranks(text: str) -> frozenset[int]:
    found: set[int] = set()
    try:
        for word in text.split(","):
            first, _, last = word.partition("-")
            if not 0 <= int(first) <= int(last or first) < MOST_RANKS:
                raise ValueError(word)
            found |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ParameterError(f"record_ranks={text!r}: give ranks, such as 0-9,100") from None
    return frozenset(found)


class Block:
    """All rows of one shape. Each is (rank, order, time_s, values...), packed without gaps. None takes no space.

    Attributes:
        direct: whether values can be packed unchanged: no texts, no None.
        words: the names whose values are texts.
    """

    __slots__ = ("_absent", "_texts", "data", "direct", "dtype", "names", "pack", "types", "words")

    def __init__(self, names: Sequence[str], types: Sequence[type]) -> None:
        clash = [name for name in names if name in OWN]
        if clash:
            raise ParameterError(
                f"record({clash[0]}=...): spawnsim adds {clash[0]} itself; choose another name"
            )
        self.names, self.types = tuple(names), tuple(types)
        kept = [(name, kind) for name, kind in zip(names, types, strict=True) if kind is not type(None)]
        self.words = tuple(name for name, kind in kept if kind is str)
        self.direct = len(kept) == len(names) and not self.words
        self._texts = [place for place, kind in enumerate(types) if kind is str]
        # From the back: deleting one then does not move the others that are to be deleted.
        self._absent = [place for place, kind in enumerate(types) if kind is type(None)][::-1]
        # Little endian and without gaps, as in the dtype below: shards may be read on another machine.
        self.pack = struct.Struct("<iqd" + "".join(_FORMATS[kind] for _, kind in kept)).pack
        # Names with a null byte, which no keyword can hold: they cannot equal a row's own names.
        own = [("\0rank", "<i4"), ("\0order", "<i8"), ("\0time_s", "<f8")]
        self.dtype = np.dtype(own + [(name, _DTYPES[kind]) for name, kind in kept])
        self.data = bytearray()

    def stored(self, values: Mapping[str, Any], words: dict[str, int]) -> Sequence[Any]:
        """Return the values of a row of this shape in their packed form."""
        plain = list(values.values())
        for place in self._texts:
            # Texts repeat in nearly each row (a phase, a policy), so a number of 4 bytes replaces them.
            plain[place] = words.setdefault(plain[place], len(words))
        for place in self._absent:
            del plain[place]
        return plain

    def rows(self) -> Column:
        """Return the rows as a structured array; it is a view, so the block must not grow while the view exists."""
        return np.frombuffer(self.data, self.dtype)


@dataclass(frozen=True)
class Portion:
    """A recorder's records of some time: `blocks` are (names, types, packed rows), `words` the texts new in them."""

    blocks: list[tuple[tuple[str, ...], tuple[type, ...], bytes]]
    words: list[str]
    events: list[Event]


class Recorder:
    """Keeps the rows and events of any number of ranks in memory.

    Attributes:
        rows: number of rows recorded so far.
        time_s: the time of the latest row, for progress bars.
        mixed: by name, a sentence on each column that received texts and numbers, and therefore is all text.

    Args:
        scratch: a folder for rows that this recorder absorbs from other recorders, if they are many; None: all rows
            stay in memory.
    """

    def __init__(self, scratch: Path | None = None) -> None:
        self.rows = 0
        self.time_s = 0.0
        self._scratch = scratch
        self._sorted: SortedRows | None = None
        self._blocks: dict[tuple[Any, ...], Block] = {}
        self._words: dict[str, int] = {}
        self.mixed: dict[str, str] = {}
        self._kinds: dict[
            str, type
        ] = {}  # by name, of the first row with the name, in the order of first appearance
        self._events: list[Event] = []
        self._preceding = 0  # rows of an earlier run
        self._given = 0  # number of words already returned by `drain`

    def row(self, rank: int, time_s: float, values: Mapping[str, Any]) -> None:
        """Keep one row; `ParameterError` if a value is not a number, bool, text, None or 0-dim array."""
        # The common row costs one lookup: names and exact types are the key, and only unknown shapes are examined.
        block = self._blocks.get((*values, *map(type, values.values())))
        if block is None:
            values = {
                name: value if type(value) in _FORMATS else _scalar(name, value)
                for name, value in values.items()
            }
            block = self._block(tuple(values), tuple(map(type, values.values())), (rank, time_s))
        stored = values.values() if block.direct else block.stored(values, self._words)
        try:
            # The row's number is packed too: it restores the order of recording among blocks of different shapes.
            block.data += block.pack(rank, self.rows, time_s, *stored)
        # Caught and not checked: examining each integer of each row costs more than packing it.
        except struct.error:
            raise _too_large(values) from None
        self.rows += 1
        self.time_s = time_s

    def _block(
        self, names: tuple[str, ...], types: tuple[type, ...], first: tuple[int, float] | None = None
    ) -> Block:
        """Return the block for rows of a shape, a new one if necessary; `first`: rank, time of its first row."""
        block = self._blocks.get((*names, *types))
        if block is None:
            block = self._blocks[(*names, *types)] = Block(names, types)
            for name, kind in zip(names, types, strict=True):
                known = self._kinds.get(name, type(None))
                # None is not a value of a column, and its type carries no information.
                self._kinds[name] = kind if known is type(None) else known
                mixed = type(None) not in (kind, known) and (kind is str) != (known is str)
                if mixed and name not in self.mixed and first is not None:
                    self.mixed[name] = (
                        f"column {name!r} mixes texts and numbers, and is now all text: rank {first[0]} recorded a "
                        f"{kind.__name__} at {first[1]:.6g} s, and rows before it a {known.__name__}"
                    )
        return block

    def drain(self) -> Portion:
        """Return the records since the last call and remove them; the recorder continues, and continues to count."""
        # Blocks stay without data: their shapes will recur, and their names keep the columns' order.
        found = [block for block in self._blocks.values() if block.data]
        blocks = [(block.names, block.types, bytes(block.data)) for block in found]
        for block in found:
            block.data = bytearray()
        words, events = list(islice(self._words, self._given, None)), self._events
        self._given, self._events = len(self._words), []
        return Portion(blocks, words, events)

    def precede(self, table: Table, events: Sequence[Event] = ()) -> None:
        """Keep rows and events from before this run: they precede all rows of their ranks."""
        kinds: dict[str, type] = {"f": float, "i": int, "u": int, "b": bool, "U": str}
        names = [name for name in table if name not in OWN]
        block = self._block(tuple(names), tuple(kinds[table[name].dtype.kind] for name in names))
        rows = np.empty(table.rows, block.dtype)
        rows["\0rank"], rows["\0time_s"] = table["rank"], table["time_s"]
        # Far below 0, so that they precede all rows that another recorder numbers from 0.
        rows["\0order"] = np.arange(BEFORE + self._preceding, BEFORE + self._preceding + table.rows)
        self._preceding += table.rows
        for name in names:
            if name in block.words:
                texts, which = np.unique(table[name], return_inverse=True)
                own = [self._words.setdefault(text, len(self._words)) for text in texts.tolist()]
                rows[name] = np.array(own, np.int32)[which]
            else:
                rows[name] = table[name]
        block.data += rows.tobytes()
        self._events += events

    def absorb(self, portion: Portion, words: Sequence[str]) -> None:
        """Keep the records that another recorder returned; `words` are all its texts so far."""
        # Each recorder numbers its own texts, so their numbers are translated into ours.
        own = np.array([self._words.setdefault(word, len(self._words)) for word in words], np.int32)
        for names, types, data in portion.blocks:
            rank, _, time_s = struct.unpack_from("<iqd", data)
            block = self._block(names, types, (rank, time_s))
            # Copied, since bytes are read-only and the texts' numbers are about to change.
            rows = np.frombuffer(data, block.dtype).copy()
            for name in block.words:
                rows[name] = own[rows[name]]
            block.data += rows.tobytes()
            self.rows += len(rows)
        self._events += portion.events
        if self._scratch is not None and sum(len(block.data) for block in self._blocks.values()) > HELD_B:
            self._put_away()

    def _put_away(self) -> None:
        assert self._scratch is not None
        self._sorted = self._sorted or SortedRows(self._scratch)
        for block in self._blocks.values():
            if block.data:
                self._sorted.add(block, block.rows())
                block.data = bytearray()

    def event(self, rank: int, time_s: float, kind: str, fields: Mapping[str, Any]) -> None:
        """Keep one event; `ParameterError` if a field has the name of an automatic field."""
        clash = [name for name in fields if name in OWN_OF_EVENTS]
        if clash:
            raise ParameterError(f"record.event({kind!r}, {clash[0]}=...): spawnsim adds {clash[0]} itself")
        self._events.append({"kind": kind, "time_s": float(time_s), "rank": rank} | document(fields))

    def events(self) -> list[Event]:
        """Return the events by time, then rank, then as recorded."""
        # A stable sort: events of one rank at one time stay as recorded.
        return sorted(self._events, key=lambda event: (event["time_s"], event["rank"]))

    def table(self) -> Table:
        if self._sorted is not None:
            assert self._scratch is not None
            self._put_away()
            spread = [cast(Block, block) for block in self._sorted.shapes]
            merged = (self._columns(spread, parts) for parts in self._sorted.merged())
            return Table(FiledColumns(self._scratch, merged))
        blocks = [block for block in self._blocks.values() if block.data]
        return Table(self._columns(blocks, [block.rows() for block in blocks]))

    def _columns(self, blocks: Sequence[Block], parts: Sequence[Column]) -> dict[str, Column]:
        """Return rows of several shapes as columns."""
        if not parts:
            return {"rank": np.empty(0, np.int32), "time_s": np.empty(0)}
        ranks = np.concatenate([part["\0rank"] for part in parts])
        order = in_order(ranks, np.concatenate([part["\0order"] for part in parts]))
        columns = {
            "rank": ranks[order],
            "time_s": np.concatenate([part["\0time_s"] for part in parts])[order],
        }
        for name in self._kinds:
            columns[name] = self._column(name, blocks, parts)[order]
        return columns

    def _column(self, name: str, blocks: Sequence[Block], parts: Sequence[Column]) -> Column:
        # One dtype per column: if a column has texts, its numbers become texts, as NaN would hide the texts.
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
        raise ParameterError(
            f"record({name}=...): {error}; record an array as several rows or names"
        ) from None


def _too_large(values: Mapping[str, Any]) -> ParameterError:
    large = [name for name, value in values.items() if type(value) is int and value not in INT64]
    return ParameterError(f"record({', '.join(large)}=...): an integer must fit 64 bits")
