"""Saying why a run stands still: who waits for whom, in which call, since when, and where in the program.

This room reads tasks; it changes nothing.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Collection, Sequence
from pathlib import Path
from traceback import walk_stack
from types import FrameType

from spawnsim.errors import Deadlock, Livelock
from spawnsim.virtual.kernel import Task

PACKAGE = str(Path(__file__).parent.parent)
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
SHOWN = 24  # rows of the table


def deadlock(tasks: Sequence[Task], ended: Sequence[int]) -> Deadlock:
    """Return the error of a run in which every task left waits; `ended` are the ranks that have finished."""
    ring = cycle(tasks)
    if len(ring) == 1:
        reason = f"rank {ring[0]} waits for itself"
    elif ring:
        reason = "a cycle of waits: " + " → ".join(f"rank {rank}" for rank in [*ring, ring[0]])
    else:
        reason = _dead_end(tasks, ended)
    return Deadlock(
        f"deadlock: {len(tasks)} of {len(tasks) + len(ended)} ranks wait and nothing can end it; {reason}\n"
        + _standing(tasks, ring)
    )


def livelock(tasks: Sequence[Task], polls: int, since_s: float) -> Livelock:
    """Return the error of a run in which every task left polls or waits, and nothing can happen any more."""
    return Livelock(
        f"livelock: {polls:,} polls in a row found nothing, since {since_s:.6g} s; nobody does anything else, and "
        "nothing is on its way: the program polls for something that nobody will do\n" + _standing(tasks)
    )


def _standing(tasks: Sequence[Task], first: Collection[int] = ()) -> str:
    """Return a table of where tasks stand, those of the ranks `first` on top."""
    shown = sorted(tasks, key=lambda task: (task.rank not in first, task.rank))[:SHOWN]
    rows = [(task.name, f"{task.clock:.6g} s", _call(task), where(task)) for task in shown]
    more = f"\n  … and {len(tasks) - SHOWN} more" if len(tasks) > SHOWN else ""
    return table(("rank", "since", "call", "at"), rows) + more


def _dead_end(tasks: Sequence[Task], ended: Sequence[int]) -> str:
    """Say which wait nobody can end, when the waits form no cycle."""
    gone = set(ended)
    for task in tasks:
        peers = _others(task)
        if peers and gone.issuperset(peers):
            names = ", ".join(map(str, peers[:8]))
            more = f" and {len(peers) - 8} more" if len(peers) > 8 else ""
            program = "program has" if len(peers) == 1 else "programs have"
            return f"{task.name} waits for rank {names}{more}, whose {program} ended"
    return "no rank is left that could act"


def _others(task: Task) -> list[int]:
    """Return the ranks that could end a task's wait. It is among them itself only if nobody else is."""
    peers = list(dict.fromkeys(task.wait.peers())) if task.wait is not None else []
    return [peer for peer in peers if peer != task.rank] or peers


def cycle(tasks: Sequence[Task]) -> list[int]:
    """Return ranks that wait for each other in a ring, or nothing. Waits for any of several count by their first."""
    waits = {task.rank: _others(task) for task in tasks if task.wait is not None}
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


def where(task: Task) -> str:
    """Return the line of the program at which a task stands."""
    return place(_frames(task)[0]) or "?"


def place(frame: FrameType | None) -> str:
    """Return the line of the program, as file:line, that a frame comes from; empty if there is none.

    That is the innermost one which belongs neither to spawnsim nor to a library. If a library has made the call, its
    line follows in brackets.
    """
    return line([(each.f_code.co_filename, number) for each, number in walk_stack(frame)])


def line(stack: Sequence[tuple[str, int]]) -> str:
    """Return the same of a stack of files and line numbers, innermost first."""
    foreign = [each for each in stack if not each[0].startswith((PACKAGE, "<"))]  # "<string>": generated
    own = next((each for each in foreign if not each[0].startswith(LIBRARIES)), None)
    named = [f"{file.rpartition('/')[2]}:{number}" for file, number in ([own] if own else []) + foreign[:1]]
    return f"{named[0]} (in {named[1]})" if len({*named}) == 2 else "".join(named[:1])


def _call(task: Task) -> str:
    """Return the call in which a task waits, or the name of the one that it makes now."""
    return task.wait.describe() if task.wait is not None else _frames(task)[1]


def _frames(task: Task) -> tuple[FrameType | None, str]:
    """Return the innermost frame that is not spawnsim's own, and the name of the function that it calls."""
    frame: FrameType | None = (
        task.carrier.gr_frame or sys._getframe()
    )  # none while it runs: then it asks itself
    call = ""
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        call = frame.f_code.co_name if frame.f_code.co_name != "watching" else call  # see `calls`
        frame = frame.f_back
    return frame, call


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a text table."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)
    )
    return "\n".join("  " + line.rstrip() for line in lines)
