"""Protocols of the objects that a communicator provides: clock, tasks, recorder; requests, matched messages, windows.

The module also defines the reasons for an absence and two records: `Capabilities` describes a communicator, and
`Recovery` describes the survivors after ranks have died.
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

# Reasons why a rank is absent: `Comm.absent`.
DIED, ENDED, SILENT = "has died", "has ended its program", "does not answer"


@runtime_checkable
class Checkpointing(Protocol):
    """The methods of a communicator that save a run and continue it."""

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

        The policy is drained first. The checkpoint also holds the random streams (`comm.rng`, and the global generators
        of Python, numpy and torch) and the clocks. On real ranks the files are written while training continues.

        Args:
            iteration: the iteration at which a resumed run continues, at least 0.
            model: an object with a `state_dict()`, or a mapping.
            optimizer: an object with a `state_dict()`, or a mapping.
            policy: an object with a `state_dict()`, or a mapping.
            extra: numbers, strings, None, tensors, arrays, and lists and mappings of these.

        Raises:
            ParameterError: an argument has an unsupported type, or the run has no folder (real ranks).
            UsageError: a large message has been sent and not yet received.
            StorageError: a file cannot be written.
        """

    def restore(self, *, model: Any = None, optimizer: Any = None, policy: Any = None) -> Saved | None:
        """Return the saved state, if any: in a resumed run (collective), or on a restarted rank.

        A program calls it once, before its loop and after it has created the objects that it saves, and continues with
        `iteration`. Streams, generators and clock are restored. If more ranks run than were saved, an additional rank
        gets the state of the rank with number (own rank modulo number of saved ranks), but keeps its own streams.

        Args:
            model: receives the saved state (`load_state_dict`); None: the program loads it.
            optimizer: receives its saved state; None: the program loads it.
            policy: receives its saved state; None: the program loads it.

        Returns:
            The saved state; None in a new run.

        Raises:
            ParameterError: the checkpoint is damaged, or does not fit.
        """


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities of a communicator in this environment.

    Attributes:
        backend: "virtual", "mpi" or "torch".
        library: the underlying library, with its version.
        survives: whether the job continues when a rank dies.
        ulfm: whether the library itself implements Revoke, Shrink and Agree.
        progress: when a busy rank answers one-sided accesses: "poll", "async" or "hardware".
        threads: the thread level, such as "multiple".
        devices: supported devices of buffers, as torch names them: "cpu", and "cuda" if GPU tensors are accepted.
        missing: launcher flags or settings that would add a capability, each with that capability.
        sums: the order of summation: "mpi", or "gloo" (`comm.ops`), where the order depends on the length.
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
    """The result of `comm.recover()` on every survivor.

    Attributes:
        comm: the communicator of the survivors, in their old order.
        ranks: old rank → new rank.
        step: the smallest step that any survivor passed; None if no survivor passed one. An interruption leaves the
            survivors at different steps; they continue together from this one.
        dead: the old ranks of the dead.
        joined: the new ranks of restarted ranks. These have no state yet: send them the weights and the iteration. On
            a restarted rank, `joined` contains only the restarted ranks.
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
        """Limit each blocking call inside to `seconds` (outside, the default is 30); then raise `errors.Timeout`."""

    def limit_s(self) -> float:
        """Return the current limit of a blocking call in seconds."""


class Task(Protocol):
    """Work that runs in parallel with the rank's main program."""

    @property
    def alive(self) -> bool:
        """Whether the work is still running."""

    def join(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for the end; return whether it has ended. Re-raises the work's exception."""


class Recorder(Protocol):
    """The recorder of a rank: `comm.record`."""

    def __call__(self, **values: Any) -> None:
        """Add one row of named values: floats, integers, booleans or short strings."""

    def event(self, kind: str, **fields: Any) -> None:
        """Add one event, with its time in seconds and the rank."""

    def operation(self, name: str, method: str, *arguments: Any) -> AbstractContextManager[Any]:
        """Record a block as an operation on an object that ranks share: an event of kind "operation" at its end.

        The block sets `result` of the yielded object to what the operation returned. After an exception, or on a
        virtual rank that dies, the operation is pending: its `end_s` is None. A real rank that dies records nothing.
        """


@runtime_checkable
class Request(Protocol):
    """A call in progress. A dropped request still completes: the communicator keeps a reference.

    To wait for several requests, call the class methods, on every backend: `Request.Waitall([receiving, sending])`.
    """

    def Wait(self, status: Status | None = None) -> Literal[True]:
        """Wait until the request is complete."""

    def Test(self, status: Status | None = None) -> bool:
        """Return whether the request is complete."""

    def wait(self, status: Status | None = None) -> Any:
        """Wait until the request is complete and return the received object."""

    def test(self, status: Status | None = None) -> tuple[bool, Any | None]:
        """Return whether the request is complete, and the received object."""

    def Cancel(self) -> None:
        """Ask for an end without a result."""

    def Free(self) -> None:
        """Release the handle; the call continues."""

    # Each backend has its own request class with the same methods; the first request determines the class.
    @classmethod
    def Waitall(cls, requests: Sequence[Any], statuses: list[Status] | None = None) -> bool:
        """Wait until all requests are complete; return True."""
        return not requests or bool(type(requests[0]).Waitall(requests, statuses))

    @classmethod
    def waitall(cls, requests: Sequence[Any], statuses: list[Status] | None = None) -> list[Any]:
        """Wait until all requests are complete; return the received objects in the order of the requests."""
        return list(type(requests[0]).waitall(requests, statuses)) if requests else []

    @classmethod
    def Waitany(cls, requests: Sequence[Any], status: Status | None = None) -> int:
        """Wait until one request is complete; return its index, or UNDEFINED if no request is active."""
        return int(type(requests[0]).Waitany(requests, status)) if requests else UNDEFINED

    @classmethod
    def Waitsome(cls, requests: Sequence[Any], statuses: list[Status] | None = None) -> list[int] | None:
        """Wait until at least one request is complete; return the indices of all such, or None if none is active."""
        found: list[int] | None = type(requests[0]).Waitsome(requests, statuses) if requests else None
        return found

    @classmethod
    def Testall(cls, requests: Sequence[Any], statuses: list[Status] | None = None) -> bool:
        return not requests or bool(type(requests[0]).Testall(requests, statuses))


class Message(Protocol):
    """A message that a matched probe has taken out of the queue: only this object can receive it."""

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

    Accesses (`Put`, `Get` and the atomic ones) take place between `Lock` and `Unlock`, `Lock_all` and `Unlock_all`, or
    two fences. After a flush or at the end, their buffers may be reused and their results are available (MPI 4.1,
    12.5).
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
        """Read from a part; the data are available after a flush or unlock."""

    def Rget(self, origin: Any, target_rank: int, target: Any = None) -> Request:
        """Read from a part; the data are available when the request is complete."""

    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Write to a part."""

    def Rput(self, origin: Any, target_rank: int, target: Any = None) -> Request:
        """Write to a part; the buffer may be reused when the request is complete."""

    def Accumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = SUM) -> None:
        """Combine with a part; atomic per element."""

    def Get_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = SUM
    ) -> None:
        """Combine with a part and return its previous values; atomic per element."""

    def Fetch_and_op(
        self, origin: Any, result: Any, target_rank: int, target_disp: int = 0, op: Op = SUM
    ) -> None:
        """Combine one element and return its previous value, atomically."""

    def Compare_and_swap(
        self, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int = 0
    ) -> None:
        """Replace one element if it equals `compare`, and return its previous value, atomically."""

    def Flush(self, rank: int) -> None:
        """Complete all calls to one rank."""

    def Flush_all(self) -> None:
        """Complete all calls."""

    def Fence(self, assertion: int = 0) -> None:
        """Separate epochs, collectively."""

    def Sync(self) -> None:
        """Make the rank's own loads and stores and the accesses of other ranks visible to each other."""

    def Free(self) -> None:
        """Free the window, collectively."""


class Windows(Protocol):
    """The constructor of windows: `comm.Win`. Calls are collective, over `comm` itself unless one is passed."""

    def Allocate(self, size: int, disp_unit: int = 1, info: Any = ..., comm: Any = ...) -> Win:
        """Open a window on fresh memory of `size` bytes, which may differ from rank to rank."""

    def Create(self, memory: Any, disp_unit: int = 1, info: Any = ..., comm: Any = ...) -> Win:
        """Open a window on memory of the program."""

    def Allocate_shared(self, size: int, disp_unit: int = 1, info: Any = ..., comm: Any = ...) -> Win:
        """Open a window on memory that all ranks of one node load and store directly."""
