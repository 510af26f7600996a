"""What a communicator offers beyond MPI: the rank's time, notes and background work; what it can do; how to go on.

Signatures, and two records: `Capabilities` is what a communicator says of itself, `Recovery` what is left after ranks
have died.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a communicator can do here.

    Attributes:
        backend: "virtual", "mpi" or "torch".
        library: the library that carries it, with its version.
        survives: whether the job goes on when a rank dies.
        ulfm: whether Revoke, Shrink and Agree are the library's own.
        progress: when a busy rank answers one-sided accesses: "poll", "async" or "hardware".
        threads: the thread level, such as "multiple".
        devices: where the memory of buffers may lie, in torch's words: "cpu", and "cuda" where GPU tensors are taken.
        missing: launcher flags or settings that would give more, with what each would give.
    """

    backend: str
    library: str
    survives: bool
    ulfm: bool
    progress: str
    threads: str
    devices: tuple[str, ...] = ("cpu",)
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recovery:
    """What `comm.recover()` returns on every survivor.

    Attributes:
        comm: the communicator of the survivors, in their old order.
        ranks: old rank → new rank.
        step: the smallest step that any survivor gave; None if none was given. Survivors of an interrupted step stand
            at different steps, and go on together from this one.
        dead: the old ranks that are gone.
        joined: the new ranks of those that have begun again since they died, and have nothing yet: bring them what they
            need (weights, the iteration). On these ranks themselves nobody but they have joined.
    """

    comm: Any
    ranks: Mapping[int, int]
    step: int | None
    dead: tuple[int, ...]
    joined: tuple[int, ...] = ()


class Clock(Protocol):
    """The rank's time in seconds: virtual on virtual ranks, a monotonic wall clock on real ones."""

    def now(self) -> float:
        """Return the seconds since the run began."""

    def sleep(self, seconds: float) -> None:
        """Let time pass without computing."""

    def deadline(self, seconds: float) -> AbstractContextManager[Any]:
        """Bound each blocking call inside to `seconds` (default outside: 30); it then raises `errors.Timeout`."""

    def limit_s(self) -> float:
        """Return how many seconds a blocking call may take here."""


class Task(Protocol):
    """Work beside the rank's main program."""

    @property
    def alive(self) -> bool:
        """Whether the work goes on."""

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most `timeout` seconds; return whether it came. Raises what the work raised."""


class Recorder(Protocol):
    """What a rank writes down: `comm.record`."""

    def __call__(self, **values: Any) -> None:
        """Add one row: floats, integers, booleans or short strings by name."""

    def event(self, kind: str, **fields: Any) -> None:
        """Add one event; its time in seconds and the rank are added."""
