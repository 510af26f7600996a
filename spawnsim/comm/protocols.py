"""The interface between policies and backends: what may be asked of a communicator, whatever backend implements it.

Signatures and what they promise. Names and arguments are mpi4py's; `services` has what is spawnsim's own, `operations`
what the calls hand out. Communicators carry more of mpi4py than is listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, runtime_checkable

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.comm.group import Group
from spawnsim.comm.handles import Info
from spawnsim.comm.objects import Capabilities as Capabilities
from spawnsim.comm.objects import Checkpointing, Clock, Message, Recorder, Request, Task, Windows
from spawnsim.comm.objects import Recovery as Recovery
from spawnsim.comm.ops import SUM, Op
from spawnsim.comm.status import Status
from spawnsim.random import Streams


@runtime_checkable
class Comm(Checkpointing, Protocol):
    """A communicator: mpi4py's names for all that MPI has, and spawnsim's five members.

    Buffers are what mpi4py takes: a numpy array or torch tensor, `[array, count, datatype]`, bytes. Objects are
    anything that pickle takes; each receiver gets a copy of its own. Tags are 0 to `TAG_UB`. Collectives must be called
    by all ranks of the communicator, in the same order.

    Raises (every call that communicates):
        CallError: the call cannot be made as it stands, for example with a rank that is not there.
        RankFailed: a rank that the call needs has died.
        Revoked: the communicator was revoked, or the others have gone on without this rank.
        Timeout: the call was not over within the deadline (`clock.deadline`); it names the ranks that are missing.
    """

    @property
    def clock(self) -> Clock:
        """The rank's time."""

    @property
    def rng(self) -> Streams:
        """The rank's random streams, keyed by seed, rank and purpose: `comm.rng("donors")`."""

    @property
    def record(self) -> Recorder:
        """What the rank writes down: `comm.record(loss=…)` adds a row."""

    @property
    def Win(self) -> Windows:
        """What makes windows: `comm.Win.Allocate(nbytes, comm=comm)`."""

    def compute(self, seconds: float | None = None) -> AbstractContextManager[Any]:
        """Mark a block as computing; virtual ranks' clocks advance by it, real ones measure it.

        Args:
            seconds: how long the block takes on a virtual rank, before stragglers slow it down; None: as the run's
                compute model says.

        Returns:
            A context manager for the block.

        Raises:
            ParameterError: neither `seconds` nor the run says how long the block takes.
        """

    def check(self, condition: Any, message: str = "") -> None:
        """Say what must hold whenever this line is reached: `spawnsim fuzz` and tests look for what breaks it.

        A virtual run ends with `CheckFailed`, which the program cannot catch. On real ranks a warning is recorded, and
        the job goes on.

        Args:
            condition: true if all is well; any object with a truth value.
            message: what is wrong if it is false.
        """

    def background(self, fn: Callable[[], Any]) -> Task:
        """Start work beside the rank's main program: a thread on real ranks, a co-located task on virtual ranks.

        Args:
            fn: what is called, without arguments.

        Returns:
            The work under way.
        """

    def capabilities(self) -> Capabilities:
        """Tell what this communicator can do here, and which launcher flag is missing.

        Returns:
            Facts about the backend; the same on all ranks.
        """

    def absent(self) -> dict[int, str]:
        """Tell of which ranks nothing can be expected now. A rank that computes or waits is not among them.

        Returns:
            By rank why: it has died, it has ended its program, or it does not answer (it is stopped).
        """

    def recover(self, step: int | None = None) -> Recovery:
        """Go on without the dead, after `RankFailed`, `Revoked` or `Timeout`; all survivors must call.

        Args:
            step: where this rank stands; the survivors agree on the smallest.

        Returns:
            The communicator of the survivors, who they are, and the step to go on from.

        Raises:
            Revoked: the others have gone on without this rank.
            UnsupportedError: jobs of this backend end with the first death.
        """

    @property
    def rank(self) -> int:
        """The caller's rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def Get_rank(self) -> int:
        """Tell the caller's rank.

        Returns:
            0 to size - 1.
        """

    def Get_size(self) -> int:
        """Count the ranks.

        Returns:
            At least 1.
        """

    def Get_group(self) -> Group:
        """Tell which processes the ranks are.

        Returns:
            The group, in the order of the ranks.
        """

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Divide the communicator; collective.

        Args:
            color: ranks of one colour come together; UNDEFINED: this rank joins none.
            key: the order of the ranks; ties go by the old rank.

        Returns:
            The communicator of this rank's colour, or COMM_NULL.
        """

    def Dup(self, info: Info | None = None) -> Any:
        """Make a communicator of the same ranks with its own messages; collective.

        Args:
            info: hints.

        Returns:
            The new communicator.
        """

    def Create_group(self, group: Group, tag: int = 0) -> Any:
        """Make the communicator of a group; its members alone take part.

        Args:
            group: some of this communicator's processes.
            tag: tells apart calls that are under way together.

        Returns:
            The new communicator.
        """

    def Free(self) -> None:
        """Give up the communicator."""

    def Abort(self, errorcode: int = 0) -> Any:
        """End the whole run.

        Args:
            errorcode: its exit status.

        Returns:
            Nothing: it does not return.
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
            buf: room for the message, at least as long.
            source: the sender's rank, or ANY_SOURCE.
            tag: the message's tag, or ANY_TAG.
            status: is filled with source, tag and size.

        Raises:
            Truncated: the message is longer than the buffer.
        """

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Send a buffer without waiting.

        Args:
            buf: the data to send. Leave it alone until the request is over.
            dest: the receiver's rank, or PROC_NULL.
            tag: what the receiver asks for.

        Returns:
            A request that is over when the buffer may be used again.
        """

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Receive a buffer without waiting.

        Args:
            buf: room for the message; leave it alone until the request is over.
            source: the sender's rank, or ANY_SOURCE.
            tag: the message's tag, or ANY_TAG.

        Returns:
            A request that is over when the message is in the buffer.
        """

    # -- looking before receiving ----------------------------------------------------------------------------

    def Probe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Literal[True]:
        """Wait until a message is there.

        Args:
            source: the sender's rank, or ANY_SOURCE.
            tag: the message's tag, or ANY_TAG.
            status: is filled with source, tag and size.

        Returns:
            True.
        """

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Look whether a message is there.

        Args:
            source: the sender's rank, or ANY_SOURCE.
            tag: the message's tag, or ANY_TAG.
            status: is filled with source, tag and size.

        Returns:
            Whether one is.
        """

    def Mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message:
        """Wait for a message, and take it out of the queue.

        Args:
            source: the sender's rank, or ANY_SOURCE.
            tag: the message's tag, or ANY_TAG.
            status: is filled with source, tag and size.

        Returns:
            The message, which this object alone can receive: no other task of the rank gets it first.
        """

    def Improbe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message | None:
        """Take a message out of the queue if one is there.

        Args:
            source: the sender's rank, or ANY_SOURCE.
            tag: the message's tag, or ANY_TAG.
            status: is filled with source, tag and size.

        Returns:
            The message, or None.
        """

    def iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Do the same as `Iprobe`.

        Args:
            source: the sender's rank, or ANY_SOURCE.
            tag: the message's tag, or ANY_TAG.
            status: is filled with source, tag and size.

        Returns:
            Whether a message is there.
        """

    # -- collectives of buffers ------------------------------------------------------------------------------

    def Barrier(self) -> None:
        """Wait for all."""

    def Ibarrier(self) -> Request:
        """Wait for all, later.

        Returns:
            A request that is over when all ranks have called.
        """

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Give the root's buffer to all.

        Args:
            buf: what the root sends and the others receive.
            root: the rank that sends.
        """

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Collect all buffers at the root.

        Args:
            sendbuf: this rank's block.
            recvbuf: room for the blocks of all ranks, in rank order; needed at the root alone.
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
        """Give each rank its block of the root's buffer.

        Args:
            sendbuf: the blocks of all ranks, in rank order; needed at the root alone.
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
        """Do as `Allgather` without waiting; return a request that is over when all blocks are there."""

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Collect buffers of unequal length at all ranks.

        Args:
            sendbuf: this rank's block.
            recvbuf: room for the blocks of all ranks, in rank order: `[array, counts]`.
        """

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Give every rank its block of every buffer.

        Args:
            sendbuf: a block for each rank.
            recvbuf: room for a block from each rank.
        """

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> None:
        """Combine all buffers at the root.

        Args:
            sendbuf: this rank's contribution, or IN_PLACE.
            recvbuf: room for the result, of the same count and type; needed at the root alone.
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
        """Do as `Allreduce` without waiting; return a request that is over when the result is there."""

    # -- collectives of objects ------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait for all."""

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Give the root's object to all.

        Args:
            obj: the object; needed at the root alone.
            root: the rank that sends.

        Returns:
            A copy of it.
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
        """Give each rank its object of the root's list.

        Args:
            sendobj: an object for each rank; needed at the root alone.
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
        """Give every rank its object of every list.

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
    """A communicator of a job that goes on when ranks die: `capabilities().survives`. The names are those of ULFM."""

    def Get_failed(self) -> Group:
        """Return the group of the members known to have died."""

    def Ack_failed(self, num_to_ack: int | None = None) -> int:
        """Acknowledge the first of these: receives from ANY_SOURCE go on without them. Return how many are."""

    def Revoke(self) -> None:
        """Make every call of every member on this communicator end in `Revoked`."""

    def Is_revoked(self) -> bool:
        """Return whether the communicator was revoked."""

    def Agree(self, flag: int) -> int:
        """Return the bitwise and of all survivors' flags."""

    def Shrink(self) -> Any:
        """Return the communicator of the survivors."""
