"""One access to memory, and the rule for two: when they are a race, and which call is missing between them.

An access begins with the call that starts it, and ends with the call that completes it: a flush, an unlock, a fence, a
complete, or the wait for its request. It happens before another one if its end does.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from spawnsim.comm.buffers import Buffer
from spawnsim.virtual.engine.causality import Known
from spawnsim.waits import is_program

Runs = tuple[tuple[int, int], ...]  # addresses: from, to; increasing
Line = tuple[str, int] | None  # of the program: file and number
SHARED, EXCLUSIVE = 1, 2
ANY_OP = ("NO_OP", "REPLACE", "CAS")  # these are atomic with each other, as the usual locks need


@dataclass(eq=False, slots=True)
class Begin:
    """Where and when a rank begins an access, or several in one call."""

    rank: int
    call: str
    line: Line
    number: int  # of the event
    knows: Known  # the latest events of this rank, and of the others, that happen before

    def after(self, rank: int, number: int) -> bool:
        """Whether this happens after an event of a rank."""
        return (self.knows[0] if rank == self.rank else self.knows[1][rank]) >= number

    def text(self) -> str:
        """Return the call with its rank and line."""
        return f"{self.call} of rank {self.rank}" + (f" ({shown(self.line)})" if self.line else "")


@dataclass(eq=False, slots=True)
class Access:
    """One access of a rank; `end` is the number of the event that ends it."""

    begin: Begin
    runs: Runs
    writes: bool
    end: int | None = None
    epoch: str = ""  # the kind of its epoch, of a one-sided call
    origin: bool = False  # to the buffer of the rank that makes the call
    atomic: tuple[str, str, int] | None = None  # operation, type and its size, of the atomic calls
    remote: bool = False  # to a target's memory, by a one-sided call
    lock: int = 0  # SHARED or EXCLUSIVE: which lock of the memory the rank holds


def runs_of(buffer: Buffer) -> Runs:
    """Return the bytes of a buffer's elements, without gaps."""
    if not buffer.nbytes or buffer.phantom:
        return ()
    start, layout = buffer.address, buffer.datatype.layout
    if layout.dense:
        return ((start, start + buffer.nbytes),)
    blocks = sorted(
        (start + number * layout.extent + int(offset), int(length))
        for number in range(buffer.count * buffer.blocks)
        for offset, length in zip(layout.offsets, layout.lengths, strict=True)
    )
    return merged((low, low + length) for low, length in blocks)


def merged(runs: Any) -> Runs:
    """Return increasing runs with neighbours joined."""
    found: list[tuple[int, int]] = []
    for low, high in runs:
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def overlap(one: Runs, other: Runs) -> tuple[int, int] | None:
    """Return the first bytes that two accesses share."""
    if not one or not other or one[-1][1] <= other[0][0] or other[-1][1] <= one[0][0]:
        return None
    if len(one) == 1 and len(other) == 1:
        return max(one[0][0], other[0][0]), min(one[0][1], other[0][1])
    place = 0
    for low, high in one:
        while place < len(other) and other[place][1] <= low:
            place += 1
        if place < len(other) and other[place][0] < high:
            return max(low, other[place][0]), min(high, other[place][1])
    return None


def conflict(first: Access, second: Access) -> tuple[int, int] | None:
    """Return the bytes for which two accesses could be a race, if nothing orders them; None if they could not."""
    if not (first.writes or second.writes) or not first.runs or not second.runs:
        return None
    if _atomic_together(first, second):
        return None
    return overlap(first.runs, second.runs)


def exclude(first: Access, second: Access) -> bool:
    """Whether locks of their target exclude one of two accesses while the other one lasts."""
    # MPI: accesses under locks of one target exclude each other, unless both locks are shared.
    return first.lock + second.lock > EXCLUSIVE and first.begin.rank != second.begin.rank


def _atomic_together(first: Access, second: Access) -> bool:
    """Whether two atomic calls may overlap: their types, elements and operations go together."""
    one, other = first.atomic, second.atomic
    if one is None or other is None:
        return False
    if one[1:] != other[1:] or (first.runs[0][0] - second.runs[0][0]) % one[2]:
        return False
    return one[0] == other[0] or "NO_OP" in (one[0], other[0]) or {one[0], other[0]} <= {*ANY_OP}


def missing(first: Access, second: Access, *, shared: bool) -> str:
    """Return the call that would order two accesses, in words; called at the end of the run."""
    complete = COMPLETES.get(first.epoch, "Flush")
    if first.origin:
        if not first.epoch:
            return "the request's Wait before the second"
        wait = f"the request's Wait, {complete}" if first.begin.call.startswith("R") else complete
        return f"{wait} before the second"
    # If the begin of the first happens before the second, only the call that completes it comes too late.
    rank = first.begin.rank
    if first.remote and second.begin.after(rank, first.begin.number):
        who = "" if rank == second.begin.rank else f" of rank {rank}, then a Barrier or a message,"
        return f"{complete}{who} between them"
    epochs = {first.epoch, second.epoch}
    if "fence" in epochs:
        return "Fence between them"
    if "Start" in epochs:
        return "Complete and Wait, or a Barrier, between them"
    ends = f"{complete}, then " if first.remote and first.end is None else ""
    sync = "Win.Sync, Barrier and Win.Sync" if shared else "a Barrier or a message"
    locks = ", or exclusive locks around both" if first.lock or second.lock else ""
    return f"{ends}{sync} between them{locks}"


COMPLETES = {
    "fence": "Fence",
    "lock": "Flush or Unlock",
    "lock_all": "Flush or Unlock_all",
    "Start": "Complete",
}


_programs: dict[str, bool] = {}


def line_of_program(depth: int = 1) -> Line:
    """Return the innermost line that belongs to the program, from this number of callers on."""
    frame: Any = sys._getframe(depth)
    while frame is not None:
        file = frame.f_code.co_filename
        ours = _programs.get(file)
        if ours is None:
            ours = _programs[file] = is_program(file)
        if ours:
            return file, frame.f_lineno
        frame = frame.f_back
    return None


def shown(line: Line) -> str:
    """Return a line in words."""
    return "" if line is None else f"{line[0].rpartition('/')[2]}:{line[1]}"


def text_of(first: Access, second: Access, where: str, *, shared: bool) -> str:
    """Return the report of a race; `where` says which bytes of which memory."""
    epochs = [each.epoch for each in (first, second) if each.epoch]
    kinds = {"lock": "a lock", "lock_all": "Lock_all", "fence": "a fence", "Start": "Start and Complete"}
    epoch = (
        f", in an epoch of {' and of '.join(kinds[each] for each in dict.fromkeys(epochs))}" if epochs else ""
    )
    return (
        f"{first.begin.text()} and {second.begin.text()} access {where}{epoch}, and nothing orders them; "
        f"missing: {missing(first, second, shared=shared)}"
    )
