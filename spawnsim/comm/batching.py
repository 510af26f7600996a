"""Calls that many ranks make at the same virtual time, executed together: what a backend offers to them.

A training step is a blocking call, like `Recv`: the rank parks until its step has been executed, with those of all
ranks that are parked by then. Knows that calls wait and who calls; must not know what the calls compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Batching(Protocol):
    """What one run of virtual ranks offers to calls that are executed together.

    Attributes:
        ranks: The number of ranks of the run.
        eager: Whether each call executes alone, in its rank's turn.
        check: Whether each call is compared with the same call executed alone (`--check-steps`).
        batched: Whether any call was executed together with others; set by those that execute.
        attachments: Objects that the calls of one run share.
    """

    ranks: int
    eager: bool
    check: bool
    batched: bool
    attachments: dict[Any, Any]

    def rank(self) -> int:
        """Return the calling rank."""

    def clock_s(self) -> float:
        """Return the calling rank's virtual time."""

    def wait(
        self, call: Any, execute: Callable[[Sequence[Any]], None], memory: Callable[[], Sequence[Any]]
    ) -> None:
        """Park the calling rank until `execute` has been called with its call among others.

        The rank's compute block passes first: calls wait for the earliest end of a block, by which all ranks that
        compute meanwhile have made theirs. The block of a rank whose memory others may access meanwhile (a background
        task, a window over `memory`) passes afterwards, and its call waits for its own time.

        Args:
            call: What `execute` is given.
            execute: Executes calls, given in the order of ranks; the same function for all calls of a run.
            memory: Returns the tensors that the call changes.
        """

    def pass_block(self, memory: Callable[[], Sequence[Any]]) -> None:
        """Let the compute block of a call pass that was executed alone, as `wait` would."""

    def warn(self, sentence: str) -> None:
        """Record a warning of the calling rank, once a run."""

    def apart(self) -> AbstractContextManager[None]:
        """Return a context in which no rank can communicate, and torch's modes are the default ones."""


_finders: list[Callable[[], Batching | None]] = []


def register_batching(of_caller: Callable[[], Batching | None]) -> None:
    """Let a backend find the run of the calling rank; `of_caller` returns None where none of its ranks calls."""
    _finders.append(of_caller)


def batching() -> Batching | None:
    """Return the run of the calling virtual rank; None on real ranks and outside a run."""
    return next((found for of_caller in _finders if (found := of_caller()) is not None), None)
