"""Protocols of the objects that a communicator gives: clock, tasks, recorder; requests, matched messages, windows.

Signatures, reasons for an absence, and two records: `Capabilities` is what a communicator says of itself, `Recovery`
what is left after ranks have died.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from spawnsim.checkpoints import Saved
from spawnsim.comm.constants import LOCK_EXCLUSIVE, UNDEFINED
from spawnsim.comm.ops import SUM, Op
from spawnsim.comm.status import Status

# Why nothing can be expected of a rank: `Comm.absent`.
DIED, ENDED, SILENT = "has died", "has ended its program", "does not answer"


@runtime_checkable
class Checkpointing(Protocol):
    """What a communicator has to save a run and to go on from there."""

    def checkpoint(
        self,
        *,
        iteration: int,
        model: Any = None,
        optimizer: Any = None,
        policy: Any = None,
        extra: Any = None,
    ) -> None:
        """Save this rank's part of a checkpoint in the run folder; collective, at the end of an iteration.

        The policy is drained first. Random streams (`comm.rng`, and the global generators of Python, numpy and torch)
        and clocks are saved with it. On real ranks the files are written while training goes on.

        Args:
            iteration: the one to go on with, at least 0.
            model: what has a `state_dict()`, or a mapping.
            optimizer: likewise.
            policy: likewise.
            extra: numbers, texts, None, tensors, arrays, and lists and mappings of these.

        Raises:
            ParameterError: something that is to be saved is none of these, or there is no run folder (real ranks).
            UsageError: a large message is under way that has not been received.
            StorageError: a file cannot be written.
        """

    def restore(self, *, model: Any = None, optimizer: Any = None, policy: Any = None) -> Saved | None:
        """Return what was saved, if there is anything: in a resumed run (collective), or to a rank that is restarted.

        A program calls it once, before its loop, when it has made what it saves, and goes on with `iteration`.
        Streams, generators and clock then stand where they stood. A rank that the checkpoint does not hold, since more
        ranks run than before, gets the state of rank (its own modulo those that were saved), with streams of its own.

        Args:
            model: is given the saved state (`load_state_dict`); None: left to the program.
            optimizer: likewise.
            policy: likewise.

        Returns:
            What was saved; None in a run that begins.

        Raises:
            ParameterError: the checkpoint is damaged, or does not fit.
        """


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
        sums: whose order of summation it has: "mpi", or "gloo" (`comm.ops`), where the order depends on the length.
    """

    backend: str
    library: str
    survives: bool
    ulfm: bool
    progress: str
    threads: str
    devices: tuple[str, ...] = ("cpu",)
    missing: tuple[str, ...] = ()
    sums: str = "mpi"


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


@runtime_checkable
class Request(Protocol):
    """A call in progress. Dropping one loses nothing: the communicator keeps what it needs.

    What waits for several is called on this class, on every backend alike: `Request.Waitall([receiving, sending])`.
    """

    def Wait(self, status: Status | None = None) -> Literal[True]:
        """Wait for the end."""

    def Test(self, status: Status | None = None) -> bool:
        """Return whether it has ended."""

    def wait(self, status: Status | None = None) -> Any:
        """Wait for the end and return the object that was received."""

    def test(self, status: Status | None = None) -> tuple[bool, Any | None]:
        """Return whether it has ended, and the object that was received."""

    def Cancel(self) -> None:
        """Ask for the end without a result."""

    def Free(self) -> None:
        """Give up the handle; the call goes on."""

    # Requests of a backend are of a class of its own, which has these calls, too: it is found by the first of them.
    @classmethod
    def Waitall(cls, requests: Sequence[Any], statuses: list[Status] | None = None) -> bool:
        """Wait until all of these are over; return True."""
        return not requests or bool(type(requests[0]).Waitall(requests, statuses))

    @classmethod
    def waitall(cls, requests: Sequence[Any], statuses: list[Status] | None = None) -> list[Any]:
        """Wait until all of these are over; return the objects that were received, in the order of the requests."""
        return list(type(requests[0]).waitall(requests, statuses)) if requests else []

    @classmethod
    def Waitany(cls, requests: Sequence[Any], status: Status | None = None) -> int:
        """Wait until one of these is over; return its place, UNDEFINED if there is none that is not over."""
        return int(type(requests[0]).Waitany(requests, status)) if requests else UNDEFINED

    @classmethod
    def Waitsome(cls, requests: Sequence[Any], statuses: list[Status] | None = None) -> list[int] | None:
        """Wait until at least one of these is over; return the places of all that are, None if none is open."""
        found: list[int] | None = type(requests[0]).Waitsome(requests, statuses) if requests else None
        return found

    @classmethod
    def Testall(cls, requests: Sequence[Any], statuses: list[Status] | None = None) -> bool:
        return not requests or bool(type(requests[0]).Testall(requests, statuses))


