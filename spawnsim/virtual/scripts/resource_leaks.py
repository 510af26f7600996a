"""What a program leaves open: requests never completed, messages never received, windows and communicators not freed.

Requests and communicators report here as they come and go (`World.resource_leaks`), if a script runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from spawnsim.virtual.engine.matching import undelivered
from spawnsim.virtual.engine.world import World

SHOWN = 4  # of each kind


class ResourceLeaks:
    """The open requests, messages, windows and communicators of one run."""

    def __init__(self) -> None:
        self._requests: dict[Any, tuple[int, Any]] = {}
        self._contexts: list[Any] = []
        self._freed: Counter[Any] = Counter()  # how many members have

    def opened(self, completion: Any, rank: int, waiting: Any) -> None:
        """Note a request."""
        self._requests[completion] = rank, waiting

    def closed(self, completion: Any) -> None:
        """Note that a request was collected, or freed."""
        self._requests.pop(completion, None)

    def made(self, context: Any) -> None:
        """Note a communicator."""
        self._contexts.append(context)

    def freed(self, context: Any) -> None:
        """Note that one more member has freed a communicator."""
        self._freed[context] += 1

    def warnings(self, world: World) -> list[str]:
        """Return what was left open, a line for each kind."""
        return [
            *self._left_requests(),
            *self.left_messages(),
            *_left_windows(world),
            *self._left_communicators(world),
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
        left = Counter(
            (context.number, message.source, context.places[0][rank], message.tag)
            for context in self._contexts
            if len(context.groups) == 1
            for rank, mailbox in sorted(context.mailboxes.items())
            for message in undelivered(mailbox)
        )
        if left:
            named = {context.number: context for context in self._contexts}
            shown = [
                f"{_times(count)}rank {source} to rank {dest}, tag {tag}, on {_where(named[number], source, dest)}"
                for (number, source, dest, tag), count in sorted(left.items())
            ]
            yield f"{_count(left.total(), 'message')} never received: {_list(shown)}"

    def _left_communicators(self, world: World) -> Iterator[str]:
        own = self._contexts[len(world.ranks) + 1 :]  # without COMM_WORLD and COMM_SELF
        outer = [context for context in own if not context.inner]
        left = [context for context in outer if not self._freed[context]]
        partly = [context for context in outer if 0 < self._freed[context] < len(context.everyone)]
        if left:
            yield f"{_count(len(left), 'communicator')} never freed"
        if partly:
            yield f"{_count(len(partly), 'communicator')} freed by some of the members only"


def _where(context: Any, *ranks: int) -> str:
    """Return the name of a communicator, and what its ranks are in the world if that differs."""
    world = [context.everyone[rank] for rank in ranks]
    if world == [*ranks]:
        return str(context.label)
    return f"{context.label} (ranks {' and '.join(map(str, world))} of the world)"


def _left_windows(world: World) -> Iterator[str]:
    left = Counter(rank.id for rank in world.ranks for _ in rank.attachments.get("windows", ()))
    if left:
        shown = [f"{_times(count)}rank {rank}" for rank, count in sorted(left.items())]
        yield f"{_count(left.total(), 'window')} never freed: {_list(shown)}"


def _times(count: int) -> str:
    return f"{count} × " if count > 1 else ""


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s were' if count > 1 else ' was'}"


def _list(items: Iterable[str]) -> str:
    shown = list(items)
    more = f", and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + more
