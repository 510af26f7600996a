"""Saying why a run stands still: who waits for whom, in which call, since when, and where in the program.

This room reads tasks; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from spawnsim.errors import Deadlock
from spawnsim.virtual.kernel import Task

PACKAGE = str(Path(__file__).parent.parent)
SHOWN = 24  # rows of the table


def deadlock(tasks: Sequence[Task], ended: Sequence[int]) -> Deadlock:
    """Return the error of a run in which every task left waits; `ended` are the ranks that have finished."""
    ring = cycle(tasks)
    if ring:
        chain = " → ".join(f"rank {rank}" for rank in [*ring, ring[0]])
        reason = f"a cycle of waits: {chain}"
    else:
        reason = _dead_end(tasks, ended)
    shown = sorted(tasks, key=lambda task: (task.rank not in ring, task.rank))[:SHOWN]
    rows = [
        (task.name, f"{task.clock:.6g} s", task.wait.describe() if task.wait else "", where(task))
        for task in shown
    ]
    more = f"\n  … and {len(tasks) - SHOWN} more" if len(tasks) > SHOWN else ""
    return Deadlock(
        f"deadlock: {len(tasks)} of {len(tasks) + len(ended)} ranks wait and nothing can end it; {reason}\n"
        + table(("rank", "since", "call", "at"), rows)
        + more
    )


def _dead_end(tasks: Sequence[Task], ended: Sequence[int]) -> str:
    """Say which wait nobody can end, when the waits form no cycle."""
    gone = set(ended)
    for task in tasks:
        peers = set(task.wait.peers()) if task.wait else set()
        if peers and peers <= gone:
            names = ", ".join(map(str, sorted(peers)[:8]))
            return f"{task.name} waits for rank {names}, whose program has ended"
    return "no rank is left that could act"


def cycle(tasks: Sequence[Task]) -> list[int]:
    """Return ranks that wait for each other in a ring, or nothing. Waits for any of several count by their first."""
    waits = {task.rank: list(task.wait.peers()) for task in tasks if task.wait is not None}
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
    """Return file:line of the innermost frame of a parked task that is not spawnsim's own."""
    frame: FrameType | None = task.carrier.gr_frame
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "?"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a text table."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)
    )
    return "\n".join("  " + line.rstrip() for line in lines)
