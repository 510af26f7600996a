"""Point-to-point calls over a wire: the user's memory as bytes, requests, and mpi4py's send, receive and probe.

A send is complete when its memory may be reused, which never depends on the receiver's program; a synchronous send when
a receive was found. GPU tensors travel through pinned main memory (`staging`). Collectives use these requests too, and
combine several of them into one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spawnsim.comm.buffers import Buffer, as_buffer
from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG, PROC_NULL, of_mpi4py
from spawnsim.comm.failures import ERR_COMM, ERR_RANK, ERR_TAG, CallError, SpecTypeError, Truncated
from spawnsim.comm.memory import as_bytes
from spawnsim.errors import Timeout, UnsupportedError
from spawnsim.real.runtime.rank import RankComm
from spawnsim.real.runtime.requests import RealRequest, late_receive
from spawnsim.real.runtime.staging import Call, Memory, Stage, device_tensor
from spawnsim.real.runtime.wire import Bytes, InboundMessage, PostedReceive, Sent, as_payload

HOST = Memory()
BUF = ("buf",)


def outgoing(spec: Any) -> Bytes:
    """Return the bytes of a message: the user's own memory if they are contiguous, else a copy."""
    if spec is None:
        raise SpecTypeError("None is not a buffer: pass an array, a tensor or bytes")
    if device_tensor(spec) is not None:
        (spec,) = Stage(HOST, Call("Send", BUF, (spec,))).args
    return bytes_of(as_buffer(spec))


def bytes_of(buffer: Buffer) -> Bytes:
    """Return the packed bytes of a buffer: its own memory if they are contiguous, else a copy."""
    return as_bytes(buffer.array if in_a_row(buffer) else buffer.pack())


def in_a_row(buffer: Buffer) -> bool:
    """Whether a buffer's memory can be sent directly."""
    return bool(buffer.datatype and buffer.datatype.is_predefined and buffer.datatype.dense)


class ReceiveTarget:
    """Where a receive puts its data: a buffer, memory for data to come straight to, what to do with so many bytes."""

    __slots__ = ("after", "buffer", "memory")

    def __init__(self, buffer: Buffer | None, after: Callable[[int], object] | None = None) -> None:
        self.buffer, self.after = buffer, after
        self.memory = as_bytes(buffer.array) if buffer is not None and in_a_row(buffer) else None


OBJECT = ReceiveTarget(None)
"""The target of an object receive."""


def incoming(spec: Any) -> ReceiveTarget:
    """Return the target of a receive into the user's memory."""
    if device_tensor(spec) is not None:
        stage = Stage(HOST, Call("Recv", BUF, (spec,)))
        return ReceiveTarget(
            as_buffer(*stage.args), lambda nbytes: stage.end(nbytes if stage.partial else None)
        )
    return ReceiveTarget(as_buffer(spec, writable=True))


class SendRequest(RealRequest):
    """A send."""

    __slots__ = ("payload", "sent")
    sent: Sent
    payload: Any

    @classmethod
    def of(cls, runtime: Any, what: tuple[str, int, Any], sent: Sent, payload: Any) -> SendRequest:
        """Return the request of a send; it holds the payload's memory."""
        self = cls()
        self.sent, self.payload = sent, payload
        self.begin(runtime, what)
        return self

    def _try(self) -> bool:
        if self.sent.complete:
            self.payload = None
        return self.sent.complete


class ReceiveRequest(RealRequest):
    """A receive; without a buffer, it receives an object."""

    __slots__ = ("_after", "_buffer", "_cancelled", "_context", "posted")
    posted: PostedReceive
    _context: int
    _cancelled: bool
    _buffer: Buffer | None
    _after: Callable[[int], object] | None

    @classmethod
    def of(
        cls, runtime: Any, what: tuple[str, int, Any], posted: PostedReceive, where: tuple[int, ReceiveTarget]
    ) -> ReceiveRequest:
        """Return the request of an already posted receive; `where` is (context, target)."""
        self = cls()
        self.posted, self._context, self._cancelled = posted, where[0], False
        self._buffer, self._after = where[1].buffer, where[1].after
        self.begin(runtime, what)
        return self

    def _try(self) -> bool:
        message = self.posted.message
        if message is None or message.data is None:
            return False
        if self._buffer is None:
            self.value = self._runtime.pickle.loads(message.data.data)
        elif not message.direct:
            if message.nbytes > self._buffer.nbytes:
                bytes_ = f"{message.nbytes} bytes from rank {message.source}"
                raise Truncated(14, f"{self._text()}: {bytes_} do not fit a buffer of {self._buffer.nbytes}")
            self._buffer.unpack(message.data)
        if self._after is not None:
            self._after(message.nbytes)
        return True

    def _describe(self, status: Any) -> None:
        message = self.posted.message
        if message is not None:
            status.fill(message.source, message.tag, message.nbytes)
        status.Set_cancelled(self._cancelled)

    def Cancel(self) -> None:
        super().Cancel()
        if not self._complete and self._runtime.mailbox.cancel(self._context, self.posted):
            self._cancelled = self._complete = True


