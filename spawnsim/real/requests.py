"""Requests over mpi4py's: the raw request holds the buffer, the registry holds the raw request.

A dropped `Isend` handle corrupts messages on both MPIs, silently; here nothing is dropped before it is complete. Knows
mpi4py's requests; waiting and reporting are those of all real requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from spawnsim.real.pending import Pending
from spawnsim.real.words import failure, rank_back

if TYPE_CHECKING:
    from spawnsim.real.home import Home


class MPIRequest(Pending):
    """A request: mpi4py's methods, with deadlines."""

    __slots__ = ("_raw", "_status")
    _raw: MPI.Request
    _status: MPI.Status

    @classmethod
    def of(cls, raw: MPI.Request, home: Home, what: tuple[str, int, Any]) -> MPIRequest:
        """Return the request over one of mpi4py's; `what` is (operation, peer or -1, communicator)."""
        self = cls()
        self._raw, self._status = raw, MPI.Status()
        self.begin(home, what)
        return self

    def _try(self) -> bool:
        try:
            return self._raw.Test(self._status)
        except MPI.Exception as error:
            raise failure(error, self._what[2]._raw, self._text()) from None

    def _describe(self, status: Any) -> None:
        fill(status, self._status)

    def Cancel(self) -> None:
        super().Cancel()
        if not self._complete:
            self._raw.Cancel()


class MPIPersistent(MPIRequest):
    """A persistent or partitioned request: inactive until started, never null until freed."""

    __slots__ = ()

    @classmethod
    def of(cls, raw: MPI.Request, home: Home, what: tuple[str, int, Any]) -> MPIRequest:
        self = cls()
        self._raw, self._status, self._persistent = raw, MPI.Status(), True
        self._home, self._what = home, what
        return self

    def Start(self) -> None:
        """Begin one more time."""
        self._raw.Start()  # type: ignore[attr-defined]
        self.begin(self._home, self._what)

    @classmethod
    def Startall(cls, requests: list[MPIPersistent]) -> None:
        """Begin all of them."""
        for request in requests:
            request.Start()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("P"):  # Pready, Pready_range, Pready_list, Parrived
            return getattr(self._raw, name)
        raise AttributeError(name)

    def Free(self) -> None:
        super().Free()
        self._raw.Free()


def wrapped(raw: MPI.Request, home: Home, what: tuple[str, int, Any]) -> MPIRequest:
    """Return the request over one of mpi4py's of any kind."""
    return (MPIPersistent if isinstance(raw, MPI.Prequest) else MPIRequest).of(raw, home, what)


def fill(status: Any, raw: MPI.Status) -> None:
    """Copy what a receive has found into the caller's status, spawnsim's or mpi4py's."""
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
