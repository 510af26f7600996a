"""The interface between policies and backends: the calls of a communicator that every backend implements.

Names and arguments are mpi4py's. `objects` defines the objects that the calls return, and spawnsim's own additions.
Communicators offer more of mpi4py than is listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, Unpack, runtime_checkable

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.comm.group import Group
from spawnsim.comm.handles import Info
from spawnsim.comm.objects import Capabilities as Capabilities
from spawnsim.comm.objects import Checkpointing, Clock, Message, Recorder, Request, Task, Windows
from spawnsim.comm.objects import Recovery as Recovery
from spawnsim.comm.ops import SUM, Op
from spawnsim.comm.properties import Kinds
from spawnsim.comm.status import Status
from spawnsim.random import Streams


@runtime_checkable
class Comm(Checkpointing, Protocol):
    """A communicator: mpi4py's names for MPI's calls, and spawnsim's own members.

    A buffer is any mpi4py buffer specification: a numpy array or torch tensor, `[array, count, datatype]`, bytes. An
    object is anything that can be pickled; each receiver gets its own copy. Tags are 0 to `TAG_UB`. All ranks of the
    communicator must call its collectives in the same order.

    Raises (every call that communicates):
        CallError: the call is invalid, for example because its rank does not exist.
        RankFailed: a rank that the call needs has died.
        Revoked: the communicator was revoked, or the other ranks have continued without this rank.
        Timeout: the call exceeded the deadline (`clock.deadline`); the error names the missing ranks.
    """

    @property
    def clock(self) -> Clock:
        """The rank's time."""

    @property
    def rng(self) -> Streams:
        """The rank's random streams, keyed by seed, rank and purpose: `comm.rng("donors")`."""

    @property
    def record(self) -> Recorder:
        """The rank's recorder: `comm.record(loss=…)` adds a row."""

    @property
    def Win(self) -> Windows:
        """The constructor of windows: `comm.Win.Allocate(nbytes, comm=comm)`."""

    def compute(self, seconds: float | None = None) -> AbstractContextManager[Any]:
        """Mark a block as computing; virtual ranks' clocks advance by it, real ones measure it.

        Args:
            seconds: duration of the block on a virtual rank without stragglers; None: by the run's compute model.

        Returns:
            A context manager for the block.

        Raises:
            ParameterError: neither `seconds` nor the run defines the duration of the block.
        """

    def check(self, condition: Any, message: str = "", **stated: Unpack[Kinds]) -> None:
        """Assert a condition at this line, or a property of the whole run; `spawnsim fuzz` searches for violations.

        A violation ends a virtual run, and the program cannot catch its `CheckFailed`; real ranks record a warning.

        Args:
            condition: any object with a truth value; with a property, its name.
            message: the error text if the condition is false.
            stated: `always=…`, `eventually=…`, `leads_to=…` or `linearizable=…`; see `spawnsim.comm.properties`.
        """

    def background(self, fn: Callable[[], Any]) -> Task:
        """Start work in parallel with the main program: a thread on real ranks, a co-located task on virtual ranks.

        Args:
            fn: is called without arguments.

        Returns:
            The running task.
        """

    def capabilities(self) -> Capabilities:
        """Return the capabilities of this communicator, and missing launcher flags.

        Returns:
            Facts about the backend; the same on all ranks.
        """

    def absent(self) -> dict[int, str]:
        """Return the ranks that are absent now. A rank that computes or waits is not absent.

        Returns:
            The reason by rank: it has died, it has ended its program, or it does not answer (it is stopped).
        """

    def recover(self, step: int | None = None) -> Recovery:
        """Continue without dead ranks, after `RankFailed`, `Revoked` or `Timeout`; all survivors must call it.

        Args:
            step: this rank's current step; the survivors agree on the smallest.

        Returns:
            The communicator of the survivors, their ranks, and the step from which they continue.

        Raises:
            Revoked: the other ranks have continued without this rank.
            UnsupportedError: jobs of this backend end with the first death.
        """

    @property
    def rank(self) -> int:
        """The caller's rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def Get_rank(self) -> int:
        """Return the caller's rank.

        Returns:
            0 to size - 1.
        """

    def Get_size(self) -> int:
        """Return the number of ranks.

        Returns:
            At least 1.
        """

    def Get_group(self) -> Group:
        """Return the processes of the ranks.

        Returns:
            The group, in the order of the ranks.
        """

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Divide the communicator; collective.

        Args:
            color: ranks of the same colour form a communicator; UNDEFINED: this rank joins no communicator.
            key: the order of the ranks; the old rank breaks ties.

        Returns:
            The communicator of this rank's colour, or COMM_NULL.
        """

    def Dup(self, info: Info | None = None) -> Any:
        """Create a communicator of the same ranks with separate messages; collective.

        Args:
            info: hints.

        Returns:
            The new communicator.
        """

    def Create_group(self, group: Group, tag: int = 0) -> Any:
        """Create the communicator of a group; only its members take part.

        Args:
            group: some of this communicator's processes.
            tag: distinguishes concurrent calls.

        Returns:
            The new communicator.
        """

    def Free(self) -> None:
        """Free the communicator."""

    def Abort(self, errorcode: int = 0) -> Any:
        """End the whole run.

        Args:
            errorcode: the exit status of the run.

        Returns:
            Never.
        """

    # -- objects between two ranks ---------------------------------------------------------------------------

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object.

        Args:
            obj: what to send.
            dest: the receiver's rank, or PROC_NULL.
            tag: what the receiver asks for.
        """

    def recv(
        self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Any:
        """Receive an object.

        Args:
            buf: accepted as mpi4py accepts it; not needed.
            source: the sender's rank, or ANY_SOURCE.
            tag: the message's tag, or ANY_TAG.
            status: is filled with source, tag and size.

        Returns:
            The object.
        """

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Send an object without waiting.

        Args:
            obj: what to send.
            dest: the receiver's rank, or PROC_NULL.
            tag: what the receiver asks for.

        Returns:
            A request.
        """

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Receive an object without waiting.

        Args:
            buf: accepted as mpi4py accepts it; not needed.
            source: the sender's rank, or ANY_SOURCE.
            tag: the message's tag, or ANY_TAG.

        Returns:
            A request; its `wait` returns the object.
        """

    # -- buffers between two ranks ---------------------------------------------------------------------------

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer.

        Args:
            buf: the data to send.
            dest: the receiver's rank, or PROC_NULL.
            tag: what the receiver asks for.
        """

    def Recv(
        self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> None:
        """Receive a buffer.

        Args:
            buf: the receive buffer, at least as long as the message.
            source: the sender's rank, or ANY_SOURCE.
            tag: the message's tag, or ANY_TAG.
            status: is filled with source, tag and size.

        Raises:
            Truncated: the message is longer than the buffer.
        """

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Send a buffer without waiting.

        Args:
            buf: the data to send; do not modify it until the request is complete.
            dest: the receiver's rank, or PROC_NULL.
            tag: what the receiver asks for.

        Returns:
            A request that is complete when the buffer may be reused.
        """

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Receive a buffer without waiting.

        Args:
            buf: the receive buffer; do not access it until the request is complete.
            source: the sender's rank, or ANY_SOURCE.
            tag: the message's tag, or ANY_TAG.

        Returns:
            A request that is complete when the message is in the buffer.
        """

    # -- probing before receiving ----------------------------------------------------------------------------

    def Probe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Literal[True]:
        """Wait until a message has arrived.

        Args:
            source: the sender's rank, or ANY_SOURCE.
            tag: the message's tag, or ANY_TAG.
            status: is filled with source, tag and size.

        Returns:
            True.
        """

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Check whether a message has arrived.

        Args:
            source: the sender's rank, or ANY_SOURCE.
            tag: the message's tag, or ANY_TAG.
            status: is filled with source, tag and size.

        Returns:
            Whether a message has arrived.
        """

    def Mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message:
        """Wait for a message, and take it out of the queue.

        Args:
            source: the sender's rank, or ANY_SOURCE.
            tag: the message's tag, or ANY_TAG.
            status: is filled with source, tag and size.

        Returns:
            The message. Only this object can receive it: no other task of the rank can receive it first.
        """

    def Improbe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message | None:
        """Take a message out of the queue if one has arrived.

        Args:
            source: the sender's rank, or ANY_SOURCE.
            tag: the message's tag, or ANY_TAG.
            status: is filled with source, tag and size.

        Returns:
            The message, or None.
        """

    def iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Check whether a message has arrived, like `Iprobe`.

        Args:
            source: the sender's rank, or ANY_SOURCE.
            tag: the message's tag, or ANY_TAG.
            status: is filled with source, tag and size.

        Returns:
            Whether a message has arrived.
        """

    # -- collectives of buffers ------------------------------------------------------------------------------

    def Barrier(self) -> None:
        """Wait for all ranks."""

    def Ibarrier(self) -> Request:
        """Start a barrier without waiting.

        Returns:
            A request that is complete when all ranks have called.
        """

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Send the root's buffer to all ranks.

        Args:
            buf: the send buffer on the root, the receive buffer on all other ranks.
            root: the rank that sends.
        """

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Collect all buffers at the root.

        Args:
            sendbuf: this rank's block.
            recvbuf: room for the blocks of all ranks, in rank order; needed only at the root.
            root: the rank that receives.
        """

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Collect buffers of unequal length at the root.

        Args:
            sendbuf: this rank's block.
            recvbuf: room for the blocks of all ranks, in rank order: `[array, counts]`; needed at the root.
            root: the rank that receives.
        """

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Send each rank its block of the root's buffer.

        Args:
            sendbuf: the blocks of all ranks, in rank order; needed only at the root.
            recvbuf: room for this rank's block.
            root: the rank that sends.
        """

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect all buffers at all ranks.

        Args:
            sendbuf: this rank's block.
            recvbuf: room for the blocks of all ranks, in rank order.
        """

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start an `Allgather` without waiting; return a request that is complete when all blocks have arrived."""

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect buffers of unequal length at all ranks.

        Args:
            sendbuf: this rank's block.
            recvbuf: room for the blocks of all ranks, in rank order: `[array, counts]`.
        """

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send every rank its block of every buffer.

        Args:
            sendbuf: a block for each rank.
            recvbuf: room for a block from each rank.
        """

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> None:
        """Combine all buffers at the root.

        Args:
            sendbuf: this rank's contribution, or IN_PLACE.
            recvbuf: room for the result, of the same count and type; needed only at the root.
            op: how two contributions are combined, element by element.
            root: the rank that receives.
        """

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Combine all buffers at all ranks; all get the same bits.

        Args:
            sendbuf: this rank's contribution, or IN_PLACE.
            recvbuf: room for the result, of the same count and type.
            op: how two contributions are combined, element by element.
        """

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        """Start an `Allreduce` without waiting; return a request that is complete when the result is available."""

    # -- collectives of objects ------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait for all ranks."""

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Send the root's object to all ranks.

        Args:
            obj: the object; needed only at the root.
            root: the rank that sends.

        Returns:
            A copy of the object.
        """

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Collect all objects at the root.

        Args:
            sendobj: this rank's object.
            root: the rank that receives.

        Returns:
            All objects in rank order at the root, None elsewhere.
        """

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Send each rank its object of the root's list.

        Args:
            sendobj: an object for each rank; needed only at the root.
            root: the rank that sends.

        Returns:
            This rank's object.
        """

    def allgather(self, sendobj: Any) -> list[Any]:
        """Collect all objects at all ranks.

        Args:
            sendobj: this rank's object.

        Returns:
            All objects in rank order.
        """

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Send every rank its object of every list.

        Args:
            sendobj: an object for each rank.

        Returns:
            The objects for this rank, in rank order.
        """

    def reduce(self, sendobj: Any, op: Op | Callable[[Any, Any], Any] = SUM, root: int = 0) -> Any | None:
        """Combine all objects at the root.

        Args:
            sendobj: this rank's object.
            op: how two objects are combined; any function of two.
            root: the rank that receives.

        Returns:
            The result at the root, None elsewhere.
        """

    def allreduce(self, sendobj: Any, op: Op | Callable[[Any, Any], Any] = SUM) -> Any:
        """Combine all objects at all ranks.

        Args:
            sendobj: this rank's object.
            op: how two objects are combined; any function of two.

        Returns:
            The result.
        """


class FaultTolerantComm(Comm, Protocol):
    """A communicator of a job that survives deaths: `capabilities().survives`. The method names are ULFM's."""

    def Get_failed(self) -> Group:
        """Return the group of the members known to have died."""

    def Ack_failed(self, num_to_ack: int | None = None) -> int:
        """Acknowledge the first failed members: receives from ANY_SOURCE continue without them. Return their number."""

    def Revoke(self) -> None:
        """Make every call of every member on this communicator raise `Revoked`."""

    def Is_revoked(self) -> bool:
        """Return whether the communicator was revoked."""

    def Agree(self, flag: int) -> int:
        """Return the bitwise AND of all survivors' flags."""

    def Shrink(self) -> Any:
        """Return the communicator of the survivors."""
