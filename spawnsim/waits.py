"""Waits between ranks: cycles, tables, and lines of programs, for virtual ranks and for dumps of real ones."""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from spawnsim.units import text_table

PACKAGE = str(Path(__file__).parent) + os.sep  # folder of spawnsim's own files
STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
INSTALLED = ("site-packages", "dist-packages")  # the interpreter's, a user's, and Debian's, in any folder
SHOWN = 24  # rows of the table
SHOWN_ALIKE = 3  # ranks in one call at one line that have a row each; of more ranks, only the first has a row
SHOWN_LINES = 8  # further calls and lines for which the number of ranks is shown


class Row(NamedTuple):
    """Where a rank stands.

    Attributes:
        rank: its number.
        name: the rank, or a thread of it.
        since: the time from which it waits; "" if unknown.
        call: the call, with its arguments in brackets.
        line: the line of the program, as file:line.
    """

    rank: int
    name: str
    since: str
    call: str
    line: str


def ring(waits: Mapping[int, Sequence[int]]) -> list[int]:
    """Return ranks that wait for each other in a ring, or []. A wait for any of several ranks counts for the first.

    >>> ring({0: [1], 1: [2], 2: [5, 1]})
    [1, 2]
    """
    state: dict[int, int] = {}
    for start in sorted(waits):
        path: list[int] = []
        rank = start
        while rank in waits and rank not in state:
            state[rank] = start
            path.append(rank)
            rank = next((peer for peer in waits[rank] if peer in waits), -1)
        if rank in waits and state.get(rank) == start and rank in path:
            return path[path.index(rank) :]
    return []


def ring_text(ranks: Sequence[int]) -> str:
    """Return the sentence on the ranks of a ring.

    >>> ring_text([1, 2])
    'a cycle of waits: rank 1 → rank 2 → rank 1'
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits for itself"
    return "a cycle of waits: " + " → ".join(f"rank {rank}" for rank in [*ranks, ranks[0]])


def ranks_text(ranks: Sequence[int]) -> str:
    """Return a list of ranks, of which the first eight have a name.

    >>> ranks_text([3]), ranks_text(range(10))
    ('rank 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    names = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {names}{more}"


def table(
    rows: Sequence[Row], first: Collection[int] = (), *, time: str = "since", alike: bool = True
) -> str:
    """Return a table of where ranks stand: first the ranks in `first`.

    Args:
        rows: a row for each rank or thread.
        first: ranks that have a row in any case.
        time: the head of the column of times; "" leaves the column out.
        alike: shows the first of many ranks in one call at one line, and counts the rest below the table.
    """
    ordered = sorted(rows, key=lambda row: (row.rank not in first, row.rank))
    kinds = [(row.call.partition("(")[0], row.line) for row in ordered]
    counts, shown, left = Counter(kinds), list[tuple[str, ...]](), Counter[tuple[str, str]]()
    seen = set[tuple[str, str]]()
    for row, kind in zip(ordered, kinds, strict=True):
        own_row = row.rank in first or counts[kind] <= SHOWN_ALIKE or kind not in seen or not alike
        if own_row and len(shown) < SHOWN:
            shown.append((row.name, *([row.since] if time else []), row.call, row.line))
        else:
            left[kind] += 1
        seen.add(kind)
    lines = [f"\n  {left[kind]:,} more in {kind[0]} at {kind[1]}" for kind in [*left][:SHOWN_LINES]]
    rest = left.total() - sum(left[kind] for kind in [*left][:SHOWN_LINES])
    lines += [f"\n  … and {rest:,} more"] if rest else []
    head = ("rank", *([time] if time else []), "call", "at")
    return text_table(head, shown, left=4, indent="  ") + "".join(lines)


def is_installed(file: str) -> bool:
    """Whether a file belongs to spawnsim or an installed package."""
    return file.startswith(PACKAGE) or any(folder in file for folder in INSTALLED)


@cache  # each run checks all loaded modules
def is_program(file: str) -> bool:
    """Whether a file belongs to a program: not installed, not Python's, and not generated code (`<string>`)."""
    return not file.startswith((*STANDARD, "<")) and not is_installed(file)


def line(stack: Sequence[tuple[str, int]], own_file: Callable[[str], bool] = is_program) -> str:
    """Return the line of the program for a stack of files and line numbers, innermost first.

    It is the innermost line that belongs neither to spawnsim nor to a library. If a library has made the call, the
    library's line follows in brackets.
    """
    foreign = [each for each in stack if not each[0].startswith((PACKAGE, "<"))]  # "<string>": generated
    own = next((each for each in foreign if own_file(each[0])), None)
    named = [f"{file.rpartition('/')[2]}:{number}" for file, number in ([own] if own else []) + foreign[:1]]
    return f"{named[0]} (in {named[1]})" if len({*named}) == 2 else "".join(named[:1])
