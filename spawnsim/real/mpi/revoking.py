"""What a recovery ends: communicators, their requests and their windows, so that every call on them is `Revoked`.

A communicator that is revoked has its library's handle taken away, so that no call on it needs to look first. What was
under way keeps its memory for ever, since the library may still write there; messages that come late are dropped and
counted. Knows wrapped communicators, requests and windows by their handles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from spawnsim.errors import Revoked
from spawnsim.real.mpi.home import abort, acknowledge, over
from spawnsim.real.mpi.node import Library, Node

if TYPE_CHECKING:
    from spawnsim.real.mpi.home import Home

HARMLESS = ("tomemory", "Get_group", "Is_inter", "handle", "name")


class Gone:
    """Stands where a library's handle stood: any call raises `Revoked`; to free it does nothing."""

    def __init__(self, beneath: Any, why: str) -> None:
        self._beneath, self._why = beneath, why

    def __getattr__(self, name: str) -> Any:
        if name in HARMLESS:
            return getattr(self._beneath, name)
        raise Revoked(f"{name} {self._why}")

    def Free(self) -> None:
        """Do nothing: freeing is collective, and some are dead."""

    def Abort(self, errorcode: int = 0) -> None:
        """End all ranks at once."""
        abort(errorcode)


class Revoking:
    """One rank's revoked communicators. `dropped` counts late messages, by the world rank that sent them."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.kept: list[Any] = []  # requests, buffers and windows that the library may still touch
        self.dropped: Counter[int] = Counter()
        self._old: list[tuple[Any, tuple[int, ...]]] = []
        self._next, self._landing = 0, list[Any]()

    def __call__(self, lineage: str, why: str) -> None:
        """Revoke the communicators of a lineage ("": all there are) and what belongs to them; from any thread."""
        home = self._home
        for comm in list(home.comms):
            inside = not lineage or comm.label == lineage or comm.label.startswith(f"{lineage}/")
            if inside and not comm.revoked:
                self._take(comm, f"on {comm.label}, which was revoked: {why}")
        theirs = [window for window in home.windows if not isinstance(window, Node) and window._comm.revoked]
        for window in theirs:
            home.windows.remove(window)
            self.kept.append((window._raw, window._words))
            why_not = f"on {window.label}, whose communicator was revoked: {why}"
            for handle in ("_raw", "_words", "_tokens"):
                setattr(window, handle, Gone(getattr(window, handle), why_not))
        for request in home.registry.held():
            self._end(request)

    def _take(self, comm: Any, why: str) -> None:
        raw = comm._raw
        comm.revoked, comm._raw = why, Gone(raw, why)
        if comm._node in self._home.windows:  # giving its memory back would need the dead
            self._home.windows.remove(comm._node)
            self.kept.append(comm._node)
        comm._node = Library(comm._raw)
        for name in [name for name, value in vars(comm).items() if isinstance(value, FunctionType)]:
            del comm.__dict__[name]  # methods that were bound to the handle
        self._old.append((raw, comm.members))

    def _end(self, request: Any) -> None:
        """Let an open request of a revoked communicator end in `Revoked`; a receive is taken back."""
        operation, _, comm = request._what
        if not comm.revoked or request.advance():
            return
        with request._lock:
            if request.complete():
                return
            self.kept.append(request._raw)
            if operation.endswith(("recv", "Recv")) and request._raw != MPI.REQUEST_NULL:
                request._raw.Cancel()
            request._error, request._complete = Revoked(f"{operation} {comm.revoked}"), True

    # ---------------------------------------------------------------------------------------- late messages
    def probe_by(self, current: Callable[[int, int], bool]) -> Callable[[int, int], bool]:
        """Return a probe that takes a look at one of the old communicators as well."""

        def probe(source: int, tag: int) -> bool:
            self._drop_one()
            return current(source, tag)

        return probe

    def _drop_one(self) -> None:
        self._next = (self._next + 1) % len(self._old)
        raw, members = self._old[self._next]
        status = MPI.Status()
        try:
            message = raw.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status) if raw else None
        except MPI.Exception:
            acknowledge(raw)
            return
        if self._landing:
            self._landing = [request for request in self._landing if not over(request)]
        if message is None:
            return
        nbytes, source = status.Get_count(MPI.BYTE), members[status.Get_source()]
        self._landing.append(message.Irecv([bytearray(nbytes), MPI.BYTE]))
        self.dropped[source] += 1
        self._home.own.record.event("late_message", source=source, nbytes=nbytes)
