"""Requests, messages, windows, communicators and other objects left open at the end of a run: a sentence for each kind.

Unmodified programs register all of them as they are created and released (`World.resource_leaks`). For a program with
`main(comm)`, only receives and windows are reported: policies that do not wait for other ranks leave sends and
messages open, and create communicators.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from types import FrameType
from typing import Any

from spawnsim.comm.handles import OBSERVERS, Keyval, Owned
from spawnsim.virtual.engine.kernel import current_task
from spawnsim.virtual.engine.matching import undelivered
from spawnsim.virtual.engine.world import World
from spawnsim.waits import is_program, line

SHOWN = 4  # of each kind


def left_open(world: World) -> Iterator[str]:
    """Yield a sentence for each kind of resource that a program with `main(comm)` left open: receives and windows.

    Args:
        world: the world of a run that finished without errors or faults; a run that fails leaves many resources open.
    """
    left = [rank for rank in world.ranks if rank.open_receives > 0]
    if left:
        count = _count(sum(rank.open_receives for rank in left), "receive")
        shown = [f"rank {rank.id}: {_times(rank.open_receives)}{_call(*rank.last_receive)}" for rank in left]
        unread = "never completed by Wait or Test, so the program may read data that has not arrived"
        yield f"{count} {unread}: {_list(shown)}"
    yield from _left_windows(
        (rank.id, "") for rank in world.ranks for _ in rank.attachments.get("windows", ())
    )


def _call(member: Any, *about: Any) -> str:
    text: str = member._waiting(*about).describe()
    return text


class ResourceLeaks:
    """The open requests, messages, windows, files and other objects of one run of an unmodified program."""

    def __init__(self) -> None:
        self._requests: dict[Any, tuple[int, Any]] = {}
        self._contexts: dict[Any, str] = {}  # and the program's line that made each
        self._freed: Counter[Any] = Counter()  # how many members have freed it
        self._handles: Counter[tuple[str, str]] = Counter()  # open datatypes, groups, …: by kind and line

    def opened(self, completion: Any, rank: int, waiting: Any) -> None:
        self._requests[completion] = rank, waiting

    def closed(self, completion: Any) -> None:
        self._requests.pop(completion, None)

    def made(self, context: Any) -> None:
        """Record a communicator."""
        self._contexts[context] = _line_of_program()

    def freed(self, context: Any) -> None:
        self._freed[context] += 1

    def noticed(self, owned: Owned | Keyval, new: bool) -> None:
        """Record an object that a program must free, such as a datatype: it is new, or freed."""
        if new:
            owned._origin = _line_of_program()
        self._handles[owned.kind, getattr(owned, "_origin", "")] += 1 if new else -1

    def warnings(self, world: World) -> list[str]:
        """Return a line for each kind of open resource."""
        return [
            *self._left_requests(),
            *self.left_messages(),
            *_left_windows(
                (rank.id, self._contexts[window._comm._context])
                for rank in world.ranks
                for window in rank.attachments.get("windows", ())
            ),
            *_left_files(world),
            *self._left_communicators(world),
            *self._left_handles(),
        ]

    def _left_requests(self) -> Iterator[str]:
        left = Counter(
            (rank, waiting.describe() if waiting else "send") for rank, waiting in self._requests.values()
        )
        if left:
            shown = [f"rank {rank}: {_times(count)}{call}" for (rank, call), count in sorted(left.items())]
            yield f"{_count(left.total(), 'request')} never completed by Wait or Test: {_list(shown)}"

    def left_messages(self) -> Iterator[str]:
        """Yield a sentence about messages that were not received, if there are any."""
        named = {context.number: context for context in self._contexts if len(context.groups) == 1}
        left = Counter(
            (number, message.source, context.places[0][rank], message.tag)
            for number, context in named.items()
            for rank, mailbox in sorted(context.mailboxes.items())
            for message in undelivered(mailbox)
        )
        if left:
            shown = [
                f"{_times(count)}rank {source} to rank {dest}, tag {tag}, on {_where(named[number], source, dest)}"
                for (number, source, dest, tag), count in sorted(left.items())
            ]
            yield f"{_count(left.total(), 'message')} never received: {_list(shown)}"

    def _left_communicators(self, world: World) -> Iterator[str]:
        # Without COMM_WORLD and COMM_SELF.
        own = [each for each in self._contexts if each.number > world.predefined]
        outer = [context for context in own if not context.inner and not context.lasting]
        left = [context for context in outer if not self._freed[context]]
        partly = [context for context in outer if 0 < self._freed[context] < len(context.everyone)]
        if left:
            yield f"{_count(len(left), 'communicator')} never freed{self._made_at(left)}"
        if partly:
            yield f"{_count(len(partly), 'communicator')} freed by only some of the members{self._made_at(partly)}"

    def _made_at(self, contexts: Iterable[Any]) -> str:
        return _made_at(Counter(self._contexts[context] for context in contexts))

    def _left_handles(self) -> Iterator[str]:
        left: dict[str, Counter[str]] = {}
        for (kind, where), count in self._handles.items():
            if count > 0:
                left.setdefault(kind, Counter())[where] = count
        for kind, lines in sorted(left.items()):
            yield f"{_count(lines.total(), kind)} never freed{_made_at(lines)}"


def _noticed(owned: Owned | Keyval, new: bool) -> None:
    task = current_task()
    leaks = None if task is None else task.kernel.owner.resource_leaks
    if leaks is not None:
        leaks.noticed(owned, new)


OBSERVERS.append(_noticed)


def _line_of_program() -> str:
    # Not `diagnosis.place`, which walks the whole stack: a tenth of the time of a Split into many.
    frame: FrameType | None = sys._getframe()
    while frame is not None and not is_program(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)


def _made_at(lines: Counter[str]) -> str:
    shown = [f"{_times(count)}{where}" for where, count in lines.items() if where]
    return f": created at {_list(shown)}" if shown else ""


def _left_windows(windows: Iterable[tuple[int, str]]) -> Iterator[str]:
    """Yield a sentence about open windows, with ranks and the line that made each, if there are any."""
    left = Counter(windows)
    if left:
        shown = [
            f"{_times(count)}rank {rank}{where and f' at {where}'}"
            for (rank, where), count in sorted(left.items())
        ]
        yield f"{_count(left.total(), 'window')} never freed: {_list(shown)}"


def _left_files(world: World) -> Iterator[str]:
    """Yield a sentence about files of MPI-IO that ranks left open, if there are any."""
    left = Counter(path for rank in world.ranks for path in rank.attachments.get("files", ()))
    if left:
        shown = [f"{_times(count)}{path}" for path, count in left.items()]
        yield f"{_count(left.total(), 'file')} never closed: {_list(shown)}"


@cache  # a Split creates many at one line
def _line(file: str, number: int) -> str:
    return line([(file, number)])


def _where(context: Any, *ranks: int) -> str:
    world = [context.everyone[rank] for rank in ranks]
    if world == [*ranks]:
        return str(context.label)
    return f"{context.label} (ranks {' and '.join(map(str, world))} of the world)"


def _times(count: int) -> str:
    return f"{count:,} × " if count > 1 else ""


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s were' if count > 1 else ' was'}"


def _list(items: Iterable[str]) -> str:
    shown = list(items)
    more = f", and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + more
