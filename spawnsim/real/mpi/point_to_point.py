"""Point-to-point calls on MPI and their requests: blocking calls are non-blocking ones with a deadline.

The raw request holds the buffer, and the registry holds the raw request. With both MPIs, a dropped `Isend` handle
silently corrupts messages; here no request is dropped before it is complete. Object receives find their messages by
matched probes, so an object may have any size (mpi4py's own `irecv` is limited to 32 KiB). Open object receives are
kept in a list, and later receives let them match first, as MPI's matching order requires.
"""

from __future__ import annotations

from contextlib import suppress
from threading import RLock
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.comm.memory import as_bytes
from spawnsim.errors import RankFailed, Revoked, Timeout
from spawnsim.real.mpi import translation
from spawnsim.real.mpi.runtime import CommCore, MPIRuntime
from spawnsim.real.mpi.translation import failure, rank_back
from spawnsim.real.runtime.requests import RealRequest, late_receive

if TYPE_CHECKING:
    from spawnsim.real.runtime.staging import Stage


class MPIRequest(RealRequest):
    """A request: mpi4py's methods, with deadlines.

    Attributes:
        buffers: the buffers, kept until the request is complete. For non-blocking reductions, mpi4py 4.1 does not keep
            them.
    """

    __slots__ = ("_raw", "_stage", "_status", "buffers")
    _raw: MPI.Request
    _status: MPI.Status
    _stage: Stage | None
    buffers: Any

    @classmethod
    def of(
        cls, raw: MPI.Request, runtime: MPIRuntime, what: tuple[str, int, Any], stage: Stage | None = None
    ) -> MPIRequest:
        """Return the request over an mpi4py request; `what` is (operation, peer or -1, communicator).

        `stage`: the stage of GPU tensors among the buffers, which receive their data when the request is complete.
        """
        self = cls()
        self._raw, self._status, self._stage, self.buffers = raw, MPI.Status(), stage, None
        self.begin(runtime, what)
        return self

    def _try(self) -> bool:
        try:
            done = self._raw.Test(self._status)
        except MPI.Exception as error:
            raise failure(error, self._what[2]._raw, self._text(), self._what[1]) from None
        if done and self._stage is not None:
            copy_to_gpu(self._stage, self._status)
        if done and not self._persistent:
            self._stage = self.buffers = None
        return done

    def _describe(self, status: Any) -> None:
        fill_status(status, self._status)

    def Cancel(self) -> None:
        super().Cancel()
        if not self._complete:
            self._raw.Cancel()


class MPIPersistent(MPIRequest):
    """A persistent or partitioned request: inactive until started, never null until freed.

    `sent`: the bytes that each start sends or contributes; None for a receive.
    """

    __slots__ = ("sent",)
    sent: int | None

    @classmethod
    def of(
        cls, raw: MPI.Request, runtime: MPIRuntime, what: tuple[str, int, Any], stage: Stage | None = None
    ) -> MPIRequest:
        self = cls()
        self._raw, self._status, self._persistent, self._stage = raw, MPI.Status(), True, stage
        self.sent = self.buffers = None
        self._runtime, self._what = runtime, what
        return self

    def Start(self) -> None:
        """Start the operation again."""
        if self._stage is not None:
            self._stage.begin()
        if self.sent is None:
            self._runtime.counters.received += 1
        else:
            self._runtime.counters.part(self.sent)
        self._raw.Start()  # type: ignore[attr-defined]
        self.begin(self._runtime, self._what)

    @classmethod
    def Startall(cls, requests: list[MPIPersistent]) -> None:
        for request in requests:
            request.Start()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("P"):  # Pready, Pready_range, Pready_list, Parrived
            return getattr(self._raw, name)
        raise AttributeError(name)

    def Free(self) -> None:
        super().Free()
        self._raw.Free()


def wrap_request(
    raw: MPI.Request, runtime: MPIRuntime, what: tuple[str, int, Any], stage: Stage | None = None
) -> MPIRequest:
    """Return the request over an mpi4py request of any kind."""
    return (MPIPersistent if isinstance(raw, MPI.Prequest) else MPIRequest).of(raw, runtime, what, stage)


def copy_to_gpu(stage: Stage | None, status: MPI.Status) -> None:
    """Copy received data to the GPU tensors of a complete call; copy nothing if the call was cancelled."""
    if stage is not None and not status.Is_cancelled():
        stage.end(status.Get_count(MPI.BYTE) if stage.partial else None)


