"""How object receives on MPI find their messages, and in which order.

They match by `Mprobe`, so a message may have any size (mpi4py's own `irecv` stops at 32 KiB). Object receives that are
posted and open stand in a list; later receives let them go first, as MPI's matching order wants it. Knows mpi4py's
probes and this communicator's list; knows no sends.
"""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from spawnsim.errors import Timeout
from spawnsim.real.mpi import words
from spawnsim.real.mpi.requests import MPIRequest, fill
from spawnsim.real.mpi.words import failure

if TYPE_CHECKING:
    from spawnsim.real.mpi.home import Home


def take_object(message: MPI.Message, status: MPI.Status) -> Any:
    """Receive a matched message and return the object that it pickles; None from PROC_NULL."""
    if message == MPI.MESSAGE_NO_PROC:
        return None
    nbytes = bytearray(status.Get_count(MPI.BYTE))
    try:
        message.Recv([nbytes, MPI.BYTE])
    except MPI.Exception as error:
        source = status.Get_source()
        raise failure(error, None, f"receive of an object from rank {source}", source) from None
    return MPI.pickle.loads(nbytes)


class Posted(MPIRequest):
    """An object receive that is open: completes by probing, in posting order."""

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
        """Whether a message that was found for a later receive belongs to this one."""
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


def posted(home: Home, what: tuple[str, int, Any], pattern: tuple[int, int]) -> Posted:
    """Return a new object receive that is open."""
    request = Posted()
    request.pattern, request.message = pattern, None
    request._raw, request._status = MPI.REQUEST_NULL, MPI.Status()
    request.begin(home, what)
    return request


class Matching:
    """The receiving half of a communicator: which message belongs to which receive."""

    _raw: MPI.Intracomm
    _home: Home
    label: str
    rank: int

    def _open_matching(self) -> None:
        self._posted: list[Posted] = []
        self._matching = RLock()
        self._home.comms = [*(other for other in self._home.comms if other._raw), self]

    def _find(self, pattern: tuple[int, int], status: MPI.Status) -> MPI.Message | None:
        """Return the next message for a receive that starts now, once earlier open receives have had theirs."""
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
            raise failure(error, self._raw, f"rank {self.rank} of {self.label}: receive") from None

    def _serve_posted(self) -> None:
        """Give every open object receive its message, in the order in which they were posted."""
        status = MPI.Status()
        for waiting in list(self._posted):
            found = self._improbe(waiting.pattern, status)
            if found is not None:
                self._give(waiting, found, status)

    def _give(self, waiting: Posted, message: Any, status: MPI.Status) -> None:
        waiting.message = message
        waiting._status = MPI.Status(status)
        self._posted.remove(waiting)
        tally = self._home.tally
        tally.received += 1
        tally.nbytes += status.Get_count(MPI.BYTE)

    def _receive(self, source: int, tag: int, status: Any, operation: str) -> tuple[MPI.Message, MPI.Status]:
        """Return the matched message of a blocking receive, and what is known of it."""
        pattern, found = (words.source(source), words.tag(tag)), MPI.Status()
        message = self._find(pattern, found)
        if message is None:
            message = self._await(pattern, found, (operation, source))
        fill(status, found)
        tally = self._home.tally
        tally.received += 1
        if operation == "recv":
            tally.nbytes += found.Get_count(MPI.BYTE)
        return message, found

    def _await(self, pattern: tuple[int, int], found: MPI.Status, what: tuple[str, int]) -> Any:
        home, got = self._home, []

        def look() -> bool:
            message = self._find(pattern, found)
            if message is not None:
                got.append(message)
            return message is not None

        limit_s = home.clock.limit_s()
        if not home.wait(look, limit_s, (what[0], -1, self), what[1]):
            raise self._late(what[0], what[1], limit_s, "from")
        return got[0]

    def _late(self, operation: str, peer: int, limit_s: float, way: str) -> Timeout:
        who = f"{way} rank {peer}" if peer >= 0 else "from any rank"
        text = f"rank {self.rank} of {self.label}: {operation} {who} met its deadline of {limit_s:g} s"
        return Timeout(
            [peer] if peer >= 0 else [], operation, -1, f"{text} at {self._home.clock.now():.3f} s"
        )
