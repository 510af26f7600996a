"""Point-to-point calls over the wire, under mpi4py's names.

Knows the mailbox and its requests. Sends are complete when their memory is free, which never needs the receiver's
program; synchronous ones when a receive was found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG, PROC_NULL
from spawnsim.comm.failures import ERR_RANK, ERR_TAG, CallError
from spawnsim.comm.memory import as_bytes
from spawnsim.errors import Timeout
from spawnsim.real.rank.pending import Pending
from spawnsim.real.rank.staging import far
from spawnsim.real.torch.mailbox import Letter, Slot, as_payload
from spawnsim.real.torch.memory import OBJECT, Target, incoming, outgoing
from spawnsim.real.torch.requests import Incoming, Outgoing
from spawnsim.real.torch.wire import Bytes

if TYPE_CHECKING:
    from spawnsim.real.torch.home import Home


class PointToPoint:
    """send, recv and their kin."""

    _home: Home
    _context: int
    label: str
    rank: int
    size: int

    # ------------------------------------------------------------------------------------------------ sending
    def _start(self, data: Bytes, where: tuple[int, int], operation: str, *, held: Any = None) -> Pending:
        """Send bytes to (rank, tag) and return the request; `held` is kept alive until it is complete."""
        dest, tag = where
        if dest == PROC_NULL:
            return Pending()
        self._check(dest, tag, operation)
        synchronous = operation in ("Ssend", "Issend", "ssend", "issend")
        sent = self._home.mailbox.send(self._context, dest, tag, data, synchronous=synchronous)
        return Outgoing.of(self._home, (operation, dest, self), sent, (data, held))

    def _check(self, rank: int, tag: int, operation: str) -> None:
        if not 0 <= rank < self.size:
            text = f"rank {self.rank} of {self.label}: {operation} with rank {rank}: ranks are 0 to {self.size - 1}"
            raise CallError(ERR_RANK, text)
        if tag < 0:
            raise CallError(
                ERR_TAG, f"rank {self.rank} of {self.label}: {operation} with tag {tag}: give 0 or more"
            )

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Pending:
        return self._start(outgoing(buf), (dest, tag), "Isend", held=buf)

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Pending:
        return self._start(outgoing(buf), (dest, tag), "Issend", held=buf)

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Pending:
        return self._start(as_payload(self._home.pickle.dumps(obj)), (dest, tag), "isend")

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Pending:
        return self._start(as_payload(self._home.pickle.dumps(obj)), (dest, tag), "issend")

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        self._start(outgoing(buf), (dest, tag), "Send", held=buf).Wait()

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        self._start(outgoing(buf), (dest, tag), "Ssend", held=buf).Wait()

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._start(as_payload(self._home.pickle.dumps(obj)), (dest, tag), "send").Wait()

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._start(as_payload(self._home.pickle.dumps(obj)), (dest, tag), "ssend").Wait()

    Rsend, Irsend = Send, Isend

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Pending:
        copied = as_bytes(as_buffer(buf).pack()) if far(buf) is None else outgoing(buf)
        return self._start(copied, (dest, tag), "Ibsend")

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        self.Ibsend(buf, dest, tag)

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        self.isend(obj, dest, tag)

    ibsend = isend

    # ---------------------------------------------------------------------------------------------- receiving
    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Pending:
        return self._receive(source, tag, "Irecv", incoming(buf))

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Pending:
        return self._receive(source, tag, "irecv", OBJECT)

    def _receive(self, source: int, tag: int, operation: str, target: Target) -> Incoming:
        """Post a receive."""
        slot = Slot(source, tag, target.memory)
        if source == PROC_NULL:
            nothing = self._home.pickle.dumps(None) if target is OBJECT else b""
            slot.letter = Letter(PROC_NULL, ANY_TAG, 0, data=as_payload(nothing), direct=target is not OBJECT)
        else:
            if source != ANY_SOURCE:
                self._check(source, max(tag, 0), operation)
            self._home.mailbox.post(self._context, slot)
        return Incoming.of(self._home, (operation, source, self), slot, (self._context, target))

    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> None:
        self._blocking(self._receive(source, tag, "Recv", incoming(buf)), status)

    def recv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        return self._blocking(self._receive(source, tag, "recv", OBJECT), status)

    def _blocking(self, request: Incoming, status: Any) -> Any:
        """Wait for a receive; one that meets its deadline is closed, so that it takes no later message."""
        try:
            return request.wait(status)
        except Timeout as late:
            request.Cancel()
            if not request._cancelled:
                return request.wait(status)
            operation = request._what[0]
            raise Timeout(late.ranks, operation, -1, f"{late}".split("; the request")[0]) from None

    # ------------------------------------------------------------------------------------------------ probing
    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> bool:
        letter = self._look(source, tag)
        if letter is not None and status is not None:
            status.fill(letter.source, letter.tag, letter.nbytes)
        self._home.poll()
        return letter is not None

    def _look(self, source: int, tag: int) -> Letter | None:
        if source == PROC_NULL:
            return Letter(PROC_NULL, ANY_TAG, 0)
        if source != ANY_SOURCE:
            self._check(source, 0, "Probe")
        return self._home.mailbox.peek(self._context, source, tag)

    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> bool:
        home, limit_s = self._home, self._home.clock.limit_s()
        if not home.wait(lambda: self._look(source, tag) is not None, limit_s, ("Probe", -1, self)):
            who = f"rank {source}" if source >= 0 else "any rank"
            text = f"rank {self.rank} of {self.label}: Probe of {who} met its deadline of {limit_s:g} s"
            raise Timeout([source] if source >= 0 else [], "Probe", -1, f"{text} at {home.clock.now():.3f} s")
        return self.Iprobe(source, tag, status)

    def Improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Message | None:
        slot = Slot(source, tag, letter=Letter(PROC_NULL, ANY_TAG, 0, data=as_payload(b"")))
        if source != PROC_NULL:
            claimed = self._home.mailbox.claim(self._context, source, tag)
            if claimed is None:
                return None
            slot = claimed
        if status is not None and slot.letter is not None:
            status.fill(slot.letter.source, slot.letter.tag, slot.letter.nbytes)
        return Message(self, slot)

    def Mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Message:
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

    def sendrecv(
        self, sendobj: Any, dest: int, sendtag: int = 0, recvbuf: Any = None,
        source: int = ANY_SOURCE, recvtag: int = ANY_TAG, status: Any = None,
    ) -> Any:  # fmt: skip
        sending = self.isend(sendobj, dest, sendtag)
        received = self.recv(recvbuf, source, recvtag, status)
        sending.Wait()
        return received


class Message:
    """A message that was matched by a probe: this rank's alone."""

    def __init__(self, comm: PointToPoint, slot: Slot) -> None:
        self._comm, self._slot = comm, slot

    def Irecv(self, buf: Any) -> Incoming:
        """Receive it into a buffer."""
        return self._request("Message.Irecv", incoming(buf))

    def irecv(self) -> Incoming:
        """Receive it as an object."""
        return self._request("Message.irecv", OBJECT)

    def Recv(self, buf: Any, status: Any = None) -> None:
        """Receive it into a buffer."""
        self.Irecv(buf).Wait(status)

    def recv(self, status: Any = None) -> Any:
        """Receive it as an object."""
        return self.irecv().wait(status)

    def _request(self, operation: str, target: Target) -> Incoming:
        comm = self._comm
        what = (operation, self._slot.source, comm)
        return Incoming.of(comm._home, what, self._slot, (comm._context, target))