def fill_status(status: Any, raw: MPI.Status) -> None:
    """Copy the status of a receive into the caller's status, spawnsim's or mpi4py's."""
    if status is None:
        return
    source, tag, nbytes = raw.Get_source(), raw.Get_tag(), raw.Get_count(MPI.BYTE)
    if isinstance(status, MPI.Status):
        status.Set_source(source)
        status.Set_tag(tag)
        status.Set_elements(MPI.BYTE, nbytes)
    else:
        status.fill(rank_back(source), tag, nbytes)
    status.Set_cancelled(raw.Is_cancelled())


def take_object(message: MPI.Message, status: MPI.Status) -> Any:
    """Receive a matched message and return the unpickled object; None from PROC_NULL."""
    if message == MPI.MESSAGE_NO_PROC:
        return None
    nbytes = bytearray(status.Get_count(MPI.BYTE))
    try:
        message.Recv([nbytes, MPI.BYTE])
    except MPI.Exception as error:
        source = status.Get_source()
        raise failure(error, None, f"receive of an object from rank {source}", source) from None
    return MPI.pickle.loads(nbytes)


class PostedReceive(MPIRequest):
    """An open object receive: completes by probing, in posting order."""

    __slots__ = ("message", "pattern")
    pattern: tuple[int, int]
    message: MPI.Message | None

    def _try(self) -> bool:
        comm = self._what[2]
        with comm._matching:
            if self.message is None:
                comm._serve_posted()
            message = self.message
        if message is not None:
            self.value = take_object(message, self._status)
        return message is not None

    def takes(self, status: MPI.Status) -> bool:
        source, tag = self.pattern
        return source in (MPI.ANY_SOURCE, status.Get_source()) and tag in (MPI.ANY_TAG, status.Get_tag())

    def Cancel(self) -> None:
        self._refuse_null("Cancel")
        comm = self._what[2]
        with comm._matching:
            if self in comm._posted:
                comm._posted.remove(self)
                self._status.Set_cancelled(True)
                self._complete = True


def post_receive(runtime: MPIRuntime, what: tuple[str, int, Any], pattern: tuple[int, int]) -> PostedReceive:
    """Return a new open object receive."""
    request = PostedReceive()
    request.pattern, request.message = pattern, None
    request._raw, request._status = MPI.REQUEST_NULL, MPI.Status()
    request.begin(runtime, what)
    return request


