"""The calls and messages of ranks that a traced run recorded, and the part of them that fits into a readable file.

The rows are documented in `spawnsim.virtual.timeline`. This module does not draw them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spawnsim.errors import ParameterError
from spawnsim.plots.experiments import Recorded
from spawnsim.record import folder, journal
from spawnsim.record.recorder import Block, Portion
from spawnsim.run.result import FINISHED, end_s
from spawnsim.units import spans

LIMIT = 300_000  # entries of a file: some 45 MB of text, 2 MB compressed, which viewers open in seconds
FEWEST = 16  # below this number of ranks, show a shorter time instead of fewer ranks
Row = dict[str, Any]
Rows = NDArray[Any]


@dataclass(frozen=True)
class Selection:
    """The part of a run to show: these ranks (None: all), between two times, at most `limit` entries."""

    ranks: frozenset[int] | None = None
    from_s: float = 0.0
    until_s: float = math.inf
    limit: int = LIMIT

    def __post_init__(self) -> None:
        if not 0 <= self.from_s < self.until_s:
            raise ParameterError(
                f"--from {self.from_s:g} --until {self.until_s:g}: this range is empty; give a later --until"
            )
        if self.limit < 1:
            raise ParameterError(f"--limit {self.limit}: show at least 1 entry")

    @classmethod
    def of_ranks(cls, text: str) -> frozenset[int]:
        """Return the ranks in a text: "16" (the first 16), "0-15", "3,40-47"."""
        if text.isdecimal() and int(text) > 0:
            return frozenset(range(int(text)))
        found: set[int] = set()
        for part in text.split(","):
            first, dash, last = part.partition("-")
            if not first.isdecimal() or not (last.isdecimal() or not dash) or not ({"-", ","} & set(text)):
                raise ParameterError(
                    f"--ranks {text}: give a number (16: the first 16), or a list (0-15, or 3,40-47)"
                )
            found |= set(range(int(first), int(last if dash else first) + 1))
        if not found:
            raise ParameterError(f"--ranks {text}: show at least 1")
        return frozenset(found)

    def shows(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    def overlaps(self, begin_s: Any, end_s: Any) -> Any:
        """Return whether a time span overlaps the selection; for arrays, which spans do."""
        return (begin_s <= self.until_s) & (end_s >= self.from_s)


class EntryCounts(NamedTuple):
    """The number of entries (`weight`) of items between two times, with their ranks; arrays of one length."""

    rank: NDArray[np.int64]
    begin_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    weight: NDArray[np.int64]

    def where(self, chosen: NDArray[np.bool_]) -> EntryCounts:
        return EntryCounts(self.rank[chosen], self.begin_s[chosen], self.end_s[chosen], self.weight[chosen])

    @classmethod
    def joined(cls, parts: Sequence[EntryCounts]) -> EntryCounts:
        return cls(*map(np.concatenate, zip(*parts, strict=True)))


@dataclass(frozen=True)
class Timeline:
    """The timeline of a run folder. `events` are the timeline's: errors of ranks, pauses, ranks that were cut off."""

    path: Path
    amounts: EntryCounts
    events: Sequence[Mapping[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> Timeline | None:
        """Return the timeline of a run folder; None if the run was not traced.

        Raises:
            ParameterError: the timeline is damaged.
        """
        parts, events = [_no_entries()], []
        try:
            with folder.opened_trace(path) as file:
                if file is None:
                    return None
                # Counted first, frame by frame, without building rows: a trace of gigabytes leaves only numbers in
                # memory.
                for portion, _, _ in journal.frames(file):
                    parts += [_entry_counts(rows) for _, rows in _blocks(portion)]
                    events += portion.events
        # A truncated compressed file raises EOFError, a block of unknown types KeyError.
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise ParameterError(f"cannot read the trace in {path}: {error}") from error
        return cls(path, EntryCounts.joined(parts), events)

    def rows(self, selection: Selection) -> Iterator[Row]:
        """Yield the calls and messages of a selection, each with its `rank` and `time_s`, in recorded order."""
        with folder.opened_trace(self.path) as file:
            assert file is not None
            # Read a second time instead of kept: the selection is chosen only after all entries are counted.
            for portion, words, _ in journal.frames(file):
                for texts, rows in _blocks(portion):
                    amounts = _entry_counts(rows)
                    shown = selection.overlaps(amounts.begin_s, amounts.end_s)
                    if selection.ranks is not None:
                        shown &= np.isin(amounts.rank, [*selection.ranks])
                    yield from _plain(rows[shown], texts, words)


def _blocks(portion: Portion) -> Iterator[tuple[tuple[str, ...], Rows]]:
    for names, types, data in portion.blocks:
        block = Block(names, types)
        yield block.words, np.frombuffer(data, block.dtype)


def _plain(rows: Rows, texts: Sequence[str], words: Sequence[str]) -> Iterator[Row]:
    names = [name.removeprefix("\0") for name in rows.dtype.names or ()]
    for values in rows.tolist():
        row = dict(zip(names, values, strict=True))
        for name in texts:
            row[name] = words[row[name]]
        yield row


def _entry_counts(rows: Rows) -> EntryCounts:
    is_call = "call" in (rows.dtype.names or ())
    begin_s, end_s = (rows["\0time_s"], rows["end_s"]) if is_call else (rows["sent_s"], rows["\0time_s"])
    # A message is the two ends of an arrow.
    weight = np.full(len(rows), 1 if is_call else 2)
    return EntryCounts(rows["\0rank"].astype(np.int64), begin_s, end_s, weight)


def _no_entries() -> EntryCounts:
    return EntryCounts(np.empty(0, np.int64), np.empty(0), np.empty(0), np.empty(0, np.int64))


def of_rows(run: Recorded) -> EntryCounts:
    """Return the counts of entries for recorded rows."""
    table, size = run.table, len(run.table["rank"])
    time_s = table["time_s"].astype(float)
    return EntryCounts(table["rank"].astype(np.int64), time_s, time_s, np.full(size, 2))


def of_events(run: Recorded) -> EntryCounts:
    """Return the counts of entries for recorded events."""
    rank = np.array([event["rank"] for event in run.events], np.int64)
    time_s = np.array([event["time_s"] for event in run.events], float)
    return EntryCounts(rank, time_s, time_s, np.ones(len(rank), np.int64))


# ------------------------------------------------------------------------------------------------------- what fits
def fitting(run: Recorded, timeline: Timeline | None, asked: Selection, limit: int) -> tuple[Selection, str]:
    """Return the part of the requested selection that fits, and a description of it if it is less than requested.

    As many ranks as fit are kept: failed ranks first, then in order of their numbers. If fewer than `FEWEST` fit,
    `FEWEST` ranks are kept for the first part of the time, or, of an unfinished run, for the last part.
    """
    parts = [of_rows(run), of_events(run)] + ([timeline.amounts] if timeline is not None else [])
    amounts = EntryCounts.joined(parts)
    amounts = amounts.where(asked.overlaps(amounts.begin_s, amounts.end_s))
    if asked.ranks is not None:
        amounts = amounts.where(np.isin(amounts.rank, [*asked.ranks]))
    heard, places = np.unique(amounts.rank, return_inverse=True)
    # Failed ranks come first: they are the most interesting ranks of a failed run.
    order = np.lexsort((heard, ~np.isin(heard, _failed(run, timeline))))
    counts = np.bincount(places, amounts.weight, len(heard))[order]
    room = int(np.searchsorted(np.cumsum(counts), limit, side="right"))
    chosen = heard[order][: max(room, FEWEST)]
    shown = replace(asked, ranks=frozenset(chosen.tolist()))
    # Drop whole ranks before time; never drop short calls, as the drawing would show idle time that did not exist.
    if len(chosen) > room:
        shown = _shorter(shown, amounts.where(np.isin(amounts.rank, chosen)), limit, run.outcome != FINISHED)
    return shown, _left_out(run, asked, shown, len(heard))


def _failed(run: Recorded, timeline: Timeline | None) -> list[int]:
    """Return the ranks that crashed or raised an error."""
    own = timeline.events if timeline is not None else ()
    return [event["rank"] for event in (*own, *run.events) if event["kind"] in ("crash", "raised")]


def _shorter(shown: Selection, amounts: EntryCounts, limit: int, from_end: bool) -> Selection:
    """Return a selection with less time that fits."""
    time_s = amounts.end_s if from_end else amounts.begin_s
    order = np.argsort(-time_s if from_end else time_s, kind="stable")
    room = int(np.searchsorted(np.cumsum(amounts.weight[order]), limit, side="right"))
    last_s = float(time_s[order[min(room, len(order) - 1)]])
    if from_end:
        # End just past the first entry that does not fit; never empty, even if all entries have one time.
        return replace(shown, from_s=min(np.nextafter(last_s, math.inf), shown.until_s - 1e-9))
    return replace(shown, until_s=max(np.nextafter(last_s, -math.inf), shown.from_s + 1e-9))


def _left_out(run: Recorded, asked: Selection, shown: Selection, heard: int) -> str:
    """Return a description of the shown part; "" if everything is shown. `heard`: number of ranks with any entries."""
    said, ranks = [], shown.ranks or frozenset()
    if len(ranks) < heard:
        said.append(f"{len(ranks):,} of {heard:,} ranks ({spans(ranks)})")
    if (shown.from_s, shown.until_s) != (asked.from_s, asked.until_s):
        last_s = min(shown.until_s, end_s(run.totals) or math.inf)
        said.append(f"{shown.from_s:.6g} s to {last_s:.6g} s")
    return " and ".join(said)
