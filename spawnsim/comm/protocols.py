"""The interface between policies and backends: what may be asked of a communicator, whatever backend implements it.

Signatures only. Names and arguments are mpi4py's; five members are spawnsim's own (`clock`, `compute`, `rng`,
`background`, `record`). `Capabilities` is what a communicator says of itself, `Recovery` what is left after ranks
have died. Communicators carry more of mpi4py than is listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG, LOCK_EXCLUSIVE
from spawnsim.comm.group import Group
from spawnsim.comm.handles import Info
from spawnsim.comm.ops import SUM, Op
from spawnsim.comm.status import Status
from spawnsim.random import Streams


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


@runtime_checkable
class Request(Protocol):
    """A call in progress. Dropping one loses nothing: the communicator keeps what it needs."""

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
        """Give up the handle."""


class Win(Protocol):
    """Memory that other ranks reach without this one's help."""

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

    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Write to a part."""

    def Accumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = SUM) -> None:
        """Combine with a part, element by element atomic."""

    def Fetch_and_op(
        self, origin: Any, result: Any, target_rank: int, target_disp: int = 0, op: Op = SUM
    ) -> None:
        """Combine one element and return what was there, atomically."""

    def Compare_and_swap(
        self, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int = 0
    ) -> None:
        """Replace one element if it equals `compare`, and return what was there."""

    def Flush(self, rank: int) -> None:
        """Complete all calls to one rank."""

    def Flush_all(self) -> None:
        """Complete all calls."""

    def Fence(self, assertion: int = 0) -> None:
        """Separate epochs, collectively."""

    def Sync(self) -> None:
        """Make own and others' stores see each other."""

    def Free(self) -> None:
        """Give up the window, collectively."""


@runtime_checkable
class Comm(Protocol):
    """A communicator: mpi4py's names for all that MPI has, and spawnsim's five members."""

    @property
    def clock(self) -> Clock:
        """The rank's time."""

    @property
    def rng(self) -> Streams:
        """The rank's random streams."""

    @property
    def record(self) -> Recorder:
        """The rank's notebook."""

    def compute(self, seconds: float | None = None) -> AbstractContextManager[Any]:
        """Mark a block as computing; virtual ranks' clocks advance by it, real ones measure it."""

    def background(self, fn: Callable[[], Any]) -> Task:
        """Start work beside the rank's main program: a thread on real ranks, a co-located one on virtual ranks."""

    def capabilities(self) -> Capabilities:
        """Return what this communicator can do here, and which launcher flag is missing."""

    def recover(self, step: int | None = None) -> Recovery:
        """Return the communicator of the survivors of `RankFailed`, `Revoked` or `Timeout`; all of them must call."""

    @property
    def rank(self) -> int:
        """The caller's rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def Get_rank(self) -> int:
        """Return the caller's rank."""

    def Get_size(self) -> int:
        """Return the number of ranks."""

    def Get_group(self) -> Group:
        """Return the group of ranks."""

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Return the communicator of those with the same colour, ordered by key."""

    def Dup(self, info: Info | None = None) -> Any:
        """Return a communicator of the same ranks with its own messages."""

    def Create_group(self, group: Group, tag: int = 0) -> Any:
        """Return the communicator of a group; its members alone take part."""

    def Free(self) -> None:
        """Give up the communicator."""

    def Abort(self, errorcode: int = 0) -> Any:
        """End the whole run."""

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object."""

    def recv(
        self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Any:
        """Receive an object."""

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Send an object without waiting."""

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Receive an object without waiting."""

    def iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Return whether a message is there."""

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer."""

    def Recv(
        self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> None:
        """Receive a buffer."""

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Send a buffer without waiting."""

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Receive a buffer without waiting."""

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Return whether a message is there."""

    def Barrier(self) -> None:
        """Wait for all."""

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Give the root's buffer to all."""

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Collect all buffers at the root."""

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Give each rank its block of the root's buffer."""

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect all buffers at all ranks."""

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect buffers of unequal length at all ranks."""

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Give every rank its block of every buffer."""

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> None:
        """Combine all buffers at the root."""

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Combine all buffers at all ranks."""

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Combine all buffers at all ranks without waiting."""

    def Ibarrier(self) -> Request:
        """Wait for all, later."""

    def barrier(self) -> None:
        """Wait for all."""

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Give the root's object to all."""

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Collect all objects at the root."""

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Give each rank its object of the root's list."""

    def allgather(self, sendobj: Any) -> list[Any]:
        """Collect all objects at all ranks."""

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Give every rank its object of every list."""

    def reduce(self, sendobj: Any, op: Op | Callable[[Any, Any], Any] = SUM, root: int = 0) -> Any | None:
        """Combine all objects at the root."""

    def allreduce(self, sendobj: Any, op: Op | Callable[[Any, Any], Any] = SUM) -> Any:
        """Combine all objects at all ranks."""