class PointToPoint(CommCore):
    """send, recv and their variants, and the matching of messages with receives."""

    def _open_matching(self) -> None:
        self._posted: list[PostedReceive] = []
        self._matching = RLock()
        self.runtime.comms = [*(other for other in self.runtime.comms if other._raw), self]

    # MPI matches a message with the first posted receive that accepts it. An object receive is posted here and not in
    # the library, since its size is unknown until its message arrives: it is kept in `_posted`, and finds its message
    # by `Improbe`. So code that takes a message out of the library, or probes for one, must first serve receives that
    # were posted earlier. `_matching` makes the probe and the hand-over one step, as any thread may complete a request.
    # It is re-entrant, since a completion may happen inside another probe.

    def _find(self, pattern: tuple[int, int], status: MPI.Status) -> MPI.Message | None:
        """Return the next message for a receive that starts now; earlier open receives get their messages first."""
        if not self._posted:
            return self._improbe(pattern, status)
        with self._matching:
            while (found := self._improbe(pattern, status)) is not None:
                self._serve_posted()
                earlier = next((waiting for waiting in self._posted if waiting.takes(status)), None)
                if earlier is None:
                    return found
                self._give(earlier, found, status)
        return None

    def _improbe(self, pattern: tuple[int, int], status: MPI.Status) -> MPI.Message | None:
        try:
            return self._raw.Improbe(*pattern, status)
        except MPI.Exception as error:
            raise self._error(error, "receive") from None

    def _serve_posted(self) -> None:
        """Give every open object receive its message, in the order in which they were posted."""
        status = MPI.Status()
        for waiting in list(self._posted):
            found = self._improbe(waiting.pattern, status)
            if found is not None:
                self._give(waiting, found, status)

    def _give(self, waiting: PostedReceive, message: Any, status: MPI.Status) -> None:
        waiting.message = message
        waiting._status = MPI.Status(status)
        self._posted.remove(waiting)
        counters = self.runtime.counters
        counters.received += 1
        counters.nbytes += status.Get_count(MPI.BYTE)

    def _receive(self, source: int, tag: int, status: Any, operation: str) -> tuple[MPI.Message, MPI.Status]:
        """Return the matched message of a blocking receive, and its status."""
        pattern, found = (translation.source(source), translation.tag(tag)), MPI.Status()
        message = self._find(pattern, found)
        if message is None:
            message = self._await(pattern, found, (operation, source, tag))
        fill_status(status, found)
        counters = self.runtime.counters
        counters.received += 1
        if operation == "recv":
            counters.nbytes += found.Get_count(MPI.BYTE)
        return message, found

    def _await(self, pattern: tuple[int, int], found: MPI.Status, what: tuple[str, int, int]) -> Any:
        runtime, got = self.runtime, []

        def poll() -> bool:
            message = self._find(pattern, found)
            if message is not None:
                got.append(message)
            return message is not None

        limit_s = runtime.clock.limit_s()
        if not runtime.wait(poll, limit_s, (what[0], -1, self), what[1]):
            raise self._late_receive(*what)
        return got[0]

    def _late_receive(self, operation: str, source: int, tag: int) -> Timeout:
        status, left = MPI.Status(), None
        with suppress(MPI.Exception):  # a rank that may have sent is dead
            if self._raw.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                left = status.Get_source(), status.Get_tag()
        return late_receive(self, operation, source, tag, left=left)

    # ------------------------------------------------------------------------------------------------ sending
    def _send(self, raw: MPI.Request, operation: str, dest: int) -> None:
        """Complete a send that was just started."""
        runtime = self.runtime
        try:
            if not raw.Test() and not runtime.wait(
                raw.Test, runtime.clock.limit_s(), (operation, -1, self), dest
            ):
                MPIRequest.of(raw, runtime, (operation, dest, self))  # the registry keeps the buffer
                when = runtime.clock.met(runtime.clock.limit_s())
                text = f"rank {self.rank} of {self.label}: {operation} to rank {dest} {when}"
                raise Timeout([dest], operation, -1, text)
        except MPI.Exception as error:
            raise self._error(error, f"{operation} to {dest}", dest) from None
        except (Revoked, RankFailed):
            runtime.survival.kept.append(raw)
            raise
        runtime.poll()

    def _start(self, name: str, buf: Any, dest: int, tag: int) -> MPI.Request:
        self.runtime.counters.sent(name, buf)
        translate = self.runtime.translate
        if translate.devices and name[0] == "I" and (stage := translate.stage(self._raw, name, (buf,))):
            buf = stage.args[0]
        try:
            request: MPI.Request = getattr(self._raw, name)(
                buf, translation.peer(dest) if dest < 0 else dest, tag
            )
        except MPI.Exception as error:
            raise self._error(error, f"{name} to {dest}, tag {tag}") from None
        return request

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        self._send(self._start("Isend", self.runtime.translate(buf), dest, tag), "Send", dest)

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        self._send(self._start("Issend", self.runtime.translate(buf), dest, tag), "Ssend", dest)

    Rsend = Send

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._send(self._start("isend", obj, dest, tag), "send", dest)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._send(self._start("issend", obj, dest, tag), "ssend", dest)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> MPIRequest:
        return self._kept(self._start("Isend", self.runtime.translate(buf), dest, tag), "Isend", dest)

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> MPIRequest:
        return self._kept(self._start("Issend", self.runtime.translate(buf), dest, tag), "Issend", dest)

    Irsend = Isend

    def isend(self, obj: Any, dest: int, tag: int = 0) -> MPIRequest:
        return self._kept(self._start("isend", obj, dest, tag), "isend", dest)

    def issend(self, obj: Any, dest: int, tag: int = 0) -> MPIRequest:
        return self._kept(self._start("issend", obj, dest, tag), "issend", dest)

    def _kept(self, raw: MPI.Request, operation: str, peer: int, stage: Stage | None = None) -> MPIRequest:
        request = MPIRequest.of(raw, self.runtime, (operation, peer, self), stage)
        self.runtime.poll()
        return request

    # ---------------------------------------------------------------------------------------------- receiving
    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> None:
        runtime = self.runtime
        buf = runtime.translate(buf)
        stage = runtime.translate.stage(self._raw, "Recv", (buf,)) if runtime.translate.devices else None
        if stage is not None:
            buf = stage.args[0]
        if self._posted:
            message, found = self._receive(source, tag, status, "Recv")
            message.Recv(buf)
            copy_to_gpu(stage, found)
            return
        raw = self._start_receive(buf, source, tag)
        found = MPI.Status()

        def done() -> bool:
            return raw.Test(found)

        try:
            if not runtime.wait(done, runtime.clock.limit_s(), ("Recv", -1, self), source):
                self._give_up(raw, found, source, tag)
        except MPI.Exception as error:
            raise self._error(error, f"Recv from {source}", source) from None
        except (Revoked, RankFailed):
            raw.Cancel()
            runtime.survival.kept.append((raw, buf))
            raise
        if stage is not None:
            copy_to_gpu(stage, found)
        fill_status(status, found)

    def _give_up(self, raw: MPI.Request, found: MPI.Status, source: int, tag: int) -> None:
        raw.Cancel()
        raw.Wait(found)
        if found.Is_cancelled():
            raise self._late_receive("Recv", source, tag)

    def _start_receive(self, buf: Any, source: int, tag: int) -> MPI.Request:
        self.runtime.counters.received += 1
        try:
            return self._raw.Irecv(buf, translation.source(source), translation.tag(tag))
        except MPI.Exception as error:
            raise self._error(error, f"receive from {source}, tag {tag}") from None

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> MPIRequest:
        runtime = self.runtime
        buf = runtime.translate(buf)
        stage = runtime.translate.stage(self._raw, "Irecv", (buf,)) if runtime.translate.devices else None
        raw = self._start_receive(buf if stage is None else stage.args[0], source, tag)
        return self._kept(raw, "Irecv", source, stage)

    def recv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        return take_object(*self._receive(source, tag, status, "recv"))

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> MPIRequest:
        pattern = translation.source(source), translation.tag(tag)
        with self._matching:
            request = post_receive(self.runtime, ("irecv", source, self), pattern)
            if pattern[0] == MPI.PROC_NULL:
                request.message = MPI.MESSAGE_NO_PROC
            else:
                self._posted.append(request)
        return request

    # ------------------------------------------------------------------------------------------------ probing
    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> bool:
        found = MPI.Status()
        if self._posted:
            with self._matching:
                self._serve_posted()
        try:
            there = self._raw.Iprobe(translation.source(source), translation.tag(tag), found)
        except MPI.Exception as error:
            raise self._error(error, f"probe of {source}") from None
        if there:
            fill_status(status, found)
        if self.runtime.registry:
            self.runtime.registry.sweep()
        return there

    iprobe = Iprobe

    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> bool:
        runtime = self.runtime
        limit_s = runtime.clock.limit_s()
        if not runtime.wait(lambda: self.Iprobe(source, tag, status), limit_s, ("Probe", -1, self), source):
            raise self._late_receive("Probe", source, tag)
        return True

    probe = Probe

    def Improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        return self._matched("Improbe", source, tag, status)

    def improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        return self._matched("improbe", source, tag, status)

    def _matched(self, name: str, source: int, tag: int, status: Any) -> Any:
        found = MPI.Status()
        if self._posted:
            with self._matching:
                self._serve_posted()
        try:
            message = getattr(self._raw, name)(translation.source(source), translation.tag(tag), found)
        except MPI.Exception as error:
            raise self._error(error, f"probe of {source}") from None
        if message is not None:
            fill_status(status, found)
        return message

    def Mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        self.Probe(source, tag)
        return self._matched("Improbe", source, tag, status)

    def mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        self.Probe(source, tag)
        return self._matched("improbe", source, tag, status)

    # ------------------------------------------------------------------------------------------- both at once
    def Sendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None,
        source: int = ANY_SOURCE, recvtag: int = ANY_TAG, status: Any = None,
    ) -> None:  # fmt: skip
        incoming = self.Irecv(recvbuf, source, recvtag)
        outgoing = self.Isend(sendbuf, dest, sendtag)
        incoming.Wait(status)
        outgoing.Wait()

    def Sendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0,
        source: int = ANY_SOURCE, recvtag: int = ANY_TAG, status: Any = None,
    ) -> None:  # fmt: skip
        stage = self._replaced(buf)
        if stage is not None:
            self.Sendrecv_replace(stage.args[0], dest, sendtag, source, recvtag, status)
            stage.end()
            return
        given = as_buffer(buf, writable=True)
        outgoing = self.Isend(as_bytes(given.pack()), dest, sendtag)
        self.Recv(buf, source, recvtag, status)
        outgoing.Wait()

    def _replaced(self, buf: Any) -> Stage | None:
        translate = self.runtime.translate
        # This call detects GPU tensors; the staged buffer is translated when it is sent.
        translate(buf)
        if not translate.devices:
            return None
        return translate.stage(self._raw, "Sendrecv_replace", (buf,))