class Message(Protocol):
    """A message that a matched probe has taken out of the queue: nothing but this object can receive it."""

    def Recv(self, buf: Any, status: Status | None = None) -> None:
        """Receive it into a buffer."""

    def recv(self, status: Status | None = None) -> Any:
        """Receive its object."""

    def Irecv(self, buf: Any) -> Request:
        """Start to receive it into a buffer."""

    def irecv(self) -> Request:
        """Start to receive its object."""


class Win(Protocol):
    """Memory that other ranks reach without its owner's help.

    An access (`Put`, `Get` and the atomic ones) is made between `Lock` and `Unlock`, `Lock_all` and `Unlock_all`, or
    two fences. Its buffers are free, and its result is there, after a flush or at the end (MPI 4.1, 12.5).
    """

    def tomemory(self) -> Any:
        """Return the rank's own part as a buffer of bytes."""

    def Lock(self, rank: int, lock_type: int = LOCK_EXCLUSIVE, assertion: int = 0) -> None:
        """Begin to access one rank's part."""

    def Unlock(self, rank: int) -> None:
        """End the access; all calls to that rank are then complete."""

    def Lock_all(self, assertion: int = 0) -> None:
        """Begin to access all parts, shared."""

    def Unlock_all(self) -> None:
        """End the access to all parts."""

    def Get(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Read from a part; the data are there after a flush or unlock."""

    def Rget(self, origin: Any, target_rank: int, target: Any = None) -> Request:
        """Read from a part; the data are there when the request is over."""

    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Write to a part."""

    def Rput(self, origin: Any, target_rank: int, target: Any = None) -> Request:
        """Write to a part; the buffer is free when the request is over."""

    def Accumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = SUM) -> None:
        """Combine with a part, element by element atomic."""

    def Get_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = SUM
    ) -> None:
        """Combine with a part, element by element atomic, and return what was there."""

    def Fetch_and_op(
        self, origin: Any, result: Any, target_rank: int, target_disp: int = 0, op: Op = SUM
    ) -> None:
        """Combine one element and return what was there, atomically."""

    def Compare_and_swap(
        self, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int = 0
    ) -> None:
        """Replace one element if it equals `compare`, and return what was there, atomically."""

    def Flush(self, rank: int) -> None:
        """Complete all calls to one rank."""

    def Flush_all(self) -> None:
        """Complete all calls."""

    def Fence(self, assertion: int = 0) -> None:
        """Separate epochs, collectively."""

    def Sync(self) -> None:
        """Let the rank's own loads and stores and the others' accesses see each other."""

    def Free(self) -> None:
        """Give up the window, collectively."""


class Windows(Protocol):
    """What makes windows: `comm.Win`. Its calls are collective, over `comm` itself unless another one is given."""

    def Allocate(self, size: int, disp_unit: int = 1, info: Any = ..., comm: Any = ...) -> Win:
        """Open a window on fresh memory of `size` bytes, which may differ from rank to rank."""

    def Create(self, memory: Any, disp_unit: int = 1, info: Any = ..., comm: Any = ...) -> Win:
        """Open a window on memory of the program."""

    def Allocate_shared(self, size: int, disp_unit: int = 1, info: Any = ..., comm: Any = ...) -> Win:
        """Open a window on memory that all ranks of one node load and store directly."""
