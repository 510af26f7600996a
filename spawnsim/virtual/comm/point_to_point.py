"""Point-to-point calls: objects (lower case) and buffers (upper case), blocking and not, probes.

This room knows MPI's calls between two ranks. What they are made of is in `transport`.
"""

from __future__ import annotations

from typing import Any

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG, PROC_NULL
from spawnsim.comm.failures import Truncated
from spawnsim.comm.integers import integer
from spawnsim.comm.status import Status
from spawnsim.virtual.comm.payload import check_target, dumps, kept, loads, pack, receiver, unpack
from spawnsim.virtual.comm.transport import Transport, receive_nothing
from spawnsim.virtual.engine.wire import LOCAL, STANDARD, SYNCHRONOUS
from spawnsim.virtual.requests import Request
from spawnsim.virtual.several import fill
from spawnsim.virtual.waiting import await_one


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
        try:
            return loads(message.payload)
        except Exception as error:  # noqa: BLE001 - whatever a pickle raises
            raise self._unfit(error, message) from None

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start to receive an object."""
        return self._irecv(source, tag, "irecv", loads)

    def sendrecv(
        self, sendobj: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG, status: Status | None = None,
    ) -> Any:  # fmt: skip
        """Send one object and receive another, without deadlock."""
        if type(dest) is not int or type(sendtag) is not int:
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
        self._deliver(pack(buf, dest), dest, tag, STANDARD, operation="Send", buf=buf)

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer; return when its receive has started."""
        self._deliver(pack(buf, dest), dest, tag, SYNCHRONOUS, operation="Ssend", buf=buf)

    def Rsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer whose receive the program knows to be posted."""
        self._deliver(pack(buf, dest), dest, tag, LOCAL, operation="Rsend", buf=buf)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send a buffer. Its content is taken now; a program that changes it before the end is warned."""
        return self._isend(pack(buf, dest), dest, tag, STANDARD, operation="Isend", buf=buf)

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send a buffer; the request is over when its receive has started."""
        return self._isend(pack(buf, dest), dest, tag, SYNCHRONOUS, operation="Issend", buf=buf)

    def Irsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send a buffer whose receive the program knows to be posted."""
        return self._isend(pack(buf, dest), dest, tag, LOCAL, operation="Irsend", buf=buf)

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
        try:
            unpack(buf, message.payload)
        except Truncated as error:
            raise self._unfit(error, message) from None
        if message.dtype is not None:
            self._check_type(kept(buf), message)

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start to receive into a buffer, which is filled when the request is collected."""
        if type(source) is not int:
            source = integer(source)
        check_target(buf, source)
        buf = kept(buf)
        return self._irecv(source, tag, "Irecv", receiver(buf), buf=buf)

    def Sendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG, status: Status | None = None,
    ) -> None:  # fmt: skip
        """Send one buffer and receive into another, without deadlock."""
        if not type(dest) is type(sendtag) is type(source) is type(recvtag) is int:
            dest, sendtag, source, recvtag = (
                integer(dest),
                integer(sendtag),
                integer(source),
                integer(recvtag),
            )
        check_target(recvbuf, source)
        transfer = self._dispatch(pack(sendbuf, dest), dest, sendtag, STANDARD, buf=sendbuf)
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
        watched = None if sendbuf is recvbuf else sendbuf
        outgoing = self._isend(
            pack(sendbuf, dest), dest, sendtag, STANDARD, operation="Isendrecv", buf=watched
        )
        incoming = self.Irecv(recvbuf, source, recvtag)
        return incoming.together(outgoing)

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Request:
        """Start to send a buffer and to receive into the same."""
        return self.Isendrecv(buf, dest, sendtag, buf, source, recvtag)
