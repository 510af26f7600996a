"""Point-to-point calls: objects (lower case) and buffers (upper case), blocking and not, probes.

This room knows MPI's calls between two ranks. How messages match and travel is the business of `matching` and `wire`.
"""

from __future__ import annotations

from typing import Any

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG, PROC_NULL
from spawnsim.comm.integers import integer
from spawnsim.comm.status import Status
from spawnsim.errors import WorldError
from spawnsim.virtual.comm.context import Member
from spawnsim.virtual.comm.payload import check_target, dumps, loads, pack, receiver, unpack
from spawnsim.virtual.completion import Message, Receive, take_in
from spawnsim.virtual.requests import Request
from spawnsim.virtual.several import fill
from spawnsim.virtual.waiting import Waiting, await_one, check_alive
from spawnsim.virtual.wire import LOCAL, STANDARD, SYNCHRONOUS, Mode, Transfer, send


class Transport(Member):
    """What all the calls below are made of: one message out, one message in."""

    __slots__ = ()

    def _dispatch(self, payload: Any, dest: int, tag: int, mode: Mode) -> Transfer | None:
        """Send a payload (bytes, or anything with `nbytes`). Returns what to wait for, if anything."""
        if dest == PROC_NULL:
            self._need()
            return None
        self._check_peer(dest, tag)
        world = self._world
        if world.failed:
            check_alive(world, self._waiting("Send", dest, tag, "dest"))
        message = Message(self._me, tag, payload, len(payload) if type(payload) is bytes else payload.nbytes)
        return send(world, self._context.mailbox(self._peers[dest]), message, mode)

    def _deliver(self, payload: Any, dest: int, tag: int, mode: Mode, *, operation: str) -> None:
        """Send and wait until the program may go on."""
        if type(dest) is not int or type(tag) is not int:
            dest, tag = integer(dest), integer(tag)
        transfer = self._dispatch(payload, dest, tag, mode)
        if transfer is not None:
            await_one(self._world, transfer, self._waiting(operation, dest, tag, "dest"))

    def _post(self, source: int, tag: int, *, blocking: bool = False) -> Receive:
        """Post a receive that was checked. A wildcard is an observation."""
        kernel = self._world.kernel
        if source == ANY_SOURCE:
            kernel.observe()
        task = kernel.current
        receive = Receive(kernel, source, tag, task.clock)
        if blocking and self._world.plan is None and not self._rank.company:  # only its deadline will end it
            receive.stays_s = task.clock + task.deadline_s
        self._mailbox.post(receive)
        return receive

    def _accept(self, source: int, tag: int, operation: str) -> Message:
        """Receive one message, blocking. `source` and `tag` are plain integers."""
        if source >= 0:
            self._check_peer(source, tag if tag != ANY_TAG else 0)
            message = self._mailbox.ready(source, tag)
            if message is not None and self._take_now(message):
                return message
        else:
            self._check_source(source, tag)
        return self._accept_later(source, tag, operation)

    def _take_now(self, message: Message) -> bool:
        """Take a message whose data are on their way, without parking; False if that would pass the deadline."""
        task, mailbox, arrival_s = self._world.kernel.current, self._mailbox, message.arrival_s
        now_s = task.clock
        assert arrival_s is not None
        if (
            arrival_s + message.receive_s > now_s + task.deadline_s
        ):  # so late that its place at the card stays free
            return False
        if mailbox.card is not None:
            arrival_s = take_in(message, mailbox.card)
            if arrival_s + message.receive_s > now_s + task.deadline_s:
                return False
        mailbox.take_ready(message)
        finish_s = (arrival_s if arrival_s > now_s else now_s) + message.receive_s
        if finish_s > now_s:
            self._rank.reach(task, finish_s)
            if self._rank.company:  # its memory is exposed: what it does next must be done at its own time
                self._world.kernel.observe()
        self._rank.trace.note((task.clock, 3, message.source, message.nbytes, message.tag))
        return True

    def _accept_later(self, source: int, tag: int, operation: str) -> Message:
        """Receive one message that may have to be waited for."""
        receive = self._post(source, tag, blocking=True)
        try:
            await_one(self._world, receive, self._waiting(operation, source, tag))
        except WorldError:  # the program may go on: the receive must not swallow a later message
            self._mailbox.give_up(receive, self._world.kernel.current.clock)
            raise
        message, receive.message = receive.message, None
        assert message is not None
        self._rank.trace.note(
            (self._world.kernel.current.clock, 3, message.source, message.nbytes, message.tag)
        )
        return message

    def _waiting(self, operation: str, peer: int, tag: int, keyword: str = "source") -> Waiting:
        context = self._context
        acknowledged = context.notes.get(("acknowledged", self._rank.id), ())
        return Waiting(operation, self._label, self._peers, peer, tag, keyword, acknowledged, context)

    def _isend(self, payload: Any, dest: int, tag: int, mode: Mode, *, operation: str) -> Request:
        dest, tag = integer(dest), integer(tag)
        transfer = self._dispatch(payload, dest, tag, mode)
        if transfer is None:
            return Request.over(self._world)
        return Request.start(self._world, transfer, self._waiting(operation, dest, tag, "dest"))

    def _irecv(self, source: int, tag: int, operation: str, collect: Any) -> Request:
        """Post a receive; `collect(message)` makes the request's result."""
        source, tag = integer(source), integer(tag)
        if source == PROC_NULL:
            self._need()
            return Request.over(self._world, receive_nothing)
        self._check_source(source, tag)
        receive = self._post(source, tag)

        def deliver(status: Status) -> Any:
            message, receive.message = receive.message, None  # the mailbox may still know of the receive
            if message is None:  # cancelled
                status.Set_cancelled(True)
                return None
            fill(status, message.source, message.tag, message.nbytes)
            return collect(message, status)

        request = Request.start(self._world, receive, self._waiting(operation, source, tag), deliver)
        request._withdraw = self._withdraw
        return request

    def _withdraw(self, request: Request, now_s: float) -> None:
        receive = request._completion
        if (
            isinstance(receive, Receive)
            and not (receive.message is None and receive.finish_s is not None)  # cancelled before
            and self._mailbox.withdraw(receive, now_s)
        ):
            receive.complete(self._world.kernel.current.clock)


