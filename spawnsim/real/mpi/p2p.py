"""Point-to-point calls on MPI: blocking ones are non-blocking ones with a deadline.

Knows mpi4py's point-to-point calls; how object receives find their messages is matching's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.comm.memory import as_bytes
from spawnsim.errors import RankFailed, Revoked
from spawnsim.real.mpi import words
from spawnsim.real.mpi.matching import Matching, posted, take_object
from spawnsim.real.mpi.requests import MPIRequest, fill, land
from spawnsim.real.mpi.words import failure

if TYPE_CHECKING:
    from spawnsim.real.rank.staging import Stage


class PointToPoint(Matching):
    """send, recv and their kin."""

    # ------------------------------------------------------------------------------------------------ sending
    def _send(self, raw: MPI.Request, operation: str, dest: int) -> None:
        """Complete a send that was just started."""
        home = self._home
        try:
            if not raw.Test() and not home.wait(raw.Test, home.clock.limit_s(), (operation, -1, self), dest):
                MPIRequest.of(raw, home, (operation, dest, self))  # the registry keeps the buffer
                raise self._late(operation, dest, home.clock.limit_s(), "to")
        except MPI.Exception as error:
            raise failure(
                error, self._raw, f"rank {self.rank} of {self.label}: {operation} to {dest}", dest
            ) from None
        except (Revoked, RankFailed):
            home.survival.kept.append(raw)
            raise
        home.poll()

    def _start(self, name: str, buf: Any, dest: int, tag: int) -> MPI.Request:
        self._home.tally.sent(name, buf)
        words_ = self._home.words
        if words_.devices and name[0] == "I" and (stage := words_.stage(self._raw, name, (buf,))):
            buf = stage.args[0]
        try:
            request: MPI.Request = getattr(self._raw, name)(buf, words.peer(dest) if dest < 0 else dest, tag)
        except MPI.Exception as error:
            raise failure(
                error, self._raw, f"rank {self.rank} of {self.label}: {name} to {dest}, tag {tag}"
            ) from None
        return request

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        self._send(self._start("Isend", self._home.words(buf), dest, tag), "Send", dest)

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        self._send(self._start("Issend", self._home.words(buf), dest, tag), "Ssend", dest)

    Rsend = Send

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._send(self._start("isend", obj, dest, tag), "send", dest)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._send(self._start("issend", obj, dest, tag), "ssend", dest)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> MPIRequest:
        return self._kept(self._start("Isend", self._home.words(buf), dest, tag), "Isend", dest)

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> MPIRequest:
        return self._kept(self._start("Issend", self._home.words(buf), dest, tag), "Issend", dest)

    Irsend = Isend

    def isend(self, obj: Any, dest: int, tag: int = 0) -> MPIRequest:
        return self._kept(self._start("isend", obj, dest, tag), "isend", dest)

    def issend(self, obj: Any, dest: int, tag: int = 0) -> MPIRequest:
        return self._kept(self._start("issend", obj, dest, tag), "issend", dest)

    def _kept(self, raw: MPI.Request, operation: str, peer: int, stage: Stage | None = None) -> MPIRequest:
        request = MPIRequest.of(raw, self._home, (operation, peer, self), stage)
        self._home.poll()
        return request

    # ---------------------------------------------------------------------------------------------- receiving
    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> None:
        home = self._home
        buf = home.words(buf)
        stage = home.words.stage(self._raw, "Recv", (buf,)) if home.words.devices else None
        if stage is not None:
            buf = stage.args[0]
        if self._posted:
            message, found = self._receive(source, tag, status, "Recv")
            message.Recv(buf)
            land(stage, found)
            return
        raw = self._start_receive(buf, source, tag)
        found = MPI.Status()

        def done() -> bool:
            return raw.Test(found)

        try:
            if not home.wait(done, home.clock.limit_s(), ("Recv", -1, self), source):
                self._give_up(raw, found, source)
        except MPI.Exception as error:
            raise failure(
                error, self._raw, f"rank {self.rank} of {self.label}: Recv from {source}", source
            ) from None
        except (Revoked, RankFailed):
            raw.Cancel()
            home.survival.kept.append((raw, buf))
            raise
        if stage is not None:
            land(stage, found)
        fill(status, found)

    def _give_up(self, raw: MPI.Request, found: MPI.Status, source: int) -> None:
        raw.Cancel()
        raw.Wait(found)
        if found.Is_cancelled():
            raise self._late("Recv", source, self._home.clock.limit_s(), "from")

    def _start_receive(self, buf: Any, source: int, tag: int) -> MPI.Request:
        self._home.tally.received += 1
        """Post a receive into a buffer that is translated already."""
        try:
            return self._raw.Irecv(buf, words.source(source), words.tag(tag))
        except MPI.Exception as error:
            text = f"rank {self.rank} of {self.label}: receive from {source}, tag {tag}"
            raise failure(error, self._raw, text) from None

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> MPIRequest:
        home = self._home
        buf = home.words(buf)
        stage = home.words.stage(self._raw, "Irecv", (buf,)) if home.words.devices else None
        raw = self._start_receive(buf if stage is None else stage.args[0], source, tag)
        return self._kept(raw, "Irecv", source, stage)

    def recv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        return take_object(*self._receive(source, tag, status, "recv"))

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> MPIRequest:
        pattern = words.source(source), words.tag(tag)
        with self._matching:
            request = posted(self._home, ("irecv", source, self), pattern)
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
            there = self._raw.Iprobe(words.source(source), words.tag(tag), found)
        except MPI.Exception as error:
            raise failure(error, self._raw, f"rank {self.rank} of {self.label}: probe of {source}") from None
        if there:
            fill(status, found)
        if self._home.registry:
            self._home.registry.sweep()
        return there

    iprobe = Iprobe

    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> bool:
        home = self._home
        limit_s = home.clock.limit_s()
        if not home.wait(lambda: self.Iprobe(source, tag, status), limit_s, ("Probe", -1, self), source):
            raise self._late("Probe", source, limit_s, "from")
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
            message = getattr(self._raw, name)(words.source(source), words.tag(tag), found)
        except MPI.Exception as error:
            raise failure(error, self._raw, f"rank {self.rank} of {self.label}: probe of {source}") from None
        if message is not None:
            fill(status, found)
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
        translate = self._home.words
        buf = translate(buf)
        if not translate.devices:
            return None
        return translate.stage(self._raw, "Sendrecv_replace", (buf,))

    def sendrecv(
        self, sendobj: Any, dest: int, sendtag: int = 0, recvbuf: Any = None,
        source: int = ANY_SOURCE, recvtag: int = ANY_TAG, status: Any = None,
    ) -> Any:  # fmt: skip
        outgoing = self.isend(sendobj, dest, sendtag)
        received = self.recv(recvbuf, source, recvtag, status)
        outgoing.Wait()
        return received