class CompositeRequest(RealRequest):
    """Several requests that form one call; `after` computes the result."""

    __slots__ = ("_after", "_parts")
    _parts: list[RealRequest]
    _after: Callable[[], object] | None

    @classmethod
    def of(
        cls,
        runtime: Any,
        what: tuple[str, int, Any],
        parts: list[RealRequest],
        after: Callable[[], object] | None = None,
    ) -> CompositeRequest:
        self = cls()
        self._parts, self._after = parts, after
        self.begin(runtime, what)
        return self

    def _try(self) -> bool:
        if sum(part.advance() for part in self._parts) < len(self._parts):
            return False
        for part in self._parts:
            part._take()
        if self._after is not None:
            self.value = self._after()
        return True


class PointToPoint(RankComm):
    """send, recv and their variants.

    `members`: the world ranks; `context`: a number that identifies this communicator's messages.
    """

    runtime: Any  # base.WireRuntime

    def __init__(self, runtime: Any, members: tuple[int, ...], label: str, context: int) -> None:
        super().__init__(runtime, label)
        self.members = members
        self.rank, self.size = members.index(runtime.wire.rank), len(members)
        self._context, self._freed = context, False
        self._sequence = 0  # number of collectives so far
        runtime.mailbox.open(context, members)

    def _live(self) -> None:
        if self._freed:
            raise CallError(ERR_COMM, f"{self.label} was freed: make another one")

    def _count(self) -> int:
        self._live()
        self._sequence += 1
        return self._sequence

    # ------------------------------------------------------------------------------------------------ sending
    def _start(self, data: Bytes, where: tuple[int, int], operation: str, *, held: Any = None) -> RealRequest:
        """Send bytes to (rank, tag) and return the request; `held` is kept alive until it is complete."""
        dest, tag = where
        if dest == PROC_NULL:
            return RealRequest()
        self._check(dest, tag, operation)
        synchronous = operation in ("Ssend", "Issend", "ssend", "issend")
        sent = self.runtime.mailbox.send(self._context, dest, tag, data, synchronous=synchronous)
        return SendRequest.of(self.runtime, (operation, dest, self), sent, (data, held))

    def _check(self, rank: int, tag: int, operation: str) -> None:
        if not 0 <= rank < self.size:
            text = f"rank {self.rank} of {self.label}: {operation} with rank {rank}: ranks are 0 to {self.size - 1}"
            raise CallError(ERR_RANK, text + of_mpi4py(rank))
        if tag < 0:
            raise CallError(
                ERR_TAG, f"rank {self.rank} of {self.label}: {operation} with tag {tag}: give 0 or more"
            )

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> RealRequest:
        return self._start(outgoing(buf), (dest, tag), "Isend", held=buf)

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> RealRequest:
        return self._start(outgoing(buf), (dest, tag), "Issend", held=buf)

    def isend(self, obj: Any, dest: int, tag: int = 0) -> RealRequest:
        return self._start(as_payload(self.runtime.pickle.dumps(obj)), (dest, tag), "isend")

    def issend(self, obj: Any, dest: int, tag: int = 0) -> RealRequest:
        return self._start(as_payload(self.runtime.pickle.dumps(obj)), (dest, tag), "issend")

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        self._start(outgoing(buf), (dest, tag), "Send", held=buf).Wait()

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        self._start(outgoing(buf), (dest, tag), "Ssend", held=buf).Wait()

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._start(as_payload(self.runtime.pickle.dumps(obj)), (dest, tag), "send").Wait()

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._start(as_payload(self.runtime.pickle.dumps(obj)), (dest, tag), "ssend").Wait()

    Rsend, Irsend = Send, Isend

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> RealRequest:
        copied = as_bytes(as_buffer(buf).pack()) if device_tensor(buf) is None else outgoing(buf)
        return self._start(copied, (dest, tag), "Ibsend")

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        self.Ibsend(buf, dest, tag)

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        self.isend(obj, dest, tag)

    ibsend = isend

    # ---------------------------------------------------------------------------------------------- receiving
    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> RealRequest:
        return self._receive(source, tag, "Irecv", incoming(buf))

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> RealRequest:
        return self._receive(source, tag, "irecv", OBJECT)

    def _receive(self, source: int, tag: int, operation: str, target: ReceiveTarget) -> ReceiveRequest:
        """Post a receive."""
        posted = PostedReceive(source, tag, target.memory)
        if source == PROC_NULL:
            nothing = self.runtime.pickle.dumps(None) if target is OBJECT else b""
            posted.message = InboundMessage(
                PROC_NULL, ANY_TAG, 0, data=as_payload(nothing), direct=target is not OBJECT
            )
        else:
            if source != ANY_SOURCE:
                self._check(source, max(tag, 0), operation)
            self.runtime.mailbox.post(self._context, posted)
        return ReceiveRequest.of(self.runtime, (operation, source, self), posted, (self._context, target))

    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> None:
        self._blocking(self._receive(source, tag, "Recv", incoming(buf)), status)

    def recv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        return self._blocking(self._receive(source, tag, "recv", OBJECT), status)

    def _blocking(self, request: ReceiveRequest, status: Any) -> Any:
        """Wait for a receive; close it if it exceeds its deadline, so that it takes no later message."""
        try:
            return request.wait(status)
        except Timeout:
            request.Cancel()
            if not request._cancelled:
                return request.wait(status)
            raise self._late_receive(request._what[0], request.posted.source, request.posted.tag) from None

    def _late_receive(self, operation: str, source: int, tag: int) -> Timeout:
        message = self.runtime.mailbox.peek(self._context, ANY_SOURCE, ANY_TAG)
        left = None if message is None else (message.source, message.tag)
        return late_receive(self, operation, source, tag, left=left)

    # ------------------------------------------------------------------------------------------------ probing
    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> bool:
        message = self._peek(source, tag)
        if message is not None and status is not None:
            status.fill(message.source, message.tag, message.nbytes)
        self.runtime.poll()
        return message is not None

    def _peek(self, source: int, tag: int) -> InboundMessage | None:
        if source == PROC_NULL:
            return InboundMessage(PROC_NULL, ANY_TAG, 0)
        if source != ANY_SOURCE:
            self._check(source, 0, "Probe")
        found: InboundMessage | None = self.runtime.mailbox.peek(self._context, source, tag)
        return found

    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> bool:
        runtime, limit_s = self.runtime, self.runtime.clock.limit_s()
        if not runtime.wait(lambda: self._peek(source, tag) is not None, limit_s, ("Probe", -1, self)):
            raise self._late_receive("Probe", source, tag)
        return self.Iprobe(source, tag, status)

    def Improbe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None
    ) -> MatchedMessage | None:
        posted = PostedReceive(
            source, tag, message=InboundMessage(PROC_NULL, ANY_TAG, 0, data=as_payload(b""))
        )
        if source != PROC_NULL:
            claimed = self.runtime.mailbox.claim(self._context, source, tag)
            if claimed is None:
                return None
            posted = claimed
        if status is not None and posted.message is not None:
            status.fill(posted.message.source, posted.message.tag, posted.message.nbytes)
        return MatchedMessage(self, posted)

    def Mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> MatchedMessage:
        while True:  # another thread may take what the probe has seen
            self.Probe(source, tag)
            message = self.Improbe(source, tag, status)
            if message is not None:
                return message

    iprobe, probe, improbe, mprobe = Iprobe, Probe, Improbe, Mprobe

    # ------------------------------------------------------------------------------------------- both at once
    def Sendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None,
        source: int = ANY_SOURCE, recvtag: int = ANY_TAG, status: Any = None,
    ) -> None:  # fmt: skip
        receiving = self._receive(source, recvtag, "Recv", incoming(recvbuf))
        sending = self.Isend(sendbuf, dest, sendtag)
        self._blocking(receiving, status)
        sending.Wait()

    def Sendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0,
        source: int = ANY_SOURCE, recvtag: int = ANY_TAG, status: Any = None,
    ) -> None:  # fmt: skip
        sending = self.Ibsend(buf, dest, sendtag)
        self.Recv(buf, source, recvtag, status)
        sending.Wait()