def receive_nothing(status: Status) -> None:
    """Write into a status what a receive from PROC_NULL gets."""
    fill(status, PROC_NULL, ANY_TAG, 0)


class Objects(Transport):
    """Calls that send pickled objects."""

    __slots__ = ()

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object."""
        self._deliver(dumps(obj), dest, tag, STANDARD, operation="send")

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object; return when its receive has started."""
        self._deliver(dumps(obj), dest, tag, SYNCHRONOUS, operation="ssend")

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object from a buffer: returns at once."""
        self._deliver(dumps(obj), dest, tag, LOCAL, operation="bsend")

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an object."""
        return self._isend(dumps(obj), dest, tag, STANDARD, operation="isend")

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an object; the request is over when its receive has started."""
        return self._isend(dumps(obj), dest, tag, SYNCHRONOUS, operation="issend")

    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an object from a buffer."""
        return self._isend(dumps(obj), dest, tag, LOCAL, operation="ibsend")

    def recv(
        self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Any:
        """Receive an object. `buf` is accepted as mpi4py accepts it, and not needed."""
        if type(source) is not int or type(tag) is not int:
            source, tag = integer(source), integer(tag)
        if source == PROC_NULL:
            self._need()
            if status is not None:
                receive_nothing(status)
            return None
        message = self._accept(source, tag, "recv")
        if status is not None:
            fill(status, message.source, message.tag, message.nbytes)
        return loads(message.payload)

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start to receive an object."""
        return self._irecv(source, tag, "irecv", lambda message, status: loads(message.payload))

    def sendrecv(
        self, sendobj: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG, status: Status | None = None,
    ) -> Any:  # fmt: skip
        """Send one object and receive another, without deadlock."""
        dest, sendtag = integer(dest), integer(sendtag)
        transfer = self._dispatch(dumps(sendobj), dest, sendtag, STANDARD)
        received = self.recv(recvbuf, source, recvtag, status)
        if transfer is not None:
            await_one(self._world, transfer, self._waiting("sendrecv", dest, sendtag, "dest"))
        return received


class Buffers(Transport):
    """Calls that send memory."""

    __slots__ = ()

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer. Above the eager threshold it returns when its receive has started and the data have left."""
        self._deliver(pack(buf, dest), dest, tag, STANDARD, operation="Send")

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer; return when its receive has started."""
        self._deliver(pack(buf, dest), dest, tag, SYNCHRONOUS, operation="Ssend")

    def Rsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer whose receive the program knows to be posted."""
        self._deliver(pack(buf, dest), dest, tag, LOCAL, operation="Rsend")

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send a buffer. Its content is taken now; it may be used again at once."""
        return self._isend(pack(buf, dest), dest, tag, STANDARD, operation="Isend")

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send a buffer; the request is over when its receive has started."""
        return self._isend(pack(buf, dest), dest, tag, SYNCHRONOUS, operation="Issend")

    def Irsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send a buffer whose receive the program knows to be posted."""
        return self._isend(pack(buf, dest), dest, tag, LOCAL, operation="Irsend")

    def Recv(
        self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> None:
        """Receive into a buffer, which must be long enough."""
        if type(source) is not int or type(tag) is not int:
            source, tag = integer(source), integer(tag)
        if source == PROC_NULL:
            self._need()
            if status is not None:
                receive_nothing(status)
            return
        check_target(buf)
        self._receive(buf, source, tag, status)

    def _receive(self, buf: Any, source: int, tag: int, status: Status | None) -> None:
        """Receive into a buffer that was checked."""
        message = self._accept(source, tag, "Recv")
        if status is not None:
            fill(status, message.source, message.tag, message.nbytes)
        unpack(buf, message.payload)

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start to receive into a buffer, which is filled when the request is collected."""
        source = integer(source)
        check_target(buf, source)
        write = receiver(buf)
        return self._irecv(source, tag, "Irecv", lambda message, status: write(message.payload))

    def Sendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG, status: Status | None = None,
    ) -> None:  # fmt: skip
        """Send one buffer and receive into another, without deadlock."""
        dest, sendtag, source, recvtag = integer(dest), integer(sendtag), integer(source), integer(recvtag)
        check_target(recvbuf, source)
        transfer = self._dispatch(pack(sendbuf, dest), dest, sendtag, STANDARD)
        if source == PROC_NULL:
            self.Recv(recvbuf, source, recvtag, status)
        else:
            self._receive(recvbuf, source, recvtag, status)
        if transfer is not None:
            await_one(self._world, transfer, self._waiting("Sendrecv", dest, sendtag, "dest"))

    def Sendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:  # fmt: skip
        """Send a buffer and receive into the same."""
        self.Sendrecv(buf, dest, sendtag, buf, source, recvtag, status)

    def Isendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Request:  # fmt: skip
        """Start to send one buffer and to receive into another."""
        dest, source = integer(dest), integer(source)
        check_target(recvbuf, source)
        outgoing = self._isend(pack(sendbuf, dest), dest, sendtag, STANDARD, operation="Isendrecv")
        incoming = self.Irecv(recvbuf, source, recvtag)
        return incoming.together(outgoing)

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Request:
        """Start to send a buffer and to receive into the same."""
        return self.Isendrecv(buf, dest, sendtag, buf, source, recvtag)
