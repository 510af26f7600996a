"""Calls between two ranks: sends and receives of objects (lower case) and buffers (upper case), and probes.

A probe is an observation: it waits for its time and costs the call overhead. The simulation does not need the buffer
for buffered sends; it is kept because programs query it, and because a buffered send without a buffer is an error in
MPI.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Self

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG, BSEND_OVERHEAD, BUFFER_AUTOMATIC, PROC_NULL
from spawnsim.comm.failures import ERR_BUFFER, ERR_REQUEST, CallError, SpecBufferError
from spawnsim.comm.handles import INFO_NULL, Handle, Info, integer, reduced, same_kind
from spawnsim.comm.memory import flat
from spawnsim.comm.status import Status
from spawnsim.virtual.engine.completion import Completion
from spawnsim.virtual.engine.completion import Message as QueuedMessage
from spawnsim.virtual.engine.kernel import current_world
from spawnsim.virtual.engine.waiting import await_one, check_alive
from spawnsim.virtual.engine.wire import LOCAL, STANDARD, SYNCHRONOUS
from spawnsim.virtual.mpi.context import Member, receive_nothing
from spawnsim.virtual.mpi.partitioned import Partitioned
from spawnsim.virtual.mpi.payload import OPTIONS, Room, dumps, pack, target
from spawnsim.virtual.mpi.requests import Prequest, Reception, Request, fill, request_for, request_over


def attach(held: dict[Any, Any], owner: Any, buf: Any) -> None:
    """Attach a buffer for an owner: a context, or None for the program."""
    if ("buffer", owner) in held:
        raise CallError(ERR_BUFFER, "a buffer is attached already: detach it first")
    if buf is not None and buf is not BUFFER_AUTOMATIC and not flat(buf).flags.writeable:
        raise SpecBufferError("the buffer to attach is read-only: pass writable memory")
    held["buffer", owner] = BUFFER_AUTOMATIC if buf is None else buf


def detach(held: dict[Any, Any], owner: Any) -> Any:
    """Detach and return the buffer of an owner, or None."""
    return held.pop(("buffer", owner), None)


class PointToPoint(Member):
    """Sends, receives and probes. Errors name the message concerned."""

    __slots__ = ()

    # -- objects -------------------------------------------------------------------------------------------------

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._deliver(dumps(obj), dest, tag, STANDARD, operation="send")

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object; return when its receive has started."""
        self._deliver(dumps(obj), dest, tag, SYNCHRONOUS, operation="ssend")

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        return self._isend(dumps(obj), dest, tag, STANDARD, operation="isend")

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an object; the request is complete when its receive has started."""
        return self._isend(dumps(obj), dest, tag, SYNCHRONOUS, operation="issend")

    def recv(
        self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Any:
        """Receive an object. `buf` is optional; in an unmodified program it limits the object, as in mpi4py."""
        if buf is not None and OPTIONS in self._rank.attachments:
            warnings.warn("recv needs no buffer: leave out buf", UserWarning, stacklevel=2)  # as mpi4py
        # A type check instead of a conversion of each: almost all calls pass plain ints, and `integer` costs more than
        # the rest of a fast receive.
        if type(source) is not int or type(tag) is not int:
            source, tag = integer(source), integer(tag)
        if source == PROC_NULL:
            self._need()
            if status is not None:
                receive_nothing(status)
            return None
        room = None if buf is None else self._room(buf)
        message = self._accept(source, tag, "recv")
        if status is not None:
            fill(status, message.source, message.tag, message.nbytes)
        return self._taken(message, room)

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start to receive an object; in an unmodified program it must fit `buf` (`rc.irecv_bufsz`), as in mpi4py."""
        if source == PROC_NULL:
            buf = None
        return self._irecv(source, tag, "irecv", self._room(buf))

    def _room(self, buf: Any) -> Room | None:
        """Return the limit of an object: None in `main(comm)`, whose real ranks receive any size by a matched probe."""
        options = self._rank.attachments.get(OPTIONS)
        if options is None:
            return None
        return Room(options.irecv_bufsz if buf is None else buf)

    def sendrecv(
        self, sendobj: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG, status: Status | None = None,
    ) -> Any:  # fmt: skip
        """Send one object and receive another, without deadlock."""
        if type(dest) is not int or type(sendtag) is not int:
            dest, sendtag = integer(dest), integer(sendtag)
        # The send starts before the receive. Otherwise two ranks in a ring would each wait for the other (MPI: Sendrecv
        # cannot deadlock).
        transfer = self._dispatch(dumps(sendobj), dest, sendtag, STANDARD)
        received = self.recv(recvbuf, source, recvtag, status)
        # Awaited at the end: a rendezvous send is not complete before its data have left.
        if transfer is not None:
            await_one(self._world, transfer, self._waiting("sendrecv", dest, sendtag, "dest"))
        return received

    # -- buffers -------------------------------------------------------------------------------------------------

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer. Above the eager threshold it returns when its receive has started and the data have left."""
        payload, buf = pack(buf, dest)
        self._deliver(payload, dest, tag, STANDARD, operation="Send", buf=buf)

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer; return when its receive has started."""
        payload, buf = pack(buf, dest)
        self._deliver(payload, dest, tag, SYNCHRONOUS, operation="Ssend", buf=buf)

    def Rsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        payload, buf = pack(buf, dest)
        self._deliver(payload, dest, tag, LOCAL, operation="Rsend", buf=buf)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send a buffer. Its content is copied now; a change before completion causes a warning."""
        payload, buf = pack(buf, dest)
        return self._isend(payload, dest, tag, STANDARD, operation="Isend", buf=buf)

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send a buffer; the request is complete when its receive has started."""
        payload, buf = pack(buf, dest)
        return self._isend(payload, dest, tag, SYNCHRONOUS, operation="Issend", buf=buf)

    def Irsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        payload, buf = pack(buf, dest)
        return self._isend(payload, dest, tag, LOCAL, operation="Irsend", buf=buf)

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
        into = target(buf)
        message = self._accept(source, tag, "Recv")
        if status is not None:
            fill(status, message.source, message.tag, message.nbytes)
        self._taken(message, into)

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        if type(source) is not int:
            source = integer(source)
        return self._irecv(source, tag, "Irecv", target(buf, source))

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
        # Checked before the send: an invalid receive buffer must not leave an unreceived message behind.
        into = target(recvbuf, source)
        # Packed now, so that Sendrecv_replace may receive into the same memory.
        payload, sendbuf = pack(sendbuf, dest)
        transfer = self._dispatch(payload, dest, sendtag, STANDARD, buf=sendbuf)
        if source == PROC_NULL:
            self.Recv(recvbuf, source, recvtag, status)
        else:
            message = self._accept(source, recvtag, "Recv")
            if status is not None:
                fill(status, message.source, message.tag, message.nbytes)
            self._taken(message, into)
        if transfer is not None:
            await_one(self._world, transfer, self._waiting("Sendrecv", dest, sendtag, "dest"))

    def Sendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:  # fmt: skip
        # The pack in Sendrecv is the copy that this call needs: MPI forbids aliased buffers only in Sendrecv.
        self.Sendrecv(buf, dest, sendtag, buf, source, recvtag, status)

    def Isendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Request:  # fmt: skip
        dest, source = integer(dest), integer(source)
        target(recvbuf, source)
        # With one buffer for both, the receive changes it, which must not trigger the warning about sent buffers.
        payload, buf = pack(sendbuf, dest)
        watched = None if sendbuf is recvbuf else buf
        outgoing = self._isend(payload, dest, sendtag, STANDARD, operation="Isendrecv", buf=watched)
        incoming = self.Irecv(recvbuf, source, recvtag)
        return incoming.together(outgoing)

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Request:
        return self.Isendrecv(buf, dest, sendtag, buf, source, recvtag)

    # -- buffered sends: the communicator's own buffer has priority, then the program's

    def Attach_buffer(self, buf: Any) -> None:
        attach(self._rank.attachments, self._context, buf)

    def Detach_buffer(self) -> Any:
        return detach(self._rank.attachments, self._context)

    def Flush_buffer(self) -> None:
        """Return when all buffered messages have left: they leave at once."""

    def Iflush_buffer(self) -> Request:
        return request_over(self._world)

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer through the attached buffer: returns at once."""
        self._deliver(self._room_for(pack(buf, dest)[0]), dest, tag, LOCAL, operation="Bsend")

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        return self._isend(self._room_for(pack(buf, dest)[0]), dest, tag, LOCAL, operation="Ibsend")

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object through the attached buffer: returns at once."""
        self._deliver(self._room_for(dumps(obj)), dest, tag, LOCAL, operation="bsend")

    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        return self._isend(self._room_for(dumps(obj)), dest, tag, LOCAL, operation="ibsend")

    def _room_for(self, payload: Any) -> Any:
        held: dict[Any, Any] = self._rank.attachments
        # MPI: a communicator's own buffer takes precedence over the program's.
        attached = held.get(("buffer", self._context), held.get(("buffer", None)))
        nbytes = len(payload) if type(payload) is bytes else payload.nbytes
        if attached is None:
            raise CallError(ERR_BUFFER, "a buffered send without a buffer: call MPI.Attach_buffer first")
        have = math.inf if attached is BUFFER_AUTOMATIC else flat(attached).nbytes
        # The overhead counts per message, as in MPI: buffers sized without it fail on real libraries.
        if nbytes + BSEND_OVERHEAD > have:
            raise CallError(
                ERR_BUFFER,
                f"the attached buffer of {have} bytes is too small: the send needs {nbytes} + {BSEND_OVERHEAD}",
            )
        return payload

    # -- persistent requests -------------------------------------------------------------------------------------

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        return _prepared(self.Isend, buf, dest, tag)

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        return _prepared(self.Ibsend, buf, dest, tag)

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        return _prepared(self.Issend, buf, dest, tag)

    def Rsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        return _prepared(self.Irsend, buf, dest, tag)

    def Recv_init(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prequest:
        return _prepared(self.Irecv, buf, source, tag)

    def Psend_init(
        self, buf: Any, partitions: int, dest: int, tag: int = 0, info: Info = INFO_NULL
    ) -> Prequest:
        """Prepare a send in partitions, each of which leaves when `Pready` names it."""
        parts = Partitioned(self, buf, partitions, dest, tag, sends=True)
        return Prequest.prepare(parts.begin_sending, parts)

    def Precv_init(
        self, buf: Any, partitions: int, source: int = ANY_SOURCE, tag: int = ANY_TAG, info: Info = INFO_NULL
    ) -> Prequest:
        """Prepare a receive in partitions; `Parrived` returns whether one is in the buffer."""
        parts = Partitioned(self, buf, partitions, source, tag, sends=False)
        return Prequest.prepare(parts.begin_receiving, parts)

    # -- probes --------------------------------------------------------------------------------------------------

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        return self._iprobe(source, tag, status) is not None

    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        if integer(source) == PROC_NULL:
            _fill_status(status, None)
        else:
            self._probe(source, tag, status, "Probe")
        return True

    def Improbe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message | None:
        """Return a matching message that has arrived, and withhold it from other receives; or None."""
        # MPI: a matched probe of PROC_NULL returns at once with MESSAGE_NO_PROC, and never waits.
        if integer(source) == PROC_NULL:
            return Message.of_nobody()
        message = self._iprobe(source, tag, status, hold=True)
        return None if message is None else Message.hold(self, message)

    def Mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message:
        """Wait for a matching message; return it, and withhold it from other receives."""
        if integer(source) == PROC_NULL:
            _fill_status(status, None)
            return Message.of_nobody()
        return Message.hold(self, self._probe(source, tag, status, "Mprobe", hold=True))

    iprobe, probe, improbe, mprobe = Iprobe, Probe, Improbe, Mprobe

    def _iprobe(
        self, source: int, tag: int, status: Status | None, *, hold: bool = False
    ) -> QueuedMessage | None:
        """Poll once."""
        if type(source) is not int or type(tag) is not int:
            source, tag = integer(source), integer(tag)
        if source == PROC_NULL:
            # A stand-in message, so that a probe of PROC_NULL costs the same as any poll: time must advance in a loop
            # of them.
            message: QueuedMessage | None = QueuedMessage(PROC_NULL, ANY_TAG, b"", 0)
            self._world.kernel.observe()
            self._check_source(source, tag)
        else:
            message = self._visible(source, tag)
            if hold and message is not None:
                # Removed now: while this task pays for the poll, another task of its rank may poll.
                self._mailbox.remove(message)
        self._world.charge_poll()
        if message is None:
            # A dead named rank sends no more messages: a loop of polls would not end.
            if self._world.failed and source != ANY_SOURCE:
                check_alive(self._world, self._waiting("Iprobe", source, tag))
            self._world.kernel.fruitless()
        else:
            _fill_status(status, None if source == PROC_NULL else message)
        return message

    def _probe(
        self, source: int, tag: int, status: Status | None, operation: str, *, hold: bool = False
    ) -> QueuedMessage:
        """Wait for a message, however long that takes; the poll then costs the same as a single poll."""
        source, tag = integer(source), integer(tag)
        # A loop: another task of this rank may have taken the message between the wake-up and the poll.
        while (message := self._visible(source, tag)) is None:
            self._await_message(source, tag, operation)
        # Taken before the clock moves: while this task pays for its poll, another task of its rank may poll.
        if hold:
            self._mailbox.remove(message)
        self._world.charge_poll()
        _fill_status(status, message)
        return message

    def _visible(self, source: int, tag: int) -> QueuedMessage | None:
        """Return the message that is visible to the running task at its time."""
        world = self._world
        # A repeated poll costs a microsecond each time, and need not wait for all other ranks each time.
        if world.is_settled() and self._mailbox.is_settled(source, world.kernel.current.clock):
            world.kernel.run_ahead()
        else:
            world.kernel.observe()
        self._check_source(source, tag)  # checked now: it may have been revoked meanwhile
        message = self._mailbox.find(source, tag)
        return None if message is None or message.envelope_s > world.kernel.current.clock else message

    def _await_message(self, source: int, tag: int, operation: str) -> None:
        """Wait for the first message known to be on its way, or for a new send."""
        # A new completion per wait: any new message wakes it, and may arrive earlier than the known ones.
        world, watcher = self._world, Completion(self._world.kernel)
        waiting = self._waiting(operation, source, tag)
        check_alive(world, waiting)
        first_s = self._mailbox.earliest(source, tag)
        self._mailbox.watchers.append(watcher)
        watcher.waiter = task = world.kernel.current
        # A message on its way raises no event unless a receive waits for it, so the probe sets its own alarm.
        alarm = (
            None
            if first_s is None
            else world.kernel.env.at(
                max(first_s, world.kernel.env.now), self._rank.id, lambda: world.kernel.resume(task)
            )
        )
        # `finally`: a deadline or the rank's death raises out of the wait, and a remaining watcher would wake a task
        # that waits for something else.
        try:
            world.kernel.block(waiting)
        finally:
            watcher.waiter = None
            if watcher in self._mailbox.watchers:
                self._mailbox.watchers.remove(watcher)
            if alarm is not None:
                alarm.cancel()
        self._rank.advance_to(task, world.kernel.env.now)


def _prepared(start: Callable[..., Request], buf: Any, peer: int, tag: int) -> Prequest:
    peer, tag = integer(peer), integer(tag)
    # A closure over the buffer, not its content: MPI reads the buffer at each Start.
    return Prequest.prepare(lambda: start(buf, peer, tag))


NOBODY = object()


class Message(Handle):
    """A message that a matched probe has removed from the queue."""

    __slots__ = ("_message", "_owner")
    _message: QueuedMessage | None
    _owner: Member | None

    def __new__(cls, message: Message | None = None) -> Self:
        self = super().__new__(cls)
        if message is not None:
            same_kind(Message, message)
        self._identity = None if message is None else message._identity
        self._message = None if message is None else message._message
        self._owner = None if message is None else message._owner
        return self

    @classmethod
    def hold(cls, owner: Member, message: QueuedMessage) -> Self:
        """Return the handle of a message removed for `owner`."""
        self = cls.__new__(cls)
        self._identity = self._message = message
        self._owner = owner
        return self

    @classmethod
    def of_nobody(cls) -> Self:
        """Return the message that a matched probe of PROC_NULL finds: every receive of it returns nothing."""
        self = cls.__new__(cls)
        self._identity = NOBODY
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self._identity not in (None, NOBODY):
            raise ValueError("cannot pickle a message: it means something on its own rank only")
        return reduced(self, globals(), "MESSAGE_NO_PROC" if self else "MESSAGE_NULL")

    @classmethod
    def Probe(
        cls, comm: PointToPoint, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message:
        return comm.Mprobe(source, tag, status)

    @classmethod
    def Iprobe(
        cls, comm: PointToPoint, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message | None:
        return comm.Improbe(source, tag, status)

    probe, iprobe = Probe, Iprobe

    def Recv(self, buf: Any, status: Status | None = None) -> None:
        self.Irecv(buf).Wait(status)

    def recv(self, status: Status | None = None) -> Any:
        return self.irecv().wait(status)

    def Irecv(self, buf: Any) -> Request:
        return self._receive(target(buf, PROC_NULL if self._identity is NOBODY else 0))

    def irecv(self) -> Request:
        return self._receive()

    def _receive(self, into: Any = None) -> Request:
        message, owner = self._message, self._owner
        if self._identity is NOBODY:
            # All ranks share the constant: MPI keeps MESSAGE_NO_PROC usable, while a handle becomes null.
            if self is not MESSAGE_NO_PROC:
                self._identity = None
            return request_over(current_world(), receive_nothing)
        if message is None or owner is None:
            raise CallError(ERR_REQUEST, "the message is null: it was already received")
        self._identity = self._message = self._owner = None
        receive = Reception(
            owner._world.kernel, message.source, message.tag, owner._world.kernel.current.clock
        )
        receive.owner, receive.into, receive.nic = owner, into, owner._mailbox.nic
        receive.take(message)
        # A rendezvous sender waits for the match, which happens now, not when the probe found the message.
        message.meet()
        about = owner._rank.last_receive = (owner, "Mrecv", message.source, message.tag)
        owner._rank.open_receives += 1
        return request_for(owner._world, receive, about, receive.deliver, writes=into is not None)


MESSAGE_NULL = Message()
MESSAGE_NO_PROC = Message.of_nobody()


def _fill_status(status: Status | None, message: QueuedMessage | None) -> None:
    if status is not None and message is not None:
        fill(status, message.source, message.tag, message.nbytes)
    elif status is not None:
        fill(status, PROC_NULL, ANY_TAG, 0)