class MatchedMessage:
    """A message that was matched by a probe: only this object can receive it."""

    def __init__(self, comm: PointToPoint, posted: PostedReceive) -> None:
        self._comm, self._posted = comm, posted

    def Irecv(self, buf: Any) -> ReceiveRequest:
        return self._request("Message.Irecv", incoming(buf))

    def irecv(self) -> ReceiveRequest:
        return self._request("Message.irecv", OBJECT)

    def Recv(self, buf: Any, status: Any = None) -> None:
        self.Irecv(buf).Wait(status)

    def recv(self, status: Any = None) -> Any:
        return self.irecv().wait(status)

    def _request(self, operation: str, target: ReceiveTarget) -> ReceiveRequest:
        comm = self._comm
        what = (operation, self._posted.source, comm)
        return ReceiveRequest.of(comm.runtime, what, self._posted, (comm._context, target))


class MissingCall(UnsupportedError, AttributeError):
    """An unavailable name, for which `hasattr` returns False."""


def missing_call(comm: Any, name: str, instead: str = "") -> MissingCall:
    """Return the error for an unavailable mpi4py call, which names the alternative."""
    advice = f"use {instead}, or --backend mpi" if instead else "--backend mpi has all of mpi4py's calls"
    return MissingCall(f"{name}: not available over {comm.runtime.over}; {advice}")
